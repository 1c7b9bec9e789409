"""Tables' costs as ``reproduce --dry-run`` and ``list tables --costs`` print them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsweep.reproduce.costs import Cost
    from fedsweep.reproduce.task import Task


def print_dry(task: Task) -> None:
    """Print the runs of a table's task, and what they will cost.

    Raises:
        InputError: A cell can't be planned.
    """
    from fedsweep.commands.running.trials import print_trials
    from fedsweep.commands.terminal.output import make_console, make_table
    from fedsweep.reproduce.costs import costs_of

    reproduction = task.left
    at = f"{reproduction.table.name} at scale {reproduction.request.scale}"
    if task.has_runs:
        finished, folders = task.finished, reproduction.folders(task.folder.path)
        left = replace(reproduction, cells=tuple(c for c in reproduction.cells if folders[c] not in finished))
        costs = costs_of(left)
        if left.cells and not costs.absent:
            entries = task.prepared().entries
            shown = [entry for entry in entries if task.folder.trial_path(entry.trial) not in finished]
            print_trials(shown, heading="row | column")
        if left.cells:
            _print("row | column", costs.by_label(), costs.total, absent=costs.absent)
        rounds = sum(cell.config.training.rounds for cell in left.firsts.values())
        more = f"; {len(finished)} more have finished" if finished else ""
        more += f"; {len(task.given_runs)} more are given" if task.given_runs else ""
        print(f"{at}: {len(left.firsts)} runs, {rounds} rounds in all{more}")
    else:
        table = make_table("row | column", "seed")
        for cell in reproduction.cells:
            table.add_row(cell.label, str(cell.seed))
        make_console().print(table, markup=False)
        print(f"{at}: {len(reproduction.cells)} cells{'; nothing is trained' if task.costs_only else ''}")


def print_list(scale: str | None) -> None:
    """Print the costs of each table with a scale, and of all; runs that tables share count in each, and once in all."""
    from fedsweep.commands.terminal.output import note
    from fedsweep.errors import ConfigError, InputError, unknown_name
    from fedsweep.reproduce.costs import Cost, Estimator, costs_of
    from fedsweep.reproduce.definition.sections import FULL, SCALES
    from fedsweep.reproduce.definition.table_file import listed_tables
    from fedsweep.reproduce.reproduction import TableRequest, reproduction

    scale, estimator = scale or FULL, Estimator(by_method=False)
    if scale not in SCALES:
        raise ConfigError(unknown_name("scale", scale, SCALES))
    totals: dict[str, Cost] = {}
    keys: dict[str, Cost] = {}
    for preset, _ in listed_tables():
        try:
            table = reproduction(TableRequest(table=preset.name, scale=scale))
            costs = costs_of(table, estimator) if table.table.kind == "runs" else None
        except InputError as error:
            note(f"{preset.name} is left out: {error}")
            continue
        if costs is None:
            totals[preset.name] = Cost()
            continue
        estimator.release()
        totals[preset.name] = costs.total
        keys |= {table.keys[cell]: cost for cell, cost in costs.by_cell.items()}
        note(f"{len(totals)}: {preset.name}")
    _print("table", totals, sum(keys.values(), Cost()), absent=estimator.absent)


def _print(heading: str, costs: Mapping[str, Cost], total: Cost, *, absent: Collection[str]) -> None:
    from fedsweep.commands.terminal.output import make_console, make_table, note
    from fedsweep.reproduce.costs import cores, hours_here
    from fedsweep.results.texts import seconds_text

    table = make_table(heading, "runs", "steps", "FLOPs", "bytes", "core-hours")
    for name, cost in costs.items():
        table.add_row(name, *_cells(cost))
    table.add_row("in all", *_cells(total))
    make_console().print(table, markup=False)
    print(
        f"about {seconds_text(3600 * hours_here(total))} on the {cores()} cores here, by some steps of each network and"
        " method; start-up, and what methods compute on the server, come on top"
    )
    if absent:
        note(f"not here, so counted as large as published and with equally frequent classes: {', '.join(absent)}")


def _cells(cost: Cost) -> list[str]:
    from fedsweep.results.texts import MISSING, bytes_text

    if not cost.runs:
        return ["0", *[MISSING] * 4]
    hours = cost.seconds / 3600
    return [
        f"{cost.runs:,}",
        f"{cost.steps:,}",
        f"{cost.flops:.3g}",
        bytes_text(cost.num_bytes),
        f"{hours:.3g}" if hours < 1000 else f"{hours:,.0f}",
    ]
