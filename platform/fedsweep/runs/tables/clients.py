"""``clients.parquet``: what each client holds, and how far its labels are from everybody's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedsweep.experiment.clients import ClientColumns
from fedsweep.records import ClientProfile
from fedsweep.runs.tables.arrow_columns import list_column, number_column
from fedsweep.world.label_stats import js_divergence, kl_divergence, population

if TYPE_CHECKING:
    import pyarrow as pa

_DEVICE_FIGURES = (
    "flops_per_s",
    "overhead_s",
    "down_bits_per_s",
    "up_bits_per_s",
    "down_latency_s",
    "up_latency_s",
)
# Clients whose divergences are computed together: one by one they take longer than all else before the first round.
_AT_ONCE = 4096


def clients_table(profiles: Sequence[ClientProfile], budget_values: Sequence[float | None] | None = None) -> pa.Table:
    """Return the table, one row per client in the order of ids; of a drawn population, those who took part.

    Args:
        profiles: The clients'.
        budget_values: What each affords in a round, in values [N]; None (also a single one): no limit.
    """
    import pyarrow as pa

    columns = ClientColumns.of(profiles)
    is_all = columns is profiles
    kl, js = _divergences(columns.label_counts_NC)
    nulls: list[float | None] = [None] * len(profiles)
    cells = {
        "client": number_column(np.arange(len(profiles)) if is_all else [p.client for p in profiles], pa.int64()),
        "num_samples": number_column(columns.num_samples, pa.int64()),
        "label_counts": list_column(columns.label_counts_NC, pa.list_(pa.int64())),
        "kl_divergence": number_column(kl, pa.float64()),
        "js_divergence": number_column(js, pa.float64()),
        "budget_values": number_column(budget_values or nulls, pa.float64()),
    }
    for name in _DEVICE_FIGURES:
        figures = nulls if columns.devices is None else [getattr(device, name) for device in columns.devices]
        cells[name] = number_column(figures, pa.float64())
    cells["capability"] = number_column(columns.capabilities, pa.float64())
    return pa.table(cells)


def _divergences(label_counts_NC: np.ndarray) -> tuple[list[float | None], list[float | None]]:
    """Compute the KL and JS divergence of clients' labels from the population's [N], in nats; None without labels."""
    if not label_counts_NC.sum():
        return [None] * len(label_counts_NC), [None] * len(label_counts_NC)
    shares_C = population(label_counts_NC)
    clients = np.flatnonzero(label_counts_NC.sum(axis=1))
    figures = np.full((2, len(label_counts_NC)), np.nan)
    for start in range(0, len(clients), _AT_ONCE):
        rows = clients[start : start + _AT_ONCE]
        figures[0, rows] = kl_divergence(label_counts_NC[rows], shares_C)
        figures[1, rows] = js_divergence(label_counts_NC[rows], shares_C)
    kl, js = ([None if math.isnan(value) else value for value in row] for row in figures.tolist())
    return kl, js
