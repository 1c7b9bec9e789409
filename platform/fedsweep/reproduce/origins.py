"""Notes of a table's runs: taken over from other folders, made by other code, with work that did not happen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedsweep.reproduce.cells import Cell
from fedsweep.reproduce.measured.grid import Grid
from fedsweep.results.settings import remarks_of
from fedsweep.results.view import RunView
from fedsweep.sweeps.reuse import taken_from


def with_origins(grid: Grid, views: Mapping[Cell, RunView | str], folder: Path) -> Grid:
    """Return the grid with notes of its runs: not made for it, of more than one code, with remarks of their own.

    Args:
        grid: A table's figures.
        views: The runs behind them.
        folder: The folder that these lie in.
    """
    runs = {view.folder: view for view in views.values() if isinstance(view, RunView)}
    taken = {path.name: origin for path in runs if path.parent == folder and (origin := taken_from(path))}
    notes = []
    if taken:
        places = ", ".join(dict.fromkeys(Path(origin).parent.name for origin in taken.values()))
        notes.append(
            f"{len(taken)} of {len(runs)} runs were not made for this table: they are those of {places}, of the same"
            " configurations and the same code."
        )
    if commit_by_key := {
        path.name: run.result.get("git_commit") for path, run in runs.items() if path.parent != folder
    }:
        commits = ", ".join(dict.fromkeys(str(commit or "unknown")[:9] for commit in commit_by_key.values()))
        notes.append(
            f"{len(commit_by_key)} of {len(runs)} runs were made before, at commit {commits}, and given by --from."
        )
    if changed := _changed([*runs.values()]):
        notes.append(f"The runs are not all of the same code; in some, others were: {', '.join(changed)}.")
    notes.extend(_remarks(views))
    setting = {
        **grid.setting,
        **({"taken_over": taken} if taken else {}),
        **({"given": commit_by_key} if commit_by_key else {}),
    }
    return replace(grid, setting=setting, notes=(*grid.notes, *notes))


def _remarks(views: Mapping[Cell, RunView | str]) -> list[str]:
    """List the runs' own notes, each once with its rows, or its cells where not all of a row have it."""
    seeds = Counter((cell.row, cell.column) for cell in views)
    columns = Counter(row for row, _ in seeds)
    having: dict[str, Counter[tuple[str, str]]] = {}
    for cell, view in views.items():
        for text in dict.fromkeys(remarks_of(view) if isinstance(view, RunView) else ()):
            having.setdefault(text, Counter())[cell.row, cell.column] += 1
    notes = []
    for text, counts in having.items():
        whole = Counter(row for (row, column), count in counts.items() if count == seeds[row, column])
        rows = [row for row, count in whole.items() if count == columns[row]]
        cells = [
            f"{row} | {column}" + (f" ({count} of {seeds[row, column]} seeds)" if count < seeds[row, column] else "")
            for (row, column), count in counts.items()
            if row not in rows
        ]
        notes.append(f"{', '.join([*rows, *cells])}: {text.rstrip('.')}.")
    return notes


def _changed(runs: list[RunView]) -> list[str]:
    """Return names of the sources that were not the same in all runs that have them."""
    digests: dict[str, set[str]] = {}
    mixed = False
    for run in runs:
        mixed = mixed or bool(run.result.get("sources_changed") or run.result.get("machines_changed"))
        sources = run.result.get("sources")
        for name, digest in sources.items() if isinstance(sources, Mapping) else ():
            digests.setdefault(str(name), set()).add(str(digest))
    names = sorted(name for name, versions in digests.items() if len(versions) > 1)
    return names or (["some of one run's rounds"] if mixed else [])
