"""DynamicFL and DynamicSGD: two groups of clients aggregate at different intervals.

A few clients synchronise often, the others rarely; who is which is chosen in each round under communication
budgets. Interval 1 for everybody is DynamicSGD, one aggregation a round for everybody is FedAvg with equal steps.

Source: DynamicFL: federated learning with dynamic communication resource allocation (2024), Algorithm 1 and Eq. 2-5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from fedsweep import Card, ConfigError, FederatedMethod, Limit, MethodSettings, with_card
from fedsweep.components import (
    ComponentReport,
    Count,
    FixedInterval,
    Pacing,
    Payload,
    Probe,
    RoundContext,
    ServerContext,
    State,
    SyncPoint,
    SyncRule,
    cut_round,
    due_steps,
    population,
    takes,
    unknown_name,
)

from ..feddhad.degrees import refuse_without_classes
from .chooser import GroupChooser, GroupProblem, Orders, RandomGroup
from .names import group_chooser

LEVELS = {"a": 1, "b": 4, "c": 16, "d": 32, "e": 64, "f": 128, "g": 256}


def interval_of(level: str | int, *, key: str) -> int:
    """Return local steps of an interval given as one of the paper's levels a-g or as a number.

    Args:
        level: ``"a"`` (1), ``"b"`` (4), ``"c"`` (16), ``"d"`` (32), ``"e"`` (64), ``"f"`` (128), ``"g"`` (256), or
            an integer of at least 1. More than a round's steps means one sync point a round.
        key: The parameter's name, for the error.
    """
    if isinstance(level, str):
        if level not in LEVELS:
            raise ConfigError(f"method.{key}: {unknown_name('level', level, LEVELS)}; or give a number of steps")
        return LEVELS[level]
    if isinstance(level, bool) or level < 1:
        raise ConfigError(f"method.{key} must be a level a-g or at least 1 local step, but got {level}")
    return level


@dataclass(frozen=True, kw_only=True)
class TwoSpeed(Pacing):
    """Two groups, two intervals.

    Attributes:
        high: Local steps between the sync points of the high-frequency group, at least 1.
        low: The same for the others, at least ``high``.
        group: Chooses the high-frequency group.
        group_size: Clients in the group, or as many as the budgets admit where those are fewer; null: as many as suit,
            within the budgets.
        high_only: Only the high-frequency group works (the paper's starred runs).
        sync_rule: authors: the step before the last does not synchronise, as the paper's costs have it; paper: it
            does.
        idle_clients: With high_only, whether the others' unchanged models count in the round's average: exclude (the
            paper's words) or authors (its program, from which its figures are).

    Source: DynamicFL, Algorithm 1. Whoever synchronises after a step is averaged with all others that do, and the
    average goes to them alone.
    """

    syncs_inside: ClassVar[bool] = True

    high: int
    low: int
    group: GroupChooser
    group_size: Count | None = None
    high_only: bool = False
    sync_rule: SyncRule = "authors"
    idle_clients: Literal["exclude", "authors"] = "exclude"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.high <= self.low:
            raise ConfigError(
                f"1 <= high_interval <= low_interval must hold, but got high_interval={self.high},"
                f" low_interval={self.low}; swap them"
            )

    def registration(self) -> tuple[str, ...]:
        return ("label_counts",) if self.group.reads_labels() else ()

    def init(self, context: ServerContext) -> State:
        """Return the state before the first group.

        Raises:
            ConfigError: The chooser needs classes.
        """
        if self.group.needs_classes:
            refuse_without_classes(context, "group=similarity")
        return {"group": [], "features": None, "population": None}

    def setup(self, state: State, context: ServerContext) -> tuple[Probe, ...]:
        return self.group.setup(context.stream.child("group"))

    def setup_done(self, state: State, answers: Mapping[int, Payload], context: ServerContext) -> State:
        """Add all clients' features [N, D] and their size-weighted mean [D]."""
        features_ND = np.stack([self.group.features(answers[profile.client]) for profile in context.profiles])
        samples_N = np.array([profile.num_samples for profile in context.profiles], dtype=np.float64)
        return {
            **state,
            "features": features_ND,
            "population": (samples_N[:, None] * features_ND).sum(axis=0) / samples_N.sum(),
        }

    def costs(self, context: RoundContext) -> tuple[float, float]:
        """Return kappa_high and kappa_low: ``2 |W| nu`` values (Eq. 2)."""
        steps = max((work.steps for work in context.work.values()), default=1)
        both_ways = 2.0 * context.num_values
        return (
            both_ways * len(due_steps(self.high, steps, sync_rule=self.sync_rule)),
            both_ways * len(due_steps(self.low, steps, sync_rule=self.sync_rule)),
        )

    def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
        group = self._choose(state, context)
        dues = {}
        for client in context.cohort:
            if client in group or not self.high_only:
                interval = self.high if client in group else self.low
                dues[client] = due_steps(interval, context.work[client].steps, sync_rule=self.sync_rule)
        idle: tuple[int, ...] = ()
        if self.high_only and self.idle_clients == "authors":
            idle = tuple(k for k in context.cohort if k not in group)
        return cut_round(dues, idle), {**state, "group": list(group)}

    def _choose(self, state: State, context: RoundContext) -> tuple[int, ...]:
        chooser, problem = self.group, self._problem(state, context)
        if problem.features_AD is None and chooser.setup(context.stream):
            # A forecast: nobody has been asked yet. The most that the budgets admit is the most that it can cost.
            chooser = RandomGroup()
        size = self.group_size
        if size is not None:
            size = min(size, problem.max_size, int(np.count_nonzero(problem.eligible_A)))
        rows = () if size == 0 else chooser.choose(problem, size=size)
        return tuple(context.cohort[row] for row in rows)

    def _problem(self, state: State, context: RoundContext) -> GroupProblem:
        cohort = context.cohort
        eligible = np.ones(len(cohort), dtype=bool)
        max_size = len(cohort)
        high, low = self.costs(context)
        if (budgets := context.budgets) is not None:
            # With high_only whoever is not of the group moves nothing.
            low = 0.0 if self.high_only else low
            budgets.check(cohort, low, cost_high=high)
            eligible = np.asarray(budgets.eligible(cohort, high))
            max_size = budgets.max_high(len(cohort), cost_high=high, cost_low=low)
        counts_NC = np.zeros((len(context.profiles), 0), dtype=np.int64)
        if self.group.reads_labels():
            counts_NC = np.stack([profile.label_counts for profile in context.profiles])
        features_ND = state["features"]
        return GroupProblem(
            counts_AC=counts_NC[list(cohort)],
            population_C=population(counts_NC) if self.group.reads_labels() else np.zeros(0),
            eligible_A=eligible,
            max_size=max_size,
            stream=context.stream.child("group"),
            num_samples_A=np.array([context.profiles[client].num_samples for client in cohort]),
            features_AD=None if features_ND is None else features_ND[list(cohort)],
            population_D=state["population"],
        )

    def report(self, state: State) -> ComponentReport:
        """Report the group; its share of the cohort is seen from there."""
        return ComponentReport(high_frequency=tuple(state["group"]))


@with_card(Card(title="DynamicSGD", source="DynamicFL"))
def dynamicsgd(*, sync_rule: SyncRule = "authors") -> FederatedMethod:
    """All clients are averaged after every local step: the costly bound of DynamicFL.

    Args:
        sync_rule: ``authors``: the step before the last does not synchronise (249 of 250, the paper's costs);
            ``paper``: every step does.
    """
    return FederatedMethod(
        name="dynamicsgd",
        pacing=FixedInterval(interval=1, sync_rule=sync_rule),
        settings=MethodSettings(equal_steps=True),
    )


def sketch_up(*, group: str, sketch_values: int) -> int:
    """With `group` similarity a sketch of the client's gradient: `sketch_values`."""
    return sketch_values if group == "similarity" else 0


def model_down(*, group: str, values: int) -> int:
    """With `group` similarity the initial model: `values`."""
    return values if group == "similarity" else 0


@with_card(
    Card(
        title="DynamicFL",
        source="DynamicFL",
        setup_up=(sketch_up,),
        setup_down=(model_down,),
        limits=(
            Limit(given={"high_interval": 10**6, "low_interval": 10**6}, equal_sizes=True),
            Limit(given={"high_interval": 1, "low_interval": 1}, of="dynamicsgd"),
        ),
        small={"high_interval": 1, "low_interval": 3, "group_size": 2},
    )
)
@takes(TwoSpeed, but=("high", "low", "group"))
def dynamicfl(
    *,
    high_interval: str | int = "a",
    low_interval: str | int = "g",
    group: Literal["dynacomm", "random", "exact", "exhaustive", "genetic", "similarity"] = "dynacomm",
    orders: Orders = 10,
    sketch_values: Count = 256,
    **parameters: Any,
) -> FederatedMethod:
    """A chosen group of clients is averaged often, the others seldom.

    Args:
        high_interval: Local steps between the high-frequency group's sync points: a level a-g (1, 4, 16, 32, 64,
            128, 256) or a number.
        low_interval: The same for the others; at least as long.
        group: How the high-frequency group is chosen in each round: dynacomm (the paper's dynamic programme on label
            counts), exact (certified where it ends), exhaustive, genetic, similarity (clients send no label counts,
            but once a sketch of their gradient at the initial model), or random (as many as the budgets admit,
            without label counts).
        orders: Random orders of the clients that dynacomm and similarity try, at least 1; the others ignore it or
            begin with it.
        sketch_values: With group similarity, values that each client sends before round 1, at least 1.
    """
    return FederatedMethod(
        name="dynamicfl",
        pacing=TwoSpeed(
            high=interval_of(high_interval, key="high_interval"),
            low=interval_of(low_interval, key="low_interval"),
            group=group_chooser(group, orders=orders, sketch_values=sketch_values),
            **parameters,
        ),
        settings=MethodSettings(equal_steps=True),
    )
