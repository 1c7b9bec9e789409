"""From a configuration to a sweep that is ready to start: everything is checked before anything is written."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedsweep.catalog import resolve
from fedsweep.config.execution import Runtime
from fedsweep.config.load import load_config
from fedsweep.config.overrides import apply_overrides, set_value
from fedsweep.config.sweep import Sweep
from fedsweep.driver.run import plan_run
from fedsweep.engine.forecast import Forecast, forecast
from fedsweep.errors import InputError
from fedsweep.experiment.checks import check_experiment
from fedsweep.runs.sources import sources_of
from fedsweep.sweeps.fairness import notes
from fedsweep.sweeps.prepared import PreparedSweep, PreparedTrial
from fedsweep.sweeps.resources import Share
from fedsweep.sweeps.reuse import check_code, extended
from fedsweep.sweeps.space import Trial, check_combination, check_space, draw, list_trials, make_trial, space_keys
from fedsweep.sweeps.sweep_folder import SweepFolder, SweepPlan
from fedsweep.tracking.loggers.registry import further_loggers
from fedsweep.tracking.mlflow_store import NO_TRACKING, resolve_uri
from fedsweep.world.data.datasets import Dataset, load_dataset

if TYPE_CHECKING:
    from fedsweep.config.schema import Config

# Beyond so many settings the rest is checked when its trials begin.
_CHECKED_SETTINGS = 48
# Draws by which a search's space is checked, and a trial's size estimated.
_SAMPLE_DRAWS = 4


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
    listed: Sequence[tuple[Trial, Config | None]] = trials or [
        (t, None) for t in _planned_trials(config, folder, resume=resume)
    ]
    entries = [make_entry(config, trial, uri=uri, loaded=loaded) for trial, loaded in listed]
    if extend:
        plan, extension = extended(config, folder, entries, allow_changed_code=allow_changed_code)
        entries = [replace(entry, trial=trial) for entry, trial in zip(entries, plan.trials, strict=True)]
    else:
        beside = folder.read_plan().beside if resume else ()
        plan, extension = SweepPlan(config_tree=config.given, trials=tuple(e.trial for e in entries), beside=beside), ""
        if resume and not allow_changed_code:
            check_code(folder, entries)
    samples = entries or [make_entry(config, trial, uri=uri) for trial in _sample_trials(config)]
    datasets, full = _check_trials(config, samples)
    knows_seeds = config.sweep.search != "optuna"
    sentences = (
        []
        if trials is not None
        else notes([e.trial for e in samples], [e.config for e in samples], knows_seeds=knows_seeds)
    )
    return PreparedSweep(
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


def _planned_trials(config: Config, folder: SweepFolder, *, resume: bool) -> tuple[Trial, ...]:
    if resume:
        return folder.read_plan().trials
    return tuple(list_trials(config)) if config.sweep.search != "optuna" else ()


def make_entry(config: Config, trial: Trial, *, uri: str | None, loaded: Config | None = None) -> PreparedTrial:
    """Make a trial of a sweep with its configuration: loaded and bound once.

    It may be loaded already, but for name and tracking.

    Raises:
        ConfigError: Its values are wrong; the message names the trial.
    """
    try:
        if loaded is None:
            user_config = load_config(_given(config, trial, uri=uri))
        else:
            tracking = loaded.tracking.model_copy(update={"uri": uri or NO_TRACKING})
            name = loaded.name if "name" in trial.values else _name(config, trial)
            user_config = loaded.model_copy(update={"name": name, "tracking": tracking, "sweep": Sweep()})
        user_config = resolve(user_config)
        share = Share.of(user_config)
        here = Runtime.model_validate({**user_config.runtime.model_dump(), **_backend(user_config, share.actors)})
        placed = user_config.model_copy(update={"runtime": here})
        return PreparedTrial(
            trial=trial, user_config=user_config, config=placed, share=share, sources=sources_of(user_config.tree())
        )
    except InputError as error:
        raise type(error)(f"trial {trial.number} ({trial.label}): {error}") from None


def dataset_key(config: Config) -> str:
    """Return the name of the data set that a configuration asks for."""
    scenario = config.scenario
    return f"{scenario.dataset}|{scenario.root}|{scenario.image_size}"


def overlaid(tree_before: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's tree with other values for some dotted keys."""
    tree = apply_overrides(tree_before, ())
    for key, value in values.items():
        set_value(tree, key, value=copy.deepcopy(value))
    return tree


