"""The high-frequency group alone, from a table of label counts: the engine of ``fedsweep select``."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsweep import ConfigError, DataError, stream
from fedsweep.bounded import MOST_DOCUMENT_BYTES, read_regular
from fedsweep.components import population

from .chooser import GroupProblem
from .exact import ExactGroup
from .names import group_chooser
from .scores import group_divergence

Counts = NDArray[np.int64]

# Sums of counts are computed in floats, where whole numbers above this are no longer exact.
_MOST_SAMPLES = 1 << 53
# Nobody waits for a round here, so the exact search may take some ten times as long as in one.
_EXACT_PAIRS = 1 << 32


@dataclass(frozen=True, kw_only=True)
class Selected:
    """A chosen group.

    Attributes:
        clients: Row numbers from 0, ascending; empty where nobody may be in a group.
        kl_divergence: Of the group's labels from the population's, in nats; None for the empty group.
        seconds: Time that the choice took.
        lower_bound: No admissible group has a smaller divergence; only from the exact method.
    """

    clients: tuple[int, ...]
    kl_divergence: float | None
    seconds: float
    lower_bound: float | None = None


def select_group(
    counts_NC: Counts,
    *,
    method: str = "dynacomm",
    size: int | None = None,
    max_size: int | None = None,
    eligible: Iterable[int] | None = None,
    seed: int = 0,
    orders: int = 10,
) -> Selected:
    """Choose a group among all rows; the population is all rows, too.

    Args:
        counts_NC: Each client's samples per class; at least one client, each with at least one sample.
        method: A name of :data:`~fedsweep.algorithms.dynamicfl.names.GROUP_CHOOSERS`.
        size: Of the group; None: at most ``max_size``.
        max_size: Greatest size; None: all. Not together with ``size``.
        eligible: Row numbers of those that may be in the group; None: all.
        seed: Of everything random.
        orders: Random orders, of the methods that try some; at least 1.

    Raises:
        ConfigError: An unknown method, a size or a row number that is out of range, or both sizes.
        ResourceError: The method needs a library that is not installed.
    """
    num_clients = len(counts_NC)
    if size is not None and max_size is not None:
        raise ConfigError(
            f"size and max_size exclude each other, but got size={size}, max_size={max_size}; leave one out"
        )
    if max_size is not None and max_size < 0:
        raise ConfigError(f"max_size must not be negative, but got {max_size}")
    problem = GroupProblem(
        counts_AC=counts_NC,
        population_C=population(counts_NC),
        eligible_A=_eligible(eligible, num_clients),
        max_size=num_clients if max_size is None else min(max_size, num_clients),
        stream=stream(seed, "select"),
    )
    chooser = group_chooser(method, orders=orders, max_pairs=_EXACT_PAIRS)
    if chooser.setup(problem.stream):
        raise ConfigError(
            f"the group chooser {method!r} needs what clients measure on a model, and a table of label counts has none;"
            " choose by dynacomm, or set it as method.group of a run"
        )
    start = time.perf_counter()
    lower_bound = None
    if isinstance(chooser, ExactGroup):
        solution = chooser.solve(problem, size=size)
        group, lower_bound = solution.group, solution.lower_bound
    else:
        group = chooser.choose(problem, size=size)
    seconds = time.perf_counter() - start
    return Selected(
        clients=group,
        kl_divergence=group_divergence(problem, group) if group else None,
        seconds=seconds,
        lower_bound=lower_bound if group else None,
    )


def _eligible(rows: Iterable[int] | None, num_clients: int) -> NDArray[np.bool_]:
    if rows is None:
        return np.ones(num_clients, dtype=bool)
    wanted = list(rows)
    wrong = [row for row in wanted if not 0 <= row < num_clients]
    if wrong:
        raise ConfigError(
            f"eligible must name rows of the table, 0 to {num_clients - 1}, but has {', '.join(map(str, wrong[:5]))}"
        )
    flags = np.zeros(num_clients, dtype=bool)
    flags[wanted] = True
    return flags


def read_counts(path: str | os.PathLike[str]) -> Counts:
    """Read the table of a CSV file without a header: a row per client, a column per class, ``[N, C]``.

    Raises:
        DataError: No such file, no rows, rows of different lengths, an entry that is no whole number of at least 0, or
            a client without samples; the message names file and line.
    """
    try:
        data = read_regular(Path(path).expanduser(), max_bytes=MOST_DOCUMENT_BYTES, follow=True)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is no UTF-8 text ({error}); save the counts as a CSV file") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; give a CSV file of label counts") from error
    lines = text.rstrip().splitlines()
    if not lines:
        raise DataError(f"{path} is empty; it must have a row of counts per client")
    table = (line.split(",") for line in lines)
    rows = [_counts_of_line(cells, f"{path}, line {line}", line) for line, cells in enumerate(table, 1)]
    for line, row in enumerate(rows, 1):
        if len(row) != len(rows[0]):
            raise DataError(
                f"{path}, line {line}: all rows must have a column per class, but this one has {len(row)} and line 1"
                f" has {len(rows[0])}"
            )
    if sum(map(sum, rows)) >= _MOST_SAMPLES:
        raise DataError(f"{path}: the counts must sum to less than {_MOST_SAMPLES}, but sum to {sum(map(sum, rows))}")
    return np.asarray(rows, dtype=np.int64)


def _counts_of_line(cells: list[str], where: str, line: int) -> list[int]:
    if not any(cell.strip() for cell in cells):
        raise DataError(f"{where}: the row is empty; take it out, or give the client's counts")
    counts = []
    for column, cell in enumerate(cells):
        text = cell.strip()
        if not re.fullmatch(r"-?[0-9]{1,20}", text):
            header = "; the file has no header" if line == 1 else ""
            raise DataError(f"{where}: column {column} must be a whole number of samples, but is {text[:40]!r}{header}")
        if text.startswith("-") and int(text):
            raise DataError(f"{where}: column {column} must be a number of samples, at least 0, but is {text}")
        counts.append(int(text))
    if not any(counts):
        raise DataError(f"{where}: the client has no samples; take the row out")
    return counts
