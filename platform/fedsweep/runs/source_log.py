"""The sources and machines that played a run's rounds: ``sources.json``.

It is written before round 1 and where others go on with the run.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedsweep.errors import ConfigError, OutputError
from fedsweep.runs.checkpoints.checkpoint import newest_round
from fedsweep.runs.checkpoints.earlier import read_earlier
from fedsweep.runs.facts import computed_by
from fedsweep.runs.files import SOURCES, TRACKING, read_json, read_note, write_file
from fedsweep.runs.run_folder import RESULT, RunFolder
from fedsweep.runs.sources import Sources, changes

ALLOW = "--allow-changed-code"


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Rounds that the same sources played, on machines of one kind.

    Attributes:
        first_round: The first of them, from 1.
        sources: The sources, see :func:`~fedsweep.runs.sources.sources_of`.
        changed: What had changed since the stretch before, in words; empty in the first, unless what began the run
            is not known.
        machine: CPU and libraries, see :func:`~fedsweep.runs.facts.computed_by`; empty where the run does not say.
    """

    first_round: int
    sources: Sources
    changed: str = ""
    machine: str = ""


def forget_other_rounds(folder: Path, sources: Sources, *, config_hash: str) -> None:
    """Remove what a run without a checkpoint tells of rounds that it now plays otherwise.

    Its run in MLflow stays as it ended, and it gets another: what a store has of a round can't be replaced.

    Args:
        folder: The run folder; exists.
        sources: The sources that are here.
        config_hash: Of the configuration that is here.
    """
    if newest_round(folder) is not None:
        return
    before, log = read_note(folder / RESULT).get("config_hash"), tuple[Stretch, ...]()
    with contextlib.suppress(OutputError):  # a damaged one is written anew
        log = read_log(folder)
    is_same = before in (None, config_hash, *read_earlier(folder))
    if not is_same or (log and changes(log[-1].sources, sources)):
        RunFolder(folder).forget_rounds()


def begin_log(folder: Path, sources: Sources, *, resume: bool, allow_changed: bool) -> None:
    """Note down which sources are about to play a run.

    Where others have played rounds since the newest checkpoint, the run gets another in MLflow, as in
    :func:`forget_other_rounds`.

    Args:
        folder: The run folder; exists.
        sources: The sources that are here.
        resume: The run may go on from a checkpoint that other sources wrote.
        allow_changed: Let it.

    Raises:
        ConfigError: It would go on with other sources, which is not allowed; nothing is written.
        OutputError: The log is damaged, or can't be written.
    """
    newest, machine = newest_round(folder) if resume else None, computed_by()
    stretches = _begun(folder, newest)
    if newest is None:
        stretches = [Stretch(first_round=1, sources=sources, machine=machine)]
    elif changed := changes(stretches[-1].sources if stretches else None, sources):
        if not allow_changed:
            raise ConfigError(refusal(folder, changed))
        stretches.append(Stretch(first_round=newest + 1, sources=sources, changed=changed, machine=machine))
    elif stretches[-1].machine != machine:
        stretches.append(Stretch(first_round=newest + 1, sources=sources, machine=machine))
    if newest is not None and _others_were_further(folder, newest, sources):
        (folder / TRACKING).unlink(missing_ok=True)
    write_file(folder / SOURCES, f"{json.dumps([*map(vars, stretches)], indent=1)}\n".encode())


def _others_were_further(folder: Path, newest: int, sources: Sources) -> bool:
    """Check if other sources have played rounds since a run's newest checkpoint."""
    log, run = read_log(folder), RunFolder(folder)
    if not log or not changes(log[-1].sources, sources):
        return False
    with contextlib.suppress(OutputError):  # a damaged table is written anew, and nothing was sent of it
        return run.has_rounds() and len(run.read_rounds()) > newest
    return False


def changes_on_the_way(folder: Path) -> list[str]:
    """Return a sentence for each time that a run went on with other sources; raises as :func:`read_log`."""
    later = [stretch for stretch in read_log(folder) if stretch.changed]
    return [f"from round {stretch.first_round} on, other code played it ({stretch.changed})" for stretch in later]


def machines_on_the_way(folder: Path) -> list[str]:
    """Return a sentence for each time that another kind of machine went on; raises as :func:`read_log`."""
    stretches = read_log(folder)
    return [
        f"from round {later.first_round} on it was driven by {later.machine}, before by {earlier.machine}: last digits"
        " may not be those of an unbroken run"
        for earlier, later in pairwise(stretches)
        if earlier.machine and later.machine != earlier.machine
    ]


def changed_since(folder: Path, sources: Sources) -> str:
    """Describe changes since a run's newest round was played, in words; empty: nothing, or none has been played.

    Raises:
        OutputError: The log is damaged.
    """
    if (newest := newest_round(folder)) is None:
        return ""
    stretches = _begun(folder, newest)
    return changes(stretches[-1].sources if stretches else None, sources)


def _begun(folder: Path, newest: int | None) -> list[Stretch]:
    """Return the stretches by the newest checkpoint's round: who was to go on may have been stopped before the next."""
    # Of the first round a checkpoint has work that was begun.
    return [] if newest is None else [each for each in read_log(folder) if each.first_round <= max(1, newest)]


def refusal(folder: Path, changed: str) -> str:
    """Return the sentence with which a run of other sources is not gone on with."""
    return (
        f"{folder} was made by other code or files ({changed}), and a run of two repeats nowhere; begin a new run,"
        f" bring back what it was begun with, or go on all the same with {ALLOW}, which its result will say"
    )


def read_log(folder: Path) -> tuple[Stretch, ...]:
    """Read the stretches of :func:`begin_log`; none where the run says nothing of its sources.

    Raises:
        OutputError: The file is damaged.
    """
    path = folder / SOURCES
    if not os.path.lexists(path):
        return ()
    entries = read_json(path)
    if not isinstance(entries, list) or not all(map(_is_stretch, entries)):
        raise OutputError(f"{path}: it must be a list of rounds with the hashes of their sources")
    return tuple(Stretch(**entry) for entry in entries)


def _is_stretch(entry: Any) -> bool:
    if not isinstance(entry, Mapping) or set(entry) | {"machine"} != {"first_round", "sources", "changed", "machine"}:
        return False
    sources, own = entry["sources"], [entry["changed"], entry.get("machine", "")]
    texts = [*own, *sources, *sources.values()] if isinstance(sources, Mapping) else [None]
    return type(entry["first_round"]) is int and all(isinstance(text, str) for text in texts)
