"""``fedsweep sync``: MLflow gets what it lacks of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsweep.commands.options import examples
from fedsweep.errors import ConfigError, ResourceError

EXAMPLES = examples("fedsweep sync runs/my-experiment-20250102-030405")


def sync(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a run that has ended.")],
) -> None:
    """Log to MLflow what a run could not: its store was gone, locked or full. Each point is logged once."""
    from fedsweep.catalog import resolve
    from fedsweep.driver.run import resumable
    from fedsweep.tracking.catch_up import catch_up

    folder = folder.expanduser().absolute()
    if (folder / "sweep.json").exists():
        raise ConfigError(f"{folder} is a sweep's; fedsweep sweep --resume --out {folder} logs what MLflow lacks of it")
    config, _ = resumable(folder)
    done, is_complete = catch_up(folder, resolve(config))
    print(f"{folder}: {done}")
    if not is_complete:
        raise ResourceError(f"{folder}: MLflow still lacks some of it; try again when its store can be written")
