"""How much of the package a round runs: FedAvg pays for nothing that it does not use.

Bounds, not figures: whoever passes one has put something into every round that only some methods need.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

import pytest

import fedsweep
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.client.local_round import LocalRound
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.engine.engine import Engine
from fedsweep.method import FederatedMethod
from fedsweep.testing import local_engine, run_rounds, tiny_experiment

PACKAGE = tuple(str(Path(folder).resolve()) for folder in fedsweep.__path__)


def called_in_a_round(engine: Engine) -> set[CodeType]:
    """The package's functions that the second round of a run calls; comprehensions and lambdas are parts of others."""
    state = run_rounds(engine, rounds=1)
    called: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        # The environment may lie in the checkout, and the checkout on the package's path.
        is_own = code.co_filename.startswith(PACKAGE) and "site-packages" not in code.co_filename
        if event == "call" and is_own and not code.co_name.startswith("<"):
            called.add(code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        engine.advance(state)
    finally:
        sys.setprofile(before)
    return called


@pytest.mark.parametrize(
    ("method", "optimizer", "functions", "files"),
    [
        (fedavg(), OptimizerSettings(), 150, 30),
        (fedprox(mu=0.1), OptimizerSettings(momentum=0.9), 165, 32),
    ],
)
def test_a_round_runs_few_functions(
    method: FederatedMethod, optimizer: OptimizerSettings, functions: int, files: int
) -> None:
    called = called_in_a_round(local_engine(tiny_experiment(method, optimizer=optimizer, rounds=3)))
    names = sorted(f"{Path(code.co_filename).name}:{code.co_qualname}" for code in called)
    assert 100 < len(called) <= functions, names
    assert len({code.co_filename for code in called}) <= files, names
    assert not [name for name in names if name.startswith("metrics.py")]  # nobody asked for any


@pytest.fixture
def locals_made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LocalRound]]:
    made: list[LocalRound] = []
    close = LocalRound.close
    monkeypatch.setattr(LocalRound, "close", lambda self, **how: (made.append(self), close(self, **how))[1])
    yield made


def test_a_clients_round_holds_few_things(locals_made: list[LocalRound]) -> None:
    run_rounds(local_engine(tiny_experiment(fedprox(mu=0.1), rounds=1)))
    assert locals_made and all(10 < len(vars(local)) <= 20 for local in locals_made)
