"""Run a sweep on Ray Tune, from the plan in its folder; a resumed one goes on from the trials' own checkpoints.

Tune's own way of resuming is not used: it unpickles its state, which lags behind what the run folders know.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from fedsweep.driver.run import present_umask
from fedsweep.fleet.ray_cluster import ray_cluster
from fedsweep.fleet.ray_internals import any_loss, uncounted_callbacks
from fedsweep.fleet.ray_quick_start import plain_trials
from fedsweep.fleet.ray_watch import watched_call
from fedsweep.processes import silenced
from fedsweep.runs.facts import run_facts
from fedsweep.runs.run_folder import CONFIG, PLAN
from fedsweep.sweeps.budget.study_clock import StudyClock
from fedsweep.sweeps.fairness import world_of
from fedsweep.sweeps.prepared import PreparedSweep
from fedsweep.sweeps.prepared_trial import PreparedTrial, make_entry
from fedsweep.sweeps.resources import check_shares, largest, room_for
from fedsweep.sweeps.reuse import go_on_from
from fedsweep.sweeps.search.proposals import check_optuna
from fedsweep.sweeps.space import TRIAL, make_trial
from fedsweep.sweeps.summary import Summary, summarise, write_summary
from fedsweep.sweeps.sweep_folder import SUMMARY, TABLE, TUNE
from fedsweep.sweeps.tune_callback import KeptHere
from fedsweep.tracking.mlflow_run import is_complete
from fedsweep.tracking.mlflow_store import check_store, sqlite_path
from fedsweep.tracking.terminal.sweep_progress import SweepProgress, TrialState

if TYPE_CHECKING:
    from ray.tune import ResultGrid

    from fedsweep.driver.ray_disk import DriverDisk
    from fedsweep.sweeps.trainable import Driver
    from fedsweep.sweeps.trial import TrialSpec
    from fedsweep.sweeps.tune_callback import Watcher
    from fedsweep.tracking.mlflow_sweep import SweepTracker

# A trial whose process died, or whose disk was full, is tried so many times more.
RETRIES = 2
# As many as Tune itself has waiting of a grid's, so that a cluster grows by them.
_PENDING, _PENDING_A_CPU = 200, 1.1
_Grid = TypeVar("_Grid")
_ENVIRONMENT = {
    "RAY_AIR_NEW_OUTPUT": "0",  # the new one prints a table whatever it is told
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_WARN_THRESHOLD_S": "30",
    "TUNE_GLOBAL_CHECKPOINT_S": "inf",  # it has all trials in it, and nobody reads it
}


def run_sweep(
    prepared: PreparedSweep,
    progress: SweepProgress,
    *,
    resume: bool = False,
    overwrite: bool = False,
    dashboard: bool = False,
) -> tuple[ResultGrid, Summary]:
    """Run what is left of a sweep, then summarise all of it.

    Args:
        prepared: The sweep.
        progress: The audience.
        resume: Its folder holds the plan already.
        overwrite: Remove an earlier sweep from the folder.
        dashboard: Start Ray's dashboard on 127.0.0.1, where a cluster is started here.

    Returns:
        Ray Tune's results, one per trial, with ``metrics`` as of its last round; and what was found.

    Raises:
        InputError: The folder, the cluster or a store can't be used; nothing was written.
        ClusterLost: A process of a cluster of our own died; resumed, trials go on from their checkpoints.
        KeyboardInterrupt: It was interrupted; running trials wrote checkpoints.
    """
    config, shares = prepared.config, [entry.share for entry in prepared.samples]
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    tracker = _make_tracker(prepared)
    if config.sweep.search == "optuna":
        check_optuna()
    store = 2**29 + 3 * sum(d.train_images.nbytes + d.test_images.nbytes for d in prepared.datasets.values())
    needs = replace(largest(shares).needs, store_bytes=store)
    with (
        prepared.writing(),
        ray_cluster(config.runtime.address, needs, dashboard=dashboard, folder=prepared.folder.path) as ray,
        silenced("ray.tune", "ray.train", "ray"),  # Tune's own tables and advice, of which nothing applies here
    ):
        check_shares(watched_call(ray.nodes), shares)
        # Within the driver's side they reach a trial as references, so that it fetches what it needs.
        datasets = {key: ray.put(dataset) for key, dataset in prepared.datasets.items()}
        if config.runtime.address is not None:
            _check_nodes(prepared, datasets)
        if not resume:
            prepared.create_folder(overwrite=overwrite)
        elif _is_extended(prepared) or not (prepared.folder.path / CONFIG).is_file():  # or killed after the plan
            prepared.folder.extend(prepared.plan, config_yaml=config.to_yaml())
        with _disk_for(prepared, ray) as disk:
            side = _driver(prepared, datasets, disk)
            return _tracked(prepared, tracker, lambda: (_tune(prepared, progress, tracker, side), _conclude(prepared)))


def _is_extended(prepared: PreparedSweep) -> bool:
    """Check that the folder's plan has another section `sweep`: fewer trials, a smaller budget."""
    return prepared.folder.read_plan().config_tree.get("sweep") != prepared.plan.config_tree.get("sweep")


