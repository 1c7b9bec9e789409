"""Spending a budget: which of the allowed ways of playing a round comes next.

A budget is a run's: bytes both ways, or virtual seconds. What each way costs in the next round is known before it is
played.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fedsweep.guard import Call, returns
from fedsweep.parameters.ranges import Checked, Count, Share

COHORT = "training.cohort_size"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A way of playing the next round.

    Attributes:
        values: What it sets, by dotted key of the configuration.
        cost: Of the next round, in the budget's unit; infinite where another limit rules it out.
        debt: What such rounds cost more than this one where all of the server's messages go through the offer's codec:
            a download is of those of earlier rounds. Below 0: less.
    """

    values: Mapping[str, Any]
    cost: float
    debt: float = 0.0

    @property
    def lasting(self) -> float:
        """Cost of a round where all are like it."""
        return self.cost + self.debt


@dataclass(frozen=True, kw_only=True)
class Spent:
    """A round that was played.

    Attributes:
        offer: Number of the offer that it was.
        cost: In the budget's unit.
        loss: Its mean training loss; None where nobody trained.
    """

    offer: int
    cost: float
    loss: float | None


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """A run before its next round, as its budget sees it.

    Attributes:
        offers: The ways to play it, in the configuration's order; the same ones each time, at the round's own costs.
        left: Of the budget.
        rounds_left: At most so many, the next one among them.
        past: The rounds so far.
        unit: ``"bytes"`` or ``"s"``.
    """

    offers: tuple[Offer, ...]
    left: float
    rounds_left: int
    past: tuple[Spent, ...] = ()
    unit: str = "bytes"


def _a_choice(answer: Any, call: Call) -> None:
    offers = call.args[0].offers
    is_pair = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], str)
    if not is_pair or not isinstance(answer[0], int) or answer[0] not in range(len(offers)):
        raise call.wrong(f"(number of an offer, 0 to {len(offers) - 1}; reason)", answer)


class SpendingPlanner(Checked, ABC):
    """Chooses among the offers. A concrete one is a frozen dataclass; what it goes by is in the outlook alone.

    Attributes:
        reads_losses: It goes by what was lost in the rounds so far, so that no plan can tell what it will choose.
    """

    section: ClassVar[str] = "planner"
    reads_losses: ClassVar[bool] = True

    @abstractmethod
    @returns(_a_choice)
    def choose(self, outlook: Outlook) -> tuple[int, str]:
        """Return the number of the offer that is wanted, and why, in a few words.

        The last rounds of a budget are chosen so that it comes out even, and no offer is taken after which it could
        not: the offer is what the planner wants where that leaves it open.
        """


@dataclass(frozen=True, kw_only=True)
class Even(SpendingPlanner):
    """Spends the same in each round: the costliest offer within what is left for each of the rounds left."""

    reads_losses: ClassVar[bool] = False

    def choose(self, outlook: Outlook) -> tuple[int, str]:
        share = outlook.left / outlook.rounds_left
        costs = [offer.lasting for offer in outlook.offers]
        within = [number for number, cost in enumerate(costs) if cost <= share]
        if not within:
            return min(range(len(costs)), key=costs.__getitem__), "the least, which is more than an even share"
        return max(within, key=costs.__getitem__), "the most within an even share of what is left"


@dataclass(frozen=True, kw_only=True)
class Gain(SpendingPlanner):
    """Begins with what costs least a round, and takes the next costlier level where the last rounds gained little.

    A gain is the fall of the mean training loss from one window of rounds to the next, for what these cost. Windows are
    compared at one level alone: the loss of clients that train longer alone is lower whatever the model is worth.

    Attributes:
        window: Rounds that are taken together.
        least: A window's gain below this share of the level's best one ends the level.

    Source: Wang and Joshi (2019), Adaptive communication strategies: seldom at first, often as the loss falls; there by
        the loss alone.
    """

    window: Count = 3
    least: Share = 0.5

    def choose(self, outlook: Outlook) -> tuple[int, str]:
        levels = levels_of(outlook.offers)
        # A round in which nobody trained tells nothing of its level.
        past = [spent for spent in outlook.past if spent.loss is not None]
        place, since = 0, 0
        wanted = [level[-1] for level in levels]
        number_of = {number: place for place, level in enumerate(levels) for number in level}
        gains: list[float] = []
        reason = "what costs least comes first"
        while place < len(levels) - 1:
            end = since + (len(gains) + 2) * self.window
            if end > len(past):
                break
            here = past[since:end]
            if any(number_of[spent.offer] != place for spent in here):
                since += 1  # other rounds were forced in between; windows are of one level
                gains = []
                continue
            gains.append(self._gain(here))
            if gains[-1] < self.least * max(gains) or gains[-1] <= 0:
                reason = f"{_shown(gains[-1], outlook.unit)} after {_shown(max(gains), outlook.unit)} a level below"
                place, since, gains = place + 1, end, []
        if gains:
            last, best = (_shown(gain, outlook.unit) for gain in (gains[-1], max(gains)))
            reason = f"the last rounds gained {last}, at best {best}"
        return wanted[place], reason

    def _gain(self, spent: Sequence[Spent]) -> float:
        """Return the fall of the loss over the last two windows, for what the later one cost."""
        before, last = spent[-2 * self.window : -self.window], spent[-self.window :]
        cost = sum(round.cost for round in last)
        return (_mean(before) - _mean(last)) / cost if cost else 0.0


PLANNERS: Mapping[str, type[SpendingPlanner]] = {"gain": Gain, "even": Even}


def levels_of(offers: Sequence[Offer]) -> list[list[int]]:
    """Return the offers' numbers by level, both ascending by cost: one level's offers differ in the cohort alone.

    Where all do, each is a level.
    """
    by_cost = sorted(range(len(offers)), key=lambda number: offers[number].lasting)
    levels: dict[str, list[int]] = {}
    for number in by_cost:
        rest = {key: value for key, value in offers[number].values.items() if key != COHORT}
        levels.setdefault(repr(rest), []).append(number)
    if len(levels) == 1:
        return [[number] for number in by_cost]
    return sorted(levels.values(), key=lambda level: offers[level[-1]].lasting)


def _mean(rounds: Sequence[Spent]) -> float:
    losses = [spent.loss for spent in rounds if spent.loss is not None]
    return sum(losses) / len(losses)


def _shown(gain: float, unit: str) -> str:
    return f"{gain * 1e6:.3g} of loss a MB" if unit == "bytes" else f"{gain:.3g} of loss a second"
