"""Where commands print: tables on terminals, plain lines for pipes and ``NO_COLOR``."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.table import Table

from fedsweep.errors import OutputError
from fedsweep.results.console import plain_console

# Lines that a program reads or a file keeps are not cut at a terminal's width.
_PIPE_WIDTH = 200


def is_plain() -> bool:
    """Check that standard output is no terminal that may be drawn on."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()


def make_console() -> Console:
    """Make a console on standard output; without escape codes where :func:`is_plain`."""
    if not is_plain():
        return Console()
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return plain_console(width=width)


def make_table(*columns: str, left: int = 1) -> Table:
    """Make a table without lines; the first ``left`` columns are flush left, the others hold numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for position, name in enumerate(columns):
        table.add_column(name, justify="left" if position < left else "right", no_wrap=position < left)
    return table


class _Lasting:
    """A stream that goes on when its reader has gone (``fedsweep run | head -2``) or its terminal was closed.

    The command's work and its exit code do not depend on who reads what it prints.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._to_the_end():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._to_the_end():
            self._stream.flush()

    @contextlib.contextmanager
    def _to_the_end(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            # What is buffered is written at the next flush, to where nobody misses it.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Let standard output and standard error outlast their readers."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _Lasting(stream)) for stream in before)
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout, sys.stderr = before


def note(text: str) -> None:
    """Print a line for the user that is no result, to standard error."""
    print(printable(text), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Return a line without control characters: what a file may have brought is no concern of the terminal's."""
    return "".join(character if character.isprintable() else "?" for character in text)


def command(*words: str | Path) -> str:
    """Return a ``fedsweep`` command that can be pasted into the shell that this one came from."""
    started_as = Path(sys.argv[0])
    program = ["fedsweep"]
    if shutil.which("fedsweep") is None:
        is_script = started_as.name == "fedsweep"
        program = [str(started_as)] if is_script else [sys.executable, "-P", "-m", "fedsweep"]
    return shlex.join([*program, *map(str, words)])


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Write what ``--json`` asks for, and say so.

    Raises:
        OutputError: The file can't be written.
    """
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutputError(f"--json {path}: cannot be written: {error.strerror}") from error
    print(f"written: {path}")
