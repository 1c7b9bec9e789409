from __future__ import annotations

from typing import Any

import pytest

from fedsweep.bench import startup
from fedsweep.bench.setup import Request
from fedsweep.bench.setups import SETUPS


def test_ready_and_end_are_held_against_the_targets_and_the_split_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    readies = iter((9.0, 1.0, 1.5, 3.0, 9.0, 5.0, 7.0, 8.0))  # the first of each kind of run does not count

    def play(runtime: Any, rounds: int) -> dict[str, Any]:
        assert rounds == 3
        split = {"before": {"libraries": 1.25, "data": 0.001}, "after": {"pictures": 0.5}}
        return {"ready_s": next(readies), "seconds": 3.5, "cpu_s": 4.0, **split}

    monkeypatch.setattr(startup, "_play", play)
    said: list[str] = []
    figures = SETUPS["startup"].measure(Request(repeats=3, say=said.append))
    assert [figure.what.partition(",")[0] for figure in figures] == ["in one process"] * 2 + [
        "on two client actors"
    ] * 2
    assert [(figure.seconds, figure.limit_s) for figure in figures] == [(1.5, 2.0), (3.5, 4.0), (7.0, 6.0), (3.5, 9.0)]
    assert [figure.is_good for figure in figures] == [True, True, False, True]
    assert dict(figures[0].facts) == {
        "before": {"libraries": 1.25, "data": 0.001},
        "after": {"pictures": 0.5},
        "cpu_s": 4.0,
    }
    assert said[0] == "startup: in one process, seconds before the rounds: libraries 1.25"
