"""The papers' tables on a report's page: of folders that ``fedsweep reproduce`` made."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsweep.errors import InputError
from fedsweep.runs.run_folder import CONFIG


@dataclass(frozen=True, kw_only=True)
class ReportedTable:
    """A table of a paper, measured.

    Attributes:
        title: What it shows.
        fragment: The table as HTML, in which every text that was read is escaped.
    """

    title: str
    fragment: str


def reported_tables(folders: Sequence[Path]) -> tuple[list[ReportedTable], list[str]]:
    """The tables of those folders that have one, and what is wrong with the others.

    Args:
        folders: Sweeps' folders.
    """
    from fedsweep.reproduce.cell_texts import caption
    from fedsweep.reproduce.formats import html_fragment
    from fedsweep.reproduce.outputs import has_outputs, read_grid

    tables, problems = [], []
    for folder in folders:
        if not has_outputs(folder):
            continue
        try:
            grid = read_grid(folder)
        except InputError as error:
            problems.append(str(error))
            continue
        tables.append(ReportedTable(title=caption(grid), fragment=html_fragment(grid)))
    return tables, problems


def command_again(folder: Path) -> str:
    """The command that does a sweep, or a table's cells, once more."""
    from fedsweep.reproduce.reproduction import request_of
    from fedsweep.sweeps.sweep_folder import SweepFolder

    try:
        request = request_of(SweepFolder(folder))
    except InputError:
        return shlex.join(["fedsweep", "sweep", str(folder / CONFIG)])
    words = ["fedsweep", "reproduce", request.table, "--scale", request.scale]
    for option, value in (("--rows", request.rows), ("--columns", request.columns)):
        words += [option, value] if value is not None else []
    words += ["--seeds", ",".join(map(str, request.seeds))] if request.seeds else []
    return shlex.join([*words, *(word for text in request.overrides for word in ("--set", text))])
