"""HeteroFL: each client trains the network at a width that it can bear, the first channels of every layer.

Source: Diao, Ding, Tarokh (2021): HeteroFL: computation and communication efficient federated learning for
heterogeneous clients. ICLR.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedsweep.card import Card, Limit, with_card
from fedsweep.components.base import ComponentReport
from fedsweep.components.submodels import SubModelPolicy
from fedsweep.components.weighting import BySamples, Uniform
from fedsweep.errors import ConfigError
from fedsweep.method import FederatedMethod
from fedsweep.models.network import LinearHeadNetwork, Network
from fedsweep.models.slicing import build_submodel_module, ordered_kept
from fedsweep.models.unit_groups import UnitGroup
from fedsweep.models.unit_submodel import unit_submodel
from fedsweep.records import RoundContext, ServerContext, State
from fedsweep.submodel import FULL_MODEL, Covered, SubModel
from fedsweep.trees import FlatLayout

from .parts.unit_draws import unit_groups_of
from .parts.width_tiers import Assignment, WidthTiers, width_tiers

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
# s f(x) = f(s x) for s > 0: behind these a factor is as good as before them.
_HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.Identity)


@dataclass(frozen=True, kw_only=True)
class HeldClasses(SubModel):
    """A part of a client that has some of the classes: in training the logits of the others are 0.

    Of the classifier's rows the client holds those of its classes, so that only they are averaged; all of them travel.

    Attributes:
        part: The part.
        classes: The client's classes, ascending.
        num_classes: C.

    Source: Diao, Ding, Tarokh (2021), section 3, masked cross-entropy.
    """

    part: SubModel
    classes: tuple[int, ...]
    num_classes: int

    def key(self) -> str:
        return f"{self.part.key()} classes {self.classes}"

    def layout(self, full: FlatLayout) -> FlatLayout:
        return self.part.layout(full)

    def extract(self, vector: Tensor, full: FlatLayout) -> Tensor:
        return self.part.extract(vector, full)

    def embed(self, vector: Tensor, full: FlatLayout) -> Covered:
        inner = self.part.embed(vector, full)
        cover = torch.ones(full.num_values, dtype=torch.bool) if inner.cover is None else inner.cover.clone()
        absent = sorted({*range(self.num_classes)} - {*self.classes})
        views = full.views(cover)
        for name in ("classifier.weight", "classifier.bias"):
            views[name][absent] = False
        for name, view in views.items():
            if name.startswith("optimizer.") and len(view) == full.num_params:
                view &= cover[: full.num_params]
        return Covered(vector=inner.vector, cover=cover)

    def build(self, model: nn.Module) -> nn.Module:
        built = self.part.build(model)
        module = build_submodel_module(cast(Network, model), {}) if built is model else built
        mask = torch.zeros(self.num_classes)
        mask[list(self.classes)] = 1.0
        cast(LinearHeadNetwork, module).classifier.register_forward_hook(_MaskedLogits(mask))
        return module

    def index_bytes(self) -> int:
        return self.part.index_bytes()


class _MaskedLogits:
    """A forward hook that sets the logits of some classes to 0, in training only."""

    def __init__(self, mask_C: Tensor) -> None:
        self.mask_C = mask_C

    def __call__(self, module: nn.Module, inputs: object, logits: Tensor) -> Tensor | None:
        return logits * self.mask_C.to(logits) if module.training else None


@dataclass(frozen=True, kw_only=True)
class Widths(SubModelPolicy):
    """Each client's part: the first units of every group, at its width.

    Attributes:
        tiers: Who has which width.
        scaler: In training the outputs of narrowed layers are divided by the width.
        masked_loss: Clients train on the logits of their own classes alone, see :class:`HeldClasses`.

    Source: Diao, Ding, Tarokh (2021), section 3. Reading: the scaler stands between a layer and its norm; a norm over
    what the layer makes undoes any factor, so layers with a norm have none here, and for the others it acts behind the
    activation, which is the same for ReLU. Static batch norm (statistics from server data after each aggregation) is
    left out: networks with batch norm are refused.
    """

    tiers: WidthTiers
    scaler: bool = True
    masked_loss: bool = False

    def registration(self) -> tuple[str, ...]:
        """The server knows the clients' classes where they mask their losses."""
        return ("label_counts",) if self.masked_loss else ()

    def init(self, context: ServerContext) -> State:
        """The clients' widths.

        Raises:
            ConfigError: The network can't be narrowed so, or there are no devices to go by.
        """
        if self.tiers.cuts:
            groups = unit_groups_of(context.model, method="heterofl")
            _refuse_batch_norm(context.model)
            if self.scaler:
                self._scaled_groups(context.model, groups)
        if self.masked_loss and not isinstance(context.model, LinearHeadNetwork):
            raise ConfigError(
                "heterofl with masked_loss needs a network whose head is one linear layer `classifier`, which"
                f" {type(context.model).__name__} does not say; use a built-in model, or set method.masked_loss=false"
            )
        return {"widths": self.tiers.fixed(context), "mean_width": 1.0, "num_classes": context.num_classes}

    def _scaled_groups(self, model: nn.Module, groups: Sequence[UnitGroup]) -> list[str]:
        """The groups whose outputs are divided by the width: those without a norm."""
        names = []
        for group in groups:
            owners = {name.rpartition(".")[0] for name, _ in group.produced}
            if any(isinstance(model.get_submodule(owner), _NORMS) for owner in owners):
                continue
            kinds = [type(model.get_submodule(path)) for path in group.modules]
            if group.residual or not all(issubclass(kind, _HOMOGENEOUS) for kind in kinds):
                raise ConfigError(
                    f"heterofl's scaler needs layers with a norm or with ReLU, but units {group.name!r} of"
                    f" {type(model).__name__} go through {' and '.join(kind.__name__ for kind in kinds)}"
                    f"{' and additions' if group.residual else ''}; choose another model, or set method.scaler=false"
                )
            names.append(group.name)
        return names

    def assign(self, state: State, context: RoundContext) -> tuple[Mapping[int, SubModel], State]:
        widths = self.tiers.of_round(state["widths"], context)
        parts = {width: self._part(context.model, width) for width in set(widths.values())}
        submodels = {k: self._with_classes(parts[widths[k]], state, context, k) for k in context.cohort}
        mean = float(np.mean(list(widths.values()))) if widths else 1.0
        return submodels, {**state, "mean_width": mean}

    def _part(self, model: nn.Module | None, width: float) -> SubModel:
        if width == 1 or model is None:
            return FULL_MODEL
        groups = unit_groups_of(model, method="heterofl")
        kept = {name: units.tolist() for name, units in ordered_kept(groups, width).items()}
        scaled = self._scaled_groups(model, groups) if self.scaler else []
        return unit_submodel(groups, kept, scales={name: [1 / width] * len(kept[name]) for name in scaled})

    def _with_classes(self, part: SubModel, state: State, context: RoundContext, client: int) -> SubModel:
        if not self.masked_loss:
            return part
        held = np.flatnonzero(context.profiles[client].label_counts)
        classes = tuple(int(c) for c in context.classes.get(client, held))
        if len(classes) == state["num_classes"]:
            return part
        return HeldClasses(part=part, classes=classes, num_classes=state["num_classes"])

    def report(self, state: State) -> ComponentReport:
        """The mean width of the round's clients."""
        return ComponentReport(metrics={"submodel_width": state["mean_width"]})


