"""A table's costs before it is run: counted exactly, timed roughly, with the data or without."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsweep.config.load import load_config
from fedsweep.config.overrides import apply_overrides
from fedsweep.driver.run import plan_run
from fedsweep.engine.forecast import forecast, lanes_refused
from fedsweep.errors import ConfigError
from fedsweep.reproduce import costs as module
from fedsweep.reproduce.calibration import Speed, calibrate
from fedsweep.reproduce.costs import Cost, Estimator, costs_of, fitting, hours_here, parse_duration
from fedsweep.reproduce.given import write_runs
from fedsweep.reproduce.reproduction import Reproduction, TableRequest, reproduction
from fedsweep.results.view import load_run
from fedsweep.world.data.datasets import DATASETS, load_dataset, stand_in
from fedsweep.world.replay import ScenarioTrace


@pytest.fixture
def a_second_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a second, turns of a hundred, tests of a sample for ten thousand; on one core."""
    monkeypatch.setattr(module, "calibrate", lambda experiment: Speed(step=1.0, turn=100.0, test=10_000.0))
    monkeypatch.setattr(module, "cores", lambda: 1)


def of(path: Path, scale: str = "full") -> Reproduction:
    return reproduction(TableRequest(table=str(path), scale=scale))


def test_counts_are_those_of_each_runs_own_forecast(table_path: Path) -> None:
    table = of(table_path)
    costs = costs_of(table)
    assert set(costs.by_cell) == set(table.cells) and len(table.cells) == 12
    for cell in table.cells[::5]:
        known = forecast(plan_run(cell.config).experiment)
        cost = costs.by_cell[cell]
        assert (cost.runs, cost.steps, cost.flops) == (1, known.local_steps, known.flops)
        assert cost.num_bytes == known.total_bytes
        assert cost.seconds > 0


def test_time_is_that_of_steps_turns_and_tests(table_path: Path, a_second_a_step: None) -> None:
    """Three rounds of two clients with two steps each; 360 samples are tested every round."""
    (cost,) = {costs_of(of(table_path)).by_cell[cell] for cell in of(table_path).cells if cell.row == "FedAvg"}
    assert cost.seconds == 12 * 1.0 + 6 * 100.0 + 3 * 360 * 10_000.0


def test_tests_are_as_many_as_the_run_has(changed: Callable[[str, str], Path], a_second_a_step: None) -> None:
    path = changed("tracking:", "evaluation: {every: 2}\ntracking:")
    table = of(path)
    assert costs_of(table).by_cell[table.cells[0]].seconds == 12 + 600 + 2 * 3_600_000


def test_runs_that_cells_share_count_once(changed: Callable[[str, str], Path]) -> None:
    path = changed("    - {name: even}\n", "    - {name: even}\n    - {name: again}\n")
    costs = costs_of(of(path))
    assert costs.total.runs == 12 and len(costs.by_cell) == 18
    assert costs.by_label()["FedAvg | again"] == Cost() and costs.by_label()["FedAvg | even"].runs == 3


def test_what_fits_is_chosen_in_the_tables_order_and_what_is_too_long_passed_over(
    table_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "cores", lambda: 2)
    table = of(table_path)
    costs = costs_of(table)
    by_cell = {
        cell: replace(cost, seconds=10.0 + 90 * (place == 1))
        for place, (cell, cost) in enumerate(costs.by_cell.items())
    }
    within = replace(costs, by_cell=by_cell).within(15.0)
    assert within == (table.cells[0], table.cells[2], table.cells[3])
    assert replace(costs, by_cell=by_cell).within(4.0) == ()
    assert replace(costs, by_cell=by_cell).within(9.0) == (), "one run can't use both cores"
    other, third = list(by_cell)[3:5]
    shared = replace(costs, by_cell={cell: Cost(seconds=10.0) for cell in by_cell}, shared={third: other})
    assert shared.within(15.0) == (*table.cells[:3],), "the run that both share is not free where none of them has it"
    assert third in shared.within(20.0), "and free where one has"
    ten = Cost(runs=1, seconds=10.0)
    assert (3600 * hours_here(ten), 3600 * hours_here(ten + ten + ten)) == pytest.approx((10.0, 15.0))


def test_a_request_keeps_the_cells_that_fit(table_path: Path, a_second_a_step: None) -> None:
    request = TableRequest(table=str(table_path), scale="full")
    one = costs_of(of(table_path)).by_cell[of(table_path).cells[0]].seconds
    chosen = fitting(request, 2.5 * one)
    assert chosen.chosen == (("FedAvg", "even", 0), ("FedAvg", "even", 1))
    assert [cell.seed for cell in reproduction(chosen).cells] == [0, 1]
    assert reproduction(chosen).rows == ["FedAvg", "FedProx", "SCAFFOLD"]
    with pytest.raises(ConfigError, match="no run of tiny fits, the shortest takes about"):
        fitting(request, 1.0)


def test_what_plans_held_in_cycles_is_given_back() -> None:
    """Networks and worlds are such, and a list of all tables' costs makes hundreds."""
    world: dict[str, object] = {"images": np.zeros(10)}
    world["itself"] = world
    gone: list[bool] = []
    weakref.finalize(world["images"], gone.append, True)
    del world
    Estimator().release()
    assert gone == [True]


