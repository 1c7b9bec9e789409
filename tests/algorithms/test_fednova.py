"""FedNova: normalised averaging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from tiny import net, normed, run, vector
from torch import Tensor, nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl, dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.feddhad.fedad import fedad
from fedsweep.algorithms.federated_dropout import federated_dropout
from fedsweep.algorithms.fednova import NormalizedMoves, fednova, normalised
from fedsweep.algorithms.fedopt import fedadam, fedavgm
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.algorithms.fedstg import fedstg
from fedsweep.algorithms.scaffold import scaffold
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.aggregation import by_samples
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.method import FederatedMethod, merge
from fedsweep.models.networks.chains import Mlp
from fedsweep.records import ClientUpdate, State, SyncContext
from fedsweep.testing import local_engine, play_round, tiny_experiment
from fedsweep.world.stragglers import Deadline, PartialWork

Golden = Callable[..., list[RunState]]
UNEQUAL = (4, 8, 12, 24, 28, 20)


@dataclass(frozen=True, kw_only=True)
class GivenShares(NormalizedMoves):
    """The paper's weights with shares named beforehand."""

    shares: tuple[float, ...]

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        return normalised(torch.tensor([self.shares[u.client] for u in updates]), updates), state


@pytest.mark.parametrize(
    ("shares", "first", "limit"),
    [((0.5, 0.5), 3.39867413248, 5.113051534), ((0.25, 0.75), 6.17734826496, 7.583840817)],
)
def test_the_golden_rounds(golden: Golden, shares: tuple[float, ...], first: float, limit: float) -> None:
    """K = (2, 10), y = (0.81, 9.9455804416): uniform 1 + 6 (0.5 x -0.19 / 2 + 0.5 x 8.9455804416 / 10)."""
    method = replace(fednova(), weighting=GivenShares(shares=shares))
    states = golden(method, rounds=30, steps=(2, 10))
    assert float(states[1].vector) == pytest.approx(first, abs=1e-12)
    assert float(states[-1].vector) == pytest.approx(limit, abs=5e-10)


@pytest.mark.parametrize(("nesterov", "first"), [(False, 3.66518951605), (True, 3.70094797331)])
def test_the_golden_rounds_with_momentum(golden: Golden, nesterov: bool, first: float) -> None:
    """eta 0.01, momentum 0.9: effective steps 2.9 and 41.38105961; with Nesterov's 4.61 and 47.24295365."""
    states = golden(
        replace(fednova(), weighting=GivenShares(shares=(0.5, 0.5))),
        rounds=1,
        steps=(2, 10),
        learning_rate=0.01,
        optimizer=OptimizerSettings(momentum=0.9, nesterov=nesterov),
    )
    assert float(states[1].vector) == pytest.approx(first, abs=5e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_equal_steps_are_fedavg_bit_for_bit(momentum: float) -> None:
    options = {"sizes": UNEQUAL, "local_steps": 7, "optimizer": OptimizerSettings(momentum=momentum)}
    assert torch.equal(vector(fednova(), **options), vector(fedavg(), **options))


@pytest.mark.parametrize("keep", ["persist", "average"])
def test_momentum_that_outlives_a_round_takes_equal_steps(keep: Literal["persist", "average"]) -> None:
    """Otherwise a move is not what its steps are worth: with two quadratics it climbed."""
    optimizer = OptimizerSettings(momentum=0.9, keep=keep)
    with pytest.raises(ConfigError, match=f"NormalizedMoves divides .* training.optimizer_state is {keep};"):
        check_experiment(tiny_experiment(fednova(), optimizer=optimizer))
    with pytest.raises(ConfigError, match="NormalizedMoves divides moves by steps"):
        check_experiment(tiny_experiment(merge(fednova(), dynamicfl()), optimizer=optimizer, local_steps=7))
    check_experiment(tiny_experiment(merge(fednova(), dynamicsgd()), optimizer=optimizer, local_steps=7))
    for options in ({"local_steps": 7}, {"equal_steps": True}):
        same = {"sizes": UNEQUAL, "optimizer": optimizer, **options}
        check_experiment(tiny_experiment(fednova(), **same))  # type: ignore[arg-type]
        assert torch.equal(vector(fednova(), **same), vector(fedavg(), **same))


def test_steps_that_end_early_or_go_on_over_rounds_are_not_equal() -> None:
    options: dict[str, Any] = {"local_steps": 6, "optimizer": OptimizerSettings(momentum=0.9, keep="persist")}
    made = tiny_experiment(fednova(), **options)
    check_experiment(replace(made, world=replace(made.world, stragglers=Deadline(deadline_s=1.0))))
    match = "NormalizedMoves divides moves by steps whose momentum begins at zero"
    with pytest.raises(ConfigError, match=match):
        check_experiment(replace(made, world=replace(made.world, stragglers=PartialWork(deadline_s=1.0))))
    for unaggregated in ("continue", "discard"):
        held = merge(fednova(), fedstg(weights="size", unaggregated=unaggregated, decide_on="test"))
        with pytest.raises(ConfigError, match=match) if unaggregated == "continue" else nullcontext():
            check_experiment(tiny_experiment(held, **options))


def test_unequal_steps_are_not_fedavg() -> None:
    assert not torch.equal(vector(fednova(), sizes=UNEQUAL), vector(fedavg(), sizes=UNEQUAL))


def test_steps_in_proportion_to_samples_are_the_plain_mean_with_a_server_rate() -> None:
    """K_k = n_k / 4: t q_k / K_k is the same for all, m sum n^2 / (sum n)^2 of the plain mean's share 1 / m."""
    options = {"sizes": UNEQUAL, "cohort_size": 6, "rounds": 1, "double": True, "optimizer": OptimizerSettings()}
    engine = local_engine(tiny_experiment(fednova(), **options))  # type: ignore[arg-type]
    start = engine.start()
    found = engine.advance(start)[0].vector - start.vector
    moves = [u.vector - start.vector for u in play_round(engine, start).updates if u.vector is not None]
    rate = 6 * sum(n * n for n in UNEQUAL) / sum(UNEQUAL) ** 2
    torch.testing.assert_close(found, rate * torch.stack(moves).mean(dim=0), rtol=0, atol=1e-14)


def test_buffers_take_the_mean_in_proportion_to_the_weights() -> None:
    engine = local_engine(tiny_experiment(fednova(), build=normed, rounds=1, sizes=UNEQUAL, double=True))
    played, (state, _) = play_round(engine), engine.advance(engine.start())
    weights = torch.tensor(played.weights, dtype=torch.float64)
    rows = torch.stack([u.vector[-12:] for u in played.updates if u.vector is not None])
    torch.testing.assert_close(state.vector[-12:], weights @ rows / weights.sum(), rtol=0, atol=1e-14)


def test_it_goes_with_client_terms_and_sub_models() -> None:
    def build() -> nn.Module:
        return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)

    method = merge(fednova(), fedprox(mu=0.5), fedad(base_rate=0.4, refresh=(1,)))
    found = run(method, build=build, rounds=3, sizes=UNEQUAL)
    assert bool(torch.isfinite(found.vector).all())
    assert (found.records[-1].fwd_macs_per_sample or 0) < (found.records[0].fwd_macs_per_sample or 0)


