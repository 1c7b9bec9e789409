"""Joining or starting a Ray cluster, in this one place.

A cluster that is started here listens on 127.0.0.1 alone, keeps its token from other users, sends no usage
statistics and ends with the process. One that is given by an address is joined as it is.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fedsweep.errors import ClusterLost, InputError, ResourceError
from fedsweep.fleet.ray_leftovers import keep_what_ray_says, marked_session, remove_session, tell_kept
from fedsweep.fleet.ray_start import ClusterNeeds, ClusterStart, num_gpus_here, set_environment
from fedsweep.fleet.ray_watch import last_word, unless_lost
from fedsweep.processes import worker_settings

__all__ = ["ClusterNeeds", "check_fits", "check_gpus", "num_gpus_here", "ray_cluster"]

_CONNECT_TIMEOUT_S = 5.0
_JOIN_TIMEOUT_S = 60.0


@contextlib.contextmanager
def ray_cluster(
    address: str | None,
    needs: ClusterNeeds,
    *,
    dashboard: bool = False,
    folder: Path | None = None,
    begun: ClusterStart | None = None,
) -> Iterator[Any]:
    """Ray, connected to a cluster that can hold a run; left or ended afterwards.

    Where this process is connected to Ray already, that connection is used and kept.

    Args:
        address: ``"auto"``, ``"host:port"``, or None for a cluster of our own.
        needs: What the run asks for.
        dashboard: Start the dashboard of a cluster of our own, on 127.0.0.1.
        folder: Where what Ray has to say is kept, in ``ray.log``; None: it is dropped.
        begun: A cluster of our own that is starting already; it ends with this one.

    Raises:
        ResourceError: No cluster there, or it can't hold the run.
    """
    speaker = last_word(folder if begun is None else None)  # whoever began it early has one
    if begun is not None and not begun.holds(needs):
        begun.end()
        begun = None
    with speaker, _connected(address, needs, dashboard=dashboard, folder=folder, begun=begun) as ray:
        yield ray


@contextlib.contextmanager
def _connected(
    address: str | None, needs: ClusterNeeds, *, dashboard: bool, folder: Path | None, begun: ClusterStart | None
) -> Iterator[Any]:
    set_environment(joining=address is not None)
    import ray

    ours = begun is not None or not ray.is_initialized()
    with _same_sigterm():
        if ours and address is None:
            check_gpus(needs)
            (begun or ClusterStart(needs, dashboard=dashboard)).take()
        elif ours and address is not None:
            _join(ray, address)
    session, has_failed = None, False
    if ours:
        keep_what_ray_says(folder)
        session = marked_session()
    try:
        if not ours or address is not None:
            check_fits([node["Resources"] for node in ray.nodes() if node["Alive"]], needs)
        yield ray
    except BaseException as error:
        has_failed = not isinstance(error, InputError | KeyboardInterrupt)
        raise
    finally:
        if ours:
            with contextlib.suppress(ClusterLost):
                unless_lost(ray.shutdown)
        if session is not None:
            (tell_kept if has_failed else remove_session)(session)


@contextlib.contextmanager
def _same_sigterm() -> Iterator[None]:
    """Ray takes SIGTERM over, and would end the process where the caller's handler writes a checkpoint."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


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
    share, count = (1.0, int(wanted)) if wanted >= 1 else (wanted, 1)
    found = [k for k, free in enumerate(shares) if free + 1e-9 >= share][:count]
    if wanted and len(found) < count:
        return False
    for k in found:
        shares[k] -= share
    return True
