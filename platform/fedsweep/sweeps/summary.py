"""A sweep's summary: each trial's figures, each setting's over its seeds, and which differences are real.

It is computed from the run folders alone, so a resumed sweep, or one whose driver died, has the same summary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.errors import InputError
from fedsweep.results.seed_statistics import Difference, Estimate, corrected, estimate, paired
from fedsweep.results.settings import counted, group_settings, remarks, report_runs
from fedsweep.results.texts import canonical
from fedsweep.results.view import RunView, load_run
from fedsweep.runs.files import jsonable, write_file
from fedsweep.runs.run_folder import BY_SCHEDULER, CONFIG, RunFolder
from fedsweep.sweeps.fairness import TrialWorld, comparable
from fedsweep.sweeps.space import Trial
from fedsweep.sweeps.sweep_folder import TABLE, SweepFolder
from fedsweep.sweeps.verdict import FrontVerdict, front_verdict, read_trial_curve

if TYPE_CHECKING:
    from fedsweep.config.schema import Config

# Beside the sweep's own metrics, every summary has these.
_ALWAYS = ("test_accuracy", "best_test_accuracy", "total_bytes", "comm_ratio", "sim_time_s")
_ALSO = ("flops", "local_steps", "wall_time_s", "sync_points", "over_budget", "values_up", "values_down")
# Comparing everything with everything is of no use to anyone beyond this.
_MOST_COMPARED = 40
_Load = Callable[[Path], RunView]


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """A trial as its folder tells of it.

    Attributes:
        trial: Which one.
        world: What it must share with another trial to be compared; see :func:`~fedsweep.sweeps.fairness.comparable`.
        status: ``finished``, ``failed``, ``killed``, ``unfinished``, or ``missing`` where it never began.
        stopped_by: Why it ended.
        reason: Why it failed.
        rounds: Rounds done.
        figures: Metrics by name; NaN where there is none.
        seed: Its seed.
    """

    trial: Trial
    world: TrialWorld
    status: str
    stopped_by: str | None
    reason: str | None
    rounds: int
    figures: Mapping[str, float]
    seed: int | None


@dataclass(frozen=True, kw_only=True)
class SettingRow:
    """The trials that differ in their seed alone.

    Attributes:
        label: What they have in common.
        world: See :class:`TrialRow`.
        values: The same as values.
        seeds: Of those that count; see :func:`~fedsweep.results.settings.counted`.
        failed: How many did not finish.
        cut_short: How many the scheduler ended; they count with what they reached.
        figures: Metrics by name.
        misses: The constraints that its means do not keep, as the sweep has them; a missing figure keeps none.
    """

    label: str
    world: TrialWorld
    values: Mapping[str, Any]
    seeds: tuple[int | None, ...]
    failed: int
    cut_short: int
    figures: Mapping[str, Estimate]
    misses: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A sweep's result.

    Attributes:
        metrics: What is compared, first the one that orders the table.
        modes: ``max`` or ``min`` for each.
        trials: In the order of the plan.
        settings: The best first; then those that miss a constraint; those of which no trial has finished come last.
        differences: Between settings that may be compared, by the first metric; indices into ``settings``. Corrected
            for the number of comparisons in all worlds.
        notes: What a reader must know.
        fronts: With two or three metrics: the front of each of the :attr:`groups`, by its place.
    """

    metrics: tuple[str, ...]
    modes: tuple[str, ...]
    trials: tuple[TrialRow, ...]
    settings: tuple[SettingRow, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    fronts: Mapping[int, FrontVerdict] = field(default_factory=dict)

    @property
    def groups(self) -> list[list[int]]:
        """Return the settings that may be compared with each other, world by world: places in ``settings``."""
        return comparable([setting.world for setting in self.settings])

    @property
    def failed(self) -> list[TrialRow]:
        """Trials that did not finish."""
        return [row for row in self.trials if row.status != "finished"]

    @property
    def headline(self) -> dict[str, float]:
        """The best setting's means, where a trial has finished, and how many trials there are, by name.

        Of several worlds, which are not compared, there is no best, nor where each setting misses a constraint.
        """
        if not self.settings:
            return {}
        failed, first = len(self.failed), self.settings[0]
        best = first.figures if failed < len(self.trials) and len(self.groups) == 1 and not first.misses else {}
        figures = {f"best_setting/{name}": best[name].mean for name in self.metrics if best}
        return {**figures, "trials_finished": float(len(self.trials) - failed), "trials_failed": float(failed)}


def summarise(
    folder: SweepFolder,
    trials: Sequence[Trial],
    worlds: Sequence[TrialWorld],
    *,
    config: Config,
    notes: Iterable[str] = (),
) -> Summary:
    """Read all run folders and put together what they say, after notes that are known beforehand.

    There is a world for each trial, in the same order: what it must share with another to be compared.
    """
    metrics, modes = tuple(config.sweep.aims), tuple(config.sweep.aims.values())
    load: _Load = functools.cache(load_run)  # three parts of the summary ask for each
    rows = tuple(
        _trial_row(folder, trial, world, config=config, metrics=metrics, load=load)
        for trial, world in zip(trials, worlds, strict=True)
    )
    groups: dict[tuple[TrialWorld, str], list[TrialRow]] = {}
    for row in rows:
        groups.setdefault((row.world, row.trial.setting), []).append(row)
    ranked = [(_setting(group, config), group) for group in groups.values()]
    ranked.sort(key=lambda pair: _rank(*pair, metric=metrics[0], mode=modes[0]))
    settings = [setting for setting, _ in ranked]
    under_way = [setting.label for setting, group in ranked if setting.seeds and _is_under_way(group)]
    return Summary(
        metrics=metrics,
        modes=modes,
        trials=rows,
        settings=tuple(settings),
        differences=tuple(_compare(settings, [_figures_by_seed(group, metrics[0]) for _, group in ranked])),
        notes=(
            *notes,
            *([f"figures of trials under way, since none has finished: {_some(under_way)}"] if under_way else []),
            *_uncompared_notes(settings),
            *_cohort_notes(folder, rows, load),
            *_remarks(folder, rows, load),
        ),
        fronts=_fronts(folder, [group for _, group in ranked], config),
    )


def write_summary(folder: SweepFolder, summary: Summary) -> None:
    """``summary.json``, and ``summary.parquet`` with a row per trial."""
    labels = [setting.label for setting in summary.settings]
    worlds = {world: number for number, world in enumerate(dict.fromkeys(s.world for s in summary.settings))}
    groups = summary.groups
    settings = [
        {**asdict(s), "world": worlds[s.world], "figures": {k: jsonable(asdict(v)) for k, v in s.figures.items()}}
        for s in summary.settings
    ]
    folder.write_summary(
        {
            "metrics": dict(zip(summary.metrics, summary.modes, strict=True)),
            "settings": settings,
            "differences": [
                {**jsonable(asdict(d)), "first": labels[d.first], "second": labels[d.second]}
                for d in summary.differences
            ],
            "fronts": [
                {"among": [labels[place] for place in groups[number]], **_front_json(verdict, labels)}
                for number, verdict in summary.fronts.items()
            ],
            "trials": [_trial_json(row) for row in summary.trials],
            "notes": list(summary.notes),
        }
    )
    write_file(folder.path / TABLE, _parquet(summary))


# -- reading ---------------------------------------------------------------------------------------------------------


def _trial_row(
    folder: SweepFolder, trial: Trial, world: TrialWorld, *, config: Config, metrics: Sequence[str], load: _Load
) -> TrialRow:
    path = folder.trial_path(trial)
    seed = trial.seed if trial.seed is not None else config.seed
    status, view = "missing", None
    reason: str | None = "nothing of it was written"
    if (path / CONFIG).is_file():
        try:
            view = load(path)
            status = view.status
            reason = view.reason
        except InputError as error:
            status, reason = "failed", str(error)
    limited = (limit.metric for limit in config.sweep.limits)
    figures = {name: view.figure(name) if view else None for name in (*metrics, *limited, *_ALWAYS, *_ALSO)}
    return TrialRow(
        trial=trial,
        world=world,
        status=status,
        stopped_by=view.result.get("stopped_by") if view else None,
        reason=reason,
        rounds=view.rounds if view else 0,
        figures={name: math.nan if value is None else value for name, value in figures.items()},
        seed=seed,
    )


def _setting(rows: Sequence[TrialRow], config: Config) -> SettingRow:
    own = [rows[place] for place in counted(rows)]
    figures = {name: estimate(row.figures[name] for row in own) for name in rows[0].figures}
    limits = zip(config.sweep.constraints, config.sweep.limits, strict=True)
    return SettingRow(
        label=rows[0].trial.label,
        world=rows[0].world,
        values={key: value for key, value in rows[0].trial.values.items() if key != "seed"},
        seeds=tuple(row.seed for row in own),
        failed=sum(row.status != "finished" for row in rows),
        cut_short=sum(row.stopped_by == BY_SCHEDULER for row in own),
        figures=figures,
        misses=tuple(text.strip() for text, limit in limits if own and not limit.holds(figures[limit.metric].mean)),
    )


def _figures_by_seed(rows: Sequence[TrialRow], metric: str) -> dict[int | None, float]:
    # A trial under way, or one that a scheduler ended, did not train as long as the others: nothing to pair.
    own = [rows[place] for place in counted(rows)]
    whole = [row for row in own if row.status == "finished" and row.stopped_by != BY_SCHEDULER]
    return {row.seed: row.figures[metric] for row in whole}


def _fronts(folder: SweepFolder, groups: Sequence[Sequence[TrialRow]], config: Config) -> dict[int, FrontVerdict]:
    """Judge each world's trials that have finished, in the order of the plan."""
    aims, limits = config.sweep.aims, config.sweep.limits
    if len(aims) not in (2, 3):
        return {}
    fronts = {}
    for number, places in enumerate(comparable([group[0].world for group in groups])):
        rows = [(row, place) for place in places for row in groups[place] if row.status == "finished"]
        curves = [
            read_trial_curve(folder.trial_path(row.trial), setting=place, seed=row.seed, aims=aims, constraints=limits)
            for row, place in sorted(rows, key=lambda pair: pair[0].trial.number)
        ]
        if (verdict := front_verdict(curves)) is not None:
            fronts[number] = verdict
    return fronts


def _front_json(verdict: FrontVerdict, labels: Sequence[str]) -> dict[str, Any]:
    return {
        "settings": [{"label": labels[place], "seeds": count} for place, count in verdict.settings.items()],
        "hypervolume": jsonable(asdict(verdict.volume)),
        "by_bytes": [{"bytes": sent, **jsonable(asdict(volume))} for sent, volume in verdict.by_bytes],
    }


def _is_under_way(rows: Sequence[TrialRow]) -> bool:
    return all(row.status != "finished" for row in rows)


def _rank(setting: SettingRow, rows: Sequence[TrialRow], *, metric: str, mode: str) -> tuple[bool, bool, float]:
    value = setting.figures[metric].mean
    figure = math.inf if math.isnan(value) else -value if mode == "max" else value
    return _is_under_way(rows), bool(setting.misses), figure


def _compare(settings: Sequence[SettingRow], by_seed: Sequence[Mapping[int | None, float]]) -> list[Difference]:
    by_pair: dict[tuple[int, int], Difference] = {}
    for group in comparable([setting.world for setting in settings]):
        places = group[:_MOST_COMPARED]
        for d in paired([by_seed[place] for place in places]):
            pair = places[d.first], places[d.second]
            if d.pairs and pair not in by_pair:
                by_pair[pair] = replace(d, first=pair[0], second=pair[1])
    return corrected(list(by_pair.values()))


def _remarks(folder: SweepFolder, rows: Sequence[TrialRow], load: _Load) -> list[str]:
    """Return remarks on parts of methods that did nothing, and on settings that came to the same models."""
    runs, _ = report_runs([load(folder.trial_path(row.trial)) for row in rows if row.status == "finished"])
    return remarks(runs, group_settings(runs))


def _cohort_notes(folder: SweepFolder, rows: Sequence[TrialRow], load: _Load) -> list[str]:
    """Return notes on trials of one world and seed with other clients or another split than the first of them."""
    first: dict[tuple[TrialWorld, int | None], tuple[TrialRow, Any, Any]] = {}
    split, cohorts = [], []
    for row in rows:
        if row.status != "finished":
            continue
        view = load(folder.trial_path(row.trial))
        counts = RunFolder(view.folder).read_clients().column("label_counts").to_pylist()
        key = (row.world, row.seed)
        if key not in first:
            first[key] = (row, view.column("cohort"), counts)
            continue
        _, other_cohorts, other_counts = first[key]
        if counts != other_counts:
            split.append(row.trial.label)
        if any(a != b for a, b in zip(view.column("cohort"), other_cohorts, strict=False)):
            cohorts.append(row.trial.label)
    sentences = []
    if split:
        sentences.append(f"the data fell to clients otherwise than in other trials of the same seed: {_some(split)}")
    if cohorts:
        sentences.append(
            "other cohorts than in other trials of the same seed (their method or training asks for it):"
            f" {_some(cohorts)}"
        )
    return sentences


def _uncompared_notes(settings: Sequence[SettingRow]) -> list[str]:
    groups = comparable([setting.world for setting in settings])
    return [
        f"differences are between the best {_MOST_COMPARED} of {len(group)} settings"
        + (f" of world {number} of {len(groups)}" if len(groups) > 1 else "")
        for number, group in enumerate(groups, start=1)
        if len(group) > _MOST_COMPARED
    ]


def _some(labels: Sequence[str]) -> str:
    names = list(dict.fromkeys(labels))
    return "; ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


# -- writing ---------------------------------------------------------------------------------------------------------


def _trial_json(row: TrialRow) -> dict[str, Any]:
    head = {"number": row.trial.number, "folder": row.trial.folder, "label": row.trial.label}
    ended = {"status": row.status, "stopped_by": row.stopped_by, "reason": row.reason, "rounds": row.rounds}
    return {**head, "values": dict(row.trial.values), "seed": row.seed, **ended, "figures": jsonable(row.figures)}


def _parquet(summary: Summary) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = summary.trials
    columns: dict[str, Any] = {
        "number": pa.array([r.trial.number for r in rows], pa.int64()),
        "folder": pa.array([r.trial.folder for r in rows], pa.string()),
        "setting": pa.array([r.trial.label for r in rows], pa.string()),
        "seed": pa.array([r.seed for r in rows], pa.int64()),
        "status": pa.array([r.status for r in rows], pa.string()),
        "stopped_by": pa.array([r.stopped_by for r in rows], pa.string()),
        "reason": pa.array([r.reason for r in rows], pa.string()),
        "rounds": pa.array([r.rounds for r in rows], pa.int64()),
    }
    for key in dict.fromkeys(key for r in rows for key in r.trial.values):
        columns[f"values.{key}"] = pa.array([canonical(r.trial.values.get(key)) for r in rows], pa.string())
    for name in rows[0].figures if rows else ():
        columns[name] = pa.array([r.figures[name] for r in rows], pa.float64())
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return bytes(sink.getvalue().to_pybytes())
