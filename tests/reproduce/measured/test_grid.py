from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsweep.errors import ConfigError
from fedsweep.reproduce.cell_texts import cell_text, headings, notes
from fedsweep.reproduce.cells import cells_of
from fedsweep.reproduce.definition.sections import Measure
from fedsweep.reproduce.definition.table_file import TableFile, read_table
from fedsweep.reproduce.kinds import call
from fedsweep.reproduce.measured import grid as grid_module
from fedsweep.reproduce.measured.grid import (
    Grid,
    GridCell,
    Measured,
    deviates,
    is_comparable,
    lies_within,
    measured,
    summed_up,
    value_of,
    views_of,
)
from fedsweep.results.view import RunView, load_run

MakeRun = Callable[..., Path]
ROUNDS = {
    "test_accuracy": [0.1, 0.5, None, 0.4, 0.3, 0.2],
    "test_loss": [2.5, 1.5, None, 1.25, 1.75, 2.0],
    "comm_ratio": [0.2, 0.4, 0.6, 0.8, 1.0, 1.2],
    "flops": [1, 2, 3, 4, 5, 6],
    "sim_time_s": [1.5, 2.5, 3.5, 4.5, 5.5, 6.5],
    "high_frequency": [[0], [0, 1], [0], [1, 2, 3], [0], [0]],
}


def measure(**given: Any) -> Measure:
    return Measure.model_validate({"name": "m", **given})


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"of": "test_accuracy"}, 0.2),
        ({"of": "test_accuracy", "over": "first"}, 0.1),
        ({"of": "test_accuracy", "over": "best"}, 0.5),
        ({"of": "test_loss", "over": "best"}, 1.25),
        ({"of": "test_accuracy", "over": "mean"}, 0.3),
        ({"of": "comm_ratio", "over": "last5"}, 0.8),
        ({"of": "flops", "over": "sum"}, 21),
        ({"of": "flops", "over": None}, 21),
        ({"of": "comm_ratio", "over": None}, 0.7),
        ({"of": "test_accuracy", "over": None}, 0.2),
        ({"of": "group_size", "over": "mean"}, 1.5),
        ({"of": "extra/group_size", "over": "mean"}, 1.5),  # as sweeps call it
        ({"of": "flops", "share_of": "extra/sim_time_s"}, 21 / 24),
        ({"of": "total_bytes"}, 90),
        ({"of": "registration_bytes"}, 77),
        ({"of": "best_test_accuracy"}, 0.5),
        ({"of": "round", "target": 0.4}, 2),
        ({"of": "total_bytes", "target": 0.4}, 30),
        ({"of": "flops", "target": 0.4}, 3),
        ({"of": "sim_time_s", "target": 0.4}, 2.5),
        ({"of": "round", "target": 0.51}, None),
        ({"of": "no_such_figure"}, None),
        ({"of": "round", "over": "at_best"}, 2),
        ({"of": "flops", "over": "at_best"}, 3),
        ({"of": "flops", "share_of": "sim_time_s"}, 21 / 24),
        ({"of": "flops", "share_of": "train_loss"}, None),
    ],
)
def test_a_run_comes_to_one_figure(given: Any, value: float | None, tmp_path: Path, make_run: MakeRun) -> None:
    run = load_run(make_run(tmp_path / "r", columns=ROUNDS, registration_bytes=77, best_test_accuracy=0.5))
    assert value_of(run, measure(**given)) == (None if value is None else pytest.approx(value))


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_rounds_one_of_which_has_no_number_have_no_mean(loss: float, tmp_path: Path, make_run: MakeRun) -> None:
    """Nor has their last value its place."""
    run = load_run(make_run(tmp_path / "r", columns={**ROUNDS, "test_loss": [2.5, 1.5, None, loss, 1.75, 2.0]}))
    assert [value_of(run, measure(of="test_accuracy", over=over)) for over in ("mean", "last5")] == [None, None]
    assert value_of(run, measure(of="test_accuracy")) == 0.2


