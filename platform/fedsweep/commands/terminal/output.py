"""Where commands print: tables on terminals, plain lines for pipes and ``NO_COLOR``."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

# Lines that a program reads or a file keeps are not cut at a terminal's width.
_PIPE_WIDTH = 200


def is_plain() -> bool:
    """Whether standard output is no terminal that may be drawn on."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()


def make_console() -> Console:
    """A console on standard output; without escape codes where :func:`is_plain`."""
    if not is_plain():
        return Console()
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(force_terminal=False, color_system=None, width=width, highlight=False)


def make_table(*columns: str, left: int = 1) -> Table:
    """A table without lines; the first ``left`` columns are flush left, the others hold numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for position, name in enumerate(columns):
        table.add_column(name, justify="left" if position < left else "right", no_wrap=position < left)
    return table


def note(text: str) -> None:
    """A line for the user that is no result: to standard error."""
    print(text, file=sys.stderr, flush=True)


def command(*words: str | Path) -> str:
    """A ``fedsweep`` command that can be pasted into the shell that this one came from."""
    started_as = Path(sys.argv[0])
    program = ["fedsweep"]
    if shutil.which("fedsweep") is None:
        is_script = started_as.name == "fedsweep"
        program = [str(started_as)] if is_script else [sys.executable, "-P", "-m", "fedsweep"]
    return shlex.join([*program, *map(str, words)])
