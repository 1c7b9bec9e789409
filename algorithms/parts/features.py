"""Networks that say where their features and their head are."""

from __future__ import annotations

from typing import cast

from torch import nn

from fedsweep.errors import ConfigError
from fedsweep.models.network import Network


def network_with_features(model: nn.Module, *, method: str, use: str) -> Network:
    """The model as one that has features and a head.

    Args:
        model: The full model.
        method: For the message.
        use: What the method does with what the head reads: ``"generates"``.

    Raises:
        ConfigError: It does not say where they are.
    """
    if not getattr(model, "has_features", False):
        raise ConfigError(
            f"{method} {use} what a model's head reads, but model {type(model).__name__} has no features and head;"
            " use a built-in model or give yours the methods features and head"
        )
    return cast(Network, model)
