"""Where a run goes that was given no folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsweep.config.schema import Config


def default_folder(config: Config) -> Path:
    """``runs/<name>-<timestamp>``, with a number behind it where that is taken."""
    name = "".join(character for character in config.name if character.isprintable())
    name = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path("runs") / name
    number = 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder
