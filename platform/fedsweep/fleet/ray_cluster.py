"""Joining or starting a Ray cluster, in this one place.

A cluster that is started here listens on 127.0.0.1 alone, keeps its token from other users, sends no usage
statistics and ends with the process. One that is given by an address is joined as it is.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsweep.errors import ClusterLost, InputError, ResourceError
from fedsweep.fleet.ray_leftovers import (
    keep_what_ray_says,
    mark_new_sessions,
    marked_session,
    own_sessions,
    remove_session,
    tell_kept,
)
from fedsweep.fleet.ray_watch import StartWatch, last_word, unless_lost
from fedsweep.user_modules import worker_settings

_CONNECT_TIMEOUT_S = 5.0
_JOIN_TIMEOUT_S = 60.0
_LOGGER = logging.getLogger("fedsweep")


@dataclass(frozen=True, kw_only=True)
class ClusterNeeds:
    """What a run asks of a cluster.

    Attributes:
        actors: Client actors.
        cpus_per_client: Logical CPUs of each.
        gpus_per_client: Logical GPUs of each.
        cpus_per_server: Of the server actor.
        gpus_per_server: Of the server actor.
        store_bytes: Object store that an embedded cluster should have.
    """

    actors: int
    cpus_per_client: float = 1.0
    gpus_per_client: float = 0.0
    cpus_per_server: float = 0.0
    gpus_per_server: float = 0.0
    store_bytes: int = 2**30

    @property
    def bundles(self) -> list[tuple[str, float, float]]:
        """Name, CPUs and GPUs of each actor, the server's first."""
        clients = [(f"client actor {k}", self.cpus_per_client, self.gpus_per_client) for k in range(self.actors)]
        return [("server actor", self.cpus_per_server, self.gpus_per_server), *clients]


def num_gpus_here() -> int:
    """GPUs that torch sees in this process."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


@contextlib.contextmanager
def ray_cluster(
    address: str | None, needs: ClusterNeeds, *, dashboard: bool = False, folder: Path | None = None
) -> Iterator[Any]:
    """Ray, connected to a cluster that can hold a run; left or ended afterwards.

    Where this process is connected to Ray already, that connection is used and kept.

    Args:
        address: ``"auto"``, ``"host:port"``, or None for a cluster of our own.
        needs: What the run asks for.
        dashboard: Start the dashboard of a cluster of our own, on 127.0.0.1.
        folder: Where what Ray has to say is kept, in ``ray.log``; None: it is dropped.

    Raises:
        ResourceError: No cluster there, or it can't hold the run.
    """
    with last_word(folder), _connected(address, needs, dashboard=dashboard, folder=folder) as ray:
        yield ray


@contextlib.contextmanager
def _connected(address: str | None, needs: ClusterNeeds, *, dashboard: bool, folder: Path | None) -> Iterator[Any]:
    _set_environment(joining=address is not None)
    import ray

    ours = not ray.is_initialized()
    with _same_sigterm():
        if ours and address is None:
            check_gpus(needs)
            with _on_loopback():
                _start(ray, needs, dashboard=dashboard)
        elif ours and address is not None:
            _join(ray, address)
    session = None
    if ours:
        keep_what_ray_says(folder)
        session = marked_session()
    try:
        if not ours or address is not None:
            check_fits([node["Resources"] for node in ray.nodes() if node["Alive"]], needs)
        yield ray
    except (InputError, KeyboardInterrupt):
        _end(ray, session, ours=ours)
        raise
    except BaseException:
        _end(ray, None, ours=ours)
        if session is not None:
            tell_kept(session)
        raise
    _end(ray, session, ours=ours)


def _end(ray: Any, session: Path | None, *, ours: bool) -> None:
    """Leave or end the cluster; its session folder goes, too, where one is given."""
    if ours:
        with contextlib.suppress(ClusterLost):
            unless_lost(ray.shutdown)
    if session is not None:
        remove_session(session)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Ray reads the variable that keeps a cluster on 127.0.0.1 when it is first imported, maybe before us."""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextlib.contextmanager
