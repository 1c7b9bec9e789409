"""The exchange over the network gives the bits of a sum in one process, and notices who is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from fedsweep.client.exchange import InPlace
from fedsweep.errors import MemoryLost, ResourceError, WorkerLost
from fedsweep.fleet.fleet import Vectors
from fedsweep.fleet.network import Membership, NetworkExchange, find_store, open_store
from fedsweep.streams import stream

HOST = "127.0.0.1"
SYNCS = 5
# Each sync point's attendees: all, some, those of one member alone, one.
ATTENDEES = [(0, 2, 3, 5, 8), (2, 3), (0, 2, 8), (5,), (0, 2, 3, 5, 8)]
# Interleaved over three members, in no order; the last of four has nobody.
WORKERS = {0: 0, 2: 2, 3: 1, 5: 1, 8: 0}


def vectors(values: int, dtype: torch.dtype) -> dict[int, torch.Tensor]:
    generator = stream(7, "vectors").torch()
    return {k: torch.randn(values, generator=generator, dtype=dtype) for k in WORKERS}


def homes(size: int) -> dict[int, int]:
    return {client: worker % size for client, worker in WORKERS.items()}


def weights(sync: int) -> list[float]:
    return [1 / (k + sync + 1) for k in range(len(ATTENDEES[sync]))]


def membership(index: int, size: int, values: int, dtype: torch.dtype, timeout_s: float, alone: bool) -> Membership:
    return Membership(
        index=index,
        size=size,
        vectors=Vectors(num_values=values, dtype=dtype, capacity=len(WORKERS)),
        host=HOST,
        connect_timeout_s=20.0,
        timeout_s=timeout_s,
        alone_bytes=2**20 if alone else 0,
    )


def member(pipe: Any, index: int, size: int) -> None:
    """Takes part in one group after another, as it is told."""
    torch.set_num_threads(1)
    while (order := pipe.recv()) is not None:
        values, dtype, fate, timeout_s, alone = order
        if index == 0:
            store = open_store(HOST, timeout_s=20.0)
            pipe.send(store.port)
        else:
            store = find_store(HOST, pipe.recv(), timeout_s=20.0)
        exchange = NetworkExchange(store, membership(index, size, values, dtype, timeout_s, alone))
        del store
        own = {k: v for k, v in vectors(values, dtype).items() if homes(size)[k] == index}
        found: list[Any] = []
        try:
            for sync, attend in enumerate(ATTENDEES):
                if fate is not None and fate[0] == index and sync == 2:
                    pipe.send("here")
                    if fate[1] == "leaves":
                        break
                    os.kill(os.getpid(), signal.SIGSTOP if fate[1] == "hangs" else signal.SIGKILL)
                out = torch.full((values,), torch.nan, dtype=dtype)
                mine = {k: v for k, v in own.items() if k in attend}
                exchange.mean(mine, attend, weights(sync), out, workers=homes(size))
                found.append(out.numpy())
        except WorkerLost as lost:
            found = [str(lost)]
        exchange.close()
        pipe.send(found)


class Members:
    """Processes that form one group after another."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("fork")
        self.pipes, self.processes = [], []
        for index in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=member, args=(theirs, index, size), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def begin(
        self,
        values: int,
        dtype: torch.dtype,
        fate: tuple[int, str] | None = None,
        *,
        timeout_s: float = 60.0,
        alone: bool = False,
    ) -> None:
        for pipe in self.pipes:
            pipe.send((values, dtype, fate, timeout_s, alone))
        port = self.heard(0)
        for pipe in self.pipes[1:]:
            pipe.send(port)

    def heard(self, index: int) -> Any:
        assert self.pipes[index].poll(60), f"member {index} says nothing"
        return self.pipes[index].recv()

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture(params=[2, 3, 4], scope="module")
def members(request: pytest.FixtureRequest) -> Iterator[Members]:
    made = Members(request.param)
    yield made
    made.end()


@pytest.fixture
def three() -> Iterator[Members]:
    made = Members(3)
    yield made
    made.end()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("values", [1003, 1000, 5, 1])  # even and uneven ranges, and fewer values than members