def _check_nodes(prepared: PreparedSweep, datasets: Mapping[str, Any]) -> None:
    """Have the nodes plan a trial of each kind, as they will: what a configuration names may not be there."""
    from fedsweep.driver.ray_nodes import check_nodes, rehearse_on_nodes
    from fedsweep.sweeps.trial import plan_trials

    samples = prepared.unlike
    check_nodes({"trials": [entry.user_config.tree() for entry in samples]}, folder=prepared.folder.path)
    trees = {f"trial {entry.trial.number}": entry.user_config.tree() for entry in samples}
    rehearse_on_nodes(plan_trials, trees, datasets)


def _disk_for(prepared: PreparedSweep, ray: Any) -> contextlib.AbstractContextManager[DriverDisk | None]:
    """Serve the sweep's folder where there are other nodes, or may come."""
    from fedsweep.driver.ray_disk import served_disk

    is_alone = prepared.config.runtime.address is None and len(ray.nodes()) == 1
    return contextlib.nullcontext() if is_alone else served_disk(prepared.folder.path)


def _conclude(prepared: PreparedSweep) -> Summary:
    """Summarise the folder as it is, and write that down."""
    left_out = prepared.left_out
    ended = [entry for entry in prepared.entries if entry not in left_out]
    trials, worlds = [entry.trial for entry in ended], [world_of(entry.config) for entry in ended]
    notes = [*prepared.notes, *_budget_notes(prepared, num_left_out=len(left_out))]
    summary = summarise(prepared.folder, trials, worlds, config=prepared.config, notes=notes)
    write_summary(prepared.folder, summary)
    return summary


def _budget_notes(prepared: PreparedSweep, *, num_left_out: int) -> list[str]:
    """Say how much of its budget the study has spent, and how many of its trials have no end for it."""
    budget = prepared.config.sweep.budget
    if budget is None:
        return []
    spent = [prepared.spent.in_words(budget)] if budget.costs else []
    if budget.hours is not None:
        spent.append(f"{prepared.clock.seconds / 3600:.3g} of {budget.hours:g} hours")
    rest = f"; {num_left_out} of {len(prepared.entries)} trials left out or put away" if num_left_out else ""
    return [f"budget: {', '.join(spent)}{rest}"]


def log_rest(prepared: PreparedSweep) -> Summary:
    """Summarise a sweep of which nothing is left to run, and log what the tracking store lacks of it."""
    with prepared.writing():
        tracker = _make_tracker(prepared)
        summary = _conclude(prepared)
        folders = [prepared.folder.path, *(prepared.folder.trial_path(entry.trial) for entry in prepared.entries)]
        # Of a server only itself knows what it still has.
        is_file = tracker is not None and sqlite_path(tracker.uri) is not None
        if tracker is None or (is_file and all(is_complete(folder, tracker.uri) for folder in folders)):
            return summary
        return _tracked(prepared, tracker, lambda: (None, summary))[1]


# -- Ray Tune ----------------------------------------------------------------------------------------------------------


