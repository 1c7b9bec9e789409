"""The fuzzer of folders and configurations in its short form, with a fixed seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).resolve().parent.parent / "scripts" / "fuzz.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cases", [60, pytest.param(150, marks=pytest.mark.exhaustive)])
def test_damaged_folders_and_configurations_are_no_bugs(cases: int) -> None:
    command = [sys.executable, str(FUZZ), "--cases", str(cases), "--seed", "11"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{cases} cases, seed 11") and "0 with a problem" in done.stdout
