"""Choose the exchange by which client actors aggregate among themselves, and set it up.

Actors of the server's node share mapped files. Actors of several nodes meet over the network: they find each other by
a store that the actor of number 0 opens. Where neither can be had, every sync point goes through the server.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import ray
from ray import exceptions as ray_errors

from fedsweep.errors import ResourceError, first_line
from fedsweep.fleet.fleet import ExchangeInUse, Vectors
from fedsweep.fleet.network import Membership
from fedsweep.fleet.shared_memory import make_group_files

ExchangeKind = Literal["auto", "network", "server"]

_GROUP_PREFIX = "fedsweep-"
# Longest wait for actors of other nodes to be reached, in seconds.
_CONNECT_S = 20.0


class ActorGroup:
    """The exchange of a fleet's client actors, set up anew whenever one of them is.

    Args:
        vectors: What is exchanged.
        kind: ``auto``; ``network`` also on one node; ``server`` for none.
        timeout_s: Longest wait for an actor while an exchange is set up.
        warn: Called with a sentence when something falls back.
    """

    def __init__(self, vectors: Vectors, *, kind: ExchangeKind, timeout_s: float, warn: Callable[[str], None]) -> None:
        self._vectors, self._kind, self._timeout_s, self._warn = vectors, kind, timeout_s, warn
        self._folder: Path | None = None
        self._lock = -1  # the open folder, by which other processes see that somebody has it
        self._notes: list[str] = []
        self._name = "server"
        _sweep_old_folders()

    @property
    def in_use(self) -> ExchangeInUse:
        """Return which exchange the actors have now."""
        return ExchangeInUse(name=self._name, notes=tuple(self._notes))

    def form(self, actors: Sequence[Any], nodes: Sequence[str]) -> None:
        """Give the actors, on nodes of these ids, an exchange; raises Ray's errors where one dies meanwhile."""
        self.drop()
        if len(actors) == 1:
            self._name = "in place"
        elif self._kind == "network" or (
            self._kind == "auto" and {*nodes} != {ray.get_runtime_context().get_node_id()}
        ):
            self._join_network(actors, nodes)
        elif self._kind == "auto":
            self._share_files(actors)

    def drop(self) -> None:
        """Take the exchange away from the actors."""
        self._name = "server"
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            os.close(self._lock)
            self._folder = None

    def fall_back(self, why: str) -> None:
        """Have every sync point go through the server, and say why, in the words of a clause."""
        self.drop()
        text = f"{why}: every sync point goes through the server, which is slower"
        if text not in self._notes:
            self._notes.append(text)
            self._warn(text)

    def _share_files(self, actors: Sequence[Any]) -> None:
        if not os.path.isdir("/dev/shm"):
            self.fall_back("there is no /dev/shm")
            return
        vectors, free = self._vectors, shutil.disk_usage("/dev/shm").free
        if free < 1.2 * vectors.num_bytes:
            needed = vectors.num_bytes / 2**20
            self.fall_back(
                f"/dev/shm has {free / 2**20:.0f} MB free, but aggregating among actors needs {needed:.0f} MB"
            )
            return
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_GROUP_PREFIX}{os.getpid()}-", dir="/dev/shm"))
        self._lock = os.open(self._folder, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        try:
            make_group_files(self._folder, vectors)
        except OSError as error:  # another run has taken the room since it was looked at
            self.fall_back(f"aggregating among actors has no room in /dev/shm ({error.strerror})")
            return
        prepared = [actor.prepare_exchange.remote(self._folder, len(actors), vectors) for actor in actors]
        _get_all(prepared, timeout_s=self._timeout_s)
        _get_all([actor.connect_exchange.remote() for actor in actors], timeout_s=self._timeout_s)
        self._name = "shared memory"

    def _join_network(self, actors: Sequence[Any], nodes: Sequence[str]) -> None:
        addresses = _addresses()
        hosts = [addresses[node] for node in nodes]
        try:
            port = ray.get(actors[0].open_store.remote(hosts[0], _CONNECT_S), timeout=self._timeout_s)
            joined = [
                actor.join_network.remote(
                    Membership(
                        index=index,
                        size=len(actors),
                        vectors=self._vectors,
                        host=host,
                        connect_timeout_s=_CONNECT_S,
                    ),
                    (hosts[0], port),
                )
                for index, (actor, host) in enumerate(zip(actors, hosts, strict=True))
            ]
            _get_all(joined, timeout_s=self._timeout_s)
        except ResourceError as error:
            why = f"the client actors on {len({*nodes})} nodes can't aggregate among themselves: {first_line(error)}"
            self.fall_back(why)
            return
        self._name = "network"


def _get_all(refs: Sequence[Any], *, timeout_s: float) -> None:
    """Wait for all; an actor's death comes before what others made of it."""
    ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    raised: list[Exception] = []
    for ref in refs:
        try:
            # Short, since the wait above has had all the time there is.
            ray.get(ref, timeout=1.0)
        except ray_errors.RayTaskError as error:  # an actor that raised something lives
            raised.append(error)
    if raised:
        raise raised[0]


def _addresses() -> dict[str, str]:
    """Map each node's id to its address on the cluster's network."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}


def _sweep_old_folders() -> None:
    """Remove the folders that dead processes left in /dev/shm."""
    for folder in Path("/dev/shm").glob(f"{_GROUP_PREFIX}*"):
        owner = folder.name.removeprefix(_GROUP_PREFIX).split("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists() and not _is_held(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_held(folder: Path) -> bool:
    """Tell whether a live process has the folder: one of another container that shares /dev/shm is not in our /proc."""
    try:
        opened = os.open(folder, os.O_RDONLY)
    except OSError:  # another user's, or gone meanwhile
        return True
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(opened)
    return False
