"""One thread per process: the tests' arrays are tiny, and idle helper threads cost more than they bring.

Tests run in two processes (``scripts/check``). What starts Ray stays in one of them, so that no two clusters
compete.
"""

from __future__ import annotations

import os

import pytest

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests that start Ray form one group."""
    for item in items:
        if item.get_closest_marker("ray") is not None:
            item.add_marker(pytest.mark.xdist_group("ray"))
