"""Start a Ray cluster of our own in less time, by names that Ray does not promise.

Nothing depends on it: a Ray without one of the names starts as everybody's does (:func:`worker_settings`), with a
sentence; and whoever deletes this module puts that function in the place of :func:`quick_settings`.

Two things are left out. A node's autoscaler, log monitor and dashboard server are Python processes that serve nothing
here. And by a runtime environment each worker would import Ray twice, once to set variables: it inherits them instead.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fedsweep.fleet.ray_internals import replaced
from fedsweep.processes import HOOK, worker_settings, worker_variables

# How a node starts what serves nothing.
_NOT_NEEDED = ("start_monitor", "start_log_monitor", "start_api_server")
_LOGGER = logging.getLogger("fedsweep")


@contextlib.contextmanager
def quick_settings(*, dashboard: bool) -> Iterator[dict[str, Any]]:
    """Yield the arguments of ``ray.init`` with which a cluster starts quickly, if it is called within.

    Args:
        dashboard: Ray's dashboard is wanted, and all that belongs to it.
    """
    with contextlib.ExitStack() as stack:
        settings: dict[str, Any] | None = None
        if not dashboard:
            try:
                settings = _prepare(stack)
            except (ImportError, AttributeError) as error:
                name = "Ray starts more slowly: this Ray has another name for what fedsweep leaves out (%s)"
                _LOGGER.info(name, error)
        # Outside of the try: what Ray itself raises as it starts is no missing name.
        yield stack.enter_context(worker_settings()) if settings is None else settings


def plain_trials() -> contextlib.AbstractContextManager[Any]:
    """Have Ray Tune, on a cluster of our own, start trials' processes without a runtime environment for each.

    It makes one for another library's sake and for variables that processes on this machine inherit anyway.
    """
    import ray

    actor_class = functools.cache(ray.remote)
    owner = "ray.tune.execution.class_cache:_ActorClassCache"
    return replaced(owner, "get", lambda cache, trainable: actor_class(trainable))


def _prepare(stack: contextlib.ExitStack) -> dict[str, Any]:
    """Prepare Ray and the environment, until the stack is closed.

    Raises:
        ImportError: This Ray does not have one of the modules.
        AttributeError: This Ray does not have one of the names.
    """
    from ray._private.node import Node
    from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR
    from ray.job_config import JobConfig

    job = JobConfig()
    _ = job._py_driver_sys_path, *(getattr(Node, name) for name in _NOT_NEEDED)
    # Ray would put the driver's working folder first on each worker's path.
    job._py_driver_sys_path = _Unchanged()
    for name in _NOT_NEEDED:
        stack.enter_context(replaced("ray._private.node:Node", name, lambda node, **settings: None))
    stack.enter_context(_environment({WORKER_PROCESS_SETUP_HOOK_ENV_VAR: HOOK, **worker_variables()}))
    return {"job_config": job}


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process for a while; processes that are started meanwhile keep them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class _Unchanged(list[str]):
    """A list to which Ray adds its own folders in vain."""

    def extend(self, values: Iterable[str], /) -> None:
        """Do nothing."""