def _refuse_batch_norm(model: nn.Module) -> None:
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        raise ConfigError(
            f"heterofl would need batch norm's statistics from server data after each aggregation, which is not there"
            f" yet, but {type(model).__name__} has batch norm; choose a model with group norm or without norms"
        )


@with_card(
    Card(
        needs=("units", "no batch norm"),
        limits=(Limit(given={"widths": [1.0]}),),
        live=("submodel_width",),
    )
)
def heterofl(
    *,
    widths: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625),
    assignment: Assignment = "even",
    scaler: bool = True,
    masked_loss: bool = False,
    weighting: Literal["size", "uniform"] = "size",
) -> FederatedMethod:
    """FedAvg on networks of several widths: each client has the first channels, neurons and heads of every layer.

    The paper's setting is masked_loss=true with weighting=uniform; the defaults are such that width 1 alone is FedAvg.

    Args:
        widths: Shares of each layer's units, above 0 and at most 1; 1 alone is FedAvg bit for bit.
        assignment: even: dealt to the clients once, each width equally often; speed: likewise, the fastest devices get
            the widest; drawn: each client draws one in each round.
        scaler: In training, outputs of narrowed layers are divided by the width.
        masked_loss: Clients train on the logits of their own classes alone, and hold only these rows of the classifier.
        weighting: size: by samples; uniform: all holders of a value count alike, as in the paper.
    """
    return FederatedMethod(
        name="heterofl",
        source="Diao, Ding, Tarokh (2021), HeteroFL: computation and communication efficient federated learning for"
        " heterogeneous clients",
        submodels=Widths(tiers=width_tiers(widths, assignment), scaler=scaler, masked_loss=masked_loss),
        weighting=BySamples() if weighting == "size" else Uniform(),
    )
