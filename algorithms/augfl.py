"""AugFL: clients learn a model that adapts in one step, by inexact ADMM; the server adds what a model of its own knows.

Source: Yue et al. (2025): AugFL: Augmenting federated learning with pretrained models. arXiv 2503.02154.

Shape letters: B samples, C classes, P params, V values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep import Card, ConfigError, FederatedMethod, MethodSettings, with_card
from fedsweep.components import (
    FULL_MODEL,
    PASSES_OF_A_STEP,
    Adam,
    ClientTest,
    ClientUpdate,
    ComponentReport,
    Count,
    Evaluation,
    LocalClient,
    LocalStep,
    LocalTerm,
    Memory,
    NotNegative,
    Objective,
    ParamTree,
    Passes,
    Positive,
    Published,
    Refinement,
    ServerContext,
    State,
    SyncContext,
    Uniform,
    load_vector,
    logits_with,
    on_device,
    taken,
    takes,
    trained_params,
)

from .parts.distilling import Student, batches
from .parts.ensembles import template

_CLIENTS = "augfl_clients"


def halves(inputs: Tensor, targets: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a batch's support and query samples; a single sample is both."""
    cut = (len(targets) + 1) // 2
    query = slice(cut if len(targets) > 1 else 0, None)
    return (taken(inputs, slice(cut)), targets[:cut]), (taken(inputs, query), targets[query])


@dataclass(frozen=True, kw_only=True)
class SupportLoss(Objective):
    """Cross-entropy on the batch's support half: its gradient is the inner step's."""

    @property
    def passes(self) -> float:
        return 1.5

    def loss(self, step: LocalStep) -> Tensor:
        (inputs, targets), _ = halves(step.inputs, step.targets)
        return F.cross_entropy(step.forward(inputs), targets)


@dataclass(frozen=True, kw_only=True)
class MetaStep(LocalTerm):
    """One step of inexact ADMM on ``w_k L(theta - a grad L(theta; support); query)``.

    With r the query gradient at the adapted params and ``g = r - a H r``, where ``H r`` is the central difference of
    support gradients at ``theta +- delta r``, ``delta = 1 / (10 round + 100)``: ``theta_k = theta - (y_k + w_k g) /
    penalty`` and ``y_k <- -w_k g``. What travels is ``theta - (y_k + 2 w_k g) / penalty``, the new dual variable over
    the penalty plus theta_k: its mean over the clients is the server's step, and nothing else need be sent.

    Attributes:
        adaptation_rate: a, at least 0.
        penalty: rho, above 0.

    Source: Yue et al. (2025) and the authors' program. Reading: support and query are the two halves of the round's one
    batch; w_k is the client's share of all samples; one that is absent keeps its dual variable, and the mean is over
    those who are there. Reading: the gradient of the inner step is that of a local step: ``clip_norm`` bounds it.
    """

    stateful: ClassVar[bool] = True
    needs_share: ClassVar[bool] = True
    sets_params: ClassVar[bool] = True
    name: str = "augfl"
    adaptation_rate: float
    penalty: float

    def passes(self, batch_size: int, num_classes: int) -> Passes:
        return Passes(step=4.5 if self.adaptation_rate else 1.5)

    def init(self, params: ParamTree) -> Memory:
        return {name: torch.zeros_like(value, device="cpu") for name, value in params.items()}

    def after_step(self, step: LocalStep, gradients: ParamTree) -> tuple[Memory, ParamTree | None]:
        theta = {name: step.anchor[name] for name in step.params}
        support, query = halves(step.inputs, step.targets)
        adapted = {n: v - self.adaptation_rate * gradients[n] for n, v in theta.items()}
        meta_gradients = _gradients(step, adapted, query)
        if self.adaptation_rate:
            delta = 1 / (10 * step.client.round + 100)
            # The Hessian times a gradient, as a difference of two gradients: second derivatives cost more memory.
            above = _gradients(step, {n: v + delta * meta_gradients[n] for n, v in theta.items()}, support)
            below = _gradients(step, {n: v - delta * meta_gradients[n] for n, v in theta.items()}, support)
            scale = self.adaptation_rate / (2 * delta)
            meta_gradients = {n: r - scale * (above[n] - below[n]) for n, r in meta_gradients.items()}
        weight = step.client.share / float(step.broadcast[_CLIENTS])
        dual = {name: torch.as_tensor(value).to(theta[name].device) for name, value in step.memory.items()}
        sent = {n: v - (dual[n] + 2 * weight * meta_gradients[n]) / self.penalty for n, v in theta.items()}
        return {name: (-weight * value).cpu() for name, value in meta_gradients.items()}, sent


