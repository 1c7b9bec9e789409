"""Wrong input is one clear line on standard error and exit code 2, and leaves nothing behind."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
import ray.exceptions
import torch

from fedsweep.cli import main
from fedsweep.fleet import ray_start

TINY = """
scenario: {clients: 4, partition: {kind: iid}}
training: {rounds: 1, cohort_size: 2}
runtime: {backend: local}
tracking: {uri: none}
"""


@dataclass(frozen=True)
class Case:
    """What is set beside the tiny configuration, and what the line must say: where, what was found, the way out."""

    name: str
    given: tuple[str, ...]
    said: tuple[str, ...]


CASES = (
    Case("unknown key", ("training.ronds=3",), ("'training.ronds'", "did you mean 'training.rounds'?")),
    Case("unknown section", ("trainng.rounds=3",), ("'trainng'", "did you mean 'training'?")),
    Case("misspelt method", ("method={name: dynamcfl}",), ("'dynamcfl'", "did you mean 'dynamicfl'?")),
    Case("misspelt parameter", ("method={name: fedprox, muh: 1}",), ("fedprox", "'muh'", "did you mean 'mu'?")),
    Case("misspelt partition", ("scenario.partition={kind: dirichet}",), ("'dirichet'", "did you mean 'dirichlet'?")),
    Case("misspelt dataset", ("scenario.dataset=cifar11",), ("'cifar11'", "did you mean 'cifar1", "cifar100")),
    Case("misspelt model", ("model={name: resnet81}",), ("'resnet81'", "did you mean 'resnet18'?")),
    Case("wrong type", ("training.rounds=many",), ("training.rounds", "an integer >= 1", "'many'")),
    Case("text for a number", ("training.batch_size='8'",), ("training.batch_size", "an integer >= 1", "'8'")),
    Case("no rounds", ("training.rounds=0",), ("training.rounds", ">= 1", "0")),
    Case("not KEY=VALUE", ("training.rounds",), ("--set", "KEY=VALUE", "'training.rounds'")),
    Case(
        "cohort larger than the federation",
        ("training.cohort_size=5",),
        ("training.cohort_size=5", "scenario.clients=4", "lower the one or raise the other"),
    ),
    Case("interval 0", ("method={name: dynamicfl, high_interval: 0}",), ("high_interval", "at least 1", "0")),
    Case(
        "interval that is no level",
        ("method={name: dynamicfl, low_interval: h}",),
        ("low_interval", "'h'", "a, b, c, d, e, f, g"),
    ),
    Case(
        "low interval below the high one",
        ("method={name: dynamicfl, high_interval: 8, low_interval: 4}",),
        ("high_interval=8", "low_interval=4", "swap them"),
    ),
    Case(
        "local epochs and local steps together",
        ("training.local_epochs=2", "training.local_steps=5"),
        ("local_epochs=2", "local_steps=5", "leave one out"),
    ),
    Case(
        "dirichlet_alpha 0",
        ("scenario.partition={kind: dirichlet, dirichlet_alpha: 0}",),
        ("scenario.partition.dirichlet_alpha", "> 0", "0"),
    ),
    Case("more clients than samples", ("scenario.clients=2000",), ("2000", "1437", "lower scenario.clients")),
    Case(
        "budget below the low rate",
        ("method={name: dynamicfl}", "scenario.budgets={kind: values, clients: 3}"),
        ("budget", "client 0 has 3", "raise its budget"),
    ),
    Case(
        "missing data",
        ("scenario.dataset=cifar10", "scenario.root=/no/such/folder", "scenario.download=false"),
        ("'cifar10'", "/no/such/folder", "scenario.download=true"),
    ),
    Case("local backend with an address", ("runtime.address=auto",), ("backend=local", "'auto'", "to null")),
    Case("file store", ("tracking.uri=/tmp/mlruns",), ("tracking.uri", "'/tmp/mlruns'", "sqlite:///")),
    Case(
        "nobody answers",
        ("tracking.uri=http://127.0.0.1:1",),
        ("tracking.uri", "http://127.0.0.1:1", "to none"),
    ),
)


@pytest.fixture
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture(autouse=True)
def _empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a refused command, that left nothing in the working directory."""
    before = sorted(Path().rglob("*"))
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert all(said.startswith("starting: ") for said in out.splitlines())  # where something was long in coming up
    assert sorted(Path().rglob("*")) == before
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    return line


PLACES = {
    "model.name": "{}",
    "method.name": "{}",
    "scenario.dataset": "{}",
    "scenario.transform": "{}",
    "scenario.partition": "{{kind: {}}}",
    "scenario.feature_skew": "{{kind: {}}}",
    "scenario.drift": "{{kind: {}}}",
    "scenario.availability": "{{kind: {}}}",
    "scenario.budgets": "{{kind: {}}}",
    "scenario.devices": "{{stragglers: {{kind: {}}}}}",
    "communication.up": "{{name: {}}}",
    "communication.down": "{{name: {}}}",
    "training.schedule": "{{kind: {}}}",
    "tracking.also": "[{}]",
}


