"""``fedsweep report``: runs side by side on one self-contained page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fedsweep.commands.terminal.options import Elsewhere, examples, parse_names

EXAMPLES = examples(
    "fedsweep report runs/intervals --out intervals.html",
    "fedsweep report runs/fedavg runs/dynamicfl --out comparison.html",
    "fedsweep report runs/study --columns dirichlet_alpha --out study.html",
    "fedsweep report runs/study --set scenario.devices.profile=phone-slow --set prices.up_gb=2 --out elsewhere.html",
    "fedsweep report my-experiment --uri sqlite:////home/me/study/mlflow.db --out study.html",
)


def report(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="DIR_OR_EXPERIMENT...",
            help="Run folders, or folders with some below them (paths or addresses); or names of MLflow experiments.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE.html", help="The page; an earlier report is replaced.")],
    uri: Annotated[
        str | None,
        typer.Option(
            "--uri",
            metavar="URI",
            help="The store with the experiments. [dim]runs/mlflow.db or mlflow.db, in this folder[/dim]",
        ),
    ] = None,
    script: Annotated[
        str,
        typer.Option(
            "--script",
            metavar="inside|beside",
            help="Where the script that draws goes: into the page (5 MB), or once beside all pages of the folder.",
        ),
    ] = "inside",
    rows: Annotated[
        str | None,
        typer.Option(metavar="KEYS", help="Keys that make rows: method,mu. [dim]all beside the columns[/dim]"),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(metavar="KEYS", help="Keys that make columns and panels. [dim]what makes worlds[/dim]"),
    ] = None,
    overrides: Elsewhere = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", metavar="", help="Replace --out even where it is no report.")
    ] = False,
) -> None:
    """Write one HTML file that shows runs side by side and needs nothing beside itself.

    Tables of settings and runs, which differences are more than chance, learning curves over rounds, bytes and
    simulated time, accuracy against communication with its Pareto front and the best under each budget, parallel
    coordinates over what varies, clients, configuration differences, provenance. Settings that differ in scenario or
    model are in different worlds: each world has a column, a panel, a best and a front of its own. Charts can be zoomed
    and taken away as SVG and CSV.
    """
    from fedsweep.commands.terminal.output import note
    from fedsweep.finished.elsewhere import views_elsewhere
    from fedsweep.reports.page import write_report
    from fedsweep.reports.sources import find_sources
    from fedsweep.results.texts import bytes_text
    from fedsweep.results.worlds import LayoutKeys
    from fedsweep.runs.remote_folder import read_from
    from fedsweep.tracking.mlflow_store import local_store, resolve_uri

    store = resolve_uri(uri, out=local_store())
    keys = LayoutKeys(rows=parse_names(rows), columns=parse_names(columns))
    with read_from(sources) as places:
        sources_found = find_sources([str(place) for place in places], uri=store)
        shown = replace(sources_found, runs=tuple(views_elsewhere(sources_found.runs, overrides or ())))
        written = write_report(shown, out, uri=store, overwrite=overwrite, script=script, keys=keys)
    for text in written.notes:
        note(f"note: {text}")
    runs = f"{written.num_runs} run{'' if written.num_runs == 1 else 's'}"
    print(f"report: {written.path} ({runs}, {bytes_text(written.size_bytes)})")