def _gradients(step: LocalStep, params: ParamTree, samples: tuple[Tensor, Tensor]) -> ParamTree:
    """Return gradients of the mean cross-entropy at other params; the client's statistics stay as they are."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    buffers = {name: value.clone() for name, value in step.model.named_buffers()}
    loss = F.cross_entropy(logits_with(step.model, {**leaves, **buffers}, samples[0]), samples[1])
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True), strict=True))


@dataclass(frozen=True, kw_only=True)
class Transfer(Refinement):
    """``theta <- theta - strength * grad R / (N * penalty)`` with N clients in all, R the distance to a server's model.

    The strength is ``transfer``, ``R = T^2 KL(teacher || model) + cross-entropy`` on a batch of the server's labelled
    samples, at the model that the clients started from. The teacher is the same network, trained on these samples in
    the first round; it stays on the server.

    Attributes:
        penalty: rho of ADMM, above 0: a greater one makes smaller steps.
        transfer: lambda, the weight of the distance to the teacher, at least 0; 0 needs no samples on the server. The
            server's step is transfer / (clients * penalty), and the paper's 5 is for 40 clients.
        temperature: At which the teacher is distilled, above 0. R's slope grows with it: at 4 the paper's transfer
            diverges on small networks.
        server_batch: Samples of a distillation step, at least 1.
        teacher_steps: Steps that train the teacher, at least 1.

    Source: Yue et al. (2025). Reading: the authors distil contrastively from a network that was pretrained elsewhere;
    here from logits, and from the server's own samples, so that nothing need be downloaded; at temperature 1, where
    its slope in the logits is bounded as that of the cross-entropy beside it is. Where not all clients are
    there, the server still moves by one of N shares: what they send is weighed by their share of all samples, too.
    """

    penalty: Positive = 0.7
    transfer: NotNegative = 5.0
    temperature: Positive = 1.0
    server_batch: Count = 128
    teacher_steps: Count = 500

    def init(self, context: ServerContext) -> State:
        """Return the state before the first teacher.

        Raises:
            ConfigError: The server has no labelled samples.
        """
        if self.transfer and (context.proxy_data is None or context.proxy_data[1] is None):
            raise ConfigError(
                "augfl trains its teacher on labelled samples of the server's, but the scenario has none; set"
                " scenario.server_data.proxy={per_class: 20, labelled: true}, or method.transfer=0"
            )
        count = torch.tensor([float(context.num_clients)], dtype=context.layout.dtype)
        return {"clients": count, "teacher": None, "distance": None}

    def publish(self, state: State) -> Mapping[str, Published]:
        return {_CLIENTS: Published(value=state["clients"])}

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        if not self.transfer or not updates:
            return vector, state
        teacher = self._trained(sync) if state["teacher"] is None else state["teacher"]
        distance, gradient_P = self._distance(teacher, sync)
        moved = vector.clone()
        moved[: sync.layout.num_params] -= self.transfer / (float(state["clients"]) * self.penalty) * gradient_P
        return moved, {**state, "teacher": teacher, "distance": distance}

    def _trained(self, sync: SyncContext) -> Tensor:
        inputs, labels = cast(tuple[Tensor, Tensor], sync.proxy_data)
        student = Student(sync.vector, sync, batch_norm="proxy")
        optimizer = Adam(student.module.parameters(), lr=1e-3, foreach=False)
        with torch.no_grad():
            num_classes = student.module.eval()(on_device(taken(inputs, slice(1)), sync.device)).shape[1]
        targets = F.one_hot(labels, num_classes).to(sync.layout.dtype)
        orders = batches(len(labels), self.server_batch, sync.stream.child("teacher"), steps=self.teacher_steps)
        for number, index in enumerate(orders, start=1):
            loss = student.step(optimizer, taken(inputs, index), targets[index])
            if number % 100 == 0:
                sync.working(f"training the teacher: step {number} of {self.teacher_steps}, loss {loss:.4f}")
        return student.vector()

    def _distance(self, teacher: Tensor, sync: SyncContext) -> tuple[float, Tensor]:
        """Return R and its gradient [P]."""
        inputs, labels = cast(tuple[Tensor, Tensor], sync.proxy_data)
        device = torch.device(sync.device)
        (index,) = batches(len(labels), self.server_batch, sync.stream.child("transfer"), steps=1)
        model = template(sync)
        load_vector(model, sync.layout, sync.vector)
        teacher_values = {name: value.to(device) for name, value in sync.layout.model(teacher).items()}
        chosen = on_device(taken(inputs, index), device)
        with torch.no_grad():
            soft_labels = (logits_with(model, teacher_values, chosen) / self.temperature).softmax(dim=1)
        # The teacher's forward pass, and a step's passes of the model.
        sync.count_flops((1 + PASSES_OF_A_STEP) * len(index) * sync.forward_flops(FULL_MODEL))
        logits = model(chosen)
        distance = F.cross_entropy(logits, labels[index].to(device)) + self.temperature**2 * F.kl_div(
            (logits / self.temperature).log_softmax(dim=1), soft_labels, reduction="batchmean"
        )
        gradients = torch.autograd.grad(distance, list(trained_params(model).values()), materialize_grads=True)
        return float(distance.detach()), torch.cat([gradient.reshape(-1) for gradient in gradients]).cpu()

    def report(self, state: State) -> ComponentReport:
        """Return R before the step."""
        return ComponentReport(metrics={} if state["distance"] is None else {"transfer_distance": state["distance"]})


@dataclass(frozen=True, kw_only=True)
class AdaptedTest(ClientTest):
    """The server's model after one step on all the client's samples, on the client's share of the test set.

    Attributes:
        adaptation_rate: Of the step.
    """

    reads_data: ClassVar[bool] = True
    adaptation_rate: float

    def predictor(self, client: LocalClient) -> Callable[[Tensor], Tensor]:
        if not len(client.targets):  # under drift, of its present classes: the mean loss of none is no number
            return lambda inputs: client.forward_with(client.params, inputs)
        leaves = {name: value.detach().clone().requires_grad_() for name, value in client.params.items()}
        loss = F.cross_entropy(client.forward_with(leaves, client.inputs), client.targets)
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        adapted = {
            name: (value - self.adaptation_rate * gradient).detach()
            for (name, value), gradient in zip(leaves.items(), gradients, strict=True)
        }
        return lambda inputs: client.forward_with(adapted, inputs)


@dataclass(frozen=True, kw_only=True)
class Adapted(Evaluation):
    """The server's model answers; clients test it after a step of theirs.

    Attributes:
        adaptation_rate: Of that step.
    """

    adaptation_rate: float

    def predict(self, state: State, model: nn.Module, updates: Sequence[ClientUpdate], inputs: Tensor) -> Tensor:
        logits: Tensor = model(inputs)
        return logits

    def client_test(self) -> ClientTest:
        return AdaptedTest(adaptation_rate=self.adaptation_rate)


def share_down(*, is_first: bool) -> int:
    """The client's share of the samples, 1 value, in its first round."""
    return int(is_first)


