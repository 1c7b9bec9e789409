"""A report: one HTML file that shows runs side by side and needs nothing beside itself.

The tables are plain HTML; curves and maps are drawn by Plotly, whose script the page carries, from the figures in it.
All text comes from files that somebody else may have written: it is escaped, and the page's policy lets no script run
but these two and nothing be fetched. Styles it must let pass: Plotly sets them as it draws.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep import __version__
from fedsweep.errors import OutputError
from fedsweep.reports.charts import SYMBOLS
from fedsweep.reports.contents import Report, build_report
from fedsweep.reports.setting_charts import run_name
from fedsweep.reports.setting_table import FIGURES, figure_text
from fedsweep.reports.sources import Found, command_again, find_sources
from fedsweep.reports.world_parts import handovers
from fedsweep.results.settings import ReportRun
from fedsweep.results.texts import bytes_text, clean, metric_text, seconds_text
from fedsweep.results.view import spent_of
from fedsweep.results.worlds import LayoutKeys
from fedsweep.runs.files import atomic_write, file_above
from fedsweep.runs.places import is_address, place_name
from fedsweep.runs.run_folder import CONFIG

if TYPE_CHECKING:
    from jinja2 import Environment

SUFFIXES = (".html", ".htm")
_GENERATOR = '<meta name="generator" content="fedsweep report">'
# Where Plotly's script stands, as `--script` names it; and its file's name beside the page.
INSIDE, BESIDE = "inside", "beside"
PLOTLY = "plotly.min.js"
_PLOTLY_HEAD = b"* plotly.js"
# Rows that are drawn before anybody chooses: as many as one can tell apart.
_DRAWN = 11


@dataclass(frozen=True, kw_only=True)
class Written:
    """A report that was written.

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


def write_report(
    sources: Sequence[str | Path] | Found,
    path: str | Path,
    *,
    uri: str | None = None,
    overwrite: bool = False,
    script: str = INSIDE,
    keys: LayoutKeys | None = None,
) -> Written:
    """Read runs and write the page.

    Args:
        sources: Run folders, folders with runs below them, or names of MLflow experiments; or what was found there.
        path: The page; its suffix is one of :data:`SUFFIXES`. An earlier report is replaced.
        uri: The tracking store's address for experiments, as ``tracking.mlflow_store.resolve_uri`` gives it.
        overwrite: Replace whatever file is there.
        script: Where Plotly's script goes: :data:`INSIDE` the page, or once :data:`BESIDE` all pages of a folder.
        keys: Those that make rows, and those that make worlds, each with a column and a panel.

    Raises:
        InputError: A source is neither a folder with runs nor an experiment, no run can be read, rows or columns name
            no key, or the page can't be written.
    """
    target = _checked_target(Path(path), overwrite=overwrite)
    if script == BESIDE:
        _check_script(target.with_name(PLOTLY), overwrite=overwrite)
    elif script != INSIDE:
        raise OutputError(f"--script {script}: must be {INSIDE} or {BESIDE}")
    source_runs = sources if isinstance(sources, Found) else find_sources([str(source) for source in sources], uri=uri)
    report = build_report(source_runs, keys or LayoutKeys())
    data = render(report, made=datetime.now(UTC), script=script).encode()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if script == BESIDE:
            atomic_write(target.with_name(PLOTLY), plotly_script().encode())
        atomic_write(target, data)
    except OSError as error:
        raise OutputError(f"{target}: cannot be written: {(error.strerror or str(error)).lower()}") from error
    return Written(path=target, size_bytes=len(data), num_runs=len(report.runs), notes=report.notes)


def _checked_target(path: Path, *, overwrite: bool) -> Path:
    target = path.expanduser().absolute()
    if target.suffix.lower() not in SUFFIXES:
        raise OutputError(f"--out {path}: a report's name must end in {' or '.join(SUFFIXES)}")
    if target.is_dir():
        raise OutputError(f"--out {path}: is a folder; give the name of a file")
    if (above := file_above(target)) is not None:
        raise OutputError(f"--out {path}: {above} is no folder")
    if target.exists() and not overwrite:
        try:
            with open(target, "rb") as file:
                head = file.read(1000)
        except OSError as error:
            raise OutputError(f"--out {path}: cannot be read: {(error.strerror or str(error)).lower()}") from error
        if _GENERATOR.encode() not in head:
            raise OutputError(f"--out {path}: holds something else than a report; choose another, or --overwrite it")
    return target


