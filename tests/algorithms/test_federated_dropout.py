"""Federated Dropout: how many units, whose, and the two ways to aggregate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import lenet_run, net
from torch import Tensor, nn

from fedsweep.algorithms.federated_dropout import federated_dropout, num_kept
from fedsweep.engine.engine import Engine
from fedsweep.method import FederatedMethod
from fedsweep.models.unit_submodel import UnitSubModel
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_experiment

torch.set_num_threads(1)


def engine_of(method: FederatedMethod, build: Callable[[], nn.Module] = net, **more: Any) -> Engine:
    return local_engine(tiny_experiment(method, build=build, sizes=(6, 10, 14, 18, 22, 26), **more))


def kept_by_client(engine: Engine, rounds: int = 1) -> list[tuple[tuple[str, tuple[int, ...]], ...]]:
    found, state = [], engine.start()
    for _ in range(rounds):
        for update in play_round(engine, state).updates:
            assert isinstance(update.submodel, UnitSubModel)
            found.append(update.submodel.kept)
        state = run_rounds(engine, state, rounds=1)
    return found


def test_the_number_of_units_is_the_share_rounded_half_up_and_at_least_one() -> None:
    assert [num_kept(size, 0.75) for size in (6, 16, 120, 84)] == [5, 12, 90, 63]
    assert [num_kept(size, 0.5) for size in (1, 2, 3, 5)] == [1, 1, 2, 3]
    assert num_kept(10, 0.01) == 1 and num_kept(100, 0.545) == 55 and num_kept(100, 0.29) == 29


def test_every_client_of_every_round_has_its_own_units_of_the_same_number() -> None:
    kept = kept_by_client(engine_of(federated_dropout(keep=0.5)), rounds=3)
    assert all(len(units) == 4 and list(units) == sorted(units) for part in kept for _, units in part)
    assert len(set(kept)) > 7  # 9 draws of 70 x 70


def test_shared_units_are_one_draw_a_round() -> None:
    kept = kept_by_client(engine_of(federated_dropout(keep=0.5, shared=True)), rounds=3)
    assert [len(set(kept[3 * r : 3 * r + 3])) for r in range(3)] == [1, 1, 1]
    assert len(set(kept)) == 3


def test_lenet_at_one_half_sends_the_closed_form() -> None:
    """15,888 values; a bit for each of 6, 16, 120 and 84 units: 1 + 2 + 15 + 11 = 29 bytes."""
    record = lenet_run(federated_dropout(keep=0.5))
    assert record.values_up == 2 * 15_888
    assert (record.bytes_up, record.bytes_down) == (8 * 15_888, 8 * 15_888 + 2 * 29)
    assert record.fwd_macs_per_sample == 251_340


@pytest.mark.parametrize("double", [False, True])
def test_with_shared_units_masked_and_complete_aggregation_agree(double: bool) -> None:
    masked, complete = (
        run_rounds(engine_of(federated_dropout(keep=0.5, shared=True, aggregate=a), double=double)).vector
        for a in ("masked", "complete")
    )
    torch.testing.assert_close(masked, complete, rtol=0, atol=1e-14 if double else 1e-6)


def means(aggregate: str) -> tuple[Tensor, Tensor, Tensor]:
    """After a round: the server's vector before and after, and the weight that holds each value."""
    engine = engine_of(federated_dropout(keep=0.5, aggregate=aggregate), double=True)  # type: ignore[arg-type]
    start = engine.start()
    played = play_round(engine, start)
    mass = torch.zeros_like(start.vector)
    for update, weight in zip(played.updates, played.weights, strict=True):
        assert update.vector is not None
        cover = update.submodel.embed(update.vector, engine.layout).cover
        assert cover is not None
        mass += weight * cover.double()
    return start.vector, played.vector, mass


def test_complete_is_the_masked_move_times_the_weight_that_holds_the_value() -> None:
    """w + m (masked - w), value by value; m takes more than the two values 0 and 1 here."""
    start, masked, mass = means("masked")
    _, complete, _ = means("complete")
    torch.testing.assert_close(complete, start + mass * (masked - start), rtol=0, atol=1e-14)
    assert len(mass.unique()) > 4


def test_a_hidden_weight_is_trained_as_often_as_both_its_ends_are_kept() -> None:
    """keep^2 of the draws in the layer between two hidden ones, keep in the first and the last."""
    engine = engine_of(federated_dropout(keep=0.5), rounds=20, local_steps=1)
    held = {name: torch.zeros(shape) for name, shape in zip(engine.layout.names, engine.layout.shapes, strict=True)}
    state, draws = engine.start(), 0
    for _ in range(20):
        for update in play_round(engine, state).updates:
            assert update.vector is not None
            cover = update.submodel.embed(update.vector, engine.layout).cover
            assert cover is not None
            draws += 1
            for name, part in engine.layout.views(cover).items():
                held[name] += part
        state = run_rounds(engine, state, rounds=1)
    shares = {name: float(count.mean()) / draws for name, count in held.items()}
    assert shares["fc2.weight"] == pytest.approx(0.25, abs=1e-6)
    assert shares["fc1.weight"] == shares["classifier.weight"] == pytest.approx(0.5, abs=1e-6)
    assert float((held["fc2.weight"] / draws - 0.25).abs().max()) < 4 * (0.25 * 0.75 / draws) ** 0.5
