"""Learning curves: of a run, of a setting over its seeds, and thinned out for a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from fedsweep.results.seed_statistics import deviation, finite, mean
from fedsweep.results.texts import is_accuracy, metric_text, metric_title
from fedsweep.results.view import SPENT, RunView, is_share, spent_of
from fedsweep.tasks.declaration import SHARE, Declaration

# What a report draws, and how it is called there.
FIGURES: Mapping[str, str] = {
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "validation_accuracy": "validation accuracy",
    "train_loss": "training loss",
    "client_accuracy_worst10": "accuracy for the worst tenth of the clients",
    "personal_accuracy": "accuracy of the clients' own models",
    "personal_accuracy_worst10": "accuracy of the clients' own models, worst tenth",
    "own_accuracy": "accuracy of the clients' own models on the whole test set",
    "consensus_distance": "distance of the clients' own models from their mean",
    "kl_divergence": "KL divergence of the high-frequency group",
    "dropout_rate_by_samples": "dropout rate of a round's devices, mean by samples",
    "dropout_rate_median": "dropout rate of a round's devices, median",
    "dropout_rate_p90": "dropout rate of a round's devices, 90th percentile",
    "dropout_rate_zero_share": "share of a round's devices without dropout",
}
_DIGITS = 5


class FigureTitle(NamedTuple):
    """A figure's name in words, and whether it is shown in percent."""

    text: str
    is_share: bool


def figure_titles(metrics: Mapping[str, Declaration]) -> dict[str, FigureTitle]:
    """The titles of :data:`FIGURES`, then of metrics, with their units and what guessing comes to."""
    titles = {name: FigureTitle(text, is_accuracy(name)) for name, text in FIGURES.items()}
    for name, how in metrics.items():
        chance = "" if how.chance is None else f", chance {metric_text(how.chance, how)}"
        titles[name] = FigureTitle(metric_title(name, how) + chance, how.unit == SHARE)
    return titles


