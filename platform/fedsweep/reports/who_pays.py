"""Fairness of a setting: its accuracy by class, by client, and of the clients' own models, as table rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedsweep.results.texts import MISSING
from fedsweep.results.worlds import Study

if TYPE_CHECKING:
    from rich.console import Console

OF: Mapping[str, str] = {
    "class_accuracy": "classes",
    "client_accuracy": "clients, on their own classes",
    "personal_accuracy": "clients' own models, on their own tests",
    "own_accuracy": "clients' own models, on the whole test set",
}


@dataclass(frozen=True, kw_only=True)
class ShareRow:
    """A setting's accuracy over classes or clients; figures are 0..1 and means over its counted runs.

    Attributes:
        setting: The setting's place.
        label: Its row's.
        world: In what its world differs from others; empty for the only one.
        of: To whom.
        mean: Over all of them.
        sd: Their deviation.
        worst: The mean of the lowest tenth.
        best: The mean of the highest tenth.
    """

    setting: int
    label: str
    world: str
    of: str
    mean: float | None
    sd: float | None
    worst: float | None
    best: float | None


def share_rows(study: Study) -> list[ShareRow]:
    """Return the rows of those settings that were tested so, in the order of :data:`OF`, world by world."""
    rows = []
    for name, of in OF.items():
        for world in study.layout.worlds:
            for row, place in world.cells.items():
                setting = study.settings[place]
                mean, sd, worst, best = (setting.figure(name + part) for part in ("", "_sd", "_worst10", "_best10"))
                if mean is not None:
                    label = study.layout.rows[row] if world.label else setting.label
                    figures = {"mean": mean, "sd": sd, "worst": worst, "best": best}
                    rows.append(ShareRow(setting=place, label=label, world=world.label, of=of, **figures))
    return rows


def print_shares(study: Study, console: Console) -> None:
    """Print the rows where there are some; those of a world stand together."""
    from rich.table import Table
    from rich.text import Text

    if not (rows := share_rows(study)):
        return
    table = Table(title="Who pays: accuracy at the last test", title_justify="left", box=None, pad_edge=False)
    names = ("accuracy of", *(("world",) if any(row.world for row in rows) else ()), "setting")
    for place, heading in enumerate((*names, "mean", "sd", "worst 10%", "best 10%")):
        is_name = place < len(names)
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=not is_name, overflow="fold")
    for row in rows:
        cells = (MISSING if x is None else f"{100 * x:.2f}%" for x in (row.mean, row.sd, row.worst, row.best))
        table.add_row(*map(Text, (row.of, *((row.world,) if len(names) > 2 else ()), row.label, *cells)))
    console.print()
    console.print(table)
