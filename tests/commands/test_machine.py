from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from fedsweep.bench.device_proof import proofs as every_proof
from fedsweep.commands import doctor
from fedsweep.models.registry import MODELS
from fedsweep.world.data import torchvision_compat

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, list[str], dict[str, str]]]]:
    """What the process would have been replaced by."""
    calls: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execvpe", lambda *call: calls.append(call))
    yield calls


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_ui_opens_the_store_below_runs(
    replaced: list[tuple[str, list[str], dict[str, str]]], fedsweep: Command, tmp_path: Path
) -> None:
    Path("runs").mkdir()
    Path("runs/mlflow.db").touch()
    Path("mlflow.db").touch()
    port = free_port()
    code, out, err = fedsweep("ui", "--port", str(port))
    assert (code, err) == (0, "") and f"http://127.0.0.1:{port}" in out
    ((_, command, _),) = replaced
    assert f"sqlite:///{tmp_path}/runs/mlflow.db" in command and "127.0.0.1" in command


def test_ui_falls_back_to_the_store_in_this_folder(
    replaced: list[tuple[str, list[str], dict[str, str]]], fedsweep: Command, tmp_path: Path
) -> None:
    Path("mlflow.db").touch()
    assert fedsweep("ui", "--port", str(free_port()))[0] == 0
    assert f"sqlite:///{tmp_path}/mlflow.db" in replaced[0][1]


def test_ui_refuses_a_port_in_use(fedsweep: Command) -> None:
    Path("mlflow.db").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, err = fedsweep("ui", "--port", str(taken.getsockname()[1]))
    assert code == 2 and "in use" in err and "--port" in err


def test_doctor_names_the_problem_and_is_exit_1(fedsweep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor, "_CHECKS", {"Python": doctor._python, "juggler": partial(doctor._imported, "no_such_juggler")}
    )
    code, out, err = fedsweep("doctor")
    assert (code, err) == (1, "")
    first, second, last = out.splitlines()
    assert first.startswith("ok       Python: 3.")
    assert second.startswith("PROBLEM  juggler: cannot be imported") and "no_such_juggler" in second
    assert last.startswith("1 problem:")


def test_doctor_plays_the_main_job() -> None:
    began = time.perf_counter()
    assert doctor._main_job().startswith("2 tiny rounds in ")
    assert time.perf_counter() - began < 60


def test_doctor_says_why_the_main_job_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TINY", {"scenario": {"dataset": "digots"}})
    with pytest.raises(doctor.Problem, match="unknown dataset 'digots'; did you mean 'digits'"):
        doctor._main_job()


@pytest.mark.parametrize("alone", [True, False])
def test_doctor_says_where_torchvision_works_through_fedsweep_alone(
    monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    monkeypatch.setattr(torchvision_compat, "imports_alone", lambda: alone)
    assert ("a plain import of it fails beside this torch" in doctor._torchvision()) == (not alone)


@pytest.mark.slow
def test_doctor_tries_each_network_on_a_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fedsweep.bench import device_proof
    from fedsweep.commands.running.device import try_device

    def proofs(device: str) -> Iterator[device_proof.Proved]:
        yield from every_proof(device, ["mlp"])
        yield device_proof.Proved(network="broken", stepping=None, problem="no kernel for it", seconds=0.1)

    monkeypatch.setattr(device_proof, "proofs", proofs)
    assert try_device("lazy", tmp_path / "gpu.json") == 1
    out, err = capsys.readouterr()
    assert "no kernel for it" in err
    rows = [line.split() for line in out.splitlines()]
    assert rows[1][:3] == ["mlp", "lanes", "4"] and rows[2][:2] == ["broken", "FAILS"]
    told = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert told["machine"]["device"] == "lazy"
    assert [n["network"] for n in told["networks"]] == ["mlp", "broken"]
    assert told["networks"][0]["stepping"]["off"] <= 1e-4


def test_networks_that_classify_no_pictures_are_tried_on_data_of_theirs() -> None:
    other = [name for name, entry in MODELS.items() if not entry.classifies]
    tried = list(every_proof("cpu", other))
    assert [(proved.network, proved.problem) for proved in tried] == [(name, None) for name in other]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_doctor_without_a_gpu_says_so(fedsweep: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsweep.fleet.ray_leftovers.dead_sessions", lambda: [tmp_path / "session_1"])
    code, out, err = fedsweep("doctor", "--gpu", "--clear")
    assert out.startswith("removed") and code == 2 and "torch sees no GPU here" in err
    code, _, err = fedsweep("doctor", "--json", "gpu.json")
    assert code == 2 and "belongs to --gpu" in err
