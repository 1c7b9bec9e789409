"""A sweep's verdict over two or three metrics: the front of all tested rounds, and the volume that it covers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedsweep.config.sweep import Constraint
from fedsweep.results.pareto import hypervolume
from fedsweep.results.seed_statistics import Estimate, estimate
from fedsweep.sweeps.search.proposals import read_curve

# Places along what the study spent at which the volume is told.
_PLACES = 20
Point = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class TrialCurve:
    """The tested rounds of a trial.

    Attributes:
        setting: Its setting's place.
        seed: Its seed.
        points: Metrics after each tested round that meets the constraints, turned so that less is better.
        num_bytes: What the whole trial sent.
    """

    setting: int
    seed: int | None
    points: tuple[Point, ...]
    num_bytes: float


@dataclass(frozen=True, kw_only=True)
class FrontVerdict:
    """The front of the trials of one world.

    Attributes:
        settings: Places of the settings that are on the front of a seed, by the number of seeds, most first.
        volume: The hypervolume over seeds, as a share of the box that all points span.
        by_bytes: Bytes that the study had sent, per seed on average, and the volume by then, over seeds.
    """

    settings: Mapping[int, int]
    volume: Estimate
    by_bytes: tuple[tuple[float, Estimate], ...]


def read_trial_curve(
    folder: Path, *, setting: int, seed: int | None, aims: Mapping[str, str], constraints: Iterable[Constraint]
) -> TrialCurve:
    """Read a trial's folder; ``aims`` are metrics with ``max`` or ``min`` each."""
    limits = list(constraints)
    names = tuple(dict.fromkeys((*aims, *(limit.metric for limit in limits), "total_bytes")))
    rows = read_curve(folder, names)
    points = [
        tuple(row[name] if mode == "min" else -row[name] for name, mode in aims.items())
        for row in rows
        if all(limit.holds(row[limit.metric]) for limit in limits)
    ]
    sound = tuple(point for point in points if all(map(math.isfinite, point)))
    return TrialCurve(setting=setting, seed=seed, points=sound, num_bytes=rows[-1]["total_bytes"] if rows else 0.0)


def front_verdict(curves: Sequence[TrialCurve]) -> FrontVerdict | None:
    """Judge trials of one world, in the order in which the study ran them; None without two different points.

    Each seed's trials are a study of their own; the interval is over these.
    """
    every = [point for curve in curves for point in curve.points]
    lows, highs = ([end(column) for column in zip(*every, strict=True)] for end in (min, max))
    if not every or lows == highs:
        return None
    spans = [high - low or 1.0 for low, high in zip(lows, highs, strict=True)]
    studies: dict[int | None, list[TrialCurve]] = {}
    for curve in curves:
        scaled = tuple(
            tuple((x - low) / span for x, low, span in zip(p, lows, spans, strict=True)) for p in curve.points
        )
        studies.setdefault(curve.seed, []).append(replace(curve, points=scaled))
    counts: dict[int, int] = {}
    for study in studies.values():
        for setting in _on_front(study):
            counts[setting] = counts.get(setting, 0) + 1
    grown = [_growth(study, num_metrics=len(spans)) for study in studies.values()]
    most = math.fsum(steps[-1][0] for steps in grown) / len(grown)
    places = [most * place / _PLACES for place in range(1, _PLACES + 1)]
    shares = [[_at(steps, place / most * steps[-1][0]) for steps in grown] for place in places] if most else []
    return FrontVerdict(
        settings=dict(sorted(counts.items(), key=lambda item: -item[1])),
        volume=estimate(steps[-1][1] for steps in grown),
        by_bytes=tuple((place, estimate(values)) for place, values in zip(places, shares, strict=False)),
    )


def _growth(study: Sequence[TrialCurve], *, num_metrics: int) -> list[tuple[float, float]]:
    """Return, after each trial, the bytes that the study has sent and the volume that its front covers."""
    points: list[Point] = []
    steps, sent = [], 0.0
    for curve in study:
        points = _front([*points, *curve.points])
        sent += curve.num_bytes
        steps.append((sent, hypervolume(points, (1.0,) * num_metrics)))
    return steps


def _at(steps: Sequence[tuple[float, float]], sent: float) -> float:
    within = [volume for spent, volume in steps if spent <= sent * (1 + 1e-12)]
    return within[-1] if within else 0.0


def _front(points: Sequence[Point]) -> list[Point]:
    front: list[Point] = []
    for point in sorted(set(points)):
        if not any(all(a <= b for a, b in zip(other, point, strict=True)) for other in front):
            front.append(point)
    return front


def _on_front(study: Sequence[TrialCurve]) -> list[int]:
    front = set(_front([point for curve in study for point in curve.points]))
    return list(dict.fromkeys(curve.setting for curve in study if front.intersection(curve.points)))