# -- configurations of trials ------------------------------------------------------------------------------------------


def _given(config: Config, trial: Trial, *, uri: str | None) -> dict[str, Any]:
    """Return the sweep's configuration with the trial's values, without the sweep itself, under its own name."""
    tree = overlaid({key: value for key, value in config.given.items() if key != "sweep"}, trial.values)
    if "name" not in trial.values:
        tree["name"] = _name(config, trial)
    tree["tracking"] = {**(tree.get("tracking") or {}), "uri": uri or NO_TRACKING}
    return tree


def _name(config: Config, trial: Trial) -> str:
    return f"{config.name} {trial.label}".replace("/", "_").replace("\\", "_") if trial.label else config.name


def _backend(config: Config, actors: int) -> dict[str, Any]:
    """Return the settings of the backend in the trial's own process: it is on the cluster already."""
    if actors:
        return {"backend": "ray", "client_actors": actors}
    # What is reserved and not computed on is the cluster's affair: without it the trial is a run for any machine.
    unused = {"gpus_per_client": 0.0, "gpus_per_server": 0.0} if config.runtime.device == "cpu" else {}
    return {"backend": "local", "address": None, **unused}


def _sample_trials(config: Config) -> list[Trial]:
    """Return points of a space that only a search will go through, to check it by."""
    keys = space_keys(config)
    points = [{key: draw(config, key, sample=number) for key in keys} for number in range(1, _SAMPLE_DRAWS + 1)]
    return [make_trial(config, n, values) for n, values in enumerate(points, start=1)]


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_trials(config: Config, entries: Sequence[PreparedTrial]) -> tuple[dict[str, Dataset], float]:
    """Plan a trial of each setting as a run would be planned; the data sets, and what a whole trial spends."""
    datasets: dict[str, Dataset] = {}
    full = 0.0
    seen: set[str] = set()
    for entry in entries:
        scenario, key = entry.config.scenario, dataset_key(entry.config)
        if key not in datasets:
            datasets[key] = load_dataset(
                scenario.dataset, root=scenario.root, download=scenario.download, image_size=scenario.image_size
            )
        if entry.trial.setting in seen or len(seen) >= _CHECKED_SETTINGS:
            continue
        seen.add(entry.trial.setting)
        full = max(full, _check_trial(config, entry, datasets[key]))
    return datasets, full


def _check_trial(config: Config, entry: PreparedTrial, dataset: Dataset) -> float:
    try:
        # As the user gave it: an address says that the GPUs are elsewhere.
        plan = plan_run(entry.user_config, dataset)
        check_experiment(plan.experiment)
    except InputError as error:
        raise type(error)(f"trial {entry.trial.number} ({entry.trial.label}): {error}") from None
    resource = config.sweep.resource
    if config.sweep.scheduler is None or resource == "round":
        return float(plan.experiment.training.rounds)
    cost = forecast(plan.experiment)
    return float({"total_bytes": cost.total_bytes, "flops": cost.flops, "sim_time_s": cost.sim_time_s or 0}[resource])


def trial_costs(prepared: PreparedSweep) -> dict[str, Forecast]:
    """Forecast the costs of the first trials, from plans alone; by their folders' names."""
    return {
        entry.trial.folder: forecast(
            plan_run(entry.user_config, prepared.datasets[dataset_key(entry.config)]).experiment
        )
        for entry in (prepared.entries or prepared.samples)[:_CHECKED_SETTINGS]
    }
