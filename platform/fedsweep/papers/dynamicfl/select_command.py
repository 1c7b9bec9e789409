"""``fedsweep select``: which clients make the high-frequency group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsweep.commands.terminal.options import examples, whole_number
from fedsweep.errors import ConfigError

EXAMPLES = examples(
    "fedsweep select --counts counts.csv --max-size 20",
    "fedsweep select --counts counts.csv --method exhaustive --size 5 --eligible 0,1,2,3,4,5,6,7 --json",
)


def select(
    counts: Annotated[
        Path,
        typer.Option("--counts", metavar="FILE.csv", help="A row per client, a column per class, no header."),
    ],
    method: Annotated[
        str, typer.Option("--method", help="dynacomm, exact, exhaustive, genetic or random.", metavar="NAME")
    ] = "dynacomm",
    size: Annotated[
        int | None, typer.Option("--size", metavar="N", parser=whole_number, help="Size of the group.")
    ] = None,
    max_size: Annotated[
        int | None,
        typer.Option(
            "--max-size", metavar="N", parser=whole_number, help="Greatest size of the group; default: all clients."
        ),
    ] = None,
    eligible: Annotated[
        str | None, typer.Option("--eligible", metavar="IDS", help="Rows that may be in it, from 0, comma-separated.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", parser=whole_number, help="Of everything random.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print one line of JSON.")] = False,
) -> None:
    """Choose a high-frequency group whose labels, taken together, are close to everybody's.

    The population that it is compared with is all rows of the file.
    """
    from fedsweep.algorithms.dynamicfl.select_group import read_counts, select_group

    chosen = select_group(
        read_counts(counts),
        method=method,
        size=size,
        max_size=max_size,
        eligible=None if eligible is None else _parse_ids(eligible),
        seed=seed,
    )
    _print_chosen(chosen, as_json=as_json)


def _print_chosen(chosen: Any, *, as_json: bool) -> None:
    clients = [int(client) for client in chosen.clients]
    if as_json:
        print(json.dumps({"clients": clients, "kl_divergence": chosen.kl_divergence, "seconds": chosen.seconds}))
        return
    print(f"clients: {','.join(map(str, clients)) or 'none'}")
    print(f"size: {len(clients)}")
    print(f"KL divergence: {'none' if chosen.kl_divergence is None else format(chosen.kl_divergence, '.6g')}")
    print(f"seconds: {chosen.seconds:.4f}")


def _parse_ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [part for part in parts if not (part.isascii() and part.isdecimal())]
    if wrong or not parts:
        raise ConfigError(f"--eligible takes row numbers from 0, comma-separated, e.g. 0,3,7, but got {text!r}")
    return [int(part) for part in parts]
