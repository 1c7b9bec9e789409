from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from fedsweep.config.signatures import ParameterRow, bind, describe
from fedsweep.errors import ConfigError


class Opaque:
    """Nothing that YAML could write."""


OPAQUE = Opaque()


def builder(
    *,
    mu: float,
    interval: int | Literal["a", "b"] = "a",
    rounds: tuple[int, ...] = (1, 2),
    name_of: str | None = None,
    share: Annotated[float, Field(gt=0, le=1)] = 0.5,
    helper: Opaque = OPAQUE,
) -> dict[str, Any]:
    """Builds something.

    Args:
        mu: How strong the pull is,
            >= 0.
        interval: Steps, or a level.
        rounds: When it happens.

    Returns:
        What it was called with.
    """
    return {"mu": mu}


@dataclass(frozen=True, kw_only=True)
class Thing:
    """A thing.

    Attributes:
        size: How large, > 0.
        flag: Whether it is on.
    """

    size: int
    flag: bool = True


def refused(params: dict[str, Any], target: Any = builder) -> str:
    with pytest.raises(ConfigError) as caught:
        bind("method", "x", target, params)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_filled_in_and_what_is_no_data_is_left_to_the_builder() -> None:
    assert bind("method", "x", builder, {"mu": 1}) == {
        "mu": 1.0,
        "interval": "a",
        "rounds": (1, 2),
        "name_of": None,
        "share": 0.5,
    }


def test_lists_become_tuples_where_the_annotation_says_so() -> None:
    assert bind("method", "x", builder, {"mu": 0.5, "rounds": [3]})["rounds"] == (3,)


def test_bound_parameters_bind_again_to_the_same() -> None:
    bound = bind("method", "x", builder, {"mu": 0.5, "rounds": [3], "interval": 4})
    assert bind("method", "x", builder, bound) == bound


def test_dataclass_is_a_builder_too() -> None:
    assert bind("model", "thing", Thing, {"size": 3}) == {"size": 3, "flag": True}


@pytest.mark.parametrize(
    ("params", "parts"),
    [
        ({"mu": 1, "intervall": 3}, ("method x", "'intervall'", "'interval'")),
        ({}, ("method.mu is missing", "a number")),
        ({"mu": "1"}, ("method.mu", "a number", "'1'")),
        ({"mu": True}, ("method.mu", "a number", "true")),
        ({"mu": float("nan")}, ("method.mu", "finite", "nan")),
        ({"mu": 1, "rounds": [1, float("inf")]}, ("rounds", "finite")),
        ({"mu": 1, "interval": "c"}, ("interval", "an integer or one of a, b", "'c'")),
        ({"mu": 1, "interval": 1.0}, ("interval", "1.0")),
        ({"mu": 1, "rounds": 3}, ("rounds", "a list, each an integer", "3")),
        ({"mu": 1, "share": 2}, ("share", "> 0 and <= 1", "2")),
        ({"mu": 1, "name_of": 3}, ("name_of", "text or null", "3")),
        ({"mu": None}, ("mu", "a number", "null")),
    ],
)
def test_wrong_parameter_is_an_error_that_names_it(params: dict[str, Any], parts: tuple[str, ...]) -> None:
    message = refused(params)
    for part in parts:
        assert part in message


def test_builder_without_parameters_says_so() -> None:
    assert refused({"mu": 1}, lambda: None) == "method x: has no parameter 'mu'"


def test_word_that_is_not_allowed_names_the_nearest() -> None:
    def chooser(*, rule: Literal["authors", "paper"] = "authors") -> None: ...

    assert "did you mean 'authors'" in refused({"rule": "author"}, chooser)


def test_what_the_caller_provides_cannot_be_set() -> None:
    def network(*, input_shape: tuple[int, ...], width: int = 8) -> None: ...

    assert bind("model", "n", network, {}, provided=("input_shape",)) == {"width": 8}
    with pytest.raises(ConfigError, match="unknown parameter 'input_shape'"):
        bind("model", "n", network, {"input_shape": [1]}, provided=("input_shape",))


def test_builder_that_takes_anything_gets_it_unchecked() -> None:
    def anything(**options: Any) -> None: ...

    assert bind("model", "n", anything, {"a": [1]}) == {"a": [1]}


def test_describe_lists_name_type_default_and_meaning() -> None:
    rows = {row.name: row for row in describe(builder)}
    assert list(rows) == ["mu", "interval", "rounds", "name_of", "share", "helper"]
    assert rows["mu"] == ParameterRow(name="mu", type="float", default=None, doc="How strong the pull is, >= 0.")
    assert rows["interval"] == ParameterRow(name="interval", type="int | a | b", default="a", doc="Steps, or a level.")
    assert rows["rounds"].default == "[1, 2]"
    assert (rows["name_of"].type, rows["name_of"].default, rows["name_of"].doc) == ("str | null", "null", "")
    assert describe(Thing)[1] == ParameterRow(name="flag", type="bool", default="true", doc="Whether it is on.")


def test_a_builder_without_a_hash_is_bound_as_any_other() -> None:
    @dataclass
    class Made:
        base: float

        def __call__(self, *, mu: float = 0.5) -> float:
            return self.base * mu

    assert Made.__hash__ is None
    assert bind("method", "made", Made(2.0), {"mu": 1.0}) == {"mu": 1.0}
