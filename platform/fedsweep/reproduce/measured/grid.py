"""From run folders to a grid: what each cell measured, beside what the paper prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, FiniteFloat, NonNegativeInt

from fedsweep.catalog import resolve
from fedsweep.components.metrics import column_of
from fedsweep.errors import InputError
from fedsweep.reproduce.cells import Cell, Standing, stand_in_of, standing_of
from fedsweep.reproduce.definition.sections import NEVER, NOT_GIVEN, Measure, Row
from fedsweep.reproduce.definition.table_file import TableFile
from fedsweep.reproduce.kinds import call, measure_function
from fedsweep.results.seed_statistics import estimate, finite
from fedsweep.results.settings import counted, targets_of
from fedsweep.results.view import RunView, load_run
from fedsweep.runs.run_folder import CONFIG

# Columns that count from the run's beginning, so that they go by the number of rounds.
_SO_FAR = ("round", "sim_time_s", "total_bytes")


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

    mean: FiniteFloat | None = None
    sd: Annotated[FiniteFloat, Field(ge=0)] | None = None
    count: NonNegativeInt = 0
    never: NonNegativeInt = 0
    of: NonNegativeInt = 0

    @property
    def is_told(self) -> bool:
        """True where there is a figure, or where a target was not reached, which is one, too."""
        return self.mean is not None or self.never > 0


@dataclass(frozen=True, kw_only=True)
class GridCell:
    """A row and a column of a table, measured.

    Attributes:
        row: The row's name.
        column: The column's name.
        measured: By the measures' names; none where nothing was measured.
        by_seed: Measure -> seed -> figure of the finished run, in the unit that is shown; seeds without the figure are
            left out.
        standing: Whether its settings are those of the paper; those of runs under way are not.
        stand_in: The data set and the network in place of those that the column is called by; empty where none.
        problems: Why seeds have no figures, in words.
        untold: Why there can be no figures without training, in words; nothing is wrong then.
    """

    row: str
    column: str
    measured: Mapping[str, Measured] = field(default_factory=dict)
    by_seed: Mapping[str, Mapping[int, FiniteFloat]] = field(default_factory=dict)
    standing: Standing = "other"
    stand_in: str = ""
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
        """Return the measured cell; None where none was to be measured."""
        return self._by_place.get((row, column))

    @cached_property
    def _by_place(self) -> Mapping[tuple[str, str], GridCell]:
        return {(cell.row, cell.column): cell for cell in self.cells}

    def row_label(self, row: str) -> str:
        """Return a row's heading at this scale."""
        return next((label for scale, label in self.table.row(row).labels.items() if scale == self.scale), row)

    def column_label(self, column: str) -> str:
        """Return a column's heading at this scale, with what was run in place of what it is called by."""
        own = next((label for scale, label in self.table.column(column).labels.items() if scale == self.scale), "")
        stand_ins = {cell.stand_in for cell in self.cells if cell.column == column}
        (stand_in,) = stand_ins if len(stand_ins) == 1 else ("",)
        return own or (f"{column} (here {stand_in})" if stand_in else column)

    @property
    def measures(self) -> list[Measure]:
        """The measures shown."""
        return [measure for measure in self.table.measures if measure.cost or not self.costs_only]

    @cached_property
    def figures(self) -> list[tuple[GridCell, Measure, Measured]]:
        """All that was measured, cell by cell."""
        every = ((cell, measure, cell.measured.get(measure.name)) for cell in self.cells for measure in self.measures)
        return [(cell, measure, figure) for cell, measure, figure in every if figure and figure.is_told]

    @cached_property
    def usual_count(self) -> int | None:
        """The number of seeds that most figures are over; None where there is no figure."""
        counts = Counter(figure.count or figure.never for _, _, figure in self.figures)
        return counts.most_common(1)[0][0] if counts else None

    @cached_property
    def is_other_throughout(self) -> bool:
        """True where no figure may be compared with the printed one, since all settings differ from the paper's."""
        return bool(self.figures) and not any(is_comparable(cell, measure) for cell, measure, _ in self.figures)

    @property
    def problems(self) -> list[str]:
        """The cells' failures, one by one."""
        return [f"{cell.row} | {cell.column}: {text}" for cell in self.cells for text in cell.problems]

    @property
    def tally(self) -> str:
        """Count in words the cells with figures, those that failed, and those known by training alone."""
        failed, untold = sum(bool(c.problems) for c in self.cells), sum(bool(c.untold) for c in self.cells)
        text = f"{len(self.cells) - failed - untold} of {len(self.cells)} cells measured"
        text += f", {untold} known by training alone" if untold else ""
        return f"{text}, {failed} failed" if failed else text

    @property
    def untold(self) -> list[str]:
        """Why rows have no figures although nothing went wrong: each reason once, with its rows."""
        rows: dict[str, dict[str, None]] = {}
        for cell in self.cells:
            for text in cell.untold:
                rows.setdefault(text, {})[cell.row] = None
        return [f"{', '.join(names)}: {text}" for text, names in rows.items()]


