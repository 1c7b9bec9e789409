from __future__ import annotations

from typing import Any

import pytest

from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError
from fedsweep.sweeps.front import CurveFront
from fedsweep.sweeps.space import check_combination

TWO = {"test_accuracy": "max", "total_bytes": "min"}


def play(front: CurveFront, run: str, points: list[tuple[float, float]]) -> list[bool]:
    return [front.is_dominated(run, {"test_accuracy": a, "total_bytes": sent}) for sent, a in points]


def make(**how: Any) -> CurveFront:
    return CurveFront(TWO, **how)


def test_a_run_behind_the_front_at_its_bytes_for_some_tests_in_a_row_is_dominated() -> None:
    front = make(slack=0.1, patience=2)
    assert play(front, "good", [(1, 0.2), (2, 0.6), (3, 0.9)]) == [False] * 3
    # The span is 0.2 to 0.9, so 0.53 is what counts as behind at 2 bytes; at 1 byte nobody is better by 0.07.
    assert play(front, "poor", [(1, 0.2), (2, 0.5), (3, 0.6)]) == [False, False, True]
    assert play(front, "near", [(1, 0.2), (2, 0.55), (3, 0.85)]) == [False] * 3


def test_a_run_that_spends_less_is_not_behind_however_little_it_reaches() -> None:
    front = make(slack=0.1, patience=1)
    play(front, "dear", [(10, 0.9)])
    assert play(front, "cheap", [(1, 0.1), (2, 0.11), (9, 0.12)]) == [False, False, False]


def test_a_run_that_comes_back_begins_to_count_anew() -> None:
    front = make(slack=0.1, patience=2)
    play(front, "good", [(1, 0.0), (2, 0.5), (3, 0.8), (4, 1.0)])
    assert play(front, "late", [(2, 0.1), (3, 0.75), (4, 0.8), (5, 0.8)]) == [False, False, False, True]


def test_three_metrics_and_a_figure_that_is_no_number() -> None:
    front = CurveFront(dict.fromkeys(("test_loss", "total_bytes", "sim_time_s"), "min"), slack=0.1, patience=1)

    def told(run: str, loss: float, sent: float, seconds: float) -> bool:
        return front.is_dominated(run, {"test_loss": loss, "total_bytes": sent, "sim_time_s": seconds})

    assert not told("a", 2.0, 1.0, 1.0) and not told("a", 1.0, 2.0, 2.0)
    assert told("b", 1.9, 2.0, 2.0)
    assert not told("c", 1.9, 2.0, 1.5) and not told("c", float("nan"), 9.0, 9.0)


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("test_accuracy", "max"),
        (["test_accuracy", "test_loss"], ["max", "min"]),
        (["total_bytes", "sim_time_s"], ["min", "min"]),
        (["test_accuracy", "total_bytes"], ["max", "max"]),
        (["test_accuracy", "test_loss", "comm_ratio", "total_bytes"], ["max", "min", "min", "min"]),
    ],
)
def test_the_front_needs_what_is_spent_and_what_is_reached(metric: Any, mode: Any) -> None:
    sweep = {"space": {"seed": {"grid": [0]}}, "metric": metric, "mode": mode, "scheduler": "front"}
    with pytest.raises(ConfigError, match=r"sweep.scheduler=front .* e.g. sweep.metric=\[test_accuracy, total_bytes\]"):
        check_combination(load_config({"sweep": sweep}))
