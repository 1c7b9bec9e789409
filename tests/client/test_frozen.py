"""Models that a client only asks, and what it knows of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.local import (
    NOBODY,
    ClientFacts,
    FrozenModel,
    LocalStep,
    LocalTerm,
    LocalWork,
    Memory,
    eval_copy,
)
from fedsweep.errors import ClientJobError
from fedsweep.method import FederatedMethod
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_experiment
from fedsweep.trees import ParamTree


def normed(features: int = 6, num_classes: int = 4) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(features), nn.Linear(features, num_classes), nn.Dropout(0.2))


def method(*terms: LocalTerm) -> FederatedMethod:
    return FederatedMethod(name="test", source="", terms=terms)


Ask = Callable[[LocalStep], Tensor]
ASKED: dict[str, Ask] = {
    "frozen": lambda step: step.frozen(step.anchor).logits(step.inputs),
    "forward_with": lambda step: step.forward_with(step.anchor, step.inputs),
    "params alone": lambda step: step.frozen(step.params).logits(step.inputs),
}


@dataclass(frozen=True, kw_only=True)
class Teacher(LocalTerm):
    """Asks a model, and gives its answer no weight."""

    how: str
    name: str = "teacher"

    def loss(self, step: LocalStep) -> Tensor:
        return 0.0 * ASKED[self.how](step).detach().sum()


@pytest.mark.parametrize("how", ASKED)
def test_asking_a_teacher_changes_neither_statistics_nor_draws(how: str) -> None:
    asked, plain = (
        run_rounds(local_engine(tiny_experiment(method(*terms), build=normed, rounds=2))).vector
        for terms in ((Teacher(how=how),), ())
    )
    assert torch.equal(asked, plain)


@dataclass(frozen=True, kw_only=True)
class Answers(LocalTerm):
    """Sends what the anchor, and the model kept of the last round, say to the first samples of a class of numbers."""

    name: str = "answers"
    sends: ClassVar[bool] = True
    stateful: ClassVar[bool] = True

    def init(self, params: ParamTree) -> Memory:
        return {"answer": torch.zeros(0), "kept": {}}

    def after_step(self, step: LocalStep, gradients: ParamTree) -> tuple[Memory, ParamTree | None]:
        probe = torch.linspace(-1, 1, 12).reshape(2, 1, 1, 6)
        return step.memory | {"answer": step.frozen(step.anchor).logits(probe)}, None

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, dict[str, Tensor]]:
        kept = {name: value.clone() for name, value in work.values.items()}
        answer = memory["answer"]
        assert isinstance(answer, Tensor)
        return memory | {"kept": kept}, {"answer": answer, "statistics": kept["1.running_mean"]}


def test_the_anchor_is_asked_with_its_own_statistics() -> None:
    experiment = tiny_experiment(method(Answers()), build=normed)
    engine = local_engine(experiment)
    state = run_rounds(engine, rounds=1)
    round = play_round(engine, state)
    model = experiment.build_model().eval()
    views = engine.layout.views(state.vector)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in views:
            tensor.data.copy_(views[name])
    expected = model(torch.linspace(-1, 1, 12).reshape(2, 1, 1, 6))
    for update in round.updates:
        assert torch.equal(update.extras["answers/answer"], expected)
        assert not torch.equal(update.extras["answers/statistics"], views["1.running_mean"])
        memory = round.memories[update.client]["terms"]["answers"]["kept"]
        assert set(memory) == set(views)
        assert torch.equal(memory["1.running_mean"], update.params["1.running_mean"])


def test_gradients_of_a_frozen_model_reach_the_inputs_alone() -> None:
    model = eval_copy(normed())
    values = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    first, inputs = FrozenModel(model, values), torch.ones(3, 1, 1, 6, requires_grad=True)
    answer = first.logits(inputs).sum()
    other = {name: torch.zeros_like(value) for name, value in values.items()}
    assert float(FrozenModel(model, other).logits(inputs.detach()).abs().sum()) == 0.0  # asked in between
    answer.backward()
    weight = values["2.weight"].detach().sum(0) / (1 + 1e-5) ** 0.5
    torch.testing.assert_close(inputs.grad, weight.expand(3, 6).reshape(3, 1, 1, 6))
    assert all(value.grad is None for value in values.values())


def test_a_frozen_model_without_all_params_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs all params by name, but 1\.weight, 1\.bias, 2\.bias are not given"):
        FrozenModel(eval_copy(normed()), {"2.weight": torch.zeros(4, 6)})


@dataclass(frozen=True, kw_only=True)
class Facts(LocalTerm):
    """Sends what the client knows of itself."""

    name: str = "facts"
    sends: ClassVar[bool] = True
    stateful: ClassVar[bool] = True
    needs_share: ClassVar[bool] = True

    def init(self, params: ParamTree, client: ClientFacts = NOBODY) -> Memory:
        return {"met": torch.tensor([client.client])}

    def prepare(
        self, memory: Memory, anchor: ParamTree, client: ClientFacts = NOBODY
    ) -> tuple[Memory, ParamTree | None]:
        return memory | {"round": torch.tensor([client.round])}, None

    def after_step(self, step: LocalStep, gradients: ParamTree) -> tuple[Memory, ParamTree | None]:
        return step.memory | {"share": torch.tensor([step.client.share])}, None

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, dict[str, Tensor]]:
        assert work.client.work is not None
        sent = {name: value for name, value in memory.items() if isinstance(value, Tensor)}
        sent |= {"counts": work.client.label_counts, "classes": torch.tensor(work.client.classes)}
        numbers = [work.effective_steps, work.client.num_samples, work.client.work.steps]
        return memory, sent | {"numbers": torch.tensor(numbers)}


def test_a_client_knows_itself() -> None:
    """Sizes 8, 16, 24 have mean 16; three steps at momentum 0.9 weigh 1 + 1.9 + 2.71 = 5.61."""
    experiment = tiny_experiment(
        method(Facts()),
        num_clients=3,
        sizes=(8, 16, 24),
        local_steps=3,
        optimizer=OptimizerSettings(momentum=0.9),
    )
    engine = local_engine(experiment)
    round = play_round(engine, run_rounds(engine, rounds=1))
    for update, profile in zip(round.updates, experiment.world.profiles, strict=True):
        extras = {name.removeprefix("facts/"): value.tolist() for name, value in update.extras.items()}
        assert (extras["met"], extras["round"]) == ([profile.client], [2])
        assert extras["share"] == [profile.num_samples / 16]
        assert extras["counts"] == profile.label_counts.tolist()
        assert extras["classes"] == [label for label, count in enumerate(profile.label_counts) if count]
        assert extras["numbers"] == pytest.approx([5.61, profile.num_samples, 3])
    told = engine.registration_bytes
    assert told == 2 * 4 * 3 == 2 * local_engine(replace(experiment, method=method())).registration_bytes


@dataclass(frozen=True, kw_only=True)
class Undeclared(Facts):
    """Reads the share, but says so nowhere."""

    needs_share: ClassVar[bool] = False


def test_a_share_that_nobody_was_told_is_an_error_that_names_the_flag() -> None:
    with pytest.raises(ClientJobError, match=r"declares needs_share = True"):
        play_round(local_engine(tiny_experiment(method(Undeclared()))))
