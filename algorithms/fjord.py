"""FjORD: each local step trains the network at a width drawn anew, up to the widest that the client can bear.

Source: Horvath et al. (2021): FjORD: fair and accurate federated learning under heterogeneous targets with ordered
dropout. NeurIPS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep import FederatedMethod, with_card
from fedsweep.components import (
    ClientWork,
    ComponentReport,
    Covered,
    FlatLayout,
    LocalStep,
    Objective,
    RoundContext,
    ServerContext,
    State,
    SubModel,
    SubModelPolicy,
    TaskLoss,
    UnitGroup,
    ordered_kept,
    ordered_width,
    unit_submodel,
)

from .parts.unit_draws import unit_groups_of
from .parts.widths import (
    WIDTHS_CARD,
    Assignment,
    StaticBatchNorm,
    WidthAccuracies,
    WidthTiers,
    ordered_part,
    width_tiers,
)


@dataclass(frozen=True, kw_only=True)
class NestedWidths(SubModel):
    """The widest part of a client, which alone travels, and the narrower one that each of its steps trains.

    Attributes:
        widest: The part that the client has.
        inner: Parts of that part, the widest itself as the full model.
        steps: For each local step of the round the number of its inner part.
        passes: Parts of the full model and how often a sample goes through each, in the round's mean.
    """

    widest: SubModel
    inner: tuple[SubModel, ...]
    steps: tuple[int, ...]
    passes: tuple[tuple[SubModel, float], ...]

    def key(self) -> str:
        text = repr((self.widest.key(), [part.key() for part in self.inner], self.steps))
        return "widths " + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def layout(self, full: FlatLayout) -> FlatLayout:
        return self.widest.layout(full)

    def extract(self, vector: Tensor, full: FlatLayout) -> Tensor:
        return self.widest.extract(vector, full)

    def embed(self, vector: Tensor, full: FlatLayout) -> Covered:
        return self.widest.embed(vector, full)

    def build(self, model: nn.Module) -> nn.Module:
        return self.widest.build(model)

    def index_bytes(self) -> int:
        return self.widest.index_bytes()

    @property
    def step_parts(self) -> Sequence[SubModel]:
        return tuple(self.inner[number] for number in self.steps)

    def trained(self) -> Sequence[tuple[SubModel, float]]:
        return self.passes


def part_of_part(groups: Sequence[UnitGroup], width: float, widest: float) -> SubModel:
    """Return the same as a part of the network at the widest width."""
    smaller = [replace(group, size=ordered_width(group.size, widest)) for group in groups]
    return unit_submodel(smaller, ordered_kept(groups, width))


@dataclass(frozen=True, kw_only=True)
class OrderedDropout(SubModelPolicy):
    """Clients have the widths of their tiers, and each step draws one of the widths up to the client's.

    Attributes:
        tiers: Who has which widest width.
        distillation: Each step trains the widest width, too, see :class:`SelfDistillation`; the costs need to know.

    Source: Horvath et al. (2021), section 3. Reading: one width for all layers in a step, all widths alike. Reading:
    the paper keeps batch norm's statistics for each width while it trains; here those of the tested width are read from
    the server's inputs, so that one set travels.
    """

    tiers: WidthTiers
    distillation: bool = False

    @property
    def draws_in_steps(self) -> bool:
        return self.tiers.cuts

    def init(self, context: ServerContext) -> State:
        """Return the clients' widest widths.

        Raises:
            ConfigError: The network can't be narrowed so, or there are no devices to go by.
        """
        if self.tiers.cuts:
            unit_groups_of(context.model, method="fjord")
        return {"widths": self.tiers.fixed(context), "mean_width": 1.0}

    def assign(self, state: State, context: RoundContext) -> tuple[Mapping[int, SubModel], State]:
        widths = self.tiers.of_round(state["widths"], context)
        if not context.cohort or not self.tiers.cuts:
            groups: Sequence[UnitGroup] = ()
        else:
            groups = unit_groups_of(context.model, method="fjord")
        parts, means = {}, []
        for client, widest in widths.items():
            allowed = [width for width in self.tiers.widths if width <= widest]
            work = context.work[client]
            source = context.stream.child("steps", client).numpy()
            drawn = source.integers(len(allowed), size=work.steps)
            shares = _sample_shares(drawn, len(allowed), work)
            parts[client] = self._part(groups, allowed, tuple(int(number) for number in drawn), shares)
            means.append(float(np.dot(shares, allowed)))
        return parts, {**state, "mean_width": float(np.mean(means)) if means else 1.0}

    def _part(
        self, groups: Sequence[UnitGroup], allowed: Sequence[float], steps: tuple[int, ...], shares: Sequence[float]
    ) -> SubModel:
        widest = ordered_part(groups, allowed[0])
        if len(allowed) == 1:
            return widest
        passes = [(ordered_part(groups, width), share) for width, share in zip(allowed, shares, strict=True)]
        if self.distillation:
            # The teacher goes through every sample, whichever width was drawn.
            passes[0] = (widest, 1.0)
        return NestedWidths(
            widest=widest,
            inner=tuple(part_of_part(groups, width, allowed[0]) for width in allowed),
            steps=steps,
            passes=tuple(passes),
        )

    def report(self, state: State) -> ComponentReport:
        return ComponentReport(metrics={"submodel_width": state["mean_width"]})


def _sample_shares(drawn: np.ndarray, count: int, work: ClientWork) -> list[float]:
    """Return the share of the round's samples that goes through each width."""
    # Steps are not all of one size: the last one of a pass has what is left.
    reached = np.array([work.samples_in(steps) for steps in range(work.steps + 1)])
    samples = np.bincount(drawn, weights=np.diff(reached), minlength=count)
    return [float(share) for share in samples / max(samples.sum(), 1.0)]


