"""Predict a round's payload bytes, of all that is sent but models, from the formulas on the methods' cards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, Literal

import numpy as np
from torch import nn

from fedsweep.card import values_counted
from fedsweep.engine.cost import CostModel, Missed
from fedsweep.engine.ledger import Size
from fedsweep.engine.plan import RoundPlan, with_repeats
from fedsweep.experiment.clients import ClientColumns
from fedsweep.experiment.experiment import Experiment
from fedsweep.models.cost import BYTES_PER_VALUE
from fedsweep.records import ClientProfile
from fedsweep.submodel import FULL_MODEL, Direction, SubModel
from fedsweep.trees import sample_values
from fedsweep.world.population import Drawn

Formula = Literal["up", "down", "setup_up", "setup_down"]


def sized(experiment: Experiment) -> Sequence[ClientProfile]:
    """Return the clients whose sizes matter: those of a drawn population are alike."""
    profiles = experiment.world.profiles
    return profiles[: experiment.most_in_cohort] if experiment.world.is_drawn else profiles


@dataclass(frozen=True)
class PayloadSizes:
    """Sizes of what travels beside the models.

    Attributes:
        values: Scalars; masks are none.
        num_bytes: Its bytes.
    """

    values: Fraction = Fraction(0)
    num_bytes: Fraction = Fraction(0)

    def __add__(self, other: PayloadSizes) -> PayloadSizes:
        return PayloadSizes(self.values + other.values, self.num_bytes + other.num_bytes)


class CardTraffic:
    """Evaluates the formulas of an experiment's cards.

    Args:
        experiment: With the cards of its methods.
        costs: The sub-models' costs.
    """

    def __init__(self, experiment: Experiment, costs: CostModel) -> None:
        self._cards, self._costs, self._world = experiment.cards, costs, experiment.world
        template = experiment.template
        groups: Callable[[], Any] = getattr(template, "unit_groups", tuple)
        features = getattr(template, "has_features", False)
        profiles = sized(experiment)
        self._largest = profiles[int(np.argmax(ClientColumns.of(profiles).num_samples))].client
        self._symbols: Mapping[str, Any] = {
            "input_values": sample_values(experiment.world.data.images),
            "classes": experiment.world.data.num_classes,
            "units": sum(group.size for group in groups()),
            "full_params": experiment.layout.num_params,
            "kernel_weights": sum(layer.get_parameter("weight").numel() for layer in _layers(template)),
            "sizes": _sizes(experiment),
            "rounds": experiment.training.rounds,
        } | ({"features": template.feature_width} if features else {})

    def in_round(self, plan: RoundPlan, seen: set[int]) -> tuple[Fraction, Fraction]:
        """Return bytes that travel beside the models in a round, up and down; see ``sizes_in_round``."""
        sizes = self.sizes_in_round(plan, seen)
        return sizes["up"].num_bytes, sizes["down"].num_bytes

    def most_in_round(self, plan: RoundPlan, seen: set[int]) -> int:
        """Return the most bytes that can travel beside the models: cards say it of a client's first job in a round."""
        # Who only goes on begins none; who drops out is sent something all the same.
        return math.ceil(sum(self.in_round(plan, seen)) * max(1, *jobs_begun(plan).values()))

    def sizes_in_round(self, plan: RoundPlan, seen: set[int]) -> dict[Direction, PayloadSizes]:
        """Return what travels beside the models in a round.

        Args:
            plan: The round.
            seen: Clients that took part in one before; those who take part in this one are added. Who drops out
                forgets the round.
        """
        sizes: dict[Direction, PayloadSizes] = {"up": PayloadSizes(), "down": PayloadSizes()}
        started = {job.client for point in plan.points for job in point.start if not job.resume}
        attending = {client for point in plan.points for client in point.attend}
        for client in sorted(started | plan.lost.keys()):
            missed, first = Missed(), client not in seen
            if (messages := plan.timing_inputs.server_messages) is not None:
                missed = messages.download(client) if first else messages.missed(client)
            sends = plan.lost[client].sends if client in plan.lost else client in attending
            ways: tuple[Direction, ...] = ("down", "up") if sends else ("down",)
            for way in ways:
                sizes[way] += self._size(way, client, plan, first=first, missed=missed)
        seen |= started
        return sizes

    @property
    def goes_up(self) -> bool:
        """Tell whether clients send something beside their models."""
        return any(card.up for card, _ in self._cards)

    def up_from(self, client: int, plan: RoundPlan, seen: set[int]) -> Size:
        """Return what one client sends beside its model in a round; ``seen``: took part in one before."""
        size = self._size("up", client, plan, first=client not in seen, missed=Missed())
        return Size(int(size.values), int(size.num_bytes))

    def _size(self, which: Direction, client: int, plan: RoundPlan, *, first: bool, missed: Missed) -> PayloadSizes:
        """Return what travels beside a client's model in a round; of what has the params' form, encoded.

        ``first``: it has taken part in none before. ``missed``: of what is encoded, at once.
        """
        if not any(getattr(card, which) for card, _ in self._cards):
            return PayloadSizes()
        # Under drift it has samples of the round's classes alone.
        counts = self._world.profiles[client].label_counts
        present = counts[list(plan.context.classes.get(client, range(len(counts))))]
        of_round = {"round": plan.context.round, "own_classes": int((present > 0).sum())}
        submodel = plan.submodel(client)
        values = partial(self._values, which, client, submodel, **of_round, is_first=first)
        params, whole = submodel.message(self._costs.layout, "down").get("params", 0), values()
        masks = whole - values(kernel_weights=0) if whole else whole
        if not whole or not params or not self._costs.encodes_payloads(which):
            return PayloadSizes(whole - masks, BYTES_PER_VALUE * whole)
        rest = values(params=0)
        messages, encoded = (whole - rest) / params, PayloadSizes(rest - masks, BYTES_PER_VALUE * rest)
        for size in self._costs.of_params(submodel, which, missed if which == "down" else ()).values():
            encoded += PayloadSizes(messages * size.values, messages * size.num_bytes)
        return encoded

    def _values(self, which: Formula, client: int, submodel: SubModel, **symbols: Any) -> Fraction:
        """Return values that travel beside a client's model, all cards together; with these symbols of the round."""
        if not self._cards:
            return Fraction(0)
        message = submodel.message(self._costs.layout, "down")
        own = {
            "values": sum(message.values()),
            "params": message.get("params", 0),
            "raw_params": message.get("params", 0),
            "samples": self._world.profiles[client].num_samples,
            "own_classes": int((self._world.profiles[client].label_counts > 0).sum()),
            "is_largest": client == self._largest,
        }
        counts = (
            values_counted(getattr(card, which), {**self._symbols, **own, **symbols, **parameters})
            for card, parameters in self._cards
        )
        return sum(counts, Fraction(0))

    @property
    def setup_bytes(self) -> int:
        """Bytes of the set-up before round 1, all clients."""
        formulas: tuple[Formula, ...] = ("setup_up", "setup_down")
        if not any(getattr(card, which) for card, _ in self._cards for which in formulas):
            return 0
        clients = range(len(self._world.profiles))
        total = sum(self._values(which, k, FULL_MODEL, round=0, is_first=True) for which in formulas for k in clients)
        return int(BYTES_PER_VALUE * total)


def _sizes(experiment: Experiment) -> Sequence[int]:
    """Return all clients' samples; those of a drawn population have equally many, and are not listed."""
    profiles = sized(experiment)
    if experiment.world.is_drawn:
        return Drawn(length=len(experiment.world.profiles), build=lambda _: profiles[0].num_samples)
    return tuple(profile.num_samples for profile in profiles)


def jobs_begun(plan: RoundPlan) -> Counter[int]:
    """Count the jobs that each client begins in a round with what the server sends."""
    jobs: Counter[int] = Counter()
    for point, times in with_repeats(plan.points):
        for job in point.start:
            jobs[job.client] += 0 if job.resume else times
    return jobs


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return its linear and convolutional layers."""
    return [m for m in model.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
