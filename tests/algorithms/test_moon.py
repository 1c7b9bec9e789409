"""MOON: the contrast of features."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, cast

import pytest
import torch
from tiny import net, part_of, run_net, tiny_step
from torch import Tensor, nn

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.feddhad.fedad import fedad
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.algorithms.moon import Contrastive, moon
from fedsweep.components.local import LocalStep, LocalWork
from fedsweep.engine.forecast import forecast, notes_after
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.method import FederatedMethod, merge
from fedsweep.models.network import ModelShape
from fedsweep.models.networks.chains import Mlp
from fedsweep.models.user_network import adopt
from fedsweep.submodel import FULL_MODEL
from fedsweep.testing import GivenParts, local_engine, run_rounds, tiny_experiment, with_parts
from fedsweep.trees import ParamTree


class Turned(nn.Module):
    """Features are the input plus an offset; the head is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(2))

    def features(self, inputs: Tensor) -> Tensor:
        return inputs + self.offset

    def head(self, features: Tensor) -> Tensor:
        return features

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.features(inputs))


def local_step(*, own: list[float], received: list[float], last: list[float] | None) -> LocalStep:
    """One sample at 0, so that the features are the offsets."""
    model = Turned()
    model.offset.data = torch.tensor(own)
    return tiny_step(
        model,
        inputs=torch.zeros(1, 2),
        targets=torch.zeros(1, dtype=torch.int64),
        anchor={"offset": torch.tensor(received)},
        memory={} if last is None else {"previous": {"offset": torch.tensor(last)}},
    )


@pytest.mark.parametrize(("last", "expected"), [([2.0, 0.0], 0.6931), ([0.0, 3.0], 0.1269), ([-1.0, 0.0], 0.01815)])
def test_the_contrast_by_hand(last: list[float], expected: float) -> None:
    """cos(z, z_g) = 1; at T = 0.5 it is log(1 + exp(2 (cos(z, z_p) - 1))) for cos 1, 0 and -1."""
    term = Contrastive(strength=3.0, temperature=0.5)
    loss = term.loss(local_step(own=[1.0, 0.0], received=[5.0, 0.0], last=last))
    assert loss is not None and float(loss.detach()) == pytest.approx(3 * expected, abs=2e-4)


def test_the_gradient_leads_to_the_received_model_and_away_from_the_last() -> None:
    step = local_step(own=[1.0, 1.0], received=[1.0, 0.0], last=[0.0, 1.0])
    loss = Contrastive(strength=1.0, temperature=0.5).loss(step)
    assert loss is not None
    (slope,) = torch.autograd.grad(loss, step.params["offset"])
    assert float(slope[0]) < 0 < float(slope[1])


def test_a_first_job_has_no_contrast() -> None:
    step = local_step(own=[1.0, 0.0], received=[1.0, 0.0], last=None)
    assert Contrastive(strength=1.0, temperature=0.5).loss(step) is None


def test_the_memory_is_a_copy_of_the_clients_own_model() -> None:
    live = {"offset": torch.tensor([1.0, 2.0])}
    work = LocalWork(anchor={}, params=live, values=live, steps=1, learning_rate=0.1, num_samples=1, broadcast={})
    memory, sent = Contrastive(strength=1.0, temperature=0.5).finish({}, work)
    live["offset"].zero_()
    assert memory["previous"]["offset"].tolist() == [1.0, 2.0] and sent == {}  # type: ignore[index]


def test_frozen_models_have_no_gradient_no_dropout_and_leave_the_mode() -> None:
    class Dropped(Turned):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def features(self, inputs: Tensor) -> Tensor:
            return self.drop(inputs + self.offset)

    step = local_step(own=[1.0, 0.0], received=[1.0, 0.0], last=[0.0, 1.0])
    model = Dropped()
    model.offset.data = torch.tensor([1.0, 1.0])
    step.model, step.params, step._features = model, dict(model.named_parameters()), torch.ones(1, 2)
    losses = {float(Contrastive(strength=1.0, temperature=0.5).loss(step)) for _ in range(20)}  # type: ignore[arg-type]
    assert len(losses) == 1 and model.training


def test_it_acts_from_a_clients_second_participation_on() -> None:
    options: dict[str, object] = {"cohort_size": 6, "local_epochs": 2}
    assert torch.equal(run_net(moon(), rounds=1, **options).vector, run_net(fedavg(), rounds=1, **options).vector)
    state = run_net(moon(strength=5.0), rounds=2, **options)
    assert not torch.equal(state.vector, run_net(fedavg(), rounds=2, **options).vector)
    kept = {name for memory in state.memories.values() for name in memory["terms"]["moon"]["previous"]}
    assert kept == {name for name, _ in net().named_parameters()}


def test_a_strong_contrast_keeps_features_near_the_received_models() -> None:
    """The mean move of clients that began from the same model is shorter."""
    options: dict[str, object] = {"cohort_size": 6, "local_epochs": 4, "rounds": 3}
    start = local_engine(tiny_experiment(fedavg(), build=net)).start().vector
    moves = [float((run_net(m, **options).vector - start).norm()) for m in (fedavg(), moon(strength=20.0))]
    assert moves[1] < moves[0]


