"""How client actors get their exchange, and how they are looked after, without a cluster."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray import exceptions as ray_errors

from fedsweep.fleet import ray_exchange, ray_fleet
from fedsweep.fleet.fleet import Vectors
from fedsweep.fleet.ray_exchange import ActorGroup

# No process has it: numbers end at 2^22.
NOBODY = 2**22 + 1
VECTORS = Vectors(num_values=3, dtype=torch.float32, capacity=2)


def got(answers: Any, timeout: float) -> None:
    for answer in answers if isinstance(answers, list) else [answers]:
        if isinstance(answer, Exception):
            raise answer


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Two actors of this node."""
    node = SimpleNamespace(get_node_id=lambda: "here")
    fake = SimpleNamespace(get_runtime_context=lambda: node, get=got, wait=lambda refs, num_returns, timeout: None)
    monkeypatch.setattr(ray_exchange, "ray", fake)
    call = SimpleNamespace(remote=lambda *args: None)
    yield [SimpleNamespace(prepare_exchange=call, connect_exchange=call)] * 2


def formed(actors: Sequence[Any]) -> tuple[ActorGroup, list[str]]:
    told: list[str] = []
    group = ActorGroup(VECTORS, kind="auto", timeout_s=1.0, warn=told.append)
    group.form(actors, ["here"] * len(actors))
    return group, told


def test_without_shared_memory_the_way_through_the_server_is_told(
    here: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "isdir", lambda path: path != "/dev/shm")
    group, told = formed(here)
    assert told == ["there is no /dev/shm: every sync point goes through the server, which is slower"]
    assert group.in_use.name == "server" and group.in_use.notes == tuple(told)


def test_a_death_comes_before_what_others_made_of_it(here: list[Any]) -> None:
    """Whoever opens a pipe to an actor that has just died finds no reader, and raises an OSError."""
    no_reader = ray_errors.RayTaskError("connect_exchange", "", OSError(errno.ENXIO, "no reader"))
    errors = [no_reader.as_instanceof_cause(), ray_errors.RayActorError()]
    actors = [
        SimpleNamespace(
            prepare_exchange=actor.prepare_exchange, connect_exchange=SimpleNamespace(remote=lambda error=error: error)
        )
        for actor, error in zip(here, errors, strict=True)
    ]
    with pytest.raises(ray_errors.RayActorError):
        formed(actors)


def test_room_that_another_run_takes_first_is_told(here: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    group, told = formed(here)
    reason = "aggregating among actors has no room in /dev/shm (No space left on device)"
    assert told == [f"{reason}: every sync point goes through the server, which is slower"]
    assert group.in_use.name == "server" and group._folder is None


def test_a_folder_that_somebody_has_stays_though_its_process_is_not_seen_here(
    here: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: NOBODY)  # as that of another container, which shares /dev/shm
    group, told = formed(here)
    folder = group._folder
    assert folder is not None and folder.name.startswith(f"fedsweep-{NOBODY}-") and told == []
    formed(here[:1])
    assert folder.exists()
    os.close(group._lock)  # its process dies
    formed(here[:1])
    assert not folder.exists()


def test_several_actors_that_hang_cost_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    killed: list[str] = []

    class Ray:
        def wait(self, refs: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
            late = [ref for ref in refs if ref == "hangs"]
            waited.append(timeout if late and num_returns == len(refs) else 0.0)
            return [ref for ref in refs if ref not in late], late

        def get(self, ref: str, *, timeout: float | None = None) -> None:
            if ref == "hangs":
                waited.append(timeout or 0.0)
                raise ray_errors.GetTimeoutError
            if ref == "dies":
                raise ray_errors.RayActorError

        def kill(self, actor: Any) -> None:
            killed.append(actor.fate)

    def actor(fate: str) -> Any:
        ping = SimpleNamespace(remote=lambda: fate)
        return SimpleNamespace(fate=fate, ping=SimpleNamespace(options=lambda concurrency_group: ping))

    monkeypatch.setattr(ray_fleet, "ray", Ray())
    fleet = object.__new__(ray_fleet.RayFleet)
    fates = ["hangs", "lives", "dies", "hangs", "hangs"]
    fleet._actors, fleet._hang_timeout_s = dict(enumerate(map(actor, fates))), 60.0
    assert fleet._find_dead() == [0, 2, 3, 4]
    assert killed == ["hangs", "dies", "hangs", "hangs"]
    assert sum(waited) == 60.0
