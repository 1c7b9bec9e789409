from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from fedsweep.catalog import resolve
from fedsweep.config import load_config, yaml12
from fedsweep.config.load import check_key, file_schema
from fedsweep.config.presets import list_presets
from fedsweep.errors import ConfigError, unknown_name


def refused(given: dict[str, Any], *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(given, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert "pydantic" not in message
    return message


def test_override_beats_file_and_file_beats_default(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("training: {rounds: 7, batch_size: 3}\n")
    training = load_config(path, ["training.rounds=9"]).training
    assert (training.rounds, training.batch_size, training.local_epochs) == (9, 3, 1)


def test_component_with_a_name_takes_its_own_defaults() -> None:
    given = {"training": {"optimizer": {"name": "adam"}}, "scenario": {"partition": {"kind": "iid"}}}
    config = load_config(given)
    assert config.training.optimizer.lr == 1e-3
    assert config.scenario.partition.parameters == {}


def test_component_without_a_name_joins_the_default() -> None:
    overrides = [
        "scenario.partition.dirichlet_alpha=0.1",
        "training.optimizer={lr: 0.2}",
        "method.mu=1",
        "model.width=3",
    ]
    config = load_config({}, overrides)
    assert config.scenario.partition.parameters == {"dirichlet_alpha": 0.1, "min_samples": 5}
    assert (config.training.optimizer.name, config.training.optimizer.lr) == ("sgd", 0.2)
    assert config.method == {"name": "fedavg", "mu": 1}
    assert (config.model.name, config.model.parameters) == ("mlp", {"width": 3})


def test_changed_name_of_a_default_component_drops_the_default_parameters() -> None:
    assert load_config({}, ["training.optimizer.name=adam"]).training.optimizer.lr == 1e-3
    assert load_config({}, ["scenario.partition.kind=iid"]).scenario.partition.parameters == {}


def test_given_key_displaces_the_default_of_the_one_it_excludes() -> None:
    training = load_config({"training": {"cohort_size": 4, "local_steps": 8}}).training
    assert (training.cohort_fraction, training.cohort_size) == (None, 4)
    assert (training.local_epochs, training.local_steps) == (None, 8)


@pytest.mark.parametrize(
    ("first", "second"), [("cohort_fraction=0.5", "cohort_size=4"), ("local_epochs=1", "local_steps=8")]
)
def test_two_keys_that_exclude_each_other_are_an_error(first: str, second: str) -> None:
    message = refused({}, f"training.{first}", f"training.{second}")
    assert first in message and second in message
    assert "exclude each other" in message


def test_null_takes_an_excluding_key_back() -> None:
    given = {"training": {"cohort_fraction": 0.2}}
    training = load_config(given, ["training.cohort_fraction=null", "training.cohort_size=4"]).training
    assert (training.cohort_fraction, training.cohort_size) == (None, 4)
    assert "both are null" in refused(given, "training.cohort_fraction=null")


@pytest.mark.parametrize(
    ("override", "key", "near"),
    [
        ("training.roundz=3", "training.roundz", "training.rounds"),
        ("trainning={rounds: 3}", "trainning", "training"),
        ("rounds=3", "rounds", "training.rounds"),
        ("scenario.server_data={proxy: {per_clas: 3}}", "scenario.server_data.proxy.per_clas", "per_class"),
        ("training.optimizer={name: sgd, momentun: 0.9}", "training.optimizer.momentun", "training.optimizer.momentum"),
        ("training.local_epochs={rang: [3, 5]}", "training.local_epochs.rang", "training.local_epochs.range"),
        ("sweep.space.seed={grdi: [1]}", "sweep.space.seed.grdi", "sweep.space.seed.grid"),
        ("runtime.gpu_per_client=1", "runtime.gpu_per_client", "runtime.gpus_per_client"),
    ],
)
def test_unknown_key_is_an_error_that_names_it_in_full_and_the_nearest(override: str, key: str, near: str) -> None:
    message = refused({}, override)
    assert f"unknown key '{key}'" in message
    assert "did you mean" in message and near in message.split("(known")[0]


def test_known_keys_are_those_of_the_component_that_is_meant() -> None:
    assert "square_decay" not in refused({}, "training.optimizer={name: sgd, decay: 1}")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("training.rounds=ten", ("training.rounds", "an integer >= 1", "'ten'")),
        ("training.rounds=0", ("training.rounds", "an integer >= 1", "0")),
        ("training.rounds=2.5", ("training.rounds", "an integer", "2.5")),
        ("training.rounds=true", ("training.rounds", "an integer", "true")),
        ("training.rounds=null", ("training.rounds", "an integer", "null")),
        ("seed=-1", ("seed", ">= 0", "-1")),
        ("training.local_epochs=0", ("training.local_epochs", "an integer >= 1 or a mapping with range", "0")),
        ("training.local_epochs={range: [3]}", ("training.local_epochs.range", "a list of 2", "[3]")),
        ("training.local_epochs={range: [0, 3]}", ("training.local_epochs.range.0", "an integer >= 1", "0")),
        ("training.batch_size={range: [5, 3]}", ("training.batch_size", "swap them")),
        ("training.cohort_fraction=1.5", ("training.cohort_fraction", "> 0 and <= 1", "1.5")),
        ("training.optimizer={name: adm}", ("training.optimizer.name", "'adm'", "'adam'")),
        ("training.optimizer.lr=-1", ("training.optimizer.lr", "a number > 0", "-1")),
        ("training.optimizer.lr=.inf", ("training.optimizer.lr", "a number > 0", "inf")),
        ("training.optimizer={nesterov: true}", ("nesterov needs momentum > 0",)),
        ("training.optimizer=sgd", ("training.optimizer", "a mapping with name", "'sgd'")),
        ("training.schedule=5", ("training.schedule", "text that is not empty or a mapping with kind", "5")),
        ("training.schedule={floor: 1}", ("training.schedule.kind is missing",)),
        ("training.optimizer_state=rest", ("training.optimizer_state", "'rest'", "'reset'")),
        ("training.stop.target_accuracy=2", ("training.stop.target_accuracy", "<= 1", "2")),
        ("training=5", ("training", "a mapping with rounds", "5")),
        ("training.cohort_size=40", ("training.cohort_size=40", "scenario.clients=20")),
        ("scenario.server_data.validation=1", ("scenario.server_data.validation", ">= 0 and < 1", "1")),
        (
            "scenario.server_data.proxy={labelled: true}",
            ("scenario.server_data.proxy", "{per_class: N}", "per_class=None"),
        ),
        ("scenario.server_data.proxy={per_class: 1, samples: 2}", ("scenario.server_data.proxy", "samples=2")),
        ("scenario.drift={speed: 1}", ("scenario.drift.kind is missing",)),
        ("scenario.partition=iid", ("scenario.partition", "a mapping with kind", "'iid'")),
        ("runtime.backend=rai", ("runtime.backend", "'rai'", "'ray'")),
        ("runtime.executor=vmap", ("runtime.executor", "'vmap'", "loop")),
        ("runtime.client_actors=many", ("runtime.client_actors", "'auto' or an integer >= 1", "'many'")),
        ("runtime={backend: local, address: auto}", ("address means Ray", "backend=local")),
        ("name=a/b", ("name", "without slashes", "'a/b'")),
        ("method={name: a, merge: [{name: b}]}", ("method", "exactly one of name and merge")),
        ("method={merge: [fedavg]}", ("method", "mapping with a name", "'fedavg'")),
        ("method={merge: []}", ("method", "list of methods")),
        ("sweep.space.seed={grid: [1], choice: [2]}", ("sweep.space.seed", "exactly one", "grid and choice")),
        ("sweep.space.seed={}", ("sweep.space.seed", "exactly one", "none")),
        ("sweep.space.seed={grid: []}", ("sweep.space.seed.grid", "a list of at least 1", "[]")),
        ("sweep.space.seed={randint: [3, 3]}", ("sweep.space.seed", "low < high", "[3, 3]")),
        ("sweep.space.method.mu={loguniform: [0, 1]}", ("sweep.space.method.mu", "low > 0")),
        ("sweep.space.sweep.samples={grid: [1]}", ("sweep can't vary its own section",)),
        ("sweep.space.training.ronds={grid: [1]}", ("'training.ronds'", "'training.rounds'")),
        ("sweep={metric: [a, b]}", ("mode must list max or min for each of the 2 metrics",)),
        ("sweep={mode: [max]}", ("metric must be one too",)),
        ("sweep.scheduler=hyperband", ("sweep.scheduler", "'hyperband'", "asha")),
    ],
)
def test_wrong_value_is_an_error_that_names_key_value_and_what_is_allowed(
    override: str, parts: tuple[str, ...]
) -> None:
    message = refused({}, override)
    for part in parts:
        assert part in message


@pytest.mark.parametrize("share", [0, 0.5, 0.25, 0.3333, 0.33, 1 / 3, 0.1666, 0.1, 0.01, 1, 2, 8.0])
def test_share_of_a_gpu_may_be_one_over_k_or_whole(share: float) -> None:
    assert load_config({"runtime": {"gpus_per_client": share}}).runtime.gpus_per_client == share


@pytest.mark.parametrize(
    ("share", "near"),
    [
        (0.6, "0.5 and 1"),
        (0.4, "0.3333 and 0.5"),
        (0.1667, "0.1666 and 0.2"),
        (1.5, "1 and 2"),
        (0.99, None),
        (0.9, "0.5 and 1"),
        (5e-324, "and 0.0001"),
    ],
)
def test_other_shares_of_a_gpu_are_errors_with_the_nearest(share: float, near: str | None) -> None:
    if near is None:
        assert load_config({"runtime": {"gpus_per_server": share}}).runtime.gpus_per_server == share
    else:
        assert near in refused({"runtime": {"gpus_per_server": share}})


BYTE_COUNTS = ("training.stop.total_bytes", "sweep.budget.total_bytes", "scenario.budgets.total_bytes")


@pytest.mark.parametrize("key", BYTE_COUNTS)
@pytest.mark.parametrize("size", ["2e9", "2000000000", "2 GB", "2GB", "2000 MB", "0.002e3 GB", "2e9 B"])
def test_bytes_are_written_as_a_number_or_with_a_unit(key: str, size: str) -> None:
    plan = resolve(load_config({"sweep": {"space": {"seed": {"grid": [1]}}}}, [f"{key}={size}"])).tree()
    for part in key.split("."):
        plan = plan[part]
    assert plan == 2_000_000_000 and isinstance(plan, int)


@pytest.mark.parametrize("key", BYTE_COUNTS)
@pytest.mark.parametrize("size", ["2 gb", "lots", "-1", "0.2 B", "2.5", ".inf", "9" * 400 + " B"])
def test_other_amounts_of_bytes_are_one_error(key: str, size: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}.*(one with a unit: 50 MB|an integer >= 1 or null|finite), but got "):
        resolve(load_config({"sweep": {"space": {"seed": {"grid": [1]}}}}, [f"{key}={size}"]))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "this is empty"),
        ("- a\n- b\n", "this is a list"),
        ("hello", "this is a str"),
        ("a: [1\n", "line 2"),
        ("seed: 1\nseed: 2\n", "line 2: the key 'seed' is given twice"),
    ],
)
def test_file_that_is_no_mapping_is_an_error_with_file_and_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(path) in str(caught.value) and ", line " in str(caught.value)
    assert reason in str(caught.value)


