"""The golden problem as a fixture; see :func:`fedsweep.testing.golden_problem`.

The optimum of the plain mean is 8, that of the mean weighted (1/4, 3/4) is 9.230769.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedsweep.engine.state import RunState
from fedsweep.testing import golden_problem

Golden = Callable[..., list[RunState]]


@pytest.fixture
def golden() -> Golden:
    """``golden(method, rounds=..., steps=(5, 5), ...)``: the run's states from the start on."""
    return golden_problem
