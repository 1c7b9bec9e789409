"""Runs as they would have been on other devices and at other prices, for tables and pictures of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fedsweep.config.overrides import apply_overrides
from fedsweep.errors import ConfigError, InputError
from fedsweep.finished.replay import replay, split_settings
from fedsweep.results.view import ENERGY, MONEY, RunView


def views_elsewhere(views: Sequence[RunView], settings: Sequence[str]) -> list[RunView]:
    """Return the runs with the clock, energy and money that replays give; their configurations name the devices.

    A run that can't be replayed has none of the three, and a note says why.

    Args:
        views: Runs from folders.
        settings: As for :func:`~fedsweep.finished.replay.replay`; none: the runs as they are.

    Raises:
        ConfigError: A setting is none of a replay's, or no run can be replayed; the message is the first one's.
    """
    if not settings:
        return list(views)
    _, devices = split_settings(settings)
    seen, reasons = [], []
    for view in views:
        spent: dict[str, Sequence[Any]] = dict.fromkeys(("sim_time_s", ENERGY, MONEY), [None] * view.rounds)
        notes = view.notes
        try:
            there = replay(view.folder, settings)
            spent = {"sim_time_s": there.clocks, ENERGY: there.energy, MONEY: there.money}
        except InputError as error:
            reasons.append(error)
            notes = (*notes, f"{view.folder.name}: no time, energy and money with --set: {error}")
        # Where a run has no clock, no figure of its result may take its place.
        result = {name: value for name, value in view.result.items() if name not in ("sim_time_s", "full_time_s")}
        columns = {name: cells for name, cells in view.columns.items() if name != "full_time_s"} | spent
        config = apply_overrides(view.config, devices)
        seen.append(replace(view, config=config, result=result, columns=columns, notes=notes))
    if len(reasons) == len(views):
        raise ConfigError(str(reasons[0]))
    return seen
