"""``fedsweep replay``: a finished run's time, money and energy on other devices and at other prices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsweep.commands.terminal.options import Overrides, examples

EXAMPLES = examples(
    "fedsweep replay runs/first --set scenario.devices.profile=phone-slow",
    "fedsweep replay runs/first --set scenario.devices.bandwidth_factor=0.1 --set prices.up_gb=2 --json",
)


def replay(
    folder: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a finished run, or its address.")],
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print everything on one line of JSON.")] = False,
) -> None:
    """Tell what a finished run would have taken on other devices, without training again.

    [b]--set[/b] takes keys of scenario.devices, and prices: up_gb, down_gb, device_hour, kwh, compute_watts,
    radio_watts. Where the model would have been another, because devices or what was trained have a say in the method's
    plan, that is said, and nothing else.
    """
    from fedsweep.finished.replay import replay as replay_run
    from fedsweep.runs.remote_folder import read_from

    with read_from([folder]) as (place,):
        replayed = replay_run(Path(place), overrides or [])
    if as_json:
        import json

        print(json.dumps(replayed.tree(), allow_nan=False))
        return
    from fedsweep.commands.terminal.output import make_console, make_table

    table = make_table("", "", left=1)
    clock, seconds, energy = replayed.sim_time_s, replayed.device_s, replayed.energy_kwh
    rows = (
        ("rounds", f"{replayed.rounds}"),
        ("bytes before round 1", f"{replayed.bytes_before:,}"),
        ("bytes up", f"{replayed.bytes_up:,}"),
        ("bytes down", f"{replayed.bytes_down:,}"),
        ("virtual time", "no devices" if clock is None else f"{clock:,.3f} s"),
        ("clients busy", "no devices" if seconds is None else f"{seconds:,.3f} s"),
        ("energy", "no devices" if energy is None else f"{energy:,.6g} kWh"),
        ("money", f"{replayed.money_spent:,.6g}"),
    )
    for row in rows:
        table.add_row(*row)
    make_console().print(table, markup=False)
