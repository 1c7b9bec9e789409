"""What each of our processes does first: it looks for modules last in the working folder, and seldom for dead cycles.

A run folder may come from others, and whoever looks at it stands in it: a ``yaml.py`` there must not take the place of
the library. So the working folder is the last on the path, in the driver and in every process of the cluster.

Libraries of some hundred thousand objects are no place to look for unreachable cycles often, and memory that one step
gives back is what the next one asks for.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

_VARIABLE = "FEDSWEEP_USER_FOLDERS"
# New objects between two searches; by default 700, and a driver and its actors look in vain while they import torch.
_NEW_OBJECTS = 50_000
_HOOK = f"{__name__}.begin_worker"
# glibc's names for mallopt: from which size a block is a mapping of its own, and how much free memory stays at the top.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
_LARGEST_ON_HEAP, _FREE_THAT_STAYS = 2**30, 2**31 - 1


def collect_seldom() -> None:
    """For a process of our own, before it imports anything large."""
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])


def keep_freed_memory() -> None:
    """Have the allocator keep what is freed, for a process of our own; without glibc nothing changes.

    By default a tensor of some megabytes is mapped anew for each layer of each step, and the kernel clears every page
    of it: a seventh of a step of FedStg's network on one core, a third of an evaluation.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
        mallopt(_M_TRIM_THRESHOLD, _FREE_THAT_STAYS)


def look_here_last() -> None:
    """Move the working folder to the end of this process's import path, wherever it stood."""
    _look_last([os.getcwd()])


def begin_worker() -> None:
    """A worker of a cluster, before it has read anything of the run, looks in the driver's folders last."""
    collect_seldom()
    keep_freed_memory()
    _look_last(os.environ.get(_VARIABLE, "").split(os.pathsep))


def worker_settings() -> dict[str, Any]:
    """What ``ray.init`` must be told so that workers of a cluster that is joined find the user's modules, and last."""
    return {**job_settings(), "runtime_env": {"worker_process_setup_hook": _HOOK, "env_vars": _folder_variables()}}


def job_settings() -> dict[str, Any]:
    """The part of it that concerns the driver: Ray itself would put the driver's working folder first."""
    from ray.job_config import JobConfig

    job = JobConfig()
    job._py_driver_sys_path = _Unchanged()
    return {"job_config": job}


def worker_variables() -> dict[str, str]:
    """The other part, as the environment of a raylet of our own: its workers inherit it.

    By a ``runtime_env`` each worker would import Ray twice, once to set variables, and the first one would wait for
    the process that serves such environments.
    """
    from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR

    return {WORKER_PROCESS_SETUP_HOOK_ENV_VAR: _HOOK, **_folder_variables()}


@contextlib.contextmanager
def silenced(*names: str) -> Iterator[None]:
    """Loggers that say nothing for a while, since what they tell of is reported otherwise or does not apply here."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of a library's module or class that are ours for a while; one that it does not have stays away."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name in before:
            setattr(owner, name, values[name])
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _folder_variables() -> dict[str, str]:
    """The script's own folder, where there is a script of the user's, and the working folder."""
    script = os.path.dirname(os.path.realpath(sys.argv[0])) if sys.argv and sys.argv[0] else ""
    folders = dict.fromkeys([*([script] if script in sys.path else []), os.getcwd()])
    return {_VARIABLE: os.pathsep.join(folders)}


def _look_last(folders: Iterable[str]) -> None:
    last = [folder for folder in dict.fromkeys(folders) if folder]
    moved = {*last, ""} if os.getcwd() in last else {*last}
    sys.path[:] = [*(entry for entry in sys.path if entry not in moved), *last]


class _Unchanged(list[str]):
    """A list to which Ray adds its own folders in vain."""

    def extend(self, values: Iterable[str], /) -> None:
        """Nothing."""
