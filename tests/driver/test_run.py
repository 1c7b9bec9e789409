"""A run inside a program: what that program set of torch, and observers that are not as they should be."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsweep.api import load_model, prepare, run
from fedsweep.driver.observers import Observer
from fedsweep.errors import ConfigError
from fedsweep.records import RoundRecord
from fedsweep.runs.run_folder import RunFolder

TINY: dict[str, Any] = {
    "scenario": {"clients": 4, "partition": {"kind": "iid"}},
    "training": {"rounds": 1, "cohort_size": 2, "local_steps": 1},
    "tracking": {"uri": "none"},
    "runtime": {"backend": "local"},
}


class Clumsy(Observer):
    """Raises at the run's end."""

    def finished(self, status: str, result: Mapping[str, Any]) -> None:
        raise ValueError("at the end")


class Diary(Observer):
    """Notes how the run ended."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def finished(self, status: str, result: Mapping[str, Any]) -> None:
        self.ends.append(status)


@contextlib.contextmanager
def turned(get: Callable[[], Any], turn: Callable[[Any], None], value: Any) -> Any:
    before = get()
    turn(value)
    try:
        yield
        assert get() == value
    finally:
        turn(before)


def turned_operation(backend: Any, name: str, precision: str) -> Any:
    operation = getattr(backend, name, None)
    if operation is None:
        pytest.skip("torch has no such setting before 2.9")
    return turned(lambda: operation.fp32_precision, partial(setattr, operation, "fp32_precision"), precision)


SETTINGS: Mapping[str, Callable[[], Any]] = {
    "type": lambda: turned(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "device": lambda: torch.device("meta"),
    "precision": lambda: turned(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "precision by a newer name": lambda: turned_operation(torch.backends.mkldnn, "matmul", "bf16"),
    "precision of one kind": lambda: turned_operation(torch.backends.cudnn, "conv", "ieee"),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_a_run_has_the_same_bits_whatever_the_program_around_set_of_torch(what: str, tmp_path: Path) -> None:
    plain = run(TINY, out=tmp_path / "plain").summary["model_sha256"]
    with SETTINGS[what]():
        result = run(TINY, out=tmp_path / "run")
        tested = result.evaluate()
        values = {
            name: (value.dtype, value.device.type) for name, value in load_model(result.folder).named_parameters()
        }
    assert result.summary["model_sha256"] == plain
    assert tested.test_loss == result.to_pandas()["test_loss"].iloc[-1]  # type: ignore[union-attr]
    assert {*values.values()} == {(torch.float32, "cpu")}


def test_a_run_that_finished_has_finished_whatever_an_observer_raises_then(tmp_path: Path) -> None:
    diary = Diary()
    with pytest.raises(ValueError, match="at the end"):
        run(TINY, out=tmp_path / "run", observers=[Clumsy(), diary])
    assert RunFolder(tmp_path / "run").read_result()["status"] == "finished" and diary.ends == ["finished"]


class Stop(BaseException):
    """What a program ends with, beside ``Exception``."""


class Stopping(Observer):
    """Raises at a round."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def round_done(self, record: RoundRecord) -> None:
        raise self.error


@pytest.mark.parametrize(("error", "text"), [(KeyError("x"), "KeyError: 'x'"), (Stop(), "Stop"), (SystemExit(0), "0")])
def test_a_run_that_an_observer_ends_says_so_in_its_folder_with_the_place(
    tmp_path: Path, error: BaseException, text: str
) -> None:
    diary = Diary()
    with pytest.raises(type(error)):
        run(TINY, out=tmp_path / "run", observers=[Stopping(error), diary])
    result = RunFolder(tmp_path / "run").read_result()
    assert result["status"] == "failed" and diary.ends == ["failed"]
    assert result["reason"].startswith("Stopping.round_done (test_run.py, line ") and result["reason"].endswith(text)


def test_one_override_and_what_observes_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"overrides are a list .*; write \['training.rounds=2'\]"):
        prepare(TINY, overrides="training.rounds=2")
    with pytest.raises(ConfigError, match=r"got a mapping; write \['training.rounds=2'\]"):
        prepare(TINY, overrides={"training.rounds": 2})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"must be a list of objects .*, but one is <.*Diary object"):
        run(TINY, out=tmp_path / "run", observers=Diary())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"of the kind fedsweep.Observer, but one is <built-in function len>"):
        run(TINY, out=tmp_path / "run", observers=[len])  # type: ignore[list-item]
    assert not (tmp_path / "run").exists()
