"""What travels beside the models, from the methods' cards: known before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal

from torch import nn

from fedsweep.engine.cost import CostModel
from fedsweep.experiment.experiment import Experiment
from fedsweep.models.cost import BYTES_PER_VALUE
from fedsweep.submodel import FULL_MODEL, SubModel

Formula = Literal["up", "down", "setup_up", "setup_down"]


class Beside:
    """Evaluates the formulas of an experiment's cards.

    Args:
        experiment: With the cards of its methods.
        costs: The sub-models' costs.
    """

    def __init__(self, experiment: Experiment, costs: CostModel) -> None:
        self._cards, self._costs, self._world = experiment.cards, costs, experiment.world
        template, shape = experiment.template, experiment.world.data.images.shape[1:]
        groups: Callable[[], Any] = getattr(template, "unit_groups", tuple)
        features = getattr(template, "has_features", False)
        profiles = experiment.world.profiles
        self._largest = max(profiles, key=lambda p: (p.num_samples, -p.client)).client
        self._symbols: Mapping[str, Any] = {
            "X": math.prod(shape),
            "C": experiment.world.data.num_classes,
            "U": sum(group.size for group in groups()),
            "F": experiment.layout.num_params,
            "K": sum(layer.get_parameter("weight").numel() for layer in _layers(template)),
            "sizes": tuple(profile.num_samples for profile in experiment.world.profiles),
            "rounds": experiment.training.rounds,
        } | ({"D": template.feature_width} if features else {})

    def values(self, which: Formula, client: int, submodel: SubModel, *, round: int, first: bool) -> Fraction:
        """Values that travel beside a client's model, all cards together.

        Args:
            which: Of a card's formulas.
            client: Its id.
            submodel: The part of the model that it has.
            round: From 1; 0 before.
            first: It has taken part in no round before.
        """
        if not self._cards:
            return Fraction(0)
        message = submodel.message(self._costs.layout, "down")
        own = {
            "W": sum(message.values()),
            "P": message.get("params", 0),
            "n": self._world.profiles[client].num_samples,
            "H": int((self._world.profiles[client].label_counts > 0).sum()),
            "largest": client == self._largest,
            "round": round,
            "first": first,
        }
        found = (card.evaluate(getattr(card, which), {**self._symbols, **own, **given}) for card, given in self._cards)
        return sum(found, Fraction(0))

    @property
    def setup_bytes(self) -> int:
        """Bytes of the exchange before round 1, all clients."""
        formulas: tuple[Formula, ...] = ("setup_up", "setup_down")
        clients = [profile.client for profile in self._world.profiles]
        total = sum(self.values(which, k, FULL_MODEL, round=0, first=True) for which in formulas for k in clients)
        return int(BYTES_PER_VALUE * total)


def _layers(model: nn.Module) -> list[nn.Module]:
    """Its linear and convolutional layers."""
    return [m for m in model.modules() if isinstance(m, nn.Linear | nn.modules.conv._ConvNd)]
