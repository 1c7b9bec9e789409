"""A report: one HTML file that shows runs side by side and needs nothing beside itself.

The tables are plain HTML; curves and maps are drawn by the page's own script from the figures in it. All text comes
from files that somebody else may have written: it is escaped, and the page's policy lets no script run but its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep import __version__
from fedsweep.errors import OutputError
from fedsweep.reports.client_maps import ClientMaps, client_maps, interesting_first
from fedsweep.reports.sources import Found, find_sources
from fedsweep.reports.tables import ReportedTable, command_again, reported_tables
from fedsweep.results.config_table import ConfigTable, config_table
from fedsweep.results.curves import FIGURES, curve_json, short
from fedsweep.results.pareto import BestUnderBudget, best_under_budgets, budget_grid, pareto_front
from fedsweep.results.settings import ReportRun, Setting, TargetRow, group_settings, report_runs, target_rows
from fedsweep.results.texts import bytes_text, clean, seconds_text
from fedsweep.runs.files import atomic_write
from fedsweep.runs.run_folder import CONFIG

if TYPE_CHECKING:
    from jinja2 import Environment

SUFFIXES = (".html", ".htm")
_GENERATOR = '<meta name="generator" content="fedsweep report">'
_SCRIPTS = ("chart.js", "cells.js", "labels.js", "page.js")
# Points of all curves on a page, and the bounds for a single one.
_POINTS, _FEWEST, _MOST = 30_000, 24, 400
_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class Written:
    """What came of a report.

    Attributes:
        path: The file.
        size_bytes: Its size.
        num_runs: Runs that it shows.
        notes: What a reader must know; they stand in the report, too.
    """

    path: Path
    size_bytes: int
    num_runs: int
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a page shows.

    Attributes:
        runs: The runs.
        settings: The runs grouped: those that differ in their seed alone.
        unreadable: Folders of runs that cannot be read, with the reason.
        sweeps: Folders of sweeps that the runs belong to.
        front: Indices of the settings that no other beats in accuracy and bytes, cheapest first.
        run_front: The same of runs.
        budgets: The best setting for each budget.
        targets: What settings spent until they first reached the accuracies of ``evaluation.targets``.
        configs: The settings' configurations side by side.
        maps: What clients hold and when they took part.
        tables: The papers' tables that the runs were made for.
        notes: What a reader must know.
    """

    runs: tuple[ReportRun, ...]
    settings: tuple[Setting, ...]
    unreadable: tuple[tuple[Path, str], ...]
    sweeps: tuple[Path, ...]
    front: tuple[int, ...]
    run_front: tuple[int, ...]
    budgets: tuple[BestUnderBudget, ...]
    targets: tuple[TargetRow, ...]
    configs: ConfigTable
    maps: ClientMaps
    tables: tuple[ReportedTable, ...]
    notes: tuple[str, ...]

    @property
    def has_seeds(self) -> bool:
        """Whether some setting has more than one run."""
        return any(len(setting.runs) > 1 for setting in self.settings)


def write_report(
    sources: Sequence[str | Path], path: str | Path, *, uri: str | None = None, overwrite: bool = False
) -> Written:
    """Reads runs and writes the page.

    Args:
        sources: Run folders, folders with runs below them, or names of MLflow experiments.
        path: The page; its suffix is one of :data:`SUFFIXES`. An earlier report is replaced.
        uri: The tracking store's address for experiments, as ``tracking.mlflow_store.resolve_uri`` gives it.
        overwrite: Replace whatever file is there.

    Raises:
        InputError: A source is neither a folder with runs nor an experiment, no run can be read, or the page can't be
            written.
    """
    target = check_target(Path(path), overwrite=overwrite)
    report = build_report(find_sources([str(source) for source in sources], uri=uri))
    data = render(report, made=datetime.now(UTC)).encode()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, data)
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {(error.strerror or str(error)).lower()}") from error
    return Written(path=target, size_bytes=len(data), num_runs=len(report.runs), notes=report.notes)


def check_target(path: Path, *, overwrite: bool) -> Path:
    """The page's absolute path.

    Raises:
        OutputError: It does not end in ``.html``, is a folder, or is a file that is no report and not to be replaced.
    """
    target = path.expanduser().absolute()
    if target.suffix.lower() not in SUFFIXES:
        raise OutputError(f"--out {path}: a report's name must end in {' or '.join(SUFFIXES)}")
    if target.is_dir():
        raise OutputError(f"--out {path}: is a folder; give the name of a file")
    if target.exists() and not overwrite:
        try:
            with open(target, "rb") as file:
                head = file.read(1000)
        except OSError as error:
            raise OutputError(f"--out {path}: cannot be read: {(error.strerror or str(error)).lower()}") from error
        if _GENERATOR.encode() not in head:
            raise OutputError(f"--out {path}: holds something else than a report; choose another, or --overwrite it")
    return target


