"""Runs and settings as they are shown: checked figures, clean text, means over seeds, what targets took."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from fedsweep.catalog import merged_title
from fedsweep.errors import InputError
from fedsweep.results.config_table import aligned, flat_config, setting_key
from fedsweep.results.curves import Curve, curve_of, mean_curve
from fedsweep.results.seed_statistics import Estimate, estimate, finite, mean
from fedsweep.results.texts import clean, numbered, some_of, without_shared_start
from fedsweep.results.view import SPENT, RunView, run_labels
from fedsweep.runs.places import place_name
from fedsweep.runs.run_folder import BY_SCHEDULER

_LONGEST_REASON = 1000
_MOST_TARGETS = 20
_MOST_REMARKS = 20
_TOOK = ("round", "sim_time_s", "total_bytes", "flops", *SPENT)


@dataclass(frozen=True, kw_only=True)
class ReportRun:
    """A run; text in it is one line of printable characters, figures are finite or None.

    Attributes:
        view: What its folder holds.
        label: Its name, with what is needed to tell it from the others.
        flat: Its configuration, flat.
        curve: Its learning curve.
    """

    view: RunView
    label: str
    flat: Mapping[str, str]
    curve: Curve

    @property
    def folder(self) -> Path:
        """Its folder, absolute."""
        return self.view.folder.absolute()

    @property
    def method(self) -> str:
        """The method's name in its paper."""
        return clean(merged_title(self.view.method.split("+")))

    @property
    def status(self) -> str:
        """``finished``, ``failed``, ``killed`` or ``unfinished``."""
        return self.view.status

    @property
    def reason(self) -> str:
        """Why it ended as it did; empty where it just went through its rounds."""
        reason, stopped_by = self.view.reason, self.view.result.get("stopped_by")
        if reason:
            return clean(reason, longest=_LONGEST_REASON)
        return "" if stopped_by in (None, "rounds") else f"stopped by {clean(stopped_by)}"

    @property
    def was_cut_short(self) -> bool:
        """True where a sweep's scheduler ended it before its own end."""
        return self.view.result.get("stopped_by") == BY_SCHEDULER

    @property
    def remarks(self) -> list[str]:
        """Notes of the run at its end: work of the method that did not happen."""
        return remarks_of(self.view)

    @property
    def num_rounds(self) -> int:
        """Rounds done."""
        return self.view.rounds

    def fact(self, key: str) -> str:
        """Look up software or files in ``result.json``; empty where it names none."""
        return clean(self.view.result.get(key) or "")

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the software, by name."""
        versions = self.view.result.get("versions")
        return {clean(k): clean(v) for k, v in versions.items() if v} if isinstance(versions, Mapping) else {}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Runs that differ in their seed alone.

    Attributes:
        label: What they are called.
        runs: Indices of all its runs.
        counted: Indices of those that its mean is over; see :func:`counted`.
        failed: How many failed.
        views: What the folders of the counted hold.
        curve: The mean over the counted; None without any.
    """

    label: str
    runs: tuple[int, ...]
    counted: tuple[int, ...]
    failed: int
    views: tuple[RunView, ...]
    curve: Curve | None

    @property
    def is_under_way(self) -> bool:
        """True where its means are over runs of which none has finished: they are shown, but not compared."""
        return bool(self.views) and all(view.status != "finished" for view in self.views)

    def is_compared(self, name: str) -> bool:
        """Tell whether its mean of a figure may be the best: of finished runs, all of which have the figure."""
        return not self.is_under_way and all(view.figure(name) is not None for view in self.views)

    def seeds_with(self, name: str) -> str:
        """Say of how many of the counted runs a figure's mean is, where these are not all: `` [2/3]``."""
        count = self.over_seeds(name).count
        return f" [{count}/{len(self.views)}]" if 0 < count < len(self.views) else ""

    def over_seeds(self, name: str) -> Estimate:
        """Return a figure, as :meth:`~fedsweep.results.view.RunView.figure` knows it, over the counted runs."""
        return estimate(view.figure(name) for view in self.views)

    def figure(self, name: str) -> float | None:
        """Return the mean alone of :meth:`over_seeds`; None where no counted run has the figure."""
        return _over_runs(name, self.views)


