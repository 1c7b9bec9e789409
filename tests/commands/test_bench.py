from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedsweep.bench import machine, setups
from fedsweep.bench.setup import Figure, Request, SetUp

Command = Callable[..., tuple[int, str, str]]
FIGURE = Figure(what="rounds", against="a plain loop", ours_s=(1.0, 2.0), reference_s=(2.0, 3.0), asked=1.5, data="x")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """A quiet machine and one set-up, T, which notes what it was asked for."""
    requests: list[Request] = []

    def measure(request: Request) -> list[Figure]:
        requests.append(request)
        return [FIGURE]

    monkeypatch.setattr(setups, "SETUPS", {"T": SetUp(name="T", summary="a test", measure=measure, dataset="cifar10")})
    monkeypatch.setattr(machine, "load_of_others", lambda: 0.05)
    return requests


def with_figure(monkeypatch: pytest.MonkeyPatch, figure: Figure) -> None:
    monkeypatch.setattr(setups, "SETUPS", {"T": replace(setups.SETUPS["T"], measure=lambda request: [figure])})


def test_set_ups_are_listed_either_way(fedsweep: Command) -> None:
    code, out, err = fedsweep("bench", "list")
    assert (code, err) == (0, "")
    assert {"W1", "W2", "W3", "P1", "P1-cpu", "L1"} <= {line.split()[0] for line in out.splitlines()}
    assert fedsweep("bench", "--list") == (code, out, err)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["W9"], "unknown set-up 'W9'"),
        (["W2", "--device", "tpu"], "unknown device 'tpu'"),
        (["W1", "--device", "cuda"], "W1 is measured on cpu, but got --device cuda"),
        (["P1"], "P1 is measured on cuda, but got --device cpu"),
        (["W2", "--scale", "huge"], "unknown scale 'huge'"),
        (["W2", "--repeat", "0"], "--repeat"),
        (["W2", "--rounds", "0"], "--rounds must be at least 1"),
        (["W2", "--root", "nowhere"], "--root nowhere has none of cifar10"),
        (["W2", "--json", "nowhere/speed.json"], "there is no folder"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(fedsweep: Command, words: list[str], said: str) -> None:
    code, out, err = fedsweep("bench", *words)
    assert (code, out, err.count("\n")) == (2, "", 1) and said in err


def test_a_gpu_that_is_not_there_is_exit_2(fedsweep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = fedsweep("bench", "P1", "--device", "cuda")
    assert (code, out) == (2, "") and "sees no GPU" in err


def test_what_is_measured_is_printed_and_written(fedsweep: Command, asked: list[Request]) -> None:
    code, out, _ = fedsweep("bench", "T", "--repeat", "2", "--scale", "full", "--rounds", "7", "--json", "speed.json")
    assert code == 0 and asked[0].is_full and (asked[0].repeats, asked[0].rounds) == (2, 7)
    assert "1.75" in out and "1.50 to 2.00" in out and "reached" in out and "rounds (x)" in out
    assert "1.5 s" in out and "2.5 s" in out, "the medians of either side"
    found = json.loads(Path("speed.json").read_text())
    assert {"cpu", "cpus", "memory_gb", "device", "versions", "git_commit", "git_changed"} <= set(found["machine"])
    assert (found["format"], found["is_judged"], found["load_of_others_cpus"]) == (1, True, {"T": 0.05})
    (figure,) = found["figures"]
    assert {key: figure[key] for key in ("set_up", "ratio", "ratios", "asked", "verdict")} == {
        "set_up": "T",
        "ratio": 1.75,
        "ratios": [2.0, 1.5],
        "asked": 1.5,
        "verdict": "reached",
    }
    assert (figure["ours_s"], figure["reference_s"]) == ([1.0, 2.0], [2.0, 3.0])


def test_a_missed_figure_is_exit_1(fedsweep: Command, asked: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    with_figure(monkeypatch, replace(FIGURE, asked=1.8))
    code, out, _ = fedsweep("bench")
    assert code == 1 and "missed" in out


def test_a_busy_machine_is_not_judged(fedsweep: Command, asked: list[Request], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "load_of_others", lambda: 1.3)
    with_figure(monkeypatch, replace(FIGURE, asked=1.8))
    code, out, err = fedsweep("bench", "T")
    assert (code, out) == (2, "") and "others use 1.3 CPUs" in err and "--anyway" in err
    code, out, _ = fedsweep("bench", "T", "--anyway", "--json", "speed.json")
    assert code == 0 and "not judged" in out and "the machine was busy" in out
    found = json.loads(Path("speed.json").read_text())
    assert found["is_judged"] is False and found["figures"][0]["verdict"] == "not judged"