def test_missing_file_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"no file 'nowhere\.yaml' is there; unknown preset"):
        load_config("nowhere.yaml")
    with pytest.raises(ConfigError, match=r"no file 'x{5000}' is there"):
        load_config("x" * 5000)


def test_folder_is_an_error_that_points_at_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a folder; give the YAML file in it, e\.g\. .*config\.yaml"):
        load_config(tmp_path)


def test_mapping_may_hold_paths_and_tuples_but_no_objects() -> None:
    config = load_config({"scenario": {"root": Path("/data")}, "method": {"name": "x", "levels": (1, 2)}})
    assert config.scenario.root == "/data"
    assert config.method["levels"] == [1, 2]
    assert "method.mu must be text, number" in refused({"method": {"name": "x", "mu": object()}})
    assert "has the key 3" in refused({"training": {3: 4}})


def test_numbers_of_numpy_are_numbers() -> None:
    """So loops over ``np.arange`` and ``np.logspace`` need no conversion; files and hashes are of plain ones."""
    rates, clients = np.logspace(-2, -1, 2), np.arange(5, 7)
    own = load_config({"scenario": {"clients": clients[0]}, "training": {"optimizer": {"lr": rates[0]}}})
    plain = load_config({"scenario": {"clients": 5}, "training": {"optimizer": {"lr": 0.01}}})
    assert own == plain and own.hash() == plain.hash() and type(own.given["scenario"]["clients"]) is int
    with pytest.raises(ConfigError, match=r"scenario\.clients must be an integer .*, but got 5\.5"):
        load_config({"scenario": {"clients": np.float32(5.5)}})