@pytest.mark.parametrize("figure", [math.nan, math.inf])
def test_what_is_no_number_is_no_figure(figure: float, tmp_path: Path, make_run: MakeRun) -> None:
    run = load_run(make_run(tmp_path / "r", columns=ROUNDS))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedsweep.reproduce.measured.grid.measure_function", lambda name: lambda run: figure)
        assert value_of(run, measure(of="mine:share")) is None


@pytest.mark.parametrize("listed", ["'mine:half_right'", "{name: 'mine:half_right', unit: share}"])
def test_a_metric_of_ones_own_is_a_measure_by_the_name_that_the_configuration_has(
    listed: str, tmp_path: Path, make_run: MakeRun
) -> None:
    folder = make_run(tmp_path / "r", columns={"extra": [{"half_right": 0.25}, {"half_right": 0.75}]})
    (folder / "config.yaml").write_text(f"name: made\nevaluation: {{metrics: [{listed}]}}\n")
    run = load_run(folder)
    assert value_of(run, measure(of="mine:half_right")) == value_of(run, measure(of="half_right")) == 0.75
    assert value_of(run, measure(of="mine:half_right", over="first")) == 0.25


def test_the_best_of_a_figure_is_what_its_metric_calls_better(
    changed: Callable[[str, str], Path], tmp_path: Path, make_run: MakeRun
) -> None:
    found = read_table(changed("tracking: {uri: none}", "evaluation: {metrics: [brier_score]}"))
    asked = found.model_copy(update={"measures": [measure(of="brier_score", over="best")]})
    cell = cells_of(asked, "smoke")[0]
    folder = make_run(tmp_path / "r", columns={"extra": [{"brier_score": 0.75}, {"brier_score": 0.25}]})
    (found_cell,) = measured(asked, views_of(asked, {cell: folder}), scale="smoke").cells
    assert found_cell.measured["m"].mean == 0.25


@pytest.mark.parametrize(
    ("given", "never"),
    [
        ({"of": "round", "target": 0.51}, 1),
        ({"of": "round", "target": 0.5}, 0),
        ({"of": "no_such_figure", "target": 0.5}, 0),
        ({"of": "round", "target": "cell"}, 0),
    ],
)
def test_only_a_run_that_missed_its_target_counts_as_never(
    given: Any, never: int, table: TableFile, tmp_path: Path, make_run: MakeRun
) -> None:
    """Not one that reached it without the figure, as simulated time without devices, nor one without a target."""
    cell = cells_of(table, "smoke")[0]
    asked = table.model_copy(update={"measures": [measure(**given)]})
    folder = make_run(tmp_path / "r", columns=ROUNDS)
    (found,) = measured(asked, views_of(asked, {cell: folder}), scale="smoke").cells
    assert found.measured["m"].never == never


def test_a_run_without_the_accuracy_of_its_target_did_not_miss_it(
    table: TableFile, tmp_path: Path, make_run: MakeRun
) -> None:
    """As of clients' own models, which a method may have none of."""
    cell = cells_of(table, "smoke")[0]
    asked = table.model_copy(update={"measures": [measure(of="round", target=0.5)]})
    folder = make_run(tmp_path / "r", columns={"test_accuracy": [None, None]})
    grid = measured(asked, views_of(asked, {cell: folder}), scale="smoke")
    assert grid.cells[0].measured["m"].never == 0
    assert "no run has the accuracy of its target." in "".join(notes(grid))


def test_mean_and_sample_deviation_are_over_the_seeds_that_have_the_figure() -> None:
    found = summed_up([0.5, 0.7, None], measure(percent=True))
    assert (found.mean, found.sd) == (pytest.approx(60), pytest.approx(math.sqrt(200)))
    assert (found.count, found.of, found.never) == (2, 3, 0)
    alone = summed_up([0.5], measure())
    assert (alone.mean, alone.sd, alone.count) == (0.5, None, 1)
    assert summed_up([None], measure(target=0.5), never=1).mean is None


def test_a_figure_beyond_all_numbers_in_the_unit_shown_is_none() -> None:
    share = measure(name="accuracy", percent=True)
    assert summed_up([1e307, 0.5], share) == Measured(mean=50.0, count=1, of=2)


