"""Messages of a run to its user while a round is under way: sentences that stay, and the progress of long work.

Components write in the process that holds the engine. Where a driver in the same process listens, its observers are
told at once; where the engine is in an actor, its driver takes what there is from time to time.
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
class Messages:
    """Messages since the last time that any were taken.

    Attributes:
        sentences: In their order.
        progress: The newest line on long work; None: nothing new.
    """

    sentences: tuple[str, ...] = ()
    progress: str | None = None

    def pass_to(self, observers: Sequence[Observer]) -> None:
        """Tell observers all of it."""
        for text in self.sentences:
            for observer in observers:
                observer.message(text)
        if self.progress is not None:
            for observer in observers:
                observer.progress(self.progress)


class MessageQueue:
    """Collects messages until they are taken; any thread may add some, and any take them."""

    def __init__(self) -> None:
        self._sentences: deque[str] = deque()
        self._progress: deque[str] = deque(maxlen=1)
        self._observers: Sequence[Observer] | None = None
        # Takers alone wait for each other: a deque's own operations are whole, so whoever adds needs no lock.
        self._taking = threading.Lock()

    def listen(self, observers: Sequence[Observer]) -> None:
        """Pass everything on at once from now on, so that nothing is left to be taken."""
        # First what came so far: observers are told all of it, and in order.
        self.take().pass_to(observers)
        self._observers = observers

    def message(self, text: str) -> None:
        """Add a sentence for the user."""
        if self._observers is None:
            self._sentences.append(text)
        else:
            Messages(sentences=(text,)).pass_to(self._observers)

    def progress(self, text: str) -> None:
        """Replace the line on how far long work is."""
        if self._observers is None:
            self._progress.append(text)
        else:
            Messages(progress=text).pass_to(self._observers)

    def take(self) -> Messages:
        """Take all that came since the last call; each sentence is given out once."""
        with self._taking:
            progress = self._progress.popleft() if self._progress else None
            sentences = []
            while self._sentences:
                sentences.append(self._sentences.popleft())
        return Messages(sentences=tuple(sentences), progress=progress)