@with_card(
    Card(
        title="AugFL",
        source="Yue et al. 2025",
        needs=("labelled proxy", "classes"),
        down=(share_down,),
        live=("transfer_distance", "personal_accuracy"),
        differs=(
            "the teacher is trained on the server's labelled samples, not pretrained elsewhere",
            "the distance to it is T^2 KL + cross-entropy, T = 1, not contrastive, and lambda weighs that; at T = 4 the"
            " paper's lambda diverges on small networks",
        ),
        small={"teacher_steps": 20},
    )
)
@takes(Transfer)
def augfl(*, adaptation_rate: NotNegative = 0.05, **parameters: Any) -> FederatedMethod:
    """Clients take one step of inexact ADMM a round towards a model that adapts well; the server pulls to a teacher.

    ``test_accuracy`` is the server's model's, ``personal_accuracy`` that after one step on each client's own samples.
    The step is on a batch of ``training.batch_size`` samples, half of them support, half query.

    Args:
        adaptation_rate: Of the step that adapts, at least 0; 0: no adaptation.
    """
    transfer = Transfer(**parameters)
    return FederatedMethod(
        name="augfl",
        objective=SupportLoss(),
        terms=(MetaStep(adaptation_rate=adaptation_rate, penalty=transfer.penalty),),
        weighting=Uniform(),
        refinements=(transfer,),
        evaluation=Adapted(adaptation_rate=adaptation_rate),
        settings=MethodSettings(local_steps=1),
    )
