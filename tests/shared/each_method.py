"""Every method as a parameter of a dear test: one of each kind always, the others among the exhaustive tests."""

from __future__ import annotations

from typing import Any

import pytest

from fedsweep.algorithms.registry import METHODS

# Plain, with memories and payloads, two speeds, synthetic data, sub-models and learned weights, work that outlasts its
# round, asynchronous, masks, edges, peers, own layers.
KINDS = (
    "fedavg",
    "scaffold",
    "dynamicfl",
    "dynafed",
    "feddhad",
    "fedstg",
    "fedbuff",
    "prunefl",
    "hierfavg",
    "dpsgd",
    "fedas",
)


def each_method() -> list[Any]:
    """Every method's name; those that are not the first of their kind are marked exhaustive."""
    return [name if name in KINDS else pytest.param(name, marks=pytest.mark.exhaustive) for name in METHODS]
