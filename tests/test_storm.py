"""The storm of kills in its short form: runs and a sweep of which a process dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.timeout(1800)]
STORM = Path(__file__).resolve().parent.parent / "scripts" / "storm.py"


def test_run_that_loses_a_process_ends_as_if_it_had_not() -> None:
    """A trial for each; a driver that is killed is in ``test_resume.py``."""
    targets = ["server actor", "client actor", "raylet", "GCS server"]
    command = [sys.executable, str(STORM), "--trials", "4", "--seed", "7", "--most-kills", "1", "--latest", "4"]
    done = subprocess.run([*command, "--targets", ",".join(targets)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 of 4 trials as they must be" in done.stdout
    assert all(f"{target} killed" in done.stdout for target in targets)


def test_sweep_that_loses_its_cluster_ends_as_if_it_had_not() -> None:
    command = [sys.executable, str(STORM), "--trials", "1", "--seed", "7", "--most-kills", "1", "--sweeps"]
    done = subprocess.run([*command, "--targets", "raylet"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 1 trials as they must be" in done.stdout