def _tune(prepared: PreparedSweep, progress: SweepProgress, tracker: SweepTracker | None, side: Driver) -> ResultGrid:
    from fedsweep.sweeps.tune_callback import Watcher

    order = prepared.in_order if prepared.config.sweep.scheduler == "pbt" else []
    watcher = Watcher(progress, tracker, names=[entry.trial.folder for entry in order])
    progress.planned(prepared.total)
    for entry in prepared.entries:
        _announce(prepared, entry, watcher=watcher, progress=progress)
    interrupted, clock = threading.Event(), prepared.clock
    stop = _make_stopper(interrupted, clock)
    make = functools.partial(_make_tuner, prepared, watcher, progress=progress, stop=stop, side=side)
    # At Ctrl-C, Tune is asked to put all trials away.
    is_ours = prepared.config.runtime.address is None
    with uncounted_callbacks(), any_loss(), plain_trials() if is_ours else contextlib.nullcontext():
        try:
            grid: ResultGrid = watched_call(lambda: make().fit(), on_interrupt=interrupted.set)
        finally:
            clock.write()
    return grid


def _announce(prepared: PreparedSweep, entry: PreparedTrial, *, watcher: Watcher, progress: SweepProgress) -> None:
    from fedsweep.sweeps.tune_callback import tracked

    trial = entry.trial
    watcher.add(tracked(entry, folder=prepared.folder, sweep=prepared.config.name))
    done, rounds = prepared.folder.has_finished(trial), entry.config.training.rounds
    status = "finished" if done else "waiting"
    progress.add(
        trial.folder,
        TrialState(label=trial.label, seed=trial.seed, planned=rounds, status=status, was_there=done),
    )


def _make_tuner(
    prepared: PreparedSweep,
    watcher: Watcher,
    *,
    progress: SweepProgress,
    stop: Any,
    side: Driver,
) -> Any:
    from ray import tune
    from ray.tune.logger import JsonLoggerCallback

    from fedsweep.sweeps.schedulers import ListedTrials

    search: Any = None
    count = 1
    space: dict[str, Any] = {}
    own: list[TrialSpec] = []
    if prepared.config.sweep.proposes:
        search, count = _search(prepared, watcher, progress=progress)
    elif prepared.config.sweep.scheduler == "pbt":
        described = [prepared.describe(entry) for entry in prepared.in_order]
        space, own = {TRIAL: tune.grid_search(described)}, [one["spec"] for one in described]
    else:
        search, count = ListedTrials(prepared, _room(prepared)), len(prepared.entries)
    return tune.Tuner(
        _trainable(own, side),
        param_space=space,
        tune_config=_tune_config(prepared, search, count),
        run_config=tune.RunConfig(
            name=time.strftime("tune-%Y%m%d-%H%M%S"),
            storage_path=str(prepared.folder.path / TUNE),
            storage_filesystem=None if side.disk is None else side.disk.files(),
            failure_config=tune.FailureConfig(max_failures=RETRIES),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # trials have their own
            callbacks=[watcher, JsonLoggerCallback()],
            stop=stop,
            verbose=0,
        ),
    )


def _driver(prepared: PreparedSweep, datasets: Mapping[str, Any], disk: DriverDisk | None) -> Driver:
    """Return this side: Ray's processes start in a folder and with a umask of their own; trials are the user's."""
    from fedsweep.sweeps.trainable import Driver

    return Driver(
        umask=present_umask(),
        git_commit=run_facts()["git_commit"],
        sources=dict(prepared.sources),
        datasets=datasets,
        disk=disk,
    )


def _trainable(own: Sequence[TrialSpec], side: Driver) -> Any:
    """Make the trials' class with what they all need; Ray's dashboard and lists of processes show its own name."""
    from ray import tune

    from fedsweep.sweeps.trainable import SweepTrial

    made = tune.with_parameters(SweepTrial, specs=own, driver=side)
    made.__name__, made.__qualname__ = SweepTrial.__name__, SweepTrial.__qualname__
    return made


def _tune_config(prepared: PreparedSweep, search: Any, count: int) -> Any:
    from ray import tune

    from fedsweep.sweeps.schedulers import make_scheduler

    settings, at_once = prepared.config.sweep, None if search is None else _at_once(prepared)
    compared: dict[str, Any] = {} if len(prepared.metrics) > 1 else {"metric": settings.metric, "mode": settings.mode}
    return tune.TuneConfig(
        **compared,
        num_samples=count,
        scheduler=make_scheduler(prepared),
        search_alg=search,
        max_concurrent_trials=at_once if settings.max_concurrent == "auto" else settings.max_concurrent,
        # A trial's actors end with its placement group, so only trials without any may hand on their process.
        reuse_actors=all(not entry.share.actors for entry in prepared.samples),
        trial_dirname_creator=lambda trial: f"{trial.trial_id}",
    )


