"""Observers of a run: they are told of its moments in order and can change nothing.

An observer's own trouble (a server that is gone) must never end a run: hooks raise for programming errors alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.records import RoundRecord


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The facts of a run that an observer gets at its start.

    Attributes:
        name: The run's name.
        folder: Its folder.
        config: The resolved configuration, flat, under dotted names.
        tags: Short facts by name: git commit, configuration hash, method, data set.
        planned_rounds: Rounds that the run is planned for.
        resumed_from: The last round that is done already; None for a run from the start.
        records: The rounds done already, from the first; empty for a run from the start.
        targets: Test accuracies whose first crossing is of interest.
        backend: Where it runs, and why, in words; may be empty.
    """

    name: str
    folder: Path
    config: Mapping[str, Any]
    tags: Mapping[str, str] = field(default_factory=dict)
    planned_rounds: int
    resumed_from: int | None = None
    records: Sequence[RoundRecord] = ()
    targets: Sequence[float] = ()
    backend: str = ""


def run_tags(config: Config, *, method: str, git_commit: str | None = None) -> dict[str, str]:
    """Return the tags of a run.

    Args:
        config: Its configuration, resolved.
        method: Its method's name; merged ones joined by plus signs.
        git_commit: Of the code, where that is known.
    """
    from fedsweep.catalog import merged_title  # with torch, which what is shown at first does without

    return {
        **({"fedsweep.git_commit": git_commit} if git_commit else {}),
        "fedsweep.config_hash": config.hash(),
        "fedsweep.method": method,
        "fedsweep.dataset": config.scenario.dataset,
        "fedsweep.setting": merged_title(method.split("+")),
        "fedsweep.seed": str(config.seed),
    }


def method_name(config: Config) -> str:
    """Return the method's name; merged ones joined by plus signs."""
    spec = config.method
    parts = [spec] if "name" in spec else spec["merge"]
    return "+".join(str(part["name"]) for part in parts)


class Observer:
    """Watches a run: ``check``, then ``started``, rounds and checkpoints as they come, and last ``finished``.

    One overrides what it cares about.

    Attributes:
        phase: What its work after the last round counts as, in a result's ``timing``.
    """

    phase: ClassVar[str] = "observers"

    def check(self) -> None:
        """Make sure, before anything is written, that the run can be watched.

        Raises:
            ResourceError: What the observer needs is not there.
        """

    def started(self, info: RunInfo) -> None:
        """Note that the run starts or goes on, after its folder and ``config.yaml`` are written."""

    def round_done(self, record: RoundRecord) -> None:
        """Note that a round is done and evaluated."""

    def checkpointed(self, round: int) -> None:
        """Note that a checkpoint that holds this round is on disk."""

    def message(self, text: str) -> None:
        """Take a sentence for the user, about a lost worker say; may come in the middle of a round."""

    def progress(self, text: str) -> None:
        """Show the progress of long work inside a round; each line replaces the one before, and many come."""

    def finished(self, status: str, result: Mapping[str, Any]) -> None:
        """Note that the run is over and its files are written.

        Args:
            status: How it ended: ``finished``, ``failed`` or ``killed``.
            result: The content of ``result.json``.
        """
