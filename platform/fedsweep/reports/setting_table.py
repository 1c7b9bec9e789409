"""Settings over their seeds as a table that goes into a text: Markdown, LaTeX, CSV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedsweep.results.seed_statistics import Estimate, finite
from fedsweep.results.settings import ReportRun, Setting, group_settings, remarks
from fedsweep.results.texts import MISSING
from fedsweep.results.typeset import csv_table, latex_tabular, latex_text, markdown_table, markdown_text

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("text", "md", "latex", "csv")
_EVERY_SEED = "mean ± sample standard deviation over seeds; [ ]: 95% bootstrap interval of the mean"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A column of figures.

    Attributes:
        name: As :meth:`~fedsweep.results.view.RunView.figure` knows it.
        heading: In a text.
        times: A value is multiplied by it to be shown.
        digits: After the point, as shown.
        has_spread: Whether deviation and interval are shown.
    """

    name: str
    heading: str
    times: float = 1.0
    digits: int = 2
    has_spread: bool = False


_ACCURACY = "Accuracy (%)"
FIGURES = (
    Figure(name="test_accuracy", heading=_ACCURACY, times=100, has_spread=True),
    Figure(name="best_test_accuracy", heading="Best (%)", times=100),
    Figure(name="total_bytes", heading="MB sent", times=1e-6, digits=1),
    Figure(name="comm_ratio", heading="Ratio", digits=3),
    Figure(name="sim_time_s", heading="Simulated (s)", digits=0),
)


def settings_as(runs: Sequence[ReportRun], form: str) -> str:
    """The table of all runs' settings in one of :data:`FORMATS`, but not as ``text``.

    Columns of which no setting has anything are left out, but in CSV, where figures are in SI units and unrounded.
    """
    settings = group_settings(runs)
    if form == "csv":
        return _as_csv(runs, settings)
    shown = [figure for figure in FIGURES if any(s.figure(figure.name) is not None for s in settings)]
    seeds = sorted({len(setting.counted) for setting in settings})
    counts = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    notes = [f"{_EVERY_SEED}; {counts} seeds a setting", *remarks(runs, settings)]
    frame = _frame(settings, shown)
    if form == "latex":
        return "\n".join([*(f"% {note}" for note in notes), *_as_latex(frame, settings)])
    return "\n".join([*markdown_table(frame), "", *map(markdown_text, notes)])


def _cell(found: Estimate, figure: Figure) -> str:
    mean, sd, low, high = (finite(value) for value in (found.mean, found.sd, found.low, found.high))
    if mean is None:
        return MISSING

    def number(value: float) -> str:
        return f"{value * figure.times:.{figure.digits}f}"

    if not figure.has_spread or sd is None:
        return number(mean)
    interval = "" if low is None or high is None else f" [{number(low)}, {number(high)}]"
    return f"{number(mean)} ± {number(sd)}{interval}"


def _frame(settings: Sequence[Setting], shown: Sequence[Figure]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame(
        [[_cell(setting.over_seeds(figure.name), figure) for figure in shown] for setting in settings],
        index=[setting.label for setting in settings],
        columns=pd.Index([figure.heading for figure in shown], name="Setting"),
    )


def _as_latex(frame: pd.DataFrame, settings: Sequence[Setting]) -> list[str]:
    """For booktabs; the greatest accuracy of the table is bold."""
    accuracies = [setting.figure("test_accuracy") for setting in settings]
    best = max((accuracy for accuracy in accuracies if accuracy is not None), default=None)
    cells = frame.map(latex_text)
    if best is not None and len(settings) > 1:
        shown = zip(cells[_ACCURACY], accuracies, strict=True)
        cells[_ACCURACY] = [rf"\textbf{{{cell}}}" if accuracy == best else cell for cell, accuracy in shown]
    return latex_tabular(cells)


def _as_csv(runs: Sequence[ReportRun], settings: Sequence[Setting]) -> str:
    import pandas as pd

    # As objects: a column of counts with a gap would become one of floating-point numbers.
    table = pd.DataFrame([setting_row(runs, setting) for setting in settings], dtype=object)
    return csv_table(table)


def setting_row(runs: Sequence[ReportRun], setting: Setting) -> dict[str, Any]:
    """A setting's figures by column, in SI units and unrounded; None where there is none."""
    row: dict[str, Any] = {"setting": setting.label, "method": runs[setting.runs[0]].method}
    row |= {"seeds": len(setting.counted), "failed": setting.failed}
    for figure in FIGURES:
        found = setting.over_seeds(figure.name)
        row |= {f"{figure.name}_{part}": finite(getattr(found, part)) for part in ("mean", "sd", "low", "high")}
    return row
