"""The set-ups by name; a new one is a :class:`SetUp` in a module of its own and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from fedsweep.bench import logistic, population, speed_test, startup, workloads
from fedsweep.bench.setup import SetUp

SETUPS: Mapping[str, SetUp] = {
    setup.name: setup
    for setup in (
        workloads.W1,
        workloads.W2,
        workloads.W3,
        speed_test.P1,
        speed_test.P1_CPU,
        logistic.L1,
        startup.STARTUP,
        population.S1,
    )
}
