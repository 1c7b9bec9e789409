"""The engine: from the run after one round to the run after the next.

It knows seams, never methods. A round is a pure function of the run's state: when a worker is lost, or the process
is, the round is begun anew from the same state and comes to the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from fedsweep.client.messages import Tally
from fedsweep.components.probes import Probe
from fedsweep.engine.aggregation import Aggregator
from fedsweep.engine.cost import CostModel
from fedsweep.engine.evaluator import Evaluator
from fedsweep.engine.ledger import BYTES_PER_VALUE, Ledger
from fedsweep.engine.plan import Planner, RoundPlan
from fedsweep.engine.round import Played, Player
from fedsweep.engine.row import Recorder
from fedsweep.engine.state import RunState
from fedsweep.errors import RunError, WorkerLost
from fedsweep.experiment.checks import check_world
from fedsweep.experiment.experiment import Experiment, server_context
from fedsweep.fleet.fleet import Fleet
from fedsweep.records import RoundRecord, State
from fedsweep.streams import stream
from fedsweep.trees import load_vector

# A round is begun at most this often; an actor that dies every time has a cause that repairing will not cure.
_MAX_ATTEMPTS = 5


class Engine:
    """Runs an experiment on a fleet.

    Args:
        experiment: The experiment.
        fleet: Where the clients are.
        on_partial: Called with a state that holds a refinement's unfinished work, to be checkpointed.
        on_repair: Called with a sentence when lost workers are replaced.
        on_working: Called with lines on how far a component's long work is.
    """

    def __init__(
        self,
        experiment: Experiment,
        fleet: Fleet,
        *,
        on_partial: Callable[[RunState], None] = lambda state: None,
        on_repair: Callable[[str], None] = lambda message: None,
        on_working: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.experiment, self.fleet = experiment, fleet
        self._on_partial, self._on_repair = on_partial, on_repair
        self.layout = experiment.layout
        self._model = experiment.new_model().to(experiment.server_device)
        self.costs = CostModel(experiment)
        self.planner = Planner(experiment, self.layout, self.costs)
        aggregator = Aggregator(
            experiment.method,
            self.layout,
            model=experiment.new_model(),
            stream_for=lambda seam, round, index: stream(experiment.seed, seam, round, -1, index),
            message=on_repair,
            working=on_working,
            device=experiment.server_device,
        )
        self._player = Player(experiment, fleet, aggregator, self.layout)
        self._recorder = Recorder(experiment, self.planner, self.costs, self.layout)
        world = experiment.world
        self._test = self._evaluator(world.test_images, world.test_labels)
        self._validation = None if world.validation is None else self._evaluator(*world.validation)

    def _evaluator(self, images: np.ndarray, labels: np.ndarray) -> Evaluator:
        return Evaluator(
            images,
            labels,
            transform=self.experiment.world.data.transform,
            batch_size=self.experiment.evaluation_batch,
            device=self.experiment.server_device,
            dtype=self.layout.dtype,
        )

    # -- the start -----------------------------------------------------------------------------------------------

    def start(self) -> RunState:
        """The run before round 1: initial model, components' states, one-off exchange."""
        vector = self.experiment.initial_vector.clone()
        components: dict[str, State] = {}
        ledger = Ledger()
        for seam, component in self.experiment.method.server_components():
            context = server_context(self.experiment, seam)
            state = self.experiment.initial_states[seam]
            probes = component.setup(state, context)
            if probes:
                state = component.setup_done(state, self._ask(probes, vector, ledger), context)
            components[seam] = state
        self._show_start(vector, components)
        self.setup_bytes = ledger.bytes("up") + ledger.bytes("down")
        has_devices = self.experiment.world.profiles[0].device is not None
        return RunState(vector=vector, components=components, clock=0.0 if has_devices else None)

    def _show_start(self, vector: torch.Tensor, components: dict[str, State]) -> None:
        """Let components that ask for it see how good the initial model is."""
        asking = {seam: c for seam, c in self.experiment.method.server_components() if c.observes_start}
        if asking:
            played = Played(vector=vector, version=0, components=components)
            record = self._tested(self._recorder.start(), played)
            for seam, component in asking.items():
                components[seam] = component.observe(components[seam], record)

    def _ask(
        self, probes: tuple[Probe, ...], vector: torch.Tensor, ledger: Ledger
    ) -> Mapping[int, dict[str, torch.Tensor]]:
        clients = [profile.client for profile in self.experiment.world.profiles]
        answers = self.fleet.measure(clients, probes, vector.numpy())
        sent = {"params": self.layout.num_params, "buffers": self.layout.num_buffers}
        for client, arrays in answers.items():
            if any(probe.reads_model for probe in probes):
                ledger.model(client, "down", sent)
            ledger.payload(client, "up", arrays)
        return {k: {n: torch.from_numpy(np.array(a)) for n, a in arrays.items()} for k, arrays in answers.items()}

    @property
    def registration_bytes(self) -> int:
        """Bytes that clients send once: number of samples, label counts where a component reads them."""
        per_client = 1
        if "label_counts" in self.experiment.method.registration:
            per_client += self.experiment.world.data.num_classes
        return BYTES_PER_VALUE * per_client * len(self.experiment.world.profiles)

    # -- a round -------------------------------------------------------------------------------------------------

    def finished_by(self, state: RunState) -> str | None:
        """Why the run ends with this state: ``"rounds"``, a limit's name, or None where it goes on."""
        stop = self.experiment.training.stop
        last = state.records[-1].test_accuracy if state.records else None
        if stop.target_accuracy is not None and last is not None and last >= stop.target_accuracy:
            return "target_accuracy"
        if stop.wall_time_s is not None and state.records and state.wall_time_s >= stop.wall_time_s:
            return "wall_time_s"
        if state.round >= self.experiment.training.rounds:
            return "rounds"
        return None

    def advance(self, state: RunState) -> tuple[RunState, str | None]:
        """One round.

        Returns:
            The state after it; or the same state and the name of the limit that the round would pass.

        Raises:
            ClientJobError: A client's work failed.
        """
        began = time.perf_counter()
        plan = self.planner.plan(state)
        limit = self._would_pass(state, BYTES_PER_VALUE * plan.values + plan.index_bytes, plan.clock)
        if limit is not None:
            return state, limit
        played = self._played(plan, state)
        moved = played.ledger.bytes("up") + played.ledger.bytes("down")
        limit = self._would_pass(state, moved, plan.clock)
        if limit is not None:
            return state, limit
        wall = time.perf_counter() - began
        return self._recorded(plan, state, played, wall), None

    def _would_pass(self, state: RunState, more_bytes: int, clock: float | None) -> str | None:
        stop = self.experiment.training.stop
        if stop.total_bytes is not None and state.total_bytes + more_bytes > stop.total_bytes:
            return "total_bytes"
        if stop.sim_time_s is not None and clock is not None and clock > stop.sim_time_s:
            return "sim_time_s"
        return None

    def _played(self, plan: RoundPlan, state: RunState) -> Played:
        for attempt in range(_MAX_ATTEMPTS):
            try:
                return self._player.play(
                    plan,
                    state,
                    attempt=attempt,
                    keep=lambda seam, tree: self._on_partial(replace(state, partial={**state.partial, seam: tree})),
                )
            except WorkerLost as lost:
                self._on_repair(f"round {plan.context.round}: {lost}; replacing it and going on")
                self.fleet.repair()
        raise RunError(f"round {plan.context.round} was begun {_MAX_ATTEMPTS} times and lost a client actor each time")

    def _recorded(self, plan: RoundPlan, state: RunState, played: Played, wall: float) -> RunState:
        record = self._recorder.record(plan, state, played, wall_time_s=wall)
        record = self._tested(record, played)
        for seam, component in self.experiment.method.server_components():
            played.components[seam] = component.observe(played.components[seam], record)
        held = self._held(state, played)
        versions = {tally.anchor_version for tally in held.values()}
        anchors = {**state.anchors, **played.anchors}
        return RunState(
            round=plan.context.round,
            version=played.version,
            vector=played.vector,
            components=played.components,
            memories={k: m for k, m in state.memories.items() if k not in played.totals} | played.memories,
            held=held,
            anchors={version: anchors[version] for version in sorted(versions) if version in anchors},
            accuracies=self._accuracies(state, played),
            clock=plan.clock,
            total_bytes=state.total_bytes + record.bytes_up + record.bytes_down,
            wall_time_s=state.wall_time_s + record.wall_time_s + record.eval_time_s,
            records=(*state.records, record),
        )

    def _held(self, state: RunState, played: Played) -> dict[int, Tally]:
        held = {k: t for k, t in state.held.items() if k not in played.attended and k not in played.totals}
        held |= {k: total.held for k, total in played.totals.items() if total.held is not None}
        return dict(sorted(held.items()))

    def _accuracies(self, state: RunState, played: Played) -> dict[int, tuple[float, ...]]:
        kept = dict(state.accuracies)
        for client, total in played.totals.items():
            if total.pass_accuracies:
                kept[client] = (*kept.get(client, ()), *total.pass_accuracies)[-3:]
        return dict(sorted(kept.items()))

    def _tested(self, record: RoundRecord, played: Played) -> RoundRecord:
        due = record.round % self.experiment.evaluate_every == 0 or record.round == self.experiment.training.rounds
        if not due:
            return record
        began = time.perf_counter()
        load_vector(self._model, self.layout, played.vector)
        evaluation, state = self.experiment.method.evaluation, played.components["evaluation"]
        updates = [Aggregator.shown(u, needs=evaluation.needs_updates) for u in played.updates]
        accuracy, loss = self._test.test(evaluation, state, self._model, updates)
        validation = None
        if self._validation is not None:
            validation, _ = self._validation.test(evaluation, state, self._model, updates)
        return replace(
            record,
            test_accuracy=accuracy,
            test_loss=loss,
            validation_accuracy=validation,
            eval_time_s=time.perf_counter() - began,
        )

    def check(self) -> None:
        """What can only be known with model and world together; wrong input is a ConfigError before round 1."""
        check_world(self.experiment)
