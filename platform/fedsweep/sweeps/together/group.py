"""Several trials in one process, round by round: each is a run like any other, in a folder of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fedsweep.client.lanes.together import Together
from fedsweep.driver.plan import Plan
from fedsweep.driver.run import one_thread, session_settings
from fedsweep.driver.session import RunSession
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.runs.sources import Sources
from fedsweep.sweeps.trial import FINISHED, MESSAGES, ActiveTrial, DatasetLookup, TrialSpec
from fedsweep.trees import constants_sha256

if TYPE_CHECKING:
    from fedsweep.config.schema import Config

# Each trial's own report, by its folder's name; and in it why it failed.
TOGETHER, REASON = "together", "reason"


class TrialGroup:
    """Trials that are played side by side; towards Tune one trial, and one that fails ends alone.

    Args:
        specs: The trials; for Tune the first stands for all.
        find_dataset: See :class:`~fedsweep.sweeps.trial.ActiveTrial`.
        sources: Likewise.
    """

    def __init__(
        self,
        specs: Sequence[TrialSpec],
        find_dataset: DatasetLookup = lambda config: None,
        sources: Sources = MappingProxyType({}),
    ) -> None:
        self._together, self._every_s = Together(), specs[0].report_every_s
        # They are reported together.
        self._trials = [
            ActiveTrial(replace(spec, report_every_s=0.0), find_dataset, self._session, sources) for spec in specs
        ]
        self._playing = list(self._trials)

    @property
    def folder(self) -> Path:
        """The first trial's run folder."""
        return self._trials[0].folder

    @property
    def config(self) -> Config | None:
        """The first trial's configuration, see ``ActiveTrial``."""
        return self._trials[0].config

    def last_report(self) -> dict[str, Any]:
        """Return the first trial's newest report once more."""
        return self._trials[0].last_report()

    def step(self) -> dict[str, Any]:
        """Play a round of each trial, or several short ones; ``done`` when the last trial has ended."""
        until, reports = time.monotonic() + self._every_s, dict[str, dict[str, Any]]()
        with one_thread():
            while True:
                for name, report in self._round():
                    messages = [*reports.get(name, {}).get(MESSAGES, ()), *report.get(MESSAGES, ())]
                    reports[name] = {**report, **({MESSAGES: messages} if messages else {})}
                if not self._playing or time.monotonic() >= until:
                    break
        is_over = not self._playing
        return {**self.last_report(), "done": is_over, FINISHED: is_over, TOGETHER: reports}

    def _round(self) -> Iterator[tuple[str, dict[str, Any]]]:
        playing = self._playing
        outcomes: list[dict[str, Any] | Exception] = self._together.play([trial.step for trial in playing])
        self._playing = []
        for trial, outcome in zip(playing, outcomes, strict=True):
            if isinstance(outcome, Exception):
                reason = f"{type(outcome).__name__}: {outcome}"
                yield trial.folder.name, {**trial.last_report(), REASON: reason}
                continue
            if not outcome["done"]:
                self._playing.append(trial)
            yield trial.folder.name, outcome

    def save(self) -> None:
        """Write a checkpoint of each trial's last finished round."""
        for trial in self._playing:
            trial.save()

    def end_early(self) -> None:
        """Put the trials away that have not ended, to go on another day."""
        with contextlib.ExitStack() as stack:
            for trial in self._playing:
                stack.callback(trial.end_early)  # each, also where one of them can't be

    @contextlib.contextmanager
    def _session(self, plan: Plan, folder: Path) -> Iterator[RunSession]:
        experiment = plan.experiment
        # Constants are not stepped: a lane that was shown another trial's would learn something else.
        network = (repr(experiment.template), constants_sha256(experiment.template))
        make_lanes = self._together.lanes(network)
        settings = session_settings(plan, folder)
        session = RunSession(experiment, lambda warn: LocalFleet(experiment, make_lanes), settings)
        with contextlib.closing(session):
            yield session


def reports_of(name: str, result: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return what a report says of each trial, by its folder's name; ``name`` is that of one that is alone."""
    return result.get(TOGETHER) or {name: result}
