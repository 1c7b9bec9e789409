"""Runs of one process whose clients share tiles, such as the seeds of one setting.

Each run's work is done in a thread, of which one goes on at a time: until its clients are to be stepped, when it waits
for the others, or to its end. Where all wait, the clients of all are stepped, in tiles as wide as those that each run
has alone, so a run's bits are those that it has alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import torch

from fedsweep.client.lanes.grouping import Lanes
from fedsweep.client.lanes.lane import Lane, LaneSteps
from fedsweep.client.messages import ClientSide, LaneSettings

_Outcome = TypeVar("_Outcome")
# What runs must have in common, beside the network, for one step to take the clients of both.
OF_METHOD = ("objective", "terms", "solver")
_COMMON = (*OF_METHOD, "optimizer", "task", "device", "track_accuracy")


class Together:
    """Plays runs side by side in this process, so that their clients are stepped together."""

    def __init__(self) -> None:
        self._pools: list[tuple[Hashable, ClientSide, LaneSettings, Lanes]] = []

    def lanes(self, network: Hashable) -> MakeLanes:
        """Return what makes a run's lanes.

        Args:
            network: Equal for runs whose networks differ in their values alone.
        """

        def make(side: ClientSide, settings: LaneSettings) -> SharedLanes:
            for other, its_side, its_settings, pool in self._pools:
                if other == network and its_settings == settings and are_alike(its_side, side, _COMMON):
                    return SharedLanes(pool)
            self._pools.append((network, side, settings, Lanes(side, settings)))
            return SharedLanes(self._pools[-1][-1])

        return make

    @staticmethod
    def play(works: Sequence[Callable[[], _Outcome]]) -> list[_Outcome | Exception]:
        """Do each run's piece of work; returns in their order what came of them, or what was raised."""
        parts = [_Part(work) for work in works]
        for part in parts:
            part.start()
            part.go_on()
        while waiting := [part for part in parts if part.pool is not None]:
            for pool in {id(part.pool): part.pool for part in waiting}.values():
                assert pool is not None
                _step([part for part in waiting if part.pool is pool], pool)
            for part in waiting:
                part.go_on()
        return [part.outcome() for part in parts]


class SharedLanes:
    """A run's way to lanes that it shares with others; outside of :meth:`Together.play` it has them alone.

    Args:
        pool: The lanes.
    """

    def __init__(self, pool: Lanes) -> None:
        self._pool = pool

    @property
    def all_notes(self) -> tuple[str, ...]:
        """List all that could not be done in lanes, for whichever run."""
        return self._pool.all_notes

    def take(self, lanes: Sequence[Lane]) -> Mapping[Lane, LaneSteps]:
        """Take the steps that are due, see :meth:`Lanes.take`."""
        part = threading.current_thread()
        if not lanes or not isinstance(part, _Part):
            return self._pool.take(lanes)
        return part.wait_for(self._pool, lanes)


MakeLanes = Callable[[ClientSide, LaneSettings], Lanes | SharedLanes]


class _Part(threading.Thread, Generic[_Outcome]):
    """A run's work, which goes on only when it is told to.

    Attributes:
        pool: The lanes that it waits for; None: it does not wait.
        due: Its clients' parts in them.
        taken: What came of these, or why nothing did.
    """

    def __init__(self, work: Callable[[], _Outcome]) -> None:
        super().__init__(daemon=True)  # whoever gives up playing leaves it waiting
        self._work, self._num_threads = work, torch.get_num_threads()
        self._goes, self._rests = threading.Semaphore(0), threading.Semaphore(0)
        self._outcomes: list[_Outcome | Exception] = []
        self.pool: Lanes | None = None
        self.due: Sequence[Lane] = ()
        self.taken: Mapping[Lane, LaneSteps] | Exception = {}

    def run(self) -> None:
        self._goes.acquire()
        # How many there are shows in the bits, and a new thread has as many as the machine until it is told.
        torch.set_num_threads(self._num_threads)
        try:
            self._outcomes.append(self._work())
        except Exception as error:
            self._outcomes.append(error)
        finally:
            self._rests.release()

    def go_on(self) -> None:
        """Let it work until it waits or ends."""
        self.pool = None
        self._goes.release()
        self._rests.acquire()

    def wait_for(self, pool: Lanes, lanes: Sequence[Lane]) -> Mapping[Lane, LaneSteps]:
        """Wait, in its own thread, until clients have been stepped."""
        self.pool, self.due = pool, lanes
        self._rests.release()
        self._goes.acquire()
        if isinstance(self.taken, Exception):
            raise self.taken
        return self.taken

    def outcome(self) -> _Outcome | Exception:
        """Return what came of the work."""
        if not self._outcomes:
            raise SystemExit("a run's thread was ended")  # by what is no Exception: the process is to end
        return self._outcomes[0]


def _step(parts: Sequence[_Part[_Outcome]], pool: Lanes) -> None:
    """Step the clients of all parts that wait for the same lanes."""
    try:
        taken = pool.take([lane for part in parts for lane in part.due])
    except Exception as error:
        for part in parts:
            part.taken = error
        return
    for part in parts:
        part.taken = {lane: taken[lane] for lane in part.due if lane in taken}


def are_alike(one: object, other: object, names: Sequence[str]) -> bool:
    """Tell whether two objects have equal attributes of these names; of what can't be compared they have not."""
    try:
        return all(bool(getattr(one, name) == getattr(other, name)) for name in names)
    except (RuntimeError, ValueError):  # of tensors and arrays nobody can tell in a word whether they are equal
        return False
