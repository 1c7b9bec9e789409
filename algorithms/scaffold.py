"""SCAFFOLD: control variates take the drift of skewed clients out of every local step.

Source: Karimireddy et al. (2020): SCAFFOLD: stochastic controlled averaging for federated learning. ICML. Option II.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor

from fedsweep import Card, FederatedMethod, with_card
from fedsweep.components import (
    BySamples,
    ClientUpdate,
    LocalStep,
    LocalTerm,
    LocalWork,
    Memory,
    ParamTree,
    Payload,
    Positive,
    Published,
    Refinement,
    ServerContext,
    State,
    SyncContext,
    Uniform,
    When,
    weighted_mean,
)

from .parts.server_updates import server_steps


@dataclass(frozen=True, kw_only=True)
class Correction(LocalTerm):
    """Adds ``c - c_k`` to each gradient; at a job's end ``c_k <- c_k - c + (x - y_k) / (t_k * learning rate)``.

    t_k are the job's effective steps: its steps for plain SGD. Reading: with momentum they make ``(x - y_k) / (t_k *
    learning rate)`` a mean of the job's gradients, as Option II has it; so does dividing by the square of the scale
    in which a sub-model's steps were taken.
    """

    sends: ClassVar[bool] = True
    stateful: ClassVar[bool] = True
    needs_effective_steps: ClassVar[bool] = True
    adds_up: ClassVar[bool] = True
    name: str = "scaffold"

    def init(self, params: ParamTree) -> Memory:
        return {name: torch.zeros_like(value, device="cpu") for name, value in params.items()}

    def gradient(self, step: LocalStep) -> ParamTree:
        return {
            name: (step.broadcast[f"control/{name}"] - torch.as_tensor(step.memory[name])).to(value.device)
            for name, value in step.params.items()
        }

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, Payload]:
        divisor = work.effective_steps * work.learning_rate
        # Without a step, or at a rate that has fallen to 0, nothing was learned about the client's gradient.
        if not divisor:
            return memory, {}
        changes = {
            name: _unscaled((work.anchor[name] - value) / divisor, work.step_scales.get(name)).cpu()
            - work.broadcast[f"control/{name}"]
            for name, value in work.params.items()
        }
        control: Memory = {name: torch.as_tensor(memory[name]) + change for name, change in changes.items()}
        return control, changes if self.sends else {}


@dataclass(frozen=True, kw_only=True)
class QuietCorrection(Correction):
    """The same, but the server makes the change itself: ``c_k`` does not occur in it."""

    sends: ClassVar[bool] = False
    needs_exact_moves: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class MeanControl(Refinement):
    """Keeps and sends the server's variate ``c``, the mean of all N clients' variates.

    Attributes:
        by_size: Weighted by the clients' samples; otherwise all count alike.
    """

    when: ClassVar[When] = "always"
    by_size: bool

    def init(self, context: ServerContext) -> State:
        profiles = context.profiles
        sizes = [float(p.num_samples) for p in profiles] if self.by_size else [1.0] * len(profiles)
        control = torch.zeros_like(context.vector[: context.layout.num_params])
        total = sum(sizes)
        return {"control": control, "shares": [size / total for size in sizes]}

    def publish(self, state: State) -> Mapping[str, Published]:
        return {"control": Published(value=state["control"], like="params")}

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        senders = [u for u in updates if any(name.startswith("scaffold/") for name in u.extras)]
        return vector, {**state, "control": _moved(state, {u.client: _sent_change(u, sync) for u in senders})}


@dataclass(frozen=True, kw_only=True)
class RebuiltControl(MeanControl):
    """The same without being told: ``(x - y_k) / (t_k * learning rate) - c`` for the x and the c that were sent.

    The state has the variates that were sent in the round, by the version of the model that they came with.
    """

    needs_updates: ClassVar[bool] = True

    def init(self, context: ServerContext) -> State:
        return {**super().init(context), "sent": {}}

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        sent = {**state["sent"], sync.version: state["control"]}
        changes = {u.client: _rebuilt(u, sent[u.anchor_version], sync) for u in updates if u.steps and u.learning_rate}
        return vector, {**state, "control": _moved(state, changes), "sent": {} if sync.ends_round else sent}


def _moved(state: State, changes: Mapping[int, Tensor]) -> Tensor:
    """Return the server's variate after some clients' changed by so much [P]."""
    control = torch.empty_like(state["control"])
    # Weights that don't sum to 1: it is wanted as the one sum whose bits depend on no placement.
    weighted_mean([state["control"], *changes.values()], [1.0, *(state["shares"][k] for k in changes)], control)
    return control


def _sent_change(update: ClientUpdate, sync: SyncContext) -> Tensor:
    """Return the change of a client's variate as it sent it [P]; 0 where its sub-model holds nothing."""
    vector = sync.vector.new_zeros(update.layout.num_values)
    for name, place in update.layout.params(vector).items():
        place.copy_(update.extras[f"scaffold/{name}"])
    return _in_whole(update, vector, sync)


def _rebuilt(update: ClientUpdate, control: Tensor, sync: SyncContext) -> Tensor:
    """Return the same, made from its model: the client's own arithmetic, value by value."""
    padded = sync.layout.padded(control)
    anchor, sent = (update.submodel.extract(v, sync.layout) for v in (sync.anchors[update.anchor_version], padded))
    move = (anchor - cast(Tensor, update.vector)) / (update.effective_steps * update.learning_rate)
    return _in_whole(update, update.submodel.unscaled(move, sync.layout) - sent, sync)


def _unscaled(move: Tensor, scale: Tensor | None) -> Tensor:
    return move if scale is None else move / scale.square()


def _in_whole(update: ClientUpdate, part: Tensor, sync: SyncContext) -> Tensor:
    """Return a sub-model's values among those of the full params [P], zero elsewhere."""
    whole, size = update.submodel.embed(part, sync.layout), sync.layout.num_params
    return whole.vector[:size] if whole.cover is None else whole.vector[:size].masked_fill(~whole.cover[:size], 0.0)


def variate_up(*, params: int, rebuild: bool) -> int:
    """The move of the client's control variate: `params`; nothing with `rebuild`."""
    return 0 if rebuild else params


def variate_down(*, params: int) -> int:
    """The server's control variate: `params`."""
    return params


@with_card(
    Card(
        title="SCAFFOLD",
        source="Karimireddy et al., ICML 2020",
        up=(variate_up,),
        down=(variate_down,),
        golden=(4.945325, 7.042854439, 7.843186324),
    )
)
def scaffold(
    *,
    server_learning_rate: Positive = 1.0,
    weighting: Literal["uniform", "size"] = "uniform",
    rebuild: bool = False,
) -> FederatedMethod:
    """Control variates correct each local step of SGD; twice FedAvg's traffic.

    Args:
        server_learning_rate: Multiplies the server's move towards the clients' mean, above 0.
        weighting: uniform: all clients count alike, the optimum is that of the mean of their losses; size: by samples,
            in the model and in the variates.
        rebuild: The server makes the changes of the clients' variates from their models, to the same bits, so that they
            send no more than in FedAvg. Not with momentum that is kept from round to round.
    """
    by_size = weighting == "size"
    return FederatedMethod(
        name="scaffold",
        terms=(QuietCorrection() if rebuild else Correction(),),
        weighting=BySamples() if by_size else Uniform(),
        server_update=server_steps(server_learning_rate=server_learning_rate),
        refinements=((RebuiltControl if rebuild else MeanControl)(by_size=by_size),),
    )
