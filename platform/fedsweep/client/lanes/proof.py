"""Try ways of stepping clients on a first tile, and choose the fastest whose results agree with the loop's.

Nothing of it is kept but the choice. Whatever goes wrong in a faster way leads one way back, and is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedsweep.client.lanes.gpu_memory import lanes_for_memory
from fedsweep.client.lanes.grouping import lane_refused, not_recorded_note, one_by_one_note
from fedsweep.client.lanes.lane import Lane
from fedsweep.client.lanes.recording import NotRecorded
from fedsweep.client.lanes.tile import Tile
from fedsweep.client.local_round import LocalRound
from fedsweep.client.messages import ClientSide, LaneSettings, Stepping
from fedsweep.errors import first_line, lacks_memory

# Steps that are taken in each way: what differs in the last bits grows with every further one.
PROVED_STEPS = 3
# Farthest that lanes may be off the loop, as a share of the loop's move.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}
# Rounding alone can exceed that: through batch norm over few samples a difference in the last bits is a thousandth of
# the move within three steps. So the loop is run once more from a start that differs in its last bits, and lanes may be
# off by so many times what that changed, but never by more than the second number.
_TIMES_ROUNDING, _FARTHEST = 10, 0.03


def proved(side: ClientSide, settings: LaneSettings, begun: Callable[[], Sequence[LocalRound]]) -> Stepping:
    """Choose how clients are stepped from now on.

    Args:
        side: The experiment's client side.
        settings: What is hoped for.
        begun: Begins the same clients' round anew, with some steps due; what became of the last ones does not matter.
    """
    try:
        return _Proof(side, settings, begun).stepping()
    except Exception as error:  # it must never be the end of a run
        return Stepping(kind="loop", notes=(one_by_one_note(f"trying them failed ({first_line(error)})"),))


class _Proof:
    def __init__(self, side: ClientSide, settings: LaneSettings, begun: Callable[[], Sequence[LocalRound]]) -> None:
        self._side, self._settings, self._begun = side, settings, begun
        self._notes: list[str] = []
        self._width = settings.width

    def stepping(self) -> Stepping:
        lanes = self._together(self._begun())
        if not lanes:
            return self._chosen("loop")
        if self._settings.fits_memory:
            self._width, notes = lanes_for_memory(self._side, lanes, self._width)
            self._notes += notes
        start = {lane.facts.client: lane.vector.clone() for lane in lanes[: self._width]}
        clients = [*start]
        del lanes  # with all that their clients have on a GPU, which the others need
        expected = self._after_loop(clients)
        off: float | None = None
        try:
            moved = self._after_lanes(clients)
            off = _farthest(start, expected, moved)
        except Exception as error:
            self._notes.append(one_by_one_note(f"a first tile of them failed ({first_line(error)})"))
            return self._chosen("loop")
        allowed = _TOLERANCE.get(start[clients[0]].dtype, 1e-4)
        # Also where it is NaN: values that are not finite prove nothing.
        if not off <= allowed:
            rounded = self._after_loop(clients, rounded=True)
            of_rounding = _farthest(start, expected, rounded)
            allowed = max(allowed, min(_TIMES_ROUNDING * of_rounding, _FARTHEST))
        if not off <= allowed:
            self._notes.append(
                one_by_one_note(f"a first tile of them is off by {off:.1e} of the move, and {allowed:.0e} is allowed")
            )
            return self._chosen("loop", off=off)
        return self._chosen("graph" if self._is_recorded(clients, moved) else "lanes", off=off)

    def _chosen(self, kind: str, *, off: float | None = None) -> Stepping:
        width = 1 if kind == "loop" else self._width
        return Stepping(
            kind=kind,
            width=width,
            off=off if off is not None and math.isfinite(off) else None,
            notes=tuple(self._notes),
        )

    def _together(self, locals: Sequence[LocalRound]) -> list[Lane]:
        """Return the lanes that the first tile can have; notes why where there are none."""
        lanes = [lane for local in locals if (lane := local.lane()) is not None]
        refused = {lane.facts.client: lane_refused(self._side, lane) for lane in lanes}
        fitting = [lane for lane in lanes if refused[lane.facts.client] is None]
        self._notes += dict.fromkeys(one_by_one_note(reason) for reason in refused.values() if reason is not None)
        return [lane for lane in fitting if lane.key() == fitting[0].key()]

    def _after_loop(self, clients: Sequence[int], *, rounded: bool = False) -> dict[int, Tensor]:
        """Return each client's values after its steps, one after another; ``rounded``: from other last bits."""
        locals = {local.facts.client: local for local in self._begun()}
        for client in clients:
            vector = locals[client].model.vector
            if rounded:
                vector[::2].mul_(1 + torch.finfo(vector.dtype).eps)
            locals[client].advance()
        return {client: locals[client].model.vector for client in clients}

    def _after_lanes(self, clients: Sequence[int], *, records: bool = False) -> dict[int, Tensor]:
        """Return the values of a first tile's clients after their steps; halves the tile where memory asks for it."""
        while True:
            lanes = {lane.facts.client: lane for local in self._begun() if (lane := local.lane()) is not None}
            tile = [lanes[client] for client in clients[: self._width]]
            try:
                Tile(self._side, tile[0], self._width, records=records).run(tile)
                return {lane.facts.client: lane.vector for lane in tile}
            except Exception as error:
                if not lacks_memory(error) or self._width == 1 or records:
                    raise
            del lanes, lane, tile  # before the same clients begin anew: there is no room for both
            before, self._width = self._width, -(-self._width // 2)
            self._notes.append(f"lanes: {before} do not fit into the device's memory: {self._width} at once")

    def _is_recorded(self, clients: Sequence[int], expected: dict[int, Tensor]) -> bool:
        """Tell whether a recorded step gives the lanes' own bits; notes why not."""
        if not self._settings.records:
            return False
        try:
            moved = self._after_lanes(clients, records=True)
            if not all(torch.equal(moved[client], values) for client, values in expected.items()):
                raise NotRecorded("it gives other values than the step")
        except Exception as error:
            self._notes.append(not_recorded_note(error))
            return False
        return True


def _farthest(start: dict[int, Tensor], expected: dict[int, Tensor], moved: dict[int, Tensor]) -> float:
    """Return how far the client is off whose values are farthest off; NaN where any one's are not finite."""
    offs = [_off(start[client], expected[client], values) for client, values in moved.items()]
    return math.nan if any(map(math.isnan, offs)) else max(offs)


def _off(start: Tensor, expected: Tensor, moved: Tensor) -> float:
    """Return how far values are off others, as a share of the others' move; 0 where they are the same."""
    if torch.equal(expected, moved):
        return 0.0
    return float((moved - expected).norm() / (expected - start).norm())
