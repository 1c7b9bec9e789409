"""FedDyn: the dynamic regulariser."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny import net, normed, run, tiny_step
from torch import Tensor, nn

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.feddhad.fedad import fedad
from fedsweep.algorithms.feddyn import AddMeanMove, DynamicRegularizer, feddyn
from fedsweep.algorithms.federated_dropout import federated_dropout
from fedsweep.algorithms.fedopt import fedavgm
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError
from fedsweep.method import merge
from fedsweep.models.networks.chains import Mlp
from fedsweep.testing import component_conforms, linear_model, local_engine, play_round, run_rounds, tiny_experiment

Golden = Callable[..., list[RunState]]


def client_moves(state: RunState) -> dict[int, Tensor]:
    memories = {k: m["terms"]["feddyn"] for k, m in state.memories.items()}
    return {k: torch.cat([torch.as_tensor(v).reshape(-1) for v in m.values()]) for k, m in memories.items()}


@pytest.mark.slow
def test_the_golden_rounds(golden: Golden) -> None:
    """alpha 1, exact inner solves: y_k = (a_k b_k + x - H_k) / (a_k + 1); h = - mean H, g_k = - H_k."""
    states = golden(feddyn(strength=1.0), rounds=40, steps=(64, 64), learning_rate=0.2)
    assert [float(s.vector) for s in states[1:4]] == pytest.approx([7.7, 7.85, 7.925], abs=1e-12)
    assert float(states[-1].vector) == pytest.approx(8.0, abs=1e-10)
    assert -float(states[1].components["server_update"]["moves"]) == pytest.approx(-3.35, abs=1e-12)
    assert [-float(h) for h in client_moves(states[1]).values()] == pytest.approx([0.5, -7.2], abs=1e-12)
    assert [-float(h) for h in client_moves(states[-1]).values()] == pytest.approx([8.0, -8.0], abs=1e-9)


@pytest.mark.slow
def test_the_optimum_is_reached_with_momentum_and_in_part(golden: Golden) -> None:
    """Only the local optima matter, so the clients' optimiser is free."""
    five = ((1.0, 4.0, 2.0, 0.5, 3.0), (0.0, 10.0, -3.0, 4.0, 1.0))
    optimum = float(np.dot(*five) / np.sum(five[0]))
    found = golden(
        feddyn(strength=1.0),
        rounds=150,
        steps=(30, 30, 30, 30, 30),
        problem=five,
        cohort_size=2,
        learning_rate=0.1,
        optimizer=OptimizerSettings(momentum=0.5),
    )
    assert float(found[-1].vector) == pytest.approx(optimum, abs=1e-6)


@pytest.mark.slow
def test_by_size_the_optimum_is_that_of_the_weighted_losses(golden: Golden) -> None:
    """n = (32, 64), shares 2/3 and 4/3: y = (0.6, 40.75 / 4.75) from 1, and (32 x 1 x 0 + 64 x 4 x 10) / (32 + 256)."""
    method = feddyn(strength=1.0, weighting="size")
    states = golden(method, rounds=80, steps=(32, 64), learning_rate=0.2)
    mean = (0.6 + 40.75 / 4.75) / 2
    assert float(states[1].vector) == pytest.approx(mean + (mean - 1), abs=1e-9)
    assert float(states[-1].vector) == pytest.approx(80 / 9, abs=1e-8)


def test_by_size_clients_of_one_size_are_what_they_were() -> None:
    assert torch.equal(run(feddyn(weighting="size")).vector, run(feddyn()).vector)
    sizes = (4, 8, 12, 24, 28, 20)
    assert not torch.equal(run(feddyn(weighting="size"), sizes=sizes).vector, run(feddyn(), sizes=sizes).vector)


def test_the_first_round_goes_one_plus_m_over_n_as_far_as_the_mean() -> None:
    """Round 1 has no past: with one step a client the penalty does not act yet."""
    options = {"rounds": 1, "local_steps": 1, "double": True}
    start = local_engine(tiny_experiment(fedavg(), **options)).start().vector  # type: ignore[arg-type]
    plain, dynamic = run(fedavg(), **options).vector - start, run(feddyn(), **options).vector - start
    torch.testing.assert_close(dynamic, (1 + 3 / 6) * plain, rtol=0, atol=1e-15)


def test_the_servers_offset_is_the_mean_of_the_clients_moves() -> None:
    state = run(feddyn(strength=0.5), rounds=5, cohort_size=2, sizes=(4, 8, 12, 24, 28, 20), double=True)
    total = torch.stack(list(client_moves(state).values())).sum(dim=0) / 6
    offset = state.components["server_update"]["moves"]
    torch.testing.assert_close(offset, total, rtol=0, atol=1e-14)
    assert float(offset.norm()) > 0.01


