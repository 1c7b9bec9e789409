"""What the driver says of a server actor that is gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from fedsweep.driver.ray_session import RemoteSession
from fedsweep.errors import RunError


def told(error: Exception, monkeypatch: pytest.MonkeyPatch) -> str:
    def raising(done: Any) -> None:
        raise error

    session = object.__new__(RemoteSession)
    session._folder = Path("my runs/first")
    monkeypatch.setattr(ray, "get", raising)
    with pytest.raises(RunError) as caught:
        session._answer(None, lambda done: None)
    return str(caught.value)


def test_of_one_that_raised_at_its_start_the_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = "Traceback\n  File 'metrics.py', line 65\nUnicodeEncodeError: no such letter"
    raised = ray.exceptions.RayTaskError("ServerActor.__init__", trace, UnicodeError("no such letter"))
    said = told(ray.exceptions.ActorDiedError(raised), monkeypatch)
    assert "the server actor died (ActorDiedError: UnicodeEncodeError: no such letter)" in said
    assert said.endswith("go on with fedsweep run --resume 'my runs/first'")


def test_of_one_that_died_the_first_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    said = told(ray.exceptions.ActorDiedError(), monkeypatch)
    assert "the server actor died (ActorDiedError: The actor died unexpectedly before finishing this task" in said
