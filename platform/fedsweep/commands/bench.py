"""``fedsweep bench``: how fast rounds are here, beside plain PyTorch in the same minutes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsweep.commands.terminal.options import examples
from fedsweep.errors import ConfigError, DataError, OutputError, ResourceError, unknown_name

if TYPE_CHECKING:
    from fedsweep.bench.setup import Figure, Request, SetUp

EXAMPLES = examples(
    "fedsweep bench list",
    "fedsweep bench",
    "fedsweep bench W1 W2 --scale full --root ~/data --json speed.json",
    "fedsweep bench W2 --anyway",
)
_LIST = "list"


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Set-ups ([b]fedsweep bench list[/b]); all that the device has."),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", metavar="", help="List the set-ups; [b]bench list[/b].")] = False,
    device: Annotated[str, typer.Option("--device", metavar="cpu|cuda", help="What is measured.")] = "cpu",
    scale: Annotated[
        str,
        typer.Option("--scale", metavar="quick|full", help="quick: a minute each; full: the whole set-up."),
    ] = "quick",
    repeats: Annotated[int, typer.Option("--repeat", metavar="N", help="Measurements of each side.", min=1)] = 5,
    rounds: Annotated[
        int | None, typer.Option("--rounds", metavar="N", help="Rounds in a measurement. [dim]the set-up's own[/dim]")
    ] = None,
    root: Annotated[
        str | None,
        typer.Option("--root", metavar="DIR", help="Folder with the data sets; noise stands in for what is not there."),
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write all that is known as JSON.")
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", metavar="", help="Measure on a busy machine too; nothing is judged then.")
    ] = False,
) -> None:
    """Measure how fast rounds are on this machine, each beside plain PyTorch in the same minutes.

    Every ratio is a median of pairs that were measured in turns; above 1, fedsweep is the faster one. Exit code 1
    where a figure that is asked for is missed.
    """
    if listed or names == [_LIST]:
        from fedsweep.bench.setups import SETUPS

        for setup in SETUPS.values():
            print(f"{setup.name:8} {setup.summary}  [{', '.join(setup.devices)}]")
        return
    from fedsweep.bench.setup import Request
    from fedsweep.commands.terminal.output import note

    chosen = _chosen(names or [], device)
    _check(chosen, scale=scale, rounds=rounds, root=root, json=json)
    request = Request(
        device=device,
        is_full=scale == "full",
        repeats=repeats,
        rounds=rounds,
        root=root,
        say=note,
    )
    if _measure(chosen, request, json=json, anyway=anyway):
        raise typer.Exit(1)


def _chosen(names: list[str], device: str) -> list[SetUp]:
    from fedsweep.bench.setup import DEVICES
    from fedsweep.bench.setups import SETUPS

    if device not in DEVICES:
        raise ConfigError(unknown_name("device", device, DEVICES))
    for name in names:
        if name not in SETUPS:
            raise ConfigError(unknown_name("set-up", name, SETUPS))
        if device not in SETUPS[name].devices:
            raise ConfigError(
                f"{name} is measured on {' and '.join(SETUPS[name].devices)}, but got --device {device}; choose others"
                " (fedsweep bench list)"
            )
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ResourceError("--device cuda, but torch sees no GPU here; use --device cpu")
    return [setup for setup in SETUPS.values() if (setup.name in names if names else device in setup.devices)]


def _check(chosen: list[SetUp], *, scale: str, rounds: int | None, root: str | None, json: Path | None) -> None:
    from fedsweep.bench.setup import SCALES
    from fedsweep.world.data.datasets import is_present

    if scale not in SCALES:
        raise ConfigError(unknown_name("scale", scale, SCALES))
    if rounds is not None and rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, but is {rounds}")
    wanted = sorted({setup.dataset for setup in chosen if setup.dataset is not None})
    if root is not None and wanted and not any(is_present(name, root=root) for name in wanted):
        raise DataError(f"--root {root} has none of {', '.join(wanted)}; without --root noise of their shape is used")
    if json is not None and not json.absolute().parent.is_dir():
        raise OutputError(f"--json {json}: there is no folder {json.absolute().parent}; make it first")


def _measure(chosen: list[SetUp], request: Request, *, json: Path | None, anyway: bool) -> bool:
    """Measure, print and write; true where a figure that is judged is missed."""
    from fedsweep.bench.machine import MOST_LOAD_CPUS, load_of_others, machine_facts
    from fedsweep.bench.report import COLUMNS, row, tree, verdict
    from fedsweep.commands.terminal.output import make_console, make_table, write_json

    figures: list[tuple[str, Figure]] = []
    loads: dict[str, float] = {}
    for setup in chosen:
        loads[setup.name] = load = round(load_of_others(), 2)
        if load > MOST_LOAD_CPUS and not anyway:
            raise ResourceError(
                f"the machine is busy: others use {load:g} CPUs, at most {MOST_LOAD_CPUS:g} is allowed; end what runs"
                " there, or measure with --anyway, which judges nothing"
            )
        request.say(f"{setup.name}: {setup.summary}")
        for figure in setup.measure(request):
            figures.append((setup.name, figure))
            request.say(f"{setup.name}: {figure.shown()}")
    is_judged = max(loads.values()) <= MOST_LOAD_CPUS
    table = make_table(*COLUMNS, left=3)
    for name, figure in figures:
        table.add_row(*row(name, figure, is_judged=is_judged))
    make_console().print(table, markup=False)
    if not is_judged:
        print(f"the machine was busy (others used up to {max(loads.values()):g} CPUs): nothing is judged")
    if json is not None:
        write_json(json, tree(figures, machine=machine_facts(request.device), loads=loads, is_judged=is_judged))
    return any(verdict(figure, is_judged=is_judged) == "missed" for _, figure in figures)
