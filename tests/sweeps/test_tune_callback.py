"""Why a trial broke down, from what Ray Tune writes of it."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsweep.driver.observers import RunInfo
from fedsweep.runs.folder_lock import sole_writer
from fedsweep.runs.run_folder import RunFolder
from fedsweep.sweeps.tune_callback import Watcher, cause_in
from fedsweep.tracking.terminal.sweep_progress import SweepProgress

HEAD = "Failure # {} (occurred at 2026-01-02_03-04-05)\n"
OF_A_PROCESS = HEAD + "The actor died unexpectedly before finishing this task.\n\tclass_name: SweepTrial\n\tpid: 12\n"
OF_A_CONNECTION = HEAD + (
    "The actor baebc54ec04e is unavailable: The actor is temporarily unavailable: RpcError: Socket closed."
    " The task may or may not have been executed on the actor.\n"
)
OF_A_NODE = HEAD + (
    "The actor died unexpectedly before finishing this task.\n\tpid: 12\n"
    "The actor died because its node has died. Node Id: 7dab\n"
)
OF_MEMORY = HEAD + (
    "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 127.0.0.1, ID: b570) was"
    " 11.87GB used / 23.54GB limit (0.504239)\nWorkers killed: SweepTrial\n"
)
OF_THE_TRIAL = HEAD + (
    "ray::SweepTrial.train() (pid=12, ip=127.0.0.1)\n"
    '  File "trial.py", line 12, in step\n    raise RunError("no")\n'
    "fedsweep.errors.RunError: the server has had enough\n"
)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (OF_A_PROCESS, "the trial's process died"),
        (OF_A_CONNECTION, "the trial's process died"),
        (OF_A_NODE, "the trial's node died"),
        (OF_MEMORY, "its node ran low on memory, for which Ray ended the trial's process"),
        (OF_THE_TRIAL, "RunError: the server has had enough"),
        ("", "unknown; Ray's logs may say more"),
    ],
)
def test_the_cause_is_one_line(text: str, cause: str) -> None:
    assert cause_in(text.format(1)) == cause


def test_the_last_of_several_failures_counts() -> None:
    assert cause_in(OF_A_NODE.format(1) + OF_THE_TRIAL.format(2)) == "RunError: the server has had enough"
    assert cause_in(OF_THE_TRIAL.format(1) + OF_A_PROCESS.format(2)) == "the trial's process died"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A trial that has begun."""
    run = RunFolder(tmp_path / "0001")
    run.path.mkdir()
    run.write_config("name: t\n")
    return run


def lost(folder: Path) -> list[tuple[str, str, str | None]]:
    """What the audience hears of a trial whose process died for the last time."""
    heard: list[tuple[str, str, str | None]] = []

    class Audience(SweepProgress):
        def ended(self, name: str, status: str, remark: str | None) -> None:
            heard.append((name, status, remark))

    watcher = Watcher(Audience(), None)
    watcher.add(RunInfo(name="t", folder=folder, config={}, tags={}, planned_rounds=3))
    failures = folder.parent / "error.txt"
    failures.write_text(OF_A_PROCESS.format(3))
    trial: Any = SimpleNamespace(error_file=str(failures), config={"trial": {"spec": SimpleNamespace(folder=folder)}})
    watcher.on_trial_error(1, [], trial)
    return heard


def test_a_trial_that_had_finished_when_its_process_died_stays_finished(folder: RunFolder) -> None:
    folder.write_result({"status": "finished", "rounds": 3})
    before = folder.read_result()
    assert lost(folder.path) == [("0001", "finished", "the trial's process died")]
    assert folder.read_result() == before


def test_the_failure_is_noted_once_the_dying_process_has_let_go_of_the_folder(folder: RunFolder) -> None:
    is_held, may_go = threading.Event(), threading.Event()

    def dying() -> None:
        with sole_writer(folder.path):
            is_held.set()
            may_go.wait(10)

    thread = threading.Thread(target=dying)
    thread.start()
    assert is_held.wait(10)
    threading.Timer(0.15, may_go.set).start()
    assert lost(folder.path) == [("0001", "failed", "the trial's process died")]
    thread.join()
    assert folder.read_result()["reason"] == "the trial's process died"
