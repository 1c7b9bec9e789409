"""Set the four switches that Ray has no public name for; without them clusters and sweeps work all the same.

Private names of Ray are taken here and in ``ray_quick_start`` alone. A Ray without one of the four is used as it
is; only :func:`reports_in` says what is then different.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What Ray reports of a cluster; a file of the run's folder.
RAY_LOG = "ray.log"
_LOGGER = logging.getLogger("fedsweep")


@contextlib.contextmanager
def loopback_only() -> Iterator[None]:
    """Start clusters on 127.0.0.1, also where Ray was imported before the environment said so.

    Ray reads ``RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER`` once, when it is imported; in a notebook that may be before us.
    The switch came with https://github.com/ray-project/ray/issues/18730.
    """
    with replaced("ray._private.ray_constants", "ENABLE_RAY_CLUSTER", False):
        yield


@contextlib.contextmanager
def reports_in(folder: Path | None) -> Iterator[None]:
    """Write what Ray reports of the cluster to ``ray.log`` in a folder.

    Ray prints it to the driver's output, which is ours, whatever ``log_to_driver`` says.

    Args:
        folder: None: it is dropped.
    """

    def write(data: dict[str, Any], *unused: Any, **also_unused: Any) -> None:
        if folder is None:
            return
        # Not through a link; and a folder that is gone is the run's own trouble.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        with contextlib.suppress(OSError), open(os.open(folder / RAY_LOG, flags, 0o644), "a", errors="replace") as file:
            file.writelines(f"{line}\n" for line in data.get("lines", ()))

    with replaced("ray._private.worker", "print_to_stdstream", write) as before:
        if before is None:
            _LOGGER.info("This Ray prints what it reports of the cluster here, not to %s", RAY_LOG)
        yield


@contextlib.contextmanager
def uncounted_callbacks() -> Iterator[None]:
    """Keep Ray Tune from importing every tracker that is installed, which takes seconds, to count a sweep's callbacks.

    The count is for usage statistics, which are off.
    """
    with replaced("ray.air._internal.usage", "tag_callbacks", lambda callbacks: False):
        yield


@contextlib.contextmanager
def any_loss() -> Iterator[None]:
    """Have Ray Tune take each of Ray's own errors for a lost process of a trial, which it tries again.

    It knows the death of an actor by one class, which that of one that Ray ended for want of memory is not of: the
    whole sweep would end with it.
    """
    from ray.exceptions import RayActorError, RayError, RayTaskError

    def failed(manager: Any, tracked_actor_task: Any, exception: Exception) -> None:
        is_other = isinstance(exception, RayError) and not isinstance(exception, RayActorError | RayTaskError)
        before(manager, tracked_actor_task, RayActorError(error_msg=str(exception)) if is_other else exception)

    owner, name = "ray.air.execution._internal.actor_manager:RayActorManager", "_actor_task_failed"
    with replaced(owner, name, failed) as before:
        yield


@contextlib.contextmanager
def replaced(owner: str, name: str, value: Any) -> Iterator[Any]:
    """Replace an attribute of a module or of ``module:Class`` for a while; yields what was there, None if nothing."""
    try:
        holder = pkgutil.resolve_name(owner)
        before = getattr(holder, name)
    except (ImportError, AttributeError):
        yield None
        return
    setattr(holder, name, value)
    try:
        yield before
    finally:
        setattr(holder, name, before)
