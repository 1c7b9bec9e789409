"""The number of lanes that a GPU's memory has room for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fedsweep.client.lanes.lane import Lane
from fedsweep.client.lanes.tile import Tile
from fedsweep.client.messages import ClientSide
from fedsweep.errors import first_line

# Lanes that are tried to see what each of them takes, and how much of the memory may be filled.
_PROBED = (2, 8)
_MEMORY_SHARE = 0.8
# As many as that where the memory can't be looked at.
_UNPROBED = 8


def lanes_for_memory(side: ClientSide, waiting: Sequence[Lane], wanted: int) -> tuple[int, tuple[str, ...]]:
    """Return as many lanes as the device's memory has room for, at most those wanted, and what was in the way.

    Where it can't be looked at, few: what does not fit after all is halved.

    Args:
        side: The experiment's client side.
        waiting: All clients that are to be stepped.
        wanted: Lanes, if possible.
    """
    pattern = waiting[0]
    try:
        for lane in waiting:
            lane.optimizer.live()  # made when it is first wanted, and it stays beside the tiles
        # Of two widths, so that what a process holds anyway is not counted for each lane.
        few, many = (Tile(side, pattern, width).peak_memory(pattern) for width in _PROBED)
        total = device_memory()
        if not 0 < few <= many <= total:
            raise ValueError(f"{_PROBED[0]} lanes seem to take {few}, {_PROBED[1]} {many} of {total:.0f} bytes")
        return lanes_that_fit(few, many, total=total, wanted=wanted), ()
    except Exception as error:  # whatever it is, a run goes on without
        width = min(_UNPROBED, wanted)
        return width, (f"lanes: the device's memory can't be probed ({first_line(error)}): {width} at once",)


def device_memory() -> float:
    """Return bytes of the GPU that this process may use."""
    return torch.cuda.get_device_properties(0).total_memory * torch.cuda.get_per_process_memory_fraction()


def lanes_that_fit(few: float, many: float, *, total: float, wanted: int) -> int:
    """Choose how many lanes to step at once: as few tiles as memory allows, all equally full.

    Args:
        few: Bytes at most in use during a step of 2 lanes.
        many: The same of 8 lanes.
        total: Bytes that the process may use.
        wanted: Clients that are to be stepped at once if possible.
    """
    each = max(1.0, (many - few) / (_PROBED[1] - _PROBED[0]))
    room = max(1, math.floor((_MEMORY_SHARE * total - few) / each) + _PROBED[0])
    return -(-wanted // -(-wanted // room))
