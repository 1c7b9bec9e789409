"""Where FedAD's multiplier of kept units acts, and whether a network lets it pass there."""

from __future__ import annotations

from typing import Literal

from torch import nn

from fedsweep.errors import ConfigError
from fedsweep.models.unit_submodel import MultiplierIn

from ..parts.unit_draws import has_norm, why_not_homogeneous
from .unit_scores import maskable_groups

Multiplier = Literal["auto", "activation", "incoming", "split", "none"]


def scales_in(multiplier: Multiplier, model: nn.Module) -> MultiplierIn | None:
    """Where the multiplier acts on a network; None: nowhere.

    Args:
        multiplier: As asked for.
        model: The full network.

    Raises:
        ConfigError: Not where it is asked to.
    """
    if multiplier == "none":
        return None
    between = why_not_in_weights(model) if multiplier != "activation" else ""
    if multiplier == "auto":
        return "activation" if between else "incoming"
    if between:
        raise ConfigError(
            f"method.multiplier={multiplier} puts 1 / (1 - rate) into the weights that make a unit, as can be done"
            f" where ReLU alone stands between it and them; but {between}; set method.multiplier=activation"
        )
    return multiplier


def why_not_in_weights(model: nn.Module) -> str:
    """What of a network does not let a factor of weights pass through to its units, in words; empty: nothing."""
    for group in maskable_groups(model):
        found = "a norm" if has_norm(model, group) else why_not_homogeneous(model, group)
        if found or group.kind == "head":
            return f"units {group.name!r} of {type(model).__name__} go through {found or 'attention'}"
    return ""
