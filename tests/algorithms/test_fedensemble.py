"""FedEnsemble: the clients' models are tested together."""

from __future__ import annotations

import pytest
import torch
from tiny import normed, run
from torch import Tensor, nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.feddhad.fedad import fedad
from fedsweep.algorithms.fedensemble import fedensemble
from fedsweep.catalog import build_method
from fedsweep.errors import ConfigError
from fedsweep.method import FederatedMethod, merge
from fedsweep.models.networks.chains import Mlp
from fedsweep.testing import linear_model, local_engine, play_round, run_rounds, tiny_experiment


@pytest.mark.parametrize("members", ["participants", "all"])
def test_the_models_that_travel_are_fedavgs_bit_for_bit(members: str) -> None:
    found, plain = run(fedensemble(members=members)), run(fedavg())  # type: ignore[arg-type]
    assert torch.equal(found.vector, plain.vector)
    assert [(r.values_up, r.values_down) for r in found.records] == [
        (r.values_up, r.values_down) for r in plain.records
    ]
    assert [r.test_loss for r in found.records] != [r.test_loss for r in plain.records]


@pytest.mark.parametrize("pacing", [fedavg(), dynamicsgd()], ids=["one sync point", "several"])
@pytest.mark.parametrize("others", [0, 3])
def test_the_sum_of_logits_by_hand(others: int, pacing: FederatedMethod) -> None:
    """Three participants of six; in the authors' ensemble the others hold the model of the round's start."""
    method = merge(fedensemble(members="all" if others else "participants"), pacing)
    engine = local_engine(tiny_experiment(method, local_steps=4, double=True))
    before = run_rounds(engine, rounds=1)
    played = play_round(engine, before)
    inputs = torch.randn(5, 1, 1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def logits(vector: Tensor) -> Tensor:
        weight, bias = vector[:24].view(4, 6), vector[24:]
        return inputs.flatten(1) @ weight.T + bias

    expected = sum(logits(u.vector) for u in played.updates if u.vector is not None) + others * logits(before.vector)
    assert len(played.plan.points) == (1 if pacing.name == "fedavg" else 3)
    model = linear_model().double().eval()
    found = method.evaluation.predict(played.components["evaluation"], model, played.updates, inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_one_participant_is_that_clients_model() -> None:
    """Its mean is its model, so accuracy and loss are FedAvg's."""
    found, plain = (run(m, cohort_size=1) for m in (fedensemble(), fedavg()))
    assert [r.test_loss for r in found.records] == pytest.approx([r.test_loss for r in plain.records], abs=1e-12)


def test_members_have_their_own_batch_statistics() -> None:
    engine = local_engine(tiny_experiment(fedensemble(), build=normed, double=True))
    played = play_round(engine)
    inputs = torch.randn(5, 1, 1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(5, 4, dtype=torch.float64)
    for update in played.updates:
        views = update.params
        rows = (inputs.flatten(1) - views["1.running_mean"]) / (views["1.running_var"] + 1e-5).sqrt()
        expected += rows @ views["2.weight"].T + views["2.bias"]
    model = normed().double().eval()
    before = model.state_dict()["1.running_var"].clone()
    found = fedensemble().evaluation.predict(played.components["evaluation"], model, played.updates, inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert torch.equal(model.state_dict()["1.running_var"], before)


def test_sub_models_answer_too() -> None:
    def build() -> nn.Module:
        return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)

    found = run(merge(fedensemble(members="all"), fedad(base_rate=0.4, refresh=(1,))), build=build, rounds=4)
    assert all(0 <= (r.test_accuracy or 0) <= 1 for r in found.records)


def test_unknown_members_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.members: unknown value .some."):
        build_method({"name": "fedensemble", "members": "some"})
