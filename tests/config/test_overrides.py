from __future__ import annotations

from typing import Any

import pytest

from fedsweep.config.overrides import apply_overrides, parse_override, set_value
from fedsweep.errors import ConfigError


def test_value_is_yaml_1_2() -> None:
    assert parse_override("training.optimizer.lr=1e-3") == ("training.optimizer.lr", 1e-3)
    assert parse_override("method.high_interval=a") == ("method.high_interval", "a")
    assert parse_override("scenario.partition={kind: iid, x: [1, no]}") == (
        "scenario.partition",
        {"kind": "iid", "x": [1, "no"]},
    )


def test_only_the_first_equals_sign_separates() -> None:
    assert parse_override("name=a=b") == ("name", "a=b")


@pytest.mark.parametrize("text", ["training.rounds", "=3", "a..b=3", ".a=1", "a.=1", ""])
def test_malformed_override_is_an_error_that_shows_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match="--set takes KEY=VALUE"):
        parse_override(text)


def test_value_that_is_no_yaml_is_an_error_that_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"--set scenario\.partition, line \d"):
        parse_override("scenario.partition={kind: iid")


def test_bytes_that_the_locale_can_not_read_are_an_error_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"--set name: not text in this locale's encoding; set LC_ALL=C.UTF-8"):
        parse_override("name=gr\udcc3\udcb6sse")


def test_last_of_the_same_key_wins() -> None:
    assert apply_overrides({}, ["a.b=1", "a.b=2"]) == {"a": {"b": 2}}


def test_given_tree_is_not_changed() -> None:
    given = {"a": {"b": 1}}
    apply_overrides(given, ["a.b=2", "a.c=3"])
    assert given == {"a": {"b": 1}}


def test_mapping_without_selector_joins_and_with_one_replaces() -> None:
    given = {"method": {"name": "fedprox", "mu": 1}}
    assert apply_overrides(given, ["method={mu: 2}"]) == {"method": {"name": "fedprox", "mu": 2}}
    assert apply_overrides(given, ["method={name: fedavg}"]) == {"method": {"name": "fedavg"}}
    assert apply_overrides(given, ["method={merge: [{name: a}]}"]) == {"method": {"merge": [{"name": "a"}]}}


def test_nested_mapping_with_a_selector_replaces_the_nested_one() -> None:
    given = {"training": {"rounds": 3, "optimizer": {"name": "sgd", "momentum": 0.9}}}
    found = apply_overrides(given, ["training={optimizer: {name: adam}}"])
    assert found == {"training": {"rounds": 3, "optimizer": {"name": "adam"}}}


def test_null_becomes_a_mapping_where_a_key_is_set_below_it() -> None:
    found = apply_overrides({"scenario": {"devices": None}}, ["scenario.devices.profile=phone-lte"])
    assert found == {"scenario": {"devices": {"profile": "phone-lte"}}}


def test_key_below_a_scalar_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"training\.rounds\.x can't be set: training\.rounds is 3"):
        apply_overrides({"training": {"rounds": 3}}, ["training.rounds.x=1"])


def test_position_in_a_list_can_be_set() -> None:
    given = {"method": {"merge": [{"name": "a"}, {"name": "b"}]}}
    found = apply_overrides(given, ["method.merge.1.mu=0.1"])
    assert found["method"]["merge"] == [{"name": "a"}, {"name": "b", "mu": 0.1}]
    with pytest.raises(ConfigError, match=r"'2' is no position in a list of 2"):
        apply_overrides(given, ["method.merge.2.mu=0.1"])


@pytest.mark.parametrize(
    "text",
    ["sweep.space.method.mu={grid: [1]}", "sweep.space={method.mu: {grid: [1]}}", "sweep.space.method.mu.grid=[1]"],
)
def test_dotted_key_of_a_space_is_one_key(text: str) -> None:
    assert apply_overrides({}, [text]) == {"sweep": {"space": {"method.mu": {"grid": [1]}}}}


def test_values_of_a_key_of_one_word_are_set_as_those_of_a_dotted_one() -> None:
    given = {"sweep": {"space": {"seed": {"grid": [0, 1]}}}}
    assert apply_overrides(given, ["sweep.space.seed.grid=[2]"]) == {"sweep": {"space": {"seed": {"grid": [2]}}}}


def test_entry_of_a_space_is_replaced_and_others_stay() -> None:
    given = {"sweep": {"space": {"method.mu": {"grid": [1]}, "seed": {"grid": [0, 1]}}}}
    found = apply_overrides(given, ["sweep.space.method.mu={uniform: [0, 1]}"])
    assert found["sweep"]["space"] == {"method.mu": {"uniform": [0, 1]}, "seed": {"grid": [0, 1]}}


@pytest.mark.parametrize(
    "text",
    ["sweep.space.seed.randint=[0, 9]", "sweep.space.seed={randint: [0, 9]}", "sweep.space={seed: {randint: [0, 9]}}"],
)
def test_values_of_a_space_take_the_place_of_values_of_another_form(text: str) -> None:
    given = {"sweep": {"space": {"seed": {"grid": [0, 1]}, "method.mu": {"grid": [1]}}}}
    found = apply_overrides(given, [text])
    assert found["sweep"]["space"] == {"seed": {"randint": [0, 9]}, "method.mu": {"grid": [1]}}


def test_dotted_key_of_a_named_settings_space_of_a_point_and_of_a_planner_is_one_key() -> None:
    given = {"sweep": {"settings": [{"name": "A"}], "points": [{"seed": 1}]}}
    texts = [
        "sweep.settings.0.space.training.rounds={grid: [1]}",
        "sweep.settings.0.space.method.mu.uniform=[0, 1]",
        "sweep.points.0.training.rounds=3",
        "planner.choices.training.cohort_size=[2, 3]",
    ]
    assert apply_overrides(given, texts) == {
        "sweep": {
            "settings": [
                {"name": "A", "space": {"training.rounds": {"grid": [1]}, "method.mu": {"uniform": [0, 1]}}},
            ],
            "points": [{"seed": 1, "training.rounds": 3}],
        },
        "planner": {"choices": {"training.cohort_size": [2, 3]}},
    }


def test_parameter_of_a_schedule_that_is_a_word_can_be_set() -> None:
    found = apply_overrides({"training": {"schedule": "cosine"}}, ["training.schedule.floor=0.01"])
    assert found == {"training": {"schedule": {"kind": "cosine", "floor": 0.01}}}


def test_value_that_is_set_is_a_copy() -> None:
    tree: dict[str, Any] = {}
    value = {"kind": "iid"}
    set_value(tree, "scenario.partition", value=value)
    tree["scenario"]["partition"]["kind"] = "writer"
    assert value == {"kind": "iid"}