@dataclass(frozen=True, kw_only=True)
class TargetRow:
    """A setting and a target; figures are means over the runs that reached it.

    Attributes:
        setting: The setting's place.
        target: The test accuracy, 0..1.
        reached: How many of the runs reached it.
        runs: How many there are.
        took: ``round``, the first evaluated one that did; ``sim_time_s``, virtual seconds at its end; ``total_bytes``,
            both ways from before round 1 up to and with it; ``flops``, of all clients' training until then; energy and
            money of replays. None where no run has it.
    """

    setting: int
    target: float
    reached: int
    runs: int
    took: Mapping[str, float | None]


class Counting(Protocol):
    """The facts that decide if a run counts."""

    @property
    def status(self) -> str:
        """``finished``, ``failed``, or what else became of it."""

    @property
    def seed(self) -> int | None:
        """Its seed."""

    @property
    def rounds(self) -> int:
        """Rounds done."""


def counted(runs: Sequence[Counting]) -> list[int]:
    """Choose those of a setting's runs that its means are over, wherever they are shown: places in the order given.

    One per seed, and only those that have finished; where none has finished, those under way. A failed run, or one
    without rounds, never counts.
    """
    able = [place for place, run in enumerate(runs) if run.rounds and run.status != "failed"]
    finished = [place for place in able if runs[place].status == "finished"]
    by_seed: dict[int | None, int] = {}
    for place in finished or able:
        by_seed.setdefault(runs[place].seed, place)
    return list(by_seed.values())


def report_runs(views: Sequence[RunView]) -> tuple[list[ReportRun], list[str]]:
    """Return the runs as a report shows them, and why it cannot show others."""
    good: list[tuple[RunView, Mapping[str, str]]] = []
    bad: list[str] = []
    for view in views:
        # First of all: what is nested without end must not be put into words.
        try:
            flat = flat_config(view.config)
        except InputError as error:
            bad.append(f"{place_name(view.folder)}: {error}")
            continue
        good.append((view, {clean(key): _bounded(value) for key, value in flat.items()}))
    labels = run_labels([view for view, _ in good])
    runs = [
        ReportRun(view=view, label=clean(label), flat=flat, curve=curve_of(view))
        for (view, _), flat, label in zip(good, aligned([flat for _, flat in good]), labels, strict=True)
    ]
    return runs, bad


def _bounded(value: str) -> str:
    """Return a configuration's value in one line; a long one ends in its digest, or two with one start were one."""
    text = clean(value, longest=_LONGEST_REASON)
    is_whole = len(value) <= _LONGEST_REASON
    return text if is_whole else text + hashlib.sha256(value.encode(errors="surrogatepass")).hexdigest()[:12]


def shortly_called(runs: Sequence[ReportRun]) -> list[ReportRun]:
    """Return the runs without the words that all labels begin with, a sweep's name; for tables, after grouping."""
    labels = without_shared_start([run.label for run in runs])
    return [replace(run, label=label) for run, label in zip(runs, labels, strict=True)]


def group_settings(runs: Sequence[ReportRun]) -> list[Setting]:
    """Return the runs grouped into settings, in the order of their first runs; no two labels are alike."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault((run.view.name, setting_key(run.flat)), []).append(index)
    names = Counter(name for name, _ in groups)
    labels = without_shared_start(
        [name if names[name] == 1 else runs[members[0]].label for (name, _), members in groups.items()]
    )
    unique = numbered([*map(clean, labels)])
    return [_setting(runs, members, label=label) for label, members in zip(unique, groups.values(), strict=True)]


def cut_short(runs: Sequence[ReportRun]) -> list[str]:
    """Say which runs a sweep's scheduler ended: they trained for fewer rounds than others beside them."""
    early = [f"{run.label}, seed {run.view.seed}" for run in runs if run.was_cut_short]
    return [f"ended early by a sweep's scheduler: {some_of(early, 3)}"] if early else []


def remarks_of(run: RunView) -> list[str]:
    """Return a run's own notes of its end: work of the method that did not happen."""
    stored = run.result.get("remarks")
    texts = stored[:_MOST_REMARKS] if isinstance(stored, list) else []
    return [clean(text, longest=_LONGEST_REASON) for text in texts if isinstance(text, str)]


