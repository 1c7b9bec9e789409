"""The contents of a report's page, put together from runs."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedsweep.errors import OutputError
from fedsweep.figures.links import LINKS_PICTURE
from fedsweep.figures.style import Look, setting_looks
from fedsweep.reports.charts import Chart
from fedsweep.reports.client_maps import ClientMaps, client_maps, interesting_first
from fedsweep.reports.parallel_chart import parallel_chart
from fedsweep.reports.setting_charts import curve_charts, front_charts
from fedsweep.reports.sources import Found, reported_tables
from fedsweep.reports.sweep_table import read_verdict
from fedsweep.reports.volume_chart import volume_charts
from fedsweep.reports.who_pays import ShareRow, share_rows
from fedsweep.reports.world_parts import WorldPart, world_part
from fedsweep.results.config_table import ConfigTable, config_table
from fedsweep.results.selection import is_less_better, leading_figure
from fedsweep.results.settings import (
    ReportRun,
    Setting,
    TargetRow,
    cut_short,
    remarks,
    report_runs,
    shortly_called,
    target_rows,
)
from fedsweep.results.texts import clean, some_of
from fedsweep.results.view import metrics_of
from fedsweep.results.worlds import Layout, LayoutKeys, Study, lay_out, study_of
from fedsweep.runs.run_folder import PICTURES
from fedsweep.tasks.declaration import Declaration

_SHOWN = 4
_MOST_PICTURES, _MOST_BYTES = 6, 1_000_000


@dataclass(frozen=True, kw_only=True)
class Report:
    """Contents of a page.

    Attributes:
        runs: The runs.
        settings: The runs grouped: those that differ in their seed alone; the most accurate first.
        layout: The settings in rows and worlds.
        looks: A colour and a marker for each row, by the order in which their first runs were made.
        leading: What they are ranked and compared by: the test accuracy, or what else leads.
        unreadable: Why some runs cannot be shown.
        sweeps: Folders of sweeps that the runs belong to.
        worlds: The best, the front and the budgets of each world.
        targets: What settings spent until they first reached the accuracies of ``evaluation.targets``.
        configs: The settings' configurations side by side.
        maps: What clients hold and when they took part.
        shares: To whom accuracies fall, where that was tested.
        charts: The charts by name; those of clients are in the maps.
        tables: The papers' tables that the runs were made for: captions and HTML.
        verdicts: Which differences the sweeps hold for more than chance, in lines.
        notes: What a reader must know.
    """

    runs: tuple[ReportRun, ...]
    settings: tuple[Setting, ...]
    layout: Layout
    looks: tuple[Look, ...]
    leading: str
    unreadable: tuple[str, ...]
    sweeps: tuple[Path, ...]
    worlds: tuple[WorldPart, ...]
    targets: tuple[TargetRow, ...]
    configs: ConfigTable
    maps: ClientMaps
    shares: tuple[ShareRow, ...]
    charts: Mapping[str, Chart]
    tables: tuple[tuple[str, str], ...]
    verdicts: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def metrics(self) -> Mapping[str, Declaration]:
        """Return the declarations of the test's metrics, by column."""
        return metrics_of(run.view for run in self.runs)

    @property
    def links(self) -> tuple[tuple[str, str], ...]:
        """Return pictures of who talked with whom, where that is not the server alone: labels and addresses."""
        return tuple(_links(self.runs, self.settings))

    @property
    def has_seeds(self) -> bool:
        """True where some setting has more than one run."""
        return any(len(setting.runs) > 1 for setting in self.settings)


