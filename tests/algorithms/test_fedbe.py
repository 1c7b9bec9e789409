"""FedBE: distillation of a Bayesian ensemble."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import net, normed, tiny_sync
from torch import Tensor

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedbe import BayesianEnsemble, fedbe
from fedsweep.algorithms.feddhad.fedad import fedad
from fedsweep.algorithms.parts.ensembles import ensemble_logits
from fedsweep.engine.round import Round
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.method import FederatedMethod, merge
from fedsweep.records import SyncContext
from fedsweep.streams import stream
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_experiment

IMAGES = np.random.default_rng(5).normal(size=(24, 1, 1, 6)).astype(np.float32)
PROXY = (IMAGES, None)
SHORT: dict[str, Any] = {"epochs": 4, "batch_size": 8, "average_every": 2}
MODELS = torch.tensor([[1.0, 0.0, 4.0], [3.0, 2.0, -4.0]], dtype=torch.float64)


def drawn(
    posterior: str, number: int, spread: float, *, models: Tensor = MODELS, sizes: tuple[float, ...] = (1, 3)
) -> Tensor:
    component = fedbe(posterior=posterior, samples=number, spread=spread).refinements[0]
    assert isinstance(component, BayesianEnsemble)
    return component.draws(
        models,
        torch.tensor(sizes, dtype=torch.float64),
        start=torch.zeros(3, dtype=torch.float64),
        shapes=[2, 1],
        stream=stream(0, "test"),
    )


def run(method: FederatedMethod, **options: object) -> RunState:
    options = {"proxy": PROXY, "build": net} | options
    return run_rounds(local_engine(tiny_experiment(method, **options)))  # type: ignore[arg-type]


def round_of(method: FederatedMethod, **options: object) -> tuple[Round, SyncContext]:
    """A round, and a place in which a refinement may look at it again."""
    engine = local_engine(tiny_experiment(method, build=net, local_epochs=3, **options))  # type: ignore[arg-type]
    start = engine.start().vector
    model = engine.experiment.build_model()
    sync = tiny_sync(model, start, anchors={0: start}, cohort=(0, 1, 2))
    return play_round(engine), sync


def test_without_spread_every_draw_is_the_weighted_mean() -> None:
    """(1 x (1, 0, 4) + 3 x (3, 2, -4)) / 4."""
    assert drawn("gaussian", 3, 0.0).tolist() == [[2.5, 1.5, -2.0]] * 3


def test_gaussian_draws_have_the_clients_mean_and_variance() -> None:
    """Variances 0.25 x 1.5^2 + 0.75 x 0.5^2 = 0.75, the same, and 16 times it."""
    found = drawn("gaussian", 40_000, 1.0)
    np.testing.assert_allclose(found.mean(dim=0), [2.5, 1.5, -2.0], atol=0.06)
    np.testing.assert_allclose(found.var(dim=0), [0.75, 0.75, 12.0], rtol=0.03)


def test_the_authors_draws_by_hand() -> None:
    """Moves (1, 0 | 4) and (3, 4 | -2): norms 1 and 5, 4 and 2; directions (1, 0 | 1) and (0.6, 0.8 | -1).

    Their means (0.8, 0.4 | 0) times the mean norms 3 and 3.
    """
    moves = torch.tensor([[1.0, 0.0, 4.0], [3.0, 4.0, -2.0]], dtype=torch.float64)
    np.testing.assert_allclose(drawn("authors", 2, 0.0, models=moves), [[2.4, 1.2, 0.0]] * 2, atol=1e-15)
    found = drawn("authors", 40_000, 0.5, models=moves)
    np.testing.assert_allclose(found.std(dim=0), [3 * 0.5 * 0.2, 3 * 0.5 * 0.4, 3 * 0.5 * 1.0], rtol=0.03)
    assert bool(torch.isfinite(drawn("authors", 2, 0.1, models=torch.zeros(2, 3))).all())


def test_dirichlet_draws_are_convex_and_have_both_limits() -> None:
    found = drawn("dirichlet", 200, 1.0)
    assert bool((found >= MODELS.min(dim=0).values - 1e-12).all())
    assert bool((found <= MODELS.max(dim=0).values + 1e-12).all())
    np.testing.assert_allclose(drawn("dirichlet", 5, 1e9), [[2.5, 1.5, -2.0]] * 5, atol=1e-3)
    nearest = (drawn("dirichlet", 50, 1e-4)[:, None] - MODELS).abs().amax(dim=2).amin(dim=1)
    assert float(nearest.median()) < 1e-6


def test_the_clients_alone_without_sharpening_are_the_mean_of_probabilities() -> None:
    played, sync = round_of(fedavg())
    component = fedbe(samples=0, with_average=False, sharpening=1.0).refinements[0]
    assert isinstance(component, BayesianEnsemble)
    inputs = torch.from_numpy(IMAGES)
    found = component._targets(played.vector, played.updates, sync, inputs)
    expected = ensemble_logits(played.updates, sync, inputs).softmax(dim=2).mean(dim=0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_sharpening_by_hand() -> None:
    """At 0.5 probabilities are squared: P^2 / sum P^2."""
    played, sync = round_of(fedavg())
    inputs = torch.from_numpy(IMAGES)
    plain, sharp = (
        fedbe(sharpening=s).refinements[0]._targets(played.vector, played.updates, sync, inputs)  # type: ignore[attr-defined]
        for s in (1.0, 0.5)
    )
    expected = plain.square() / plain.square().sum(dim=1, keepdim=True)
    torch.testing.assert_close(sharp, expected, rtol=0, atol=1e-6)


def test_the_averaged_weights_are_the_mean_of_the_snapshots() -> None:
    """Steps 1 to 12: with snapshots every 6 from the start, the mean of the students after 6 and after 12."""
    played, sync = round_of(fedavg())

    def student(**options: Any) -> Tensor:
        settings = {"epochs": 4, "batch_size": 8, "learning_rate": 0.1, "average_from": 0.0} | options
        component = fedbe(**settings).refinements[0]
        asked = replace(sync, proxy_data=(torch.from_numpy(IMAGES), None))
        return component.refine({"loss": None}, played.vector, played.updates, asked)[0]

    after_6, after_12 = student(epochs=2, average_every=6), student(average_every=12)
    expected = (after_6.double() + after_12.double()) / 2
    torch.testing.assert_close(student(average_every=6).double(), expected, rtol=0, atol=1e-7)
    assert torch.equal(student(average_every=99), student(average_every=12))  # too short to be averaged: the last
    assert not torch.equal(after_6, after_12)


def test_batch_statistics_are_read_anew_or_stay() -> None:
    options: dict[str, object] = {"build": normed, "rounds": 1}
    found = run(fedbe(**SHORT), **options).vector[-12:-6]
    torch.testing.assert_close(found, torch.from_numpy(IMAGES).flatten(1).mean(dim=0), rtol=0, atol=1e-6)
    plain = run(fedavg(), **options).vector[-12:]
    assert torch.equal(run(fedbe(**SHORT, batch_norm="frozen"), **options).vector[-12:], plain)


@pytest.mark.parametrize("posterior", ["gaussian", "authors", "dirichlet"])
def test_nothing_but_models_travels_and_the_seed_decides(posterior: str) -> None:
    first, second = (run(fedbe(posterior=posterior, **SHORT)) for _ in range(2))  # type: ignore[arg-type]
    assert torch.equal(first.vector, second.vector)
    assert not torch.equal(first.vector, run(fedavg()).vector)
    for record in first.records:
        assert record.values_up == record.values_down == 3 * len(first.vector)
        assert record.extra["distillation_loss"] > 0


def test_one_client_has_no_variance() -> None:
    assert bool(torch.isfinite(run(fedbe(**SHORT), cohort_size=1).vector).all())


def test_sub_models_are_refused_unless_nothing_is_drawn() -> None:
    cut = fedad(base_rate=0.4, refresh=(1,))
    with pytest.raises(ConfigError, match=r"fedbe\+fedad: its BayesianEnsemble needs clients that train the whole"):
        merge(fedbe(**SHORT), cut)
    assert bool(torch.isfinite(run(merge(fedbe(samples=0, **SHORT), cut)).vector).all())


def test_without_proxy_data_it_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"fedbe needs data on the server.*scenario\.server_data\.proxy"):
        check_experiment(tiny_experiment(fedbe()))
