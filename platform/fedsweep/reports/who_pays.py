"""Fairness of a setting: its accuracy by class, by client, and of the clients' own models, as table rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedsweep.results.settings import Setting
from fedsweep.results.texts import MISSING

if TYPE_CHECKING:
    from rich.console import Console

OF: Mapping[str, str] = {
    "class_accuracy": "classes",
    "client_accuracy": "clients, on their own classes",
    "personal_accuracy": "clients' own models, on their own tests",
}


@dataclass(frozen=True, kw_only=True)
class ShareRow:
    """A setting's accuracy over classes or clients; figures are 0..1 and means over its counted runs.

    Attributes:
        setting: The setting's place.
        of: To whom.
        mean: Over all of them.
        sd: Their deviation.
        worst: The mean of the lowest tenth.
        best: The mean of the highest tenth.
    """

    setting: int
    of: str
    mean: float | None
    sd: float | None
    worst: float | None
    best: float | None


def share_rows(settings: Sequence[Setting]) -> list[ShareRow]:
    """Return the rows of those settings that were tested so, in the order of :data:`OF`, setting by setting."""
    rows = []
    for name, of in OF.items():
        for place, setting in enumerate(settings):
            mean, sd, worst, best = (setting.figure(name + part) for part in ("", "_sd", "_worst10", "_best10"))
            if mean is not None:
                rows.append(ShareRow(setting=place, of=of, mean=mean, sd=sd, worst=worst, best=best))
    return rows


def print_shares(settings: Sequence[Setting], console: Console) -> None:
    """Print the rows where there are some."""
    from rich.table import Table
    from rich.text import Text

    if not (rows := share_rows(settings)):
        return
    table = Table(title="Who pays: accuracy at the last test", title_justify="left", box=None, pad_edge=False)
    for place, heading in enumerate(("accuracy of", "setting", "mean", "sd", "worst 10%", "best 10%")):
        table.add_column(heading, justify="left" if place < 2 else "right", no_wrap=place >= 2, overflow="fold")
    for row in rows:
        cells = (MISSING if x is None else f"{100 * x:.2f}%" for x in (row.mean, row.sd, row.worst, row.best))
        table.add_row(*map(Text, (row.of, settings[row.setting].label, *cells)))
    console.print()
    console.print(table)
