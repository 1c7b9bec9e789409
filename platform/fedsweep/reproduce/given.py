"""Finished runs in one small file, ``runs.json``, from which a table takes them as they are, on another machine too.

A run is kept as what it came to: its ``result.json``, and of its rounds what is a number. That is little enough to lie
beside a page, and enough to make the table again in all its forms; pictures of cohorts and images are not in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from fedsweep.bounded import parse_json, read_regular
from fedsweep.errors import ConfigError, OutputError
from fedsweep.results.view import RunView
from fedsweep.runs.facts import run_facts
from fedsweep.runs.files import atomic_write
from fedsweep.runs.source_log import ALLOW
from fedsweep.runs.sources import Sources, misfit
from fedsweep.sweeps.sweep_folder import SweepFolder

RUNS_FILE = "runs.json"
_FORMAT, _VERSION = "fedsweep runs", 1
# What the largest of the tables needs: a round takes up to 200 bytes, and 35 columns.
_MOST_BYTES, _MOST_CELLS = 2**28, 50_000_000
# What says nothing of the run.
_LEFT_OUT = frozenset({"timestamp_ms"})
# A number of each round that follows from a list.
_LENGTH = "group_size"

_Cell = int | float | Literal["nan", "inf", "-inf"] | None


class NotKept(ConfigError):
    """A given run has not what is asked for: its file keeps no lists, models and pictures."""


class _KeptRun(BaseModel):
    """A finished run in the file.

    Attributes:
        rounds: How many it has.
        result: Its ``result.json``.
        columns: Columns of ``rounds.parquet``: a cell for each round, or the one that stands in all of them.
    """

    model_config = ConfigDict(extra="forbid")

    rounds: Annotated[int, Field(ge=1)]
    result: dict[str, Any]
    columns: dict[str, list[_Cell] | _Cell]


_RUNS = TypeAdapter(dict[Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{8,64}$")], _KeptRun])


def write_runs(runs: Mapping[str, RunView], folder: Path) -> Path:
    """Write finished runs into a folder's ``runs.json``.

    Args:
        runs: Hash of everything that affects a run's results -> the run.
        folder: The table's; made where it is not there.

    Raises:
        OutputError: The file can't be written.
    """
    head = json.dumps({"format": _FORMAT, "version": _VERSION})
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(_kept(run))}" for key, run in sorted(runs.items()))
    path = folder / RUNS_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(path, f'{head[:-1]}, "runs": {{\n{lines}\n}}}}\n'.encode())
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from error
    return path


def read_runs(path: Path) -> dict[str, RunView]:
    """Read the runs of a ``runs.json``, which somebody else may have written.

    Returns:
        Hash of everything that affects a run's results -> the run. Its folder's name is that hash below the file's, so
        that nothing is there.

    Raises:
        OutputError: It can't be read, is damaged or of another version; the message names the file.
    """
    try:
        tree = parse_json(read_regular(path, max_bytes=_MOST_BYTES, follow=True))
        if not isinstance(tree, Mapping) or (tree.get("format"), tree.get("version")) != (_FORMAT, _VERSION):
            raise ValueError(f"not a {RUNS_FILE} as fedsweep reproduce writes it beside a table")
        read = _RUNS.validate_python(tree.get("runs"))
        if sum(run.rounds * len(run.columns) for run in read.values()) > _MOST_CELLS:
            raise ValueError(f"damaged: more than {_MOST_CELLS} figures")
        return {key: _view(run, path / key) for key, run in read.items()}
    except OSError as error:
        raise OutputError(f"{path}: not readable: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise OutputError(f"{path}: damaged: {'.'.join(map(str, first['loc']))[:80]}: {first['msg']}") from None
    except ValueError as error:
        raise OutputError(f"{path}: {error}") from error


def runs_begun_with(folder: SweepFolder) -> dict[str, RunView]:
    """Return the runs that a table's folder was given when it was begun: those in its file that its plan has not.

    Raises:
        OutputError: The file is gone or damaged.
    """
    request = folder.read_plan().request
    if not request.get("runs_from"):
        return {}
    own = request.get("keys", {})
    played = set(own.values()) if isinstance(own, Mapping) else set()
    try:
        given_runs = read_runs(folder.path / RUNS_FILE)
    except OutputError as error:
        raise OutputError(f"{error}; bring that file back, or begin again with --from and --overwrite") from error
    return {key: run for key, run in given_runs.items() if key not in played}


def check_runs_are_kept(folder: SweepFolder, given_runs: Mapping[str, RunView]) -> None:
    """Refuse a folder without a table where runs lie that this one does not take: they would be replaced.

    Raises:
        OutputError: There are such runs, or what is there is damaged.
    """
    path = folder.path / RUNS_FILE
    if path.is_file() and read_runs(path).keys() - given_runs.keys():
        raise OutputError(
            f"{path} has runs, which this table would replace; choose another --out, with --from {path} where it shall"
            " have them, or replace them with --overwrite"
        )


def taken_from_files(
    places: Sequence[str], sources: Mapping[str, Sources], *, allow_changed_code: bool
) -> dict[str, RunView]:
    """Return those of files' runs that a table asks for, by key.

    Args:
        places: Files ``runs.json``, or folders that hold one; of runs in several of them the first counts.
        sources: Key of each run that is asked for -> hashes of the sources here that it would follow from.
        allow_changed_code: Runs of other sources may stand beside those that are to be run.

    Raises:
        ConfigError: A file has none of them; or other sources made one, and there are runs left to be run.
        OutputError: A file can't be read, or is damaged.
    """
    runs: dict[str, RunView] = {}
    for place in map(Path, places):
        path = place / RUNS_FILE if place.is_dir() else place
        own = {key: run for key, run in read_runs(path).items() if key in sources}
        if not own:
            raise ConfigError(
                f"--from {path}: it has no run of those that are asked for; runs are known by all that affects their"
                " results, so --scale, --seeds and --set must be those that it was made with"
            )
        runs = {**own, **runs}
    others = {key: misfit(run.result, sources[key], run_facts()["versions"]) for key, run in runs.items()}
    changed = next(filter(None, others.values()), "")
    if changed and len(runs) < len(sources) and not allow_changed_code:
        raise ConfigError(
            f"--from: runs that other code made ({changed}) can't stand beside {len(sources) - len(runs)} that are"
            f" still to be run; bring back that code, or let them with {ALLOW}"
        )
    return runs


def _kept(run: RunView) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, cells in {**run.columns, _LENGTH: run.column(_LENGTH)}.items():
        if cells and name not in _LEFT_OUT and all(cell is None or isinstance(cell, int | float) for cell in cells):
            plain = [str(cell) if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in cells]
            columns[name] = plain if any(cell != plain[0] for cell in plain) else plain[0]
    return {"rounds": run.rounds, "result": dict(run.result), "columns": columns}


def _view(run: _KeptRun, folder: Path) -> RunView:
    if run.result.get("status") != "finished":
        raise ValueError(f"damaged: the run {folder.name} has not finished")
    columns = {name: _cells(cells, run.rounds) for name, cells in run.columns.items()}
    if columns.get("round") is None or any(len(cells) != run.rounds for cells in columns.values()):
        raise ValueError(f"damaged: the run {folder.name} has columns that are not of {run.rounds} rounds")
    return RunView(folder=folder, config={}, result=run.result, columns=columns)


def _cells(cells: Any, count: int) -> Sequence[Any]:
    every = cells if isinstance(cells, list) else [cells] * count
    return [float(cell) if isinstance(cell, str) else cell for cell in every]
