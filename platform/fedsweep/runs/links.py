"""Links in a folder that is written: whoever made them would have us write elsewhere."""

from __future__ import annotations

from pathlib import Path

from fedsweep.errors import OutputError

# What runs, sweeps and tables write into or add to; any other file is replaced as a whole, a link included.
_WRITTEN_INTO = (
    *("checkpoints", "checkpoints/objects", "pictures", "figures", "tensorboard", "wandb", ".tune", "optuna.log"),
)


def check_no_links(folder: Path) -> None:
    """Refuse a folder in which something that would be written into is a link; the folder itself may be one.

    Raises:
        OutputError: It is; the line names it.
    """
    for name in _WRITTEN_INTO:
        check_no_link(folder / name)


def check_no_link(path: Path) -> None:
    """The same for one file or folder."""
    if path.is_symlink():
        raise OutputError(f"{path} is a link, and nothing is written through links; move it away")