def test_given_runs_take_no_time(
    table_path: Path, a_second_a_step: None, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    table = of(table_path)
    one = costs_of(table).by_cell[table.cells[0]].seconds
    run = load_run(make_run(tmp_path / "run", columns={"test_accuracy": [0.5]}))
    path = write_runs({table.keys[table.cells[0]]: run}, tmp_path / "given")
    request = TableRequest(table=str(table_path), scale="full", runs_from=(str(path),))
    assert fitting(request, 2.5 * one).chosen == tuple(("FedAvg", "even", seed) for seed in (0, 1, 2))
    assert fitting(request, 1.0).chosen == (("FedAvg", "even", 0),)


def test_a_table_without_runs_has_nothing_to_choose() -> None:
    with pytest.raises(ConfigError, match="--within chooses runs, and dynamicfl/figure9 has none"):
        fitting(TableRequest(table="dynamicfl/figure9", scale="smoke"), 1e9)


@pytest.mark.parametrize(("text", "seconds"), [("90m", 5400), ("10h", 36_000), ("1.5d", 129_600), (" 2 h", 7200)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "h", "-1h", "0h", "1w", "nan h", "1h30m"])
def test_wrong_durations(text: str) -> None:
    with pytest.raises(ConfigError, match="--within takes a time such as"):
        parse_duration(text)


# -- without the data ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["digits"])
def test_a_stand_in_is_as_large_as_the_data_set(name: str) -> None:
    real, other = load_dataset(name, root=None, download=False), stand_in(name)
    assert other.image_shape == real.image_shape and other.num_classes == real.num_classes
    assert (len(other.train_labels), len(other.test_labels)) == (len(real.train_labels), len(real.test_labels))
    assert np.ptp(np.bincount(other.train_labels)) <= 1


def test_stand_ins_have_the_size_that_was_asked_for() -> None:
    assert stand_in("tiny_imagenet", image_size=32).image_shape == (3, 32, 32)
    assert {entry.sizes.num_classes for entry in DATASETS.values() if entry.task is None} == {10, 62, 100, 200}


def test_a_table_is_counted_without_its_data(changed: Callable[[str, str], Path], tmp_path: Path) -> None:
    place = f"dataset: cifar10, root: {tmp_path}, "
    path = changed("scenario: {clients: 6", f"model: {{name: lenet5}}\nscenario: {{{place}clients: 6")
    estimator = Estimator()
    costs = costs_of(of(path), estimator)
    assert costs.absent == ("cifar10",) and not list(tmp_path.glob("cifar*"))
    assert {cost.steps for cost in costs.by_cell.values()} == {12}


# -- calibration -----------------------------------------------------------------------------------------------------


def test_calibration_leaves_the_experiment_as_it_was(table_path: Path) -> None:
    experiment = plan_run(of(table_path).cells[0].config).experiment
    before = experiment.initial_vector.clone()
    speed = calibrate(experiment)
    assert speed.step > 0 and speed.turn >= 0 and speed.test > 0
    assert bool((experiment.initial_vector == before).all())


def test_a_run_is_timed_although_nobody_is_there_in_its_first_round(
    changed: Callable[[str, str], Path], tmp_path: Path
) -> None:
    trace = ScenarioTrace(num_clients=6, num_classes=10, present=((), (1,), (2, 3)), class_sets=({}, {}, {}))
    (tmp_path / "trace.json").write_text(trace.to_json())
    replayed = f"availability: {{kind: replay, file: {tmp_path / 'trace.json'}}}"
    table = of(changed("partition: {kind: iid}", f"partition: {{kind: iid}}, {replayed}"))
    (cost,) = costs_of(replace(table, cells=table.cells[:1])).by_cell.values()
    assert cost.steps == 3 * 2 and cost.seconds > 0
    lanes = apply_overrides(table.cells[0].config_tree, ["runtime.executor=lanes"])
    assert lanes_refused(plan_run(load_config(lanes)).experiment) == ()


def test_a_method_whose_steps_need_an_exchange_is_timed_as_fedavg(
    changed: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedMix's clients mix in what all clients sent before round 1."""
    path = changed("{name: fedprox, mu: 0.1}}, scales: {smoke: {method.mu: 0.2}}", "{name: fedmix}}")
    table = of(path)
    costs = costs_of(table)
    mixed = [cost for cell, cost in costs.by_cell.items() if cell.row == "FedProx"]
    assert len(mixed) == 6 and all(cost.seconds > 0 for cost in mixed)


def test_a_run_that_cannot_be_planned_names_its_cell(changed: Callable[[str, str], Path]) -> None:
    path = changed("set: {method: {name: fedprox, mu: 0.1}}", "set: {method: {name: abavg}}")
    with pytest.raises(ConfigError, match=r"cell FedProx \| even: .*validation data"):
        costs_of(of(path))


def test_methods_may_be_timed_by_their_passes(changed: Callable[[str, str], Path], a_second_a_step: None) -> None:
    """A step of MOON asks two more models forward: five passes in place of three."""
    path = changed("{name: fedprox, mu: 0.1}}, scales: {smoke: {method.mu: 0.2}}", "{name: moon}}")
    table = of(path)
    seconds = {cell.row: cost.seconds for cell, cost in costs_of(table, Estimator(by_method=False)).by_cell.items()}
    tests = 6 * 100.0 + 3 * 360 * 10_000.0
    assert seconds["FedAvg"] - tests == 12 and seconds["FedProx"] - tests == pytest.approx(12 * 5 / 3)
