"""Which client trains at which width: the first units of each layer, so that narrow parts lie in wide ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from fedsweep.errors import ConfigError
from fedsweep.records import ClientProfile, RoundContext, ServerContext

Assignment = Literal["even", "speed", "drawn"]


@dataclass(frozen=True, kw_only=True)
class WidthTiers:
    """The clients' widths.

    Attributes:
        widths: Shares of each layer's units, above 0 and at most 1, in descending order.
        assignment: ``"even"``: dealt once, as many clients to each width as can be; ``"speed"``: likewise, the fastest
            devices get the widest; ``"drawn"``: each member of a cohort draws one in each round.
    """

    widths: tuple[float, ...]
    assignment: Assignment = "even"

    def __post_init__(self) -> None:
        fits = all(0 < width <= 1 for width in self.widths)
        if not self.widths or not fits or any(wide <= narrow for wide, narrow in pairwise(self.widths)):
            raise ConfigError(
                f"method.widths must be distinct numbers above 0 and at most 1, but got {list(self.widths)}"
            )

    @property
    def cuts(self) -> bool:
        """Whether somebody gets less than the whole model."""
        return min(self.widths) < 1

    def fixed(self, context: ServerContext) -> dict[int, float]:
        """Each client's width for the whole run; empty where it is drawn.

        Raises:
            ConfigError: Widths follow the devices' speeds, but there are no devices.
        """
        if self.assignment == "drawn" or len(self.widths) == 1:
            return {}
        order = [int(k) for k in context.stream.child("tiers").numpy().permutation(context.num_clients)]
        if self.assignment == "speed":
            order = sorted(order, key=lambda k: -_speed(context.profiles, k))
        share = len(order) / len(self.widths)
        return {client: self.widths[int(place / share)] for place, client in enumerate(order)}

    def of_round(self, fixed: Mapping[int, float], context: RoundContext) -> dict[int, float]:
        """The widths of a round's cohort.

        Args:
            fixed: What :meth:`fixed` gave.
            context: The round; its stream draws.
        """
        draw = {k: context.stream.child("tier", k) for k in context.cohort if k not in fixed}
        drawn = {k: self.widths[int(source.numpy().integers(len(self.widths)))] for k, source in draw.items()}
        return {k: fixed[k] if k in fixed else drawn[k] for k in context.cohort}


def width_tiers(widths: Sequence[float], assignment: Assignment) -> WidthTiers:
    """Tiers of widths in any order.

    Raises:
        ConfigError: A width is out of range or named twice, or there is none.
    """
    return WidthTiers(widths=tuple(sorted((float(width) for width in widths), reverse=True)), assignment=assignment)


def _speed(profiles: Sequence[ClientProfile], client: int) -> float:
    device = profiles[client].device
    if device is None:
        raise ConfigError(
            "method.assignment=speed needs the devices' speeds; set scenario.devices, or method.assignment=even"
        )
    return device.flops_per_s
