"""``clients.parquet``: what each client holds, and how far its labels are from everybody's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from fedsweep.errors import InvariantError
from fedsweep.runs.tables.arrow_columns import list_column, number_column
from fedsweep.world.label_stats import js_divergence, kl_divergence, population

if TYPE_CHECKING:
    import pyarrow as pa

DEVICE_FIGURES = (
    "flops_per_s",
    "overhead_s",
    "down_bits_per_s",
    "up_bits_per_s",
    "down_latency_s",
    "up_latency_s",
    "capability",
)
# Clients whose divergences are computed together: one by one they take longer than all else before the first round.
_AT_ONCE = 4096


def clients_table(
    num_samples_N: np.ndarray,
    label_counts_NC: np.ndarray,
    *,
    budget_values: Iterable[float | None] | None,
    devices: Mapping[str, Iterable[float | None]],
) -> pa.Table:
    """The table, one row per client in the order of ids.

    Args:
        num_samples_N: Samples per client [N].
        label_counts_NC: Samples per client and class [N, C].
        budget_values: What each affords in a round, in values [N]; None (also a single one): no limit.
        devices: Figures of the simulated devices [N] by name, any of :data:`DEVICE_FIGURES`.

    Raises:
        InvariantError: Lengths differ, or a device figure is unknown.
    """
    import pyarrow as pa

    num_clients = len(num_samples_N)
    if unknown := sorted(set(devices) - set(DEVICE_FIGURES)):
        raise InvariantError(f"unknown device figures {', '.join(unknown)} (known: {', '.join(DEVICE_FIGURES)})")
    given = {"budget_values": budget_values, **devices}
    figures = {name: list(values) for name, values in given.items() if values is not None}
    sizes = {"label_counts": len(label_counts_NC)} | {name: len(values) for name, values in figures.items()}
    if wrong := {name: size for name, size in sizes.items() if size != num_clients}:
        raise InvariantError(f"{num_clients} clients, but rows for another number of clients: {wrong}")
    kl, js = _divergences(label_counts_NC)
    columns = {
        "client": number_column(range(num_clients), pa.int64()),
        "num_samples": number_column(num_samples_N.tolist(), pa.int64()),
        "label_counts": list_column(label_counts_NC.tolist(), pa.list_(pa.int64())),
        "kl_divergence": number_column(kl, pa.float64()),
        "js_divergence": number_column(js, pa.float64()),
    }
    for name in ("budget_values", *DEVICE_FIGURES):
        cells = [None if value is None else float(value) for value in figures.get(name, [None] * num_clients)]
        columns[name] = number_column(cells, pa.float64())
    return pa.Table.from_arrays([*columns.values()], names=[*columns])


def _divergences(label_counts_NC: np.ndarray) -> tuple[list[float | None], list[float | None]]:
    """KL and JS divergence of each client's labels from the population's, in nats; None for a client without any."""
    if not label_counts_NC.sum():
        return [None] * len(label_counts_NC), [None] * len(label_counts_NC)
    shares_C = population(label_counts_NC)
    known = np.flatnonzero(label_counts_NC.sum(axis=1))
    figures = np.full((2, len(label_counts_NC)), np.nan)
    for start in range(0, len(known), _AT_ONCE):
        rows = known[start : start + _AT_ONCE]
        figures[0, rows] = kl_divergence(label_counts_NC[rows], shares_C)
        figures[1, rows] = js_divergence(label_counts_NC[rows], shares_C)
    kl, js = ([None if math.isnan(value) else value for value in row] for row in figures.tolist())
    return kl, js
