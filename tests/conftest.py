"""One thread per process: the tests' arrays are tiny, and idle helper threads cost more than they bring.

Tests run in three processes (``scripts/check``). What starts Ray mostly waits for processes to come up, so sweeps and
the rest of it have a process each, and all else runs meanwhile.
"""

from __future__ import annotations

import os

import pytest

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start Ray form two groups, which xdist begins with, as the largest; one process plays one of them."""
    for item in items:
        if item.get_closest_marker("ray") is not None:
            name = "sweeps on Ray" if "sweeps" in item.path.parts else "Ray"
            item.add_marker(pytest.mark.xdist_group(name))
