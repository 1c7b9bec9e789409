"""Costs of trials: told before they train, and read of their folders afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedsweep.driver.run import plan_run
from fedsweep.engine.forecast import forecast
from fedsweep.errors import ConfigError, FedsweepError
from fedsweep.experiment.unforeseen import why_unknown
from fedsweep.results.texts import bytes_text, seconds_text
from fedsweep.results.view import load_run
from fedsweep.runs.files import TAKEN_OVER
from fedsweep.runs.run_folder import CONFIG

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.config.sweep import StudyBudget
    from fedsweep.world.data.datasets import Dataset

# Rounds of a trial that are planned one by one; beyond them costs are extrapolated.
_MOST_PLANNED = 1000
# Sums of virtual seconds in another order differ by so much.
_ROUNDING = 1 + 1e-9
_PLANNED = ("total_bytes", "sim_time_s")


@dataclass(frozen=True, kw_only=True)
class TrialCosts:
    """Costs of trials, as far as a budget limits them.

    Attributes:
        total_bytes: What they send, both ways, from before round 1 on.
        sim_time_s: Their virtual seconds, one after another.
        trials: How many they are.
        is_exact: Told exactly; otherwise it is an estimate, or the most that it may be.
    """

    total_bytes: int = 0
    sim_time_s: float = 0.0
    trials: int = 0
    is_exact: bool = True

    def __add__(self, other: TrialCosts) -> TrialCosts:
        return TrialCosts(
            total_bytes=self.total_bytes + other.total_bytes,
            sim_time_s=self.sim_time_s + other.sim_time_s,
            trials=self.trials + other.trials,
            is_exact=self.is_exact and other.is_exact,
        )

    def fits(self, budget: StudyBudget) -> bool:
        """Check that no limit is passed; hours are not told before."""
        return all(getattr(self, name) <= limit * _ROUNDING for name, limit in budget.costs.items())

    def in_words(self, budget: StudyBudget) -> str:
        """Describe it beside the limits: ``9.98 MB of 10 MB``."""
        texts: dict[str, Callable[[float], str]] = {
            "total_bytes": bytes_text,
            "sim_time_s": lambda seconds: f"{seconds_text(seconds)} of virtual time",
            "trials": lambda count: f"{count:g} trials",
        }
        return ", ".join(
            f"{texts[name](getattr(self, name))} of {texts[name](at)}" for name, at in budget.costs.items()
        )


def planned_costs(config: Config, dataset: Dataset, budget: StudyBudget) -> TrialCosts:
    """Plan a trial's rounds and add up what they cost; nothing is trained.

    Raises:
        InputError: The trial can't be planned, or has no virtual time although the budget limits that.
    """
    if not any(name in budget.costs for name in _PLANNED):
        return TrialCosts(trials=1)
    experiment = plan_run(config, dataset).experiment
    cost = forecast(experiment, most_planned=_MOST_PLANNED)
    if budget.sim_time_s is not None and cost.sim_time_s is None:
        raise ConfigError(
            "sweep.budget.sim_time_s limits virtual seconds, but without scenario.devices there are none; set a fleet"
            " of devices, e.g. scenario.devices={profile: edge-accel}, or another limit"
        )
    return TrialCosts(
        total_bytes=cost.total_bytes,
        sim_time_s=cost.sim_time_s or 0.0,
        trials=1,
        is_exact=cost.exact and why_unknown(experiment) is None,
    )


def spent_in(folder: Path) -> TrialCosts | None:
    """Return what the run in a folder has spent; nothing where it was taken over; None where that can't be read."""
    if not (folder / CONFIG).is_file() or (folder / TAKEN_OVER).exists():
        return TrialCosts()
    try:
        view = load_run(folder)
    except FedsweepError:
        return None
    figures = {name: view.result.get(name) or view.figure(name) or 0 for name in _PLANNED}
    return TrialCosts(total_bytes=int(figures["total_bytes"]), sim_time_s=float(figures["sim_time_s"]), trials=1)
