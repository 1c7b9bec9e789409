"""Predictions of clients' models for inputs on the server.

Shape letters: B inputs, C classes, M models, V values of a model.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fedsweep import ConfigError
from fedsweep.components import (
    FULL_MODEL,
    ClientUpdate,
    ServerContext,
    SyncContext,
    any_of,
    logits_with,
    on_device,
    taken,
)

# Inputs per forward pass, so that large server sets fit into memory.
_BATCH = 500


def template(sync: SyncContext) -> nn.Module:
    """Return a copy of the full model in evaluation mode, where heavy work belongs."""
    # A copy, since all components are shown the same model, and `to` moves a module itself.
    return copy.deepcopy(sync.model).eval().to(sync.device)


def upload_logits(model: nn.Module, update: ClientUpdate, inputs: Tensor) -> Tensor:
    """Return logits [B, C] of a client's model, with its own buffers, in the template's mode.

    Args:
        model: The full model's template, on the inputs' device.
        update: With its vector.
        inputs: [B, ...].
    """
    values = {name: value.to(any_of(inputs).device) for name, value in update.params.items()}
    return logits_with(update.submodel.build(model), values, inputs)


def in_batches(predict: Callable[[Tensor], Tensor], inputs: Tensor, device: torch.device | str) -> Tensor:
    """Return ``predict`` of all inputs, some at a time on the device; logits [B, C] on the CPU."""
    parts = (taken(inputs, slice(start, start + _BATCH)) for start in range(0, len(any_of(inputs)), _BATCH))
    return torch.cat([predict(on_device(part, device)).cpu() for part in parts])


def ensemble_logits(updates: Sequence[ClientUpdate], sync: SyncContext, inputs: Tensor) -> Tensor:
    """Return logits [M, B, C] on the CPU of the attendees' models in evaluation mode, each with its own buffers."""
    model = template(sync)
    sync.count_flops(len(any_of(inputs)) * sum(sync.forward_flops(u.submodel) for u in updates))
    with torch.no_grad():
        rows = [in_batches(functools.partial(upload_logits, model, u), inputs, sync.device) for u in updates]
    return torch.stack(rows)


def model_logits(vectors: Sequence[Tensor], sync: SyncContext, inputs: Tensor) -> Tensor:
    """Return logits [M, B, C] on the CPU of full models, given as vectors [V], in evaluation mode."""
    model, rows = template(sync), []
    sync.count_flops(len(any_of(inputs)) * len(vectors) * sync.forward_flops(FULL_MODEL))
    with torch.no_grad():
        for vector in vectors:
            values = sync.layout.views(vector.to(sync.device))
            rows.append(in_batches(functools.partial(logits_with, model, values), inputs, sync.device))
    return torch.stack(rows)


def server_inputs(context: ServerContext | SyncContext, method: str) -> Tensor:
    """Return the proxy data's inputs; its labels are not looked at.

    Raises:
        ConfigError: There is none.
    """
    if context.proxy_data is None:
        raise ConfigError(
            f"method {method} needs data on the server, but the scenario has none; set scenario.server_data.proxy to"
            " {per_class: 10, labelled: false}, say"
        )
    return context.proxy_data[0]
