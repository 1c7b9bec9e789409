"""Runs and settings as a report shows them: checked figures, clean text, means over seeds."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedsweep.errors import InputError
from fedsweep.results.config_table import flat_config, setting_key
from fedsweep.results.curves import Curve, curve_of, finite, mean_curve
from fedsweep.results.texts import clean
from fedsweep.results.view import RunView, run_labels

_LONGEST_REASON = 1000


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
        """Its method's name."""
        return clean(self.view.method)

    @property
    def status(self) -> str:
        """``finished``, ``failed``, ``killed`` or ``unfinished``."""
        return self.view.status

    @property
    def reason(self) -> str:
        """Why it ended as it did; empty where it just went through its rounds."""
        reason, stopped_by = self.view.result.get("reason"), self.view.result.get("stopped_by")
        if reason:
            return clean(reason, longest=_LONGEST_REASON)
        return "" if stopped_by in (None, "rounds") else f"stopped by {clean(stopped_by)}"

    @property
    def num_rounds(self) -> int:
        """Rounds done."""
        return len(self.curve.rounds)

    @cached_property
    def test_accuracy(self) -> float | None:
        """The last one known, 0..1."""
        points = self.curve.accuracy_by_bytes()
        return points[-1][1] if points else finite(self.view.result.get("test_accuracy"))

    @cached_property
    def best_test_accuracy(self) -> float | None:
        """The best one, 0..1."""
        points = self.curve.accuracy_by_bytes()
        return max(v for _, v in points) if points else finite(self.view.result.get("best_test_accuracy"))

    @property
    def total_bytes(self) -> float | None:
        """Bytes both ways, registration apart."""
        if self.curve.total_bytes:
            return self.curve.total_bytes[-1]
        return finite(self.view.result.get("total_bytes"))

    @property
    def comm_ratio(self) -> float | None:
        """Mean communication ratio."""
        known = [v for cell in self.view.column("comm_ratio") if (v := finite(cell)) is not None]
        return math.fsum(known) / len(known) if known else None

    @property
    def sim_time_s(self) -> float | None:
        """Virtual seconds."""
        known = [v for v in self.curve.sim_time_s if v is not None]
        return known[-1] if known else None

    @property
    def wall_time_s(self) -> float | None:
        """Seconds of all rounds, evaluation included."""
        known = [finite(v) for name in ("wall_time_s", "eval_time_s") for v in self.view.column(name)]
        return math.fsum(v for v in known if v is not None) if known else None

    def fact(self, key: str) -> str:
        """What ``result.json`` says of the software or the files; empty where it says nothing."""
        return clean(self.view.result.get(key) or "")

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the software, by name."""
        found = self.view.result.get("versions")
        return {clean(k): clean(v) for k, v in found.items() if v} if isinstance(found, Mapping) else {}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Runs that differ in their seed alone.

    Attributes:
        label: What they are called.
        runs: Indices of all its runs.
        counted: Indices of those that its mean is over: one per seed, finished; where none has finished, those under
            way.
        failed: How many failed.
        curve: The mean over the counted; None without any.
        accuracy: Mean of the last test accuracies of the counted.
        accuracy_sd: Their sample standard deviation; None below two.
        best_accuracy: Mean of the best test accuracies.
        total_bytes: Mean of the bytes.
        sim_time_s: Mean of the virtual seconds.
    """

    label: str
    runs: tuple[int, ...]
    counted: tuple[int, ...]
    failed: int
    curve: Curve | None
    accuracy: float | None
    accuracy_sd: float | None
    best_accuracy: float | None
    total_bytes: float | None
    sim_time_s: float | None


def report_runs(views: Sequence[RunView]) -> tuple[list[ReportRun], list[tuple[Path, str]]]:
    """The runs as a report shows them, and the folders and reasons of those that it cannot show.

    Args:
        views: What the folders hold.
    """
    good: list[tuple[RunView, Mapping[str, str]]] = []
    bad: list[tuple[Path, str]] = []
    for view in views:
        # First of all: what is nested without end must not be put into words.
        try:
            flat = flat_config(view.config)
        except InputError as error:
            bad.append((view.folder, f"{view.folder}: {error}"))
            continue
        good.append((view, {clean(key): clean(value, longest=_LONGEST_REASON) for key, value in flat.items()}))
    labels = run_labels([view for view, _ in good], with_seeds=False)
    runs = [
        ReportRun(view=view, label=clean(label), flat=flat, curve=curve_of(view))
        for (view, flat), label in zip(good, labels, strict=True)
    ]
    return runs, bad


def group_settings(runs: Sequence[ReportRun]) -> list[Setting]:
    """The runs grouped into settings, in the order of their first runs."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault((run.view.name, setting_key(run.flat)), []).append(index)
    names = Counter(name for name, _ in groups)
    return [
        _setting(runs, members, label=clean(name) if names[name] == 1 else runs[members[0]].label)
        for (name, _), members in groups.items()
    ]


def _setting(runs: Sequence[ReportRun], members: Sequence[int], *, label: str) -> Setting:
    counted = _counted(runs, members)
    chosen = [runs[index] for index in counted]
    accuracies = _known([run.test_accuracy for run in chosen])
    return Setting(
        label=label,
        runs=tuple(members),
        counted=tuple(counted),
        failed=sum(runs[index].status == "failed" for index in members),
        curve=mean_curve([run.curve for run in chosen]) if chosen else None,
        accuracy=_mean(accuracies),
        accuracy_sd=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        best_accuracy=_mean(_known([run.best_test_accuracy for run in chosen])),
        total_bytes=_mean(_known([run.total_bytes for run in chosen])),
        sim_time_s=_mean(_known([run.sim_time_s for run in chosen])),
    )


def _counted(runs: Sequence[ReportRun], members: Sequence[int]) -> list[int]:
    able = [index for index in members if runs[index].num_rounds and runs[index].status != "failed"]
    finished = [index for index in able if runs[index].status == "finished"]
    by_seed: dict[object, int] = {}
    for index in finished or able:
        by_seed.setdefault(runs[index].view.seed, index)
    return list(by_seed.values())


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
