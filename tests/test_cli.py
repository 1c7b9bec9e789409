from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedsweep import cli
from fedsweep.cli import main
from fedsweep.commands import catalog
from fedsweep.errors import ClientJobError, ConfigError, DataError, OutputError, ResourceError, RunError

COMMANDS = ("run", "compare", "verify", "sync", "partition", "select", "list", "show", "ui", "doctor", "bench")

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _own_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def fedsweep(capsys: pytest.CaptureFixture[str]) -> Command:
    """Calls the command in this process; gives exit code, standard output and standard error."""

    def call(*words: str | Path) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return call


def test_help_names_every_command_and_shows_examples(fedsweep: Command) -> None:
    code, out, err = fedsweep("--help")
    assert (code, err) == (0, "")
    assert [name for name in COMMANDS if not re.search(rf"│ {name}\s", out)] == []
    assert "fedsweep run quickstart/dynamicfl" in out


def test_no_words_at_all_is_help(fedsweep: Command) -> None:
    assert fedsweep() == fedsweep("--help")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_an_example(command: str, fedsweep: Command) -> None:
    code, out, err = fedsweep(command, "--help")
    assert (code, err) == (0, "")
    assert f"fedsweep {command}" in out[out.index("Examples") :]


def test_help_loads_no_heavy_library() -> None:
    code = """
        import sys
        from fedsweep.cli import main
        main(["run", "--help"])
        heavy = {"torch", "numpy", "yaml", "ray", "mlflow", "matplotlib", "pyarrow"}
        print(*sorted(heavy & {*sys.modules}), file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""


def test_version(fedsweep: Command) -> None:
    assert fedsweep("--version") == (0, "fedsweep 0.1.0\n", "")


def broken(error: BaseException) -> Callable[[str], list[catalog.Named]]:
    def raises(kind: str) -> list[catalog.Named]:
        raise error

    return raises


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyError("x"), 1, "error: KeyError: 'x'; this is a bug: --debug shows the traceback\n"),
        (RunError("the run\n  failed"), 1, "error: the run failed\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exceptions_become_one_line_and_an_exit_code(
    error: BaseException, code: int, line: str, fedsweep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "_of_kind", broken(error))
    assert fedsweep("list", "methods") == (code, "", line)


@pytest.mark.parametrize("words", [("--debug", "list", "methods"), ("list", "methods", "--debug")])
def test_debug_shows_the_traceback_from_anywhere_on_the_line(
    words: tuple[str, ...], fedsweep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "_of_kind", broken(KeyError("x")))
    code, _, err = fedsweep(*words)
    assert code == 1
    assert err.startswith("Traceback") and "in raises" in err and err.splitlines()[-1].startswith("error: KeyError")


def test_reader_that_goes_away_is_no_traceback() -> None:
    command = [sys.executable, "-m", "fedsweep", "show", "--json-schema"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


def test_messages_are_short_and_printable() -> None:
    said, _ = cli.explain(ConfigError("the rule, " + "\x1b[31m" * 1000 + ", the way out"))
    assert len(said) < 500 and said.isprintable()
    assert said.startswith("the rule") and said.endswith("the way out")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to"),
        RuntimeError("x: can't allocate memory: y"),
        RuntimeError("can't start new thread"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        ImportError("libarrow.so.2500: failed to map segment from shared object"),
    ],
)
def test_want_of_memory_is_no_bug(error: Exception) -> None:
    said, code = cli.explain(error)
    assert said.startswith("not enough memory (") and "bug" not in said and code == 1
    assert "this is a bug" in cli.explain(RuntimeError("something else"))[0]


def test_a_place_of_somebody_elses_is_named_and_no_bug() -> None:
    denied = PermissionError(errno.EACCES, "Permission denied", "/root/run/config.yaml")
    assert cli.explain(denied) == ("/root/run/config.yaml: permission denied; see to that, or name another place", 2)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_want_of_room_is_neither_a_bug_nor_wrong_input(number: int, tmp_path: Path) -> None:
    full = OSError(number, os.strerror(number), "/results/r")
    written = OutputError("/results/r: cannot be written")
    written.__cause__ = full
    for error in (full, written):
        line, code = cli.explain(error)
        assert line.endswith("; make room there, then give the command again") and "bug" not in line and code == 1
    store = ResourceError("the store s cannot be used: (sqlite3.OperationalError) database or disk is full")
    assert cli.explain(store) == (f"{store}; make room there, then give the command again", 1)
    told = RunError("make room there, then go on with it")
    told.__cause__ = full
    assert cli.explain(told) == (str(told), 1)


class Mute(Exception):
    """An error of a user's own that has no text."""

    def __str__(self) -> str:
        raise LookupError


def test_an_error_whose_cause_gives_no_text_is_explained() -> None:
    failed = ClientJobError(client=1, round=2, step=3, reason="Mute")
    failed.__cause__ = Mute("x")
    assert cli.explain(failed) == (str(failed), 1)


def test_explain_keeps_the_exit_codes_of_the_interface() -> None:
    wrong = [cli.explain(kind("x"))[1] for kind in (ConfigError, DataError, OutputError, ResourceError)]
    failed = [cli.explain(RunError("x"))[1], cli.explain(ClientJobError(client=1, round=2, step=3, reason="x"))[1]]
    assert (wrong, failed) == ([2, 2, 2, 2], [1, 1])
