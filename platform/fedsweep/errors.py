"""Every exception that fedsweep raises on purpose.

    FedsweepError
    +-- InputError (ValueError)           the user's input is wrong: exit code 2, nothing is written
    |   +-- ConfigError                   a key, a value, a combination of keys
    |   +-- DataError                     a data set that is missing, damaged or does not fit
    |   +-- ResourceError                 a GPU, a Ray cluster, a tracking store that is not there
    |   +-- OutputError                   the output folder is in use or holds something else
    +-- RunError (RuntimeError)           the run failed on its way: exit code 1
        +-- ClientJobError                a client's work failed; names client, round and step
        +-- ComponentError                a component of the method or the world raised something
        +-- WorkerLost                    a client actor died or hangs (the fleet replaces it)
        +-- MemoryLost                    what clients remember was lost with a node (the run goes back)
        +-- ClusterLost                   our own Ray cluster lost a process that it can't do without
        +-- InvariantError                the engine or a component broke a promise

A message states the rule, the values seen, and the way out.
"""

from __future__ import annotations

import difflib
import errno
import functools
from collections.abc import Iterable

_MOST_LISTED, _NEAREST = 40, 3
# What keys are called elsewhere.
_OTHER_WORDS = {"learning_rate": "lr", "epochs": "local_epochs", "num_clients": "clients", "num_rounds": "rounds"}


class FedsweepError(Exception):
    """Base of all exceptions raised on purpose."""


class InputError(FedsweepError, ValueError):
    """The user's input is wrong; nothing has been written."""


class ConfigError(InputError):
    """A configuration key, its value, or a combination of keys is wrong."""


class DataError(InputError):
    """A data set is missing, damaged, or does not fit what is asked of it."""


class ResourceError(InputError):
    """A resource that was asked for (GPU, cluster, store) is not there."""


class OutputError(InputError):
    """The output folder is in use or holds something else."""


class RunError(FedsweepError, RuntimeError):
    """The run failed on its way."""


class ClientJobError(RunError):
    """A client's local work failed.

    Attributes:
        client: The client's id, from 0.
        round: The round, from 1.
        step: The local step within the round, from 1 (0: before the first step).
        reason: What went wrong, in words.
    """

    def __init__(self, *, client: int, round: int, step: int, reason: str) -> None:
        super().__init__(client, round, step, reason)
        self.client = client
        self.round = round
        self.step = step
        self.reason = reason

    def __str__(self) -> str:
        return f"client {self.client} failed in round {self.round}, local step {self.step}: {self.reason}"

    def __reduce__(self) -> tuple[object, ...]:
        rebuild = functools.partial(
            ClientJobError, client=self.client, round=self.round, step=self.step, reason=self.reason
        )
        return rebuild, ()


class ComponentError(RunError):
    """A component of the method or the world raised something; names component, file, line and round."""


class WorkerLost(RunError):
    """A client actor died or does not answer; its unfinished work is lost."""


class MemoryLost(RunError):
    """A node is gone, and clients' memory with it; the run goes back to its last checkpoint."""


class ClusterLost(RunError):
    """Our own Ray cluster lost a process that it can't do without."""


class InvariantError(RunError):
    """The engine or a component broke a promise that it makes."""


def unknown_name(kind: str, name: str, choices: Iterable[str]) -> str:
    """Return a sentence on an unknown name: the nearest choice, and all of them, or the nearest where they are many."""
    names = sorted(choices)
    near = _nearest(name, names)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    if len(names) <= _MOST_LISTED:
        return f"unknown {kind} {name!r}{hint} (known: {', '.join(names)})"
    shown = near if len(near) > 1 else [*near, *(other for other in names[:_NEAREST] if other not in near)]
    return f"unknown {kind} {name!r}{hint} (known: {', '.join(shown)} and {len(names) - len(shown)} more)"


def _nearest(name: str, names: list[str]) -> list[str]:
    """Return the names that may be meant, likeliest first: by their last part, whatever its case, or by spelling."""
    lower = {choice.lower(): choice for choice in names}
    wanted = name.lower().rpartition(".")[2]
    wanted = _OTHER_WORDS.get(wanted, wanted)
    ends = [choice for choice in names if choice.lower().rpartition(".")[2] == wanted]
    close = difflib.get_close_matches(name.lower(), lower, n=_NEAREST, cutoff=0.5)
    return list(dict.fromkeys([*ends, *(lower[word] for word in close)]))[:_NEAREST]


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, or its type's name where it has none; a lack of memory by that name."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return f"not enough memory ({line})" if lacks_memory(error) else line


# Of torch, of the loader of shared libraries, of C++ libraries, and of Python's threads.
_NO_MEMORY = (
    "can't allocate memory",
    "failed to map segment",
    "cannot allocate memory",
    "bad_alloc",
    "start new thread",
)


def lacks_memory(error: Exception) -> bool:
    """Return whether it is Python's error, torch's for a GPU, or one of a library, told by its text alone."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, ImportError | RuntimeError) and any(text in str(error) for text in _NO_MEMORY))
    )


def lacks_room(error: BaseException | None) -> bool:
    """Return whether it is a full disk, the user's share of one, or raised from or after that; SQLite's by its text."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        # Not by its text, which a class of a user's own may fail to give.
        if any(isinstance(word, str) and "database or disk is full" in word for word in error.args):
            return True
        error = error.__cause__ or error.__context__
    return False
