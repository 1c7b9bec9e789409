"""Every table that ships: it reads, and each of its cells is a configuration at each scale."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import pytest

from fedsweep.algorithms.registry import METHODS
from fedsweep.catalog import merged_title, resolve
from fedsweep.papers.registry import MEASURES
from fedsweep.reproduce.cells import cells_of
from fedsweep.reproduce.definition.sections import FULL, SCALES, Claim
from fedsweep.reproduce.definition.table_file import TableFile, listed_tables, read_table, table_names
from fedsweep.reproduce.formats import table_text
from fedsweep.runs.tables.rounds import ROUND_COLUMNS

# Beside the columns of rounds.parquet: keys of result.json, and what is made of a column.
_OF_RESULTS = {"total_bytes", "best_test_accuracy", "registration_bytes", "peak_memory_mb", "rounds", "group_size"}
# Tasks report them beside accuracy.
_OF_TASKS = {"perplexity", "token_accuracy"}
# What DynaFed reports of its synthesis, and the like; such figures are columns of its runs alone.
_OF_METHODS = ("synthesis_", "mean_staleness", "personal_accuracy", "client_accuracy")
_COSTS = {"comm_ratio", "comm_cost", "kl_divergence", "group_size"}
# They come with the package or are small enough to be fetched.
_SMALL_DATA = {"digits", "cifar10", "cifar100", "fashion_mnist", "mnist", "svhn"}


table_named = cache(read_table)


@cache
def text_of(name: str) -> str:
    return table_text(table_named(name))


@pytest.fixture(params=table_names())
def table(request: pytest.FixtureRequest) -> TableFile:
    return table_named(request.param)


def test_the_four_papers_have_76_tables_and_figures_with_an_experiment() -> None:
    numbered = [name for name in table_names() if re.fullmatch(r"\w+/(table|figure)\d+", name)]
    per_paper = Counter(name.partition("/")[0] for name in numbered)
    assert per_paper == {"dynamicfl": 50, "dynafed": 12, "feddhad": 11, "fedstg": 3, "drift": 1, "zoo": 1}
    assert [name for name in table_names() if name not in numbered] == [
        "adapters/equal_bytes",
        "async/slow_tenth",
        "feddhad/dropout",
        "feddhad/multiplier",
        "feddhad/overfitting",
        "zoo/rates",
    ]


def test_it_says_what_it_is_and_can_be_tried(table: TableFile) -> None:
    assert table.source and table.title
    assert "smoke" in table.scales
    assert f"fedsweep reproduce {table.name}" in text_of(table.name)


def test_its_notes_speak_of_methods_that_it_has(table: TableFile) -> None:
    names = " ".join([*table.row_names, *table.column_names]).lower()
    settings = repr([table.base, table.rows, table.columns])
    for method in METHODS:
        title = merged_title([method])
        if len(re.findall("[A-Z]", title)) > 1 and title.lower() not in names and f"'name': '{method}'" not in settings:
            named = rf"(?<![\w-]){re.escape(title)}(?![\w-])"
            assert not [note for note in table.notes if re.search(named, note, flags=re.IGNORECASE)]


def test_every_cell_is_a_configuration_at_every_scale(table: TableFile) -> None:
    for scale in (name for name in SCALES if name == FULL or name in table.scales):
        cells = cells_of(table, scale)
        assert f"{len(cells)} " in next(
            line for line in text_of(table.name).splitlines() if line.startswith(f"  {scale}: ")
        )
        first = {cell.label: cell for cell in cells}
        assert first, scale
        for cell in first.values():
            resolve(cell.config)


def test_smoke_needs_no_data_of_others_and_small_only_what_is_small(table: TableFile) -> None:
    assert {cell.config.scenario.dataset for cell in cells_of(table, "smoke")} <= {"digits", "lines"}
    if "small" in table.scales:
        assert {cell.config.scenario.dataset for cell in cells_of(table, "small")} <= _SMALL_DATA


def test_every_printed_number_is_of_a_measure_of_a_cell(table: TableFile) -> None:
    numbers = {
        (row, column, measure)
        for row, columns in table.printed.items()
        for column, measures in columns.items()
        for measure in measures
    }
    for row, column, measure in numbers:
        assert row in table.row_names and column in table.column_names
        value = table.printed_value(row, column, measure=measure)
        assert value is not None and (isinstance(value, str) or value >= 0)
        if next(m for m in table.measures if m.name == measure).percent and not isinstance(value, str):
            assert 1 < value <= 100, (row, column, "percent measures are printed in percent")


def test_its_measures_are_figures_that_runs_have(table: TableFile) -> None:
    known = {column.name for column in ROUND_COLUMNS if column.is_scalar} | _OF_RESULTS | _OF_TASKS
    for measure in table.measures:
        assert table.kind != "runs" or measure.of in {*known, *MEASURES} or measure.of.startswith(_OF_METHODS)
        assert not measure.cost or measure.of in _COSTS or table.kind != "runs"


def claimed_pairs(table: TableFile, claim: Claim, measure: str) -> Iterator[tuple[object, object]]:
    def printed(row: str, column: str) -> object:
        value = table.printed_value(row, column, measure=measure)
        return math.inf if value == "never" else value

    if claim.column_order:
        rows = claim.rows or table.row_names
        order = claim.column_order
        yield from ((printed(row, one), printed(row, two)) for row in rows for one, two in pairwise(order))
        return
    for column in claim.columns or table.column_names:
        if claim.order:
            yield from pairwise(printed(row, column) for row in claim.order)
        for other in claim.others or table.row_names:
            if (row := claim.above or claim.below) and other != row:
                pair = (printed(row, column), printed(other, column))
                yield pair if claim.above else (pair[1], pair[0])


def test_what_a_paper_prints_does_not_contradict_what_it_is_said_to_claim(table: TableFile) -> None:
    for claim in table.claims:
        every = list(claimed_pairs(table, claim, claim.measure or table.measures[0].name))
        numbers = [(one, two) for one, two in every if isinstance(one, float) and isinstance(two, float)]
        fits = [one > two if claim.apart is None else abs(one - two) < claim.apart for one, two in numbers]
        if claim.column_order:  # "consistently" is the text's word, not so in each of its figures
            assert sum(fits) > len(fits) / 2, claim.text
        else:
            assert all(fits), (claim.text, numbers)


def test_a_table_is_listed_with_its_summary_and_the_source_that_it_names() -> None:
    listed = listed_tables()
    assert [preset.name for preset, _ in listed] == table_names() and all(preset.summary for preset, _ in listed)
    assert [source for _, source in listed] == [table_named(name).source for name in table_names()]