def views_of(table: TableFile, runs: Mapping[Cell, Path | RunView]) -> dict[Cell, RunView | str]:
    """Return each cell's run as it was given, or as its folder, which need not be there, tells; or why that fails."""
    return {cell: _view_of(run, cell, table.row(cell.row)) for cell, run in runs.items()}


def _view_of(run: Path | RunView, cell: Cell, row: Row) -> RunView | str:
    if isinstance(run, Path) and not (run / CONFIG).is_file():
        return "it was not run"
    try:
        # The run may be another cell's too, which reads it with other targets.
        view = replace(load_run(run) if isinstance(run, Path) else run, config=resolve(cell.config).tree())
    except InputError as error:
        return str(error)
    return view.judged_by(row.accuracy) if row.accuracy else view


def counted_runs(group: Sequence[Cell], views: Mapping[Cell, RunView | str]) -> dict[int, RunView]:
    """Return the runs of a row and a column that their mean is over, by seed; views as :func:`views_of` has them."""
    read = {cell.seed: view for cell in group if isinstance(view := views[cell], RunView)}
    own = [[*read][place] for place in counted([*read.values()])]
    return {seed: read[seed] for seed in own}


def measured(table: TableFile, views: Mapping[Cell, RunView | str], *, scale: str) -> Grid:
    """Measure the cells' runs, as :func:`views_of` has them, at a scale."""
    read = [view for view in views.values() if isinstance(view, RunView)]
    return grid_of(table, [*views], lambda group: _grid_cell(table, group, views=views), scale=scale, views=read)


def grid_of(
    table: TableFile,
    cells: Sequence[Cell],
    measure: Callable[[Sequence[Cell]], GridCell],
    *,
    scale: str,
    views: Sequence[RunView] = (),
) -> Grid:
    """Return a table's grid, which shows the rows and columns that have cells.

    Args:
        table: The table.
        cells: Its cells.
        measure: What the seeds of a row and a column come to.
        scale: What they belong to.
        views: Their runs, as far as there are any.
    """
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.row, cell.column), []).append(cell)
    return Grid(
        table=table,
        scale=scale,
        rows=tuple(dict.fromkeys(cell.row for cell in cells)),
        columns=tuple(dict.fromkeys(cell.column for cell in cells)),
        cells=tuple(measure(group) for group in groups.values()),
        setting=setting_of(cells, views),
    )


def setting_of(cells: Sequence[Cell], views: Sequence[RunView] = ()) -> dict[str, Any]:
    """Return the setting of the measurements, for ``measured.json``; of their runs, if any, the software too."""
    rounds = sorted({cell.config.training.rounds for cell in cells})
    datasets = sorted({cell.config.scenario.dataset for cell in cells})
    networks = sorted({cell.config.model.name for cell in cells})
    setting: dict[str, Any] = {
        "seeds": sorted({cell.seed for cell in cells}),
        "rounds": [rounds[0], rounds[-1]] if rounds else [],
        "datasets": datasets,
        "networks": networks,
    }
    for key in ("versions", "git_commit"):
        recorded = [view.result[key] for view in views if view.result.get(key)]
        setting[key] = recorded[0] if recorded and all(value == recorded[0] for value in recorded) else None
    return setting


def value_of(run: RunView, measure: Measure) -> float | None:
    """Return a measure of one run in its own unit (shares 0..1); None where the run has none.

    Args:
        run: The run.
        measure: The measure; with a target, None also says that it was never reached.

    Raises:
        InputError: It takes the run's model or data, which are damaged or not there.
    """
    if measure.of in (named := _columns_of_metrics(run)):
        return value_of(run, measure.model_copy(update={"of": named[measure.of]}))
    function = measure_function(measure.of)
    if function is not None:
        return finite(call("measure", measure.of, function, run, gives=(int, float, type(None))))
    if measure.target is not None or measure.over == "at_best":
        target = _target_of(run, measure) if measure.over != "at_best" else run.over("test_accuracy", "best")
        reached = None if target is None else run.reaching(target)
        return None if reached is None else reached.figure(measure.of)
    if measure.share_of:
        part, whole = run.over(measure.of, "sum"), run.over(measure.share_of, "sum")
        return part / whole if part is not None and whole else None
    is_measured = any(cell is not None for cell in run.column(measure.of))
    return run.over(measure.of, measure.over) if measure.over and is_measured else run.figure(measure.of)


def _columns_of_metrics(run: RunView) -> dict[str, str]:
    """Return the columns of a run's metrics of a user's own, by the names that its configuration has."""
    evaluation = run.config.get("evaluation")
    metrics = evaluation.get("metrics") if isinstance(evaluation, Mapping) else None
    names = [one.get("name") if isinstance(one, Mapping) else one for one in metrics or ()]
    return {name: column_of(name) for name in names if isinstance(name, str) and ":" in name}


