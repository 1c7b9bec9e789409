"""A run's drift and participation as arrays of clients by rounds, from what its folder keeps.

The figures come from ``scenario.json`` (who was there, with which classes), ``clients.parquet`` (what each client
holds) and ``rounds.parquet`` (who trained, whose model was aggregated).

Shape letters: N clients, R rounds, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from fedsweep.errors import OutputError
from fedsweep.figures.groups import counts_of
from fedsweep.results.view import RunView
from fedsweep.runs.run_folder import CLIENTS, SCENARIO, RunFolder
from fedsweep.world.replay import ScenarioTrace
from fedsweep.world.spec_checks import read_text


class Part(IntEnum):
    """What a client did in a round; the later, the more of it reached the server."""

    ABSENT = 0
    """Not there."""
    THERE = 1
    """There, but not in the cohort, or without samples of its classes."""
    TRAINED = 2
    """Trained; its model was not aggregated in this round."""
    AGGREGATED = 3
    """Trained, and its model is in the round's last aggregation."""
    DELIVERED = 4
    """Did not train, but what it had trained in earlier rounds was aggregated."""


@dataclass(frozen=True, kw_only=True)
class Participation:
    """Who took part, by round.

    Attributes:
        rounds: The rounds' numbers [R].
        parts_NR: A :class:`Part` for each client and round [N, R], int8.
        aggregated_R: Whether something was aggregated in the round [R].
        bytes_R: Sent in the round, both ways [R], int64.
    """

    rounds: tuple[int, ...]
    parts_NR: np.ndarray
    aggregated_R: np.ndarray
    bytes_R: np.ndarray

    @property
    def num_aggregated(self) -> int:
        """Rounds in which something was aggregated."""
        return int(self.aggregated_R.sum())

    @property
    def num_saved(self) -> int:
        """Rounds in which clients trained and nothing was aggregated."""
        trained_R = np.isin(self.parts_NR, (Part.TRAINED, Part.AGGREGATED)).any(axis=0)
        return int((trained_R & ~self.aggregated_R).sum())


def participation_of(run: RunView) -> Participation | None:
    """Who was there, who trained and who was aggregated in a run; None where no round was played.

    Without ``scenario.availability`` everybody is there in every round.

    Args:
        run: A run.

    Raises:
        OutputError: A row names a client that the run does not have.
    """
    rounds = tuple(run.column("round"))
    if not rounds:
        return None
    cohorts, attendees, present = (run.column(name) for name in ("cohort", "attendees", "present"))
    num_clients = _num_clients(run)
    parts_NR = np.full((num_clients, len(rounds)), Part.ABSENT, dtype=np.int8)
    for place in range(len(rounds)):
        there = present[place] if present else None
        everybody = range(num_clients) if there is None else there
        trained, aggregated = set(cohorts[place] or ()), set(attendees[place] or ())
        named = {*everybody, *trained, *aggregated}
        if named and not 0 <= min(named) <= max(named) < num_clients:
            raise OutputError(
                f"{run.folder}: round {rounds[place]} names client {max(named)}, but there are {num_clients} clients"
            )
        parts_NR[list(everybody), place] = Part.THERE
        parts_NR[sorted(trained - aggregated), place] = Part.TRAINED
        parts_NR[sorted(trained & aggregated), place] = Part.AGGREGATED
        parts_NR[sorted(aggregated - trained), place] = Part.DELIVERED
    return Participation(
        rounds=rounds,
        parts_NR=parts_NR,
        aggregated_R=np.array([bool(clients) for clients in attendees]),
        bytes_R=np.array(run.column("bytes_up"), dtype=np.int64) + np.array(run.column("bytes_down"), dtype=np.int64),
    )


def class_shares(
    counts_NC: np.ndarray,
    class_sets: Sequence[Mapping[int, Sequence[int]]],
    *,
    clients: Sequence[int] | None = None,
) -> np.ndarray:
    """Each class's share of a client's samples in a round [N, R, C], float32; zeros where a client has none.

    Args:
        counts_NC: Samples per client and class [N, C], before the drift filters them.
        class_sets: For each round, each client's classes; a client that is not named has all of them.
        clients: Only these clients, in this order; None: all.
    """
    chosen = range(len(counts_NC)) if clients is None else clients
    num_classes = counts_NC.shape[1]
    shares_NRC = np.zeros((len(chosen), len(class_sets), num_classes), dtype=np.float32)
    for place, sets in enumerate(class_sets):
        kept_NC = np.array(counts_NC[list(chosen)], dtype=np.float64)
        for row, client in enumerate(chosen):
            if client in sets:
                kept_NC[row, np.setdiff1d(np.arange(num_classes), np.asarray(sets[client], dtype=np.int64))] = 0
        shares_NRC[:, place] = kept_NC / np.maximum(kept_NC.sum(axis=1, keepdims=True), 1)
    return shares_NRC


def class_shares_of(run: RunView, *, clients: Sequence[int] | None = None) -> np.ndarray | None:
    """:func:`class_shares` of a run [N, R, C]; None where it has no drift or no table of clients yet.

    Args:
        run: A run.
        clients: Only these clients, in this order; None: all.

    Raises:
        InputError: A file of the run is damaged, or two of them contradict each other.
    """
    trace = trace_of(run)
    counts_NC = counts_of(run) if trace is not None and any(trace.class_sets) else None
    if trace is None or counts_NC is None:
        return None
    if counts_NC.shape != (trace.num_clients, trace.num_classes):
        raise OutputError(
            f"{run.folder}: {SCENARIO} has {trace.num_clients} clients and {trace.num_classes} classes, but {CLIENTS}"
            f" has {list(counts_NC.shape)}"
        )
    return class_shares(counts_NC, trace.class_sets, clients=clients)


def trace_of(run: RunView) -> ScenarioTrace | None:
    """The scenario that a run met; None where the world stays as it is.

    Args:
        run: A run.

    Raises:
        InputError: ``scenario.json`` can't be read or is damaged.
    """
    path = run.folder / SCENARIO
    if not path.is_file():
        return None
    return ScenarioTrace.from_json(read_text(SCENARIO, path), source=str(path))


def _num_clients(run: RunView) -> int:
    if (run.folder / CLIENTS).is_file():
        return int(RunFolder(run.folder).read_clients().num_rows)
    lists = (cell for name in ("cohort", "attendees", "present") for cell in run.column(name))
    return max((client for cell in lists for client in cell or ()), default=-1) + 1
