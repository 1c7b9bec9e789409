"""Pictures of runs: learning curves, classes and participation by round, a run's own pictures.

A panel is a cell. Of cells with several seeds the curves show mean and deviation, the other pictures the lowest seed
that has finished.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedsweep.errors import ConfigError
from fedsweep.figures.curves import ACROSS, draw_curve
from fedsweep.figures.scenario import (
    class_shares_of,
    draw_classes,
    draw_participation,
    participation_handles,
    participation_of,
)
from fedsweep.figures.style import (
    PANEL_HEIGHT,
    axis_name,
    band_handles,
    legend_below,
    line_handle,
    looks,
    name_axes,
    panels,
    scale_axes,
    share_axes,
)
from fedsweep.reproduce.figures.scene import Scene, first_round, first_runs, panels_of
from fedsweep.results.curves import curve_of, mean_curve
from fedsweep.results.view import is_share
from fedsweep.runs.run_folder import PICTURES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STAGES = 4


def curves(scene: Scene) -> Figure:
    """Draw a panel for each column and group, a line for each row: the mean over seeds, with a band of one deviation.

    Without groups all rows share a panel; with groups each panel has a legend of its own.
    """
    spec = scene.spec
    x, y = spec.x or "round", spec.y or "test_accuracy"
    if x not in ACROSS:
        raise ConfigError(f"figure {spec.name}: x of curves must be one of {', '.join(ACROSS)}, but is {x!r}")
    shown = scene.groups if spec.groups else {"": scene.rows}
    places = [(column, rows) for column in scene.columns for rows in shown.values()]
    titles = [" ".join(filter(None, (title, name))) for title in scene.titles for name in shown]
    figure, every = panels(titles, title=spec.title)
    is_percent = is_share(y, (run for column, rows in places for row in rows for run in scene.of(row, column)))
    drawn = set()
    for axes, (column, rows) in zip(every, places, strict=True):
        own = looks(rows, ordered=spec.ordered) if spec.groups else scene.looks
        for row in rows:
            curves = [curve_of(run, [y]) for run in scene.of(row, column)]
            if curves and draw_curve(axes, mean_curve(curves), y, x=x, look=own[row], label=scene.name(row)):
                drawn.add(row)
        scale_axes(axes, log_x=spec.log_x, log_y=spec.log_y)
        name_axes(axes, x=spec.x_label or axis_name(x), y=spec.y_label or axis_name(y, is_percent=is_percent))
        if spec.groups and axes.lines:
            handles = [*axes.get_legend_handles_labels()[0], *band_handles([axes])]
            axes.legend(handles=handles, fontsize=6, ncols=2, frameon=False)
    if not drawn:
        raise ConfigError(f"figure {spec.name}: no run has the column {y}")
    share_axes(every)
    if not spec.groups:
        rows = [line_handle(scene.name(row), scene.looks[row]) for row in scene.rows if row in drawn]
        legend_below(figure, [*rows, *band_handles(every)])
    return figure


def classes(scene: Scene) -> Figure:
    """Draw the classes that clients hold in each round, under drift."""
    figure, shown = panels_of(scene, class_shares_of, "drift (scenario.drift)", height=_tall)
    for axes, run, shares_NRC in shown:
        draw_classes(axes, shares_NRC, first_round=first_round(run), legend=axes is shown[-1][0])
    return figure


def participation(scene: Scene) -> Figure:
    """Draw each client's part in each round."""
    figure, shown = panels_of(scene, participation_of, "any rounds", height=_tall)
    for axes, _, part in shown:
        draw_participation(axes, part)
    legend_below(figure, participation_handles(part for _, _, part in shown))
    return figure


def pictures(scene: Scene) -> Figure:
    """Draw a run's own pictures, from the first to the last in up to four stages."""
    from matplotlib.image import imread

    stages = first_runs(scene, lambda run: sorted((run.folder / PICTURES).glob("*.png")) or None, "pictures")
    if len(stages) > 1:
        raise ConfigError(f"figure {scene.spec.name}: pictures shows one run; name a row and a column")
    ((_, files),) = stages.values()
    chosen = sorted({round(k * (len(files) - 1) / (_STAGES - 1)) for k in range(_STAGES)})
    figure, every = panels([_stage(files[k], scene.spec.x_label) for k in chosen], title=scene.spec.title, height=3.2)
    for axes, k in zip(every, chosen, strict=True):
        axes.imshow(imread(files[k]), cmap="gray", interpolation="nearest")
        axes.set_axis_off()
    return figure


def _stage(file: Path, called: str) -> str:
    """Return the title of a picture ``word_000014``: its number, after the entry's word for it."""
    word, _, number = file.stem.rpartition("_")
    return f"{called or word.replace('_', ' ')} {int(number)}" if number.isdecimal() else file.stem.replace("_", " ")


def _tall(count: int) -> float:
    """Return height of a panel whose rows are clients."""
    return PANEL_HEIGHT + (1.2 if count <= 2 else 0.6)
