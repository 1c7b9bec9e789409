"""From a configuration to a sweep that is ready to start: everything is checked before anything is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fedsweep.catalog import bound, build_metrics, resolve, task_metrics
from fedsweep.driver.run import plan_run
from fedsweep.engine.forecast import Forecast, forecast
from fedsweep.errors import ConfigError, InputError
from fedsweep.experiment.build import build_experiment
from fedsweep.experiment.build_world import dataset_of
from fedsweep.experiment.checks import check_experiment
from fedsweep.guard import guarded
from fedsweep.results.texts import is_accuracy
from fedsweep.sweeps.fairness import notes
from fedsweep.sweeps.prepared import PreparedSweep
from fedsweep.sweeps.prepared_trial import PreparedTrial, dataset_key, make_entry
from fedsweep.sweeps.reuse import check_code, extended
from fedsweep.sweeps.search.halving import check_rungs
from fedsweep.sweeps.space import (
    Trial,
    check_combination,
    check_space,
    draw_values,
    list_trials,
    make_trial,
    setting_spaces,
)
from fedsweep.sweeps.sweep_folder import SweepFolder, SweepPlan
from fedsweep.sweeps.together.choice import check_together, with_lanes
from fedsweep.tracking.loggers.registry import further_loggers
from fedsweep.tracking.mlflow_store import resolve_uri

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.tasks.base import Task
    from fedsweep.world.data.datasets import Dataset

# Beyond so many settings the rest is checked when its trials begin.
_CHECKED_SETTINGS = 48
# Draws by which a search's space is checked, and a trial's size estimated.
_SAMPLE_DRAWS = 4
# Figures that the engine reports of some methods, by their columns; spread over clients, and one by one.
_SPREADS, _SINGLES = {"personal_accuracy": "max", "own_accuracy": "max"}, ("mean_staleness", "server_flops")

_PBT_NOTE = (
    "sweep.scheduler=pbt changes values on the way: settings are named by the values that trials began with, and the"
    " config.yaml of a trial has those that it ended with; each has a single seed, so nothing can be said about chance:"
    " for that, run the values that the best one ended with in a sweep with seed: {grid: [0, 1, 2, 3, 4]}"
)


def prepare(
    config: Config,
    folder: SweepFolder,
    *,
    resume: bool,
    extend: bool = False,
    trials: Sequence[tuple[Trial, Config]] | None = None,
    allow_changed_code: bool = False,
) -> PreparedSweep:
    """Check the whole sweep.

    Args:
        config: Its configuration.
        folder: Where it goes.
        resume: Its trials are those of the folder's plan.
        extend: Its trials are the configuration's, and those that have a run in the folder keep it.
        trials: They take the place of the configuration's space, each with its configuration. Whoever gives them knows
            what they differ in, so no note says it.
        allow_changed_code: Of a folder's runs, keep those of other sources, too.

    Raises:
        InputError: Something is wrong or not there; nothing was written.
    """
    if trials is None:
        check_space(config)
    check_combination(config)
    uri = resolve_uri(config.tracking.uri, out=folder.path)
    for logger in further_loggers(config, folder.path):
        logger.check()
    listed = trials or _planned_trials(config, folder, resume=resume)
    entries = [make_entry(config, trial, uri=uri, loaded=loaded) for trial, loaded in listed]
    datasets = _load_datasets(entries)
    entries, sentences = with_lanes(config, [entry.with_samples(datasets) for entry in entries], datasets)
    if extend:
        plan, extension = extended(config, folder, entries, allow_changed_code=allow_changed_code)
        entries = [replace(entry, trial=trial) for entry, trial in zip(entries, plan.trials, strict=True)]
    else:
        beside = folder.read_plan().beside if resume else ()
        plan, extension = SweepPlan(config_tree=config.given, trials=tuple(e.trial for e in entries), beside=beside), ""
        # Where nothing is left to run, no figures of other code join those that are there.
        if resume and not (allow_changed_code or all(folder.has_finished(entry.trial) for entry in entries)):
            check_code(folder, entries)
    samples = entries or [make_entry(config, trial, uri=uri) for trial in _sample_trials(config)]
    datasets = datasets or _load_datasets(samples)
    full = _check_trials(config, samples, datasets)
    if trials is None:
        sampled, configs = [e.trial for e in samples], [e.config for e in samples]
        sentences += notes(config, sampled, configs)
        sentences += [*_doubtful_aims(config, configs), *([_PBT_NOTE] if config.sweep.scheduler == "pbt" else [])]
    prepared = PreparedSweep(
        config=config,
        folder=folder,
        plan=plan,
        entries=entries,
        datasets=datasets,
        notes=sentences,
        full=full,
        uri=uri,
        samples=samples,
        extended=extension,
        allow_changed_code=allow_changed_code,
    )
    prepared.check_budget()
    return prepared


def _planned_trials(config: Config, folder: SweepFolder, *, resume: bool) -> list[tuple[Trial, None]]:
    check_rungs(config)
    if resume:
        return [(trial, None) for trial in folder.read_plan().trials]
    return [] if config.sweep.proposes else [(trial, None) for trial in list_trials(config)]


def _sample_trials(config: Config) -> list[Trial]:
    """Return points of a space that only a search will go through, to check it by."""
    if config.sweep.rungs is not None:
        key, rungs = config.sweep.rungs
        first = list_trials(config)
        one = [trial.values for trial in first if trial.setting == first[0].setting]
        higher = [{**values, key: value} for value in rungs[1:] for values in one]
        return [*first, *(make_trial(config, n, values) for n, values in enumerate(higher, start=len(first) + 1))]
    parts = setting_spaces(config)
    draws = range(1, max(1, _SAMPLE_DRAWS // len(parts)) + 1)
    points = [(part.values(draw_values(config, part, sample=sample)), part.name) for part in parts for sample in draws]
    return [make_trial(config, n, values, setting=name) for n, (values, name) in enumerate(points, start=1)]


# -- checks ------------------------------------------------------------------------------------------------------------


def _load_datasets(entries: Sequence[PreparedTrial]) -> dict[str, Dataset]:
    scenarios = {dataset_key(entry.config): entry.config.scenario for entry in entries}
    return {key: dataset_of(scenario) for key, scenario in scenarios.items()}


def _check_trials(config: Config, entries: Sequence[PreparedTrial], datasets: Mapping[str, Dataset]) -> float:
    """Plan a trial of each setting as a run would be planned; returns what a whole trial spends."""
    check_together(config, entries)
    firsts: dict[str, PreparedTrial] = {}
    for entry in entries:
        firsts.setdefault(entry.trial.setting, entry)
    checked = [*firsts.values()][:_CHECKED_SETTINGS]
    return max((_check_trial(config, entry, datasets[dataset_key(entry.config)]) for entry in checked), default=0.0)


def _check_trial(config: Config, entry: PreparedTrial, dataset: Dataset) -> float:
    try:
        # As the user gave it: an address says that the GPUs are elsewhere.
        plan = plan_run(entry.user_config, dataset)
        check_experiment(plan.experiment)
        _check_aims(config, plan.experiment.world.data.learned)
    except InputError as error:
        raise type(error)(f"trial {entry.trial.number} ({entry.trial.label}): {error}") from None
    resource = config.sweep.resource
    if config.sweep.scheduler is None or resource == "round":
        return float(plan.experiment.training.rounds)
    cost = forecast(plan.experiment)
    return float({"total_bytes": cost.total_bytes, "flops": cost.flops, "sim_time_s": cost.sim_time_s or 0}[resource])


def _check_aims(config: Config, task: Task) -> None:
    """Refuse to choose trials by an accuracy where nothing is classified: all would be alike."""
    if task.has_classes or not (config.sweep.proposes or config.sweep.scheduler):
        return
    for name in config.sweep.aims:
        if is_accuracy(name) and not name.startswith("extra/"):
            figure, read = task.leading
            better = f"extra/{figure}" if task.measures else "test_loss"
            raise ConfigError(
                f"sweep.metric: there is no {name}, since task {type(task).__name__} classifies nothing, so trials"
                f" can't be chosen by it; set sweep.metric to {better} and sweep.mode to {read.mode}"
            )


def _absent_aims(config: Config, of_trials: Sequence[Config]) -> list[str]:
    """Return a sentence where trials are compared by an accuracy, and none of them classifies anything."""
    absent = [name for name in config.sweep.aims if is_accuracy(name) and not name.startswith("extra/")]
    tasks = [bound(of_trial, "scenario.task") for of_trial in of_trials]
    # A function does not say beforehand whether its task has classes.
    if not absent or any(task is None or getattr(task.builder, "has_classes", True) for task in tasks):
        return []
    name, mode = next(((f"extra/{m['name']}", m["mode"]) for m in task_metrics(of_trials[0])), ("test_loss", "min"))
    return [
        f"no trial has {absent[0]}, since task {tasks[0].name} classifies nothing, so settings are neither ordered nor"
        f" compared; set sweep.metric to {name} and sweep.mode to {mode}"
    ]


def _doubtful_aims(config: Config, of_trials: Sequence[Config]) -> list[str]:
    """Return a sentence for each metric that nobody may have, or that is looked for at its worst."""
    of_trial = of_trials[0]
    better = {name: "max" for name in config.sweep.aims if is_accuracy(name)}
    better |= dict.fromkeys(("test_loss", "train_loss", "total_bytes"), "min")
    measured = {f"extra/{entry['name']}": entry["mode"] for entry in task_metrics(of_trial)}
    measured |= {f"extra/{c}": metric.declaration.mode for metric in build_metrics(of_trial) for c in metric.columns}
    own = _own_figures(of_trial)
    better |= measured | own
    limited = [limit.metric for limit in config.sweep.limits]
    return (
        [
            f"sweep.{key}: {name} is no figure of the task's or of evaluation.metrics (these are"
            f" {', '.join(measured) or 'none'}); unless the method reports it, no trial has it"
            for key, names in (("metric", config.sweep.aims), ("constraints", limited))
            for name in names
            if name.startswith("extra/") and name not in {*measured, *own, *(f"extra/{each}" for each in _SINGLES)}
        ]
        + [
            f"sweep.mode={mode} looks for the {mode}imum of {name}, of which {'less' if mode == 'max' else 'more'} is"
            f" better; set sweep.mode to {better[name]} unless you mean that"
            for name, mode in config.sweep.aims.items()
            if mode != better.get(name, mode)
        ]
        + _absent_aims(config, of_trials)
    )


def _own_figures(config: Config) -> dict[str, str]:
    """Return what the engine reports over clients and classes, by column, and whether the least or the most is best."""
    leading = next(iter(task_metrics(config)), {"name": "accuracy", "mode": "max"})
    spreads = dict(_SPREADS)
    if config.evaluation.per_client:
        spreads |= {"class_accuracy": "max", f"client_{leading['name']}": str(leading["mode"])}
    modes = {f"extra/{name}{part}": mode for name, mode in spreads.items() for part in ("", "_worst10", "_best10")}
    return modes | {f"extra/{name}_sd": "min" for name in spreads}


def trial_costs(prepared: PreparedSweep, entries: Sequence[PreparedTrial]) -> dict[str, Forecast]:
    """Forecast the costs of the first of these trials, from plans alone; by their folders' names."""
    costs: dict[str, Forecast] = {}
    with guarded(when="before the run", raises=ConfigError):
        for entry in entries[:_CHECKED_SETTINGS]:
            dataset = prepared.datasets[dataset_key(entry.config)]
            costs[entry.trial.folder] = forecast(build_experiment(resolve(entry.user_config), dataset))
    return costs
