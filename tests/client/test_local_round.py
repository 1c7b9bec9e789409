"""One client's steps by hand: optimiser, clipping, solver and terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.scaffold import scaffold
from fedsweep.client.modules import BoundModule
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.local import LocalSolver, LocalStep, LocalTerm, LocalWork, Memory
from fedsweep.components.planning import FixedInterval
from fedsweep.errors import InvariantError
from fedsweep.method import FederatedMethod
from fedsweep.records import ClientUpdate
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_experiment
from fedsweep.trees import ParamTree


def method(**fields: object) -> FederatedMethod:
    return FederatedMethod(name="test", source="", **fields)  # type: ignore[arg-type]


def vector(update: ClientUpdate) -> Tensor:
    assert update.vector is not None
    return update.vector


class TwoWeights(nn.Module):
    """Two parameters, both 0: the logits of x are (w0 x, w1 x)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(inputs.flatten(1))
        return logits


def two_weights(
    *, steps: int = 1, learning_rate: float = 0.1, method: FederatedMethod | None = None, **optimizer: object
) -> list[float]:
    """The two parameters of one client with the sample x = 1 of class 0."""
    experiment = tiny_experiment(
        method or fedavg(),
        num_clients=1,
        cohort_size=1,
        local_steps=steps,
        batch_size=1,
        learning_rate=learning_rate,
        optimizer=OptimizerSettings(**optimizer),  # type: ignore[arg-type]
        build=TwoWeights,
        double=True,
        images=np.array([1.0, 1.0]).reshape(2, 1, 1, 1),
        labels=np.array([0, 1]),
        sizes=(1,),
    )
    weights: list[float] = vector(play_round(local_engine(experiment)).updates[0]).tolist()
    return weights


def test_one_step_by_hand() -> None:
    """w = (0, 0): softmax (1/2, 1/2), gradient (1/2 - 1, 1/2) = (-1/2, 1/2), step -0.1 x that = (0.05, -0.05)."""
    assert two_weights() == pytest.approx([0.05, -0.05], abs=1e-15)


def test_clipping_bounds_the_norm_over_all_parameters_by_hand() -> None:
    """The gradient's norm is sqrt(1/2); clipped to 0.1 it is (-0.1, 0.1) / sqrt(2)."""
    assert two_weights(learning_rate=1.0, clip_norm=0.1) == pytest.approx([0.1 / 2**0.5, -0.1 / 2**0.5], abs=1e-6)
    assert two_weights(learning_rate=1.0, clip_norm=0.8) == pytest.approx([0.5, -0.5], abs=1e-15)


def test_weight_decay_is_added_after_clipping_by_hand() -> None:
    """Step 1: (0.5, -0.5) at rate 1, unclipped. Step 2: softmax of (1/2, -1/2) is p = 1/(1 + e^-1) for class 0, the
    gradient (p - 1, 1 - p) has norm (1 - p) sqrt(2) = 0.38 and is clipped to 0.1, then 0.2 w is added.
    """
    by_norm = 0.1 / 2**0.5
    first = two_weights(steps=1, learning_rate=1.0, clip_norm=0.1, weight_decay=0.2)
    assert first == pytest.approx([by_norm, -by_norm], abs=1e-6)
    second = two_weights(steps=2, learning_rate=1.0, clip_norm=0.1, weight_decay=0.2)
    assert second == pytest.approx([by_norm * (1 + 1 - 0.2), -by_norm * (1 + 1 - 0.2)], abs=1e-5)


def test_nesterov_momentum_by_hand() -> None:
    """Step 1: the buffer is g1 and the move g1 + 0.9 g1, so w = 0.1 x 1.9 x (1/2, -1/2) = (0.095, -0.095).

    Step 2: p = 1 / (1 + e^-0.19) for class 0, g2 = p - 1; the buffer is 0.9 g1 + g2, the move g2 + 0.9 x that.
    """
    assert two_weights(momentum=0.9, nesterov=True) == pytest.approx([0.095, -0.095], abs=1e-15)
    g1, g2 = -0.5, 1 / (1 + np.exp(-0.19)) - 1
    expected = 0.095 - 0.1 * (g2 + 0.9 * (0.9 * g1 + g2))
    assert two_weights(steps=2, momentum=0.9, nesterov=True)[0] == pytest.approx(expected, abs=1e-15)