@dataclass(frozen=True, kw_only=True)
class SelfDistillation(Objective):
    """``CE(widest) + KL(widest || drawn)``; the cross-entropy alone where the widest width itself was drawn.

    The teacher, the widest width, learns from the labels alone.

    Source: Horvath et al. (2021), section 3.3, with weight and temperature 1, which did best there. Reading: what other
    methods' terms add to the gradient acts on the widest width, which every step trains; what they add to the loss is
    the drawn width's.
    """

    def loss(self, step: LocalStep) -> Tensor:
        learned = F.cross_entropy(step.whole_logits, step.targets)
        if step.whole is None:
            return learned
        # Without a gradient, or the teacher would be pulled to its narrower student.
        teacher = step.whole_logits.detach().log_softmax(dim=1)
        return learned + F.kl_div(step.logits.log_softmax(dim=1), teacher, reduction="batchmean", log_target=True)


@with_card(
    replace(
        WIDTHS_CARD,
        needs=(*WIDTHS_CARD.needs, "classes"),
        differs=(
            *WIDTHS_CARD.differs,
            "weights outside of a step's width keep their values and their momentum; in the authors' program, without"
            " distillation, momentum and decay go on moving them (with plain SGD it is the same)",
        ),
        title="FjORD",
        source="Horvath et al., NeurIPS 2021",
    )
)
def fjord(
    *,
    widths: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0),
    assignment: Assignment = "even",
    distillation: bool = False,
) -> FederatedMethod:
    """FedAvg with ordered dropout: each step trains the first units of every layer, as many as a drawn width says.

    Where the server has validation data, the model is tested on it at each width. With batch norm the server needs
    inputs (scenario.server_data.proxy), from which a width's statistics are read.

    Args:
        widths: Shares of each layer's units, above 0 and at most 1; 1 alone is FedAvg bit for bit.
        assignment: Who has which widest width. even: dealt to the clients once, each equally often; speed: likewise,
            the fastest devices get the widest; drawn: each client draws one in each round.
        distillation: Each step trains the client's widest width too, and the drawn one learns from it.
    """
    tiers = width_tiers(widths, assignment)
    return FederatedMethod(
        name="fjord",
        objective=SelfDistillation() if distillation else TaskLoss(),
        submodels=OrderedDropout(tiers=tiers, distillation=distillation),
        refinements=(
            StaticBatchNorm(method="fjord"),
            WidthAccuracies(widths=tiers.widths, method="fjord"),
        )
        if tiers.cuts
        else (),
    )