def _same_sigterm() -> Iterator[None]:
    """Ray takes SIGTERM over, and would end the process where the caller's handler writes a checkpoint."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def _set_environment(*, joining: bool) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    if not joining:
        # Despite its name: without it every process of a local cluster listens on all interfaces.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def check_gpus(needs: ClusterNeeds) -> None:
    """Whether this machine has the GPUs; a ResourceError where it has not."""
    wanted = needs.gpus_per_client * needs.actors + needs.gpus_per_server
    there = num_gpus_here()
    if wanted > there:
        raise ResourceError(
            f"runtime.gpus_per_client={needs.gpus_per_client:g} with {needs.actors} client actors and"
            f" runtime.gpus_per_server={needs.gpus_per_server:g} ask for {wanted:g} GPUs, but this machine has {there};"
            " set both to 0, or join a cluster by runtime.address"
        )


def _start(ray: Any, needs: ClusterNeeds, *, dashboard: bool) -> None:
    """Start a cluster of our own.

    Its CPUs are only for counting, so more client actors than cores can be asked for; they then share the cores.
    """
    if dashboard:
        _check_dashboard()
    cpus = sum(cpu for _, cpu, _ in needs.bundles)
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else needs.store_bytes
    init = functools.partial(
        ray.init,
        address="local",
        num_cpus=max(os.cpu_count() or 1, int(-(-cpus // 1))),
        num_gpus=num_gpus_here(),
        include_dashboard=dashboard,
        dashboard_host="127.0.0.1",
        namespace="fedsweep",
        object_store_memory=max(100 * 2**20, min(needs.store_bytes, int(free * 0.8))),
        log_to_driver=False,
        logging_level="ERROR",
        **_worker_settings(),
    )
    watch, sessions = StartWatch(), own_sessions()

    def lost() -> str | None:
        mark_new_sessions(sessions)  # so that doctor knows them, too, if this process is killed
        return watch.lost()

    mask = os.umask(0o077)  # Ray writes its token with the umask's mode
    try:
        context = unless_lost(init, lost, starts_processes=True)
    except Exception as error:  # Ray raises the bare class where a process of its own dies while it starts
        with contextlib.suppress(ClusterLost):
            unless_lost(ray.shutdown, watch.lost)
        watch.end()
        for session in mark_new_sessions(sessions):
            tell_kept(session)
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ResourceError(f"no Ray cluster could be started here ({said}); try again") from error
    finally:
        os.umask(mask)
    if dashboard:
        _LOGGER.info("Ray dashboard: http://%s (it asks for the token: ray get-auth-token)", context.dashboard_url)


def _check_dashboard() -> None:
    try:
        importlib.import_module("ray.dashboard.optional_deps")
    except ImportError as error:
        raise ResourceError(f"the Ray dashboard needs an extra: pip install 'fedsweep[dashboard]' ({error})") from error


def _worker_settings() -> dict[str, Any]:
    """One thread for each worker, and the user's own modules."""
    settings = worker_settings()
    settings["runtime_env"]["env_vars"] |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return settings


def _join(ray: Any, address: str) -> None:
    host, _, port = address.rpartition(":")
    if address != "auto":
        _check_listening(address, host, port)
    init = functools.partial(
        ray.init, address=address, namespace="fedsweep", log_to_driver=False, logging_level="ERROR", **worker_settings()
    )
    until = time.monotonic() + _JOIN_TIMEOUT_S
    try:
        # Asked without a token, or with a wrong one, Ray asks again and again.
        unless_lost(init, lambda: "its patience" if time.monotonic() > until else None)
    except (ConnectionError, RuntimeError, ValueError, OSError, SystemExit, ray.exceptions.RayError) as error:
        said = f"no answer within {_JOIN_TIMEOUT_S:g} s" if isinstance(error, ClusterLost) else error
        raise ResourceError(
            f"runtime.address={address!r}: no Ray cluster could be joined there ({said}); is it up, is its token in"
            " RAY_AUTH_TOKEN or ~/.ray/auth_token with RAY_AUTH_MODE=token, and is this machine allowed in?"
        ) from error


def _check_listening(address: str, host: str, port: str) -> None:
    if not host or not port.isdigit():
        raise ResourceError(f"runtime.address must be 'auto' or 'host:port', but got {address!r}")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S):
            return
    except (OSError, OverflowError) as error:
        raise ResourceError(f"runtime.address={address!r}: nothing answers there ({error})") from error


def check_fits(nodes: Sequence[dict[str, float]], needs: ClusterNeeds) -> None:
    """Whether every actor finds a node; fractions of a GPU don't add up over GPUs.

    Args:
        nodes: Each node's total resources.
        needs: What the run asks for.

    Raises:
        ResourceError: An actor would wait for ever; says which, and what the largest node has.
    """
    free = [[node.get("CPU", 0.0), [1.0] * int(node.get("GPU", 0))] for node in nodes]
    for name, cpus, gpus in sorted(needs.bundles, key=lambda b: (-b[2], -b[1])):
        for node in free:
            if node[0] + 1e-9 >= cpus and _take_gpus(node[1], gpus):  # type: ignore[operator, arg-type]
                node[0] -= cpus  # type: ignore[operator]
                break
        else:
            largest = max(nodes, key=lambda n: (n.get("GPU", 0), n.get("CPU", 0)), default={})
            raise ResourceError(
                f"the run needs {needs.actors} x ({needs.cpus_per_client:g} CPU + {needs.gpus_per_client:g} GPU) and a"
                f" server of {needs.cpus_per_server:g} CPU + {needs.gpus_per_server:g} GPU, but there is no room for"
                f" {name}; the largest of {len(nodes)} nodes has {largest.get('CPU', 0):g} CPU and"
                f" {largest.get('GPU', 0):g} GPU; lower runtime.client_actors, cpus_per_client or gpus_per_client"
            )


def _take_gpus(shares: list[float], wanted: float) -> bool:
    """Take a fraction of one GPU, or whole ones."""
    if wanted == 0:
        return True
    if wanted >= 1:
        whole = [k for k, share in enumerate(shares) if share > 1 - 1e-9][: int(wanted)]
        if len(whole) < int(wanted):
            return False
        for k in whole:
            shares[k] = 0.0
        return True
    for k, share in enumerate(shares):
        if share + 1e-9 >= wanted:
            shares[k] -= wanted
            return True
    return False
