"""Which trials are played side by side: those of a setting that differ in the seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedsweep.errors import ConfigError
from fedsweep.sweeps.space import SEED, canonical

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.sweeps.prepared_trial import PreparedTrial


def check_together(config: Config, entries: Sequence[PreparedTrial]) -> None:
    """Refuse trials side by side where each has to be alone, or none could share lanes with another.

    Raises:
        ConfigError: The message says why, and the way out.
    """
    sweep, runtime = config.sweep, config.runtime
    if sweep.together == 1:
        return
    alone = {
        "sweep.scheduler": sweep.scheduler is not None,
        "sweep.search=optuna": sweep.search == "optuna",
        "rungs": sweep.rungs is not None,
        "sweep.budget": sweep.budget is not None,
        "runtime.address": runtime.address is not None,
    }
    if named := [name for name, is_there in alone.items() if is_there]:
        raise ConfigError(
            f"sweep.together={sweep.together} plays trials side by side to their ends on this machine, so it goes with"
            f" no {named[0]}; leave one of the two out"
        )
    keys = list(likenesses(config, entries).values())
    if len(keys) == len(set(keys)):
        raise ConfigError(
            f"sweep.together={sweep.together} is for trials that differ in the seed alone, with runtime.executor=lanes"
            " and without client actors, but no two of these are such; vary seed, set runtime.executor=lanes, or leave"
            " sweep.together out"
        )


def likenesses(config: Config, entries: Sequence[PreparedTrial]) -> dict[int, str]:
    """Return for trials, by their numbers, what is equal for those whose clients can share lanes.

    Missing are those that are played alone: all where nobody asks for more, those whose clients are on actors or are
    stepped one by one.
    """
    if config.sweep.together == 1:
        return {}
    return {
        entry.trial.number: canonical(
            {key: value for key, value in entry.config.tree().items() if key not in (SEED, "name")}
        )
        for entry in entries
        if not entry.share.actors and _is_in_lanes(entry.config)
    }


def _is_in_lanes(config: Config) -> bool:
    runtime = config.runtime
    on_gpu = runtime.device != "cpu" and runtime.gpus_per_client > 0
    return runtime.executor == "lanes" or (runtime.executor == "auto" and on_gpu)
