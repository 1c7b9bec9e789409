"""A run session: an engine, its fleet, its checkpoints and its folder, driven round by round.

The local backend drives one in this process, the Ray backend one inside the server actor. Everything that goes to
the run folder goes through here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsweep.driver.caveats import fault_of_model
from fedsweep.driver.messages import MessageQueue, Messages
from fedsweep.driver.observers import Observer
from fedsweep.driver.outcome import figures_of, played_as, remarks_on
from fedsweep.engine.ahead.spending import decisions_tree
from fedsweep.engine.engine import Engine
from fedsweep.engine.state import RunState
from fedsweep.errors import ClientJobError, MemoryLost, RunError
from fedsweep.experiment.checks import check_world
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import Fleet
from fedsweep.records import RoundRecord
from fedsweep.runs.checkpoints.checkpoint import CheckpointStore
from fedsweep.runs.checkpoints.earlier import read_earlier
from fedsweep.runs.component_pictures import write_pictures
from fedsweep.runs.folder_lock import FolderGuard
from fedsweep.runs.run_folder import CLIENTS, RunFolder
from fedsweep.runs.tables.clients import clients_table
from fedsweep.runs.tables.per_client import write_client_tables
from fedsweep.trees import constants_sha256
from fedsweep.world.replay import Pool, ScenarioTrace

# rounds.parquet is rewritten at most this often between checkpoints.
_WRITE_EVERY_S = 5.0
# And tables of each client in each round when there are so many times as many rounds as when they were last written.
_GROWTH = 1.25

FleetFactory = Callable[[Callable[[str], None]], Fleet]


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """Where a session writes and how often.

    Attributes:
        folder: The run folder; exists.
        checkpoint_every: Rounds between checkpoints.
        checkpoint_keep: Newest checkpoints that stay.
        facts: Versions, git commit and the like for ``result.json``.
        umask: Permissions that the run's files must not have, as for the user's other files.
    """

    folder: Path
    checkpoint_every: int
    checkpoint_keep: int
    facts: Mapping[str, Any]
    umask: int = 0o077


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A session as it begins.

    Attributes:
        records: Rounds that a checkpoint brought.
        messages: Sentences for the user.
    """

    records: tuple[RoundRecord, ...]
    messages: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Step:
    """The outcome of a call of :meth:`RunSession.step`.

    Attributes:
        record: The round's record; None where a limit ended the run before it.
        stopped_by: Why the run has ended; None where it goes on.
        messages: Sentences for the user.
        checkpointed: A checkpoint was written.
    """

    record: RoundRecord | None
    stopped_by: str | None
    messages: tuple[str, ...] = ()
    checkpointed: bool = False


