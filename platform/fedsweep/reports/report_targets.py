"""What settings spent until they first reached a target accuracy, for the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fedsweep.results.curves import finite
from fedsweep.results.settings import ReportRun, Setting

_MOST_TARGETS = 20


@dataclass(frozen=True, kw_only=True)
class TargetRow:
    """A setting and a target; figures are means over the runs that reached it.

    Attributes:
        setting: The setting's place.
        target: The test accuracy, 0..1.
        reached: How many of the runs reached it.
        runs: How many there are.
        round: The first evaluated round that did; None where no run has.
        sim_time_s: Virtual seconds at its end; None without devices.
        total_bytes: Bytes both ways up to and with it, registration apart.
        flops: Training FLOPs of all clients up to and with it.
    """

    setting: int
    target: float
    reached: int
    runs: int
    round: float | None
    sim_time_s: float | None
    total_bytes: float | None
    flops: float | None


def target_rows(runs: Sequence[ReportRun], settings: Sequence[Setting]) -> list[TargetRow]:
    """A row for each setting and each of its ``evaluation.targets``, setting by setting, targets ascending.

    The figures are those of the rounds' tables, so runs that are under way have theirs, too.

    Args:
        runs: All runs.
        settings: Their settings; runs that a setting does not count have no part in its rows.
    """
    rows = []
    for place, setting in enumerate(settings):
        chosen = [runs[index] for index in setting.counted]
        for target in _targets(chosen[0].view.config) if chosen else ():
            found = [_crossing(run, target) for run in chosen]
            crossings = [crossing for crossing in found if crossing is not None]
            means = [_mean(values) for values in zip(*crossings, strict=True)] or [None] * 4
            rows.append(
                TargetRow(
                    setting=place,
                    target=target,
                    reached=len(crossings),
                    runs=len(chosen),
                    round=means[0],
                    sim_time_s=means[1],
                    total_bytes=means[2],
                    flops=means[3],
                )
            )
    return rows


def _targets(config: Mapping[str, object]) -> list[float]:
    """The targets that a folder's configuration names; what is none is left out."""
    evaluation = config.get("evaluation")
    named = evaluation.get("targets") if isinstance(evaluation, Mapping) else None
    values = [finite(value) for value in named[:_MOST_TARGETS]] if isinstance(named, list) else []
    return sorted({value for value in values if value is not None and 0 < value <= 1})


def _crossing(run: ReportRun, target: float) -> tuple[float | None, ...] | None:
    """Round, virtual seconds, bytes and FLOPs at the first round that reached the target."""
    curve = run.curve
    flops = list(accumulate(finite(value) or 0.0 for value in run.view.column("flops")))
    for place, accuracy in enumerate(curve.figures.get("test_accuracy", ())):
        if accuracy is not None and accuracy >= target:
            spent = flops[place] if flops else None
            return float(curve.rounds[place]), curve.sim_time_s[place], curve.total_bytes[place], spent
    return None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None
