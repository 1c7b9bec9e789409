"""FedDH, FedDHE and FedJS through whole rounds: identities, sources of the gradient, traffic, resuming."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tiny import resumed
from torch import nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.feddhad.fedad import fedad
from fedsweep.algorithms.feddhad.feddh import NonIIDDegree, _squared_gradient_norms, estimated_shares, feddh, fedjs
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.method import FederatedMethod, merge
from fedsweep.testing import local_engine, run_rounds, subject_of, tiny_data, tiny_experiment
from fedsweep.testing.checks import passes_are_those_that_torch_counts

torch.set_num_threads(1)
BOTH: dict[str, Any] = {"learning_rate_v": 0.3, "learning_rate_b": 0.2, "decay_v": 0.9, "decay_b": 0.8}


def run(method: FederatedMethod, **more: Any) -> RunState:
    options: dict[str, Any] = {"sizes": SIZES, "double": True} | more
    return run_rounds(local_engine(tiny_experiment(method, **options)))


SIZES = (6, 10, 14, 18, 22, 26)  # consecutive slices of labels 0, 1, 2, 3, 0, ...: sizes make the shares uneven
FULL_BATCH: dict[str, Any] = {"batch_size": 64, "cohort_size": 6}  # one step on all samples


def test_equal_label_shares_are_fedavg_bit_for_bit() -> None:
    """Slices of whole cycles of the labels: everybody has JS 0 and the floor."""
    sizes = (4, 8, 12, 16, 20, 24)
    for method in (feddh(**BOTH), fedjs()):
        found, plain = run(method, sizes=sizes), run(fedavg(), sizes=sizes)
        assert torch.equal(found.vector, plain.vector)
        assert [r.aggregation_weights for r in found.records] == [r.aggregation_weights for r in plain.records]


def test_explicit_gradient_is_the_move_of_one_full_batch_step() -> None:
    """One step on all samples moves by rate x gradient: both sources give the same v and b, which are not the first."""
    states = [run(feddh(gradient=g, **BOTH), **FULL_BATCH).components["weighting"] for g in ("deferred", "explicit")]
    torch.testing.assert_close(states[0]["v"], states[1]["v"], rtol=1e-10, atol=0)
    torch.testing.assert_close(states[0]["b"], states[1]["b"], rtol=1e-10, atol=1e-14)
    assert float((states[0]["v"] - 1).abs().max()) > 1e-6


def test_proxy_gradient_on_all_data_is_the_explicit_one_a_round_earlier() -> None:
    images, labels = tiny_data(dtype=np.float64)
    data = {"images": images, "labels": labels, "proxy": (images, labels)}
    proxy = run(feddh(gradient="proxy", **BOTH), rounds=1, **FULL_BATCH, **data).components["weighting"]
    asked = run(feddh(gradient="explicit", **BOTH), rounds=2, **FULL_BATCH, **data).components["weighting"]
    torch.testing.assert_close(proxy["v"], asked["v"], rtol=1e-10, atol=0)
    torch.testing.assert_close(proxy["b"], asked["b"], rtol=1e-10, atol=1e-14)


def test_only_the_explicit_gradient_sends_more_than_the_models() -> None:
    """28 parameters: 3 models up in round 1, with their gradients from round 2 on; nothing more down."""
    for gradient in ("deferred", "same_round", "explicit"):
        records = run(feddh(gradient=gradient, **BOTH)).records
        more = 28 * 3 if gradient == "explicit" else 0
        assert [r.values_up for r in records] == [84, 84 + more, 84 + more]
        assert [r.values_down for r in records] == [84] * 3


@pytest.mark.parametrize("gradient", ["deferred", "explicit"])
def test_two_speeds_learn_once_a_round_from_each_client_once(gradient: Any) -> None:
    """With one step between sync points and two, gradients come from first jobs: 3 more uploads, not one a sync."""
    method = merge(feddh(gradient=gradient, **BOTH), dynamicfl(high_interval=1, low_interval=4, sync_rule="paper"))
    state = run(method, local_steps=4, equal_steps=True)
    plain = run(dynamicfl(high_interval=1, low_interval=4, sync_rule="paper"), local_steps=4, equal_steps=True)
    extra = [a.values_up - b.values_up for a, b in zip(state.records, plain.records, strict=True)]
    assert extra == ([0, 84, 84] if gradient == "explicit" else [0, 0, 0])
    moved = [k for k in range(6) if float(state.components["weighting"]["v"][k]) != 1.0]
    seen = {k for r in state.records[:2] for k in r.cohort}
    assert moved and set(moved) <= seen


def test_merges_with_a_term() -> None:
    assert run(merge(feddh(), fedprox(mu=0.1))).round == 3


@pytest.mark.parametrize("gradient", ["deferred", "explicit"])
def test_resumed_run_is_the_unbroken_one(gradient: Any, tmp_path: Path) -> None:
    experiment = tiny_experiment(feddh(gradient=gradient, **BOTH), rounds=4, sizes=SIZES)
    whole, other = run_rounds(local_engine(experiment)), resumed(experiment, tmp_path, rounds=2)
    assert torch.equal(other.vector, whole.vector)
    assert torch.equal(other.components["weighting"]["v"], whole.components["weighting"]["v"])


@pytest.mark.parametrize("keep", ["persist", "average"])
def test_moves_with_momentum_of_other_rounds_are_no_gradients(keep: Literal["persist", "average"]) -> None:
    """They were up to 1 / (1 - momentum) times as long, and of other models, where all take as many steps, too."""
    options: dict[str, Any] = {"optimizer": OptimizerSettings(momentum=0.9, keep=keep), "local_steps": 2}
    for gradient in ("deferred", "same_round"):
        with pytest.raises(ConfigError, match=f"NonIIDDegree divides .* training.optimizer_state is {keep};"):
            check_experiment(tiny_experiment(feddh(gradient=gradient), **options))
    for method in (feddh(gradient="explicit"), feddh(learning_rate_v=0.0, learning_rate_b=0.0)):
        check_experiment(tiny_experiment(method, **options))
    options["optimizer"] = OptimizerSettings(momentum=0.9)
    check_experiment(tiny_experiment(feddh(), **options))


# -- FedDHE ------------------------------------------------------------------------------------------------------


def test_single_class_clients_are_recognised_from_their_gradients() -> None:
    """Clients 0 and 1 have class 0 alone, 2 and 3 class 1, ...; nobody registers counts."""
    images, labels = tiny_data(num_samples=96, num_classes=3)
    method = feddh(estimate="gradients", **BOTH)
    experiment = tiny_experiment(
        method, images=images, labels=labels, proxy=(images, labels), local_epochs=5, cohort_size=6, rounds=1
    )
    assert method.registration == ()
    state = run_rounds(local_engine(experiment)).components["weighting"]
    assert state["shares"].argmax(dim=1).tolist() == [0, 0, 1, 1, 2, 2]
    torch.testing.assert_close(state["shares"].sum(dim=1), torch.ones(6).double())
    assert state["known"].all()


def test_client_never_seen_has_the_mean_divergence_of_the_others() -> None:
    images, labels = tiny_data(num_samples=96, num_classes=3)
    weighting = NonIIDDegree(estimate="gradients")
    experiment = tiny_experiment(
        feddh(estimate="gradients"), images=images, labels=labels, proxy=(images, labels), rounds=1
    )
    final = run_rounds(local_engine(experiment))
    state, cohort = final.components["weighting"], final.records[0].cohort
    js = weighting._divergences(state)
    assert state["known"].nonzero().flatten().tolist() == list(cohort)
    absent = [k for k in range(6) if k not in cohort]
    assert js[absent].tolist() == pytest.approx([float(js[list(cohort)].mean())] * 3)


def test_a_classs_gradient_counts_by_its_squared_norm() -> None:
    """At weights of 0 a sample x of two classes has the gradient (-x / 2, x / 2), whose square is x^2 / 2."""
    proxy = {"inputs": torch.tensor([[1.0], [2.0]]), "targets": torch.tensor([0, 1])}
    params = {"weight": torch.zeros(2, 1)}
    squares = _squared_gradient_norms(nn.Linear(1, 2, bias=False), params, proxy, 2)
    assert squares.tolist() == [0.5, 2.0]


def test_estimate_takes_the_reciprocal_of_the_norms_or_the_norms() -> None:
    """G = 1, 2, 4: reciprocals over their mean are 12/7, 6/7, 3/7; squared norms over theirs 3/7, 6/7, 12/7."""
    norms = torch.tensor([1.0, 2.0, 4.0]).double()
    expected = torch.softmax(torch.tensor([12.0, 6.0, 3.0]).double() / 7 * 2, dim=0)
    torch.testing.assert_close(estimated_shares(norms, sharpness=2.0, estimate_from="reciprocal"), expected)
    torch.testing.assert_close(estimated_shares(norms, sharpness=2.0, estimate_from="norm"), expected.flip(0))
    huge = estimated_shares(torch.tensor([0.0, 1e30]).double(), sharpness=1.0, estimate_from="reciprocal")
    assert bool(torch.isfinite(huge).all())
    even = estimated_shares(torch.zeros(2).double(), sharpness=1.0, estimate_from="norm")
    assert even.tolist() == [0.5, 0.5]


def test_what_clients_measure_is_in_their_work() -> None:
    """In round 2 of this run each client takes a gradient, and the curvature with its products with the Hessian."""
    for method in (feddh(gradient="explicit"), fedad(base_rate="hessian", refresh=[2])):
        passes_are_those_that_torch_counts(replace(subject_of("fedavg"), builder=lambda **given: method))  # noqa: B023