def test_a_value_that_one_client_holds_moves_by_its_normalised_move() -> None:
    """A holder alone moves it by t / t_k of its own move; who else attends tells in t, as in whole models."""
    method = merge(fednova(), federated_dropout(keep=0.5))
    options = {"build": net, "rounds": 1, "cohort_size": 2, "sizes": UNEQUAL, "double": True}
    engine = local_engine(tiny_experiment(method, **options))  # type: ignore[arg-type]
    start = engine.start()
    played, (state, _) = play_round(engine, start), engine.advance(start)
    parts = [u.submodel.embed(u.vector, engine.layout) for u in played.updates if u.vector is not None]
    shares = by_samples(played.updates)
    mean_steps = sum(float(q) * u.effective_steps for q, u in zip(shares, played.updates, strict=True))
    for own, other, update in zip(parts, parts[::-1], played.updates, strict=True):
        assert own.cover is not None and other.cover is not None
        alone = own.cover & ~other.cover
        moved, expected = ((v - start.vector)[alone] for v in (state.vector, own.vector))
        torch.testing.assert_close(moved, mean_steps / update.effective_steps * expected, rtol=0, atol=1e-13)
        assert float(moved.norm()) > 0.01


def test_its_moves_are_what_a_server_optimiser_is_given() -> None:
    """FedAvgM with momentum m: the second move is that of FedNova's weights plus m times the first."""
    options = {"sizes": UNEQUAL, "cohort_size": 6, "double": True}
    engine = local_engine(tiny_experiment(merge(fednova(), fedavgm(momentum=0.5)), **options))  # type: ignore[arg-type]
    start = engine.start()
    once, _ = engine.advance(start)
    twice, _ = engine.advance(once)
    first, second = once.vector - start.vector, twice.vector - once.vector
    played = play_round(engine, once)
    moves = [
        c * (u.vector - once.vector)
        for c, u in zip(played.weights, played.updates, strict=True)
        if u.vector is not None
    ]
    torch.testing.assert_close(second, torch.stack(moves).sum(dim=0) + 0.5 * first, rtol=0, atol=1e-14)


def test_it_goes_with_an_adaptive_server() -> None:
    merged = merge(fednova(), fedadam())
    found = vector(merged, sizes=UNEQUAL)
    assert bool(torch.isfinite(found).all())
    assert not torch.equal(found, vector(fedadam(), sizes=UNEQUAL))
    assert not torch.equal(found, vector(fednova(), sizes=UNEQUAL))


@pytest.mark.parametrize("method", [fednova(), scaffold()])
def test_adam_on_the_clients_is_refused_before_anything_starts(method: FederatedMethod) -> None:
    with pytest.raises(ConfigError, match=f"method {method.name} divides clients' moves by their effective steps, whi"):
        check_experiment(tiny_experiment(method, optimizer=OptimizerSettings(name="adam")))
