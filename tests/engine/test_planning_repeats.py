"""Sync points that stand there many times in a row are planned once, and nothing is overlooked by that."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedsweep.algorithms.dynamicfl.two_speed import dynamicsgd
from fedsweep.components.planning import cut_round, due_steps
from fedsweep.engine.plan import Planner
from fedsweep.errors import InvariantError
from fedsweep.records import LocalJob, RoundContext, SyncPoint
from fedsweep.testing import local_engine, tiny_experiment


@pytest.fixture(scope="module")
def planned() -> tuple[Planner, RoundContext, tuple[SyncPoint, ...]]:
    engine = local_engine(tiny_experiment(dynamicsgd(), local_steps=9))
    plan = engine.planner.plan(engine.start())
    return engine.planner, plan.context, plan.points


def test_a_round_of_equal_steps_repeats_one_sync_point() -> None:
    dues = {2: due_steps(1, 50, sync_rule="authors"), 7: due_steps(1, 50, sync_rule="authors")}
    points = cut_round(dues)
    assert len(points) == 49 and len({id(point) for point in points}) == 2
    jobs = [(job.client, job.steps) for job in points[0].start]
    assert jobs == [(2, 1), (7, 1)] and points[0].attend == (2, 7)
    assert [job.steps for job in points[-1].start] == [2, 2]


def test_repeats_cost_as_much_as_sync_points_that_are_equal(
    planned: tuple[Planner, RoundContext, tuple[SyncPoint, ...]],
) -> None:
    planner, context, points = planned
    apart = tuple(replace(point) for point in points)
    assert len({id(point) for point in apart}) == len(points) > len({id(point) for point in points})
    assert planner._traffic(points, context, lost={}) == planner._traffic(apart, context, lost={})
    planner._check(points, context)
    planner._check(apart, context)


@pytest.mark.parametrize("count", [2, 3, 11])
@pytest.mark.parametrize(("attends", "words"), [(True, "local steps, but it has 9"), (False, "while it is at another")])
def test_what_is_wrong_with_repeats_is_found(
    planned: tuple[Planner, RoundContext, tuple[SyncPoint, ...]], attends: bool, words: str, count: int
) -> None:
    planner, context, _ = planned
    client = context.cohort[0]
    point = SyncPoint(start=(LocalJob(client=client, steps=5),), attend=(client,) if attends else ())
    for points in ((point,) * count, tuple(replace(point) for _ in range(count))):
        with pytest.raises(InvariantError, match=f"client {client} .*{words}"):
            planner._check(points, context)


def test_a_client_can_attend_without_a_job_only_once(
    planned: tuple[Planner, RoundContext, tuple[SyncPoint, ...]],
) -> None:
    planner, context, _ = planned
    client = context.cohort[0]
    held = replace(context, in_flight=(client,))
    point = SyncPoint(start=(), attend=(client,))
    planner._check((point,), held)
    for count in (2, 5):
        with pytest.raises(InvariantError, match="neither a job nor earlier work"):
            planner._check((point,) * count, held)
