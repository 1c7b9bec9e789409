"""Scores of a network's units: a filter's ranks of maps, a neuron's incoming, a head's outgoing weights.

Units are those of the groups that no residual addition ties together, in the network's order.

Source: Lin et al. (2020), HRank: filter pruning using high-rank feature map, CVPR (ranks); FedDHAD, section on FedAD.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from fedsweep import Network
from fedsweep.components import Count, LocalClient, ParamTree, Payload, Probe, UnitGroup, any_of, taken

RankScale = Literal["relative", "raw"]
WeightSum = Literal["absolute", "signed"]

# Samples per forward pass: all maps of a group are held at once.
_CHUNK = 16


def maskable_groups(model: nn.Module) -> tuple[UnitGroup, ...]:
    """Return the groups whose units can be left out alone, untied by residual additions; none for unknown networks."""
    if not hasattr(model, "unit_groups"):
        return ()
    return tuple(group for group in cast(Network, model).unit_groups() if not group.residual)


def feature_ranks(model: nn.Module, groups: Sequence[UnitGroup], inputs: Tensor, *, scale: RankScale) -> list[Tensor]:
    """Return each convolutional group's mean ranks [size], float64, of its units' maps after the activation.

    Args:
        model: The network, used as it is (in evaluation mode).
        groups: Convolutional groups.
        inputs: Samples [S, ...], at least one.
        scale: ``"relative"``: divided by the largest possible rank, min(H, W), so that layers can be compared;
            ``"raw"``: 0 .. min(H, W).

    Reading: a map of one dimension is a single row, so its rank says whether the filter is active at all; of three, its
    last two are the columns.
    """
    maps: dict[str, Tensor] = {}
    handles = []
    for group in groups:

        def keep(module: nn.Module, inputs: object, output: Tensor, name: str = group.name) -> None:
            maps[name] = output

        handles.append(model.get_submodule(group.module).register_forward_hook(keep))
    totals, count = [torch.zeros(group.size, dtype=torch.float64) for group in groups], len(any_of(inputs))
    try:
        with torch.no_grad():
            for start in range(0, count, _CHUNK):
                model(taken(inputs, slice(start, start + _CHUNK)))
                for total, group in zip(totals, groups, strict=True):
                    matrices = maps[group.name]  # [B, size, H, W]
                    if matrices.dim() != 4:
                        matrices = matrices.unsqueeze(2) if matrices.dim() == 3 else matrices.flatten(3)
                    ranks = torch.linalg.matrix_rank(matrices).to(torch.float64)
                    largest = min(matrices.shape[-2:]) if scale == "relative" else 1
                    total += ranks.sum(dim=0).cpu() / largest
    finally:
        for handle in handles:
            handle.remove()
    return [total / count for total in totals]


def incoming_weights(params: ParamTree, group: UnitGroup, *, weight_sum: WeightSum) -> Tensor:
    """Return each neuron's mean incoming weight over the layer's largest [size], float64, at most 1.

    Args:
        params: The network's parameters.
        group: A group of neurons.
        weight_sum: ``"absolute"``: of the weights' absolute values; ``"signed"``: of the weights, which may cancel.
    """
    weight = params[group.produced[0][0]].detach().to(torch.float64)
    return _over_largest((weight.abs() if weight_sum == "absolute" else weight).mean(dim=1))


def outgoing_weights(params: ParamTree, group: UnitGroup) -> Tensor:
    """Return each head's mean absolute weight in the output projection over the largest [size], float64.

    Args:
        params: The network's parameters.
        group: A group of attention heads.
    """
    name, _, block = group.consumed[0]
    weight = params[name].detach().to(torch.float64)
    return _over_largest(weight.abs().reshape(len(weight), group.size, block).mean(dim=(0, 2)))


def _over_largest(means: Tensor) -> Tensor:
    largest = float(means.abs().max())
    return means.cpu() / largest if largest else means.cpu()


@dataclass(frozen=True, kw_only=True)
class UnitScores(Probe):
    """Scores of all maskable units at the client's trained model.

    Sends ``scores``: one number per unit, groups one after the other.

    Attributes:
        score_samples: Samples that a device averages the ranks of its feature maps over.
        rank_scale: Ranks relative to the size of the maps, or raw.
        weight_sum: Neurons by the sum of their absolute incoming weights, or of the signed ones.
        has_filters: Whether there are maps to be made; other scores take no forward pass.

    Source: FedDHAD, unit scores. Reading: ranks relative to the map's size and absolute sums, since raw ranks can't be
    compared between layers and signed sums cancel. Reading: the paper names transformers without a rule for heads;
    a head is scored by its absolute weights in the output projection, whatever ``weight_sum``, since it is a group of
    neurons and what it adds to the tokens is bounded by them. The rank of its output would be the other choice.
    """

    when: ClassVar[Literal["round_end"]] = "round_end"

    score_samples: Count = 128
    rank_scale: RankScale = "relative"
    weight_sum: WeightSum = "absolute"
    has_filters: bool = True
    name: str = "unit_scores"

    def passes_over(self, num_samples: int) -> float:
        return min(self.score_samples, num_samples) if self.has_filters else 0

    def measure(self, client: LocalClient) -> Payload:
        groups = maskable_groups(client.model)
        order = torch.randperm(len(client.targets), generator=client.stream.torch())
        inputs = taken(client.inputs, order[: self.score_samples].to(client.targets.device))
        filters = [group for group in groups if group.kind == "conv"]
        ranks = feature_ranks(client.model, filters, inputs, scale=self.rank_scale) if filters else []
        weights: ParamTree = {**dict(client.model.named_parameters())}  # frozen ones, too
        of_filters = dict(zip((group.name for group in filters), ranks, strict=True))
        scores = [
            of_filters[group.name] if group.kind == "conv" else self._by_weights(weights, group) for group in groups
        ]
        return {"scores": torch.cat(scores).to(torch.float32)}

    def _by_weights(self, params: ParamTree, group: UnitGroup) -> Tensor:
        if group.kind == "head":
            return outgoing_weights(params, group)
        return incoming_weights(params, group, weight_sum=self.weight_sum)