def build_report(sources: Found, keys: LayoutKeys | None = None) -> Report:
    """Put together a page's contents, in rows and worlds by these keys.

    Raises:
        OutputError: None of the runs can be shown.
        ConfigError: There is no such key, or two settings would stand in one cell.
    """
    runs, bad = report_runs(sources.runs)
    if not runs:
        raise OutputError(bad[0])
    leading = leading_figure(run.view for run in runs)
    study, looks = _ranked(runs, keys or LayoutKeys(), leading)
    runs, settings = list(study.runs), study.settings
    parts = [world_part(world, settings) for world in study.layout.worlds]
    order = interesting_first(
        {index: run.view.figure("test_accuracy") for index, run in enumerate(runs)},
        [setting.runs for setting in settings],
    )
    maps = client_maps([run.view for run in runs], order)
    configs = config_table([runs[setting.runs[0]].flat for setting in settings])
    tables, problems = reported_tables(sources.sweeps)
    # A table's columns are different worlds on purpose.
    one_table = len(tables) == 1 and all(r.folder.resolve().parent == sources.sweeps[0].resolve() for r in sources.runs)
    worlds = [] if one_table or keys not in (None, LayoutKeys()) else _world_notes(study.layout)
    notes = (*sources.notes, *problems, *worlds, *cut_short(runs), *remarks(runs, settings), *maps.notes)
    charts = {
        **curve_charts(study, looks),
        **front_charts(study, looks, parts),
        "parallel": parallel_chart(study, looks, configs),
    } | volume_charts(sources.sweeps)
    return Report(
        runs=tuple(runs),
        settings=tuple(settings),
        layout=study.layout,
        looks=tuple(looks),
        leading=leading,
        unreadable=(*sources.unreadable, *bad),
        sweeps=sources.sweeps,
        worlds=tuple(parts),
        targets=tuple(target_rows(settings)),
        configs=configs,
        maps=maps,
        shares=tuple(share_rows(study)),
        charts={name: chart for name, chart in charts.items() if chart},
        tables=tuple(tables),
        verdicts=tuple(clean(line, longest=1000) for folder in sources.sweeps for line in read_verdict(folder)),
        notes=tuple(clean(note, longest=1000) for note in notes),
    )


def _links(runs: Sequence[ReportRun], settings: Sequence[Setting]) -> Iterator[tuple[str, str]]:
    """Yield the picture of each setting's first run, of some settings, within its address."""
    paths = ((setting.label, runs[setting.runs[0]].folder / PICTURES / LINKS_PICTURE) for setting in settings)
    pictures = (
        (label, path)
        for label, path in paths
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= _MOST_BYTES
    )
    for label, path in itertools.islice(pictures, _MOST_PICTURES):
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES)
        yield label, f"data:image/png;base64,{base64.b64encode(data).decode()}"


def _ranked(runs: Sequence[ReportRun], keys: LayoutKeys, leading: str) -> tuple[Study, list[Look]]:
    """Return the runs by short names; the settings world by world, the best first; and looks of the rows.

    Their rank has no part in these.
    """
    sign = 1 if is_less_better(leading, (run.view for run in runs)) else -1
    study = study_of(runs, rows=keys.rows, columns=keys.columns)
    world_of = {place: n for n, world in reversed([*enumerate(study.layout.worlds)]) for place in world.settings}

    def rank(place: int) -> tuple[int, bool, bool, float]:
        setting = study.settings[place]
        value = setting.figure(leading)
        return world_of[place], value is None, not setting.is_compared(leading), sign * (value or 0.0)

    order = sorted(range(len(study.settings)), key=rank)
    settings = [study.settings[place] for place in order]
    layout = lay_out(study.runs, settings, rows=keys.rows, columns=keys.columns)
    ages = [min(order[place] for place in layout.places_of(row)) for row in range(len(layout.rows))]
    ranked = Study(runs=study.runs, settings=settings, layout=layout)
    oldest = sorted(range(len(ages)), key=ages.__getitem__)
    methods = ranked.methods
    looks = dict(zip(oldest, setting_looks([methods[row] for row in oldest]), strict=True))
    return replace(ranked, runs=shortly_called(study.runs)), [looks[row] for row in range(len(ages))]


def _world_notes(layout: Layout) -> list[str]:
    if not layout.column_keys or len(layout.worlds) < 2:
        return []
    named = some_of(layout.column_keys, _SHOWN)
    return [
        f"runs differ in {named}: these are different worlds, so accuracies and bytes are no fair comparison; each"
        " world has its own best and its own front"
    ]
