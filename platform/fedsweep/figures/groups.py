"""The high-frequency group by round, as arrays for pictures: who is in it, what labels its members hold together.

Shape letters: N clients, R rounds, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedsweep.errors import OutputError
from fedsweep.results.view import RunView
from fedsweep.runs.run_folder import CLIENTS, RunFolder
from fedsweep.world.label_stats import population

OUTSIDE, COHORT, HIGH = 0, 1, 2
GROUP_LOOKS = {
    OUTSIDE: ("not chosen", "#FFFFFF"),
    COHORT: ("low-frequency", "#9CC7E4"),
    HIGH: ("high-frequency", "#D55E00"),
}


@dataclass(frozen=True, kw_only=True)
class GroupLabels:
    """The labels of a round's two groups together.

    Attributes:
        high_RC: Class shares of the high-frequency group [R, C], of the rounds that have one; rows sum to 1.
        low_RC: Of the rest of the cohort, of the rounds that have a rest.
        population_C: Of all clients.
    """

    high_RC: np.ndarray
    low_RC: np.ndarray
    population_C: np.ndarray


def has_group(run: RunView) -> bool:
    """Check that some client was in a high-frequency group in some round."""
    return any(run.column("high_frequency"))


def membership_of(run: RunView, *, num_clients: int | None = None) -> np.ndarray:
    """Mark clients in the cohort and in the high-frequency group [N, R], int8.

    Args:
        run: A run with rounds.
        num_clients: N; None: as the configuration has it, or as many as were seen.

    Returns:
        0: not chosen, 1: in the cohort, 2: in the high-frequency group.

    Raises:
        OutputError: A row names a client that there is not.
    """
    cohorts, groups = run.column("cohort"), run.column("high_frequency")
    seen = max((client for cohort in cohorts for client in cohort or ()), default=-1) + 1
    configured = run.config.get("scenario", {}).get("clients")
    count = num_clients or (configured if isinstance(configured, int) else seen)
    cells_NR = np.full((count, len(cohorts)), OUTSIDE, dtype=np.int8)
    for place, cohort in enumerate(cohorts):
        group = groups[place] if groups else None
        for clients, level in ((cohort or (), COHORT), (group or (), HIGH)):
            if clients and not 0 <= min(clients) <= max(clients) < count:
                raise OutputError(
                    f"{run.folder}: round {place + 1} names client {max(clients)}, but there are {count} clients"
                )
            cells_NR[list(clients), place] = level
    return cells_NR


def group_labels_of(run: RunView, counts_NC: np.ndarray) -> GroupLabels | None:
    """Return the label distributions of a run's groups, from its clients' samples per class [N, C].

    None where no round has a high-frequency group.

    Raises:
        OutputError: A row names a client that there is not.
    """
    cells_NR = membership_of(run, num_clients=len(counts_NC))
    if not (cells_NR == HIGH).any():
        return None
    return GroupLabels(
        high_RC=_shares((cells_NR == HIGH).T @ counts_NC),
        low_RC=_shares((cells_NR == COHORT).T @ counts_NC),
        population_C=population(counts_NC),
    )


def counts_of(run: RunView) -> np.ndarray | None:
    """Return samples per client and class [N, C] from a run's folder; None where it has no table of clients.

    Raises:
        OutputError: The table is damaged.
    """
    if not (run.folder / CLIENTS).is_file():
        return None
    rows = RunFolder(run.folder).read_clients().column("label_counts").to_pylist()
    if not rows or not all(isinstance(row, list) and row and len(row) == len(rows[0]) for row in rows):
        raise OutputError(f"{run.folder / CLIENTS}: label_counts must be lists of one length")
    if not all(type(count) is int and 0 <= count < 2**53 for row in rows for count in row):
        raise OutputError(f"{run.folder / CLIENTS}: label_counts must hold whole numbers from 0 on")
    return np.array(rows, dtype=np.int64)


def _shares(sums_RC: np.ndarray) -> np.ndarray:
    """Return shares of the rounds that have samples."""
    totals_R = sums_RC.sum(axis=1)
    shares: np.ndarray = sums_RC[totals_R > 0] / totals_R[totals_R > 0, None]
    return shares
