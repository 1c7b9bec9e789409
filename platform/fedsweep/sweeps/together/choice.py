"""Which trials are played side by side, and by network and device whether in lanes at all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedsweep.catalog import build_method
from fedsweep.client.lanes.together import OF_METHOD, are_alike
from fedsweep.driver.run import one_thread, plan_run
from fedsweep.engine.forecast import lanes_refused
from fedsweep.errors import ConfigError
from fedsweep.experiment.build import build_training
from fedsweep.models.cost import fwd_macs_per_sample
from fedsweep.results.texts import canonical
from fedsweep.sweeps.prepared_trial import PreparedTrial, dataset_key

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.experiment.experiment import Experiment
    from fedsweep.method import FederatedMethod
    from fedsweep.world.data.datasets import Dataset

# On a CPU networks up to this size took less time in so many lanes than one by one (docs/speed.md).
_MOST_VALUES, _MOST_MACS, _LANES = 64_000, 300_000, 40


def check_together(config: Config, entries: Sequence[PreparedTrial]) -> None:
    """Refuse trials side by side where each has to be alone, or none could share lanes with another.

    Raises:
        ConfigError: The message says why, and the way out.
    """
    sweep = config.sweep
    if sweep.together in (1, "auto"):
        return
    if (reason := _alone(config)) is not None:
        raise ConfigError(
            f"sweep.together={sweep.together} plays trials side by side to their ends on this machine, so it goes with"
            f" no {reason}; leave one of the two out"
        )
    kinds = list(likenesses(config, entries).values())
    if len(kinds) == len(set(kinds)):
        raise ConfigError(
            f"sweep.together={sweep.together} is for trials that have network, optimizer, batch size and what clients"
            " minimise in common, with runtime.executor=lanes and without client actors, but no two of these are such;"
            " vary the seed, say, set runtime.executor=lanes, or leave sweep.together out"
        )


def _alone(config: Config) -> str | None:
    """Return the key because of which no trial of a sweep can be played beside another; None: there is none."""
    sweep = config.sweep
    reasons = {
        "sweep.scheduler": sweep.scheduler is not None,
        "sweep.search=optuna": sweep.search == "optuna",
        "rungs": sweep.rungs is not None,
        "sweep.budget": sweep.budget is not None,
        "runtime.address": config.runtime.address is not None,
    }
    return next((name for name, is_there in reasons.items() if is_there), None)


def with_lanes(
    config: Config, entries: Sequence[PreparedTrial], datasets: Mapping[str, Dataset]
) -> tuple[list[PreparedTrial], list[str]]:
    """Choose lanes for trials of small networks on a CPU, where the sweep leaves it open.

    Open it is with ``sweep.together: auto`` and ``runtime.executor: auto``. How many lanes follows from the cohort
    alone, never from the number of trials, so a trial has the same bits in each sweep.

    Returns:
        The trials, and in a sentence what was chosen for which.
    """
    if config.sweep.together != "auto" or _alone(config) is not None:
        return list(entries), []
    fitting: dict[str, bool] = {}
    settled: list[PreparedTrial] = []
    chosen: list[PreparedTrial] = []
    for entry in entries:
        if not entry.share.actors and entry.config.runtime.executor == "auto":
            tree, data = entry.config.tree(), dataset_key(entry.config)
            key = canonical([_step(tree), tree["model"], tree["method"], data])
            if key not in fitting:
                fitting[key] = _is_small(plan_run(entry.user_config, datasets[data]).experiment)
            if fitting[key]:
                entry = _in_lanes(entry)
                chosen.append(entry)
        settled.append(entry)
    if not chosen:
        return settled, []
    widths = sorted({entry.config.runtime.lanes for entry in chosen}, key=int)
    return settled, [
        f"sweep.together=auto takes {len(chosen)} of {len(entries)} trials in lanes, their networks being small:"
        f" {' or '.join(map(str, widths))} clients at once (runtime.executor=loop steps them one by one)"
    ]


def _is_small(experiment: Experiment) -> bool:
    """Tell whether clients of this size and method are stepped faster in lanes, on a CPU."""
    if experiment.device != "cpu" or experiment.layout.num_params > _MOST_VALUES:
        return False
    macs = fwd_macs_per_sample(experiment.template, experiment.world.data.images.shape[1:])
    if macs > _MOST_MACS:
        return False
    with one_thread():
        return not lanes_refused(experiment)


def _in_lanes(entry: PreparedTrial) -> PreparedTrial:
    cohort = build_training(entry.config).cohort_size
    # As many whole cohorts as fill the lanes; of a larger cohort equal parts.
    width = cohort * (_LANES // cohort) if cohort <= _LANES else math.ceil(cohort / math.ceil(cohort / _LANES))

    def placed(config: Config) -> Config:
        runtime = config.runtime.model_copy(update={"executor": "lanes", "lanes": width})
        return config.model_copy(update={"runtime": runtime})

    return replace(entry, config=placed(entry.config), user_config=placed(entry.user_config))


def likenesses(config: Config, entries: Sequence[PreparedTrial]) -> dict[int, int]:
    """Return for trials, by their numbers, a number that is equal for those whose clients can share lanes.

    Missing are those that are played alone: all where nobody asks for more, those whose clients are on actors or are
    stepped one by one.
    """
    if config.sweep.together == 1 or _alone(config) is not None:
        return {}
    kinds: list[tuple[str, FederatedMethod]] = []
    places: dict[str, int] = {}
    alike: dict[int, int] = {}
    for entry in entries:
        if entry.share.actors or not _is_in_lanes(entry.config):
            continue
        tree = entry.config.tree()
        step = canonical([_step(tree), tree["model"]])
        key = canonical([step, tree["method"]])
        if key not in places:
            method = build_method(entry.config)
            like = (n for n, (its, own) in enumerate(kinds) if its == step and are_alike(own, method, OF_METHOD))
            places[key] = next(like, len(kinds))
            kinds.append((step, method))
        alike[entry.trial.number] = places[key]
    return alike


def num_together(config: Config, entry: PreparedTrial, *, alike: int, at_once: int) -> int:
    """Return how many trials a process plays side by side with a trial, itself included.

    Args:
        config: The sweep's.
        entry: The trial.
        alike: How many there are whose clients can share its lanes.
        at_once: How many processes play trials.
    """
    if config.sweep.together != "auto":
        return config.sweep.together
    lanes, cohort = entry.config.runtime.lanes, build_training(entry.config).cohort_size
    fill = lanes // cohort if isinstance(lanes, int) else 1
    return max(1, min(fill, math.ceil(alike / at_once)))


def _step(tree: Mapping[str, Any]) -> list[Any]:
    """Return what runs must have in common, beside network and method, for one step to take the clients of both."""
    scenario, training = tree["scenario"], tree["training"]
    optimizer = {name: value for name, value in training["optimizer"].items() if name != "lr"}
    return [
        tree["runtime"],
        [scenario[name] for name in ("dataset", "root", "image_size")],
        scenario.get("availability") is None,
        [training[name] for name in ("batch_size", "clip_norm", "optimizer_state")],
        optimizer,
    ]


def _is_in_lanes(config: Config) -> bool:
    runtime = config.runtime
    on_gpu = runtime.device != "cpu" and runtime.gpus_per_client > 0
    return runtime.executor == "lanes" or (runtime.executor == "auto" and on_gpu)
