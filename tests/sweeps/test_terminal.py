"""A sweep in a terminal: a live table that leaves nothing behind; after Ctrl-C the terminal is as it was."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import sqlite3
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsweep.config import yaml12
from fedsweep.runs.find import find_runs
from fedsweep.runs.run_folder import RunFolder

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
ROWS, COLUMNS = 40, 100
# A session of its own with the terminal as its own, so that Ctrl-C reaches it as from a keyboard.
START = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1],"
    " sys.argv[1:])"
)


class Screen:
    """What a terminal shows; knows the few sequences that a live table needs, and no others.

    Attributes:
        lines: All lines, those that have scrolled away included.
        cursor_is_shown: Whether it is.
    """

    _SEQUENCE = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])")

    def __init__(self) -> None:
        self.lines: list[list[str]] = [[]]
        self.row = self.column = 0
        self.cursor_is_shown = True

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            if text[at] == "\x1b":
                found = self._SEQUENCE.match(text, at)
                assert found, f"an unknown sequence: {text[at : at + 12]!r}"
                self._obey(*found.groups())
                at = found.end()
                continue
            self._put(text[at])
            at += 1

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n":
            self.row += 1
            while len(self.lines) <= self.row:
                self.lines.append([])
        else:
            assert character.isprintable(), f"{character!r} moves who knows what"
            line = self.lines[self.row]
            line.extend(" " * (self.column + 1 - len(line)))
            line[self.column] = character
            self.column += 1

    def _obey(self, private: str, numbers: str, letter: str) -> None:
        count = int(numbers or 1) if letter in "ABCD" else 0
        if private:
            assert (numbers, letter) in (("25", "l"), ("25", "h"))
            self.cursor_is_shown = letter == "h"
        elif letter == "A":
            self.row -= count
            assert self.row >= 0, "the table goes beyond its own first line"
        elif letter == "K":
            self.lines[self.row] = []
        else:
            assert letter == "m", f"{numbers}{letter} is no sequence of a live table"

    def text(self) -> str:
        return "\n".join("".join(line).rstrip() for line in self.lines)


class Terminal:
    """A process in a pseudo-terminal.

    Attributes:
        screens: The screen after each piece of output.
    """

    def __init__(self, *words: str | Path) -> None:
        self._here, there = os.openpty()
        fcntl.ioctl(there, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._there = there
        self.before = termios.tcgetattr(there)
        environment = os.environ | {"PYTHONPATH": str(ROOT / "platform"), "TERM": "xterm-256color"}
        environment = {k: v for k, v in environment.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
        command = [sys.executable, "-c", START, sys.executable, "-m", "fedsweep", *map(str, words)]
        self.process = subprocess.Popen(command, stdin=there, stdout=there, stderr=there, env=environment)
        self.screen, self.screens = Screen(), [""]
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        pending = b""
        while True:
            if not select.select([self._here], [], [], 0.2)[0]:
                if self.process.poll() is not None:
                    return
                continue
            pending += os.read(self._here, 65536)
            # A sequence or a character may still come in halves.
            whole = pending.rfind(b"\n") + 1 or pending.rfind(b"\x1b")
            if whole > 0:
                self.screen.feed(pending[:whole].decode())
                pending = pending[whole:]
                self.screens.append(self.screen.text())

    def type(self, keys: bytes) -> None:
        os.write(self._here, keys)

    def wait_for(self, is_there: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + 150
        while not is_there(self.screens[-1]):
            assert self.process.poll() is None and time.monotonic() < deadline, self.screens[-1]
            time.sleep(0.05)

    def end(self) -> int:
        code = self.process.wait(timeout=150)
        self._reader.join()
        return code

    def after(self) -> list[Any]:
        return termios.tcgetattr(self._there)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join()
        os.close(self._here)
        os.close(self._there)


@pytest.fixture
def config(store: Path, tmp_path: Path, tiny: Callable[..., dict[str, Any]]) -> Path:
    training = {"rounds": 30, "cohort_size": 2, "local_steps": 60}
    more = {"training": training, "tracking": {"uri": f"sqlite:///{store}"}}
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml12.dump(tiny({"seed": {"grid": [0, 1, 2]}}, more=more, max_concurrent=2)))
    return path


@contextlib.contextmanager
def sweeping(*words: str | Path) -> Iterator[Terminal]:
    terminal = Terminal("sweep", *words)
    try:
        yield terminal
    finally:
        terminal.close()


def rounds_shown(screen: str) -> list[int]:
    return [int(done) for done in re.findall(r"(?:running|finished)\s+(\d+)/30", screen)]


def ask(store: Path, question: str) -> list[Any]:
    with sqlite3.connect(store) as base:
        return base.execute(question).fetchall()


def check_table(terminal: Terminal) -> None:
    """Rows of trials change in place, and the table goes when the sweep ends."""
    tables = [screen for screen in terminal.screens if "running" in screen]
    assert len({tuple(rounds_shown(screen)) for screen in tables}) > 2
    assert {screen.count("MB sent") for screen in tables} == {1}
    assert all(screen.count("/30") <= 3 for screen in tables)
    last = terminal.screens[-1]
    assert "running" not in last and "/30" not in last and "waiting" not in last
    assert "3 of 3 trials finished" in last


def test_ctrl_c_puts_trials_away_and_says_how_to_go_on_and_the_terminal_is_as_it_was(
    tmp_path: Path, config: Path
) -> None:
    with sweeping(config, "--out", tmp_path / "s") as terminal:
        # While one has not begun: a machine with much to do shows a round when most are over.
        terminal.wait_for(lambda screen: "waiting" in screen and any(done > 0 for done in rounds_shown(screen)))
        terminal.type(b"\x03")
        terminal.wait_for(lambda screen: "interrupted" in screen)
        assert terminal.end() == 130, terminal.screens[-1]
        assert terminal.screen.cursor_is_shown and terminal.after() == terminal.before
    last = terminal.screens[-1]
    assert "sweep --resume --out" in last.replace("\n", "")
    assert "running" not in last and "Traceback" not in last and "put away" not in last
    found = find_runs(tmp_path / "s")
    ended = {RunFolder(run).read_result()["status"] for run in found}
    assert "killed" in ended and ended <= {"killed", "finished"}
    statuses = {status for (status,) in ask(tmp_path / "mlflow.db", "SELECT status FROM runs")}
    assert "RUNNING" not in statuses and "KILLED" in statuses
    with sweeping("--resume", "--out", tmp_path / "s") as terminal:
        assert terminal.end() == 0, terminal.screens[-1]
        assert terminal.screen.cursor_is_shown and terminal.after() == terminal.before
    check_table(terminal)
    found = find_runs(tmp_path / "s")
    assert {RunFolder(run).read_result()["status"] for run in found} == {"finished"}
    points = ask(tmp_path / "mlflow.db", "SELECT run_uuid, step FROM metrics WHERE key = 'train_loss'")
    assert len(points) == len(set(points)) == 3 * 30
