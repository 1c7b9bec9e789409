"""PruneFL's rule: which weights are worth their time.

Source: Jiang et al. (2022): Model pruning enables efficient federated learning on edge devices. IEEE Transactions on
Neural Networks and Learning Systems.

Shape letters: P params, n some weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedsweep import ConfigError, Network
from fedsweep.components import layer_costs

from ..parts.element_masks import Layers, decided, largest, shared_out

Times = Literal["equal", "layers"]


def greedy(gains_n: Tensor, times_n: Tensor, *, gain: float, time: float, room: int) -> Tensor:
    """Choose the weights to add so that the gain per time is largest (bool [n]).

    They are visited by falling ``gain / time``; one is added while that is above what all so far come to.

    Args:
        gains_n: What each brings, at least 0.
        times_n: What each takes, above 0.
        gain: What is there already brings.
        time: What is there already takes, the constant part with it, above 0.
        room: At most so many are added.

    Source: Jiang et al. (2022), section 4.3, Algorithm 1; without ``room`` it is the best of all sets.
    """
    gains, times = gains_n.double(), times_n.double()
    ratios, order = torch.sort(gains / times, descending=True, stable=True)
    zero = torch.zeros(1, dtype=torch.float64)
    before = (gain + torch.cat([zero, gains[order].cumsum(0)])[:-1]) / (
        time + torch.cat([zero, times[order].cumsum(0)])[:-1]
    )
    number = min(room, int((ratios > before).long().cumprod(0).sum()))
    chosen = torch.zeros(len(gains), dtype=torch.bool)
    chosen[order[:number]] = True
    return chosen


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The rule by which alive weights are chosen.

    Attributes:
        sparsity: At least this share of the weights is zero.
        times: What a weight takes of a round's time: ``"equal"``: all the same, as with kernels that do not see zeros,
            where a weight saves its way alone; ``"layers"``: half of it as its layer's multiply-accumulates per weight.
        fixed_time: What a round takes whatever the weights, over what all of them take.
    """

    sparsity: float
    times: Times
    fixed_time: float

    def most(self, layers: Layers) -> int:
        """Return the greatest number of alive weights."""
        return round((1 - self.sparsity) * sum(stop - start for start, stop in layers.values()))

    def weight_times(self, model: nn.Module, layers: Layers) -> dict[str, float]:
        """Return the relative time of a weight of each layer; 1 in the mean over all weights.

        Raises:
            ConfigError: Times are to follow the layers' operations, but the network does not say what it is given.
        """
        if self.times == "equal":
            return dict.fromkeys(layers, 1.0)
        if not isinstance(model, Network):
            raise ConfigError(
                f"method.times=layers needs the shape of the inputs, which {type(model).__name__} does not say; use a"
                " built-in model, or set method.times=equal"
            )
        costs = layer_costs(model, model.input_shape)
        macs = {name: costs[name][0] for name in layers}
        number = sum(stop - start for start, stop in layers.values())
        mean = sum(macs.values()) / number
        return {name: 0.5 + 0.5 * macs[name] / (stop - start) / mean for name, (start, stop) in layers.items()}

    def again(
        self,
        mask_P: Tensor,
        gains_P: Tensor,
        sizes_P: Tensor,
        *,
        layers: Layers,
        times: Mapping[str, float],
        share: float,
    ) -> Tensor:
        """Return the mask with its dead weights and the smallest of its alive ones chosen again (bool [P]).

        Args:
            mask_P: What is alive.
            gains_P: Squared gradients.
            sizes_P: Magnitudes of the weights.
            layers: Where the weights lie.
            times: See :meth:`weight_times`.
            share: Of each layer's alive weights that are chosen again, below 1: the others stay.
        """
        free, times_P = torch.zeros_like(mask_P), torch.zeros(len(mask_P), dtype=torch.float64)
        for name, (start, stop) in layers.items():
            own = mask_P[start:stop]
            smallest = largest(torch.where(own, -sizes_P[start:stop], -torch.inf), int(share * int(own.sum())))
            free[start:stop], times_P[start:stop] = ~own | smallest, times[name]
        stays = decided(mask_P & ~free, layers)
        gains, weight_times = decided(gains_P.double(), layers), decided(times_P, layers)
        places = decided(torch.arange(len(mask_P)), layers)[decided(free, layers)]
        chosen = greedy(
            gains_P[places],
            times_P[places],
            # Biases and the like are always alive: their gains count as the program counts them, their times do not.
            gain=float(gains[stays].sum() + gains_P.double().sum() - gains.sum()),
            time=float(weight_times[stays].sum() + self.fixed_time * weight_times.sum()),
            room=max(0, self.most(layers) - int(stays.sum())),
        )
        mask = mask_P & ~free
        mask[places[chosen]] = True
        return mask

    def trimmed(self, mask_P: Tensor, sizes_P: Tensor, layers: Layers) -> Tensor:
        """Return the mask of the largest alive weights, as many of each layer as the sparsity allows (bool [P])."""
        alive = [int(mask_P[start:stop].sum()) for start, stop in layers.values()]
        if sum(alive) <= self.most(layers):
            return mask_P
        counts = shared_out(self.most(layers), alive, [self.most(layers) / sum(alive)] * len(alive))
        mask = mask_P.clone()
        for (start, stop), count in zip(layers.values(), counts, strict=True):
            mask[start:stop] = largest(torch.where(mask_P[start:stop], sizes_P[start:stop], -1.0), count)
        return mask