def test_only_a_target_that_was_missed_is_never(table: TableFile) -> None:
    """A file of somebody else's may count seeds and have no mean of them."""
    cell = GridCell(row="FedAvg", column="even", measured={"accuracy": Measured(count=3, of=3)}, standing="paper")
    grid = Grid(table=table, scale="full", rows=("FedAvg",), columns=("even",), cells=(cell,))
    assert cell_text(grid, "FedAvg", headings(grid)[0]).measured == "-" and grid.figures == []


def grid_of(table: TableFile, folder: Path, *, scale: str = "small", **more: Any) -> Grid:
    cells = cells_of(table, scale, **more)
    folders = {c: folder / f"{c.row}-{c.column}-{c.seed}" for c in cells}
    return measured(table, views_of(table, folders), scale=scale)


def test_a_cell_is_the_mean_over_its_seeds_runs(table: TableFile, tmp_path: Path, make_run: MakeRun) -> None:
    for seed, accuracy in enumerate((0.7, 0.8)):
        columns = {"test_accuracy": [0.1, accuracy], "comm_ratio": [0.4, 0.6]}
        make_run(tmp_path / f"FedAvg-even-{seed}", columns=columns, versions={"torch": "1"}, git_commit="abc")
    grid = grid_of(table, tmp_path)
    (cell,) = grid.cells
    assert cell.measured["accuracy"].mean == pytest.approx(75) and cell.measured["accuracy"].count == 2
    assert cell.measured["cost"].mean == pytest.approx(0.5) and cell.problems == ()
    assert grid.setting["versions"] == {"torch": "1"} and grid.setting["git_commit"] == "abc"
    assert grid.setting["seeds"] == [0, 1] and grid.setting["rounds"] == [3, 3]


def test_a_run_that_failed_or_was_not_run_is_a_problem_and_the_rest_counts(
    table: TableFile, tmp_path: Path, make_run: MakeRun
) -> None:
    columns = {"test_accuracy": [0.7], "comm_ratio": [0.5]}
    make_run(tmp_path / "FedAvg-even-0", columns=columns)
    make_run(tmp_path / "FedAvg-even-1", columns=columns, status="failed", reason="client 3 diverged")
    (cell,) = grid_of(table, tmp_path, seeds=[0, 1, 2]).cells
    assert cell.problems == ("seed 1: failed after round 1: client 3 diverged", "seed 2: it was not run")
    assert (cell.measured["accuracy"].count, cell.measured["accuracy"].of) == (1, 3)