@pytest.mark.parametrize("key", PLACES)
@pytest.mark.parametrize("name", ["os:getcwd", "builtins:int", "math:pi", "math:nothing", "no_such_module:f", ":"])
def test_a_name_that_is_no_plug_in_is_one_line(
    key: str, name: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(["run", str(config), "--set", f"{key}={PLACES[key].format(repr(name))}", "--dry-run"], capsys)
    assert name in line or name.replace(":", ".") in line or f"{name.partition(':')[2]!r}" in line


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry-run"])
def test_wrong_configuration_is_one_line(
    case: Case, dry: tuple[str, ...], config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", str(config), *dry]
    for text in case.given:
        words += ["--set", text]
    line = refusal(words, capsys)
    assert [part for part in case.said if part not in line] == []


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry-run"])
@pytest.mark.parametrize("setting", ["runtime.device=cuda", "runtime.gpus_per_client=1", "runtime.gpus_per_server=0.5"])
@pytest.mark.parametrize("backend", ["local", "ray", "auto"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpu_where_there_is_none(
    setting: str,
    backend: str,
    dry: tuple[str, ...],
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # A cluster that started beside the check would be ended again; commands/test_run.py has that.
    monkeypatch.setattr(ray_start, "early_needs", lambda config: None)
    words = ["run", str(config), "--set", setting, "--set", f"runtime.backend={backend}", *dry]
    line = refusal(words, capsys)
    key, _, _ = setting.partition("=")
    assert key in line and "GPU" in line


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry-run"])
@pytest.mark.parametrize(
    ("address", "reason"), [("127.0.0.1:1", "nothing answers there"), ("nowhere", "must be 'auto' or 'host:port'")]
)
def test_unreachable_ray_address(
    address: str, reason: str, dry: tuple[str, ...], config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--set", "runtime.backend=ray", "--set", f"runtime.address={address}"]
    line = refusal(["run", str(config), *settings, *dry], capsys)
    assert "runtime.address" in line and f"'{address}'" in line and reason in line


def test_cluster_with_a_token_that_is_not_here(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuses(**_: object) -> None:
        raise ray.exceptions.AuthenticationError("no authentication token was found")

    monkeypatch.setattr(ray, "init", refuses)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        line = refusal(
            ["run", str(config), "--set", "runtime.backend=ray", "--set", f"runtime.address={address}"], capsys
        )
    assert address in line and "no authentication token was found" in line and "RAY_AUTH_TOKEN" in line


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry-run"])
def test_corrupt_archive(
    dry: tuple[str, ...], config: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path_factory.mktemp("data")
    (root / "cifar-10-python.tar.gz").write_bytes(b"not an archive")
    settings = [
        "--set",
        "scenario.dataset=cifar10",
        "--set",
        f"scenario.root={root}",
        "--set",
        "scenario.download=false",
    ]
    line = refusal(["run", str(config), *settings, *dry], capsys)
    assert "cifar-10-python.tar.gz is damaged" in line and "md5" in line and "delete it" in line


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry-run"])
def test_store_that_cannot_be_opened(
    dry: tuple[str, ...], config: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path_factory.mktemp("store") / "mlflow.db"
    store.write_text("this is no database, but it is long enough to be taken for one\n" * 20)
    line = refusal(["run", str(config), "--set", f"tracking.uri=sqlite:///{store}", *dry], capsys)
    assert f"sqlite:///{store}" in line and "not a database" in line and "tracking.uri" in line


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["run", "dry-run"])
def test_output_folder_in_use(
    dry: tuple[str, ...], config: Path, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path_factory.mktemp("taken")
    (folder / "config.yaml").write_text("scenario: {}\nmethod: {}\n")
    (folder / "notes.txt").write_text("mine")
    line = refusal(["run", str(config), "--out", str(folder), *dry], capsys)
    assert str(folder) in line and "config.yaml" in line and "--overwrite" in line
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "notes.txt"]


def test_output_that_is_a_file(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(["run", str(config), "--out", str(config)], capsys)
    assert str(config) in line and "it is a file" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run"], ("CONFIG is missing", "--resume DIR")),
        (["run", "quickstart/fedavgg"], ("'quickstart/fedavgg'", "did you mean 'quickstart/fedavg'?")),
        (["run", "--resume", "nowhere"], ("nowhere", "there is no such folder")),
        (["run", "x.yaml", "--resume", "y"], ("--resume and CONFIG exclude each other",)),
        (["run", "--resume", "y", "--set", "seed=1"], ("--resume and --set exclude each other",)),
        (["run", "--outt", "x"], ("--outt", "did you mean --out?")),
        (["rnu"], ("'rnu'", "'run'")),
        (["list", "metods"], ("'metods'", "did you mean 'methods'?")),
        (["show", "fedavgg"], ("'fedavgg'", "did you mean 'fedavg'?")),
        (["show"], ("NAME is missing",)),
        (["compare", "nowhere"], ("nowhere", "no such folder")),
        (["compare", "."], ("neither a run's folder",)),
        (["verify", "nowhere"], ("nowhere", "no such folder")),
        (["select", "--counts", "nowhere.csv"], ("nowhere.csv", "cannot be read")),
        (["select"], ("--counts",)),
        (["ui", "--uri", "sqlite:///nowhere.db"], ("nowhere.db", "no such store")),
        (["ui", "--port", "http"], ("'--port'", "whole number", "'http'")),
        (["ui", "--port", "99999"], ("from 1 to 65535", "99999")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_command_lines(words: list[str], said: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(words, capsys)
    assert [part for part in said if part not in line] == []


def test_line_numbers_of_a_file_that_is_no_yaml(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.yaml").write_text("training:\n  rounds: [1\n")
    line = refusal(["run", "bad.yaml"], capsys)
    assert "bad.yaml" in line and "line" in line


@pytest.mark.slow
def test_the_installed_command_refuses_likewise(config: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedsweep", "run", str(config), "--set", "training.ronds=3"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: unknown key 'training.ronds'; did you mean 'training.rounds'?")
    assert list(tmp_path.iterdir()) == []