def _at_once(prepared: PreparedSweep) -> int:
    """Return how many trials Tune may have begun: it asks for a placement group for each that is not playing yet.

    Where all fit in equally often, and the cluster does not grow, none has to wait with one.
    """
    import ray

    shares = {entry.share for entry in (prepared.samples or prepared.entries)}
    if prepared.config.runtime.address is None and len(shares) == 1:
        return room_for(ray.nodes(), *shares)
    return max(_PENDING, int(_PENDING_A_CPU * ray.cluster_resources().get("CPU", 0.0)))


def _search(prepared: PreparedSweep, watcher: Watcher, *, progress: SweepProgress) -> tuple[Any, int]:
    """Make the search; return with it how many trials it still has to propose or to go on with."""
    from fedsweep.sweeps.schedulers import ProposedTrials

    config, proposals = prepared.config, prepared.make_search()

    def make(values: Mapping[str, Any]) -> PreparedTrial:
        trial = make_trial(config, len(prepared.entries) + 1, values)
        entry = make_entry(config, trial, uri=prepared.uri)
        if (below := proposals.lower(trial, [other.trial for other in prepared.entries])) is not None:
            run, target = prepared.folder.trial_path(below), prepared.folder.trial_path(trial)
            rounds = entry.config.training.rounds
            go_on_from(run, target, rounds=rounds, allow_changed_code=prepared.allow_changed_code)
        prepared.add(entry)
        prepared.folder.write_plan(prepared.plan)
        _announce(prepared, entry, watcher=watcher, progress=progress)
        return entry

    to_propose = max(0, prepared.most - len(prepared.entries))
    count = -1 if math.isinf(to_propose) else len(prepared.before) + int(to_propose)
    return ProposedTrials(proposals, prepared, make, _room(prepared)), count


def _room(prepared: PreparedSweep) -> int:
    """Return how many trials are played at a time."""
    import ray

    at_once = prepared.config.sweep.max_concurrent
    return room_for(ray.nodes(), largest([e.share for e in prepared.samples])) if at_once == "auto" else at_once


def _make_stopper(interrupted: threading.Event, clock: StudyClock) -> Any:
    """Make what has Tune put all trials away: at Ctrl-C, and when the study's hours are over."""
    from ray.tune import Stopper

    class WhenInterrupted(KeptHere, Stopper):
        def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
            return False

        def stop_all(self) -> bool:
            return interrupted.is_set() or clock.is_over()

    return WhenInterrupted()


# -- surroundings ------------------------------------------------------------------------------------------------------


def _make_tracker(prepared: PreparedSweep) -> SweepTracker | None:
    if prepared.uri is None:
        return None
    from fedsweep.tracking.mlflow_sweep import SweepTracker

    experiment = (prepared.config.given.get("tracking") or {}).get("experiment")
    check_store(prepared.uri, experiment=experiment)
    return SweepTracker(
        uri=prepared.uri,
        experiment=experiment,
        folder=prepared.folder.path,
        rewrites=prepared.config.sweep.scheduler == "pbt",
    )


def _tracked(
    prepared: PreparedSweep, tracker: SweepTracker | None, work: Callable[[], tuple[_Grid, Summary]]
) -> tuple[_Grid, Summary]:
    """Do the work inside the parent run, which is there from beginning to end, however the work ends."""
    if tracker is None:
        return work()
    from fedsweep.sweeps.tune_callback import tracked

    config = prepared.config
    tracker.start(name=config.name, config=config.flat(), tags={"fedsweep.config_hash": config.hash()})
    status, summary = "failed", None
    try:
        grid, summary = work()
        status = "failed" if summary.failed else "finished"
        return grid, summary
    except KeyboardInterrupt:
        status = "killed"
        raise
    finally:
        tracker.finish(
            [tracked(entry, folder=prepared.folder, sweep=config.name) for entry in prepared.entries],
            status=status,
            files=[prepared.folder.path / name for name in (CONFIG, PLAN, SUMMARY, TABLE)],
            figures=summary.headline if summary is not None else {},
            timestamp_ms=int(time.time() * 1000),
        )
