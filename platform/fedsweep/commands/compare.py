"""``fedsweep compare``: runs beside one another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsweep.commands.options import Plot, examples

EXAMPLES = examples(
    "fedsweep compare runs",
    "fedsweep compare runs/fedavg runs/dynamicfl --plot accuracy.png",
)


def compare(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run folders, or folders with run folders below them.")
    ],
    plot: Plot = None,
) -> None:
    """Put runs side by side: accuracy, bytes, communication ratio, simulated and wall time.

    The picture shows test accuracy against the bytes sent.
    """
    from fedsweep.commands.output import make_console
    from fedsweep.reports.compare import compare_rows, render_table

    if plot is not None:
        from fedsweep.figures.curves import plot_accuracy_against_bytes
        from fedsweep.figures.style import checked_path

        checked_path(plot)  # before the table
    render_table(compare_rows(folders), make_console())
    if plot is not None:
        plot_accuracy_against_bytes(folders, plot)
        print(f"picture: {plot.absolute()}")