Cells = tuple[float | None, ...]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Figures by round; None where a round has none. What is not finite is none.

    Attributes:
        rounds: Rounds, ascending.
        total_bytes: Bytes both ways up to and with each round.
        sim_time_s: Virtual seconds up to and with each round.
        wall_time_s: Real seconds up to and with each round, evaluation included; empty where nobody asks for them.
        flops: Of all clients' training up to and with each round; empty where nobody asks for them.
        spent: Energy and money up to and with each round, where they are known.
        figures: Columns that are known in some round.
        low: Over seeds, the mean less one sample standard deviation; empty for a single run.
        high: The mean and one deviation more; empty for a single run.
        shares: Names of those figures that are shown in percent.
    """

    rounds: tuple[int, ...]
    total_bytes: tuple[float, ...]
    sim_time_s: Cells
    figures: Mapping[str, Cells]
    wall_time_s: Cells = ()
    flops: Cells = ()
    spent: Mapping[str, Cells] = field(default_factory=dict)
    low: Mapping[str, Cells] = field(default_factory=dict)
    high: Mapping[str, Cells] = field(default_factory=dict)
    shares: frozenset[str] = frozenset()

    def accuracy_by_bytes(self) -> list[tuple[float, float]]:
        """Return bytes and test accuracy of the rounds that were evaluated."""
        return [(sent, value) for sent, value, _, _ in self.points("test_accuracy", against="total_bytes")]

    def points(self, name: str, *, against: str) -> list[tuple[float, float, float, float]]:
        """Where it is drawn, the figure, and the ends of its band over seeds, of the rounds that have all.

        Args:
            name: One of the figures; a curve without it has no points.
            against: ``round``, ``total_bytes``, ``sim_time_s``, ``wall_time_s``, ``flops``, or one of ``spent``.
        """
        if against in SPENT:
            places = self.spent.get(against, ())
        else:
            places = self.rounds if against == "round" else getattr(self, against)
        values = self.figures.get(name, ())
        rows = zip(places, values, self.low.get(name, values), self.high.get(name, values), strict=False)
        return [
            (float(x), y, low, high)
            for x, y, low, high in rows
            if x is not None and y is not None and low is not None and high is not None
        ]


def curve_of(run: RunView, names: Iterable[str] | None = None) -> Curve:
    """Return a run's curve, all rounds, of chosen columns; None: those of :data:`FIGURES` and the run's metrics."""
    if names is None:
        worst = (name for name in run.client_metrics if name.endswith("_worst10") and name not in FIGURES)
        names = (*FIGURES, *run.metrics, *worst)
    cells = {name: tuple(map(finite, run.column(name))) for name in names}
    return Curve(
        rounds=tuple(run.column("round")),
        total_bytes=tuple(map(float, run.column("total_bytes"))),
        sim_time_s=tuple(map(finite, run.column("sim_time_s"))),
        wall_time_s=tuple(map(finite, run.column("seconds_so_far"))),
        flops=tuple(map(finite, accumulate(count or 0 for count in run.column("flops")))),
        spent={name: tuple(map(finite, run.column(name))) for name in spent_of([run])},
        figures={name: values for name, values in cells.items() if any(v is not None for v in values)},
        shares=frozenset(name for name in cells if is_share(name, [run])),
    )


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean over seeds, round by round, of one or more curves, for the rounds that all of them have."""
    if len(curves) == 1:
        return curves[0]
    places = [{number: place for place, number in enumerate(curve.rounds)} for curve in curves]
    shared = sorted(set(places[0]).intersection(*places[1:]))

    def over(how: Callable[[Sequence[float]], float], columns: Sequence[Sequence[float | None]]) -> Cells:
        if not all(columns):
            return (None,) * len(shared)
        rows = [[column[place[number]] for column, place in zip(columns, places, strict=True)] for number in shared]
        # Of values that are large beyond measure sums and deviations may be infinite.
        return tuple(
            None if any(v is None for v in row) else finite(how([v for v in row if v is not None])) for row in rows
        )

    columns = {name: [c.figures[name] for c in curves if name in c.figures] for name in curves[0].figures}
    means = {name: over(mean, cells) for name, cells in columns.items() if len(cells) == len(curves)}
    # Seeds that ended at other rounds may have been tested in none together.
    figures = {name: cells for name, cells in means.items() if any(cell is not None for cell in cells)}
    return Curve(
        rounds=tuple(shared),
        total_bytes=tuple(v or 0.0 for v in over(mean, [curve.total_bytes for curve in curves])),
        sim_time_s=over(mean, [curve.sim_time_s for curve in curves]),
        wall_time_s=over(mean, [curve.wall_time_s for curve in curves]),
        flops=over(mean, [curve.flops for curve in curves]),
        spent={name: over(mean, [curve.spent.get(name, ()) for curve in curves]) for name in curves[0].spent},
        figures=figures,
        low={name: over(lambda values: mean(values) - deviation(values), columns[name]) for name in figures},
        high={name: over(lambda values: mean(values) + deviation(values), columns[name]) for name in figures},
        shares=curves[0].shares,
    )


def thinned(curve: Curve, *, points: int) -> list[int]:
    """Return the places of a curve that a page shows, ascending; all where there are not more than ``points``.

    Of each stretch of rounds these are the ones with the lowest and the highest test accuracy (or, without any, the
    first figure there is), so that no dip or peak is lost; the first and the last place are always among them.

    Args:
        curve: Any.
        points: How many to keep, 4 or more; up to two more may come back.
    """
    filled = [p for p in range(len(curve.rounds)) if any(cells[p] is not None for cells in curve.figures.values())]
    if len(filled) <= points:
        return filled
    leading = next(iter(curve.figures.values()))
    stretches = points // 2
    chosen = {filled[0], filled[-1]}
    for number in range(stretches):
        stretch = filled[number * len(filled) // stretches : (number + 1) * len(filled) // stretches]
        ranked = sorted((value, p) for p in stretch if (value := leading[p]) is not None)
        chosen |= {ranked[0][1], ranked[-1][1]} if ranked else {stretch[0]}
    evaluated = [p for p in filled if leading[p] is not None]
    return sorted(chosen | {evaluated[-1]})


def short(value: float | None) -> float | int | None:
    """Return the number with five digits; whole ones as such."""
    if value is None:
        return None
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() else rounded
