"""How a command of many trials says its way on."""

from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path

import pytest

from fedsweep.commands.running.trials import way_on_told
from fedsweep.errors import OutputError, RunError
from fedsweep.sweeps.sweep_folder import SweepFolder, SweepPlan


def fill(*, wrapped: bool) -> None:
    """Meet a full disk, as Tune does: its error has the traceback for a text, and no cause."""
    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        if wrapped:
            raise OutputError("/s/sweep.json: cannot be written") from error
        raise RuntimeError("Traceback (most recent call last):\n  File")  # noqa: B904


def test_full_disk_of_a_sweep_is_told_with_the_way_on(tmp_path: Path) -> None:
    folder = SweepFolder(tmp_path / "s")
    with pytest.raises(RunError, match=r"^/s/sweep\.json: cannot be written; make room there, then try again$"):
        with way_on_told(folder, "sweep", what="the sweep"):
            fill(wrapped=True)
    folder.create(SweepPlan(config_tree={}, trials=()), config_yaml=None, overwrite=False)
    on = f"sweep --resume --out {folder.path}"
    way_on = rf"no space is left for {folder.path}, it seems; make room there, then go on with .*{on}$"
    with pytest.raises(RunError, match=way_on):
        with way_on_told(folder, "sweep", what="the sweep"):
            fill(wrapped=False)
    with pytest.raises(RunError, match=way_on):
        with way_on_told(folder, "sweep", what="the sweep"):
            pickle.loads(b"")
    with pytest.raises(KeyError), way_on_told(folder, "sweep", what="the sweep"):
        raise KeyError
