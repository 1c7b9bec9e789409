"""The folder of a sweep: its configuration, its trials in ``sweep.json``, their run folders, and the summary.

``sweep.json`` is what a resumed sweep goes by. It is plain JSON, written as a whole; nothing of Ray Tune's own state,
which would have to be unpickled, is read back.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsweep import __version__
from fedsweep.bounded import MOST_DOCUMENT_BYTES, parse_json, read_regular
from fedsweep.errors import ConfigError, OutputError
from fedsweep.fleet.ray_internals import RAY_LOG
from fedsweep.results.texts import canonical
from fedsweep.runs.files import TRACKING, write_file
from fedsweep.runs.find import find_runs
from fedsweep.runs.remote_folder import runs_there
from fedsweep.runs.run_folder import CONFIG, PLAN, RunFolder
from fedsweep.sweeps.budget.study_clock import ELAPSED
from fedsweep.sweeps.space import Trial

SUMMARY, TABLE = "summary.json", "summary.parquet"
STUDY_FILE = "optuna.log"
# Ray Tune's own files; hidden, so that no one takes them for runs.
TUNE = ".tune"
# Keys that may change when a sweep goes on: the cluster that it was begun on may be gone, and a study may get more.
PLACE, BUDGET = "runtime.address", "sweep.budget"
_FORMAT, _VERSION = "fedsweep sweep", 1


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """The trials of a sweep, and the configuration that they come from.

    Attributes:
        config_tree: The configuration as the user gave it.
        trials: All trials; of a search, those proposed so far.
        request: What the trials were made from, where that is no space: a table's name and what was chosen of it.
        beside: Folders of trials that the sweep had before it was extended by another configuration.
    """

    config_tree: Mapping[str, Any]
    trials: tuple[Trial, ...]
    request: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()


class SweepFolder:
    """A sweep's folder.

    Args:
        path: The folder; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()

    @property
    def has_plan(self) -> bool:
        """True where a sweep was begun here."""
        return os.path.isfile(self.path / PLAN)  # the path's own way to ask raises in a folder that may not be read

    def check_free(self, *, overwrite: bool) -> None:
        """Refuse a folder that holds a sweep or runs; writes nothing.

        Raises:
            OutputError: It does, and is not to be overwritten; or it is a file.
        """
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise OutputError(f"{self.path}: cannot be made a sweep's folder: it is a file")
        runs = [] if self.has_plan else [run.name for run in find_runs(self.path)] or runs_there(self.path)
        names = [PLAN] if self.has_plan else runs[:3]
        if names and not (overwrite and self.has_plan):
            way_out = (
                "go on with --resume, add to it with --extend, or replace it with --overwrite"
                if self.has_plan
                else "choose another --out"
            )
            raise OutputError(f"{self.path} is in use already ({', '.join(names)}); {way_out}")

    def create(self, plan: SweepPlan, *, config_yaml: str | None, overwrite: bool) -> None:
        """Make the folder and write the plan.

        Args:
            plan: The plan.
            config_yaml: The sweep's configuration; None: there is no one configuration to repeat it by.
            overwrite: Remove an earlier sweep.

        Raises:
            OutputError: It cannot be made or written, or :meth:`check_free` refuses it.
        """
        self.check_free(overwrite=overwrite)
        try:
            if self.has_plan:
                self._clear()
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be made a sweep's folder: {error.strerror or error}") from error
        # First: a folder with a configuration alone would be a run's that broke off.
        self.write_plan(plan)
        if config_yaml is not None:
            write_file(self.path / CONFIG, config_yaml.encode())

    def extend(self, plan: SweepPlan, *, config_yaml: str) -> None:
        """Go on by another plan and its configuration."""
        self.write_plan(plan)
        write_file(self.path / CONFIG, config_yaml.encode())

    def withdraw(self) -> None:
        """Undo :meth:`create`; a folder that holds more stays."""
        for name in (PLAN, CONFIG):
            (self.path / name).unlink(missing_ok=True)
        # It may hold what was there before.
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def write_plan(self, plan: SweepPlan) -> None:
        """Replace the plan."""
        trials = [
            {"number": t.number, "folder": t.folder, "label": t.label, "values": dict(t.values)} for t in plan.trials
        ]
        body = {
            "format": _FORMAT,
            "version": _VERSION,
            "fedsweep": __version__,
            "given": plan.config_tree,
            "trials": trials,
        }
        more = {"request": dict(plan.request), "beside": list(plan.beside)}
        write_file(self.path / PLAN, _json(body | {key: value for key, value in more.items() if value}))

    def read_plan(self) -> SweepPlan:
        """Read the plan.

        Raises:
            OutputError: There is none, or it is damaged or of another version.
        """
        path = self.path / PLAN
        try:
            body = parse_json(read_regular(path, max_bytes=MOST_DOCUMENT_BYTES))
        except FileNotFoundError:
            raise OutputError(f"{self.path} holds no sweep: {PLAN} is missing") from None
        except OSError as error:
            raise OutputError(f"{path}: not readable: {error.strerror or error}") from error
        except ValueError as error:
            raise OutputError(f"{path}: not readable as JSON: {error}") from error
        if not isinstance(body, dict) or body.get("format") != _FORMAT or body.get("version") != _VERSION:
            raise OutputError(f"{path}: not a plan that fedsweep {__version__} wrote")
        try:
            trials = tuple(Trial(**entry) for entry in body["trials"])
            beside = tuple(body.get("beside", ()))
            for trial in trials:
                _check_trial(trial, path)
            for name in beside:
                _check_folder_name(name, path)
            request = dict(body.get("request", {}))
            return SweepPlan(config_tree=dict(body["given"]), trials=trials, request=request, beside=beside)
        except (KeyError, TypeError, ValueError) as error:
            raise OutputError(f"{path}: damaged: {error}") from error

    def check_same(self, config_tree: Mapping[str, Any]) -> None:
        """Refuse to go on with another configuration than the sweep was begun with; cluster's address, budget apart.

        Raises:
            ConfigError: It differs; names where.
        """
        before, config_tree = _fixed(self.read_plan().config_tree), _fixed(config_tree)
        if canonical(before) != canonical(config_tree):
            differing = sorted(key for key in {*before, *config_tree} if before.get(key) != config_tree.get(key))
            raise ConfigError(
                f"{self.path} was begun with another configuration (it differs in {', '.join(differing)}), and a"
                " sweep's trials can't change on the way; leave CONFIG and --set out to go on with it, run what it"
                " lacks by --extend in place of --resume, or choose another --out"
            )

    def trial_path(self, trial: Trial) -> Path:
        """Return a trial's run folder."""
        return self.path / trial.folder

    def has_finished(self, trial: Trial) -> bool:
        """Check that a trial has run to its end."""
        return RunFolder(self.trial_path(trial)).has_finished()

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace the summary."""
        write_file(self.path / SUMMARY, _json(summary))

    def _clear(self) -> None:
        """Remove an earlier sweep: what its plan names, and nothing else."""
        plan = self.read_plan()
        for name in (*(trial.folder for trial in plan.trials), *plan.beside):
            folder = self.path / name
            if folder.is_dir() and not folder.is_symlink():
                shutil.rmtree(folder)
        shutil.rmtree(self.path / TUNE, ignore_errors=True)
        for name in (SUMMARY, TABLE, STUDY_FILE, TRACKING, RAY_LOG, ELAPSED, CONFIG, PLAN):
            (self.path / name).unlink(missing_ok=True)


def _json(body: Any) -> bytes:
    return f"{json.dumps(body, indent=1, ensure_ascii=False)}\n".encode()


def _fixed(config_tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the keys that may change on the way."""
    rest = dict(config_tree)
    for place in (PLACE, BUDGET):
        section, key = place.split(".")
        values = {name: value for name, value in (rest.pop(section, None) or {}).items() if name != key}
        rest |= {section: values} if values else {}
    return rest


def _check_trial(trial: Trial, path: Path) -> None:
    if type(trial.number) is not int or not isinstance(trial.label, str) or not isinstance(trial.values, dict):
        raise OutputError(f"{path}: damaged: a trial has a number, a label and values by key")
    _check_folder_name(trial.folder, path)


def _check_folder_name(name: Any, path: Path) -> None:
    if not isinstance(name, str) or name in ("", ".", "..") or os.sep in name or "\0" in name:
        raise OutputError(f"{path}: damaged: {name!r} is no name of a trial's folder")
