"""What clients hold and when they took part, small enough for a page.

Both are maps of cells. Where there are more clients or rounds than a page has room for, neighbours share a cell. Many
runs of a sweep have the same clients and the same cohorts, so each map is kept once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedsweep.errors import InputError, OutputError
from fedsweep.figures.scenario import shown_clients
from fedsweep.figures.scenario_arrays import class_shares_of
from fedsweep.reports.report_groups import label_summary, size_of
from fedsweep.results.view import RunView
from fedsweep.runs.run_folder import CLIENTS, RunFolder

_MOST_CLIENTS, _MOST_ROUNDS, _MOST_CLASSES = 160, 200, 256
_LARGEST_ID = 10_000_000
_MOST_DRIFT_CLASSES = 32
# Characters of all maps on a page.
_BUDGET = 900_000
_LEVELS = 9
_LAYERS = ("cohort", "high", "present", "attended")
_ZEROS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(kw_only=True)
class ClientMaps:
    """The maps of a page, each once.

    Attributes:
        splits: How the data fall to clients.
        layers: Who took part, by round.
        views: What is shown for a run: indices into the two, by the run's index.
        notes: What a reader must know.
        size: Characters that they take, roughly.
    """

    splits: list[dict[str, Any]] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    views: dict[int, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    size: int = 0
    _places: dict[str | bytes, int] = field(default_factory=dict)

    def add_split(self, counts_NC: np.ndarray) -> int:
        """The place of a split, which is kept where it is new."""
        key = repr(counts_NC.shape).encode() + counts_NC.tobytes()
        if key not in self._places:
            self._places[key] = len(self.splits)
            self.splits.append(split_tree(counts_NC))
            self.size += 4 * len(self.splits[-1]["cells"])
        return self._places[key]

    def add_layer(self, text: str) -> int:
        """The place of a packed map, which is kept where it is new."""
        if text not in self._places:
            self._places[text] = len(self.layers)
            self.layers.append(text)
            self.size += len(text)
        return self._places[text]

    def tree(self) -> dict[str, Any]:
        """As the page's script reads it."""
        return {"splits": self.splits, "layers": self.layers, "views": {str(k): v for k, v in self.views.items()}}


def client_maps(runs: Sequence[RunView], order: Sequence[int]) -> ClientMaps:
    """The maps of the runs, as many as a page has room for.

    Args:
        runs: All runs.
        order: Indices of the runs, the most interesting first.
    """
    maps = ClientMaps()
    left_out = 0
    for index in order:
        if maps.size > _BUDGET:
            left_out += 1
            continue
        try:
            counts_NC = _label_counts(runs[index])
        except InputError as error:
            maps.notes.append(str(error))
            counts_NC = None
        view: dict[str, Any] = {}
        if counts_NC is not None:
            view["split"] = maps.add_split(counts_NC)
            try:
                if drift := class_map(runs[index], counts_NC.shape):
                    view["drift"] = {**drift, "cells": maps.add_layer(pack(drift["cells"]))}
                if labels := label_summary(runs[index], counts_NC):
                    view["labels"] = labels
                    maps.size += size_of(labels)
            except InputError as error:
                maps.notes.append(str(error))
        if part := participation(runs[index], None if counts_NC is None else len(counts_NC)):
            view["part"] = part | {name: maps.add_layer(part[name]) for name in _LAYERS if name in part}
        if view:
            maps.views[index] = view
    if left_out:
        maps.notes.append(f"{left_out} runs have no pictures of their clients here: the page would become too large")
    return maps


