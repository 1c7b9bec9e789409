"""The zoo: every method is there, in one world, at a rate that the rule chose from what was measured."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedsweep.algorithms.registry import METHODS
from fedsweep.catalog import method_title
from fedsweep.reproduce.cells import Cell, cells_of
from fedsweep.reproduce.definition.table_file import read_table
from fedsweep.streams import Stream
from fedsweep.testing import build_model

PAGE = Path(__file__).parents[2] / "docs" / "results" / "zoo.md"
# Rows whose rate zoo/rates does not choose.
RATE_OF_FEDAVG = {
    "Pooled": "it is FedAvg with one client",
    "Local": "the server's model is the initial one",
    "FedAS": "the server's model has the initial head",
    "AugFL": "its steps follow from ADMM's penalty alone",
    "FedKTL": "the server's model is the initial one",
}
# What a row may have of its own in the world that all share.
OWN_TOPOLOGY = ("D-PSGD", "DFedAvgM", "AEDFL", "AEDFL+FedDHAD", "HierFAVG")
OWN_WORLD = {
    "Pooled": {"clients", "partition"},
    "AugFL": {"server_data"},
    **{row: {"topology"} for row in OWN_TOPOLOGY},
}


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return cells_of(read_table("zoo/table1"), "small")


def rate_of(cell: Cell) -> float:
    rate: float = cell.config.tree()["training"]["optimizer"]["lr"]
    return rate


def test_every_method_is_a_row_under_its_title(cells: list[Cell]) -> None:
    rows = {cell.row: cell.config.tree()["method"]["name"] for cell in cells if cell.row != "Pooled"}
    assert sorted(rows.values()) == sorted(METHODS)
    assert all(method_title(name) == row for row, name in rows.items())
    assert all(not row.why_missing and row.only is None for row in read_table("zoo/table1").rows)


def test_they_share_world_model_and_training_but_for_what_is_said(cells: list[Cell]) -> None:
    def shared(cell: Cell) -> dict[str, Any]:
        tree = cell.config.tree()
        world = {key: value for key, value in tree["scenario"].items() if key not in OWN_WORLD.get(cell.row, ())}
        steps = {key: tree["training"][key] for key in ("local_epochs", "batch_size", "clip_norm", "schedule")}
        model = {key: value for key, value in tree["model"].items() if (cell.row, key) != ("MOON", "projection")}
        return {**world, "model": model, **steps}

    full = next(shared(cell) for cell in cells if cell.row == "FedAvg")
    for cell in cells:
        model = shared(cell).pop("model")
        assert model.items() <= full["model"].items(), cell.label
        assert all(full[key] == value for key, value in shared(cell).items() if key != "model"), cell.label


def test_equal_bytes_are_what_fedavg_sends_in_its_rounds(cells: list[Cell]) -> None:
    cell = next(cell for cell in cells if (cell.row, cell.column) == ("FedAvg", "equal rounds"))
    training = cell.config.tree()["training"]
    model = build_model(
        cell.config.tree()["model"]["name"], input_shape=(1, 8, 8), num_classes=10, stream=Stream(("m",))
    )
    values = sum(p.numel() for p in model.parameters())
    sent = 2 * 4 * values * training["cohort_size"] * training["rounds"]
    limits = {c.config.tree()["training"]["stop"]["total_bytes"] for c in cells if c.column == "equal bytes"}
    (limit,) = limits
    # Each client registers its size and at most its ten label counts, which leaves no room for another message.
    assert sent + 4 * 20 * 11 <= limit < sent + 4 * values


def test_every_rate_is_the_one_that_the_rule_chooses_on_the_page(cells: list[Cell]) -> None:
    """The largest validation accuracy, of two alike the smaller rate; a run that diverged counts as 0."""
    text = PAGE.read_text()
    rates = [float(rate) for rate in re.findall(r"rate ([\d.]+)", next(x for x in text.splitlines() if "rate 0." in x))]
    assert rates == [0.03, 0.1, 0.3]
    measured: dict[str, list[float]] = {}
    for line in text.partition("## Rates")[2].splitlines():
        words = [word.strip(" *") for word in line.strip("|").split("|")]
        if len(words) == 1 + len(rates) and all(re.fullmatch(r"diverges|[\d.]+", word) for word in words[1:]):
            measured[words[0]] = [0.0 if word == "diverges" else float(word) for word in words[1:]]
    chosen = {row: rates[values.index(max(values))] for row, values in measured.items()}
    small = cells_of(read_table("zoo/rates"), "small")
    assert set(measured) == {cell.row for cell in small} == {cell.row for cell in cells} - RATE_OF_FEDAVG.keys()
    assert {rate_of(cell) for cell in small} == set(rates) and {cell.seed for cell in small}.isdisjoint({0, 1, 2})
    for cell in cells:
        assert rate_of(cell) == chosen.get(cell.row, chosen["FedAvg"]), cell.row
