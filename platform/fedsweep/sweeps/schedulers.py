"""Ray Tune's schedulers and searches, set up for federated runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.schedulers import ASHAScheduler, MedianStoppingRule, PopulationBasedTraining, TrialScheduler
from ray.tune.search import Searcher

from fedsweep.errors import ResourceError
from fedsweep.streams import stream
from fedsweep.sweeps.space import TRIAL, canonical, space_keys
from fedsweep.sweeps.tune_callback import KeptHere

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.config.sweep import SpaceEntry

RESOURCE = "resource"
# Successive halving by thirds: the first rung is at 1/27 of a whole trial.
_REDUCTION, _RUNGS = 3, 3
_MEDIAN_GRACE = 0.1
_PBT_INTERVALS = 10
STUDY_FILE = "optuna.log"


def make_scheduler(config: Config, *, full: float) -> TrialScheduler | None:
    """Make the scheduler that a sweep asks for, given what a whole trial spends of the resource."""
    kind = config.sweep.scheduler
    full = max(full, 1.0)
    if kind == "asha":
        # The end of a trial is its own affair: stop_last_trials would cut those that spend more than was forecast.
        return ASHAScheduler(
            time_attr=RESOURCE,
            max_t=math.ceil(full),
            grace_period=max(1, full / _REDUCTION**_RUNGS),
            reduction_factor=_REDUCTION,
            stop_last_trials=False,
        )
    if kind == "median":
        return MedianStoppingRule(time_attr=RESOURCE, grace_period=max(1, full * _MEDIAN_GRACE), min_samples_required=3)
    if kind == "pbt":
        entries = {key: config.sweep.space[key] for key in space_keys(config)}
        # It draws values anew or moves them a little.
        space = {key: [*entry.values] if entry.kind == "choice" else _domain(entry) for key, entry in entries.items()}
        return PopulationBasedTraining(
            time_attr=RESOURCE,
            perturbation_interval=max(1.0, full / _PBT_INTERVALS),
            hyperparam_mutations={TRIAL: {"values": space}},
            log_config=False,
        )
    return None


def _domain(entry: SpaceEntry) -> Any:
    if entry.kind == "choice":
        # Text, since a search's categories may be no mappings.
        return tune.choice([canonical(value) for value in entry.values])
    makers: dict[str, Any] = {"uniform": tune.uniform, "loguniform": tune.loguniform, "randint": tune.randint}
    return makers[entry.kind](*entry.values)


def decoded(config: Config, proposed: Mapping[str, Any]) -> dict[str, Any]:
    """Return proposed values as configuration values."""
    space = config.sweep.space
    return {
        key: json.loads(proposed[key]) if space[key].kind == "choice" else proposed[key] for key in space_keys(config)
    }


def make_optuna(config: Config, folder: Path) -> Searcher:
    """Return Optuna's search, with a study that lasts in a file of the sweep's folder; see :func:`check_optuna`."""
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend
    from ray.tune.search.optuna import OptunaSearch

    sweep = config.sweep
    space = OptunaSearch.convert_search_space({key: _domain(sweep.space[key]) for key in space_keys(config)})
    return OptunaSearch(
        space=space,
        metric=sweep.metric,
        mode=[*sweep.mode] if isinstance(sweep.mode, list) else sweep.mode,
        seed=stream(config.seed, "search").seed(32),
        storage=JournalStorage(JournalFileBackend(str(folder / STUDY_FILE))),
        study_name="fedsweep",
    )


def check_optuna() -> None:
    """Make sure that Optuna is there.

    Raises:
        ResourceError: It is not.
    """
    try:
        import optuna
    except ImportError as error:
        raise ResourceError(
            f"sweep.search=optuna needs an extra: pip install 'fedsweep[optuna]' ({error}); or use sweep.search=random"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)


class ProposedTrials(KeptHere, Searcher):
    """Gives a search's proposals the form of trials; first come trials of before that are to go on.

    Args:
        search: The search.
        make: Makes a trial of proposed values, notes it down, and gives what its process gets.
        leftover: What processes get of the trials that are to go on.
    """

    def __init__(
        self,
        search: Searcher,
        make: Callable[[Mapping[str, Any]], dict[str, Any]],
        leftover: list[dict[str, Any]],
    ) -> None:
        super().__init__(metric=search.metric, mode=search.mode)
        self._search, self._make, self._leftover = search, make, list(leftover)
        self._own: set[str] = set()

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Return the next trial."""
        if self._leftover:
            self._own.add(trial_id)
            return {TRIAL: self._leftover.pop(0)}
        proposed = self._search.suggest(trial_id)
        if not isinstance(proposed, dict):
            return proposed
        return {TRIAL: self._make(proposed)}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Take note of each round."""
        if trial_id not in self._own:
            self._search.on_trial_result(trial_id, result)

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Take note of each end."""
        if trial_id not in self._own:
            self._search.on_trial_complete(trial_id, result=result, error=error)

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: the study lasts by itself, and Tune's own state is never read back."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing; see :meth:`save`."""
