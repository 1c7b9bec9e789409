"""Rungs: all settings are tried with little of something, and the best third of them with more of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedsweep.errors import ConfigError
from fedsweep.results.seed_statistics import mean
from fedsweep.results.texts import canonical
from fedsweep.sweeps.search.proposals import Outcome, Proposals
from fedsweep.sweeps.space import SEED, Trial, list_trials

if TYPE_CHECKING:
    from fedsweep.config.schema import Config

_REDUCTION = 3
_ROUNDS = "training.rounds"


def check_rungs(config: Config) -> None:
    """Refuse rungs that nobody could go through.

    Raises:
        ConfigError: They are beside something that they do not go with.
    """
    sweep = config.sweep
    spaces = [sweep.space, *(setting.space for setting in sweep.settings)]
    keys = [key for space in spaces for key, entry in space.items() if entry.rungs is not None]
    if not keys:
        return
    beside = {
        "rungs of another key": len(keys) > 1,
        "sweep.search": sweep.search is not None,
        "sweep.scheduler": sweep.scheduler is not None,
        "sweep.budget": sweep.budget is not None,
        "several metrics": len(sweep.aims) > 1,
        "sweep.constraints": bool(sweep.constraints),
        "seeds as rungs": SEED in keys,
        "rungs of one named setting": sweep.rungs is None,
        "other values of that key in a named setting": any(keys[0] in setting.space for setting in sweep.settings),
    }
    if refused := [name for name, is_there in beside.items() if is_there]:
        raise ConfigError(
            f"sweep.space.{keys[0]}: rungs go with grids and draws, for one metric, but not with {refused[0]}; leave"
            " that out, or make the rungs a grid"
        )


class Halving(Proposals):
    """Goes through the rungs of a sweep, each once all trials of the one before have ended.

    A setting goes on with all its seeds, by their mean. Trials follow from the outcomes alone, so a sweep that was
    killed ends with those of an unbroken one.

    Args:
        config: The sweep's configuration; one of its keys has rungs.

    Source: successive halving, Jamieson and Talwalkar, AISTATS 2016, by thirds.
    """

    def __init__(self, config: Config) -> None:
        assert config.sweep.rungs is not None
        self._key, self._rungs = config.sweep.rungs
        self._sign = 1.0 if next(iter(config.sweep.aims.values())) == "max" else -1.0
        self._first = [trial.values for trial in list_trials(config)]

    @property
    def most(self) -> int:
        """Trials of all rungs, where none fails."""
        sizes = [len(seeds) for seeds in _by_setting(self._first, self._key).values()]
        counts = [len(sizes)]
        for _ in self._rungs[1:]:
            counts.append(math.ceil(counts[-1] / _REDUCTION))
        return sum(sum(sorted(sizes, reverse=True)[:count]) for count in counts)

    def next_values(
        self,
        trials: Sequence[Trial],
        outcomes: Mapping[int, Outcome],
        has_room: Callable[[Mapping[str, Any]], bool] = lambda values: True,
    ) -> dict[str, Any] | None:
        """Return what the next trial sets; None where a rung has not ended, or all have: no budget is beside rungs."""
        rung, begin = self._first, 0
        for value in [*self._rungs[1:], None]:
            if len(trials) < begin + len(rung):
                return dict(rung[len(trials) - begin])
            ended = [outcomes.get(trial.number) for trial in trials[begin : begin + len(rung)]]
            if value is None or None in ended:
                return None
            begin, rung = begin + len(rung), self._promoted(rung, [one for one in ended if one], value)
        return None

    def lower(self, trial: Trial, trials: Sequence[Trial]) -> Trial | None:
        """Return the trial of the rung below whose run this one may be, gone on with; None: it begins anew."""
        place = self._rungs.index(trial.values[self._key])
        if not place or self._key != _ROUNDS:
            return None
        below = canonical({**trial.values, self._key: self._rungs[place - 1]})
        return next((other for other in trials if canonical(dict(other.values)) == below), None)

    def _promoted(
        self, rung: Sequence[Mapping[str, Any]], ended: Sequence[Outcome], value: Any
    ) -> list[Mapping[str, Any]]:
        """Return the next rung's trials: of the best settings, the first of equals; none of those that failed."""
        settings = _by_setting(rung, self._key)
        means = {
            name: self._sign * mean([figures[0] for k in places if (figures := ended[k].values) is not None])
            for name, places in settings.items()
            if all(ended[k].values is not None for k in places)
        }
        best = sorted(means, key=lambda name: -means[name])[: math.ceil(len(settings) / _REDUCTION)]
        return [{**rung[k], self._key: value} for name in settings if name in best for k in settings[name]]


def _by_setting(rung: Sequence[Mapping[str, Any]], key: str) -> dict[str, list[int]]:
    """Return places in a rung by setting: what differs in the seed alone is one."""
    settings: dict[str, list[int]] = {}
    for place, values in enumerate(rung):
        name = canonical({name: value for name, value in values.items() if name not in (SEED, key)})
        settings.setdefault(name, []).append(place)
    return settings
