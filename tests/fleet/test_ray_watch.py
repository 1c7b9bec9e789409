"""What may wait for Ray for ever is waited for only while Ray's processes live; no Ray is needed to see that."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedsweep.errors import ClusterLost
from fedsweep.fleet import ray_watch
from fedsweep.fleet.ray_watch import Attempt, StartWatch, has_left_work, unless_lost


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_watch, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(ray_watch, "_GRACE_S", 0.05)
    monkeypatch.setattr(ray_watch, "_left_alone", [])


def alive() -> None:
    return None


def fail(error: BaseException) -> None:
    raise error


def test_gives_what_the_work_gives() -> None:
    assert unless_lost(lambda: 7, alive) == 7


def test_raises_what_the_work_raises() -> None:
    with pytest.raises(ZeroDivisionError):
        unless_lost(lambda: fail(ZeroDivisionError()), alive)


def test_work_that_waits_for_a_lost_process_is_left_alone() -> None:
    release = threading.Event()
    with pytest.raises(ClusterLost, match="Ray lost its raylet"):
        unless_lost(lambda: release.wait(10), lambda: "its raylet")
    assert has_left_work()
    release.set()
    deadline = time.monotonic() + 10
    while has_left_work() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not has_left_work()


def test_an_error_after_a_loss_is_the_loss() -> None:
    with pytest.raises(ClusterLost, match="Ray lost its GCS server") as caught:
        unless_lost(lambda: fail(OSError("connection refused")), lambda: "its GCS server")
    assert isinstance(caught.value.__cause__, OSError)
    assert not has_left_work()


def test_work_that_ends_well_all_the_same_counts() -> None:
    assert unless_lost(lambda: 7, lambda: "its raylet") == 7


def test_ctrl_c_asks_the_work_to_end_and_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ended = threading.Event(), threading.Event()
    looks = 0

    def interrupted_once() -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise KeyboardInterrupt

    def work() -> None:
        asked.wait(10)
        time.sleep(0.05)
        ended.set()

    with pytest.raises(KeyboardInterrupt):
        unless_lost(work, interrupted_once, on_interrupt=asked.set)
    assert ended.is_set()


def test_processes_that_were_started_live_as_long_as_the_thread_that_started_them() -> None:
    before = set(threading.enumerate())
    Attempt(lambda: None, alive, starts_processes=True).result()
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    unless_lost(lambda: None, alive)
    assert set(threading.enumerate()) - before == {thread}


def test_a_process_that_dies_while_the_cluster_starts_is_noticed_and_the_others_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    older = subprocess.Popen(["sleep", "60"])
    monkeypatch.setattr(ray_watch, "VITAL", {"sleep": "its sleeper"})
    watch = StartWatch()
    first, second = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    deadline = time.monotonic() + 10
    while len(watch._seen) < 2 and time.monotonic() < deadline:
        assert watch.lost() is None
    first.kill()
    while watch.lost() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert watch.lost() == "its sleeper"  # a zombie, and still so once it has been waited for
    first.wait()
    assert watch.lost() == "its sleeper"
    watch.end()
    assert second.wait(10) != 0 and other.wait(10) != 0 and older.poll() is None
    older.kill()
    older.wait()


ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
import os, sys
from pathlib import Path
from fedsweep.fleet.ray_watch import last_word
with last_word(Path(sys.argv[1])):
    if sys.argv[2] == "ends":
        os._exit(1)
"""


@pytest.mark.parametrize(
    ("way", "has_begun", "words"),
    [
        ("ends", True, "error: this process was ended before its time; go on with --resume (in {})"),
        ("ends", False, "error: this process was ended before its time; try again"),
        ("goes on", True, ""),
    ],
)
def test_who_is_ended_from_within_has_somebody_who_says_so(
    tmp_path: Path, way: str, has_begun: bool, words: str
) -> None:
    if has_begun:
        (tmp_path / "config.yaml").touch()
    command = [sys.executable, "-c", DRIVER, str(tmp_path), way]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "platform")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stderr.strip() == words.format(tmp_path)
