"""What each of our processes does first: it looks for modules last in the working folder, and seldom for dead cycles.

A run folder may come from others, and whoever looks at it stands in it: a ``yaml.py`` there must not take the place of
the library. So the working folder is the last on the path, in the driver and in every process of the cluster.

Libraries of some hundred thousand objects are no place to look for unreachable cycles often.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_VARIABLE = "FEDSWEEP_USER_FOLDERS"
# New objects between two searches; by default 700, and a driver and its actors look in vain while they import torch.
_NEW_OBJECTS = 50_000


def collect_seldom() -> None:
    """For a process of our own, before it imports anything large."""
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])


def look_here_last() -> None:
    """Move the working folder to the end of this process's import path, wherever it stood."""
    _look_last([os.getcwd()])


def begin_worker() -> None:
    """A worker of a cluster, before it has read anything of the run, looks in the driver's folders last."""
    collect_seldom()
    _look_last(os.environ.get(_VARIABLE, "").split(os.pathsep))


def worker_settings() -> dict[str, Any]:
    """What ``ray.init`` must be told so that workers find the user's modules, and find them last.

    Ray itself would put the driver's working folder first.
    """
    from ray.job_config import JobConfig

    job = JobConfig()
    job._py_driver_sys_path = _Unchanged()
    hook = f"{begin_worker.__module__}.{begin_worker.__name__}"
    variables: Mapping[str, str] = {_VARIABLE: os.pathsep.join(_driver_folders())}
    return {"job_config": job, "runtime_env": {"worker_process_setup_hook": hook, "env_vars": variables}}


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


def _driver_folders() -> list[str]:
    """The script's own folder, where there is a script of the user's, and the working folder."""
    script = os.path.dirname(os.path.realpath(sys.argv[0])) if sys.argv and sys.argv[0] else ""
    return list(dict.fromkeys([*([script] if script in sys.path else []), os.getcwd()]))


def _look_last(folders: Iterable[str]) -> None:
    last = [folder for folder in dict.fromkeys(folders) if folder]
    moved = {*last, ""} if os.getcwd() in last else {*last}
    sys.path[:] = [*(entry for entry in sys.path if entry not in moved), *last]


class _Unchanged(list[str]):
    """A list to which Ray adds its own folders in vain."""

    def extend(self, values: Iterable[str], /) -> None:
        """Nothing."""
