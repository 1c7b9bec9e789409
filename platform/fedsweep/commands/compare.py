"""``fedsweep compare``: runs beside one another."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedsweep.commands.terminal.options import Plot, examples

EXAMPLES = examples(
    "fedsweep compare runs",
    "fedsweep compare runs/intervals --by setting",
    "fedsweep compare runs/intervals --by setting --format latex > table.tex",
    "fedsweep compare runs/fedavg runs/dynamicfl --plot accuracy.png",
)


class Form(StrEnum):
    """How the table is written."""

    TEXT = "text"
    MD = "md"
    LATEX = "latex"
    CSV = "csv"


class By(StrEnum):
    """What a line of the table stands for."""

    RUN = "run"
    SETTING = "setting"


def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run folders, or folders with run folders below them.")
    ],
    by: Annotated[
        By,
        typer.Option(
            "--by", show_default=False, help="A line per run, or per setting with means over its seeds. [dim]run[/dim]"
        ),
    ] = By.RUN,
    form: Annotated[
        Form,
        typer.Option("--format", show_default=False, help="How settings are written, for a paper. [dim]text[/dim]"),
    ] = Form.TEXT,
    plot: Plot = None,
) -> None:
    """Put runs side by side: accuracy, bytes, communication ratio, simulated and wall time.

    Columns: acc and best are test accuracies, bytes go both ways, ratio is what models moved over what a model each way
    at every local step would have been, sim is the simulated devices' time, wall the measured one of all rounds, and
    s/round the median of all but the first, which loads what the others have.

    By setting, accuracies are means over seeds with their sample standard deviation and the 95% bootstrap interval.
    Runs that were tested by class and by client (evaluation.per_client) have a second table, with the worst and the
    best tenth. The picture shows test accuracy against the bytes sent: a line per setting, the mean over its seeds
    with a band of one deviation each way.
    """
    from fedsweep.commands.terminal.output import make_console, note
    from fedsweep.reports.compare import compared_runs, print_comparison
    from fedsweep.results.settings import group_settings, remarks

    if plot is not None:
        from fedsweep.figures.curves import plot_accuracy_against_bytes
        from fedsweep.figures.style import checked_path

        checked_path(plot)  # before the table
    runs, console = compared_runs(folders), make_console()
    print_comparison(runs, console, by=by, form=form)
    if form is Form.TEXT:
        for text in remarks(runs, group_settings(runs)):
            note(f"note: {text}")
    if plot is not None:
        plot_accuracy_against_bytes(folders, plot)
        (print if form is Form.TEXT else note)(f"picture: {plot.absolute()}")