def test_what_nobody_holds_stays_as_it_is() -> None:
    """Two of six clients a round hold half of the units each: values that neither has do not move by the offset."""
    method = merge(feddyn(strength=0.5), federated_dropout(keep=0.5))
    engine = local_engine(tiny_experiment(method, build=net, cohort_size=2))
    before = run_rounds(engine, rounds=4)
    played, (after, _) = play_round(engine, before), engine.advance(before)
    covers = [u.submodel.embed(u.vector, engine.layout).cover for u in played.updates if u.vector is not None]
    held = torch.stack([cover for cover in covers if cover is not None]).any(dim=0)
    assert torch.equal(after.vector[~held], before.vector[~held])
    offset = before.components["server_update"]["moves"]
    assert float(offset[~held[: len(offset)]].norm()) > 0.01


def test_one_step_by_hand() -> None:
    """0.5 (w - x + H): w = (1, 2), x = (3, 0), H = (4, -1)."""
    step = tiny_step(
        nn.Identity(),
        params={"w": torch.tensor([1.0, 2.0])},
        anchor={"w": torch.tensor([3.0, 0.0])},
        memory={"w": torch.tensor([4.0, -1.0])},
    )
    gradient = DynamicRegularizer(strength=0.5).gradient(step)
    assert gradient["w"].tolist() == [1.0, 0.5]
    assert step.memory["w"].tolist() == [4.0, -1.0]  # type: ignore[attr-defined]


def test_without_penalty_only_the_server_acts() -> None:
    """DynamicFL's program: mean + (m / N) x the sum of all rounds' mean moves; the clients are FedAvg's."""
    method = feddyn(penalty="none")
    assert method.terms == () and method.server_update == AddMeanMove()
    first = {"rounds": 1, "local_epochs": 2}
    start = local_engine(tiny_experiment(fedavg())).start().vector
    plain = run(fedavg(), **first).vector - start
    torch.testing.assert_close(run(method, **first).vector, start + 1.5 * plain, rtol=0, atol=1e-6)
    assert not torch.equal(run(method).vector, run(feddyn()).vector)


@pytest.mark.parametrize("of", ["active", "all"])
def test_the_means_that_may_be_tested_by_hand(of: str) -> None:
    """Last models over three rounds: of the attendees, or of all, the initial model where a client never took part."""
    engine = local_engine(tiny_experiment(feddyn(tested=of), double=True))  # type: ignore[arg-type]
    state = engine.start()
    last = dict.fromkeys(range(6), state.vector)
    for _ in range(3):
        updates = play_round(engine, state).updates
        last |= {u.client: u.vector for u in updates if u.vector is not None}
        state, _ = engine.advance(state)
    chosen = [last[u.client] for u in updates] if of == "active" else list(last.values())
    mean = torch.stack(chosen).mean(dim=0)
    inputs = torch.randn(5, 1, 1, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    method = engine.experiment.method
    found = method.evaluation.predict(state.components["evaluation"], linear_model().double(), (), inputs)
    torch.testing.assert_close(found, inputs.flatten(1) @ mean[:24].view(4, 6).T + mean[24:], rtol=0, atol=1e-13)
    component_conforms(method.evaluation)


def test_what_is_tested_changes_nothing_that_travels() -> None:
    states = [run(feddyn(tested=tested)) for tested in ("server", "active", "all")]  # type: ignore[arg-type]
    assert all(torch.equal(state.vector, states[0].vector) for state in states)
    assert len({state.records[-1].test_loss for state in states}) == 3


def test_buffers_take_the_mean() -> None:
    options = {"build": normed, "rounds": 1, "local_epochs": 2}
    assert torch.equal(run(feddyn(), **options).vector[-12:], run(fedavg(), **options).vector[-12:])
    assert bool((run(feddyn(), **(options | {"rounds": 5})).vector[-6:] > 0).all())


def test_sub_models_move_what_they_hold() -> None:
    def build() -> nn.Module:
        return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)

    method = merge(feddyn(), fedad(base_rate=0.4, refresh=(1,)))
    state = run(method, build=build, rounds=4, double=True)
    total = torch.stack(list(client_moves(state).values())).sum(dim=0) / 6
    torch.testing.assert_close(state.components["server_update"]["moves"], total, rtol=0, atol=1e-14)


def test_another_server_update_beside_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="feddyn and fedavgm can't be merged: both have their own server update"):
        merge(feddyn(), fedavgm())
