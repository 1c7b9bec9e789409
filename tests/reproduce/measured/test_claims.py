"""Claimed orders: shown, not shown or contradicted by the seeds that rows share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fedsweep.errors import ConfigError
from fedsweep.reproduce.definition.table_file import TableFile, read_table
from fedsweep.reproduce.formats import as_text
from fedsweep.reproduce.measured.claims import claim_lines, findings
from fedsweep.reproduce.measured.grid import Grid, GridCell

Changed = Callable[[str, str], Path]
SEEDS = range(5)


@pytest.fixture
def claimed(changed: Changed) -> Callable[[str], TableFile]:
    return lambda text: read_table(changed("  notes:\n", f"  claims: [{text}]\n  notes:\n"))


def grid_of(table: TableFile, figures: Mapping[str, Mapping[int, float]]) -> Grid:
    cells = tuple(GridCell(row=row, column="even", by_seed={"accuracy": by_seed}) for row, by_seed in figures.items())
    return Grid(table=table, scale="full", rows=tuple(table.row_names), columns=("even",), cells=cells)


def around(mean: float, spread: float = 0.1) -> dict[int, float]:
    return {seed: mean + spread * (seed - 2) for seed in SEEDS}


@pytest.mark.parametrize(
    ("figures", "verdict", "said"),
    [
        ({"FedAvg": around(70), "FedProx": around(60), "SCAFFOLD": around(50)}, "shown", "2 of 2 pairs so"),
        ({"FedAvg": around(60), "FedProx": around(70), "SCAFFOLD": around(50)}, "contradicted", "1 of 2"),
        ({"FedAvg": {0: 70, 1: 50, 2: 61, 3: 58}, "FedProx": {0: 50, 1: 70, 2: 60, 3: 59}}, "not shown", "SCAFFOLD"),
        ({"FedAvg": around(70), "FedProx": around(60)}, "not shown", "not measured: SCAFFOLD"),
        ({"FedAvg": {0: 70.0, 1: 71.0}, "FedProx": {0: 60.0, 1: 61.0}}, "not shown", "too few to tell (--seeds)"),
    ],
)
def test_an_order_is_judged_by_paired_seeds(
    figures: Mapping[str, Mapping[int, float]], verdict: str, said: str, claimed: Callable[[str], TableFile]
) -> None:
    grid = grid_of(claimed("{order: [FedAvg, FedProx, SCAFFOLD]}"), figures)
    (found,) = findings(grid)
    assert found.verdict == verdict and found.column == "even"
    (line,) = claim_lines(grid)
    assert said in line and line in " ".join(as_text(grid).split())
    head = "Order of the printed figures, not claimed: FedAvg > FedProx > SCAFFOLD (Accuracy): even: "
    assert line.startswith(f"{head}{verdict} (")


def test_neighbours_that_must_not_lie_apart(claimed: Callable[[str], TableFile]) -> None:
    table = claimed("{order: [FedAvg, FedProx], apart: 1.0}")
    near = {seed: 70 + 0.1 * (seed % 2) for seed in SEEDS}
    for other, verdict in ((around(70.2, 0.0), "shown"), (around(75, 0.0), "contradicted"), (around(70.9, 0.5), "not")):
        (found,) = findings(grid_of(table, {"FedAvg": near, "FedProx": other}))
        assert found.verdict.startswith(verdict) and "lie apart by less than 1" in found.claim


@pytest.mark.parametrize(
    ("accuracy", "spent", "verdict", "said"),
    [
        (69.0, 3.0, "shown", "2 of 2 pairs so"),
        (67.5, 3.0, "contradicted", "1 of 2 pairs so"),
        (72.0, 6.5, "contradicted", "1 of 2 pairs so"),
        (69.0, None, "not shown", "not measured: cost of FedAvg"),
    ],
)
def test_a_row_may_lie_somewhat_below_another_for_less(
    accuracy: float, spent: float | None, verdict: str, said: str, claimed: Callable[[str], TableFile]
) -> None:
    table = claimed("{above: FedProx, others: [FedAvg], within: 2, cost: cost, of_cost: 0.6}")
    figures = {"FedAvg": (around(70), 10.0), "FedProx": (around(accuracy), spent)}
    cells = tuple(
        GridCell(
            row=row,
            column="even",
            by_seed={"accuracy": by_seed, "cost": {} if sent is None else dict.fromkeys(SEEDS, sent)},
        )
        for row, (by_seed, sent) in figures.items()
    )
    grid = Grid(table=table, scale="full", rows=tuple(table.row_names), columns=("even",), cells=cells)
    (found,) = findings(grid)
    assert found.verdict == verdict and said in found.detail
    assert found.claim == "FedProx above each of FedAvg, or within 2 of them, at less than 0.6 of their cost"


def test_claims_of_other_words_have_lines_of_their_own(claimed: Callable[[str], TableFile]) -> None:
    table = claimed("{order: [FedAvg, FedProx], says: more}, {order: [FedAvg, FedProx], says: far more}")
    lines = claim_lines(grid_of(table, {"FedAvg": around(1), "FedProx": around(0)}))
    assert [line.partition(":")[0] for line in lines] == ['Claimed ("more")', 'Claimed ("far more")']


def test_nothing_is_said_of_columns_and_rows_that_were_not_measured(claimed: Callable[[str], TableFile]) -> None:
    table = claimed(
        "{order: [FedAvg, FedProx], columns: [K=2]}, {order: [FedProx, SCAFFOLD]}, {order: [FedAvg, FedProx]}"
    )
    found = findings(grid_of(table, {"FedAvg": around(1), "FedProx": around(0)}))
    assert [(finding.claim, finding.column) for finding in found] == [("FedAvg > FedProx", "even")]


@pytest.mark.parametrize(
    "text",
    [
        "{order: [FedAvg, FedPorx]}",
        "{order: [FedAvg]}",
        "{order: [FedAvg, FedProx], measure: x}",
        "{above: FedAvg, order: [FedAvg, FedProx]}",
        "{columns: [even]}",
        "{above: FedAvgg}",
        "{column_order: [even, K=3]}",
        "{order: [FedAvg, FedProx], within: 1}",
        "{above: FedAvg, cost: nothing}",
    ],
)
def test_a_wrong_claim_is_refused(text: str, claimed: Callable[[str], TableFile]) -> None:
    with pytest.raises(ConfigError, match="claims"):
        claimed(text)


def test_a_row_above_all_others_is_compared_with_each_and_called_claimed_where_the_text_says_it(
    claimed: Callable[[str], TableFile],
) -> None:
    table = claimed('{says: "FedAvg is best", above: FedAvg}, {below: FedProx, others: [FedAvg]}')
    grid = grid_of(table, {"FedAvg": around(70), "FedProx": around(60)})
    best, lowest = findings(grid)
    assert (best.verdict, best.detail, best.claim) == ("shown", "1 of 1 pairs so", "FedAvg above all others")
    assert lowest.verdict == "shown" and lowest.claim == "FedProx below each of FedAvg"
    assert claim_lines(grid)[0].startswith(
        'Claimed ("FedAvg is best"): FedAvg above all others (Accuracy): even: shown'
    )
    worse = findings(grid_of(table, {"FedAvg": around(60), "FedProx": around(70)}))
    assert [finding.verdict for finding in worse] == ["contradicted", "contradicted"]


def test_columns_are_compared_in_each_row(claimed: Callable[[str], TableFile]) -> None:
    table = claimed('{says: "even is easier", column_order: [even, K=2]}')
    places = {("FedAvg", "even"): 70, ("FedAvg", "K=2"): 60, ("FedProx", "even"): 65, ("FedProx", "K=2"): 50}
    for (row, other), (verdict, detail) in {
        ("FedProx", "even"): ("shown", "2 of 2 pairs so"),
        ("FedProx", "K=2"): ("contradicted", "1 of 2 pairs so"),
    }.items():
        means = places if other == "even" else {**places, (row, other): 80}
        cells = tuple(GridCell(row=r, column=c, by_seed={"accuracy": around(mean)}) for (r, c), mean in means.items())
        grid = Grid(table=table, scale="full", rows=("FedAvg", "FedProx"), columns=("even", "K=2"), cells=cells)
        (found,) = findings(grid)
        assert (found.verdict, found.detail, found.column) == (verdict, detail, "even > K=2")
