"""The fuzzer of folders and configurations in its short form, with a fixed seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).resolve().parent.parent / "scripts" / "fuzz.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_damaged_folders_and_configurations_are_no_bugs() -> None:
    command = [sys.executable, str(FUZZ), "--cases", "150", "--seed", "11"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("150 cases, seed 11") and "0 with a problem" in done.stdout
