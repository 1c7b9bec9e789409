"""What a run shows on Ray's metrics endpoint."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedsweep.fleet.ray_metrics import GAUGES, TAGS, RayMetrics
from fedsweep.records import RoundRecord


def record(round: int, *, accuracy: float | None) -> RoundRecord:
    return RoundRecord(
        round=round,
        timestamp_ms=0,
        test_accuracy=accuracy,
        test_loss=None,
        validation_accuracy=None,
        train_loss=None,
        lr=0.1,
        cohort=(0,),
        high_frequency=None,
        kl_divergence=None,
        attendees=(0,),
        sync_points=1,
        values_up=10,
        values_down=15,
        bytes_up=40,
        bytes_down=60,
        total_bytes=100 * round,
        over_budget=None,
        comm_cost=25,
        comm_ratio=None,
        local_steps=1,
        flops=1,
        fwd_macs_per_sample=None,
        sim_time_s=None,
        wall_time_s=0.1,
        eval_time_s=0.1,
        server_time_s=0.1,
        aggregation_weights=(1.0,),
    )


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[float, dict[str, str]]]:
    """What stands on the endpoint: value and tags by name."""
    from ray.util import metrics

    found: dict[str, tuple[float, dict[str, str]]] = {}

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert description and tag_keys == TAGS
            self._name = name

        def set(self, value: float, tags: dict[str, str]) -> None:
            found[self._name] = (value, tags)

    monkeypatch.setattr(metrics, "Gauge", Gauge)
    return found


def metrics_of(**more: Any) -> RayMetrics:
    return RayMetrics(**{"run": "r", "method": "fedavg", "planned_rounds": 5, "client_actors": 2, "gpus": 0.5, **more})


def test_a_run_shows_each_gauge_under_its_tags(shown: dict[str, Any]) -> None:
    metrics_of(sweep="s").record(record(1, accuracy=0.25))
    assert set(shown) == set(GAUGES)
    assert {
        value: tags for value, tags in shown.values() if tags != {"run": "r", "sweep": "s", "method": "fedavg"}
    } == {}
    values = {name.removeprefix("fedsweep_"): value for name, (value, _) in shown.items()}
    assert values == {
        "round": 1,
        "planned_rounds": 5,
        "test_accuracy": 0.25,
        "total_bytes": 100,
        "client_actors": 2,
        "gpus": 0.5,
    }


def test_a_name_beyond_ascii_is_shown_in_ascii(shown: dict[str, Any]) -> None:
    """Ray's gauges raise for it, and the server's actor would not begin."""
    metrics_of(run="läuft", sweep="日", method="µ").record(record(1, accuracy=0.25))
    tags = shown["fedsweep_round"][1]
    assert tags == {"run": r"l\xe4uft", "sweep": r"\u65e5", "method": r"\xb5"}


def test_bytes_are_those_of_all_rounds_also_where_one_is_played_again(shown: dict[str, Any]) -> None:
    metrics = metrics_of()
    metrics.record(record(1, accuracy=0.1))
    metrics.record(record(2, accuracy=0.2))
    metrics.record(record(3, accuracy=0.3))
    assert shown["fedsweep_total_bytes"][0] == 300
    metrics.record(record(2, accuracy=0.2))
    assert (shown["fedsweep_round"][0], shown["fedsweep_total_bytes"][0]) == (2, 200)


@pytest.mark.parametrize("unknown", [None, math.nan])
def test_accuracy_stays_where_a_round_was_not_evaluated(shown: dict[str, Any], unknown: float | None) -> None:
    metrics = metrics_of()
    metrics.show(round=1, test_accuracy=0.5, total_bytes=1)
    metrics.show(round=2, test_accuracy=unknown, total_bytes=2)
    assert (shown["fedsweep_test_accuracy"][0], shown["fedsweep_round"][0]) == (0.5, 2)
