"""The tutorials and the how-to pages: their files are written, their commands run as a reader would."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

import fedsweep
from fedsweep.cli import main
from fedsweep.runs.run_folder import RunFolder
from fedsweep.testing import method_conforms

SMALL = ["--set", "runtime.backend=local", "--set", "tracking.uri=none"]


def play(pages: Any, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Write a page's files, run its commands in their order in one process; return them."""
    page = f"docs/{name}.md"
    pages.write_files(page, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    commands = [shlex.split(line)[1:] for line in pages.commands(page)]
    for words in commands:
        goes_on = {"--resume", "--dry-run"} & {*words}
        assert main([*words, *(SMALL if words[0] == "run" and not goes_on else [])]) == 0, words
    return commands


def test_a_metric_of_ones_own(
    pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = play(pages, "own-metric", tmp_path, monkeypatch)
    sys.modules.pop("my_metrics", None)
    assert [words[0] for words in commands] == ["run", "compare", "evaluate"]
    column = list(fedsweep.load("runs/nines").to_pandas()["share_of_nines"])
    assert all(0 <= value <= 1 for value in column) and column[-1] > 0 and len(column) == 6
    assert f"share_of_nines {column[-1]:.4f}" in capsys.readouterr().out


def test_resuming(
    pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = play(pages, "resume", tmp_path, monkeypatch)
    assert [words[0] for words in commands] == ["run", "run"]
    bits = RunFolder(Path("runs/long")).read_result()["model_sha256"]
    (newest := max(Path("runs/long/checkpoints").glob("round-*.json"))).unlink()  # as a kill in the last rounds
    (Path("runs/long") / "result.json").unlink()
    assert newest.name == "round-000006.json" and main(commands[1]) == 0
    assert RunFolder(Path("runs/long")).read_result()["model_sha256"] == bits


def test_a_first_sweep_on_a_cluster(
    pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = play(pages, "cluster-sweep", tmp_path, monkeypatch)
    assert [words[0] for words in commands] == ["sweep", "run"]
    assert "12 trials" in capsys.readouterr().out


@pytest.mark.slow
def test_a_method_from_paper_to_table(
    pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = play(pages, "paper-to-table", tmp_path, monkeypatch)
    assert [words[0] for words in commands] == ["show", "run", "reproduce"]
    assert RunFolder(Path("runs/try")).read_result()["method"] == "smoothed"
    method_conforms(sys.modules["my_smoothing"].smoothed, checks=["values", "limits", "ledger"])
    sys.modules.pop("my_smoothing")
