from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedsweep.commands.terminal.output import lasting_output, note

CODE = """
import sys
from fedsweep.cli import main
sys.exit(main(["list", "nothing"]) if {fails} else main(["list", "presets"]))
"""


def exit_code(folder: Path, *, fails: bool) -> tuple[int, str]:
    """Of a command whose standard output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    code = CODE.format(fails=fails)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, cwd=folder, check=False
    )
    os.close(writer)
    return done.returncode, done.stderr


def test_a_commands_exit_code_does_not_depend_on_its_reader(tmp_path: Path) -> None:
    assert exit_code(tmp_path, fails=False) == (0, "")
    code, err = exit_code(tmp_path, fails=True)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1


def test_other_troubles_of_a_stream_are_errors(tmp_path: Path) -> None:
    code = """
import os, sys
from fedsweep.commands.terminal.output import lasting_output
sys.stdout = open("/dev/full", "w")
with lasting_output():
    print("x", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "No space left" in done.stderr
    before = sys.stdout
    with lasting_output():
        assert sys.stdout is not before
    assert sys.stdout is before


def test_a_note_is_one_line_of_printable_characters(capsys: pytest.CaptureFixture[str]) -> None:
    note("a file's \x1b[2J\nerror: text, ä and 漢")
    assert capsys.readouterr().err == "a file's ?[2J?error: text, ä and 漢\n"
