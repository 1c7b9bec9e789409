"""Begin each of our processes: it looks for modules last in the working folder, and seldom for dead cycles.

A run folder may come from others, and whoever looks at it stands in it: a ``yaml.py`` there must not take the place of
the library. So the working folder is the last on the path, in the driver and in every process of the cluster.

Libraries of some hundred thousand objects are no place to look for unreachable cycles often, and memory that one step
gives back is what the next one asks for.

Folders for what nobody keeps go with the process that made them; those of killed ones with the next that needs one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import logging
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from fedsweep.errors import ResourceError

_VARIABLE = "FEDSWEEP_USER_FOLDERS"
# New objects between two searches; by default 700, and a driver and its actors look in vain while they import torch.
_NEW_OBJECTS = 50_000
# What Ray calls first in each worker.
HOOK = f"{__name__}.begin_worker"
_SCRATCH = "fedsweep-scratch-"
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# glibc's names for mallopt: from which size a block is a mapping of its own, and how much free memory stays at the top.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1
_LARGEST_ON_HEAP, _FREE_THAT_STAYS = 2**30, 2**31 - 1
# A run of four rounds on digits took a little less on Linux, and failed with 50 MB less.
_LEAST_ADDRESSES = 10**9
# A run on digits in one process, with its pictures and MLflow, took 380 MB; with 345 the kernel killed it at its end.
_LEAST_MEMORY = 4 * 10**8
_OWN_GROUPS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def collect_seldom() -> None:
    """Collect garbage seldom; for a process of our own, before it imports anything large."""
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])


def keep_freed_memory() -> None:
    """Have the allocator keep what is freed, for a process of our own; without glibc nothing changes.

    By default a tensor of some megabytes is mapped anew for each layer of each step, and the kernel clears every page
    of it: a seventh of a step of a network of 2.5 million values on one core, a third of an evaluation.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_ON_HEAP)
        mallopt(_M_TRIM_THRESHOLD, _FREE_THAT_STAYS)


def check_addresses() -> None:
    """Check that the process may map what the libraries take: with less, C++ may abort without a word of its own.

    Raises:
        ResourceError: It may not.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < _LEAST_ADDRESSES:
        raise ResourceError(
            f"not enough memory: ulimit -v leaves {limit // 10**6} MB of addresses, and the libraries alone take"
            f" {_LEAST_ADDRESSES // 10**6} MB; raise it"
        )


def check_memory() -> None:
    """Check that there is what a small run takes: where a control group leaves less, the kernel kills it unheard.

    Raises:
        ResourceError: There is not.
    """
    if (here := memory_here()) < _LEAST_MEMORY:
        raise ResourceError(
            f"not enough memory: this container, job (its control group) or machine has {here // 10**6} MB, and a small"
            f" run takes {_LEAST_MEMORY // 10**6} MB; raise the limit"
        )


def memory_here() -> int:
    """Return the memory of this machine in bytes, or the least that the process's control groups leave of it.

    A container sees its own group at the top; elsewhere each group below the top may have a limit.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for line in _OWN_GROUPS.read_text().splitlines() if _OWN_GROUPS.is_file() else ():
        _, kinds, place = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        top, name = (_GROUPS / "memory", "memory.limit_in_bytes") if kinds else (_GROUPS, "memory.max")
        for group in (Path(place), *Path(place).parents):
            with contextlib.suppress(OSError, ValueError):  # a container sees no such group; "max" is no limit
                limits.append(int((top / group.relative_to("/") / name).read_text()))
    return min(limits)


def look_here_last() -> None:
    """Move the working folder to the end of this process's import path, wherever it stood.

    Raises:
        ResourceError: It was removed.
    """
    try:
        _look_last([os.getcwd()])
    except FileNotFoundError as error:
        raise ResourceError("the working folder was removed; go to one that is there") from error


def begin_worker() -> None:
    """Have a worker of a cluster look in the driver's folders last, before it reads anything of the run.

    It works in the driver's working folder, the last of them, where its node has that; elsewhere in the job's own,
    which has the user's modules that were shipped.
    """
    os.environ.update(_ONE_THREAD)
    collect_seldom()
    keep_freed_memory()
    folders = [*os.environ.get(_VARIABLE, "").split(os.pathsep), os.getcwd()]
    with contextlib.suppress(OSError):
        os.chdir(folders[-2])
    _look_last(folders)


