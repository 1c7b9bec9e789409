"""A study's picture as ``fedsweep compare --plot`` draws it: curves, or where runs ended over a key that was varied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedsweep.errors import ConfigError, unknown_name
from fedsweep.figures.curves import ACROSS, draw_world, row_handles
from fedsweep.figures.style import (
    PANEL_WIDTH,
    TEXT_WIDTH,
    axis_name,
    band_handles,
    checked_path,
    label_outer,
    legend_below,
    name_axes,
    panels,
    paper_style,
    save_figure,
    scale_axes,
    setting_looks,
)
from fedsweep.results.config_table import config_table, short_keys
from fedsweep.results.curves import curve_of
from fedsweep.results.keys import listed, resolved
from fedsweep.results.seed_statistics import finite, number_in
from fedsweep.results.selection import FIGURE_NAMES, figure_name, leading_figure
from fedsweep.results.settings import ReportRun, group_settings
from fedsweep.results.view import SPENT, is_share
from fedsweep.results.worlds import LayoutKeys, Study, World, study_of, world_keys

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOG = ("total_bytes", "flops")
# Values of a key that lie this far apart are drawn on a logarithmic axis.
_WIDE = 20.0


def plot_runs(
    runs: Sequence[ReportRun],
    path: str | Path,
    *,
    x: str = "bytes",
    y: str | Sequence[str] | None = None,
    keys: LayoutKeys | None = None,
    called: Callable[[str], str] = str,
) -> None:
    """Draw a panel for each world and figure, a colour for each row; as wide as a paper's column or its page.

    Panels of one figure share their y axis. Several figures are lines of panels, or stand side by side in one world.

    Args:
        runs: All runs.
        path: The picture; its suffix is one of :data:`~fedsweep.figures.style.SUFFIXES`.
        x: ``rounds``, ``bytes``, ``sim``, ``wall``, ``flops``, ``energy`` or ``money`` for curves; or the short name of
            a key with numbers, for the figures that runs ended with.
        y: A figure, or several; None: the accuracy, or what else leads.
        keys: Rows and columns.
        called: Words for the labels of rows and worlds.

    Raises:
        InputError: There is no such axis, figure or key, two settings would be one point, or the picture can't be
            written.
    """
    target = checked_path(path)
    rows, columns = (keys.rows, keys.columns) if keys else (None, None)
    y = y or leading_figure(run.view for run in runs)
    across, names = FIGURE_NAMES.get(x, x), [*dict.fromkeys(listed(y))]
    figures = [figure_name(name, runs, what="--y") for name in names]
    if across in ACROSS:
        if across in SPENT:
            figure_name(x, runs, what="--x")
        for name, figure in zip(names, figures, strict=True):
            if not any(run.view.column(figure) for run in runs if run.num_rounds) and any(r.num_rounds for r in runs):
                raise ConfigError(
                    f"--y {name}: is no figure of a round, so it has no curve; give --x a key of the configuration"
                )
        curves = [replace(run, curve=curve_of(run.view, figures)) for run in runs]
        _plot_curves(study_of(curves, rows=rows, columns=columns), target, figures=figures, x=across, called=called)
        return
    for name, figure in zip(names, figures, strict=True):
        if all(run.view.figure(figure) is None for run in runs) and any(run.num_rounds for run in runs):
            raise ConfigError(
                f"--y {name}: no run has it ({leading_figure(run.view for run in runs)} is what they have)"
            )
    key = _number_key(runs, x)
    flats = [runs[setting.runs[0]].flat for setting in group_settings(runs)]
    table = config_table(flats)
    if columns is None:
        columns = (
            world_keys(flats, table) if rows is None else [k for k in table.differing if k not in _all(rows, runs)]
        )
    study = study_of(runs, rows=rows, columns=[*listed(columns), key])
    _plot_over(study, target, figures=figures, key=key, called=called)


def _all(names: Sequence[str], runs: Sequence[ReportRun]) -> list[str]:
    keys = list(dict.fromkeys(key for run in runs for key in run.flat))
    return [key for name in listed(names) for key in resolved(name, keys, what="--rows", candidates=keys)]


def _number_key(runs: Sequence[ReportRun], name: str) -> str:
    """Return the key that a name stands for, whose values are numbers."""
    keys = list(dict.fromkeys(key for run in runs for key in run.flat))
    short = short_keys(config_table([run.flat for run in runs]).differing).values()
    chosen = resolved(name, keys, what="--x", candidates={*_axes(), *short})
    if len(chosen) != 1 or not any(number_in(run.flat.get(chosen[0], "")) is not None for run in runs):
        raise ConfigError(f"--x {name}: {unknown_name('axis', name, _axes())}, or a key whose values are numbers")
    return chosen[0]


def _axes() -> set[str]:
    return {*ACROSS, *(name for name, figure in FIGURE_NAMES.items() if figure in ACROSS)}


@paper_style()
def _plot_curves(study: Study, target: Path, *, figures: Sequence[str], x: str, called: Callable[[str], str]) -> None:
    figure, lines = _world_panels([called(world.label) for world in study.layout.worlds], figures)
    for name, every in zip(figures, lines, strict=True):
        for axes, world in zip(every, study.layout.worlds, strict=True):
            draw_world(axes, study, world, name, x=x, log_x=x in _LOG)
    legend_below(figure, [*row_handles(study, called), *band_handles(axes for every in lines for axes in every)])
    label_outer(figure)
    save_figure(figure, target)


@paper_style()
def _plot_over(study: Study, target: Path, *, figures: Sequence[str], key: str, called: Callable[[str], str]) -> None:
    """Draw where runs ended over a key: the mean over seeds, with a bar of one sample standard deviation each way."""
    short = short_keys([key])[key]
    groups: dict[str, list[World]] = {}
    for world in study.layout.worlds:
        label = ", ".join(word for word in world.words if word.partition("=")[0] not in (key, short))
        groups.setdefault(label, []).append(world)
    figure, lines = _world_panels([called(label) for label in groups], figures)
    for name, every in zip(figures, lines, strict=True):
        for axes, worlds in zip(every, groups.values(), strict=True):
            _draw_over(axes, study, worlds, y=name, key=key)
            low, high = axes.dataLim.minposx, axes.dataLim.x1
            scale_axes(axes, log_x=axes.dataLim.x0 > 0 and high > _WIDE * low, log_y=False)
            is_percent = is_share(name, (run.view for run in study.runs))
            name_axes(axes, x=called(f"{short}=").removesuffix("="), y=axis_name(name, is_percent=is_percent))
    legend_below(figure, row_handles(study, called))
    label_outer(figure)
    save_figure(figure, target)


def _draw_over(axes: Axes, study: Study, worlds: Sequence[World], *, y: str, key: str) -> None:
    looks, times = setting_looks(study.methods), 100 if is_share(y, (run.view for run in study.runs)) else 1
    for row in range(len(study.layout.rows)):
        points = []
        for setting in (study.settings[world.cells[row]] for world in worlds if row in world.cells):
            value, estimate = number_in(study.runs[setting.runs[0]].flat.get(key, "")), setting.over_seeds(y)
            if value is not None and finite(estimate.mean) is not None:
                points.append((value, times * estimate.mean, times * (finite(estimate.sd) or 0.0)))
        if points:
            places, means, deviations = zip(*sorted(points), strict=True)
            axes.errorbar(places, means, yerr=deviations, color=looks[row].colour, marker=looks[row].marker)


def _world_panels(titles: Sequence[str], figures: Sequence[str]) -> tuple[Figure, list[list[Axes]]]:
    """Return panels by figure and world, those of a figure with one y axis; together as wide as a column or page.

    Several figures of several worlds have their lines; those of a single world stand side by side.
    """
    if len(titles) == 1:
        figure, every = panels(["" for _ in figures], title=titles[0], width=_width(len(figures)))
        return figure, [[axes] for axes in every]
    across = len(titles) if len(figures) > 1 else None
    every_title = [*titles, *("" for _ in titles for _ in figures[1:])]
    width = _width(len(titles)) if across is None else min(PANEL_WIDTH, TEXT_WIDTH / across)
    figure, flat = panels(every_title, width=width, across=across)
    lines = [flat[at : at + len(titles)] for at in range(0, len(flat), len(titles))]
    for line in lines:
        for axes in line[1:]:
            axes.sharey(line[0])
    return figure, lines


def _width(across: int) -> float:
    return PANEL_WIDTH if across in (1, 2, 4) else TEXT_WIDTH / min(across, 3)
