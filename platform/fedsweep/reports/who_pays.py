"""Fairness of a setting: its figures by class, by client, and of the clients' own models, as table rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedsweep.results.texts import metric_text
from fedsweep.results.view import metrics_of
from fedsweep.results.worlds import Study
from fedsweep.tasks.declaration import SHARE, Declaration

if TYPE_CHECKING:
    from rich.console import Console

_ON_TESTS = "on their own tests"
OF: Mapping[str, str] = {
    "class_accuracy": "classes",
    "client_accuracy": "clients, on their own classes",
    "personal_accuracy": "clients' own models, on their own tests",
    "own_accuracy": "clients' own models, on the whole test set",
}


@dataclass(frozen=True, kw_only=True)
class ShareRow:
    """A setting's figures over classes or clients, means over its counted runs.

    Attributes:
        setting: The setting's place.
        label: Its row's.
        world: In what its world differs from others; empty for the only one.
        of: To whom.
        is_share: They are accuracies or the like, 0..1.
        mean: Over all of them.
        sd: Their deviation.
        worst: The mean of the worst tenth.
        best: The mean of the best tenth.
    """

    setting: int
    label: str
    world: str
    of: str
    is_share: bool
    mean: float | None
    sd: float | None
    worst: float | None
    best: float | None


def share_rows(study: Study) -> list[ShareRow]:
    """Return the rows of those settings that were tested so, in the order of :data:`OF`, then tasks', by world."""
    rows, metrics = [], metrics_of((run.view for run in study.runs), by_client=True)
    shown = {name: (of, True) for name, of in OF.items()}
    for name in (n.removesuffix("_worst10") for n in metrics if n.startswith("client_") and n.endswith("_worst10")):
        if name not in shown:
            shown[name] = (f"clients' {name.removeprefix('client_')}, {_ON_TESTS}", metrics[name].unit == SHARE)
    for name, (of, is_share) in shown.items():
        for world in study.layout.worlds:
            for row, place in world.cells.items():
                setting = study.settings[place]
                mean, sd, worst, best = (setting.figure(name + part) for part in ("", "_sd", "_worst10", "_best10"))
                if mean is None:
                    continue
                is_told_apart = any(cell for view in setting.views for cell in view.columns.get("client_scores", ()))
                rows.append(
                    ShareRow(
                        setting=place,
                        label=study.layout.rows[row] if world.label else setting.label,
                        world=world.label,
                        of=f"clients, {_ON_TESTS}" if name == "client_accuracy" and is_told_apart else of,
                        is_share=is_share,
                        mean=mean,
                        sd=sd,
                        worst=worst,
                        best=best,
                    )
                )
    return rows


def print_shares(study: Study, console: Console) -> None:
    """Print the rows where there are some; those of a world stand together."""
    from rich.table import Table
    from rich.text import Text

    if not (rows := share_rows(study)):
        return
    table = Table(title="Who pays: figures of the last test", title_justify="left", box=None, pad_edge=False)
    names = ("of", *(("world",) if any(row.world for row in rows) else ()), "setting")
    for place, heading in enumerate((*names, "mean", "sd", "worst 10%", "best 10%")):
        is_name = place < len(names)
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold")
    for row in rows:
        how = Declaration(unit=SHARE if row.is_share else "")
        cells = (metric_text(value, how) for value in (row.mean, row.sd, row.worst, row.best))
        table.add_row(*map(Text, (row.of, *((row.world,) if len(names) > 2 else ()), row.label, *cells)))
    console.print()
    console.print(table)
