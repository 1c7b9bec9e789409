"""The labels that a run's high-frequency groups hold, against the population's, small enough for a page."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from fedsweep.figures.groups import group_labels_of, has_group
from fedsweep.results.view import RunView

_MOST_CLASSES = 256
_DIGITS = 4
_PERCENTILES = (10, 25, 75, 90)


def label_summary(run: RunView, counts_NC: np.ndarray) -> dict[str, Any] | None:
    """Class shares of the two groups over the rounds, summed up.

    Args:
        run: A run.
        counts_NC: Samples per client and class [N, C].

    Returns:
        ``population`` [C], and for the groups ``low`` and ``high``, as far as there are any, ``rounds`` (how many have
        one), ``mean`` [C] and ``spread`` [4, C]: the 10th, 25th, 75th and 90th percentile over rounds. None where
        there is no high-frequency group, or more classes than a page has room for.

    Raises:
        OutputError: A row names a client that there is not.
    """
    if counts_NC.shape[1] > _MOST_CLASSES or not has_group(run):
        return None
    found = group_labels_of(run, counts_NC)
    if found is None:
        return None
    tree: dict[str, Any] = {"population": _short(found.population_C)}
    for name, shares_RC in (("low", found.low_RC), ("high", found.high_RC)):
        if len(shares_RC):
            tree[name] = {
                "rounds": len(shares_RC),
                "mean": _short(shares_RC.mean(axis=0)),
                "spread": _short(np.percentile(shares_RC, _PERCENTILES, axis=0)),
            }
    return tree


def size_of(tree: dict[str, Any]) -> int:
    """Characters that a summary takes on a page."""
    return len(json.dumps(tree, separators=(",", ":")))


def _short(values: np.ndarray) -> Any:
    return np.round(values, _DIGITS).tolist()