def test_adam_by_hand() -> None:
    """The first step of Adam is the rate times the gradient's sign, up to eps."""
    assert two_weights(name="adam") == pytest.approx([0.1, -0.1], abs=1e-6)


@dataclass(frozen=True, kw_only=True)
class LookAhead(LocalSolver):
    """Extragradient: a trial step, then the gradient there is taken from where it began."""

    def step(self, optimizer: torch.optim.Optimizer, evaluate: Callable[[], Tensor]) -> Tensor:
        (flat,) = optimizer.param_groups[0]["params"]
        before = flat.detach().clone()
        loss = evaluate()
        optimizer.step()
        evaluate()
        with torch.no_grad():
            flat.copy_(before)
        optimizer.step()
        return loss


def test_a_solver_sees_the_loss_at_the_present_parameters_each_time() -> None:
    """The trial step leads to (0.5, -0.5); the gradient there is p - 1 with p = 1 / (1 + e^-1)."""
    p = 1 / (1 + np.exp(-1.0))
    assert two_weights(learning_rate=1.0, method=method(solver=LookAhead())) == pytest.approx([1 - p, p - 1], abs=1e-15)


@dataclass(frozen=True, kw_only=True)
class Push(LocalTerm):
    """Adds a constant to the gradient of every parameter, and as much again as a loss."""

    by: float
    name: str = "push"

    def gradient(self, step: LocalStep) -> ParamTree:
        return {name: torch.full_like(value, self.by) for name, value in step.params.items()}

    def loss(self, step: LocalStep) -> Tensor:
        return self.by * torch.stack([p.sum() for p in step.model.parameters()]).sum()


def test_terms_add_to_the_gradient_before_clipping_by_hand() -> None:
    """(-1/2, 1/2) + 2 x (0.3, 0.3) = (0.1, 1.1); clipped to norm 1/2."""
    push = method(terms=(Push(by=0.3),))
    assert two_weights(learning_rate=1.0, method=push) == pytest.approx([-0.1, -1.1], abs=1e-15)
    scale = 0.5 / (0.1**2 + 1.1**2) ** 0.5
    assert two_weights(learning_rate=1.0, method=push, clip_norm=0.5) == pytest.approx(
        [-0.1 * scale, -1.1 * scale], abs=1e-6
    )


@dataclass(frozen=True, kw_only=True)
class Diary(LocalTerm):
    """Remembers how often its hooks ran, and sends it."""

    name: str = "diary"
    sends: ClassVar[bool] = True
    stateful: ClassVar[bool] = True

    def init(self, params: ParamTree) -> Memory:
        return {"jobs": 0, "steps": 0, "finished": 0}

    def prepare(self, memory: Memory, anchor: ParamTree) -> tuple[Memory, ParamTree | None]:
        return memory | {"jobs": int(memory["jobs"]) + 1}, None  # type: ignore[call-overload]

    def after_step(self, step: LocalStep, gradients: ParamTree) -> tuple[Memory, ParamTree | None]:
        return step.memory | {"steps": int(step.memory["steps"]) + 1}, None  # type: ignore[call-overload]

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, dict[str, Tensor]]:
        memory = memory | {"finished": int(memory["finished"]) + 1}  # type: ignore[call-overload]
        counts = [int(memory[key]) for key in ("jobs", "steps", "finished")]  # type: ignore[call-overload]
        return memory, {"counts": torch.tensor([*counts, work.steps, work.num_samples])}