@pytest.mark.parametrize("alone", [True, False])
def test_members_get_the_bits_of_a_sum_in_one_process(
    members: Members, values: int, dtype: torch.dtype, alone: bool
) -> None:
    members.begin(values, dtype, alone=alone)
    expected = []
    for sync, attend in enumerate(ATTENDEES):
        expected.append(torch.empty(values, dtype=dtype))
        InPlace().mean(vectors(values, dtype), attend, weights(sync), expected[-1], workers={})
    for index in range(len(members.pipes)):
        found = members.heard(index)
        assert all(isinstance(mean, np.ndarray) for mean in found)
        assert [mean.tobytes() for mean in found] == [mean.numpy().tobytes() for mean in expected]


@pytest.mark.parametrize("fate", ["dies", "leaves"])
def test_a_member_that_is_gone_is_noticed_at_once_and_the_others_form_a_new_group(three: Members, fate: str) -> None:
    three.begin(1003, torch.float32, (1, fate))
    assert three.heard(1) == "here"
    for index in (0, 2):
        assert "another client actor is gone" in three.heard(index)[0]
    if fate == "leaves":
        assert len(three.heard(1)) == 2
        three.begin(1003, torch.float32)
        assert {len(three.heard(index)) for index in range(3)} == {SYNCS}


@pytest.mark.slow
def test_a_member_that_hangs_is_given_up_in_time(three: Members) -> None:
    three.begin(1003, torch.float32, (1, "hangs"), timeout_s=1.0)
    assert three.heard(1) == "here"
    for index in (0, 2):
        assert "another client actor is gone" in three.heard(index)[0]


def test_sockets_listen_on_the_given_address_alone(three: Members) -> None:
    three.begin(1003, torch.float32, (1, "hangs"))
    assert three.heard(1) == "here"
    listening = [
        connection.laddr.ip
        for process in three.processes
        for connection in psutil.Process(process.pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 2 and set(listening) == {HOST}


def test_a_refused_connection_and_an_address_of_another_machine_are_told() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ResourceError, match=f"nothing answers at {HOST} port {port}"):
        find_store(HOST, port, timeout_s=20.0)
    with pytest.raises(ResourceError, match=r"203\.0\.113\.1 can't be listened on"):
        open_store("203.0.113.1", timeout_s=20.0)


def test_a_member_that_stays_away_is_told() -> None:
    store = open_store(HOST, timeout_s=0.2)
    three = Vectors(num_values=3, dtype=torch.float32, capacity=2)
    lonely = Membership(index=0, size=2, vectors=three, host=HOST, connect_timeout_s=0.2)
    with pytest.raises(ResourceError, match="client actors do not reach each other"):
        NetworkExchange(store, lonely)


@pytest.mark.parametrize(
    ("fate", "error", "words"),
    [
        ("dies", WorkerLost, "client actor 0 does not answer, client actor 1 died"),
        ("forgot", MemoryLost, "what clients of actor 1 remember is lost"),  # a new try would not find it either
    ],
)
def test_those_who_wait_for_a_lost_one_are_given_up_after_a_while(
    fate: str, error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that is gone closes no connection: who waits for it at a sync point would wait for ever."""
    from ray import exceptions as ray_errors

    from fedsweep.fleet import ray_fleet

    now = iter(range(10, 1000, 10))
    killed: list[str] = []

    class Ray:
        def wait(self, refs: list[str], **_: Any) -> tuple[list[str], list[str]]:
            return [ref for ref in refs if ref != "waits"], []

        def get(self, ref: str) -> None:
            raise ray_errors.RayActorError if ref == "dies" else ray_errors.ObjectLostError("00" * 28, "", "")

        def kill(self, actor: str) -> None:
            killed.append(actor)

    monkeypatch.setattr(ray_fleet, "ray", Ray())
    monkeypatch.setattr(ray_fleet, "time", SimpleNamespace(monotonic=lambda: float(next(now))))
    fleet = object.__new__(ray_fleet.RayFleet)
    fleet._actors, fleet._pings, fleet._hang_timeout_s = {0: "first", 1: "second"}, {}, 60.0
    monkeypatch.setattr(fleet, "_hanging", lambda pending: [])  # it answers, as it waits beside its control thread
    with pytest.raises(error, match=words):
        fleet._wait({0: "waits", 1: fate}, together=True)
    assert killed == ["first"]
    assert next(now) == 90  # asked until more than 60 seconds had passed since 10
