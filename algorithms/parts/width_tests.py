"""What a network needs on the server when clients train it at several widths: batch norm's statistics, and tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from fedsweep.components.aggregation import Refinement
from fedsweep.components.base import ComponentReport
from fedsweep.models.slicing import ordered_kept
from fedsweep.models.unit_groups import UnitGroup
from fedsweep.models.unit_submodel import unit_submodel
from fedsweep.records import ClientUpdate, ServerContext, State, SyncContext
from fedsweep.submodel import SubModel

from .distilling import Student
from .ensembles import server_inputs
from .unit_draws import unit_groups_of


def ordered_part(groups: Sequence[UnitGroup], width: float) -> SubModel:
    """The first units of each group at a width; the full model at width 1."""
    return unit_submodel(groups, {name: units.tolist() for name, units in ordered_kept(groups, width).items()})


def has_batch_norm(model: nn.Module) -> bool:
    """Whether the network has statistics that depend on its width."""
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

    method: str

    def init(self, context: ServerContext) -> State:
        """Nothing to keep.

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
        found = {str(width): self._accuracy(width, vector, sync) for width in self.widths} if tested else {}
        return vector, {**state, "accuracies": found}

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
        """The accuracies of the round."""
        return ComponentReport(metrics={f"accuracy_at_width_{w}": a for w, a in state["accuracies"].items()})
