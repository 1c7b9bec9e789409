"""PruneFL: a sparse network whose weights are chosen anew now and then, by what their gradients promise for their time.

Source: Jiang et al. (2022): Model pruning enables efficient federated learning on edge devices. IEEE Transactions on
Neural Networks and Learning Systems.

Shape letters: P params.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedsweep import Card, ConfigError, FederatedMethod, Limit, with_card
from fedsweep.components import (
    FULL_MODEL,
    PASSES_OF_A_STEP,
    BelowOne,
    ClientUpdate,
    Count,
    LocalStep,
    LocalTerm,
    LocalWork,
    Memory,
    ParamTree,
    Payload,
    Positive,
    Probe,
    ServerContext,
    State,
    SyncContext,
    takes,
)

from ..parts.element_masks import Layers, MaskPolicy, StayZero, decided, mask_values
from .choice import Choice, Times
from .first_stage import FirstMask, mask_by_training

FirstStage = Literal["client", "server", "none"]

_SENT = "prunefl/squares"


@dataclass(frozen=True, kw_only=True)
class SquaredGradients(LocalTerm):
    """Adds up squared gradients of all weights, dead ones too, and sends them in rounds in which the mask is chosen.

    Attributes:
        every: Rounds between two choices.

    Source: the authors' program. Reading: a job's gradients are added up, the sum is squared and counts with the
    samples that the client holds, in the program with those that it processed (for whole epochs that is the same); a
    client keeps its sums until the next choice that it takes part in, and forgets those from before a choice that it
    missed.
    """

    sends: ClassVar[bool] = True
    stateful: ClassVar[bool] = True
    needs_anchor: ClassVar[bool] = False
    every: int
    name: str = "prunefl"

    def after_step(self, step: LocalStep, gradients: ParamTree) -> tuple[Memory, ParamTree | None]:
        new = torch.cat([gradient.detach().flatten() for gradient in gradients.values()]).cpu()
        total, work = step.memory.get("sum"), step.client.work
        is_last = work is None or step.position + 1 == work.steps
        return {**step.memory, "sum": new if total is None else torch.as_tensor(total) + new, "is_last": is_last}, None

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, Payload]:
        if "sum" not in memory:
            return memory, {}
        period = (work.client.round - 1) // self.every
        squares = torch.as_tensor(memory["sum"]).square() * work.num_samples
        if memory.get("period") == period:
            squares = squares + torch.as_tensor(memory["squares"])
        # Once in such a round, however often the client synchronises in it.
        if work.client.round % self.every or not memory["is_last"]:
            return {"period": period, "squares": squares}, {}
        return {}, {"squares": squares}


@dataclass(frozen=True, kw_only=True)
class ChosenMask(MaskPolicy):
    """The mask of a first stage in one place, chosen again every so many rounds.

    Attributes:
        sparsity: At least this share of the weights of linear and convolutional layers is zero, at least 0 and below 1;
            0 is FedAvg bit for bit.
        first_stage: Where the first mask is made: client: by some steps on the client with the most samples; server:
            on the server's labelled data; none: of the initial weights' sizes.
        first_learning_rate: Of those steps, above 0.
        every: Rounds between two choices, at least 1. In these clients send squared gradients of all weights.
        share: Of each layer's alive weights that are chosen again, at first; at least 0 and below 1.
        half_life: Rounds in which that share halves, above 0.
        times: equal: every weight takes the same time, since plain kernels do not see zeros; layers: half of a weight's
            time follows its layer's operations, as with kernels for sparse weights.
        fixed_time: A round's time whatever the weights, over that of all weights, above 0. The larger, the more weights
            are worth their time.
        saves_work: Count operations of alive weights alone, which takes kernels for sparse weights; otherwise those of
            the whole network, which plain kernels carry out.

    Source: Jiang et al. (2022), section 4. Reading: of the first stage the mask is kept, and the weights start from the
    initial ones; weights that come back start from 0, where the gain is meant.
    """

    sparsity: BelowOne = 0.8
    first_stage: FirstStage = "client"
    first_learning_rate: Positive = 0.1
    every: Count = 50
    share: BelowOne = 0.3
    half_life: Positive = 10_000.0
    times: Times = "equal"
    fixed_time: Positive = 0.5
    saves_work: bool = False

    @property
    def choice(self) -> Choice:
        """The rule."""
        return Choice(sparsity=self.sparsity, times=self.times, fixed_time=self.fixed_time)

    def init(self, context: ServerContext) -> State:
        """Return the mask by magnitude, until a first stage has another one.

        Raises:
            ConfigError: The first stage is to run on the server, which has no labelled data.
        """
        state = super().init(context)
        if self.first_stage == "server" and _server_samples(context) is None:
            raise ConfigError(
                "method.first_stage=server trains on labelled data of the server; set"
                " scenario.server_data.validation=0.05, say, or method.first_stage=client"
            )
        return {**state, "times": self.choice.weight_times(context.model, state["layers"])}

    def first_mask(self, context: ServerContext, layers: Layers) -> Tensor:
        whole = torch.ones(context.layout.num_params, dtype=torch.bool)
        return self.choice.trimmed(whole, context.vector[: len(whole)].abs(), layers)

    def setup(self, state: State, context: ServerContext) -> tuple[Probe, ...]:
        if self.first_stage == "none":
            return ()
        place, samples = None, 0
        if self.first_stage == "client":
            largest = max(context.profiles, key=lambda p: (p.num_samples, -p.client))
            place, samples = largest.client, largest.num_samples
        return (FirstMask(place=place, samples=samples, choice=self.choice, rate=self.first_learning_rate),)

    def setup_done(self, state: State, answers: Mapping[int, Payload], context: ServerContext) -> State:
        samples = _server_samples(context)
        if self.first_stage == "server" and samples is not None:
            mask, seen = mask_by_training(
                context.model,
                samples,
                num_classes=context.num_classes,
                choice=self.choice,
                rate=self.first_learning_rate,
                source=context.stream.child("first stage"),
            )
            context.count_flops(PASSES_OF_A_STEP * seen * context.forward_flops(FULL_MODEL))
            return {**state, "mask": mask}
        (answer,) = answers.values()
        mask = state["mask"].clone()
        mask[decided(torch.arange(len(mask)), state["layers"])] = answer["first_mask/mask"]
        return {**state, "mask": mask}

    def next_mask(self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext) -> Tensor:
        rows = [u.extras[_SENT] for u in updates if _SENT in u.extras]
        if not rows:
            return super().next_mask(state, vector, updates, sync)
        gains = torch.stack(rows).double().sum(dim=0)
        return self.choice.again(
            state["mask"],
            gains,
            vector[: len(gains)].abs(),
            layers=state["layers"],
            times=state["times"],
            share=self.share * 0.5 ** (sync.round / self.half_life),
        )


def _server_samples(context: ServerContext) -> tuple[Tensor, Tensor] | None:
    """Return the labelled inputs that the server holds."""
    proxy = context.proxy_data
    if proxy is not None and proxy[1] is not None:
        return proxy[0], proxy[1]
    return context.validation_data


def squares_up(*, full_params: int, sparsity: float, round: int, every: int) -> int:
    """The squares of all gradients, `full_params` values, in each `every`-th round."""
    return full_params if sparsity and round % every == 0 else 0


def first_mask_up(*, kernel_weights: int, sparsity: float, first_stage: FirstStage, is_largest: bool) -> Fraction:
    """With `first_stage` client, from the client with the most samples, its mask: `kernel_weights` bits."""
    is_asked = sparsity and first_stage == "client" and is_largest
    return mask_values(kernel_weights) if is_asked else Fraction(0)


def model_down(*, values: int, sparsity: float, first_stage: FirstStage, is_largest: bool) -> int:
    """With `first_stage` client, to the client with the most samples, the initial model: `values`."""
    return values if sparsity and first_stage == "client" and is_largest else 0


@with_card(
    Card(
        title="PruneFL",
        source="Jiang et al., TNNLS 2022",
        needs=("classes",),
        up=(squares_up,),
        setup_up=(first_mask_up,),
        setup_down=(model_down,),
        limits=(Limit(given={"sparsity": 0.0}),),
        live=("sparsity",),
        differs=(
            "at most 1 - sparsity of the weights are alive, where the paper leaves their number to the gains: with a"
            " sparsity of 0.001 it is the paper's own",
            "what the first stage computes is in round 1's FLOPs and in full_time_s, and on a client in a forecast, at"
            " most",
        ),
        small={"sparsity": 0.5, "first_stage": "none", "every": 2},
    )
)
@takes(ChosenMask)
def prunefl(**parameters: Any) -> FederatedMethod:
    """FedAvg on a sparse network whose weights are chosen by gain per time.

    They are chosen in one place first, then with all clients.
    """
    mask = ChosenMask(**parameters)
    if not mask.sparsity:
        return FederatedMethod(name="prunefl")
    return FederatedMethod(
        name="prunefl",
        terms=(StayZero(), SquaredGradients(every=mask.every)),
        submodels=mask,
    )
