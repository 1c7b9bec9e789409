"""What others prepared is bounded before it is read: one short line, exit code 2, at once, whatever it is."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedsweep import api
from fedsweep.cli import main
from fedsweep.errors import InputError
from fedsweep.runs.run_folder import RunFolder

TINY = """
name: tiny
scenario: {clients: 4, partition: {kind: iid}}
training: {rounds: 2, cohort_size: 2, local_steps: 2}
runtime: {backend: local}
tracking: {uri: none}
"""
FILES = ("config.yaml", "result.json", "rounds.parquet", "clients.parquet", "model.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny.yaml").write_text(TINY)
    assert main(["run", str(folder / "tiny.yaml"), "--out", str(folder / "run"), "--quiet"]) == 0
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a finished run, and a working folder beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The line of a refused command."""
    assert main(words) == 2, capsys.readouterr()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "this is a bug" not in line and len(line) <= 500
    return line


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


ODD: dict[str, Callable[[Path], Any]] = {
    "device": lambda path: path.symlink_to("/dev/zero"),
    "link": lambda path: path.symlink_to("/etc/hostname"),
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "hole": sparse,
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", FILES)
def test_odd_files_of_a_run(name: str, odd: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / name).unlink()
    ODD[odd](run / name)
    refused = 0
    commands = (["compare", "run"], ["report", "run", "--out", "page.html"], ["evaluate", "run"])
    for words in (*commands, ["run", "--resume", "run"]):
        if (code := main(words)) == 2:
            refused += 1
        said = capsys.readouterr().err
        assert code in (0, 1, 2) and "this is a bug" not in said and "Traceback" not in said
    if name == "config.yaml":
        with pytest.raises(InputError):
            api.load_model(run)
    if name == "model.safetensors":
        with pytest.raises(InputError, match=r"cannot be read"):
            api.load_model(run)
    if name in ("rounds.parquet", "config.yaml", "result.json") and odd not in ("folder", "pipe", "device"):
        assert refused


@pytest.mark.parametrize("odd", ODD)
def test_odd_plan_of_a_sweep(odd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "swept").mkdir()
    ODD[odd](tmp_path / "swept" / "sweep.json")
    one_line(["sweep", "--resume", "--out", str(tmp_path / "swept")], capsys)


BOMB = "a0: &a0 [x]\n" + "".join(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]\n" for k in range(1, 12))
MAPS = "a0: &a0 {x: 1}\n" + "".join(
    f"a{k}: &a{k} {{{', '.join(f'k{j}: *a{k - 1}' for j in range(9))}}}\n" for k in range(1, 12)
)
TEXTS = {
    "alias bomb": (BOMB, "too large to be a configuration"),
    "alias bomb of mappings": (MAPS, "too large to be a configuration"),
    "contains itself": ("a: &a [*a]", "too large to be a configuration"),
    "long list": ("seed: [" + "1," * 200_000 + "1]", "too large to be a configuration"),
    "deep lists": ("a: " + "[" * 400 + "]" * 400, "too large to be a configuration"),
    "deep mappings": ("method: " + "{a: " * 300 + "1" + "}" * 300, "too large to be a configuration"),
    "bool of text": ("seed: !!bool maybe", "not readable as YAML"),
    "no such character": ('name: "\\UFFFFFFFF"', "invalid Unicode character"),
    "hexadecimal digits": ("seed: 0x" + "f" * 100_000, "10^40"),
    "digits": ("seed: " + "9" * 100_000, "not readable as YAML"),
    "batch size": ("training: {batch_size: 1" + "0" * 400 + "}", "training.batch_size"),
    "image size": ("scenario: {image_size: 1000000000}", "scenario.image_size"),
    "empty module": ('model: {name: ":"}', "model.name"),
    "long value": ("seed: " + "x" * 100_000, "seed"),
    "long key": ("x" * 1000 + ": 1", "unknown key"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_configurations(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, said = TEXTS[name]
    (tmp_path / "bad.yaml").write_text(text)
    assert said in one_line(["run", str(tmp_path / "bad.yaml"), "--dry-run"], capsys)


def test_bomb_as_a_value_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    bomb = "{" + BOMB.strip().replace("\n", ", ") + "}"
    assert "too large" in one_line(["run", "quickstart/fedavg", "--dry-run", "--set", f"seed={bomb}"], capsys)


@pytest.mark.parametrize("odd", ["device", "pipe", "hole"])
def test_configurations_that_are_odd_files(odd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ODD[odd](tmp_path / "bad.yaml")
    one_line(["run", str(tmp_path / "bad.yaml"), "--dry-run"], capsys)


@pytest.mark.slow
def test_tables_are_judged_by_their_metadata(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = 20_000_000
    pq.write_table(
        pa.table(
            {"round": pa.array([1], pa.int64()).take(pa.array([0] * rows, pa.int32()))},
        ),
        "big",
    )
    shutil.move("big", run / "rounds.parquet")
    assert (run / "rounds.parquet").stat().st_size < 10 * 2**20
    for words in (["compare", "run"], ["report", "run", "--out", "page.html"]):
        assert "20000000 rows" in one_line(words, capsys)


@pytest.mark.parametrize("name", ["rounds.parquet", "clients.parquet"])
def test_column_that_is_there_twice(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = pq.read_table(run / name)
    pq.write_table(table.append_column(table.column_names[1], table.column(1)), run / name)
    with pytest.raises(InputError, match="is there twice"):
        RunFolder(run).rounds_table() if name == "rounds.parquet" else RunFolder(run).read_clients()


@pytest.mark.parametrize("value", [[None], "many", {"a": 1}])
def test_result_with_figures_that_are_none(value: Any, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "total_bytes": value}))
    assert main(["compare", "run"]) == 0
    assert " kB " in capsys.readouterr().out  # from the rounds


@pytest.mark.parametrize("given", [{"num_classes": 10**12}, {"input_shape": [1, 10**9, 10**9]}])
def test_result_that_asks_for_a_huge_network(given: dict[str, Any], run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, **given}))
    with pytest.raises(InputError, match="input_shape and num_classes"):
        api.load_model(run)


def nested(levels: int) -> Any:
    return {} if not levels else {"a": nested(levels - 1)}


@pytest.mark.parametrize("values", [[], nested(300), 3, None], ids=["list", "deep", "number", "null"])
def test_plan_with_odd_values(values: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trial = {"number": 1, "folder": "0001", "label": "x", "values": values}
    plan = {"format": "fedsweep sweep", "version": 1, "given": {}, "trials": [trial]}
    (tmp_path / "sweep.json").write_text(json.dumps(plan))
    one_line(["sweep", "--resume", "--out", str(tmp_path)], capsys)


def test_folders_in_one_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inner = tmp_path / "top"
    for _ in range(150):
        inner = inner / "d"
    inner.mkdir(parents=True)
    for words in (["compare", str(tmp_path / "top")], ["report", str(tmp_path / "top"), "--out", "page.html"]):
        assert "folders in one another" in one_line(words, capsys)


def test_model_that_claims_more_than_its_network_has(run: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**30], "data_offsets": [0, 2**32]}}).encode()
    with (run / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2**32)
    with pytest.raises(InputError, match="more than"):
        api.load_model(run)


def test_a_folder_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "others").mkdir()
    stat = os.stat

    def forbidden(path: Any, **more: Any) -> os.stat_result:
        if str(path).startswith(str(tmp_path / "others" / "c")):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **more)

    monkeypatch.setattr(os, "stat", forbidden)
    assert main(["compare", str(tmp_path)]) == 2
    assert "others/config.yaml: permission denied" in capsys.readouterr().err
