"""A paper's claims of its figures, and orders that they have, checked over the seeds that two cells share.

A claim is a list of pairs, of which the first is to lie above the second: neighbours of an order, a row and each other
one (raised by what it may lie below them; the cost that it must not reach and its own), two columns in each row. It is
shown where that is so in each pair's paired t test, corrected for the number of pairs, contradicted where a pair lies
the other way round by the same test, and not shown otherwise. With fewer than three shared seeds nothing can be shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from typing import Literal

from fedsweep.reproduce.definition.sections import Claim, Measure
from fedsweep.reproduce.measured.grid import Grid
from fedsweep.results.seed_statistics import FEWEST_SEEDS, Difference, differences

Verdict = Literal["shown", "not shown", "contradicted"]
BySeed = Mapping[int, float]
_MOST_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The verdict on a claim in one column, or in all rows where it compares columns.

    Attributes:
        claim: Its text.
        says: The paper's words, as quoted.
        sense: What its text says, in our words. Both are empty where the text does not claim it.
        measure: The measure's label.
        column: The column's name, or those that are compared.
        verdict: See the module's docstring.
        detail: How many of its pairs lie so in the mean, and what was not measured.
        seeds: Fewest seeds that a pair shares.
    """

    claim: str
    says: str
    sense: str
    measure: str
    column: str
    verdict: Verdict
    detail: str
    seeds: int


def findings(grid: Grid) -> list[Finding]:
    """Judge the table's claims by the grid, column by column; empty where no pair was measured."""
    verdicts = []
    for claim in grid.table.claims:
        measure = next(m for m in grid.table.measures if claim.measure in ("", m.name))
        for column, pairs in _places(grid, claim, measure):
            measured = {names: figures for names, figures in pairs.items() if all(figures)}
            if measured:
                lacking = [names for names in pairs if names not in measured]
                verdict, detail, seeds = _judged(claim, [*measured.values()], lacking=lacking)
                words = {"claim": claim.text, "says": claim.says, "sense": claim.sense}
                place = {"measure": measure.label, "column": column}
                verdicts.append(Finding(**words, **place, verdict=verdict, detail=detail, seeds=seeds))
    return verdicts


def claim_lines(grid: Grid) -> list[str]:
    """Return one line a claim, with its columns beside each other."""
    lines, every_finding, has_printed = [], findings(grid), bool(grid.table.printed)
    for (head, claim, measure), group in groupby(
        every_finding, key=lambda f: (_head(f, has_printed), f.claim, f.measure)
    ):
        every = list(group)
        seeds = min(finding.seeds for finding in every)
        over = f"over {seeds} shared seed{'' if seeds == 1 else 's'}"
        if seeds < FEWEST_SEEDS:
            over += ", too few to tell (--seeds)"
        places = "; ".join(
            f"{grid.column_label(f.column) if f.column in grid.columns else f.column}: {f.verdict} ({f.detail})"
            for f in every
        )
        lines.append(f"{head}: {claim} ({measure}): {places}; {over}.")
    return lines


def _head(finding: Finding, has_printed: bool) -> str:
    if finding.says:
        return f'Claimed ("{finding.says}")'
    if finding.sense:
        return f"Claimed, in our words ({finding.sense})"
    return "Order of the printed figures, not claimed" if has_printed else "Order to be looked at"


def _places(
    grid: Grid, claim: Claim, measure: Measure
) -> Iterator[tuple[str, dict[tuple[str, str], tuple[BySeed, BySeed]]]]:
    """Where a claim is looked at, and there the pairs' figures by what the pairs are called."""

    def of(column: str, row: str, name: str = measure.name) -> BySeed:
        cell = grid.cell(row, column)
        return cell.by_seed.get(name, {}) if cell else {}

    table = grid.table
    if claim.column_order is not None:
        rows = [row for row in claim.rows or grid.rows if all(table.has_cell(row, c) for c in claim.column_order)]
        if {*claim.column_order} <= {*grid.columns}:
            yield (
                " > ".join(claim.column_order),
                {
                    (f"{row} {first}", f"{row} {second}"): (of(first, row), of(second, row))
                    for row in rows
                    if row in grid.rows
                    for first, second in pairwise(claim.column_order)
                },
            )
        return
    for column in claim.columns or grid.columns:
        shown = table.column(column).measures
        if column not in grid.columns or (shown is not None and measure.name not in shown):
            continue
        if claim.above or claim.below:
            others = [name for name in _others(grid, claim) if table.has_cell(name, column)]
            costs = bool(claim.cost) and (shown is None or claim.cost in shown)
            yield column, _beside(claim, others, partial(of, column), measure=measure, costs=costs)
        else:
            order = claim.order or []
            there = [name for name in order if of(column, name)]
            pairs = [*pairwise(there), *((name, name) for name in order if name not in there)]
            yield column, {(first, second): (of(column, first), of(column, second)) for first, second in pairs}


def _others(grid: Grid, claim: Claim) -> list[str]:
    return [other for other in claim.others or grid.table.row_names if other != (claim.above or claim.below)]


def _beside(
    claim: Claim, others: Sequence[str], of: Callable[[str, str], BySeed], *, measure: Measure, costs: bool
) -> dict[tuple[str, str], tuple[BySeed, BySeed]]:
    """Return the pairs of a row and each other one, and those of their costs."""
    row = claim.above or claim.below
    names = [(row, other) if claim.above else (other, row) for other in others]
    pairs = {
        (first, second): (_changed(of(first, measure.name), plus=claim.within or 0.0), of(second, measure.name))
        for first, second in names
    }
    if costs:
        pairs |= {
            (f"{claim.cost} of {other}", row): (
                _changed(of(other, claim.cost), times=claim.of_cost),
                of(row, claim.cost),
            )
            for other in others
        }
    return pairs


def _changed(figures: BySeed, *, plus: float = 0.0, times: float = 1.0) -> BySeed:
    return {seed: times * figure + plus for seed, figure in figures.items()}


def _judged(
    claim: Claim, pairs: Sequence[tuple[BySeed, BySeed]], *, lacking: Sequence[tuple[str, str]]
) -> tuple[Verdict, str, int]:
    compared = [differences(list(pair))[0] for pair in pairs]
    seeds = min(pair.pairs for pair in compared)
    so = sum(abs(pair.mean) < claim.apart if claim.apart is not None else pair.mean > 0 for pair in compared)
    detail = f"{so} of {len(compared)} pairs so"
    if lacking:
        alone = [name for names in lacking for name in names if name not in (claim.above, claim.below)]
        names = [*dict.fromkeys(alone)]
        detail += f"; not measured: {', '.join(names) if len(names) <= _MOST_NAMED else f'{len(names)} others'}"
    if seeds < FEWEST_SEEDS:
        return "not shown", detail, seeds
    if claim.apart is not None:
        return _judged_apart(claim.apart, compared, complete=not lacking), detail, seeds
    count = len(compared)
    # Bonferroni's correction: each of the claim's pairs is tested.
    real = [math.copysign(1.0, pair.mean) for pair in compared if pair.is_real and pair.p_value * count <= 0.05]
    if -1.0 in real:
        return "contradicted", detail, seeds
    return ("shown" if len(real) == count and not lacking else "not shown"), detail, seeds


def _judged_apart(apart: float, pairs: Sequence[Difference], *, complete: bool) -> Verdict:
    """Judge by the 95 % interval of each difference: inside of the bounds, outside of them, or neither."""
    if any(pair.low > apart or pair.high < -apart for pair in pairs):
        return "contradicted"
    inside = all(-apart < pair.low and pair.high < apart for pair in pairs)
    return "shown" if inside and complete else "not shown"