def test_it_goes_with_other_terms_and_with_sub_models() -> None:
    method = merge(moon(), fedprox(mu=0.1), fedad(base_rate=0.4, refresh=(1,)))
    assert bool(torch.isfinite(run_net(method, rounds=5, cohort_size=6).vector).all())


class Noting(Contrastive):
    """Notes both models that a round's first step is contrasted with."""

    seen: ClassVar[list[tuple[ParamTree, ParamTree]]] = []

    def loss(self, step: LocalStep) -> Tensor | None:
        if "previous" in step.memory and not step.position:
            previous = cast(ParamTree, step.memory["previous"])
            self.seen.append(({n: v.clone() for n, v in step.anchor.items()}, previous))
        return super().loss(step)


def test_of_its_last_model_what_a_client_never_held_is_what_it_received() -> None:
    """Units 0-3 in round 1, all eight in round 2: the others are the received ones in both models."""
    Noting.seen = []
    half = part_of({group.name: range(4) for group in net().unit_groups()})
    parts = FederatedMethod(name="parts", source="", submodels=GivenParts(rounds=((half,), (FULL_MODEL,))))
    method = merge(replace(moon(), terms=(Noting(),)), parts)
    state = run_net(method, num_clients=1, cohort_size=1, sizes=(8,), rounds=2)
    ((received, last),) = Noting.seen
    assert torch.equal(last["fc1.weight"][4:], received["fc1.weight"][4:])
    assert torch.equal(last["classifier.weight"][:, 4:], received["classifier.weight"][:, 4:])
    own = state.memories[0]["terms"]["moon"]["previous"]
    assert bool(last["fc1.weight"].any()) and all(bool(torch.isfinite(value).all()) for value in own.values())


def test_a_part_that_stays_the_same_is_all_that_a_client_remembers() -> None:
    """Nothing is received for it later: what it starts from is what it ended with, bit for bit."""
    Noting.seen = []
    half = part_of({group.name: range(4) for group in net().unit_groups()})
    method = merge(replace(moon(), terms=(Noting(),)), with_parts(half))
    options: dict[str, Any] = {"num_clients": 1, "cohort_size": 1, "sizes": (8,)}
    ended = run_net(method, rounds=1, **options).memories[0]["terms"]["moon"]["previous"]
    run_net(method, rounds=2, **options)
    assert torch.equal(Noting.seen[-1][1]["fc1.weight"], ended["fc1.weight"][:4])


def test_networks_that_can_not_be_contrasted_are_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="moon contrasts what a model's head reads, but model Sequential has no"):
        check_experiment(tiny_experiment(moon()))


class Normed(nn.Module):
    """Batch norm and dropout among the features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.2)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)

    def features(self, inputs: Tensor) -> Tensor:
        return self.drop(torch.relu(self.first(self.norm(inputs.flatten(1)))))

    def head(self, features: Tensor) -> Tensor:
        found: Tensor = self.last(features)
        return found

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.features(inputs))


def normed() -> nn.Module:
    return adopt(Normed(), name="normed", shape=ModelShape(input_shape=(1, 1, 6), num_classes=4))


def test_asking_the_other_models_leaves_batch_norm_and_dropout_alone() -> None:
    """A contrast that counts for nothing is FedAvg bit for bit, statistics and all."""
    asked = replace(moon(), terms=(Contrastive(strength=0.0, temperature=0.5),))
    options: dict[str, object] = {"build": normed, "cohort_size": 6, "rounds": 3}
    assert torch.equal(run_net(asked, **options).vector, run_net(fedavg(), **options).vector)
    state = run_net(moon(strength=5.0), **options)
    assert bool(torch.isfinite(state.vector).all())
    assert not torch.equal(state.vector, run_net(fedavg(), **options).vector)


def test_what_is_kept_has_the_clients_own_statistics() -> None:
    state = run_net(moon(), build=normed, cohort_size=6, rounds=2)
    kept = [memory["terms"]["moon"]["previous"] for memory in state.memories.values()]
    means = [torch.as_tensor(value) for tree in kept for name, value in tree.items() if name.endswith("running_mean")]
    assert len(means) == 6 and not any(torch.equal(means[0], other) for other in means[1:])


def test_the_two_models_that_are_asked_cost_a_forward_pass_each() -> None:
    """3 + 2 passes a sample in place of FedAvg's 3."""
    options: dict[str, object] = {"rounds": 1, "cohort_size": 6}
    plain, asked = run_net(fedavg(), **options).records[0], run_net(moon(), **options).records[0]
    assert asked.flops * 3 == plain.flops * 5


@pytest.mark.parametrize(("options", "warned"), [({}, 1), ({"projection": 8}, 0)])
def test_a_network_without_a_projection_is_noted_before_and_after(options: dict[str, int], warned: int) -> None:
    def build() -> Mlp:
        return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8, **options)

    experiment = tiny_experiment(moon(), rounds=1, build=build)
    notes = forecast(experiment).remarks
    assert len(notes) == warned and all("set model.projection=256" in note for note in notes)
    assert notes_after(experiment, run_rounds(local_engine(experiment))) == list(notes)
