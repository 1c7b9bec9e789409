"""FedStg: rare classes and fast clients count more, and the server aggregates less often while accuracy improves.

The method has two parts: the weights of an aggregation (samples x speed x class rarity), and a schedule that
aggregates in every round at first, in every second one later, and in every one again while accuracy stagnates. The
rotation of classes and the participation by capability that the paper simulates are the scenario's
(``scenario.drift: {kind: cosine_rotation}``, ``scenario.availability: {kind: capability}``), so every other method can
face them too.

Source: FedStg, aggregation rule and stagnation-aware schedule; its authors' program and the log of their run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedsweep import Card, ConfigError, FederatedMethod, Limit, with_card
from fedsweep.components import (
    AtLeastOne,
    BySamples,
    ClientUpdate,
    ComponentReport,
    Count,
    CountOrZero,
    LocalJob,
    NotNegative,
    OncePerRound,
    Pacing,
    RoundContext,
    RoundRecord,
    ServerContext,
    State,
    SyncContext,
    SyncPoint,
    Weighting,
    parameters_of,
    takes,
)

Unaggregated = Literal["continue", "discard"]
DecideOn = Literal["validation", "test"]
Counted = Literal["trained", "all"]
Weights = Literal["rarity", "size"]


# -- weights -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SamplesSpeedRarity(Weighting):
    """``w_i = n_i s_i r_i``, normalised, with ``r_i = min(rarity_cap, 1 + rarity_strength (b_i - 1))``.

    n_i are the samples of the rounds since the client last received a model, in total; s_i is its capability; b_i is
    the mean over its classes of those rounds of N / f_c, with N counted clients of which f_c have the class.

    Attributes:
        counted: Who counts in N and f_c when a class is called rare: trained, the clients of the aggregation; or all
            (the authors' program), the absent ones with the class sets of this round.
        rarity_strength: How much rare classes raise a client's weight, at least 0; 0: not at all.
        rarity_cap: Largest factor for rare classes, at least 1.

    Source: FedStg, aggregation weights. Reading: the paper's "clients in this round" are those that trained; the
    authors' program counts all. Its lower bound of 0.7 on r_i is left out, since b_i >= 1.
    """

    knows_clients: ClassVar[bool] = True

    counted: Counted = "trained"
    rarity_strength: NotNegative = 0.25
    rarity_cap: AtLeastOne = 1.5

    def registration(self) -> tuple[str, ...]:
        """Register the label counts: without drift they tell a client's classes."""
        return ("label_counts",)

    def init(self, context: ServerContext) -> State:
        """Return each client's speed [N], and which classes its data has [N, C]."""
        return {
            "speeds": np.array([profile.capability for profile in context.profiles]),
            "has_class": np.stack([np.asarray(profile.label_counts) > 0 for profile in context.profiles]),
        }

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        attending = {u.client: self._classes(state, u.client, u.classes_since_anchor) for u in updates}
        counted = dict(attending)
        if self.counted == "all":
            # Attendees are counted already, and by the classes of all rounds since they received a model.
            absent = set(range(len(state["speeds"]))) - set(attending)
            counted |= {k: self._classes(state, k, sync.classes.get(k)) for k in sorted(absent)}
        holders = Counter(c for classes in counted.values() for c in classes)
        # At least 1 each: a class held by everybody is not rare.
        rarity = [math.fsum(len(counted) / holders[c] for c in own) / len(own) for own in attending.values()]
        factors = [min(self.rarity_cap, 1 + self.rarity_strength * (b - 1)) for b in rarity]
        speeds = [float(state["speeds"][u.client]) for u in updates]
        weights = torch.tensor(
            [u.num_samples * s * r for u, s, r in zip(updates, speeds, factors, strict=True)], dtype=torch.float64
        )
        return weights / weights.sum(), state

    @staticmethod
    def _classes(state: State, client: int, drifted: Sequence[int] | None) -> Sequence[int]:
        own: list[int] = np.flatnonzero(state["has_class"][client]).tolist()
        return own if drifted is None else drifted


# -- schedule ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StagnationAware(Pacing):
    """Aggregates in each of the first rounds, later in every ``reduced_interval``-th, and in each while it stagnates.

    After each round, with a the accuracy of the global model: a > best sets best = a and goes back to the reduced
    interval; otherwise, if the round was one of aggregation, it is counted, and from ``patience`` counted rounds on
    every round aggregates.

    Attributes:
        reduced_interval: Rounds between two aggregations while accuracy improves: round numbers that it divides; 1:
            every round aggregates, whatever the accuracy (the paper's ablation).
        unaggregated: What becomes of a round without aggregation. continue: clients send nothing and go on from their
            own models, and whoever trained since the last aggregation takes part in the next; discard: they send them
            and the server throws them away (the authors' program).
        decide_on: Whose accuracy decides: validation (needs scenario.server_data.validation) or test (the authors'
            program).
        first_rounds: Rounds at the start that all aggregate, at least 0.
        patience: Aggregations without a new best accuracy after which every round aggregates, at least 1.

    Source: FedStg, stagnation-aware schedule; its states and numbers from the authors' program, whose log it repeats
    (72 aggregations in 100 rounds). Reading: a new best is strictly above all before; ``"discard"`` is what the
    authors' program does, ``"continue"`` what saves the traffic that the paper claims. The paper decides on a
    validation set, the program on the test set.
    """

    observes_start: ClassVar[bool] = True

    reduced_interval: Count = 2
    unaggregated: Unaggregated = "continue"
    decide_on: DecideOn = "validation"
    first_rounds: CountOrZero = 4
    patience: Count = 2

    def carries_work(self) -> bool:
        return self.unaggregated == "continue"

    def discards_work(self) -> bool:
        return self.unaggregated == "discard"

    def init(self, context: ServerContext) -> State:
        """Return the state before the first round.

        Raises:
            ConfigError: The accuracy that decides is not measured, or not in every round.
        """
        if self.decide_on == "validation" and context.validation_data is None:
            raise ConfigError(
                "method.decide_on=validation needs validation data, but scenario.server_data.validation is 0; set it"
                " to 0.1, say, or set method.decide_on=test"
            )
        if context.evaluate_every != 1:
            raise ConfigError(
                "FedStg decides on the accuracy of every round, so evaluation.every must be 1, but got"
                f" {context.evaluate_every}"
            )
        return {"every": False, "count": 0, "best": 0.0}

    def aggregates(self, state: State, round: int) -> bool:
        """Return whether a round (from 1) is one of aggregation."""
        return bool(round <= self.first_rounds or state["every"] or round % self.reduced_interval == 0)

    def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
        holding = set(context.in_flight)
        start = tuple(LocalJob(client=k, steps=context.work[k].steps, resume=k in holding) for k in context.cohort)
        due = self.aggregates(state, context.round)
        if self.unaggregated == "discard":
            return (SyncPoint(start=start, attend=context.cohort, discard=not due),), state
        attend = tuple(sorted({*context.cohort, *context.in_flight})) if due else ()
        return (SyncPoint(start=start, attend=attend),), state

    def observe(self, state: State, record: RoundRecord) -> State:
        """Return the schedule's step after a round; the record of round 0 has the initial model's accuracy."""
        accuracy = record.validation_accuracy if self.decide_on == "validation" else record.test_accuracy
        return state if accuracy is None else self.after(state, record.round, accuracy)

    def after(self, state: State, round: int, accuracy: float) -> State:
        """Return the state after a round (0: before the first) that ended with this accuracy."""
        if accuracy > state["best"]:
            return {"every": False, "count": 0, "best": accuracy}
        if round == 0 or not self.aggregates(state, round):
            return state
        count = state["count"] + 1
        return {**state, "count": count, "every": state["every"] or count >= self.patience}

    def report(self, state: State) -> ComponentReport:
        return ComponentReport(
            metrics={
                "aggregations_without_best": float(state["count"]),
                "aggregates_every_round": float(state["every"]),
            }
        )


@with_card(
    Card(
        title="FedStg",
        source="FedStg",
        needs=("validation", "evaluation", "classes"),
        limits=(Limit(given={"reduced_interval": 1, "weights": "size"}),),
        small={"first_rounds": 1},
    )
)
@takes(StagnationAware, SamplesSpeedRarity)
def fedstg(*, weights: Weights = "rarity", **parameters: Any) -> FederatedMethod:
    """Weights by samples, speed and class rarity; fewer aggregations while accuracy improves.

    Args:
        weights: How clients are averaged: rarity, by samples, speed and class rarity; or size, by samples alone as
            FedAvg does, which leaves the weights to another method that it is merged with.
    """
    by_rarity = SamplesSpeedRarity(**parameters_of(SamplesSpeedRarity, parameters))
    own = parameters_of(StagnationAware, parameters)
    return FederatedMethod(
        name="fedstg",
        pacing=OncePerRound() if parameters["reduced_interval"] == 1 else StagnationAware(**own),
        weighting=by_rarity if weights == "rarity" else BySamples(),
    )
