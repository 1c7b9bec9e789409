"""A sweep that gets more trials: those whose configuration has a run in its folder keep it, the others are new."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedsweep.catalog import resolve
from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError, InputError
from fedsweep.runs.run_folder import CONFIG
from fedsweep.sweeps.space import Trial, is_listed
from fedsweep.sweeps.sweep_folder import SweepFolder

if TYPE_CHECKING:
    from fedsweep.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class Extension:
    """What becomes of a sweep's trials.

    Attributes:
        trials: All trials of the configuration, in its order; numbers and folders of those that were there before.
        beside: Folders of runs that the configuration has no trial for; they stay as they are.
        kept: How many of the trials have finished already.
    """

    trials: tuple[Trial, ...]
    beside: tuple[str, ...]
    kept: int

    @property
    def told(self) -> str:
        """In a line."""
        aside = f"; {len(self.beside)} that this configuration has no trial for, beside them" if self.beside else ""
        return f"{self.kept} finished trials kept, {len(self.trials) - self.kept} to run{aside}"


def extension(config: Config, folder: SweepFolder, asked: Sequence[tuple[Trial, Config]]) -> Extension:
    """Match a configuration's trials with the runs of a sweep's folder.

    A run is a trial's where its resolved configuration is the trial's, but for what changes no result.

    Args:
        config: The sweep's new configuration.
        folder: Where the sweep is.
        asked: The configuration's trials, each with its resolved configuration.

    Raises:
        ConfigError: The trials are not known beforehand.
        OutputError: The folder holds no sweep, or a damaged one.
    """
    if not is_listed(config):
        raise ConfigError(
            "--extend goes with trials that are known beforehand; with sweep.search=optuna or sweep.scheduler=pbt begin"
            " a sweep of its own with another --out"
        )
    plan = folder.read_plan()
    if plan.request:
        raise ConfigError(f"{folder.path} holds a table; fedsweep reproduce --resume goes on with it")
    before = [*(trial.folder for trial in plan.trials), *plan.beside]
    known = dict(_found(folder, before))
    highest = max((_number(name) for name in before), default=0)
    trials = []
    for trial, wanted in asked:
        name = known.pop(wanted.hash(), None)
        if name is None:
            highest += 1
            trials.append(_moved(trial, number=highest))
        else:
            trials.append(replace(trial, number=_number(name), folder=name))
    return Extension(
        trials=tuple(trials),
        beside=tuple(known.values()),
        kept=sum(folder.has_finished(trial) for trial in trials),
    )


def _found(folder: SweepFolder, names: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Hash of the configuration and folder of each run that was begun; one that is damaged is no trial's."""
    for name in names:
        path = folder.path / name / CONFIG
        if not path.is_file():
            continue
        try:
            yield resolve(load_config(path)).hash(), name
        except InputError:
            yield f"damaged: {name}", name


def _number(name: str) -> int:
    found = re.match(r"\d{1,9}", name)
    return int(found[0]) if found else 0


def _moved(trial: Trial, *, number: int) -> Trial:
    return replace(trial, number=number, folder=f"{number:04d}-{trial.folder.partition('-')[2]}")