def remarks(runs: Sequence[ReportRun], settings: Sequence[Setting], *, by_run: bool = False) -> list[str]:
    """List notes of runs at their end, settings with equal models (methods that became simpler), and those under way.

    Beside these, finished runs that are in no mean since another has their seed.

    Args:
        runs: All.
        settings: They, over their seeds.
        by_run: Notes name the run; otherwise its setting, with the seed where not all of its seeds have the note.
    """
    notes: dict[str, None] = {}
    labels_of: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for setting in settings:
        for text, having in _told_by([runs[i] for i in setting.runs]).items():
            if len(having) == len(setting.runs) and not by_run:
                notes[f"{setting.label}: {text}"] = None
                continue
            for run in having:
                notes[f"{run.label if by_run else setting.label}, seed {run.view.seed}: {text}"] = None
        own = [runs[i] for i in setting.counted]
        models = tuple(sorted((str(run.view.seed), run.fact("model_sha256")) for run in own))
        if models and all(sha for _, sha in models):
            labels_of.setdefault(models, []).append(setting.label)
        notes |= {} if by_run else dict.fromkeys(_passed_over(runs, setting))
    for text in (text for run in runs for text in run.view.notes):
        notes[clean(text, longest=_LONGEST_REASON)] = None  # folders in it may be called anything
    labels = [] if by_run else list(dict.fromkeys(setting.label for setting in settings if setting.is_under_way))
    early = [f"figures of runs under way, since none has finished: {some_of(labels, _MOST_REMARKS)}"] if labels else []
    same = [f"the same models, bit for bit: {' and '.join(labels)}" for labels in labels_of.values() if len(labels) > 1]
    return [*early, *same, *notes]


def _told_by(runs: Sequence[ReportRun]) -> dict[str, list[ReportRun]]:
    """Return the runs' notes, each with those that have it."""
    having: dict[str, list[ReportRun]] = {}
    for run in runs:
        for text in dict.fromkeys(run.remarks):
            having.setdefault(text, []).append(run)
    return having


def _passed_over(runs: Sequence[ReportRun], setting: Setting) -> Iterator[str]:
    """Say which finished runs are in no mean, since another of their seed is, where the two came to something else."""
    by_seed = {runs[index].view.seed: runs[index] for index in setting.counted}
    for run in (runs[index] for index in setting.runs if index not in setting.counted):
        other = by_seed.get(run.view.seed)
        if other is None or not run.status == other.status == "finished":
            continue
        ends = [(each.fact("model_sha256"), each.view.figure("test_accuracy")) for each in (run, other)]
        if ends[0] != ends[1]:
            why = f"{run.label} is not counted, since {other.label} has the same seed, and they differ in their results"
            yield f"{setting.label}, seed {run.view.seed}: {why}; leave one of them out"


def target_rows(settings: Sequence[Setting]) -> list[TargetRow]:
    """Return a row for each setting and each of its ``evaluation.targets``, setting by setting, targets ascending.

    The figures are those of the rounds' tables, so runs that are under way have theirs, too.
    """
    rows = []
    for place, setting in enumerate(settings):
        for target in sorted(targets_of(setting.views[0].config)) if setting.views else ():
            reached = [cut for view in setting.views if (cut := view.reaching(target))]
            took = {name: _over_runs(name, reached) for name in _TOOK}
            counts = {"reached": len(reached), "runs": len(setting.views)}
            rows.append(TargetRow(setting=place, target=target, took=took, **counts))
    return rows


def _over_runs(name: str, views: Sequence[RunView]) -> float | None:
    values = [value for view in views if (value := view.figure(name)) is not None]
    return mean(values) if values else None


def targets_of(config: Mapping[str, object]) -> list[float]:
    """Return the targets that a folder's configuration names, each once, in its order; what is none is left out."""
    evaluation = config.get("evaluation")
    named = evaluation.get("targets") if isinstance(evaluation, Mapping) else None
    values = [finite(value) for value in named[:_MOST_TARGETS]] if isinstance(named, list) else []
    return list(dict.fromkeys(value for value in values if value is not None and 0 < value <= 1))


def _setting(runs: Sequence[ReportRun], members: Sequence[int], *, label: str) -> Setting:
    own = tuple(members[place] for place in counted([runs[index].view for index in members]))
    return Setting(
        label=label,
        runs=tuple(members),
        counted=own,
        failed=sum(runs[index].status == "failed" for index in members),
        views=tuple(runs[index].view for index in own),
        curve=mean_curve([runs[index].curve for index in own]) if own else None,
    )
