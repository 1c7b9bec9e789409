"""Parts of methods that give each client some units of the network: the units there are, and draws of a number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from fedsweep import ConfigError
from fedsweep.components import UnitGroup

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
# c f(x) = f(c x) for c > 0: behind these a factor is as good as before them.
_HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.Identity)


def unit_groups_of(model: nn.Module | None, *, method: str) -> tuple[UnitGroup, ...]:
    """Return the network's groups of units, from the input on.

    Args:
        model: The full network.
        method: Who asks, for the message.

    Raises:
        ConfigError: The network lists no units that can be left out.
    """
    listed = getattr(model, "unit_groups", None)
    groups: tuple[UnitGroup, ...] = () if listed is None else tuple(listed())
    if not groups:
        raise no_units(model, method=method)
    return groups


def no_units(model: nn.Module | None, *, method: str) -> ConfigError:
    """Return the error for a network that lists no units that a method can leave out."""
    return ConfigError(
        f"{method} leaves out channels, neurons and heads, but model {type(model).__name__} lists no unit groups;"
        " use a built-in model or give yours a method unit_groups"
    )


def has_norm(model: nn.Module, group: UnitGroup) -> bool:
    """Return whether a norm lies over what makes the group's units: it undoes any factor of the weights before it."""
    owners = {name.rpartition(".")[0] for name, _ in group.produced}
    return any(isinstance(model.get_submodule(owner), _NORMS) for owner in owners)


def why_not_homogeneous(model: nn.Module, group: UnitGroup) -> str:
    """Name the modules between a group's weights and units that a factor c > 0 does not pass; empty: there are none."""
    kinds = [type(model.get_submodule(path)) for path in group.modules]
    if not group.residual and all(issubclass(kind, _HOMOGENEOUS) for kind in kinds):
        return ""
    return f"{' and '.join(kind.__name__ for kind in kinds)}{' and additions' if group.residual else ''}"


def drawn_of_each(
    groups: Sequence[UnitGroup],
    counts: Sequence[int],
    *,
    generator: np.random.Generator,
    weights: Sequence[np.ndarray] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Draw so many units of each group, without replacement: group -> units, ascending.

    Args:
        groups: The groups, in order.
        counts: For each how many units, 1 .. size.
        generator: Random numbers.
        weights: For each group the units' chances in each draw [size], above 0, up to a factor; equal by default.
    """
    drawn = {}
    for number, (group, count) in enumerate(zip(groups, counts, strict=True)):
        chances = None if weights is None else weights[number] / weights[number].sum()
        units = generator.choice(group.size, size=count, replace=False, p=chances)
        drawn[group.name] = tuple(sorted(int(unit) for unit in units))
    return drawn
