"""Networks asked under given values: what they say, what their head is given, and which values belong to the head.

The module itself stays as it is and is asked in the mode in which it is, so one template serves any number of models.

Shape letters: B inputs, C classes, D features.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn

from fedsweep.models.network import Network
from fedsweep.trees import placed, trained_params

_HEADS: weakref.WeakKeyDictionary[nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()


class _Asked(nn.Module):
    """Reaches a network's methods through ``forward``, the only one that torch calls with other values."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, method: str, inputs: Tensor) -> Tensor:
        answer: Tensor = getattr(self.model, method)(inputs)
        return answer


def logits_with(model: nn.Module, values: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Return logits [B, C] of a model under other values.

    Args:
        model: For its structure.
        values: Params and float buffers by name, on the inputs' device; others (riders) are passed over, and what is
            missing is the module's own.
        inputs: [B, ...].
    """
    return _ask(model, values, "__call__", inputs)


def features_with(model: nn.Module, values: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    """Return the head's inputs [B, D], under other values; arguments as in :func:`logits_with`."""
    return _ask(model, values, "features", inputs)


def head_with(model: nn.Module, values: Mapping[str, Tensor], features: Tensor) -> Tensor:
    """Return logits [B, C] of features [B, D], under other values; those of :func:`head_names` are enough."""
    return _ask(model, values, "head", features)


def _ask(model: nn.Module, values: Mapping[str, Tensor], method: str, inputs: Tensor) -> Tensor:
    names = (name for name, _ in chain(model.named_parameters(), model.named_buffers()))
    own = {f"model.{name}": values[name] for name in names if name in values}
    answer: Tensor = torch.func.functional_call(_Asked(model), own, (method, inputs), strict=False)
    return answer


def head_names(model: nn.Module) -> frozenset[str]:
    """Return names of the params without influence on the features, and of the float buffers that lie with them alone.

    Computed once for each module, by a backward pass from the features of two samples of zeros; none where the network
    does not say where its features are.

    Args:
        model: A network, full or a part of one, on any device; it stays as it is.
    """
    if model not in _HEADS:
        _HEADS[model] = (
            _unused_by_features(cast(Network, model)) if getattr(model, "has_features", False) else frozenset()
        )
    return _HEADS[model]


def _unused_by_features(model: Network) -> frozenset[str]:
    learned = {**trained_params(model), **dict(model.named_buffers())}
    values = {name: value.detach().clone() for name, value in learned.items()}
    params = {name: values[name].requires_grad_() for name in trained_params(model)}
    place = next(iter(params.values()))
    inputs = placed(model.example(2), device=place.device, dtype=place.dtype)
    # Drawn dropout would move torch's generator.
    with torch.random.fork_rng(devices=[place.device] if place.device.type == "cuda" else []), torch.enable_grad():
        reached = features_with(model, values, cast(Tensor, inputs)).sum()
        # Features of the inputs alone, or of what is frozen, have no gradient.
        own = list(params.values())
        gradients = torch.autograd.grad(reached, own, allow_unused=True) if reached.requires_grad else [None] * len(own)
    body = {name for name, gradient in zip(params, gradients, strict=True) if gradient is not None}
    places = {name.rpartition(".")[0] for name in params} - {name.rpartition(".")[0] for name in body}
    buffers = {n for n, b in model.named_buffers() if b.is_floating_point() and n.rpartition(".")[0] in places}
    return frozenset(params.keys() - body) | buffers
