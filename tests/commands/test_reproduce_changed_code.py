"""A method's file that was edited between two calls changes the second table, however the edit is kept."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

METHOD = """
from __future__ import annotations

from dataclasses import dataclass

from fedsweep import FederatedMethod
from fedsweep.components import ServerUpdate, mean_of_updates
from shrink_parts import FACTOR


@dataclass(frozen=True, kw_only=True)
class Shrink(ServerUpdate):
    def apply(self, state, updates, weights, sync):
        return FACTOR * 1.0 * mean_of_updates(updates, weights, sync), state


def shrink() -> FederatedMethod:
    return FederatedMethod(name="shrink", source="a test", server_update=Shrink())
"""
TABLE = """
name: one
scenario: {clients: 4, partition: {kind: iid}}
method: {name: 'my_methods:shrink'}
training: {rounds: 1, cohort_size: 2, local_steps: 20}
runtime: {backend: local}
tracking: {uri: none}
table:
  title: One
  source: Somebody 2024, Table 7
  measures: [{name: loss, label: Loss, of: test_loss, tolerance: 2.0}]
  rows: [{name: shrink}]
  columns: [{name: even}]
  scales: {smoke: {seeds: [0]}}
"""


def git(*words: str, place: Path) -> None:
    subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e@x", *words], cwd=place, check=True)


def reproduce(place: Path, out: str, *options: str) -> tuple[float, str, list[str]]:
    """The table's one figure, what was said, and the table's notes."""
    words = [sys.executable, "-m", "fedsweep", "reproduce", "one.yaml", "--out", f"runs/{out}", *options]
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, check=True, env=dict(os.environ))
    tree = json.loads((place / "runs" / out / "measured.json").read_text())
    return tree["cells"][0]["measured"]["loss"]["mean"], done.stderr, tree["notes"]


# For each line that it reads, prints how many runs of tables beside this one a next table would take over, and why
# others would not be: each time in a fork, since no process goes on with a module that was changed under it.
BESIDE = """
import json, os, sys
from pathlib import Path
from fedsweep.processes import look_here_last
from fedsweep.reproduce.reproduction import TableRequest, finished_elsewhere, reproduction
from fedsweep.sweeps.sweep_folder import SweepFolder

look_here_last()
while sys.stdin.readline():
    if os.fork() == 0:
        runs, refused = finished_elsewhere(reproduction(TableRequest(table="one.yaml")), SweepFolder(Path("runs/next")))
        print(json.dumps([len(runs), *refused.values()]), flush=True)
        break
    os.wait()
"""


@contextlib.contextmanager
def looking_beside(place: Path) -> Iterator[Callable[[], list[Any]]]:
    """Gives what tells how many runs that are there a next table would take over, then why others would not be."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", BESIDE], cwd=place, text=True, **pipes) as process:

        def beside() -> list[Any]:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            return list(json.loads(process.stdout.readline()))

        yield beside


def test_an_edited_method_is_run_again_committed_or_not_in_its_module_or_one_that_it_imports(tmp_path: Path) -> None:
    method, parts = tmp_path / "my_methods.py", tmp_path / "shrink_parts.py"
    method.write_text(METHOD)
    parts.write_text("FACTOR = 1.0\n")
    (tmp_path / "one.yaml").write_text(TABLE)
    first, _, notes = reproduce(tmp_path, "first")
    assert notes == []
    with looking_beside(tmp_path) as beside:
        assert beside() == [1]
        parts.write_text("FACTOR = 0.5\n")  # no checkout at all
        assert beside() == [0, "changed since: shrink_parts.py"]
        parts.write_text("FACTOR = 1.0\n")
        git("init", "-q", place=tmp_path)
        git("add", "my_methods.py", "shrink_parts.py", place=tmp_path)
        git("commit", "-qm", "first", place=tmp_path)
        method.write_text(METHOD.replace("* 1.0", "* 0.5"))  # not committed
        assert beside() == [0, "changed since: my_methods.py"]
    method.write_text(METHOD.replace("* 1.0", "* 0.25"))
    git("commit", "-qam", "second", place=tmp_path)
    quarter, told, notes = reproduce(tmp_path, "quarter")
    assert quarter != first and "not taken over: other code (changed since: my_methods.py)" in told
    assert "are taken over" not in told and not [note for note in notes if "those of" in note]
