"""Where a run runs when its configuration leaves that open: by what it plans, never by a clock."""

from __future__ import annotations

import os
from typing import Any

import pytest

from fedsweep.config.load import load_config
from fedsweep.driver.backend import SHORT_S, training_seconds
from fedsweep.driver.plan import Plan
from fedsweep.driver.run import plan_run
from fedsweep.engine.forecast import forecast

SMALL: dict[str, Any] = {
    "scenario": {"clients": 8},
    "training": {"rounds": 3, "cohort_size": 4, "local_steps": 2, "local_epochs": None},
}
# The largest cohort that a planner may choose.
CHOSEN = ("planner={choices: {training.cohort_size: [2, 6]}}", "scenario.budgets={total_bytes: 2 MB}")


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})


def planned(*settings: str) -> Plan:
    return plan_run(load_config(SMALL, list(settings)))


def test_a_short_run_stays_in_this_process_and_says_why() -> None:
    plan = planned()
    assert plan.num_actors == 0
    assert plan.backend == (
        "in this process (about 0.0 s of training on one core; runtime.backend=auto is Ray from 60 s)"
    )


def test_seconds_are_the_plan_s_flops_and_steps_at_a_fixed_speed() -> None:
    experiment = planned("training.rounds=5").experiment
    cost = forecast(experiment)
    assert cost.local_steps == 5 * 4 * 2
    assert training_seconds(experiment) == cost.flops / 2e10 + 40 * 0.5e-3


def test_more_rounds_than_are_planned_count_like_the_first() -> None:
    few, many = (training_seconds(planned(f"training.rounds={rounds}").experiment) for rounds in (5, 500))
    assert many == pytest.approx(100 * few, rel=1e-3)


def test_a_long_run_is_ray_with_an_actor_for_each_core() -> None:
    rounds = int(1.1 * SHORT_S / (training_seconds(planned("training.rounds=5").experiment) / 5))
    plan = planned(f"training.rounds={rounds}")
    assert plan.num_actors == 2
    assert plan.backend.startswith("on 2 Ray client actors (about 66.")
    assert planned(f"training.rounds={rounds // 2}").num_actors == 0


@pytest.mark.parametrize(
    ("settings", "actors", "reason"),
    [
        (("runtime.backend=ray",), 2, "runtime.backend=ray"),
        (("runtime.client_actors=2",), 2, "runtime.client_actors=2"),
        (("runtime.address=auto",), 2, "runtime.address"),
        (("runtime.client_actors=1",), 0, "there would be one client actor"),
        (("training.cohort_size=1",), 0, "there would be one client actor"),
        (("runtime.backend=ray", "training.cohort_size=1"), 1, "runtime.backend=ray"),
        (("runtime.backend=local",), 0, "runtime.backend=local"),
        (("runtime.client_actors=8", *CHOSEN), 6, "runtime.client_actors=8"),
    ],
)
def test_what_is_asked_for_is_what_comes(settings: tuple[str, ...], actors: int, reason: str) -> None:
    plan = planned(*settings)
    assert plan.num_actors == actors
    assert reason in plan.backend