def _check_script(path: Path, *, overwrite: bool) -> None:
    if path.exists() and not overwrite and (not path.is_file() or _PLOTLY_HEAD not in path.read_bytes()[:200]):
        raise OutputError(f"--script {BESIDE}: {path} holds something else than Plotly; write the page elsewhere")


def render(report: Report, *, made: datetime, script: str = INSIDE) -> str:
    """Render the page's text, which says when it was ``made``, in UTC; for ``script`` see :func:`write_report`."""
    from markupsafe import Markup

    environment = _environment()
    own, plotly = _part("page.js"), plotly_script() if script == INSIDE else ""
    # A page that was opened from a disk has no origin, so 'self' would not let it load what lies beside it.
    admitted = f"'{_hash(plotly)}'" if plotly else "'self' file:"
    versions = _common_versions(report.runs)
    charts = {**report.charts, **report.maps.charts}
    order = [index for setting in report.settings for index in setting.runs]
    return environment.get_template("page.html.j2").render(
        report=report,
        title=_title(report),
        made=made,
        generator=Markup(_GENERATOR),
        style=Markup("\n".join([_part("page.css"), *_colour_rules(report)])),
        scripts=Markup(f"'{_hash(own)}' {admitted}"),
        script=Markup(own),
        plotly=Markup(plotly),
        plotly_file=PLOTLY,
        drawn=_DRAWN,
        has_time=any(run.view.figure("sim_time_s") is not None for run in report.runs),
        spent=spent_of(run.view for run in report.runs),
        data=Markup(_embedded({name: chart.tree() for name, chart in charts.items()})),
        swatches=[(f"c{look.colour[1:]}", SYMBOLS[look.marker][1]) for look in report.looks],
        setting_of={index: place for place, setting in enumerate(report.settings) for index in setting.runs},
        order=order,
        client_runs=[
            (run_name(report.runs[i], is_one_of_many=report.has_seeds), report.maps.views[i])
            for i in order
            if i in report.maps.views
        ],
        versions=versions,
        odd_versions=[
            ", ".join(f"{name} {value}" for name, value in run.versions.items() if name not in versions)
            for run in report.runs
        ],
        commands=[_command_again(run.folder) for run in report.runs],
        sweep_commands=[(place_name(path), again) for path in report.sweeps if (again := command_again(path))],
        tables=[(title, Markup(fragment)) for title, fragment in report.tables],
        fedsweep_version=__version__,
    )


def plotly_script() -> str:
    """Return Plotly's script, as the installed package has it."""
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _command_again(run: Path) -> str:
    """Return the command that repeats a run; of one at an address it is verify, which reads configurations there."""
    place = place_name(run)
    return shlex.join(["fedsweep", *(("verify", place) if is_address(place) else ("run", str(run / CONFIG)))])


def _colour_rules(report: Report) -> list[str]:
    """Return a class of style for each colour that text beside a chart names."""
    keys = (colour for chart in report.maps.charts.values() for _, colour in chart.key)
    return [f".c{colour[1:]} {{ color: {colour}; }}" for colour in sorted({*keys, *(k.colour for k in report.looks)})]


@functools.cache
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
        "metric": metric_text,
        "short": lambda value: "-" if value is None else f"{value:.4g}",
        "clean": clean,
        "breakable": _breakable,
        "spread": lambda estimate: figure_text(estimate, FIGURES[0], interval=False),
    }
    environment.filters.update({**filters, "handovers": handovers})
    environment.tests["in_group"] = lambda name, group: re.fullmatch(rf"{group}(-\d+)?", name) is not None
    return environment


def _breakable(text: str) -> str:
    """Return a label that a line may end in where its parts do."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"(?<=[,/+])(?=\w)", "<wbr>", str(escape(text))))


def _part(name: str) -> str:
    return (Path(__file__).with_name("html") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a page's policy names what may run."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _embedded(tree: Mapping[str, Any]) -> str:
    """Return JSON that cannot end the element it stands in."""
    text = json.dumps(tree, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _title(report: Report) -> str:
    names = list(dict.fromkeys(setting.label for setting in report.settings))
    if len(report.sweeps) == 1 and all(run.folder.parent == report.sweeps[0].absolute() for run in report.runs):
        return clean(report.sweeps[0].absolute().name)
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more"


def _common_versions(runs: Sequence[ReportRun]) -> dict[str, str]:
    """Return the versions that all runs agree on, of those that name any."""
    versions = [run.versions for run in runs if run.versions]
    if not versions:
        return {}
    return {name: value for name, value in versions[0].items() if all(v.get(name) == value for v in versions)}
