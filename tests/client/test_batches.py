"""The order in which a client sees its samples, and randomness inside the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.client.shards import batch_order
from fedsweep.components.local import LocalStep, Objective, TaskLoss
from fedsweep.method import FederatedMethod
from fedsweep.records import ClientWork
from fedsweep.streams import stream
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_experiment


def method(**fields: object) -> FederatedMethod:
    return FederatedMethod(name="test", source="", **fields)  # type: ignore[arg-type]


works = st.builds(
    ClientWork,
    steps=st.integers(1, 12),
    batch_size=st.integers(1, 9),
    whole_batches=st.booleans(),
    num_samples=st.integers(1, 20),
)


@settings(max_examples=60, deadline=None)
@given(work=works, round=st.integers(1, 50))
def test_batches_go_through_permutations_of_the_whole_shard(work: ClientWork, round: int) -> None:
    batches = batch_order(work, stream(0, "batches", round, 3))
    assert len(batches) == work.steps
    seen = np.concatenate(batches)
    n = work.num_samples
    for start in range(0, len(seen), n):
        one_pass = seen[start : start + n]
        assert len(set(one_pass.tolist())) == len(one_pass)
        assert set(one_pass.tolist()) <= set(range(n))
    if work.whole_batches:
        assert {len(batch) for batch in batches} == {work.batch_size}
    else:
        per_pass = -(-n // work.batch_size)
        sizes = [min(work.batch_size, n - (k % per_pass) * work.batch_size) for k in range(work.steps)]
        assert [len(batch) for batch in batches] == sizes


@settings(max_examples=30, deadline=None)
@given(work=works, more=st.integers(1, 10))
def test_more_steps_only_append_batches(work: ClientWork, more: int) -> None:
    from dataclasses import replace

    key = stream(0, "batches", 1, 0)
    short, long = batch_order(work, key), batch_order(replace(work, steps=work.steps + more), key)
    assert all(np.array_equal(a, b) for a, b in zip(short, long, strict=False))


def test_both_kinds_of_batches_begin_with_the_same_permutation() -> None:
    key = stream(0, "batches", 1, 0)
    whole, cut = (
        batch_order(ClientWork(steps=3, batch_size=4, whole_batches=w, num_samples=12), key) for w in (True, False)
    )
    assert all(np.array_equal(a, b) for a, b in zip(whole, cut, strict=True))


def test_rounds_and_clients_have_orders_of_their_own() -> None:
    work = ClientWork(steps=1, batch_size=16, whole_batches=True, num_samples=16)
    orders = {tuple(batch_order(work, stream(0, "batches", r, k))[0].tolist()) for r in (1, 2) for k in (0, 1)}
    assert len(orders) == 4


SEEN: list[tuple[object, ...]] = []


@dataclass(frozen=True, kw_only=True)
class Watched(Objective):
    """Cross-entropy that notes which client sees what at which step."""

    def loss(self, step: LocalStep) -> Tensor:
        _, _, round, client, position = step.stream.key
        SEEN.append(
            (round, client, position, step.position, step.inputs.numpy().tobytes(), tuple(step.targets.tolist()))
        )
        return TaskLoss().loss(step)


def watched(term_source: FederatedMethod, pacing: FederatedMethod) -> list[tuple[object, ...]]:
    SEEN.clear()
    mine = method(objective=Watched(), terms=term_source.terms, pacing=pacing.pacing)
    run_rounds(local_engine(tiny_experiment(mine, rounds=2, local_steps=6)))
    return sorted(SEEN)


def test_batches_are_the_same_for_every_cut_of_the_round_and_every_method() -> None:
    plain = watched(fedavg(), fedavg())
    assert len(plain) == 2 * 3 * 6
    assert all(position == by_hand for _, _, position, by_hand, _, _ in plain)
    assert plain == watched(fedavg(), dynamicsgd())
    assert plain == watched(fedprox(mu=0.5), fedavg())
    assert plain == watched(fedprox(mu=0.5), dynamicsgd(sync_rule="paper"))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))


class FunctionalDropout(nn.Module):
    """A user's network that calls dropout as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(F.dropout(inputs.flatten(1), 0.5, training=self.training))
        return logits


@pytest.mark.parametrize("build", [with_dropout, FunctionalDropout])
def test_dropout_follows_from_seed_round_client_and_step(build: Callable[[], nn.Module]) -> None:
    """Whatever the process has drawn before, and however the round is cut."""

    def run(pacing: FederatedMethod, global_seed: int) -> Tensor:
        torch.manual_seed(global_seed)
        options = {"num_clients": 1, "cohort_size": 1, "local_steps": 6, "build": build}
        return run_rounds(local_engine(tiny_experiment(pacing, **options))).vector  # type: ignore[arg-type]

    with torch.random.fork_rng(devices=[]):
        assert torch.equal(run(fedavg(), 1), run(fedavg(), 2))
        assert torch.equal(run(fedavg(), 1), run(dynamicsgd(), 3))


def test_dropout_differs_between_steps_and_clients() -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, inputs: Tensor) -> Tensor:
            MASKS.append(tuple(F.dropout(torch.ones(32), training=self.training).tolist()))
            return (inputs.flatten(1) * self.weight)[:, :4]

    MASKS: list[tuple[float, ...]] = []
    engine = local_engine(tiny_experiment(fedavg(), build=Masks, cohort_size=2, local_steps=3))
    state = engine.start()
    MASKS.clear()
    play_round(engine, state)
    assert len(MASKS) == len(set(MASKS)) == 6
