"""Networks that clients train at several widths, the first units of each layer, so that narrow parts lie in wide ones.

Who trains at which width; and what the network needs on the server: batch norm's statistics, and tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Literal

from torch import Tensor, nn

from fedsweep import Card, ConfigError, Limit
from fedsweep.components import (
    Checked,
    ClientProfile,
    ClientUpdate,
    ComponentReport,
    Refinement,
    RoundContext,
    ServerContext,
    State,
    SubModel,
    SyncContext,
    UnitGroup,
    ordered_kept,
    unit_submodel,
)

from .distilling import Student
from .ensembles import server_inputs
from .unit_draws import unit_groups_of

Assignment = Literal["even", "speed", "drawn"]
WIDTHS_CARD = Card(
    needs=("units",),
    limits=(Limit(given={"widths": [1.0]}),),
    live=("submodel_width",),
    differs=("batch norm's statistics are read from samples on the server, which it then needs",),
)


@dataclass(frozen=True, kw_only=True)
class WidthTiers(Checked):
    """The clients' widths.

    Attributes:
        widths: Shares of each layer's units, above 0 and at most 1, in descending order.
        assignment: ``"even"``: dealt once, as many clients to each width as can be; ``"speed"``: likewise, the fastest
            devices get the widest; ``"drawn"``: each member of a cohort draws one in each round.
    """

    widths: tuple[float, ...]
    assignment: Assignment = "even"

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = all(0 < width <= 1 for width in self.widths)
        if not self.widths or not fits or any(wide <= narrow for wide, narrow in pairwise(self.widths)):
            raise ConfigError(
                f"method.widths must be distinct numbers above 0 and at most 1, but got {list(self.widths)}"
            )

    @property
    def cuts(self) -> bool:
        """Return whether somebody gets less than the whole model."""
        return min(self.widths) < 1

    def fixed(self, context: ServerContext) -> dict[int, float]:
        """Return each client's width for the whole run; empty where it is drawn.

        Raises:
            ConfigError: Widths follow the devices' speeds, but there are no devices.
        """
        if self.assignment == "drawn" or len(self.widths) == 1:
            return {}
        order = [int(k) for k in context.stream.child("tiers").numpy().permutation(context.num_clients)]
        if self.assignment == "speed":
            # Stable: devices of one speed stay as they were drawn.
            order = sorted(order, key=lambda k: -_speed(context.profiles, k))
        share = len(order) / len(self.widths)
        return {client: self.widths[int(place / share)] for place, client in enumerate(order)}

    def of_round(self, fixed: Mapping[int, float], context: RoundContext) -> dict[int, float]:
        """Return the widths of a round's cohort.

        Args:
            fixed: What :meth:`fixed` gave.
            context: The round; its stream draws.
        """
        draw = {k: context.stream.child("tier", k) for k in context.cohort if k not in fixed}
        drawn = {k: self.widths[int(source.numpy().integers(len(self.widths)))] for k, source in draw.items()}
        return {k: fixed[k] if k in fixed else drawn[k] for k in context.cohort}


def width_tiers(widths: Sequence[float], assignment: Assignment) -> WidthTiers:
    """Return tiers of widths in any order.

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


def ordered_part(groups: Sequence[UnitGroup], width: float) -> SubModel:
    """Return the first units of each group at a width; the full model at width 1."""
    return unit_submodel(groups, ordered_kept(groups, width))


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether the network has statistics that depend on its width."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


@dataclass(frozen=True, kw_only=True)
class StaticBatchNorm(Refinement):
    """After each round, batch norm's statistics are those of the server's inputs, whatever the clients' were.

    In training each width has the statistics of its own batches; means over clients of several widths would fit none.

    Attributes:
        method: Whose this is, for messages.

    Source: Diao, Ding, Tarokh (2021), HeteroFL, section 3, static batch norm. Reading: the inputs are the server's, so
    nothing more travels; the paper asks the clients.
    """

    # Networks without batch norm do without it.
    needs_server: ClassVar[bool] = False

    method: str

    def init(self, context: ServerContext) -> State:
        """Return an empty state.

        Raises:
            ConfigError: There is batch norm, but the server has no data.
        """
        if has_batch_norm(context.model):
            server_inputs(context, self.method)
        return {}

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        if not has_batch_norm(sync.model):
            return vector, state
        inputs = server_inputs(sync, self.method)
        return Student(vector, sync, batch_norm="proxy").with_statistics(vector, inputs), state


@dataclass(frozen=True, kw_only=True)
class WidthAccuracies(Refinement):
    """Changes nothing; tests the model at each width on the server's validation data, where there is some.

    Each width has batch norm's statistics of its own, read from the server's inputs.

    Attributes:
        widths: Above 0, at most 1.
        method: Whose this is, for messages.
    """

    needs_server: ClassVar[bool] = False

    widths: tuple[float, ...]
    method: str

    def init(self, context: ServerContext) -> State:
        return {"accuracies": {}, "every": context.evaluate_every, "rounds": context.num_rounds}

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        tested = sync.validation_data is not None and (
            sync.round % state["every"] == 0 or sync.round == state["rounds"]
        )
        accuracies = {str(width): self._accuracy(width, vector, sync) for width in self.widths} if tested else {}
        return vector, {**state, "accuracies": accuracies}

    def _accuracy(self, width: float, vector: Tensor, sync: SyncContext) -> float:
        part = ordered_part(unit_groups_of(sync.model, method=self.method), width)
        own = replace(
            sync,
            model=part.build(sync.model),
            layout=part.layout(sync.layout),
            forward_flops=lambda _: sync.forward_flops(part),
        )
        values = part.extract(vector, sync.layout)
        student = Student(values, own, batch_norm="frozen")
        if has_batch_norm(own.model):
            student.with_statistics(values, server_inputs(sync, self.method))
        assert sync.validation_data is not None
        return student.accuracy(*sync.validation_data)

    def report(self, state: State) -> ComponentReport:
        return ComponentReport(metrics={f"accuracy_at_width_{w}": a for w, a in state["accuracies"].items()})