class RunSession:
    """Drives one run.

    Args:
        experiment: The experiment.
        make_fleet: Makes the fleet; gets a function for sentences to the user.
        settings: Where and how often to write.
    """

    def __init__(self, experiment: Experiment, make_fleet: FleetFactory, settings: SessionSettings) -> None:
        self._experiment, self._settings = experiment, settings
        self._messages = MessageQueue()
        self._folder = RunFolder(settings.folder)
        self._store = CheckpointStore(
            settings.folder,
            keep=settings.checkpoint_keep,
            config_hash=experiment.config_hash,
            earlier=read_earlier(settings.folder),
        )
        self._fleet = make_fleet(self._messages.message)
        self._engine = Engine(
            experiment,
            self._fleet,
            on_partial=self._save_partial,
            on_repair=self._messages.message,
            on_working=self._messages.progress,
        )
        self._state: RunState | None = None
        self._stopped_by: str | None = None
        self._written = 0.0
        self._tabled: tuple[RoundRecord, ...] | None = None
        self._reported = self._detailed = 0
        self._went_back = self._saved_round = -1
        world = experiment.world
        pool: Pool = "partition" if world.drift is None else world.drift.pool
        self._trace = ScenarioTrace(num_clients=len(world.profiles), num_classes=world.data.num_classes, pool=pool)
        self._guard = FolderGuard(settings.folder)
        self._is_over = False

    # -- life ----------------------------------------------------------------------------------------------------

    def listen(self, observers: Sequence[Observer]) -> None:
        """Let messages be heard at once from now on, in the middle of a round too, and no step carries any."""
        self._messages.listen(observers)

    def messages(self) -> Messages:
        """Take the messages since the last call or step, where nobody listens. Safe to call from another thread."""
        return self._messages.take()

    def open(self, *, resume: bool) -> Opened:
        """Begin, or go on from the newest valid checkpoint where there is one to be looked for."""
        check_world(self._engine.experiment)
        start = None
        if resume:
            newest = self._store.newest(keep_handle=self._fleet.keep)
            for text in newest.skipped:
                self._messages.message(text)
            if newest.state is not None:
                start = self._engine.as_planned(newest.state)
                self._engine.notes += start.notes
                self._saved_round = start.round
                self._messages.message(f"going on after round {start.round}")
            else:
                self._messages.message("no valid checkpoint: starting anew from config.yaml")
        if start is None:
            # Only now: the exchange before round 1 asks every client, and a checkpoint has what came of it.
            start = self._engine.start()
        self._state = start
        self._reported = start.round
        if not (self._experiment.world.is_drawn or (start.round and (self._settings.folder / CLIENTS).is_file())):
            self._folder.write_table(CLIENTS, clients_table(self._experiment.world.profiles, self._budget_values()))
        # Last: all before it was done while client actors start.
        self._fleet.ready()
        return Opened(records=start.records, messages=self._taken_messages())

    def step(self) -> Step:
        """Play one round.

        Raises:
            ClientJobError: A client's work failed.
        """
        state = self._known_state()
        self._stopped_by = self._engine.finished_by(state)
        if self._stopped_by is not None:
            return Step(record=None, stopped_by=self._stopped_by, messages=self._taken_messages())
        try:
            state, self._stopped_by = self._engine.advance(state)
            if self._stopped_by is not None:
                return Step(record=None, stopped_by=self._stopped_by, messages=self._taken_messages())
            self._stopped_by = self._engine.finished_by(state)
            # The last round is saved with the results.
            due = state.round % self._settings.checkpoint_every == 0 and self._stopped_by is None
            self._keep(state, checkpoint=due)
        except MemoryLost as lost:
            return self._go_back(lost)
        except ClientJobError as error:
            if (fault := fault_of_model(error, self._experiment, state)) is None:
                raise
            raise fault from error
        # After going back, rounds are played again to the same rows, which observers have had.
        record = state.records[-1] if state.round > self._reported else None
        self._reported = max(self._reported, state.round)
        return Step(record=record, stopped_by=self._stopped_by, messages=self._taken_messages(), checkpointed=due)

    def _keep(self, state: RunState, *, checkpoint: bool) -> None:
        """Write that the run is now so far; a run that was ended meanwhile stays as it was written then."""
        with self._guard.writing():
            if self._is_over:
                return
            self._state = state
            self._store.let_go(state.memories)
            self._write_pictures(state)
            if checkpoint:
                self._save_state(state)
            elif time.monotonic() - self._written > _WRITE_EVERY_S:
                self._write_rounds(state)

    def _go_back(self, lost: MemoryLost) -> Step:
        """Begin again from the newest checkpoint; rounds that were reported already are not reported again."""
        # Twice from the same round: what is lost would be lost again, and the run never get on.
        if self._went_back == self._reported:
            raise lost
        self._went_back = self._reported
        self._fleet.repair()
        newest = self._store.newest(keep_handle=self._fleet.keep)
        self._state = self._engine.start() if newest.state is None else self._engine.as_planned(newest.state)
        self._saved_round = self._state.round  # later ones are damaged, and are written anew
        self._messages.message(f"{lost}: going back to the checkpoint of round {self._state.round}")
        for text in newest.skipped:
            self._messages.message(text)
        return Step(record=None, stopped_by=None, messages=self._taken_messages())

    def save(self) -> int:
        """Write a checkpoint of the last finished round; returns its number. Safe to call from another thread."""
        with self._guard.writing():
            state = self._state
            if state is None:
                return 0
            self._save_state(state)
            return state.round

    def _save_state(self, state: RunState) -> None:
        # Whoever asks for it often, by signals or from Tune, has the same round written once.
        if state.round and state.round != self._saved_round:
            self._store.save(state, fetch=self._fleet.fetch)
            self._saved_round = state.round
            self._write_rounds(state)
            self._write_details(state)

    def _write_details(self, state: RunState) -> None:
        """Replace the tables that have a row for each client and round, of a long run ever more seldom.

        They are written as a whole; at the end they always are.
        """
        if state.round >= _GROWTH * self._detailed:
            self._detailed = state.round
            write_client_tables(self._folder, self._experiment, state)
            self._write_scenario(state.records)
            if state.decisions:
                self._folder.write_plan(decisions_tree(self._experiment, state))

    def _save_partial(self, state: RunState) -> None:
        with self._guard.writing():
            if self._is_over:
                return
            self._store.save(state, fetch=self._fleet.fetch)
            self._saved_round = state.round  # or an interrupt would save the round again, without the partial work
            self._write_rounds(state)

    def close(self) -> None:
        """End the fleet."""
        self._fleet.close()

    # -- results -------------------------------------------------------------------------------------------------

    def finish(self, status: str, reason: str | None = None, stopped_by: str | None = None) -> dict[str, Any]:
        """Write the results and return what ``result.json`` holds.

        Args:
            status: ``"finished"``, ``"failed"`` or ``"killed"``.
            reason: Why it failed.
            stopped_by: Who ended it from outside.
        """
        with self._guard.writing():
            self._is_over, self._stopped_by = True, stopped_by or self._stopped_by
            return self._write_end(status, reason)

    def _write_end(self, status: str, reason: str | None) -> dict[str, Any]:
        state = self._state
        if state is None:
            early = {"status": status, "reason": reason, "rounds": 0, **self._settings.facts}
            self._folder.write_result(early)
            return early
        self._write_rounds(state)
        self._detailed = 0
        self._write_details(state)
        if status != "failed":
            # Also where the run was killed: it may have gone on by a round since it was asked to save.
            self._save_state(state)
        sha256 = None
        if status == "finished":
            views = self._engine.layout.views(state.vector)
            # Riders belong to the optimiser: a model that is read back, or compared by its hash, has none.
            own = {k: v.clone() for k, v in views.items() if not k.startswith("optimizer.")}
            sha256 = self._folder.write_model(own, base=constants_sha256(self._experiment.template))
        facts = self._settings.facts
        result = {
            "status": status,
            "reason": reason,
            "stopped_by": self._stopped_by,
            **figures_of(self._engine, state, self._settings.folder),
            "model_sha256": sha256,
            "remarks": remarks_on(self._experiment, state, facts) if status == "finished" else [],
            **played_as(self._engine, state),
            **facts,
        }
        self._folder.write_result(result)
        return result

    def _write_rounds(self, state: RunState) -> None:
        if state.records is not self._tabled:
            self._folder.write_rounds(state.records)
            self._written, self._tabled = time.monotonic(), state.records

    def _write_scenario(self, records: tuple[RoundRecord, ...]) -> None:
        """Write which clients were there and with which classes, for other runs to replay."""
        world = self._experiment.world
        if (world.drift is None and world.availability is None) or world.asks_singly:
            return
        everybody = tuple(range(len(world.profiles)))
        for record in records[self._trace.num_rounds :]:
            present = everybody if record.present is None else record.present
            self._trace = self._trace.with_round(present, self._experiment.classes(record.round))
        self._folder.write_scenario(self._trace.to_json())

    def _write_pictures(self, state: RunState) -> None:
        for seam, component in self._experiment.method.server_components:
            write_pictures(self._settings.folder, component.report(state.components[seam]).pictures)

    def _budget_values(self) -> list[float] | None:
        """Return clients' budgets, in values, at the frequencies of the round that comes; the table keeps round 1's."""
        budgets = self._experiment.world.budgets
        if budgets is None:
            return None
        context = self._engine.planner.with_cohort(self._known_state())
        high, low = self._experiment.method.pacing.costs(context)
        limits: list[float] = budgets.client_budgets(high, low).tolist()
        return limits

    # -- small things --------------------------------------------------------------------------------------------

    def _known_state(self) -> RunState:
        if self._state is None:
            raise RunError("a session is opened before it is used")
        return self._state

    def _taken_messages(self) -> tuple[str, ...]:
        return self._messages.take().sentences
