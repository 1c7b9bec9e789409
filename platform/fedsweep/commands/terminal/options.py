"""Arguments and options that several commands share, and the examples below a command's help."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from fedsweep.errors import ConfigError

_MOST_SEEDS = 10_000

Config = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A YAML file, or a preset's name ([b]fedsweep list presets[/b]).")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set a dotted key to a YAML value; may be repeated, and of the same key the last one wins.",
    ),
]
Elsewhere = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Show runs as on other scenario.devices, and at prices, as [b]fedsweep replay[/b] tells, which carries out"
        " what their config.yaml names; may be repeated.",
    ),
]
# A path or an address: as paths, addresses would lose a slash.
Out = Annotated[
    str | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="The folder, or an address as [b]s3://bucket/name[/b]. [dim]runs/<name>-<timestamp>[/dim]",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", metavar="", help="Replace what --out holds.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", metavar="", help="Check everything, print what would be done, write nothing.")
]
Dashboard = Annotated[
    bool,
    typer.Option("--dashboard", metavar="", help="Start Ray's dashboard on 127.0.0.1; needs the extra 'dashboard'."),
]
AllowChangedCode = Annotated[
    bool,
    typer.Option("--allow-changed-code", metavar="", help="Go on although fedsweep or a plug-in has changed since."),
]
CostsOnly = Annotated[
    bool,
    typer.Option(
        "--costs-only",
        metavar="",
        help="Only measures that need no training, by default at scale full over at most 80 rounds; more by --set"
        " training.rounds=N.",
    ),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", metavar="", help="Run everything: take no finished runs over from other tables.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="Print messages and the last line only.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw a picture into this file: .png, .pdf or .svg.")
]


def whole_number(text: str | int) -> int:
    """Parse a whole number; typer's own message would not say what was found.

    Raises:
        BadParameter: The text is none.
    """
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"must be a whole number, but is {text!r}") from None


def parse_seeds(text: str) -> list[int]:
    """Parse the seeds that ``--seeds`` names, each once.

    Args:
        text: Numbers and ranges from 0, e.g. ``0-4`` or ``0,3,7``.

    Raises:
        ConfigError: It names something else, or too many.
    """
    numbers: list[int] = []
    for part in re.split(r"[,\s]+", text.strip()):
        ends = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        named = range(int(ends[1]), int(ends[2] or ends[1]) + 1) if ends is not None else ()
        if not named:
            raise ConfigError(f"--seeds takes numbers and ranges from 0, e.g. 0-4 or 0,3,7, but got {text!r}")
        if len(numbers) + len(named) > _MOST_SEEDS:
            raise ConfigError(f"--seeds takes at most {_MOST_SEEDS} seeds, but {text!r} names more")
        numbers += named
    return list(dict.fromkeys(numbers))


def parse_names(text: str | None) -> list[str] | None:
    """Parse the names in a text with commas between; None where nothing was given."""
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def examples(*lines: str) -> str:
    """Return the epilog of a command's help: one example per line."""
    return "\n\n".join(["[b]Examples[/b]", *(line.replace("[", r"\[") for line in lines)])
