"""HeteroFL: each client trains the network at a width that it can bear, the first channels of every layer.

Source: Diao, Ding, Tarokh (2021): HeteroFL: computation and communication efficient federated learning for
heterogeneous clients. ICLR.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedsweep import ConfigError, FederatedMethod, Limit, Network, with_card
from fedsweep.components import (
    FULL_MODEL,
    BySamples,
    ComponentReport,
    Covered,
    FlatLayout,
    LinearHeadNetwork,
    RoundContext,
    ServerContext,
    State,
    SubModel,
    SubModelPolicy,
    Uniform,
    UnitGroup,
    build_submodel_module,
    ordered_kept,
    unit_submodel,
)

from .parts.unit_draws import has_norm, unit_groups_of, why_not_homogeneous
from .parts.widths import WIDTHS_CARD, Assignment, StaticBatchNorm, WidthTiers, width_tiers


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
        # A copy: clients of one width share the part, and with it the cover that it keeps.
        cover = torch.ones(full.num_values, dtype=torch.bool) if inner.cover is None else inner.cover.clone()
        absent = sorted({*range(self.num_classes)} - {*self.classes})
        views = full.views(cover)
        for name in {"classifier.weight", "classifier.bias"} & views.keys():  # a frozen one is in no vector
            views[name][absent] = False
        for name, view in views.items():
            if name.startswith("optimizer.") and len(view) == full.num_params:
                view &= cover[: full.num_params]
        return Covered(vector=inner.vector, cover=cover)

    def build(self, model: nn.Module) -> nn.Module:
        built = self.part.build(model)
        # A copy where the part is the whole model: the hook would stay on the template.
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
        if not module.training:
            return None
        self.mask_C = self.mask_C.to(logits)  # kept there: a recorded step can't fetch it from the host
        return logits * self.mask_C


@dataclass(frozen=True, kw_only=True)
class Widths(SubModelPolicy):
    """Each client's part: the first units of every group, at its width.

    Attributes:
        tiers: Who has which width.
        scaler: In training the outputs of narrowed layers are divided by the width.
        masked_loss: Clients train on the logits of their own classes alone, see :class:`HeldClasses`.

    Source: Diao, Ding, Tarokh (2021), section 3. Reading: the scaler stands between a layer and its norm; a norm over
    what the layer makes undoes any factor, so layers with a norm have none here, and for the others it acts behind the
    activation, which is the same for ReLU.
    """

    tiers: WidthTiers
    scaler: bool = True
    masked_loss: bool = False

    def registration(self) -> tuple[str, ...]:
        return ("label_counts",) if self.masked_loss else ()

    def init(self, context: ServerContext) -> State:
        """Return the clients' widths.

        Raises:
            ConfigError: The network can't be narrowed so, or there are no devices to go by.
        """
        if self.tiers.cuts:
            groups = unit_groups_of(context.model, method="heterofl")
            if self.scaler:
                self._scaled_groups(context.model, groups)
        if self.masked_loss and not isinstance(context.model, LinearHeadNetwork):
            raise ConfigError(
                "heterofl with masked_loss needs a network whose head is one linear layer `classifier`, which"
                f" {type(context.model).__name__} does not say; use a built-in model, or set method.masked_loss=false"
            )
        return {"widths": self.tiers.fixed(context), "mean_width": 1.0, "num_classes": context.num_classes}

    def _scaled_groups(self, model: nn.Module, groups: Sequence[UnitGroup]) -> list[str]:
        """Return the groups whose outputs are divided by the width: those without a norm."""
        names = []
        for group in groups:
            if has_norm(model, group):
                continue
            if between := why_not_homogeneous(model, group):
                raise ConfigError(
                    f"heterofl's scaler needs layers with a norm or with ReLU, but units {group.name!r} of"
                    f" {type(model).__name__} go through {between}; choose another model, or set method.scaler=false"
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
        units = ordered_kept(groups, width)
        scaled = self._scaled_groups(model, groups) if self.scaler else []
        return unit_submodel(groups, units, scales={name: [1 / width] * len(units[name]) for name in scaled})

    def _with_classes(self, part: SubModel, state: State, context: RoundContext, client: int) -> SubModel:
        if not self.masked_loss:
            return part
        own_classes = np.flatnonzero(context.profiles[client].label_counts)
        classes = tuple(int(c) for c in context.classes.get(client, own_classes))
        if len(classes) == state["num_classes"]:
            return part
        return HeldClasses(part=part, classes=classes, num_classes=state["num_classes"])

    def report(self, state: State) -> ComponentReport:
        return ComponentReport(metrics={"submodel_width": state["mean_width"]})


@with_card(
    replace(
        WIDTHS_CARD,
        limits=(Limit(given={"widths": [1.0], "masked_loss": False, "weighting": "size"}),),
        title="HeteroFL",
        needs=(*WIDTHS_CARD.needs, "classes"),
        source="Diao, Ding, Tarokh, ICLR 2021",
    )
)
def heterofl(
    *,
    widths: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625),
    assignment: Assignment = "even",
    scaler: bool = True,
    masked_loss: bool = True,
    weighting: Literal["size", "uniform"] = "uniform",
) -> FederatedMethod:
    """FedAvg on networks of several widths: each client has the first channels, neurons and heads of every layer.

    With batch norm the server needs inputs (scenario.server_data.proxy), from which its statistics are read anew after
    each round.

    Args:
        widths: Shares of each layer's units, above 0 and at most 1; 1 alone, without masked_loss and
            with weighting=size, is FedAvg bit for bit.
        assignment: even: dealt to the clients once, each width equally often; speed: likewise, the fastest devices get
            the widest; drawn: each client draws one in each round.
        scaler: In training, outputs of narrowed layers are divided by the width.
        masked_loss: Clients train on the logits of their own classes alone, and hold only these rows of the classifier.
        weighting: size: by samples; uniform: all holders of a value count alike, as in the paper.
    """
    tiers = width_tiers(widths, assignment)
    return FederatedMethod(
        name="heterofl",
        submodels=Widths(tiers=tiers, scaler=scaler, masked_loss=masked_loss),
        weighting=BySamples() if weighting == "size" else Uniform(),
        refinements=(StaticBatchNorm(method="heterofl"),) if tiers.cuts else (),
    )
