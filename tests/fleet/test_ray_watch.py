"""What may wait for Ray for ever is waited for only while Ray's processes live; no Ray is needed to see that."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from fedsweep.errors import ClusterLost
from fedsweep.fleet import ray_watch
from fedsweep.fleet.ray_watch import (
    RayCall,
    VitalProcesses,
    has_abandoned_calls,
    lost_process,
    watched_call,
    watched_cluster,
)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_watch, "_POLL_EVERY_S", 0.01)
    monkeypatch.setattr(ray_watch, "_GRACE_S", 0.05)
    monkeypatch.setattr(ray_watch, "_abandoned", [])


def alive() -> None:
    return None


def fail(error: BaseException) -> None:
    raise error


def test_gives_what_the_work_gives() -> None:
    assert watched_call(lambda: 7, alive) == 7


def test_raises_what_the_work_raises() -> None:
    with pytest.raises(ZeroDivisionError):
        watched_call(lambda: fail(ZeroDivisionError()), alive)


def test_work_that_waits_for_a_lost_process_is_abandoned() -> None:
    release = threading.Event()
    with pytest.raises(ClusterLost, match="Ray lost its raylet"):
        watched_call(lambda: release.wait(10), lambda: "its raylet")
    assert has_abandoned_calls()
    release.set()
    deadline = time.monotonic() + 10
    while has_abandoned_calls() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not has_abandoned_calls()


def test_an_error_after_a_loss_is_the_loss() -> None:
    with pytest.raises(ClusterLost, match="Ray lost its GCS server") as caught:
        watched_call(lambda: fail(OSError("connection refused")), lambda: "its GCS server")
    assert isinstance(caught.value.__cause__, OSError)
    assert not has_abandoned_calls()


def test_work_that_ends_well_all_the_same_counts() -> None:
    assert watched_call(lambda: 7, lambda: "its raylet") == 7


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
        watched_call(work, interrupted_once, on_interrupt=asked.set)
    assert ended.is_set()


def test_processes_that_were_started_live_as_long_as_the_thread_that_started_them() -> None:
    before = set(threading.enumerate())
    RayCall(lambda: None, alive, starts_processes=True).result()
    (thread,) = set(threading.enumerate()) - before
    assert thread.daemon
    watched_call(lambda: None, alive)
    assert set(threading.enumerate()) - before == {thread}


def test_a_process_that_dies_while_the_cluster_starts_is_noticed_and_the_others_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_watch, "_VITAL", {"sleep": "its sleeper", "tail": "its tail"})
    older = subprocess.Popen(["sleep", "60"])
    vital = VitalProcesses.yet_to_come()
    assert vital.lost() is None
    sleeper, tail = subprocess.Popen(["sleep", "60"]), subprocess.Popen(["tail", "-f", "/dev/null"])
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    deadline = time.monotonic() + 10
    while len(vital._vital) < 2 and time.monotonic() < deadline:
        assert vital.lost() is None
    sleeper.kill()
    while vital.lost() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert vital.lost() == "its sleeper"  # a zombie, and still so once it has been waited for
    sleeper.wait()
    assert vital.lost() == "its sleeper"
    vital.kill_all_started()
    assert tail.wait(10) != 0 and other.wait(10) != 0 and older.poll() is None
    older.kill()
    older.wait()


def test_the_cluster_that_is_watched_is_the_one_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_watch, "_VITAL", {"sleep": "its sleeper"})
    earlier = subprocess.Popen(["sleep", "60"])
    earlier.kill()
    while psutil.Process(earlier.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    present = subprocess.Popen(["sleep", "60"])
    assert lost_process() is None
    with watched_cluster():
        assert lost_process() is None
        present.kill()
        present.wait()
        assert lost_process() == "its sleeper"
    assert lost_process() is None
    earlier.wait()


ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
import os, sys
from pathlib import Path
from fedsweep.fleet.ray_watch import exit_notice
with exit_notice(Path(sys.argv[1])):
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
