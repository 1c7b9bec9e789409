"""What may watch a run: observers are told of its moments in order and can change nothing.

An observer's own trouble (a server that is gone) must never end a run: hooks raise for programming errors alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from fedsweep.records import RoundRecord


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What an observer learns when a run starts.

    Attributes:
        name: The run's name.
        folder: Its folder.
        config: The resolved configuration, flat, under dotted names.
        tags: Short facts by name: git commit, configuration hash, method, data set.
        planned_rounds: Rounds that the run is planned for.
        resumed_from: The last round that is done already; None for a run from the start.
        records: The rounds done already, from the first; empty for a run from the start.
        targets: Test accuracies whose first crossing is of interest.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    tags: Mapping[str, str] = field(default_factory=dict)
    planned_rounds: int
    resumed_from: int | None = None
    records: Sequence[RoundRecord] = ()
    targets: Sequence[float] = ()


class Observer(ABC):
    """Watches a run: ``check``, then ``started``, rounds and checkpoints as they come, and last ``finished``.

    Attributes:
        phase: What its work after the last round counts as, in a result's ``timing``.
    """

    phase: ClassVar[str] = "observers"

    def check(self) -> None:
        """Makes sure, before anything is written, that the run can be watched.

        Raises:
            ResourceError: What the observer needs is not there.
        """
        return

    @abstractmethod
    def started(self, info: RunInfo) -> None:
        """The run starts or goes on, after its folder and ``config.yaml`` are written."""

    @abstractmethod
    def round_done(self, record: RoundRecord) -> None:
        """A round is done and evaluated."""

    @abstractmethod
    def checkpointed(self, round: int) -> None:
        """A checkpoint that holds this round is on disk."""

    def message(self, text: str) -> None:
        """A sentence for the user, about a lost worker say; may come in the middle of a round."""
        return

    def working(self, text: str) -> None:
        """How far long work inside a round is; each line replaces the one before, and many come."""
        return

    @abstractmethod
    def finished(self, status: str, result: Mapping[str, Any]) -> None:
        """The run is over and its files are written.

        Args:
            status: How it ended: ``finished``, ``failed`` or ``killed``.
            result: The content of ``result.json``.
        """


class InMemory(Observer):
    """Keeps what it is told, for tests and notebooks.

    Attributes:
        info: What the run started with; None before.
        records: The rounds, those of before a resume included.
        checkpoints: The rounds that were checkpointed.
        messages: Sentences for the user.
        lines: On how far long work was.
        status: How the run ended; None before.
        result: The result; empty before.
    """

    def __init__(self) -> None:
        self.info: RunInfo | None = None
        self.records: list[RoundRecord] = []
        self.checkpoints: list[int] = []
        self.messages: list[str] = []
        self.lines: list[str] = []
        self.status: str | None = None
        self.result: Mapping[str, Any] = {}

    def started(self, info: RunInfo) -> None:
        self.info = info
        self.records = list(info.records)

    def round_done(self, record: RoundRecord) -> None:
        self.records.append(record)

    def checkpointed(self, round: int) -> None:
        self.checkpoints.append(round)

    def message(self, text: str) -> None:
        self.messages.append(text)

    def working(self, text: str) -> None:
        self.lines.append(text)

    def finished(self, status: str, result: Mapping[str, Any]) -> None:
        self.status, self.result = status, dict(result)
