"""A folder has one writer: the second comer is told who the first is, and a dead one holds nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedsweep.cli import main
from fedsweep.errors import OutputError
from fedsweep.runs.folder_lock import LOCK, sole_writer, write_along

HOLD = """
    import sys
    from pathlib import Path
    from fedsweep.runs.folder_lock import sole_writer, write_along
    hold = {"alone": sole_writer, "along": write_along}[sys.argv[2]]
    kept = hold(Path(sys.argv[1]))
    if sys.argv[2] == "alone":
        kept.__enter__()
    print("held", flush=True)
    sys.stdin.read()
"""
TINY = """
name: tiny
scenario: {clients: 4, partition: {kind: iid}}
training: {rounds: 2, cohort_size: 2, local_steps: 2}
runtime: {backend: local}
sweep: {space: {seed: {grid: [0, 1]}}}
"""


@contextmanager
def holder(folder: Path, how: str = "alone") -> Iterator[subprocess.Popen[str]]:
    """Another process that holds a folder until it is killed."""
    command = [sys.executable, "-c", textwrap.dedent(HOLD), str(folder), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_full_disk_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    folder = tmp_path / "run"
    with sole_writer(folder):
        handle = os.open(folder / LOCK, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
    assert not folder.exists()


def test_second_comer_learns_who_is_there(tmp_path: Path) -> None:
    with holder(tmp_path / "run") as first:
        with pytest.raises(OutputError, match=rf"run is being written by process {first.pid} on "):
            with sole_writer(tmp_path / "run"):
                pass
        first.kill()
        first.wait()
        with sole_writer(tmp_path / "run"):
            assert (tmp_path / "run" / LOCK).read_text().startswith(f"{os.getpid()} ")
    assert not (tmp_path / "run" / LOCK).exists()


def test_who_writes_along_outlives_the_driver(tmp_path: Path) -> None:
    with holder(tmp_path) as driver, holder(tmp_path, "along") as actor:
        driver.kill()
        driver.wait()
        os.kill(actor.pid, signal.SIGSTOP)  # it is slow to end
        with subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(0.2); os.kill({actor.pid}, 9)"]):
            with sole_writer(tmp_path):
                actor.wait(timeout=5)
                assert actor.poll() is not None


def test_asking_again_in_one_thread_is_admitted(tmp_path: Path) -> None:
    with sole_writer(tmp_path), sole_writer(tmp_path):
        os.close(write_along(tmp_path))
        assert (tmp_path / LOCK).exists()
    assert not (tmp_path / LOCK).exists()
    with sole_writer(tmp_path):
        assert (tmp_path / LOCK).exists()


def test_folder_that_nothing_came_into_goes_again(tmp_path: Path) -> None:
    with sole_writer(tmp_path / "a" / "b"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_lock_that_is_no_file_is_refused_untouched(kind: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "other").write_text("mine")
    lock = tmp_path / "run" / LOCK
    {"link": lambda: lock.symlink_to(tmp_path / "other"), "pipe": lambda: os.mkfifo(lock), "folder": lock.mkdir}[kind]()
    with pytest.raises(OutputError, match="cannot be locked"), sole_writer(tmp_path / "run"):
        pass
    assert (tmp_path / "other").read_text() == "mine"


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--resume", "begun"),
        ("run", "tiny.yaml", "--out", "begun", "--overwrite"),
        ("run", "tiny.yaml", "--out", "fresh"),
        ("sweep", "tiny.yaml", "--out", "fresh"),
        ("sweep", "tiny.yaml", "--out", "swept", "--overwrite"),
        ("sweep", "--resume", "--out", "swept"),
        ("reproduce", "dynamicfl/table4", "--costs-only", "--out", "fresh"),
    ],
    ids=" ".join,
)
def test_commands_refuse_a_folder_that_is_being_written(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedsweep.config.load import load_config
    from fedsweep.sweeps.space import list_trials
    from fedsweep.sweeps.sweep_folder import SweepFolder, SweepPlan

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("tiny.yaml").write_text(TINY)
    config = load_config("tiny.yaml")
    Path("begun").mkdir()
    Path("begun/config.yaml").write_text(config.to_yaml())
    plan = SweepPlan(config_tree=config.given, trials=tuple(list_trials(config)))
    SweepFolder(Path("swept")).create(plan, config_yaml=config.to_yaml(), overwrite=False)
    folder = Path(next(word for word in words if word in ("begun", "fresh", "swept"))).absolute()
    with holder(folder) as first:
        before = sorted(Path().rglob("*"))
        assert main(list(words)) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith(f"error: {folder} is being written by process {first.pid} on ")
        assert sorted(Path().rglob("*")) == before


def test_what_killed_writers_left_goes_with_the_next_writer(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / "pictures").mkdir()
    left = [tmp_path / f".rounds.parquet.{dead.pid}.tmp", tmp_path / "pictures" / f".split.png.{dead.pid}.tmp"]
    others = [tmp_path / ".mine.tmp", tmp_path / f".own.{os.getpid()}.tmp", tmp_path / f"notes.{dead.pid}.tmp"]
    for path in (*left, *others):
        path.touch()
    with sole_writer(tmp_path):
        assert not any(path.exists() for path in left) and all(path.exists() for path in others)