@pytest.mark.parametrize("failing", [(1,), (0, 1, 2)])
def test_a_measure_that_fails_for_some_seeds_counts_for_the_others(
    failing: tuple[int, ...], table: TableFile, tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(run: RunView, measure: Measure) -> float | None:
        if measure.name == "accuracy" and int(run.folder.name[-1]) in failing:
            raise ConfigError("it divides by zero")
        return None if measure.name == "cost" else value_of(run, measure)

    monkeypatch.setattr(grid_module, "value_of", failed)
    for seed in range(3):
        make_run(tmp_path / f"FedAvg-even-{seed}", columns={"test_accuracy": [0.7], "comm_ratio": [0.5]})
    grid = grid_of(table, tmp_path, seeds=[0, 1, 2])
    (cell,) = grid.cells
    texts = {h.measure.name: cell_text(grid, "FedAvg", h).measured for h in headings(grid) if h.column == "even"}
    if len(failing) == 1:
        assert cell.problems == ("seed 1: accuracy: it divides by zero",)
        assert (cell.measured["accuracy"].count, cell.measured["accuracy"].of) == (2, 3)
        assert texts["accuracy"].endswith(" [2/3]")
    else:
        assert cell.problems == ("accuracy: it divides by zero",) and texts["accuracy"] == "failed"
    assert texts["cost"] == "-" and "Cost: no run has comm_ratio." in notes(grid)


@pytest.mark.parametrize(
    ("scale", "overrides", "accuracy", "off"),
    [
        ("full", [], 0.73, {"accuracy"}),
        ("full", [], 0.72, set()),
        ("full", ["scenario.clients=7"], 0.73, set()),
        ("smoke", [], 0.73, set()),
    ],
)
def test_what_is_marked_is_beyond_the_tolerance_and_comparable(
    scale: str,
    overrides: list[str],
    accuracy: float,
    off: set[str],
    table: TableFile,
    tmp_path: Path,
    make_run: MakeRun,
) -> None:
    make_run(tmp_path / "FedAvg-even-0", columns={"test_accuracy": [accuracy], "comm_ratio": [0.52]})
    chosen: dict[str, Any] = {"rows": "FedAvg", "columns": "even", "seeds": [0], "overrides": overrides}
    grid = grid_of(table, tmp_path, scale=scale, **chosen)
    assert {m.name for m in grid.measures if deviates(grid, grid.cells[0], m)} == off


def test_a_cost_is_compared_at_any_scale_that_differs_in_rounds_alone(
    table: TableFile, tmp_path: Path, make_run: MakeRun
) -> None:
    make_run(tmp_path / "FedAvg-even-0", columns={"test_accuracy": [0.1], "comm_ratio": [0.6]})
    grid = grid_of(table, tmp_path, scale="smoke", rows="FedAvg", columns="even")
    assert [m.name for m in grid.measures if deviates(grid, grid.cells[0], m)] == ["cost"]


@pytest.mark.parametrize("more", [{"of": "comm_cost", "over": "sum"}, {"of": "total_bytes"}])
def test_a_cost_that_grows_with_the_rounds_is_not_compared_over_others(more: dict[str, Any], table: TableFile) -> None:
    (_, cost) = table.measures
    cell = GridCell(row="FedAvg", column="even", standing="costs")
    assert is_comparable(cell, cost) and not is_comparable(cell, cost.model_copy(update=more))
    assert is_comparable(replace(cell, standing="paper"), cost.model_copy(update=more))


def test_what_was_not_measured_is_not_marked(table: TableFile, tmp_path: Path) -> None:
    grid = grid_of(table, tmp_path, scale="full", rows="FedAvg", columns="even")
    assert grid.cells[0].problems and not any(deviates(grid, grid.cells[0], m) for m in grid.measures)


@pytest.mark.parametrize(
    ("mean", "sd", "standing", "within"),
    [
        (71.0, 0.45, "paper", True),  # 70.0 ± 0.5 printed, and half of the last digit
        (71.2, 0.45, "paper", False),
        (70.0, None, "paper", True),
        (71.0, 0.45, "other", None),
        (None, None, "paper", None),
    ],
)
def test_whether_measured_and_printed_lie_within_both_spreads(
    mean: float | None, sd: float | None, standing: Any, within: bool | None, table: TableFile
) -> None:
    found = Measured(mean=mean, sd=sd, count=0 if mean is None else 3, of=3)
    cell = GridCell(row="FedAvg", column="even", measured={"accuracy": found}, standing=standing)
    grid = Grid(table=table, scale="full", rows=("FedAvg",), columns=("even",), cells=(cell,))
    assert lies_within(grid, cell, table.measures[0]) is within


def test_a_cell_keeps_its_figures_by_seed(table: TableFile, tmp_path: Path, make_run: MakeRun) -> None:
    cells = cells_of(table, "small")
    folders = {cell: make_run(tmp_path / str(cell.seed), columns=ROUNDS) for cell in cells[:1]}
    folders |= {cells[1]: tmp_path / "not-run"}
    (found,) = measured(table, views_of(table, folders), scale="small").cells
    assert found.by_seed["accuracy"] == {0: 50.0} and found.measured["accuracy"].count == 1


def leaves(run: RunView) -> float:
    raise SystemExit(3)


def test_what_a_measure_of_ones_own_raises_is_told_with_its_place() -> None:
    place = r"the measure 'mine:leaves' failed \(leaves \(test_grid.py, line \d+\): SystemExit: 3\)"
    with pytest.raises(ConfigError, match=place):
        call("measure", "mine:leaves", leaves, None, gives=(float,))