def build_report(found: Found) -> Report:
    """Puts together what a page shows.

    Args:
        found: The runs.

    Raises:
        OutputError: None of the runs can be shown.
    """
    runs, bad = report_runs(found.runs)
    if not runs:
        raise OutputError(bad[0][1])
    settings = group_settings(runs)
    settings.sort(key=lambda setting: (setting.accuracy is None, -(setting.accuracy or 0.0)))
    curves = [setting.curve.accuracy_by_bytes() if setting.curve else [] for setting in settings]
    order = interesting_first(
        {index: run.test_accuracy for index, run in enumerate(runs)}, [setting.runs for setting in settings]
    )
    maps = client_maps([run.view for run in runs], order)
    configs = config_table([runs[setting.runs[0]].flat for setting in settings])
    tables, problems = reported_tables(found.sweeps)
    # A table's columns are different worlds on purpose.
    one_table = len(tables) == 1 and all(run.folder.resolve().parent == found.sweeps[0].resolve() for run in found.runs)
    said = (*found.notes, *problems, *(() if one_table else _world_notes(configs)), *maps.notes)
    return Report(
        runs=tuple(runs),
        settings=tuple(settings),
        unreadable=(*((item.folder, item.reason) for item in found.unreadable), *bad),
        sweeps=found.sweeps,
        front=tuple(pareto_front([_point(s.total_bytes, s.accuracy) for s in settings])),
        run_front=tuple(
            pareto_front([_point(r.total_bytes, r.test_accuracy) if r.status != "failed" else None for r in runs])
        ),
        budgets=tuple(best_under_budgets(curves, budget_grid(curves))),
        targets=tuple(target_rows(settings)),
        configs=configs,
        maps=maps,
        tables=tuple(tables),
        notes=tuple(clean(note, longest=1000) for note in said),
    )


def render(report: Report, *, made: datetime) -> str:
    """The page's text.

    Args:
        report: What it shows.
        made: When, in UTC.
    """
    from markupsafe import Markup

    environment = _environment()
    style, script = _part("page.css"), "\n".join(map(_part, _SCRIPTS))
    versions = _common_versions(report.runs)
    return environment.get_template("page.html.j2").render(
        report=report,
        title=_title(report),
        made=made,
        generator=Markup(_GENERATOR),
        style=Markup(style),
        style_hash=_hash(style),
        script=Markup(script),
        script_hash=_hash(script),
        data=Markup(_embedded(page_data(report))),
        setting_of={index: place for place, setting in enumerate(report.settings) for index in setting.runs},
        order=[index for setting in report.settings for index in setting.runs],
        versions=versions,
        odd_versions=[_odd(run.versions, versions) for run in report.runs],
        commands=[shlex.join(["fedsweep", "run", str(run.folder / CONFIG)]) for run in report.runs],
        sweep_commands=[(path, command_again(path)) for path in report.sweeps],
        tables=[(table.title, Markup(table.fragment)) for table in report.tables],
        fedsweep_version=__version__,
    )


def page_data(report: Report) -> dict[str, Any]:
    """The figures that the page's script draws from."""
    drawn = len(report.runs) + sum(len(setting.counted) > 1 for setting in report.settings)
    points = max(_FEWEST, min(_MOST, _POINTS // drawn))
    place_of = {index: place for place, setting in enumerate(report.settings) for index in setting.runs}
    runs = [
        {
            "label": run.label,
            "setting": place_of[index],
            "seed": run.view.seed,
            "status": run.status,
            "accuracy": run.test_accuracy,
            "bytes": run.total_bytes,
            "curve": curve_json(run.curve, points=points),
        }
        for index, run in enumerate(report.runs)
    ]
    settings = [
        {
            "label": setting.label,
            "runs": setting.runs,
            "counted": setting.counted,
            "accuracy": setting.accuracy,
            "bytes": short(setting.total_bytes),
            "curve": curve_json(setting.curve, points=points) if setting.curve and len(setting.counted) > 1 else None,
        }
        for setting in report.settings
    ]
    drawable = {name for run in report.runs for name in run.curve.figures}
    return {
        "runs": runs,
        "settings": settings,
        "figures": {name: text for name, text in FIGURES.items() if name in drawable},
        "front": {"runs": report.run_front, "settings": report.front},
        "clients": report.maps.tree(),
    }


def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("fedsweep.reports", "html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: Mapping[str, Callable[..., str]] = {
        "bytes": bytes_text,
        "seconds": seconds_text,
        "percent": lambda share: "-" if share is None else f"{100 * share:.2f} %",
        "ratio": lambda value: "-" if value is None else f"{value:.3f}",
        "short": lambda value: "-" if value is None else f"{value:.4g}",
        "clean": clean,
    }
    environment.filters.update(filters)
    return environment


def _part(name: str) -> str:
    return (Path(__file__).with_name("html") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a page's policy names what may run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _embedded(tree: Mapping[str, Any]) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(tree, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _title(report: Report) -> str:
    names = list(dict.fromkeys(setting.label for setting in report.settings))
    if len(report.sweeps) == 1 and all(run.folder.parent == report.sweeps[0].absolute() for run in report.runs):
        return clean(report.sweeps[0].absolute().name)
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more"


def _world_notes(configs: ConfigTable) -> list[str]:
    keys = [key for key in configs.differing if key.startswith(("scenario.", "model."))]
    if not keys:
        return []
    named = ", ".join(keys[:_SHOWN]) + (f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else "")
    return [f"runs differ in {named}: these are different worlds, so accuracies and bytes are no fair comparison"]


def _point(cost: float | None, accuracy: float | None) -> tuple[float, float] | None:
    return None if cost is None or accuracy is None else (cost, accuracy)


def _common_versions(runs: Sequence[ReportRun]) -> dict[str, str]:
    """The versions that all runs agree on, of those that name any."""
    known = [run.versions for run in runs if run.versions]
    if not known:
        return {}
    return {name: value for name, value in known[0].items() if all(v.get(name) == value for v in known)}


def _odd(versions: Mapping[str, str], common: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in versions.items() if name not in common)
