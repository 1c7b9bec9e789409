"""Where a report's runs come from: run folders, folders with runs below them, MLflow experiments.

A run that cannot be read does not keep the others from being shown: it is listed with the reason. A sweep's folder also
tells which of a paper's tables it was made for, and the command that makes it again.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from fedsweep.errors import InputError, OutputError, ResourceError, unknown_name
from fedsweep.reproduce.cell_texts import caption
from fedsweep.reproduce.formats import html_fragment
from fedsweep.reproduce.outputs import has_outputs, read_grid
from fedsweep.reproduce.reproduction import request_of
from fedsweep.results.texts import some_of
from fedsweep.results.view import RunView, load_run, once, runs_below
from fedsweep.runs.find import find_runs
from fedsweep.runs.places import is_address, place_name
from fedsweep.runs.run_folder import CONFIG
from fedsweep.sweeps.sweep_folder import SweepFolder

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_MOST_RUNS = 20_000
_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class Found:
    """Runs that a report is made from.

    Attributes:
        runs: The runs, each once, in the order given.
        unreadable: Why others cannot be read.
        sweeps: Folders of the sweeps that the runs belong to.
        notes: What a reader must know.
    """

    runs: tuple[RunView, ...]
    unreadable: tuple[str, ...]
    sweeps: tuple[Path, ...]
    notes: tuple[str, ...]


def find_sources(sources: Sequence[str], *, uri: str | None) -> Found:
    """Read all runs that the sources name.

    Args:
        sources: Folders, or names of MLflow experiments; what is a folder is taken as one.
        uri: The tracking store's address; None: there is none.

    Raises:
        InputError: A source is neither a folder with runs nor an experiment with run folders on this machine, or none
            of the runs can be read.
    """
    notes: list[str] = []
    folders = once(
        folder
        for source in sources
        for folder in (_runs_in(Path(source)) if os.path.isdir(source) else _of_experiment(source, uri, notes.append))
    )
    runs, errors = [], []
    for folder in folders.values():
        try:
            runs.append(load_run(folder))
        except InputError as error:
            errors.append(error)
    if errors and not runs:
        raise errors[0]
    parents = dict.fromkeys(folder.parent for folder in folders)
    sweeps = tuple(parent for parent in parents if SweepFolder(parent).has_plan)
    return Found(
        runs=tuple(runs),
        unreadable=tuple(map(place_name, errors)),
        sweeps=sweeps,
        notes=(*notes, *(note for sweep in sweeps for note in _sweep_notes(sweep, folders))),
    )


def _of_experiment(name: str, uri: str | None, say: Callable[[str], None]) -> list[Path]:
    """Return the run folders that an experiment's runs name in their tags."""
    from fedsweep.tracking.mlflow_store import open_store, quiet_mlflow, reason_of, redacted, sqlite_path

    path = sqlite_path(uri) if uri is not None else None
    if uri is None or (path is not None and not os.path.isfile(path)):
        where = f", and there is no MLflow store at {path} to look for an experiment in" if path else ""
        raise OutputError(f"{name}: there is no such folder{where}")
    client = open_store(uri)
    with quiet_mlflow():
        try:
            tagged = _tagged_folders(client, name)
        except InputError as error:
            raise OutputError(f"{name}: there is no such folder; {error} in {redacted(uri)}") from error
        except Exception as error:  # MLflow's own, SQLAlchemy's and requests' exceptions alike
            raise ResourceError(f"the store {redacted(uri)} cannot be read: {reason_of(error)}") from error
    here = [folder for folder in tagged if folder.is_absolute() and os.path.isfile(folder / CONFIG)]
    gone = [str(folder) for folder in tagged if folder not in here]
    if not here:
        named = f"; their tags name {some_of(gone, _SHOWN)}" if gone else ""
        raise OutputError(f"the experiment {name!r} has no run whose folder is on this machine{named}")
    if gone:
        counts = f"{len(gone)} of {len(tagged)} run folders"
        say(f"of the experiment {name!r}, {counts} are not on this machine: {some_of(gone, _SHOWN)}")
    return here


def _tagged_folders(client: MlflowClient, name: str) -> list[Path]:
    from fedsweep.tracking.mlflow_run import FOLDER, each_run

    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        raise InputError(unknown_name("experiment", name, [item.name for item in client.search_experiments()]))
    every = (run.data.tags for run in each_run(client, experiment.experiment_id))
    folders = (tags.get(FOLDER, "") for tags in every if tags.get("fedsweep.kind") != "sweep")
    return sorted(map(Path, {folder for folder in islice(folders, _MOST_RUNS) if folder and "\0" not in folder}))


def _sweep_notes(sweep: Path, folders: dict[Path, Path]) -> list[str]:
    """Return trials of a sweep that never began: they have no folder, so they would be passed over in silence."""
    try:
        trials = SweepFolder(sweep).read_plan().trials
    except InputError as error:
        return [place_name(error)]
    names = {folder.name for folder in folders if folder.parent == sweep}
    missing = [trial.folder for trial in trials if trial.folder not in names]
    if not missing:
        return []
    named = some_of(missing, _SHOWN)
    return [f"{len(missing)} of {len(trials)} trials of {place_name(sweep)} are not in this report: {named}"]


def _runs_in(folder: Path) -> list[Path]:
    """Return the run folders in or below a folder. Raises as :func:`~fedsweep.results.view.runs_below`."""
    if has_outputs(folder) and not find_runs(folder):
        raise OutputError(f"{folder}: a table without runs of its own here: see {folder / 'table.html'}")
    return runs_below(folder)


def reported_tables(folders: Sequence[Path]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return a caption and HTML, every text that was read escaped, for each sweep that made a paper's table.

    Beside these, what is wrong with tables that cannot be read.
    """
    tables, problems = [], []
    for folder in filter(has_outputs, folders):
        try:
            grid = read_grid(folder)
        except InputError as error:
            problems.append(place_name(error))
        else:
            tables.append((caption(grid), html_fragment(grid)))
    return tables, problems


def command_again(folder: Path) -> str | None:
    """Return the command that does a sweep, or a table's cells, once more; None: of a sweep at an address."""
    try:
        request = request_of(SweepFolder(folder))
    except InputError:
        return None if is_address(place_name(folder)) else shlex.join(["fedsweep", "sweep", str(folder / CONFIG)])
    words = ["fedsweep", "reproduce", request.table, "--scale", request.scale]
    for option, value in (("--rows", request.rows), ("--columns", request.columns)):
        words += [option, value] if value is not None else []
    words += ["--seeds", ",".join(map(str, request.seeds))] if request.seeds else []
    return shlex.join([*words, *(word for text in request.overrides for word in ("--set", text))])
