"""From run folders to a grid: what each cell measured, beside what the paper prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedsweep.errors import InputError
from fedsweep.reproduce.cells import Cell, Standing, standing_of
from fedsweep.reproduce.definition.sections import GAP_FIGURES, NEVER, NOT_GIVEN, SCRATCH, Measure, Row
from fedsweep.reproduce.definition.table_file import TableFile
from fedsweep.results.seed_statistics import estimate, finite
from fedsweep.results.view import RunView, load_run
from fedsweep.runs.run_folder import CONFIG

FINISHED, MISSING = "finished", "missing"
AT_BEST = "at_best"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measure of a cell over its seeds, in the unit that is shown (percent measures in percent).

    Attributes:
        mean: Over the seeds that have it; None where none does.
        sd: Sample standard deviation; None below two.
        count: How many seeds have it.
        never: How many finished without reaching the measure's target.
        of: How many seeds there should be.
    """

    mean: float | None = None
    sd: float | None = None
    count: int = 0
    never: int = 0
    of: int = 0


@dataclass(frozen=True, kw_only=True)
class GridCell:
    """A row and a column of a table, measured.

    Attributes:
        row: The row's name.
        column: The column's name.
        measured: By the measures' names; none where nothing was measured.
        by_seed: Measure -> seed -> figure, in the unit that is shown; seeds without the figure are left out.
        standing: Whether its settings are those of the paper.
        problems: Why seeds have no figures, in words.
        untold: Why there can be no figures without training, in words; nothing is wrong then.
    """

    row: str
    column: str
    measured: Mapping[str, Measured] = field(default_factory=dict)
    by_seed: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    standing: Standing = "other"
    problems: tuple[str, ...] = ()
    untold: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table with its figures.

    Attributes:
        table: What was asked for.
        scale: At which scale.
        rows: Names of the rows shown, in order.
        columns: Names of the columns shown.
        cells: Those that were to be measured.
        setting: Under what they were measured: seeds, rounds, versions, git commit, ...
        costs_only: Whether nothing was trained, so that only cost measures have figures.
        notes: What a reader must know beside the table's own notes.
    """

    table: TableFile
    scale: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[GridCell, ...]
    setting: Mapping[str, Any] = field(default_factory=dict)
    costs_only: bool = False
    notes: tuple[str, ...] = ()

    def cell(self, row: str, column: str) -> GridCell | None:
        """What was measured there; None where nothing was to be."""
        return self._by_place.get((row, column))

    @cached_property
    def _by_place(self) -> Mapping[tuple[str, str], GridCell]:
        return {(cell.row, cell.column): cell for cell in self.cells}

    @property
    def measures(self) -> list[Measure]:
        """The measures shown."""
        return [measure for measure in self.table.measures if measure.cost or not self.costs_only]

    @property
    def problems(self) -> list[str]:
        """What went wrong, cell by cell."""
        return [f"{cell.row} | {cell.column}: {text}" for cell in self.cells for text in cell.problems]

    @property
    def tally(self) -> str:
        """How many cells have figures, how many failed, and how many are known by training alone; in words."""
        failed, untold = sum(bool(c.problems) for c in self.cells), sum(bool(c.untold) for c in self.cells)
        said = f"{len(self.cells) - failed - untold} of {len(self.cells)} cells measured"
        said += f", {untold} known by training alone" if untold else ""
        return f"{said}, {failed} failed" if failed else said

    @property
    def untold(self) -> list[str]:
        """Why rows have no figures although nothing went wrong: each reason once, with its rows."""
        rows: dict[str, dict[str, None]] = {}
        for cell in self.cells:
            for text in cell.untold:
                rows.setdefault(text, {})[cell.row] = None
        return [f"{', '.join(names)}: {text}" for text, names in rows.items()]


def measured(
    table: TableFile,
    cells: Sequence[Cell],
    *,
    folders: Mapping[Cell, Path],
    scale: str,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> Grid:
    """Reads the cells' run folders, and nothing else.

    Args:
        table: The table.
        cells: Its cells.
        folders: Cell -> run folder, which need not be there.
        scale: The scale that they were run at.
        rows: Names of the rows to show; by default all that have cells.
        columns: Likewise.
    """
    views = {cell: view_of(folders[cell], table.row(cell.row)) for cell in cells}
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.row, cell.column), []).append(cell)
    found = tuple(_grid_cell(table, group, views=views) for group in groups.values())
    return Grid(
        table=table,
        scale=scale,
        rows=tuple(rows if rows is not None else dict.fromkeys(cell.row for cell in cells)),
        columns=tuple(columns if columns is not None else dict.fromkeys(cell.column for cell in cells)),
        cells=found,
        setting=setting_of(cells, [view for view in views.values() if isinstance(view, RunView)]),
    )


def view_of(folder: Path, row: Row) -> RunView | str:
    """A run of a row as its folder tells of it, or why it can't be read."""
    if not (folder / CONFIG).is_file():
        return "it was not run"
    try:
        found = load_run(folder)
    except InputError as error:
        return str(error)
    return found.judged_by(row.accuracy) if row.accuracy else found


