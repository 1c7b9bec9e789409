"""Tables of clients, where a test is about something else that reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedsweep.records import ClientProfile
from fedsweep.runs.run_folder import CLIENTS, RunFolder
from fedsweep.runs.tables.clients import clients_table


def profiles_of(label_counts_NC: Sequence[Sequence[int]] | np.ndarray) -> list[ClientProfile]:
    """Clients by what they hold of each class."""
    rows = enumerate(np.asarray(label_counts_NC, dtype=np.int64))
    return [ClientProfile(client=k, num_samples=int(row.sum()), label_counts=row) for k, row in rows]


def write_clients(folder: RunFolder, label_counts_NC: Sequence[Sequence[int]] | np.ndarray) -> None:
    """The table of clients that hold so many samples of each class."""
    folder.write_table(CLIENTS, clients_table(profiles_of(label_counts_NC)))
