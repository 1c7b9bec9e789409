"""``fedsweep compare``: runs beside one another."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsweep.commands.terminal.options import Elsewhere, Plot, examples, parse_names

if TYPE_CHECKING:
    from fedsweep.reports.setting_table import TableStyle

EXAMPLES = examples(
    "fedsweep compare runs",
    "fedsweep compare runs/intervals --by setting --sort acc --top 5",
    "fedsweep compare runs/intervals --by setting --format latex > table.tex",
    "fedsweep compare runs/study --rows method --columns dirichlet_alpha --y acc,bytes",
    "fedsweep compare runs/study --set scenario.devices.profile=phone-slow --set prices.up_gb=2 --sort money",
    "fedsweep compare runs/fedavg runs/dynamicfl --plot accuracy.png",
    "fedsweep compare runs/study --only method=FedAvg,SCAFFOLD --plot loss.pdf --x rounds --y loss",
)


class Form(StrEnum):
    """The forms of a table."""

    TEXT = "text"
    MD = "md"
    LATEX = "latex"
    CSV = "csv"


class By(StrEnum):
    """The meaning of a line of the table."""

    RUN = "run"
    SETTING = "setting"


def _labels(texts: list[str]) -> dict[str, str]:
    from fedsweep.errors import ConfigError
    from fedsweep.results.typeset import unicode_text

    pairs = [text.partition("=") for text in texts]
    if any(not key or not sign for key, sign, _ in pairs):
        raise ConfigError("--label takes KEY=TEXT, e.g. mu=μ")
    return {key.rpartition(".")[2]: unicode_text(label) for key, _, label in pairs}


def _check_picture(plot: Path | None, x: str | None, y: str | None, *, are_runs: bool) -> None:
    """Refuse a picture's name that is none, and options of a picture that is not asked for."""
    from fedsweep.errors import ConfigError
    from fedsweep.figures.style import checked_path

    if plot is not None:
        checked_path(plot)  # before the table
    elif x is not None:
        raise ConfigError("--x is of the picture; give --plot FILE, too")
    elif y is not None and are_runs:
        raise ConfigError("--y is of settings and of the picture; give --by setting or --plot FILE, too")


def _check_cells(style: TableStyle, form: Form, plot: Path | None, *, are_runs: bool) -> None:
    """Refuse what cells and keys of a paper are to look like where none is written."""
    from fedsweep.errors import ConfigError

    is_paper = form in (Form.MD, Form.LATEX)
    if style.interval and not is_paper and (are_runs or (form is Form.CSV and style.is_laid_out)):
        raise ConfigError("--interval is of cells over seeds; give --by setting, and no csv of rows and columns")
    if style.labels and not is_paper and plot is None:
        raise ConfigError("--label is of a paper's tables and of pictures; give --format latex or --plot FILE, too")


def compare(
    folders: Annotated[
        list[str],
        typer.Argument(
            metavar="DIR...", help="Run folders, or folders with run folders below them; paths or addresses."
        ),
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
    rows: Annotated[
        str | None,
        typer.Option(metavar="KEYS", help="Keys that make rows: method,mu. [dim]all beside the columns[/dim]"),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(metavar="KEYS", help="Keys that make groups of columns, and panels. [dim]what makes worlds[/dim]"),
    ] = None,
    x: Annotated[
        str | None,
        typer.Option(
            "--x", metavar="AXIS", help="Of the picture: rounds, bytes, sim, wall, flops, energy, money, or a key."
        ),
    ] = None,
    y: Annotated[
        str | None,
        typer.Option(
            "--y", metavar="FIGURES", help="In cells, and up the picture, a panel each: acc,loss. [dim]acc[/dim]"
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE[,VALUE]", help="Leave out all other runs; may be repeated."),
    ] = None,
    sort: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="By a figure, best first, or by a key; -NAME the other way round."),
    ] = None,
    top: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Show the first N lines; by setting, of each world.")
    ] = None,
    interval: Annotated[
        bool | None, typer.Option("--interval/--no-interval", help="The 95% interval in cells for a paper.")
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=TEXT", help="What a paper calls a key; may be repeated."),
    ] = None,
    overrides: Elsewhere = None,
    plot: Plot = None,
) -> None:
    """Put runs side by side: accuracy, bytes, communication ratio, simulated and wall time.

    Columns: acc and best are test accuracies, bytes go both ways, ratio is what models moved over what a model each way
    at every local step would have been, sim is the simulated devices' time, wall the measured one of all rounds, and
    s/round the median of all but the first, which loads what the others have.

    By setting, accuracies are means over seeds with their sample standard deviation and the 95% interval.
    Settings that differ in scenario or model are in different worlds and are not compared: they stand apart, in columns
    of their own in a paper's table, and in panels of their own in the picture. --rows and --columns choose others. Keys
    go by their short names, dirichlet_alpha for scenario.partition.dirichlet_alpha.

    Runs that were tested by class and by client (evaluation.per_client) have a second table, with the worst and the
    best tenth. The picture shows test accuracy against the bytes sent: a line per row, the mean over its seeds with a
    band of one deviation each way.
    """
    from fedsweep.commands.terminal.output import make_console, note
    from fedsweep.reports.compare import compared_runs, print_comparison
    from fedsweep.reports.setting_table import TableStyle
    from fedsweep.results.settings import cut_short, group_settings, remarks, report_runs, shortly_called
    from fedsweep.runs.remote_folder import read_from

    are_runs = (by, rows, columns) == (By.RUN, None, None)
    _check_picture(plot, x, y, are_runs=are_runs)
    style = TableStyle(
        rows=parse_names(rows),
        columns=parse_names(columns),
        figures=parse_names(y),
        sort=sort,
        top=top,
        interval=interval,
        labels=_labels(label or []),
    )
    _check_cells(style, form, plot, are_runs=are_runs)
    with read_from(folders) as places:
        runs, console = compared_runs(places, only=only or ()), make_console()
        if overrides:
            from fedsweep.finished.elsewhere import views_elsewhere

            runs, _ = report_runs(views_elsewhere([run.view for run in runs], overrides))
        print_comparison(runs, console, by=by, form=form, style=style)
        if form is Form.TEXT:
            diverged = [
                f"{run.label}, seed {run.view.seed}: {run.view.divergence}" for run in runs if run.view.divergence
            ]
            for text in (
                *diverged,
                *cut_short(runs),
                *remarks(shortly_called(runs), group_settings(runs), by_run=are_runs),
            ):
                note(f"note: {text}")
        if plot is not None:
            from fedsweep.figures.study import plot_runs
            from fedsweep.results.worlds import LayoutKeys

            keys = LayoutKeys(rows=style.rows, columns=style.columns)
            plot_runs(runs, plot, x=x or "bytes", y=style.figures, keys=keys, called=style.called)
            (print if form is Form.TEXT else note)(f"picture: {plot.absolute()}")