@contextlib.contextmanager
def worker_settings(*, ship: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the arguments of ``ray.init`` with which workers find the user's modules, and last.

    When a worker gets its first task, Ray would put the driver's working folder first on its path; but not where the
    job brings a working folder of its own (https://github.com/ray-project/ray/pull/63756). So it brings an empty one,
    which Ray has read when ``ray.init`` returns; workers then go to the driver's (:func:`begin_worker`).

    Args:
        ship: Put the user's modules that this process has imported into it, for nodes without the driver's folder.
    """
    with scratch_folder() as empty:
        for place, source in (_own_modules() if ship else {}).items():
            target = empty / place
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        variables = {**worker_variables(), **_ONE_THREAD}
        yield {"runtime_env": {"worker_process_setup_hook": HOOK, "env_vars": variables, "working_dir": str(empty)}}


@contextlib.contextmanager
def silenced(*names: str) -> Iterator[None]:
    """Silence loggers for a while: what they report is reported otherwise or does not apply here."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def worker_variables() -> dict[str, str]:
    """Return what workers read when they begin: the user's own folders, a script's among them, and the working one."""
    script = os.path.dirname(os.path.realpath(sys.argv[0])) if sys.argv and sys.argv[0] else ""
    own, here = {script, *_added_folders()}, os.getcwd()
    entries = [entry for entry in sys.path if isinstance(entry, str)]  # imports pass over others, too
    before = dict.fromkeys(folder for folder in map(os.path.abspath, entries) if folder in own and folder != here)
    return {_VARIABLE: os.pathsep.join([*before, here])}


def _added_folders() -> set[str]:
    """Return the folders of imported modules that a program put on the path; all others a worker has by itself."""
    of_environment = {*map(os.path.abspath, os.environ.get("PYTHONPATH", "").split(os.pathsep))}
    folders = {folder for folder, _, _ in _imported()} - of_environment
    installed = (f"{sys.prefix}{os.sep}", f"{sys.base_prefix}{os.sep}")
    by_name = {"site-packages", "dist-packages"}  # a user's own installation lies elsewhere
    return {f for f in folders if os.path.isdir(f) and not f.startswith(installed) and not by_name & {*Path(f).parts}}


def _own_modules() -> dict[str, str]:
    """Return the files of modules that were imported from the user's folders, by their places in these."""
    folders = worker_variables()[_VARIABLE].split(os.pathsep)
    return {place: source for folder, place, source in _imported() if folder in folders and os.path.isfile(source)}


def _imported() -> Iterator[tuple[str, str, str]]:
    """Yield the folder of each module that is neither fedsweep's nor installed with it, its place there, its file."""
    for name, module in list(sys.modules.items()):
        source = getattr(module, "__file__", None) or ""
        if name.split(".")[0] in ("fedsweep", "__main__") or source.startswith(sys.prefix):
            continue
        for end in (".py", f"{os.sep}__init__.py"):
            place = os.path.join(*name.split(".")) + end
            if source.endswith(f"{os.sep}{place}"):
                yield os.path.abspath(source.removesuffix(place)), place, source


def _look_last(folders: Iterable[str]) -> None:
    last = [folder for folder in dict.fromkeys(folders) if folder]
    moved = {*last, ""} if os.getcwd() in last else {*last}
    sys.path[:] = [*(entry for entry in sys.path if entry not in moved), *last]


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder below the system's for temporary files, and remove it after the block with all that is in it.

    The kernel locks it for as long as this process lives, so those that killed processes left behind are known by
    their having no lock; they are removed first.
    """
    _remove_stale()
    folder, handle = _make_locked()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _make_locked() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        with contextlib.suppress(FileNotFoundError):  # before it is locked, another process may take it for a stale one
            handle = _open(folder)
            fcntl.flock(handle, fcntl.LOCK_EX)
            if folder.is_dir():
                return folder, handle
            os.close(handle)


def _remove_stale() -> None:
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):  # another user's, or a link
            handle = _open(folder)
            try:
                if os.fstat(handle).st_uid == os.getuid():
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
