"""What ``--seeds`` means, and ``fedsweep run --seeds``: the shortest sweep."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsweep.errors import ConfigError

_MOST_SEEDS = 10_000


def sweep_seeds(config: str, overrides: Sequence[str], seeds: str, *, out: Path | None, **settings: Any) -> None:
    """Run a configuration once for each seed, as a sweep over the seed alone.

    Args:
        config: A file, or a preset's name.
        overrides: ``KEY=VALUE``.
        seeds: ``0-4``, ``0,3,7``, or both mixed.
        out: The sweep's folder.
        settings: The command's switches.
    """
    from fedsweep.commands.sweep import begin
    from fedsweep.config.load import load_config
    from fedsweep.sweeps.sweep_folder import SweepFolder

    given = dict(load_config(config, overrides).given)
    given["sweep"] = {"space": {"seed": {"grid": parse_seeds(seeds)}}}
    folder = SweepFolder(out) if out is not None else None
    begin(load_config(given), folder, **settings)


def parse_seeds(text: str) -> list[int]:
    """The seeds that ``--seeds`` names, each once.

    Args:
        text: Numbers and ranges from 0, e.g. ``0-4`` or ``0,3,7``.

    Raises:
        ConfigError: It names something else, or too many.
    """
    found: list[int] = []
    for part in re.split(r"[,\s]+", text.strip()):
        ends = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        if ends is None or int(ends[2] or ends[1]) < int(ends[1]):
            raise ConfigError(f"--seeds takes numbers and ranges from 0, e.g. 0-4 or 0,3,7, but got {text!r}")
        found += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
        if len(found) > _MOST_SEEDS:
            raise ConfigError(f"--seeds takes at most {_MOST_SEEDS} seeds, but {text!r} names more")
    return list(dict.fromkeys(found))
