"""``client_accuracy.parquet``: how good the tested models are for each client, over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedsweep.engine.who_pays import client_accuracies, present_counts
from fedsweep.experiment.experiment import Experiment
from fedsweep.records import RoundRecord
from fedsweep.world.label_stats import label_counts

if TYPE_CHECKING:
    import pyarrow as pa

NAMES = ("round", "client", "accuracy", "samples", "personal_accuracy", "personal_samples")


def accuracy_table(experiment: Experiment, records: Sequence[RoundRecord]) -> pa.Table | None:
    """A row for each client in each round that tells clients' accuracies; None where no round does.

    ``accuracy`` is the server's tested model's on the classes of the client's own, by their shares in its data, over
    ``samples`` test samples of these classes. ``personal_accuracy`` is that of the model that the client itself would
    use, on the ``personal_samples`` of its own share of the test set. Both are null where there is no such test.

    Args:
        experiment: Whose clients they are.
        records: The rounds.
    """
    import pyarrow as pa

    rows = [row for row in records if row.class_accuracies is not None or row.personal_accuracies is not None]
    if not rows:
        return None
    # Counts stand beside NaN in columns of floats: they are exact up to 2^53.
    cells = np.concatenate([_cells(experiment, row) for row in rows])
    kinds = [pa.float64() if name.endswith("accuracy") else pa.int64() for name in NAMES]
    columns = [pa.array(cells[:, place], from_pandas=True).cast(kind) for place, kind in enumerate(kinds)]
    return pa.table(dict(zip(NAMES, columns, strict=True)))


def _cells(experiment: Experiment, row: RoundRecord) -> np.ndarray:
    """A round's cells [N, columns], NaN for what is null."""
    world, classes = experiment.world, experiment.classes(row.round)
    num_classes = world.data.num_classes
    cells = np.full((len(world.profiles), len(NAMES)), np.nan)
    cells[:, 0], cells[:, 1] = row.round, np.arange(len(cells))
    if row.class_accuracies is not None:
        own_NC = present_counts(experiment.label_counts_NC, classes)
        tests_C = np.bincount(world.test_labels, minlength=num_classes)
        cells[:, 2] = client_accuracies(row.class_accuracies, own_NC)
        cells[:, 3] = np.where(own_NC > 0, tests_C, 0).sum(axis=1)
    if row.personal_accuracies is not None:
        shares_NC = label_counts(world.test_labels, experiment.test_shares, num_classes)
        cells[:, 4] = row.personal_accuracies
        cells[:, 5] = present_counts(shares_NC, classes).sum(axis=1)
    return cells
