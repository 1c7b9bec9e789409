"""What a report's page shows, put together from runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsweep.errors import OutputError
from fedsweep.figures.style import Look, setting_looks
from fedsweep.reports.charts import Chart
from fedsweep.reports.client_maps import ClientMaps, client_maps, interesting_first
from fedsweep.reports.parallel_chart import parallel_chart
from fedsweep.reports.setting_charts import curve_chart, front_chart
from fedsweep.reports.sources import Found, reported_tables
from fedsweep.reports.sweep_table import read_verdict
from fedsweep.reports.who_pays import ShareRow, share_rows
from fedsweep.results.config_table import ConfigTable, config_table
from fedsweep.results.pareto import BestUnderBudget, best_under_budgets, budget_grid, pareto_front, unsure_steps
from fedsweep.results.seed_statistics import Estimate
from fedsweep.results.settings import (
    ReportRun,
    Setting,
    TargetRow,
    group_settings,
    remarks,
    report_runs,
    shortly_called,
    target_rows,
)
from fedsweep.results.texts import clean, some_of

_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a page shows.

    Attributes:
        runs: The runs.
        settings: The runs grouped: those that differ in their seed alone; the most accurate first.
        looks: A colour and a marker for each setting, by the order in which their first runs were made.
        accuracies: Each setting's test accuracy over its seeds.
        unreadable: Why some runs cannot be shown.
        sweeps: Folders of sweeps that the runs belong to.
        front: Indices of the settings that no other beats in accuracy and bytes, cheapest first.
        front_notes: Of its neighbours, who cannot be told from the cheaper one.
        budgets: The best setting for each budget.
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
    looks: tuple[Look, ...]
    accuracies: tuple[Estimate, ...]
    unreadable: tuple[str, ...]
    sweeps: tuple[Path, ...]
    front: tuple[int, ...]
    budgets: tuple[BestUnderBudget, ...]
    targets: tuple[TargetRow, ...]
    configs: ConfigTable
    maps: ClientMaps
    shares: tuple[ShareRow, ...]
    charts: Mapping[str, Chart]
    tables: tuple[tuple[str, str], ...]
    verdicts: tuple[str, ...]
    front_notes: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def has_seeds(self) -> bool:
        """Whether some setting has more than one run."""
        return any(len(setting.runs) > 1 for setting in self.settings)


def build_report(found: Found) -> Report:
    """Puts together what a page shows.

    Raises:
        OutputError: None of the runs can be shown.
    """
    runs, bad = report_runs(found.runs)
    if not runs:
        raise OutputError(bad[0])
    runs, settings, looks = _ranked(runs, group_settings(runs))
    accuracies = [setting.over_seeds("test_accuracy") for setting in settings]
    curves = [setting.curve.accuracy_by_bytes() if setting.curve else [] for setting in settings]
    order = interesting_first(
        {index: run.view.figure("test_accuracy") for index, run in enumerate(runs)},
        [setting.runs for setting in settings],
    )
    maps = client_maps([run.view for run in runs], order)
    configs = config_table([runs[setting.runs[0]].flat for setting in settings])
    tables, problems = reported_tables(found.sweeps)
    # A table's columns are different worlds on purpose.
    one_table = len(tables) == 1 and all(run.folder.resolve().parent == found.sweeps[0].resolve() for run in found.runs)
    worlds = [] if one_table else _world_notes(configs)
    said = (*found.notes, *problems, *worlds, *remarks(runs, settings), *maps.notes)
    front = pareto_front([_point(s.figure("total_bytes"), s.figure("test_accuracy")) for s in settings])
    return Report(
        runs=tuple(runs),
        settings=tuple(settings),
        looks=tuple(looks),
        accuracies=tuple(accuracies),
        unreadable=(*found.unreadable, *bad),
        sweeps=found.sweeps,
        front=tuple(front),
        front_notes=tuple(
            f"{settings[a].label} and {settings[b].label}: their 95 % intervals overlap, so the step may be chance"
            for a, b in unsure_steps(front, accuracies)
        ),
        budgets=tuple(best_under_budgets(curves, budget_grid(curves))),
        targets=tuple(target_rows(settings)),
        configs=configs,
        maps=maps,
        shares=tuple(share_rows(settings)),
        charts=_charts(runs, settings, looks, accuracies, configs),
        tables=tuple(tables),
        verdicts=tuple(clean(line, longest=1000) for folder in found.sweeps for line in read_verdict(folder)),
        notes=tuple(clean(note, longest=1000) for note in said),
    )


def _charts(
    runs: Sequence[ReportRun],
    settings: Sequence[Setting],
    looks: Sequence[Look],
    accuracies: Sequence[Estimate],
    configs: ConfigTable,
) -> dict[str, Chart]:
    charts = {
        "curves": curve_chart(runs, settings, looks),
        "front": front_chart(runs, settings, looks, accuracies),
        "parallel": parallel_chart(settings, looks, configs),
    }
    return {name: chart for name, chart in charts.items() if chart}


def _ranked(
    runs: Sequence[ReportRun], settings: Sequence[Setting]
) -> tuple[list[ReportRun], list[Setting], list[Look]]:
    """The runs by short names; the settings, the most accurate first; and looks that their rank has no part in."""

    def rank(pair: tuple[Setting, Look]) -> tuple[bool, float]:
        accuracy = pair[0].figure("test_accuracy")
        return accuracy is None, -(accuracy or 0.0)

    looks = setting_looks([runs[setting.runs[0]].method for setting in settings])
    pairs = sorted(zip(settings, looks, strict=True), key=rank)
    return shortly_called(runs), [setting for setting, _ in pairs], [look for _, look in pairs]


def _world_notes(configs: ConfigTable) -> list[str]:
    places = {key: place for place, key in enumerate(configs.differing)}
    keys = [key for key in places if key.startswith(("scenario.", "model."))]
    # Who knows no budgets is compared with those who have them; only several budgets are several worlds.
    budgets = [key for key in keys if key.startswith("scenario.budgets")]
    given = {cells for row in configs.cells if "null" not in (cells := tuple(row[places[key]] for key in budgets))}
    if len(given) < 2:
        keys = [key for key in keys if key not in budgets]
    if not keys:
        return []
    named = some_of(keys, _SHOWN)
    return [f"runs differ in {named}: these are different worlds, so accuracies and bytes are no fair comparison"]


def _point(cost: float | None, accuracy: float | None) -> tuple[float, float] | None:
    return None if cost is None or accuracy is None else (cost, accuracy)
