from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsweep.config import yaml12
from fedsweep.errors import ConfigError


def parse(text: str) -> object:
    return yaml12.parse(text, source="here")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("1.5e+3", 1500.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("-.inf", -math.inf),
        ("12", 12),
        ("-3", -3),
        ("+3", 3),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
    ],
)
def test_core_schema_scalars_have_the_type_of_yaml_1_2(text: str, value: object) -> None:
    found = parse(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "text", ["yes", "no", "on", "off", "y", "N", "1:30", "1_000", "2024-01-31", "0b11", "=", "<<", "1e", "0o8", "tRue"]
)
def test_what_only_yaml_1_1_converts_stays_text(text: str) -> None:
    assert parse(text) == text


def test_nan_is_a_number() -> None:
    found = parse(".nan")
    assert isinstance(found, float) and math.isnan(found)


def test_duplicate_key_is_an_error_that_names_key_and_line() -> None:
    with pytest.raises(ConfigError, match=r"here, line 3: the key 'rounds' is given twice"):
        parse("training:\n  rounds: 1\n  rounds: 2\n")


def test_the_key_by_which_yaml_1_1_merges_is_an_error_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match=r"here, line 2: '<<' is of YAML 1.1; .* extends: '#x-NAME'"):
        parse("a: &a {b: 1}\nc: {<<: *a}\n")


def test_key_that_is_no_text_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"here, line 1: keys are text, but got 1; put it in quotes"):
        parse("1: x")


@pytest.mark.parametrize(
    "text", ["a: [1", "a: b: c", "\tx: 1", "a: 1\n---\nb: 2", "!!python/object:os.x {}", "&a [*a]"]
)
def test_what_is_not_plain_yaml_is_an_error_with_its_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^here, line \d+: "):
        parse(text)


def test_endless_nesting_is_an_error_and_no_crash() -> None:
    with pytest.raises(ConfigError, match="more than 50 levels"):
        parse("[" * 5000)


def test_anchors_are_copied() -> None:
    assert parse("a: &x {b: 1}\nc: *x") == {"a": {"b": 1}, "c": {"b": 1}}


def test_a_file_that_is_read_again_gives_a_tree_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: {b: [1]}\n")
    yaml12.read(tmp_path / "a.yaml")["a"]["b"].append(2)
    assert yaml12.read(tmp_path / "a.yaml") == {"a": {"b": [1]}}
    (tmp_path / "a.yaml").write_text("a: {b: [3]}\n")
    assert yaml12.read(tmp_path / "a.yaml") == {"a": {"b": [3]}}


@pytest.mark.parametrize(("content", "reason"), [(b"\xff\xfe\x00", "UTF-8"), (None, "no such file")])
def test_unreadable_file_is_an_error_that_names_it(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "a.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        yaml12.read(path)
    assert str(path) in str(caught.value)


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=("Cs",)))
    | st.sampled_from(["1e-3", "no", "0o7", "1:30", "null", "~", "", "- a", "{", "#", "2024-01-01", ".inf", "0x1"])
)
keys = st.text(st.characters(exclude_categories=("Cs",)))
trees = st.recursive(scalars, lambda below: st.lists(below, max_size=4) | st.dictionaries(keys, below, max_size=4))


@settings(deadline=None, max_examples=150)
@given(trees)
def test_dump_is_read_back_as_the_same_values(tree: object) -> None:
    def typed(value: object) -> object:
        if isinstance(value, dict):
            return {key: typed(item) for key, item in value.items()}
        return [typed(item) for item in value] if isinstance(value, list) else (type(value), value)

    assert typed(parse(yaml12.dump(tree))) == typed(tree)


def test_dump_writes_tuples_as_lists_and_repeated_values_in_full() -> None:
    shared = [1, 2]
    assert yaml12.dump({"a": (1, 2), "b": {"c": shared, "d": shared}}) == "a: [1, 2]\nb:\n  c: [1, 2]\n  d: [1, 2]\n"


@pytest.mark.parametrize("text", ["a:\n\tb: 1", "a: 1\n\tb: 1"])
def test_a_tab_is_told_as_such(text: str) -> None:
    with pytest.raises(ConfigError, match=r"here, line 2: .* YAML is indented with spaces, not with tabs"):
        parse(text)
