"""Populations that are drawn: client k follows from the seed and k, and nothing of anybody is stored.

Such a population costs what is asked of it: a cohort, not the number of clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

_Item = TypeVar("_Item")
# So many items are kept, for those who ask twice in a round; they are small.
_KEPT = 4096
# Candidates are drawn in lots of this size, at least; few are refused where most clients are there.
_FEWEST_CANDIDATES = 32


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn(Sequence[_Item]):
    """A sequence whose items are made when they are asked for.

    Attributes:
        length: Its length.
        build: Makes the item at a place, 0 .. length - 1; the same each time.
    """

    length: int
    build: Callable[[int], _Item]

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, place: int) -> _Item: ...

    @overload
    def __getitem__(self, place: slice) -> list[_Item]: ...

    def __getitem__(self, place: int | slice) -> _Item | list[_Item]:
        if isinstance(place, slice):
            return [self[k] for k in range(*place.indices(self.length))]
        whole = int(place) + (self.length if place < 0 else 0)
        if not 0 <= whole < self.length:
            raise IndexError(f"place {place} of {self.length}")
        if "_made" not in self.__dict__:
            object.__setattr__(self, "_made", lru_cache(_KEPT)(self.build))
        item: _Item = self.__dict__["_made"](whole)
        return item

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_made"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Split(Sequence[NDArray[np.int64]]):
    """The samples of clients that data are split between: one array of indices, and where each client's end.

    Attributes:
        flat: All indices, client by client [S].
        ends: Where each client's end in it [N].
    """

    flat: NDArray[np.int64]
    ends: NDArray[np.int64]

    @classmethod
    def of(cls, parts: Sequence[NDArray[np.int64]]) -> Split:
        """Put clients' arrays one behind the other."""
        flat = np.concatenate(parts).astype(np.int64, copy=False)  # an empty list is one of floats
        return cls(flat=flat, ends=np.cumsum([len(part) for part in parts]))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Each client's number of samples [N]."""
        return np.diff(self.ends, prepend=0)

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, place: int) -> NDArray[np.int64]: ...

    @overload
    def __getitem__(self, place: slice) -> list[NDArray[np.int64]]: ...

    def __getitem__(self, place: int | slice) -> NDArray[np.int64] | list[NDArray[np.int64]]:
        if isinstance(place, slice):
            return [self[k] for k in range(*place.indices(len(self)))]
        client = range(len(self))[place]
        return self.flat[int(self.ends[client - 1]) if client else 0 : int(self.ends[client])]


@dataclass(frozen=True, kw_only=True, eq=False)
class DrawnPresence(Sequence[int]):
    """The clients of a drawn population that are there and have data; each is asked when somebody wants to know.

    Its length is that of the population: who is there, nobody counts.

    Attributes:
        length: Clients of the population.
        is_there: Tells it of one client.
    """

    length: int
    is_there: Callable[[int], bool]

    def __len__(self) -> int:
        return self.length

    def __contains__(self, client: object) -> bool:
        return isinstance(client, int | np.integer) and 0 <= int(client) < self.length and self.is_there(int(client))

    def __iter__(self) -> Iterator[int]:
        """Ask everybody: for those who cannot do without, in time that goes with the population."""
        return (client for client in range(self.length) if self.is_there(client))

    def __getitem__(self, place: Any) -> Any:
        raise TypeError("who is there in a drawn population is not listed: draw from it, or ask for a client")

    def draw(self, size: int, generator: np.random.Generator) -> tuple[int, ...]:
        """Draw clients uniformly without replacement among those that are there, ascending.

        By rejection: candidates are drawn from all, and who is not there is passed over. Of fewer than ``size`` that
        are there, all come.
        """
        order = _distinct(self.length, generator)
        chosen: list[int] = []
        for client in order:
            if self.is_there(client):
                chosen.append(client)
            if len(chosen) == size:
                break
        return tuple(sorted(chosen))


def _distinct(count: int, generator: np.random.Generator) -> Iterator[int]:
    """Yield the numbers below ``count`` in a random order, each once, as if all were shuffled."""
    seen: set[int] = set()
    lot = _FEWEST_CANDIDATES
    while 2 * len(seen) < count:
        for number in generator.integers(count, size=lot).tolist():
            if number not in seen:
                seen.add(number)
                yield number
        lot = min(2 * lot, count)
    rest: NDArray[np.int64] = np.setdiff1d(np.arange(count), np.fromiter(seen, np.int64, len(seen)))
    yield from generator.permutation(rest).tolist()
