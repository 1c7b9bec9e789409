"""What a run has to say while a round is under way: sentences that stay, and how far long work is.

Components speak in the process that holds the engine. Where a driver in the same process listens, it hears at once;
where the engine is in an actor, its driver takes what there is from time to time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Audience:
    """Who hears of a run.

    Attributes:
        message: Takes a sentence for the user.
        working: Takes a line on how far long work inside a round is; it replaces the one before.
    """

    message: Callable[[str], None]
    working: Callable[[str], None]

    def hear(self, news: News) -> None:
        """Pass on what was taken from a bulletin."""
        for text in news.messages:
            self.message(text)
        if news.working is not None:
            self.working(news.working)


@dataclass(frozen=True, kw_only=True)
class News:
    """What there is to tell since it was last asked for.

    Attributes:
        messages: Sentences, in order.
        working: The newest line on long work; None: nothing new.
    """

    messages: tuple[str, ...] = ()
    working: str | None = None


class Bulletin:
    """Collects what is said until somebody takes it; any thread may speak, and any take."""

    def __init__(self) -> None:
        self._messages: deque[str] = deque()
        self._working: deque[str] = deque(maxlen=1)
        self._audience: Audience | None = None
        self._taking = threading.Lock()

    def listen(self, audience: Audience) -> None:
        """From now on everything is passed on at once, and nothing is left to be taken."""
        audience.hear(self.take())
        self._audience = audience

    def message(self, text: str) -> None:
        """A sentence for the user."""
        if self._audience is None:
            self._messages.append(text)
        else:
            self._audience.message(text)

    def working(self, text: str) -> None:
        """How far long work is."""
        if self._audience is None:
            self._working.append(text)
        else:
            self._audience.working(text)

    def take(self) -> News:
        """What was said since the last call; each sentence is given out once."""
        with self._taking:
            working = self._working.popleft() if self._working else None
            messages = []
            while self._messages:
                messages.append(self._messages.popleft())
        return News(messages=tuple(messages), working=working)