def summed_up(values: Iterable[float | None], measure: Measure, *, never: int = 0, of: int | None = None) -> Measured:
    """Sum up a measure over seeds, in the unit shown.

    Args:
        values: One per seed, in the measure's own unit; None where a seed has none.
        measure: The measure.
        never: How many of those without finished and did not reach the target.
        of: How many seeds there should be; by default as many as values.
    """
    every = list(values)
    present = [figure for value in every if (figure := in_unit(value, measure)) is not None]
    estimated = estimate(present)
    count = len(every) if of is None else of
    return Measured(mean=finite(estimated.mean), sd=finite(estimated.sd), count=estimated.count, never=never, of=count)


def in_unit(value: float | None, measure: Measure) -> float | None:
    """Return a figure in the unit that is shown, of one in the measure's own; None where it is not finite there."""
    return None if value is None else finite(100 * value if measure.percent else value / measure.per)


def is_comparable(cell: GridCell, measure: Measure) -> bool:
    """Check that a cell's figure may be compared with the printed one: the settings behind it are the paper's.

    They may where the cell's settings are the paper's; for a measure of what a round costs also where the settings
    differ in nothing that this depends on.
    """
    is_of_a_round = measure.cost and measure.over != "sum" and measure.of not in _SO_FAR
    return cell.standing == "paper" or (is_of_a_round and cell.standing == "costs")


def compared(grid: Grid, cell: GridCell, measure: Measure) -> tuple[Measured, float | str] | None:
    """Return the measured and the printed figure, a number or ``never``; None where they can't be compared."""
    figure = cell.measured.get(measure.name)
    printed = grid.table.printed_value(cell.row, cell.column, measure=measure.name)
    if figure is None or not figure.is_told or not is_comparable(cell, measure):
        return None
    return None if printed is None or printed == NOT_GIVEN else (figure, printed)


def lies_within(grid: Grid, cell: GridCell, measure: Measure) -> bool | None:
    """Check that measured and printed lie within both spreads; None where they can't be compared.

    Reading: the ranges mean +- spread of both overlap, with half of the last digit shown for rounding. A spread that is
    not known is 0.
    """
    pair = compared(grid, cell, measure)
    if pair is None:
        return None
    figure, printed = pair
    if isinstance(printed, str) or figure.mean is None:
        return (printed == NEVER) == (figure.mean is None)
    room = (figure.sd or 0.0) + (grid.table.printed_sd(cell.row, cell.column, measure=measure.name) or 0.0)
    return abs(figure.mean - printed) <= room + 0.5 * 10.0**-measure.digits


def deviates(grid: Grid, cell: GridCell, measure: Measure) -> bool:
    """Check if a measure lies further from the printed figure than its tolerance, where they may be compared."""
    pair = compared(grid, cell, measure)
    if pair is None or measure.tolerance is None:
        return False
    figure, printed = pair
    if isinstance(printed, str) or figure.mean is None:
        return (printed == NEVER) != (figure.mean is None)
    return abs(figure.mean - printed) > measure.tolerance


def _grid_cell(table: TableFile, group: Sequence[Cell], *, views: Mapping[Cell, RunView | str]) -> GridCell:
    runs = counted_runs(group, views)
    done = {seed: run for seed, run in runs.items() if run.status == "finished"}
    problems = [f"seed {cell.seed}: {why}" for cell in group if (why := _why_not(views[cell]))]
    figures, by_seed = {}, {}
    for measure in table.measures if runs else ():
        values, failures = _values_of(runs, measure)
        problems += failures
        if not values:
            continue
        judged = [(run, _target_of(run, measure)) for seed, run in done.items() if seed in values]
        never = sum(
            target is not None and run.last("test_accuracy") is not None and run.reaching(target) is None
            for run, target in judged
        )
        figures[measure.name] = summed_up(values.values(), measure, never=never, of=len(group))
        shown = {seed: in_unit(values.get(seed), measure) for seed in done}
        by_seed[measure.name] = {seed: figure for seed, figure in shown.items() if figure is not None}
    return GridCell(
        row=group[0].row,
        column=group[0].column,
        measured=figures,
        by_seed=by_seed,
        standing="other" if runs and not done else standing_of(table, group[0]),
        stand_in=stand_in_of(table, group[0]),
        problems=tuple(problems),
    )


def _values_of(runs: Mapping[int, RunView], measure: Measure) -> tuple[dict[int, float | None], list[str]]:
    """Return a measure by seed, of the runs that it does not fail for; and how it fails for others."""
    values: dict[int, float | None] = {}
    failures: dict[int, str] = {}
    for seed, run in runs.items():
        try:
            values[seed] = value_of(run, measure)
        except InputError as error:
            failures[seed] = f"{measure.name}: {error}"
    if not values and len({*failures.values()}) == 1:
        return values, [*failures.values()][:1]
    return values, [f"seed {seed}: {failure}" for seed, failure in failures.items()]


def _why_not(view: RunView | str) -> str:
    """Return the reason why it has not finished; empty where it has."""
    if isinstance(view, str):
        return view
    if view.status == "finished":
        return ""
    return f"{view.status} after round {view.rounds}" + (f": {view.reason}" if view.reason else "")


def _target_of(run: RunView, measure: Measure) -> float | None:
    if measure.target != "cell":
        return measure.target
    return next(iter(targets_of(run.config)), None)
