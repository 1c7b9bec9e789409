"""Bytes beside the models: what methods' cards say of them, before a round is played."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

import numpy as np
from torch import nn

from fedsweep.card import values_counted
from fedsweep.engine.cost import CostModel, Missed
from fedsweep.engine.plan import RoundPlan
from fedsweep.experiment.clients import ClientColumns
from fedsweep.experiment.experiment import Experiment
from fedsweep.models.cost import BYTES_PER_VALUE
from fedsweep.records import ClientProfile
from fedsweep.submodel import FULL_MODEL, Direction, SubModel
from fedsweep.trees import sample_values

Formula = Literal["up", "down", "setup_up", "setup_down"]


def sized(experiment: Experiment) -> Sequence[ClientProfile]:
    """Return the clients whose sizes matter: those of a drawn population are alike."""
    profiles = experiment.world.profiles
    return profiles[: experiment.most_in_cohort] if experiment.world.is_drawn else profiles


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
            "sizes": tuple(profile.num_samples for profile in profiles),
            "rounds": experiment.training.rounds,
        } | ({"features": template.feature_width} if features else {})

    def in_round(self, plan: RoundPlan, seen: set[int]) -> tuple[Fraction, Fraction]:
        """Return bytes that travel beside the models in a round, up and down.

        Args:
            plan: The round.
            seen: Clients that took part in one before; those who take part in this one are added.
        """
        up = down = Fraction(0)
        started = {job.client for point in plan.points for job in point.start if not job.resume}
        attending = {client for point in plan.points for client in point.attend}
        for client in sorted(started):
            missed, first, part = Missed(), client not in seen, plan.submodel(client)
            if (messages := plan.prices.server_messages) is not None:
                missed = messages.download(client) if first else messages.missed(client)
            down += self._num_bytes("down", client, part, round=plan.context.round, first=first, missed=missed)
            if client in attending:
                up += self._num_bytes("up", client, part, round=plan.context.round, first=first)
        seen |= started
        return up, down

    def _num_bytes(
        self,
        which: Direction,
        client: int,
        submodel: SubModel,
        *,
        round: int,
        first: bool,
        missed: Missed = (),
    ) -> Fraction:
        """Return bytes that travel beside a client's model in a round; of what has the params' form, encoded.

        Rounds count from 1. ``first``: it has taken part in none before. ``missed``: of what is encoded, at once.
        """
        params = submodel.message(self._costs.layout, "down").get("params", 0)
        whole = self._values(which, client, submodel, round=round, first=first, params=params)
        if not whole or not params or not self._costs.encodes_payloads(which):
            return BYTES_PER_VALUE * whole
        rest = self._values(which, client, submodel, round=round, first=first, params=0)
        encoded = sum(size.num_bytes for size in self._costs.of_params(submodel, which, missed).values())
        return BYTES_PER_VALUE * rest + (whole - rest) / params * encoded

    def _values(
        self, which: Formula, client: int, submodel: SubModel, *, round: int, first: bool, params: int
    ) -> Fraction:
        """Return values that travel beside a client's model, all cards together; round 0 is before the first."""
        if not self._cards:
            return Fraction(0)
        own = {
            "values": sum(submodel.message(self._costs.layout, "down").values()),
            "params": params,
            "samples": self._world.profiles[client].num_samples,
            "own_classes": int((self._world.profiles[client].label_counts > 0).sum()),
            "is_largest": client == self._largest,
            "round": round,
            "is_first": first,
        }
        counts = (
            values_counted(getattr(card, which), {**self._symbols, **own, **parameters})
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
        params = self._costs.layout.num_params
        total = sum(
            self._values(which, k, FULL_MODEL, round=0, first=True, params=params)
            for which in formulas
            for k in clients
        )
        return int(BYTES_PER_VALUE * total)


def _layers(model: nn.Module) -> list[nn.Module]:
    """Return its linear and convolutional layers."""
    return [m for m in model.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
