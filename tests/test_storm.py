"""The storm of kills in its short form: runs and a sweep of which a process dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1800)]
STORM = Path(__file__).resolve().parent.parent / "scripts" / "storm.py"


def storm(*words: str) -> str:
    """What the storm says of one trial."""
    command = [sys.executable, str(STORM), "--trials", "1", "--most-kills", "1", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 trials as they must be" in done.stdout, done.stdout
    return done.stdout


def test_run_that_loses_each_of_its_processes_ends_as_if_it_had_not() -> None:
    """By this seed two by the clock and two by the round; a driver that is killed is in ``test_resume.py``."""
    # Those first whose end is the run's, so that what goes on is killed, too.
    targets = ["raylet", "GCS server", "server actor", "client actor"]
    said = storm("--seed", "2030", "--latest", "3", "--in-turn", "--targets", ",".join(targets))
    assert all(f"{target} killed" in said for target in targets), said


def test_sweep_that_loses_its_cluster_ends_as_if_it_had_not() -> None:
    assert "raylet killed" in storm("--seed", "7", "--sweeps", "--sweep-seeds", "1", "--targets", "raylet")