def split_tree(counts_NC: np.ndarray) -> dict[str, Any]:
    """Samples per client and class as a map.

    Args:
        counts_NC: Samples per client and class [N, C], N and C at least 1.

    Returns:
        ``clients``, ``classes``, how many of each share a row or column (``per_client``, ``per_class``), ``cells`` row
        by row of clients, and ``facts`` on the sizes in words.
    """
    num_clients, num_classes = counts_NC.shape
    per_client, per_class = -(-num_clients // _MOST_CLIENTS), -(-num_classes // _MOST_CLASSES)
    cells = _summed(_summed(counts_NC, per_client).T, per_class).T
    sizes_N, kinds_N = counts_NC.sum(axis=1), (counts_NC > 0).sum(axis=1)
    return {
        "clients": num_clients,
        "classes": num_classes,
        "per_client": per_client,
        "per_class": per_class,
        "cells": cells.ravel().tolist(),
        "facts": (
            f"{num_clients} clients with {sizes_N.min()} to {sizes_N.max()} samples (mean {sizes_N.mean():.1f}) of"
            f" {kinds_N.min()} to {kinds_N.max()} of {num_classes} classes (mean {kinds_N.mean():.1f})"
        ),
    }


def participation(run: RunView, num_clients: int | None) -> dict[str, Any] | None:
    """Who was in the cohort and in the high-frequency group, by round, as two maps.

    Args:
        run: A run.
        num_clients: How many clients there are; None: as many as were seen.

    Returns:
        ``rounds``, ``first`` (round), ``clients``, ``per_round``, ``per_client``, and the maps ``cohort`` and ``high``
        as text: row by row of clients a level from 0 to 9, the share of the cell's rounds and clients, packed by
        :func:`pack`. Also ``present`` where the run has availability, and ``attended`` where others than the cohort
        were aggregated in some round, with ``aggregated``, the number of rounds that did. None where no round was
        played.
    """
    cohorts, groups = list(run.column("cohort")), list(run.column("high_frequency"))
    present, attendees = list(run.column("present")), list(run.column("attendees"))
    seen = [client for cohort in cohorts for client in cohort or () if 0 <= client < _LARGEST_ID]
    if not seen:
        return None
    count = num_clients if num_clients is not None else max(seen) + 1
    per_client, per_round = -(-count // _MOST_CLIENTS), -(-len(cohorts) // _MOST_ROUNDS)
    shape = (-(-count // per_client), -(-len(cohorts) // per_round))

    def layer(members: Sequence[Sequence[int] | None]) -> str:
        sums = np.zeros(shape)
        for place, clients in enumerate(members):
            known = [client // per_client for client in clients or () if 0 <= client < count]
            np.add.at(sums[:, place // per_round], known, 1)
        return pack(np.minimum(_LEVELS, np.ceil(_LEVELS * sums / (per_client * per_round))).astype(int))

    return {
        "rounds": len(cohorts),
        "first": run.column("round")[0],
        "clients": count,
        "per_round": per_round,
        "per_client": per_client,
        "has_high": any(groups),
        "cohort": layer(cohorts),
        "high": layer(groups),
        **({"present": layer(present)} if any(there is not None for there in present) else {}),
        **(
            {"attended": layer(attendees), "aggregated": sum(map(bool, attendees))}
            if _differ(attendees, cohorts)
            else {}
        ),
    }


def _differ(attendees: Sequence[Sequence[int]], cohorts: Sequence[Sequence[int]]) -> bool:
    return any(list(a or ()) != list(b or ()) for a, b in zip(attendees, cohorts, strict=True)) if attendees else False


def class_map(run: RunView, shape: tuple[int, ...]) -> dict[str, Any] | None:
    """Which classes clients had by round, under drift.

    Args:
        run: A run.
        shape: N and C, as its table of clients has them.

    Returns:
        ``clients`` (ids of those shown), ``of`` (N), ``classes``, ``rounds``, ``first`` (round), ``per_class`` and
        ``per_round`` (how many share a row or column), ``most`` (the largest share) and ``cells``: for each client a
        row per class and an empty one, a level from 0 to 9 of ``most`` by round. None where the run has no drift.

    Raises:
        InputError: A file of the run is damaged, or two of them contradict each other.
    """
    num_clients, num_classes = shape
    per_class = -(-num_classes // _MOST_DRIFT_CLASSES)
    shown = shown_clients(num_clients, -(-num_classes // per_class))
    shares_NRC = class_shares_of(run, clients=shown)
    if shares_NRC is None or not shares_NRC.size:
        return None
    per_round = -(-shares_NRC.shape[1] // _MOST_ROUNDS)
    cells = np.add.reduceat(shares_NRC, np.arange(0, num_classes, per_class), axis=2)
    starts = np.arange(0, shares_NRC.shape[1], per_round)
    widths = np.diff([*starts, shares_NRC.shape[1]])
    cells = np.add.reduceat(cells, starts, axis=1) / widths[None, :, None]
    most = max(float(cells.max()), 1e-9)
    levels = np.zeros((len(shown), cells.shape[2] + 1, len(starts)), dtype=int)
    levels[:, :-1] = np.ceil(_LEVELS * cells.transpose(0, 2, 1) / most - 1e-6)
    return {
        "clients": shown,
        "of": num_clients,
        "classes": num_classes,
        "rounds": shares_NRC.shape[1],
        "first": 1,
        "per_class": per_class,
        "per_round": per_round,
        "most": round(most, 6),
        "cells": levels.clip(0, _LEVELS),
    }


def pack(levels: np.ndarray) -> str:
    """Levels 0..9 as digits, row by row; runs of zeros as letters (a: one, z: twenty-six)."""
    digits = "".join(map(str, levels.ravel().tolist()))
    return re.sub(r"0{1,26}", lambda zeros: _ZEROS[len(zeros.group()) - 1], digits)


def _label_counts(run: RunView) -> np.ndarray | None:
    """Samples per client and class [N, C]; None where the run has no such file yet.

    Raises:
        OutputError: The file is damaged or holds something else.
    """
    path = run.folder / CLIENTS
    if not path.is_file():
        return None
    rows = RunFolder(run.folder).read_clients().column("label_counts").to_pylist()
    if not rows or not rows[0] or not all(isinstance(row, list) and len(row) == len(rows[0]) for row in rows):
        raise OutputError(f"{path}: label_counts must be lists of one length")
    if not all(type(count) is int and 0 <= count < 2**53 for row in rows for count in row):
        raise OutputError(f"{path}: label_counts must hold whole numbers from 0 on")
    return np.array(rows, dtype=np.int64)


def _summed(cells: np.ndarray, step: int) -> np.ndarray:
    """Sums of ``step`` neighbouring rows."""
    return np.add.reduceat(cells, np.arange(0, len(cells), step), axis=0)


def interesting_first(accuracies: Mapping[int, float | None], settings: Sequence[Sequence[int]]) -> list[int]:
    """Indices of runs: the best of each setting first, then the second best of each, and so on.

    Args:
        accuracies: Of each run.
        settings: Indices of each setting's runs.
    """

    def rank(index: int) -> float:
        value = accuracies[index]
        return 1.0 if value is None else -value

    ranked = [sorted(members, key=rank) for members in settings]
    longest = max(map(len, ranked), default=0)
    return [members[place] for place in range(longest) for members in ranked if place < len(members)]