def test_given_is_what_the_user_gave() -> None:
    assert load_config({"seed": 1}, ["training.rounds=3"]).given == {"seed": 1, "training": {"rounds": 3}}


@pytest.mark.parametrize("key", ["seed", "training.optimizer.lr", "method.anything", "scenario.partition.x", "model"])
def test_known_and_open_keys_can_be_set(key: str) -> None:
    check_key(key)


@pytest.mark.parametrize(
    ("key", "near"), [("training.rond", "training.rounds"), ("scenario.clint", "scenario.clients")]
)
def test_key_that_can_not_be_set_is_an_error_with_the_nearest(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{near}'"):
        check_key(key)


def test_resolve_fills_in_the_parameters_of_what_is_named() -> None:
    config = load_config({"scenario": {"partition": {"kind": "dirichlet", "dirichlet_alpha": 1}}})
    resolved = resolve(config)
    assert resolved.scenario.partition.parameters == {
        "dirichlet_alpha": 1.0,
        "min_samples": 5,
        "max_draws": 1000,
        "repair": False,
    }
    assert resolved.method == {"name": "fedavg"}
    assert resolved.given == config.given
    assert resolve(resolved) == resolved == resolve(load_config(resolved.tree()))


def test_resolve_names_the_unknown_parameter_and_its_section() -> None:
    config = load_config({}, ["scenario.partition.dirichlet_alhpa=1"])
    with pytest.raises(ConfigError, match=r"scenario\.partition dirichlet: unknown parameter 'dirichlet_alhpa'"):
        resolve(config)


@pytest.mark.parametrize(
    ("override", "way_out"),
    [
        ("method=fedprox", "method must be a mapping, but got 'fedprox'; write method={name: fedprox}"),
        ("scenario.partition=iid", "write scenario.partition={kind: iid}"),
        ("seed=[0, 1]", "several seeds are run by fedsweep run --seeds"),
    ],
)
def test_what_can_be_understood_is_shown_in_the_right_form(override: str, way_out: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(way_out)):
        load_config({}, [override])


def test_a_key_of_another_variant_is_not_what_was_meant() -> None:
    with pytest.raises(ConfigError) as refused:
        load_config({}, ["training.optimizer={name: adam, lr: 0.01, momentum: 0.9}"])
    assert "unknown key 'training.optimizer.momentum'" in str(refused.value)
    assert "did you mean 'training.optimizer.momentum'" not in str(refused.value)


def test_of_many_known_names_the_nearest_are_shown() -> None:
    known = ["training.optimizer.lr", *(f"training.key{n}" for n in range(100))]
    said = unknown_name("key", "learning_rate", known)
    assert said.startswith("unknown key 'learning_rate'; did you mean 'training.optimizer.lr'? (known: training.opt")
    assert len(said) < 200 and said.endswith(" more)")
    assert unknown_name("dataset", "CIFAR10", ["cifar10", "cifar100"]) == (
        "unknown dataset 'CIFAR10'; did you mean 'cifar10'? (known: cifar10, cifar100)"
    )


def test_editors_schema_admits_every_preset_and_no_unknown_key() -> None:
    schema = Draft202012Validator(file_schema())
    trees = {preset.name: yaml12.read(preset.path) for preset in list_presets()}
    assert trees and [name for name, tree in trees.items() if not schema.is_valid(tree)] == []
    assert not schema.is_valid({"training": {"round": 3}}) and not schema.is_valid({"training": {"rounds": "3"}})


@pytest.mark.parametrize(
    "tree",
    [
        {"scenario": {"partition": {"dirichlet_alpha": 0.1}, "budgets": {"total_bytes": "2 GB"}}},
        {"model": {"hidden_width": 5}, "training": {"optimizer": {"lr": 0.1}, "stop": {"total_bytes": "2 GB"}}},
    ],
)
def test_editors_schema_admits_what_is_laid_over_defaults(tree: dict[str, Any]) -> None:
    load_config(tree)
    assert Draft202012Validator(file_schema()).is_valid(tree)
