"""Runs side by side, as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.results.texts import MISSING, bytes_text, seconds_text
from fedsweep.results.view import RunView, load_runs, run_labels

if TYPE_CHECKING:
    from rich.console import Console


_NARROWEST_NAME = 8


@dataclass(frozen=True, kw_only=True)
class CompareRow:
    """A run's figures; None where it has no such figure (yet).

    Attributes:
        name: Its name.
        label: The name; where another run has it with the same seed, the folder.
        method: Its method.
        seed: Its seed.
        status: ``finished``, ``failed``, ``killed`` or ``unfinished``.
        rounds: Rounds done.
        test_accuracy: The last, 0..1.
        best_test_accuracy: The best, 0..1.
        total_bytes: Bytes both ways, registration apart.
        comm_ratio: Mean communication ratio.
        sim_time_s: Virtual seconds.
        wall_time_s: Seconds of all rounds, evaluation included.
        folder: Its folder.
    """

    name: str
    label: str
    method: str
    seed: int | None
    status: str
    rounds: int
    test_accuracy: float | None
    best_test_accuracy: float | None
    total_bytes: int
    comm_ratio: float | None
    sim_time_s: float | None
    wall_time_s: float
    folder: Path


def compare_rows(folders: Iterable[str | Path]) -> list[CompareRow]:
    """One row per run in or below the folders, in the order given.

    Raises:
        OutputError: One of the folders does not exist or holds no run.
        InputError: A run's file is damaged.
    """
    runs = load_runs(folders)
    return [_row(run, label) for run, label in zip(runs, run_labels(runs, with_seeds=False), strict=True)]


def render_table(rows: Sequence[CompareRow], console: Console) -> None:
    """Prints the rows, aligned, within the terminal's width; without a terminal nothing is cut.

    Long names are cut in the middle; on a very narrow terminal the last columns are left out.
    """
    from rich.text import Text

    width = console.width if console.is_terminal else None
    header, *lines = _aligned(rows, width=width)
    console.print(Text(header, style="bold"), soft_wrap=True)
    for row, line in zip(rows, lines, strict=True):
        style = {"finished": "", "failed": "red"}.get(row.status, "yellow")
        console.print(Text(line, style=style), soft_wrap=True)


def _row(run: RunView, label: str) -> CompareRow:
    accuracies = [value for value in run.column("test_accuracy") if value is not None]
    measured: dict[str, Any] = {
        "test_accuracy": accuracies[-1] if accuracies else None,
        "best_test_accuracy": max((a for a in accuracies if not math.isnan(a)), default=None),
        "total_bytes": run.total_bytes[-1] if run.total_bytes else 0,
        "comm_ratio": _mean(run.column("comm_ratio")),
        "wall_time_s": math.fsum((*run.column("wall_time_s"), *run.column("eval_time_s"))),
    }
    figures = {key: value if run.result.get(key) is None else run.result[key] for key, value in measured.items()}
    times = [value for value in run.column("sim_time_s") if value is not None]
    return CompareRow(
        name=run.name,
        label=label,
        method=run.method,
        seed=run.seed,
        status=run.status,
        rounds=len(run.column("round")),
        sim_time_s=times[-1] if times else None,
        folder=run.folder,
        **figures,
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None and not math.isnan(value)]
    return math.fsum(known) / len(known) if known else None


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.2f}%"


def _ratio(value: float | None) -> str:
    return MISSING if value is None else f"{value:.3f}"


# The most important first: on a narrow terminal the last ones go. The first two hold text and may be cut.
_COLUMNS: tuple[tuple[str, Callable[[CompareRow], str]], ...] = (
    ("run", lambda row: row.label),
    ("method", lambda row: row.method),
    ("acc", lambda row: _percent(row.test_accuracy)),
    ("best", lambda row: _percent(row.best_test_accuracy)),
    ("bytes", lambda row: bytes_text(row.total_bytes)),
    ("ratio", lambda row: _ratio(row.comm_ratio)),
    ("sim", lambda row: seconds_text(row.sim_time_s)),
    ("wall", lambda row: seconds_text(row.wall_time_s)),
    ("seed", lambda row: MISSING if row.seed is None else str(row.seed)),
    ("status", lambda row: row.status),
    ("rounds", lambda row: str(row.rounds)),
)
_CUTTABLE = 2
_LEFT = ("run", "method", "status")


def _aligned(rows: Sequence[CompareRow], *, width: int | None) -> list[str]:
    from rich.cells import cell_len

    cells = [[header for header, _ in _COLUMNS]] + [[_one_line(text(row)) for _, text in _COLUMNS] for row in rows]
    widths = [max(cell_len(line[column]) for line in cells) for column in range(len(_COLUMNS))]
    if width is None:
        return ["  ".join(_fitted(line, widths)).rstrip() for line in cells]
    gap = 2 if sum(widths) + 2 * (len(widths) - 1) <= width else 1
    while len(widths) > _CUTTABLE and _narrowest(widths, gap) > width:
        widths.pop()
    _shrink(widths, sum(widths) + gap * (len(widths) - 1) - width)
    return [(" " * gap).join(_fitted(line, widths)).rstrip() for line in cells]


def _narrowest(widths: Sequence[int], gap: int) -> int:
    names = sum(min(size, _NARROWEST_NAME) for size in widths[:_CUTTABLE])
    return names + sum(widths[_CUTTABLE:]) + gap * (len(widths) - 1)


def _shrink(widths: list[int], excess: int) -> None:
    """Takes the excess from the wider of the columns that may be cut."""
    for _ in range(excess):
        widest = max(range(_CUTTABLE), key=lambda column: widths[column])
        widths[widest] = max(1, widths[widest] - 1)


def _fitted(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    from rich.cells import cell_len

    fitted = []
    for (header, _), text, size in zip(_COLUMNS, line, widths, strict=False):
        shown = _cut(text, size)
        space = " " * (size - cell_len(shown))
        fitted.append(shown + space if header in _LEFT else space + shown)
    return fitted


def _cut(text: str, size: int) -> str:
    """The text with its middle left out where it is too long: names tend to differ at both ends."""
    from rich.cells import cell_len, set_cell_size

    if cell_len(text) <= size:
        return text
    tail = text
    while cell_len(tail) > (size - 1) // 2:
        tail = tail[1:]
    return f"{set_cell_size(text, size - 1 - cell_len(tail))}…{tail}"


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
