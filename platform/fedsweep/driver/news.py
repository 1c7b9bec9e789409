"""What a run has to say while a round is under way: sentences that stay, and how far long work is.

Components speak in the process that holds the engine. Where a driver in the same process listens, its observers hear at
once; where the engine is in an actor, its driver takes what there is from time to time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsweep.driver.observers import Observer


@dataclass(frozen=True, kw_only=True)
class News:
    """What there is to tell since it was last asked for.

    Attributes:
        messages: Sentences, in order.
        working: The newest line on long work; None: nothing new.
    """

    messages: tuple[str, ...] = ()
    working: str | None = None

    def tell(self, observers: Sequence[Observer]) -> None:
        """Let observers hear all of it."""
        for text in self.messages:
            for observer in observers:
                observer.message(text)
        if self.working is not None:
            for observer in observers:
                observer.working(self.working)


class Bulletin:
    """Collects what is said until somebody takes it; any thread may speak, and any take."""

    def __init__(self) -> None:
        self._messages: deque[str] = deque()
        self._working: deque[str] = deque(maxlen=1)
        self._observers: Sequence[Observer] | None = None
        # Takers alone wait for each other: a deque's own operations are whole, so whoever speaks needs no lock.
        self._taking = threading.Lock()

    def listen(self, observers: Sequence[Observer]) -> None:
        """From now on everything is passed on at once, and nothing is left to be taken."""
        # First what was said so far: observers hear all of it, and in order.
        self.take().tell(observers)
        self._observers = observers

    def message(self, text: str) -> None:
        """A sentence for the user."""
        if self._observers is None:
            self._messages.append(text)
        else:
            News(messages=(text,)).tell(self._observers)

    def working(self, text: str) -> None:
        """How far long work is."""
        if self._observers is None:
            self._working.append(text)
        else:
            News(working=text).tell(self._observers)

    def take(self) -> News:
        """What was said since the last call; each sentence is given out once."""
        with self._taking:
            working = self._working.popleft() if self._working else None
            messages = []
            while self._messages:
                messages.append(self._messages.popleft())
        return News(messages=tuple(messages), working=working)
