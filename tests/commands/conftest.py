from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsweep.cli import main

TINY = """
# Two rounds of nearly nothing
name: tiny
scenario: {clients: 4, partition: {kind: iid}}
training: {rounds: 2, cohort_size: 2, local_steps: 2}
runtime: {backend: local}
tracking: {uri: none}
"""


@pytest.fixture(autouse=True)
def _own_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def fedsweep(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Calls the command in this process; gives exit code, standard output and standard error."""

    def call(*words: str | Path) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished tiny run; not to be changed."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny.yaml").write_text(TINY)
    assert main(["run", str(folder / "tiny.yaml"), "--out", str(folder / "run"), "--quiet"]) == 0
    return folder / "run"
