"""The driver's work as trials come and go: it tells the tracking store and the audience, and notes ends."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune

from fedsweep.driver.observers import RunInfo, method_name, run_tags
from fedsweep.errors import OutputError
from fedsweep.runs.files import atomic_write
from fedsweep.runs.folder_lock import sole_writer
from fedsweep.runs.run_folder import CONFIG, RunFolder
from fedsweep.sweeps.prepared_trial import PreparedTrial
from fedsweep.sweeps.space import TRIAL
from fedsweep.sweeps.together.group import REASON, reports_of
from fedsweep.sweeps.trainable import FATAL_MARK, SPEC, place_of
from fedsweep.sweeps.trial import ENDED_BY_SCHEDULER, FINISHED, MESSAGES, OTHERS
from fedsweep.tracking.mlflow_sweep import SweepTracker
from fedsweep.tracking.terminal.sweep_progress import SweepProgress

if TYPE_CHECKING:
    from ray.tune.experiment import Trial as TuneTrial


# Ray tells of a process that it ends for want of memory before that process is gone.
_PATIENCE_S = 5.0
# Tune's file of a trial's failures.
_FAILURE = re.compile(r"^Failure # \d+ .*$", re.MULTILINE)
_MODULE = re.compile(r"^[\w.]+\.(?=\w+: )")
_NODE_DIED = ("its node has died", "NodeDiedError")
_NO_MEMORY = "the node running low on memory"
_PROCESS_DIED = ("The actor died", "The actor is dead", "is unavailable: ", "ActorDiedError", "ActorUnavailableError")


def tracked(entry: PreparedTrial, *, folder: Any, sweep: str) -> RunInfo:
    """Return a trial as the tracking store shall know it."""
    config = entry.config
    tags = {
        **run_tags(config, method=method_name(config)),
        "fedsweep.setting": entry.trial.label,
        "fedsweep.kind": "trial",
        "fedsweep.sweep": sweep,
        "fedsweep.trial": str(entry.trial.number),
    }
    seed = entry.trial.seed
    return RunInfo(
        name=config.name if seed is None else f"{config.name} seed={seed}",
        folder=folder.trial_path(entry.trial),
        config=config.flat(),
        tags=tags,
        planned_rounds=config.training.rounds,
        targets=config.evaluation.targets,
    )


class KeptHere:
    """Leaves a plain object behind when it is pickled, and is itself when it is copied."""

    def __reduce__(self) -> tuple[Any, ...]:
        return object, ()

    def __copy__(self) -> KeptHere:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptHere:
        return self


class Watcher(KeptHere, tune.Callback):
    """Follows the trials.

    Args:
        progress: The audience.
        tracker: The tracking store; None: there is none.
        names: Where a scheduler copies configurations from trial to trial: each trial's folder, in their order.
    """

    def __init__(self, progress: SweepProgress, tracker: SweepTracker | None, *, names: Sequence[str] = ()) -> None:
        self._progress, self._tracker, self._names = progress, tracker, names
        self._known: dict[str, RunInfo] = {}

    def add(self, trial: RunInfo) -> None:
        """Note that a trial may come."""
        self._known[trial.folder.name] = trial

    # Tune calls these with keywords; ``info`` swallows those that are of no use here.

    def on_trial_start(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        for name in self._names_of(trial):
            self._progress.began(name)

    def on_trial_result(
        self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, result: dict[str, Any], **info: Any
    ) -> None:
        if result.get(FATAL_MARK):
            trial.max_failures = 0  # with the same seed it would fail in the same way
            return
        names = self._names_of(trial)
        for name, own in reports_of(names[0], result).items():
            for text in own.get(MESSAGES, ()):
                self._progress.told(name, text)
            self._progress.round_done(name, own)
            run = self._known.get(name)
            if self._tracker is not None and run is not None:
                self._tracker.round_done(run)
            if len(names) > 1 and (REASON in own or own[FINISHED]):
                # Tune hears of the end of all alone.
                self._ended(name, "failed" if REASON in own else "finished", own.get(REASON))

    def on_trial_recover(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        for name in self._names_of(trial):
            self._progress.retried(name, cause_of(trial))

    def on_trial_error(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        cause = cause_of(trial)
        for name in self._names_of(trial):
            run = self._known.get(name)
            self._ended(name, "failed" if run is None else _note_failure(run, cause), cause)

    def on_trial_complete(self, iteration: int, trials: list[TuneTrial], trial: TuneTrial, **info: Any) -> None:
        """See Ray Tune; a trial that the scheduler ends hears of it only after this."""
        names = self._names_of(trial)
        if len(names) > 1:
            return  # each has ended by itself
        name, run = names[0], self._known.get(names[0])
        if not trial.last_result.get(FINISHED):
            if run is not None and run.folder.is_dir():
                atomic_write(run.folder / ENDED_BY_SCHEDULER, b"")
            self._progress.ended(name, "finished", "ended early by the scheduler")
            return  # its folder is complete only when its process has put it away
        self._ended(name, "finished", None)

    def _ended(self, name: str, status: str, remark: str | None) -> None:
        self._progress.ended(name, status, remark)
        run = self._known.get(name)
        if self._tracker is not None and run is not None:
            self._tracker.trial_done(run)

    def _names_of(self, trial: TuneTrial) -> list[str]:
        """List a trial's folder, and those of the trials that are played with it."""
        if self._names:
            return [self._names[place_of(trial.trial_id)]]
        own = trial.config[TRIAL]
        return [str(spec.folder.name) for spec in (own[SPEC], *own.get(OTHERS, ()))]


def cause_of(trial: TuneTrial) -> str:
    """Return the cause of a trial's last failure, in one line: its process's own, or Ray's on a lost process."""
    path = Path(trial.error_file) if trial.error_file else None
    return cause_in(path.read_text(errors="replace") if path is not None and path.is_file() else "")


def cause_in(text: str) -> str:
    """Return the same from Tune's list of a trial's failures, a paragraph each."""
    last = _FAILURE.split(text)[-1]
    if any(words in last for words in _NODE_DIED):
        return "the trial's node died"
    if _NO_MEMORY in last:
        return "its node ran low on memory, for which Ray ended the trial's process"
    if any(words in last for words in _PROCESS_DIED):
        return "the trial's process died"
    lines = [line.strip() for line in last.splitlines() if line.strip()]
    return _MODULE.sub("", lines[-1]) if lines else "unknown; Ray's logs may say more"


def _note_failure(trial: RunInfo, cause: str) -> str:
    """Write how the trial ended where its process died and could not; returns that: it may have finished before."""
    run = RunFolder(trial.folder)
    result: Mapping[str, Any] = {}
    with contextlib.suppress(OutputError), sole_writer(trial.folder, patience_s=_PATIENCE_S):
        with contextlib.suppress(ValueError):
            result = run.result_if_any()
        if result.get("status") not in ("failed", "finished") and (trial.folder / CONFIG).is_file():
            rounds = len(run.read_rounds()) if run.has_rounds() else 0
            run.write_result({"status": "failed", "reason": cause, "rounds": rounds, "ended_s": int(time.time())})
    return "finished" if result.get("status") == "finished" else "failed"