def setting_of(cells: Sequence[Cell], views: Sequence[RunView] = ()) -> dict[str, Any]:
    """Under what cells were measured, for ``measured.json``.

    Args:
        cells: The cells.
        views: Their runs, as far as there are any.
    """
    rounds = sorted({cell.config.training.rounds for cell in cells})
    datasets = sorted({cell.config.scenario.dataset for cell in cells})
    said: dict[str, Any] = {
        "seeds": sorted({cell.seed for cell in cells}),
        "rounds": [rounds[0], rounds[-1]] if rounds else [],
        "datasets": datasets,
    }
    for key in ("versions", "git_commit"):
        known = [view.result[key] for view in views if view.result.get(key)]
        said[key] = known[0] if known and all(value == known[0] for value in known) else None
    return said


def value_of(run: RunView, measure: Measure) -> float | None:
    """A measure of one run in its own unit (shares 0..1); None where the run has none.

    Args:
        run: The run.
        measure: The measure; with a target, None also says that it was never reached.

    Raises:
        InputError: It takes the run's model or data, which are damaged or not there.
    """
    if measure.of in GAP_FIGURES:
        from fedsweep.reproduce.measured.loss_gap import gaps_of

        return gaps_of(run.folder).figures()[measure.of]
    if measure.of == SCRATCH:
        from fedsweep.reproduce.measured.synthetic_set import scratch_accuracy

        return scratch_accuracy(run.folder)
    if measure.target is not None or measure.over == AT_BEST:
        target = _target_of(run, measure) if measure.over != AT_BEST else run.over("test_accuracy", "best")
        reached = None if target is None else run.reaching(target)
        return None if reached is None else reached.figure(measure.of)
    if measure.share_of:
        part, whole = run.over(measure.of, "sum"), run.over(measure.share_of, "sum")
        return part / whole if part is not None and whole else None
    found = run.over(measure.of, measure.over)
    return run.figure(measure.of) if found is None else found


def summed_up(values: Iterable[float | None], measure: Measure, *, never: int = 0, of: int | None = None) -> Measured:
    """A measure over seeds, in the unit shown.

    Args:
        values: One per seed, in the measure's own unit; None where a seed has none.
        measure: The measure.
        never: How many of those without finished and did not reach the target.
        of: How many seeds there should be; by default as many as values.
    """
    every = list(values)
    known = [in_unit(value, measure) for value in every if value is not None]
    found = estimate(known)
    count = len(every) if of is None else of
    return Measured(mean=finite(found.mean), sd=finite(found.sd), count=found.count, never=never, of=count)


