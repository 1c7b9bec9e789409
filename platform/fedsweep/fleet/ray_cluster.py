"""Join or start a Ray cluster, in this one place.

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsweep.errors import ClusterLost, InputError, ResourceError
from fedsweep.fleet.ray_internals import reports_in
from fedsweep.fleet.ray_leftovers import log_kept, remove_session
from fedsweep.fleet.ray_start import ClusterNeeds, ClusterStart, num_gpus_here, set_environment
from fedsweep.fleet.ray_watch import exit_notice, shut_down, watched_call, watched_cluster
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
    """Connect Ray to a cluster that can hold a run; leave or end it afterwards.

    Where this process is connected to Ray already, that connection is used and kept.

    Args:
        address: ``"auto"``, ``"host:port"``, or None for a cluster of our own.
        needs: What the run asks for.
        dashboard: Start the dashboard of a cluster of our own, on 127.0.0.1.
        folder: Where what Ray reports is kept, in ``ray.log``; None: it is dropped.
        begun: A cluster of our own that is starting already; it ends with this one.

    Raises:
        ResourceError: No cluster there, or it can't hold the run.
    """
    notice = exit_notice(folder if begun is None else None)  # whoever began it early has one
    if begun is not None and not begun.fits(needs):
        begun.end()
        begun = None
    with notice, _connected(address, needs, dashboard=dashboard, folder=folder, begun=begun) as ray:
        yield ray


@contextlib.contextmanager
def _connected(
    address: str | None, needs: ClusterNeeds, *, dashboard: bool, folder: Path | None, begun: ClusterStart | None
) -> Iterator[Any]:
    set_environment(joining=address is not None)
    import ray

    if ray.is_initialized() and begun is None:
        check_fits([node["Resources"] for node in ray.nodes() if node["Alive"]], needs)
        yield ray
        return
    sessions: set[Path] = set()
    with _same_sigterm():
        if address is None:
            check_gpus(needs)
            cluster = begun or ClusterStart(needs, dashboard=dashboard)
            cluster.take()
            sessions = cluster.mark_sessions()
        else:
            _join(ray, address)
    has_failed = False
    with reports_in(folder), watched_cluster() if address is None else contextlib.nullcontext():
        try:
            if address is not None:
                check_fits([node["Resources"] for node in ray.nodes() if node["Alive"]], needs)
            yield ray
        except BaseException as error:
            has_failed = not isinstance(error, InputError | KeyboardInterrupt)
            raise
        finally:
            shut_down()
            for session in sessions:
                (log_kept if has_failed else remove_session)(session)


@contextlib.contextmanager
def _same_sigterm() -> Iterator[None]:
    """Keep the caller's handler of SIGTERM, which writes a checkpoint; Ray puts one there that ends the process."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if callable(handler) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def check_gpus(needs: ClusterNeeds) -> None:
    """Raise a ResourceError where this machine has not the GPUs."""
    wanted = needs.gpus_per_client * needs.actors + needs.gpus_per_server
    num_gpus = num_gpus_here()
    if wanted > num_gpus + 1e-9:  # fifteen fifths are a hair above 3
        raise ResourceError(
            f"runtime.gpus_per_client={needs.gpus_per_client:g} with {needs.actors} client actors and"
            f" runtime.gpus_per_server={needs.gpus_per_server:g} ask for {wanted:g} GPUs, but this machine has"
            f" {num_gpus}; set both to 0, or join a cluster by runtime.address"
        )


def _join(ray: Any, address: str) -> None:
    host, _, port = address.rpartition(":")
    if address != "auto":
        _check_listening(address, host, port)
    until = time.monotonic() + _JOIN_TIMEOUT_S
    try:
        with worker_settings(ship=True) as settings:
            # Asked without a token, or with a wrong one, Ray asks again and again.
            watched_call(
                lambda: _connect(ray, address, settings),
                lambda: "its patience" if time.monotonic() > until else None,
            )
    except (ConnectionError, RuntimeError, ValueError, OSError, SystemExit, ray.exceptions.RayError) as error:
        reason = f"no answer within {_JOIN_TIMEOUT_S:g} s" if isinstance(error, ClusterLost) else error
        raise ResourceError(
            f"runtime.address={address!r}: no Ray cluster could be joined there ({reason}); is it up, is its token in"
            " RAY_AUTH_TOKEN or ~/.ray/auth_token with RAY_AUTH_MODE=token, and is this machine allowed in?"
        ) from error


def _connect(ray: Any, address: str, settings: Mapping[str, Any]) -> None:
    connect = functools.partial(
        ray.init, address=address, namespace="fedsweep", log_to_driver=False, logging_level="ERROR"
    )
    try:
        connect(**settings)
    except ValueError:
        # A job that was submitted with a working folder has one, and Ray refuses a second.
        own = {name: value for name, value in settings["runtime_env"].items() if name != "working_dir"}
        connect(runtime_env=own)


def _check_listening(address: str, host: str, port: str) -> None:
    if not host or not port.isdigit():
        raise ResourceError(f"runtime.address must be 'auto' or 'host:port', but got {address!r}")
    try:
        with socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S):
            return
    except (OSError, OverflowError) as error:
        raise ResourceError(f"runtime.address={address!r}: nothing answers there ({error})") from error


def check_fits(nodes: Sequence[dict[str, float]], needs: ClusterNeeds) -> None:
    """Check that every actor finds a node; fractions of a GPU don't add up over GPUs.

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
    """Take a fraction of one GPU, or whole ones; return whether they were free."""
    share, count = (1.0, int(wanted)) if wanted >= 1 else (wanted, 1)
    fitting = [k for k, free in enumerate(shares) if free + 1e-9 >= share][:count]
    if wanted and len(fitting) < count:
        return False
    for k in fitting:
        shares[k] -= share
    return True
