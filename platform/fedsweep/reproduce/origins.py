"""Where a table's runs come from: those taken over from other folders, and those that other code made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedsweep.reproduce.cells import Cell
from fedsweep.reproduce.measured.grid import Grid
from fedsweep.results.view import RunView
from fedsweep.sweeps.reuse import taken_from


def with_origins(grid: Grid, views: Mapping[Cell, RunView | str], folder: Path) -> Grid:
    """Return the grid with a note for runs that were not made for it, and one where its runs are of more than one code.

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
        commits = ", ".join(dict.fromkeys(str(commit)[:9] for commit in commit_by_key.values()))
        notes.append(
            f"{len(commit_by_key)} of {len(runs)} runs were made before, at commit {commits}, and given by --from."
        )
    if changed := _changed([*runs.values()]):
        notes.append(f"The runs are not all of the same code; in some, others were: {', '.join(changed)}.")
    setting = {
        **grid.setting,
        **({"taken_over": taken} if taken else {}),
        **({"given": commit_by_key} if commit_by_key else {}),
    }
    return replace(grid, setting=setting, notes=(*grid.notes, *notes))


def _changed(runs: list[RunView]) -> list[str]:
    """Return names of the sources that were not the same in all runs that have them."""
    digests: dict[str, set[str]] = {}
    mixed = False
    for run in runs:
        mixed = mixed or bool(run.result.get("sources_changed"))
        sources = run.result.get("sources")
        for name, digest in sources.items() if isinstance(sources, Mapping) else ():
            digests.setdefault(str(name), set()).add(str(digest))
    names = sorted(name for name, versions in digests.items() if len(versions) > 1)
    return names or (["some of one run's rounds"] if mixed else [])