def in_unit(value: float, measure: Measure) -> float:
    """A figure in the unit that is shown, of one in the measure's own."""
    return 100 * value if measure.percent else value / measure.per


def is_comparable(cell: GridCell, measure: Measure) -> bool:
    """Whether a cell's figure may be compared with the printed one: the settings that it follows from are the paper's.

    They may where the cell's settings are the paper's; for a measure of cost also where the settings differ in nothing
    that a round costs.
    """
    return cell.standing == "paper" or (measure.cost and cell.standing == "costs")


def lies_within(grid: Grid, cell: GridCell, measure: Measure) -> bool | None:
    """Whether measured and printed lie within both spreads; None where they can't be compared.

    Reading: the ranges mean +- spread of both overlap, with half of the last digit shown for rounding. A spread that is
    not known is 0.

    Args:
        grid: The table.
        cell: One of its cells.
        measure: One of its measures.
    """
    found, places = cell.measured.get(measure.name), {"row": cell.row, "column": cell.column, "measure": measure.name}
    printed = grid.table.printed_value(**places)
    if found is None or printed is None or printed == NOT_GIVEN or not is_comparable(cell, measure):
        return None
    if isinstance(printed, str) or found.mean is None:
        return (printed == NEVER) == (found.mean is None) if found.count or found.never else None
    room = (found.sd or 0.0) + (grid.table.printed_sd(**places) or 0.0)
    return abs(found.mean - printed) <= room + 0.5 * 10.0**-measure.digits


def deviates(grid: Grid, cell: GridCell, measure: Measure) -> bool:
    """Whether a measure lies further from what is printed than its tolerance, where the two may be compared at all."""
    found = cell.measured.get(measure.name)
    printed = grid.table.printed_value(cell.row, cell.column, measure=measure.name)
    if found is None or printed in (None, NOT_GIVEN) or measure.tolerance is None or not is_comparable(cell, measure):
        return False
    if not found.count and not found.never:
        return False
    if isinstance(printed, str) or found.mean is None:
        return (printed == NEVER) != (found.mean is None)
    return printed is not None and abs(found.mean - printed) > measure.tolerance


def _grid_cell(table: TableFile, group: Sequence[Cell], *, views: Mapping[Cell, RunView | str]) -> GridCell:
    done: dict[int, RunView] = {}
    problems: list[str] = []
    for cell in group:
        view = views[cell]
        if isinstance(view, RunView) and view.status == FINISHED:
            done[cell.seed] = replace(view, config=cell.config.tree())
            continue
        why = view if isinstance(view, str) else _why_not(view)
        problems.append(f"seed {cell.seed}: {why}")
    found, by_seed = {}, {}
    for measure in table.measures:
        try:
            values = [value_of(view, measure) for view in done.values()]
        except InputError as error:
            problems.append(f"{measure.name}: {error}")
            continue
        targets = [(view, _target_of(view, measure)) for view in done.values()]
        never = sum(target is not None and view.reaching(target) is None for view, target in targets)
        found[measure.name] = summed_up(values, measure, never=never, of=len(group))
        known = zip(done, values, strict=True)
        by_seed[measure.name] = {seed: in_unit(value, measure) for seed, value in known if value is not None}
    return GridCell(
        row=group[0].row,
        column=group[0].column,
        measured=found,
        by_seed=by_seed,
        standing=standing_of(table, group[0]),
        problems=tuple(problems),
    )


def _why_not(view: RunView) -> str:
    reason = view.result.get("reason")
    rounds = len(view.column("round"))
    return f"{view.status} after round {rounds}" + (f": {reason}" if reason else "")


def _target_of(run: RunView, measure: Measure) -> float | None:
    if measure.target != "cell":
        return measure.target
    section = run.config.get("evaluation")
    targets = section.get("targets") if isinstance(section, Mapping) else None
    first = targets[0] if isinstance(targets, list) and targets else None
    return first if isinstance(first, float) else None
