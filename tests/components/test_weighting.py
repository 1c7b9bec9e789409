"""Weights that are steps and not shares of a mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from tiny import tiny_sync, tiny_update
from torch import Tensor, nn

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.components.aggregation import Uniform, Weighting, mean_of_updates
from fedsweep.components.planning import FixedInterval, Pacing
from fedsweep.errors import InvariantError
from fedsweep.method import FederatedMethod
from fedsweep.records import ClientUpdate, LocalJob, RoundContext, State, SyncContext, SyncPoint
from fedsweep.submodel import Covered, SubModel
from fedsweep.testing import linear_model, local_engine, play_round, run_rounds, tiny_experiment
from fedsweep.trees import FlatLayout


@dataclass(frozen=True, kw_only=True)
class Steps(Weighting):
    """The same step for each attendee, whatever it sums to."""

    sums_to_one: ClassVar[bool] = False
    size: float

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        return torch.full((len(updates),), self.size, dtype=torch.float64), state


@dataclass(frozen=True, kw_only=True)
class StepsFromAnchors(Steps):
    """The same, from the models that the clients started from."""

    from_anchor: ClassVar[bool] = True


def method(weighting: Weighting, **fields: object) -> FederatedMethod:
    return replace(fedavg(), weighting=weighting, **fields)  # type: ignore[arg-type]


def final(given: FederatedMethod, **options: object) -> Tensor:
    return run_rounds(local_engine(tiny_experiment(given, **options))).vector  # type: ignore[arg-type]


# Two params and a buffer; the server is at (10, 20, 30).
LAYOUT = FlatLayout(names=("w", "mean"), shapes=((2,), (1,)), num_params=2, num_buffers=1)
SERVER, OLD = torch.tensor([10.0, 20.0, 30.0]), torch.tensor([8.0, 18.0, 0.0])


def update(client: int, values: list[float], version: int) -> ClientUpdate:
    return tiny_update(client, torch.tensor(values), layout=LAYOUT, anchor_version=version)


def sync_point(moves_from: str | None) -> SyncContext:
    return tiny_sync(
        nn.Identity(), SERVER, layout=LAYOUT, anchors={5: SERVER, 3: OLD}, cohort=(0, 1), moves_from=moves_from
    )


@pytest.mark.parametrize(
    ("moves_from", "weights", "expected"),
    [
        # 0.5 (12 - 10) + 1.5 (9 - 10) = -0.5 and 0.5 (20 - 20) + 1.5 (22 - 20) = 3; buffers 1/4 and 3/4.
        ("server", [0.5, 1.5], [9.5, 23.0, 0.25 * 4 + 0.75 * 8]),
        # The second started from (8, 18): 1 + 1.5 (9 - 8) and 0 + 1.5 (22 - 18).
        ("anchor", [0.5, 1.5], [12.5, 26.0, 7.0]),
        (None, [0.25, 0.75], [0.25 * 12 + 0.75 * 9, 0.25 * 20 + 0.75 * 22, 7.0]),
        ("anchor", [0.0, 0.0], [10.0, 20.0, 30.0]),
    ],
)
def test_steps_by_hand(moves_from: str | None, weights: list[float], expected: list[float]) -> None:
    updates = [update(0, [12.0, 20.0, 4.0], 5), update(1, [9.0, 22.0, 8.0], 3)]
    found = mean_of_updates(updates, torch.tensor(weights, dtype=torch.float64), sync_point(moves_from))
    assert found.tolist() == expected
    assert SERVER.tolist() == [10.0, 20.0, 30.0]


@pytest.mark.parametrize("kind", [Steps, StepsFromAnchors])
def test_steps_of_one_share_each_are_the_mean(kind: type[Steps]) -> None:
    mean = final(method(Uniform()), double=True)
    torch.testing.assert_close(final(method(kind(size=1 / 3)), double=True), mean, rtol=0, atol=1e-13)


def test_a_step_of_no_size_leaves_the_server_where_it_is() -> None:
    experiment = tiny_experiment(method(Steps(size=0.0)))
    assert torch.equal(run_rounds(local_engine(experiment)).vector, local_engine(experiment).start().vector)


def test_a_round_of_steps_does_not_fold() -> None:
    """Folded, the workers would have made sums of weights 2 of the models themselves."""
    cut = FixedInterval(interval=1, sync_rule="paper")
    assert method(Uniform(), pacing=cut).folds
    assert not method(Steps(size=2.0), pacing=cut).folds and not method(StepsFromAnchors(size=1.0), pacing=cut).folds
    found = play_round(local_engine(tiny_experiment(method(Steps(size=0.5), pacing=cut), local_steps=2)))
    assert found.sync_points == 2 and found.weights == (0.5, 0.5, 0.5)


@dataclass(frozen=True, kw_only=True)
class FirstWeight(SubModel):
    """The first param alone."""

    def key(self) -> str:
        return "first"

    def layout(self, full: FlatLayout) -> FlatLayout:
        return FlatLayout(names=("w",), shapes=((1,),), num_params=1, num_buffers=0)

    def extract(self, vector: Tensor, full: FlatLayout) -> Tensor:
        return vector[:1]

    def embed(self, vector: Tensor, full: FlatLayout) -> Covered:
        whole = torch.full((3,), float("nan"))
        whole[0] = vector[0]
        return Covered(vector=whole, cover=torch.tensor([True, False, False]))

    def build(self, model: nn.Module) -> nn.Module:
        return model


def test_parts_of_the_model_move_by_those_who_hold_them() -> None:
    """The first param as in full models; the second by 2 (22 - 20), all of the weight; the buffer is who has it."""
    part = FirstWeight()
    first = replace(update(0, [12.0], 5), submodel=part, layout=part.layout(LAYOUT))
    weights = torch.tensor([0.5, 1.5], dtype=torch.float64)
    found = mean_of_updates([first, update(1, [9.0, 22.0, 8.0], 3)], weights, sync_point("server"))
    assert found.tolist() == [9.5, 24.0, 8.0]


def test_parts_of_the_model_move_by_their_holders_steps_over_their_shares() -> None:
    """With shares of 1/4 and 3/4 the first param as in full models; the second by 1.5 (22 - 20) / 0.75."""
    part = FirstWeight()
    first = replace(update(0, [12.0], 5), submodel=part, layout=part.layout(LAYOUT))
    shares = torch.tensor([0.25, 0.75], dtype=torch.float64)
    sync = replace(sync_point("server"), shares_of=lambda updates: shares)
    found = mean_of_updates([first, update(1, [9.0, 22.0, 8.0], 3)], 2 * shares, sync)
    assert found.tolist() == [9.5, 24.0, 8.0]
    uneven = torch.tensor([1.0, 0.75], dtype=torch.float64)
    assert mean_of_updates([first, update(1, [9.0, 22.0, 8.0], 3)], uneven, sync).tolist() == [11.25, 22.0, 8.0]


def test_shares_that_do_not_sum_to_one_are_still_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wrong(Steps):
        sums_to_one: ClassVar[bool] = True

    with pytest.raises(InvariantError, match=r"Wrong must give 3 non-negative weights that sum to 1, but gave"):
        final(method(Wrong(size=0.5)))
    with pytest.raises(InvariantError, match=r"Steps must give 3 non-negative weights, but gave"):
        final(method(Steps(size=-0.5)))


@dataclass(frozen=True, kw_only=True)
class Late(Pacing):
    """Client 0's work of the first round arrives at the end of the second."""

    def carries_work(self) -> bool:
        return True

    def plan(self, state: State, context: RoundContext) -> tuple[tuple[SyncPoint, ...], State]:
        start = tuple(LocalJob(client=k, steps=1) for k in context.cohort if k not in context.in_flight)
        arrived = tuple(k for k in context.cohort if k or context.round % 2 == 0)
        return (SyncPoint(start=start, attend=arrived),), state


def test_late_work_moves_the_server_from_where_it_began() -> None:
    """w2 = w1 + (y_late - w0) + (y_now - w1), with a step of 1 each."""
    options = {"num_clients": 2, "cohort_size": 2, "double": True, "build": linear_model}
    late = method(StepsFromAnchors(size=1.0), pacing=Late())
    engine = local_engine(tiny_experiment(late, **options))  # type: ignore[arg-type]
    start = engine.start()
    first = run_rounds(engine, start, rounds=1)
    round = play_round(engine, first)
    late_update, now = round.updates
    assert (late_update.anchor_version, now.anchor_version) == (0, 1)
    assert late_update.vector is not None and now.vector is not None
    expected = first.vector + (late_update.vector - start.vector) + (now.vector - first.vector)
    torch.testing.assert_close(round.vector, expected, rtol=0, atol=1e-13)