def test_a_stateful_term_keeps_its_memory_between_participations() -> None:
    engine = local_engine(tiny_experiment(method(terms=(Diary(),)), num_clients=2, cohort_size=2, local_steps=3))
    state = run_rounds(engine, rounds=2)
    third = play_round(engine, state)
    assert third.updates[0].extras["diary/counts"].tolist() == [3, 9, 3, 3, 48]
    assert third.ledger.values[0, "up", "diary/counts"] == 5


def test_a_terms_hooks_run_once_a_job_and_once_a_step() -> None:
    cut = method(terms=(Diary(),), pacing=FixedInterval(interval=2, sync_rule="paper"))
    round = play_round(local_engine(tiny_experiment(cut, num_clients=2, cohort_size=2, local_steps=6)))
    assert round.updates[0].extras["diary/counts"].tolist() == [3, 6, 3, 2, 48]


@dataclass(frozen=True, kw_only=True)
class Forgetful(Diary):
    """Remembers, but says so nowhere."""

    stateful: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Whisper(Diary):
    """Sends, but says so nowhere."""

    sends: ClassVar[bool] = False


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (Forgetful(), r"term 'diary' \(Forgetful\) returned memory \(jobs, .*\).* set stateful = True"),
        (Whisper(), r"term 'diary' \(Whisper\) returned a payload \(counts\).* set sends = True"),
    ],
)
def test_what_a_term_forgets_to_declare_is_an_error_that_names_it(term: LocalTerm, message: str) -> None:
    with pytest.raises(InvariantError, match=message):
        play_round(local_engine(tiny_experiment(method(terms=(term,)))))


@dataclass(frozen=True, kw_only=True)
class Reset(LocalTerm):
    """Sets all parameters to a number, at a job's start or after each step."""

    value: float
    moment: str
    name: str = "reset"

    def prepare(self, memory: Memory, anchor: ParamTree) -> tuple[Memory, ParamTree | None]:
        return memory, self._params(anchor) if self.moment == "start" else None

    def after_step(self, step: LocalStep, gradients: ParamTree) -> tuple[Memory, ParamTree | None]:
        return step.memory, self._params(step.params) if self.moment == "step" else None

    def _params(self, like: ParamTree) -> ParamTree:
        return {name: torch.full_like(value, self.value) for name, value in like.items()}


def test_a_term_may_replace_the_starting_and_the_present_parameters() -> None:
    assert two_weights(method=method(terms=(Reset(value=3.0, moment="step"),))) == [3.0, 3.0]
    assert two_weights(method=method(terms=(Reset(value=3.0, moment="start"),))) == pytest.approx([3.05, 2.95])


class Branching(nn.Module):
    """Has parameters that the logits do not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 4), nn.Linear(3, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.used(inputs.flatten(1))
        return logits


def test_a_step_of_the_gradient_alone_has_the_bits_of_one_by_the_gradient_vector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    descents = []
    real = BoundModule.descend
    monkeypatch.setattr(BoundModule, "descend", lambda self, *given: descents.append(1) or real(self, *given))

    def model() -> Tensor:
        torch.manual_seed(3)
        return run_rounds(local_engine(tiny_experiment(fedavg(), build=Branching))).vector

    direct = model()
    taken = len(descents)
    monkeypatch.setattr(OptimizerSettings, "is_bare", False)
    assert torch.equal(model(), direct)
    assert taken > 0 and len(descents) == taken


def test_who_needs_the_gradient_vector_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    descents: list[object] = []
    monkeypatch.setattr(BoundModule, "descend", lambda self, loss, *given: descents.append(given) or loss.detach())
    for optimizer in ({"momentum": 0.9}, {"weight_decay": 0.1}, {"clip_norm": 0.5}, {"name": "adam"}):
        settings = OptimizerSettings(**optimizer)  # type: ignore[arg-type]
        run_rounds(local_engine(tiny_experiment(fedavg(), rounds=1, optimizer=settings)))
    run_rounds(local_engine(tiny_experiment(scaffold(), rounds=1)))
    assert descents == []
