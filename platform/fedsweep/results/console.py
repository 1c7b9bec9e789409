"""The console of what is text and nothing else; it imports no library but ``rich``, for commands that start with it."""

from __future__ import annotations

from typing import IO

from rich.console import Console


def plain_console(*, width: int | None, file: IO[str] | None = None) -> Console:
    """Return a console without escape codes, on standard output or a file; it never draws into a notebook."""
    return Console(
        file=file, width=width, force_terminal=False, force_jupyter=False, color_system=None, highlight=False
    )
