"""Orders that a paper claims, checked over the seeds that the rows share.

A claim is shown where every row lies above the next one in each pair's paired comparison (paired t test and bootstrap
interval, corrected for the number of pairs), contradicted where a pair lies the other way round by the same test, and
not shown otherwise. With fewer than three shared seeds nothing can be shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from fedsweep.reproduce.definition.sections import Claim
from fedsweep.reproduce.measured.grid import Grid
from fedsweep.results.seed_statistics import FEWEST_PAIRS, Difference, differences

Verdict = Literal["shown", "not shown", "contradicted"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found of a claim in one column.

    Attributes:
        claim: Its text.
        measure: The measure's label.
        column: The column's name.
        verdict: See the module's docstring.
        detail: Why.
    """

    claim: str
    measure: str
    column: str
    verdict: Verdict
    detail: str

    @property
    def text(self) -> str:
        """A line for the table's notes."""
        return f"Claimed: {self.claim} ({self.measure}, {self.column}): {self.verdict}; {self.detail}."


def findings(grid: Grid) -> list[Finding]:
    """What the grid says of its table's claims, column by column; where fewer than two rows were measured, nothing."""
    found = []
    for claim in grid.table.claims:
        measure = next(m for m in grid.table.measures if claim.measure in ("", m.name))
        for column in claim.columns or grid.columns:
            cells = {row: grid.cell(row, column) for row in claim.order}
            by_row = {row: cell.by_seed.get(measure.name, {}) if cell else {} for row, cell in cells.items()}
            if column in grid.columns and sum(bool(figures) for figures in by_row.values()) > 1:
                verdict, detail = _judged(claim, by_row)
                place = {"claim": claim.text, "measure": measure.label, "column": column}
                found.append(Finding(**place, verdict=verdict, detail=detail))
    return found


def _judged(claim: Claim, by_row: Mapping[str, Mapping[int, float]]) -> tuple[Verdict, str]:
    present = [row for row in claim.order if by_row[row]]
    lacking = [row for row in claim.order if not by_row[row]]
    pairs = [differences([by_row[first], by_row[second]])[0] for first, second in pairwise(present)]
    seeds = min(pair.pairs for pair in pairs)
    in_order = sum(abs(pair.mean) < claim.apart if claim.apart is not None else pair.mean > 0 for pair in pairs)
    said = f"{in_order} of {len(pairs)} neighbours {'so apart' if claim.apart else 'in this order'} in the mean"
    said += f" over {seeds} shared seed{'' if seeds == 1 else 's'}"
    if lacking:
        said += f"; not measured: {', '.join(lacking)}"
    if seeds < FEWEST_PAIRS:
        return "not shown", f"{said}, too few to tell (--seeds)"
    if claim.apart is not None:
        return _judged_apart(claim.apart, pairs, complete=not lacking), said
    count = len(pairs)
    # Bonferroni's correction: each of the claim's pairs is tested.
    real = [math.copysign(1.0, pair.mean) for pair in pairs if pair.is_real and pair.p_value * count <= 0.05]
    if -1.0 in real:
        return "contradicted", said
    return ("shown" if len(real) == count and not lacking else "not shown"), said


def _judged_apart(apart: float, pairs: Sequence[Difference], *, complete: bool) -> Verdict:
    """By the bootstrap interval of each difference: inside of the bounds, outside of them, or neither."""
    if any(pair.low > apart or pair.high < -apart for pair in pairs):
        return "contradicted"
    inside = all(-apart < pair.low and pair.high < apart for pair in pairs)
    return "shown" if inside and complete else "not shown"
