from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fedsweep.config.load import load_config

METHODS = ("fedavg", "dynamicsgd", "dynamicfl")
SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "quickstart.py"

STUB = """
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
sys.exit(3 if {failing!r} in sys.argv else 0)
"""


def test_presets_differ_in_name_and_method_alone() -> None:
    trees = [load_config(f"quickstart/{method}").tree() for method in METHODS]
    assert [tree.pop("method")["name"] for tree in trees] == list(METHODS)
    assert [tree.pop("name") for tree in trees] == [f"quickstart-{method}" for method in METHODS]
    assert trees[0] == trees[1] == trees[2]


@pytest.fixture
def quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, which calls a program that only keeps its words."""
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_program", lambda: [sys.executable, str(tmp_path / "stub.py")])
    return module


def calls(quickstart: ModuleType, *, failing: str = "") -> tuple[int, list[list[str]]]:
    log = Path("calls.txt").absolute()
    Path("stub.py").write_text(STUB.format(log=str(log), failing=failing))
    code: int = quickstart.main()
    return code, [json.loads(line) for line in log.read_text().splitlines()]


def test_three_runs_into_a_new_folder_then_the_comparison(
    quickstart: ModuleType, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, done = calls(quickstart)
    assert code == 0
    assert [words[:2] for words in done[:3]] == [["run", f"quickstart/{method}"] for method in METHODS]
    folders = [Path(words[words.index("--out") + 1]) for words in done[:3]]
    assert [folder.name for folder in folders] == list(METHODS)
    assert {folder.parent.parent for folder in folders} == {tmp_path / "runs"}
    assert done[3][:4] == ["compare", *map(str, folders)] and "--plot" in done[3]
    out = capfd.readouterr().out
    assert str(folders[0].parent) in out and f"ui --uri sqlite:///{tmp_path}/runs/mlflow.db" in out


def test_a_second_call_makes_new_folders(quickstart: ModuleType) -> None:
    first = quickstart._new_folder(Path("runs"))
    first.mkdir(parents=True)
    assert quickstart._new_folder(Path("runs")) != first


def test_a_run_that_fails_ends_it_with_its_exit_code(quickstart: ModuleType) -> None:
    code, done = calls(quickstart, failing="quickstart/dynamicsgd")
    assert (code, len(done)) == (3, 2)
