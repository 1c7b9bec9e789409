"""Schedules are named, bound and built as everything else is; those that every run knew keep their form."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from fedsweep import run
from fedsweep.catalog import resolve
from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError
from fedsweep.experiment.build import build_training

LR = "training.optimizer={name: sgd, lr: 0.1}"


def warmup(*, rate: float, warm_rounds: int = 4) -> Callable[[int], float]:
    """From a part of the rate up to all of it."""
    return lambda round: rate * min(1.0, round / warm_rounds)


@pytest.fixture(autouse=True)
def user_module() -> Iterator[None]:
    module: Any = ModuleType("users_schedules")
    module.warmup, module.wrong = warmup, lambda *, rate: rate
    sys.modules["users_schedules"] = module
    yield
    del sys.modules["users_schedules"]


def rates(schedule: Any, *, rounds: int = 4) -> list[float]:
    config = resolve(load_config({"training": {"schedule": schedule, "rounds": rounds}}, [LR]))
    built = build_training(config).schedule
    return [built(round) for round in range(1, rounds + 1)]


def test_the_rates_of_each_kind_by_hand() -> None:
    """Cosine: floor + (rate - floor) (1 + cos(pi (t - 1) / 4)) / 2; exponential: rate * decay^(t - 1)."""
    assert rates("constant") == [0.1] * 4
    cosine = [0.02 + 0.08 * (1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)]
    assert rates({"kind": "cosine", "floor": 0.02}) == pytest.approx(cosine, abs=1e-15)
    assert rates({"kind": "exponential", "decay": 0.5}) == pytest.approx([0.1, 0.05, 0.025, 0.0125], abs=1e-15)
    assert rates({"kind": "users_schedules:warmup", "warm_rounds": 2}) == pytest.approx([0.05, 0.1, 0.1, 0.1])


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("constant", "constant"),
        ({"kind": "constant"}, "constant"),
        ("fedstg", "fedstg"),
        ({"kind": "fedstg"}, "fedstg"),
        ("cosine", {"kind": "cosine", "floor": 1e-4}),
        ({"kind": "exponential"}, {"kind": "exponential", "decay": 0.99}),
        ("users_schedules:warmup", {"kind": "users_schedules:warmup", "warm_rounds": 4}),
    ],
)
def test_a_schedule_may_be_a_word_or_a_mapping_and_is_kept_with_its_parameters(given: Any, kept: Any) -> None:
    config = resolve(load_config({"training": {"schedule": given}}))
    assert config.tree()["training"]["schedule"] == kept
    assert resolve(load_config(yaml.safe_load(config.to_yaml()))).hash() == config.hash()


def test_a_run_with_a_schedule_of_ones_own_is_repeated_from_what_it_keeps(tmp_path: Path) -> None:
    given = {
        "scenario": {"clients": 4, "partition": {"kind": "iid"}},
        "training": {"rounds": 3, "local_steps": 1, "schedule": {"kind": "users_schedules:warmup"}},
        "runtime": {"backend": "local"},
        "tracking": {"uri": "none"},
    }
    first = run(given, overrides=[LR], out=tmp_path / "first")
    assert first.rounds["lr"].to_pylist() == pytest.approx([0.025, 0.05, 0.075])
    again = run(tmp_path / "first" / "config.yaml", out=tmp_path / "again")
    assert again.summary["model_sha256"] == first.summary["model_sha256"]
    assert (
        run(given, overrides=[LR, "training.schedule=constant"], out=tmp_path / "constant").summary["model_sha256"]
        != first.summary["model_sha256"]
    )


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("cosin", r"^training\.schedule\.kind: unknown schedule 'cosin'; did you mean 'cosine'"),
        ({"kind": "cosine", "flor": 0}, "training.schedule cosine: unknown parameter 'flor'; did you mean 'floor'"),
        ({"kind": "cosine", "floor": "0"}, "training.schedule.floor must be a number >= 0, but got '0'"),
        ({"kind": "cosine", "floor": -1}, r"floor must be a number >= 0"),
        ({"kind": "cosine", "floor": 0.2}, r"training\.schedule\.floor must not exceed training\.optimizer\.lr"),
        ({"kind": "exponential", "decay": 0}, r"decay must be a number > 0 and <= 1"),
        ({"kind": "exponential", "decay": 1.5}, r"decay must be a number > 0 and <= 1"),
        ({"kind": "fedstg", "floor": 0}, "training.schedule fedstg: has no parameter 'floor'"),
        ("users_schedules:warmdown", r"^training\.schedule\.kind: .* unknown attribute 'warmdown'"),
        ("users_schedules:wrong", "schedule 'users_schedules:wrong' must give a Callable, but gives a float"),
    ],
)
def test_a_wrong_schedule_is_an_error_that_says_what_is_allowed(schedule: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rates(schedule)
