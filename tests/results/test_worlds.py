"""Rows and worlds of a study, and runs chosen by short names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedsweep.errors import ConfigError
from fedsweep.reports.compare import compared_runs
from fedsweep.reports.setting_table import TableStyle, settings_as
from fedsweep.results.config_table import config_table, flat_config
from fedsweep.results.selection import only_those, order_of
from fedsweep.results.settings import ReportRun, group_settings
from fedsweep.results.worlds import Layout, study_of
from fedsweep.runs.run_folder import RunFolder
from fedsweep.testing import tiny_record

ROUND = tiny_record(round=1, bytes_up=1000, bytes_down=500)
Trial = tuple[str, Mapping[str, Any]]


def runs_of(path: Path, *trials: Trial, accuracy: float = 0.5) -> list[ReportRun]:
    """Runs of these names and configurations, one after the other a little better."""
    for number, (name, config) in enumerate(trials):
        folder = RunFolder.create(path / f"{number:03d}", overwrite=False)
        folder.write_config(yaml.safe_dump({"name": name, "seed": 0, "method": {"name": "fedavg"}, **config}))
        folder.write_rounds([replace(ROUND, test_accuracy=accuracy + number / 100)])
        folder.write_result({"status": "finished"})
    return compared_runs([path])


def skewed(alpha: float, **method: Any) -> dict[str, Any]:
    return {"scenario": {"clients": 9, "partition": {"kind": "dirichlet", "dirichlet_alpha": alpha}}, "method": method}


def grid(layout: Layout) -> dict[str, dict[str, int]]:
    """World -> row -> setting."""
    return {world.label: {layout.rows[row]: place for row, place in world.cells.items()} for world in layout.worlds}


def test_methods_are_rows_and_scenarios_are_worlds(tmp_path: Path) -> None:
    trials = [
        (f"s {name} dirichlet_alpha={alpha:g}", skewed(alpha, name=name.lower()))
        for name in ("FedAvg", "FedProx")
        for alpha in (0.1, 1.0)
    ]
    layout = study_of(runs_of(tmp_path, *trials)).layout
    assert grid(layout) == {
        "dirichlet_alpha=0.1": {"FedAvg": 0, "FedProx": 2},
        "dirichlet_alpha=1": {"FedAvg": 1, "FedProx": 3},
    }
    assert layout.column_keys == ("scenario.partition.dirichlet_alpha",)


def test_rows_of_runs_with_names_of_their_own_are_called_by_their_methods(tmp_path: Path) -> None:
    """One row: the names differ, the configurations beside the world do not."""
    runs = runs_of(
        tmp_path,
        ("mild", skewed(1.0, name="fedprox", mu=0.1)),
        ("severe", skewed(0.1, name="fedprox", mu=0.1)),
        ("other", skewed(0.1, name="fedprox", mu=1.0)),
    )
    assert grid(study_of(runs).layout) == {
        "dirichlet_alpha=1": {"FedProx mu=0.1": 0},
        "dirichlet_alpha=0.1": {"FedProx mu=0.1": 1, "FedProx mu=1": 2},
    }


def test_long_values_that_differ_at_their_ends_make_settings(tmp_path: Path) -> None:
    def shared(last: float) -> dict[str, Any]:
        return {"scenario": {"budgets": {"kind": "mixed", "user_share": [*([0.125] * 299), last]}}}

    runs = runs_of(tmp_path, ("a", shared(0.5)), ("a", shared(1.0)), ("a", {"seed": 1, **shared(1.0)}))
    assert [setting.runs for setting in group_settings(runs)] == [(0,), (1, 2)]


def test_a_study_of_one_world_has_its_settings_for_rows(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, ("a", {}), ("b", {}), ("c", {"training": {"rounds": 3}}))
    assert grid(study_of(runs).layout) == {"": {"a": 0, "b": 1, "c": 2}}


@pytest.mark.parametrize(
    ("methods", "epochs", "worlds"),
    [
        (("fedavg", "fedprox"), (1, 2), ["local_epochs=1", "local_epochs=2"]),  # varied beside the methods
        (("fedavg",), (1, 2), [""]),  # nothing would be left to compare
    ],
)
def test_training_that_several_methods_share_makes_worlds(
    tmp_path: Path, methods: tuple[str, ...], epochs: tuple[int, ...], worlds: list[str]
) -> None:
    trials = [
        (f"{name}{e}", {"method": {"name": name}, "training": {"local_epochs": e}}) for name in methods for e in epochs
    ]
    assert [world.label for world in study_of(runs_of(tmp_path, *trials)).layout.worlds] == worlds


def test_training_of_a_methods_own_and_tuned_rates_make_no_world(tmp_path: Path) -> None:
    def rate(lr: float, name: str) -> dict[str, Any]:
        return {"method": {"name": name}, "training": {"optimizer": {"lr": lr}}}

    runs = runs_of(tmp_path / "rates", *((f"{n}{lr}", rate(lr, n)) for n in ("fedavg", "fedprox") for lr in (0.1, 1.0)))
    assert len(study_of(runs).layout.worlds) == 1
    sgd = {"method": {"name": "fedsgd"}, "training": {"local_steps": 1}}
    runs = runs_of(
        tmp_path / "steps",
        ("a", {"training": {"local_steps": 5}}),
        ("b", {"method": {"name": "fedprox"}, "training": {"local_steps": 5}}),
        ("c", sgd),
    )
    assert len(study_of(runs).layout.worlds) == 1


def test_who_has_no_budgets_stands_in_the_world_of_each(tmp_path: Path) -> None:
    def with_budgets(budgets: Any, name: str) -> dict[str, Any]:
        return {"scenario": {"budgets": budgets}, "method": {"name": name}}

    trials = [("plain", with_budgets(None, "fedavg"))]
    trials += [(f"d{x}", with_budgets({"kind": "fixed", "budget_fraction": x}, "dynamicfl")) for x in (0.3, 0.6)]
    assert grid(study_of(runs_of(tmp_path, *trials)).layout) == {
        "budget_fraction=0.3": {"FedAvg": 0, "DynamicFL": 1},
        "budget_fraction=0.6": {"FedAvg": 0, "DynamicFL": 2},
    }
    assert [w.label for w in study_of(runs_of(tmp_path / "x", *trials[:2])).layout.worlds] == [""]
    # By hand: without the key.
    lacking = runs_of(tmp_path / "y", *trials, ("own", {"method": {"name": "fedprox"}}))
    assert grid(study_of(lacking).layout) == {
        "budget_fraction=0.3": {"FedAvg": 0, "DynamicFL": 1, "FedProx": 3},
        "budget_fraction=0.6": {"FedAvg": 0, "DynamicFL": 2, "FedProx": 3},
    }


def test_values_that_are_alike_in_few_digits_are_written_out(tmp_path: Path) -> None:
    runs = runs_of(
        tmp_path, *((name, skewed(alpha, name=name)) for alpha in (0.12345, 0.12346) for name in ("fedavg",))
    )
    assert [w.label for w in study_of(runs).layout.worlds] == ["dirichlet_alpha=0.12345", "dirichlet_alpha=0.12346"]


def test_a_world_without_a_section_that_others_have_says_so(tmp_path: Path) -> None:
    rotation = {"kind": "cosine_rotation", "class_shift": 0.5}
    worlds = [(alpha, drift) for alpha in (0.1, 1.0) for drift in (None, rotation)]
    configs = [{"scenario": {**skewed(alpha)["scenario"], "drift": drift}} for alpha, drift in worlds]
    runs = runs_of(tmp_path, *(("a", config) for config in configs))
    assert [world.label for world in study_of(runs).layout.worlds] == [
        "drift=null, dirichlet_alpha=0.1",
        "drift=cosine_rotation, dirichlet_alpha=0.1",
        "drift=null, dirichlet_alpha=1",
        "drift=cosine_rotation, dirichlet_alpha=1",
    ]
    assert len(only_those(runs, ["drift=null"])) == 2


def test_worlds_that_no_value_tells_apart_are_numbered(tmp_path: Path) -> None:
    other = {"scenario": {**skewed(0.1)["scenario"], "unknown_here": 1}}
    runs = runs_of(tmp_path, ("a", skewed(0.1)), ("b", other), ("c", skewed(1.0)))
    labels = [world.label for world in study_of(runs).layout.worlds]
    assert labels == ["dirichlet_alpha=0.1 (1)", "dirichlet_alpha=0.1 (2)", "dirichlet_alpha=1"]
    head = settings_as(runs, "md", TableStyle(figures=["best", "bytes"])).splitlines()[0]
    assert "=0.1 (1) " in head and "=0.1 (2) " in head


def test_a_text_that_nests_without_end_is_a_value_like_others(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, *(("a", {"scenario": {"note": note}}) for note in ("[" * 9000, "x")))
    assert len(study_of(runs).layout.worlds) == 2


def test_rows_and_columns_can_be_chosen_by_short_names(tmp_path: Path) -> None:
    trials = [
        ("s", {**skewed(alpha, name="fedprox", mu=mu), "training": {"local_epochs": epochs}})
        for mu in (0.0, 0.1)
        for alpha in (0.1, 1.0)
        for epochs in (1, 2)
    ]
    runs = runs_of(tmp_path, *trials)
    assert grid(study_of(only_those(runs, ["local_epochs=1"]), rows=["dirichlet_alpha"], columns=["mu"]).layout) == {
        "mu=0": {"dirichlet_alpha=0.1": 0, "dirichlet_alpha=1": 1},
        "mu=0.1": {"dirichlet_alpha=0.1": 2, "dirichlet_alpha=1": 3},
    }
    both = study_of(runs, rows=["mu"]).layout
    assert [world.words for world in both.worlds][:2] == [
        ("dirichlet_alpha=0.1", "local_epochs=1"),
        ("dirichlet_alpha=0.1", "local_epochs=2"),
    ]
    assert len(study_of(runs, columns=["training"]).layout.rows) == 4
    with pytest.raises(ConfigError, match=r"also differ in training\.local_epochs; .* --only local_epochs=VALUE"):
        study_of(runs, rows=["mu"], columns=["dirichlet_alpha"])
    with pytest.raises(ConfigError, match="--columns: unknown key 'alpha'; did you mean 'dirichlet_alpha'"):
        study_of(runs, columns=["alpha"])
    with pytest.raises(ConfigError, match="is in the rows and in the columns"):
        study_of(runs, rows=["mu"], columns=["method"])
    with pytest.raises(ConfigError, match=r"--columns seed: seeds, names .* compare chooses them by --only seed=VALUE"):
        study_of(runs, columns=["method", "seed"])


def test_a_short_name_of_several_keys_is_asked_for_again(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, *((name, {"scenario": {"a": {"size": 1}, "b": {"size": name}}}) for name in ("x", "y")))
    with pytest.raises(
        ConfigError, match=r"--rows size: may be scenario\.a\.size, scenario\.b\.size; write more of it"
    ):
        study_of(runs, rows=["size"])
    assert study_of(runs, rows=["b.size"]).layout.rows == ("size=x", "size=y")


def test_one_configuration_under_two_names_has_two_rows(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, ("a", skewed(0.1)), ("b", skewed(0.1)), ("c", skewed(1.0)))
    layout = study_of(runs).layout
    assert [len(world.cells) for world in layout.worlds] == [2, 1] and len(set(layout.rows)) == len(layout.rows) == 3


def test_settings_of_one_name_are_numbered(tmp_path: Path) -> None:
    """Where their seeds are not the same, they are not told apart by their folders."""
    trials = ("same", {"seed": 0, "method": {"mu": 1.0}}), ("same", {"seed": 1, "method": {"mu": 0.1}}), ("other", {})
    assert [setting.label for setting in group_settings(runs_of(tmp_path, *trials))] == [
        "same (1)",
        "same (2)",
        "other",
    ]


def test_runs_are_chosen_by_keys_methods_and_names(tmp_path: Path) -> None:
    runs = runs_of(
        tmp_path, ("a", skewed(0.1, name="fedavg")), ("b", skewed(1.0, name="fedprox")), ("c", skewed(1.0, name="moon"))
    )

    def chosen(*conditions: str) -> list[str]:
        return [run.label for run in only_those(runs, conditions)]

    assert chosen("dirichlet_alpha=1") == chosen("scenario.partition.dirichlet_alpha=1.0") == ["b", "c"]
    assert chosen("method=FedAvg,moon") == ["a", "c"] and chosen("name=b") == ["b"]
    assert chosen("dirichlet_alpha=1", "method=fedprox") == ["b"] and chosen("seed=0", "status=finished") == list("abc")
    with pytest.raises(ConfigError, match="no run is left; method is FedAvg, FedProx, MOON"):
        chosen("method=FedAv")
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        chosen("method")
    runs = runs_of(tmp_path / "more", ("d", {}), ("e", {"method": {"mu": 0.1}}))
    with pytest.raises(ConfigError, match=r"no run is left; mu is 0\.1, not there$"):
        chosen("mu=1")


def test_what_only_a_replay_knows_is_said_so_where_runs_are_sorted_by_it(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, ("a", {}))
    with pytest.raises(ConfigError, match="--sort energy: only a replay knows it"):
        order_of(runs, runs, "energy")


def test_runs_and_settings_are_ordered_by_figures_and_keys(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, ("a", skewed(10.0)), ("b", skewed(9.0)), ("c", skewed(0.1)))
    settings = group_settings(runs)
    for members in (runs, settings):
        assert order_of(members, runs, "acc") == [2, 1, 0] and order_of(members, runs, "-acc") == [0, 1, 2]
        assert order_of(members, runs, "bytes") == [0, 1, 2]  # all alike
        assert order_of(members, runs, "dirichlet_alpha") == [2, 1, 0]  # by size, not by letters
        assert order_of(members, runs, "-name") == [2, 1, 0]
    with pytest.raises(ConfigError, match="--sort: unknown key 'accurcy'; did you mean 'accuracy'"):
        order_of(runs, runs, "accurcy")


def test_what_tasks_measure_is_no_part_of_a_worlds_name() -> None:
    measured = [("classification", "accuracy"), ("regression", "rmse"), ("next_token", "perplexity")]
    flats = [flat_config({"scenario": {"task": {"kind": k, "metrics": [{"name": name}]}}}) for k, name in measured]
    assert config_table(flats).differing == ("scenario.task.kind",)
