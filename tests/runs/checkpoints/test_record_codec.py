from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fedsweep.errors import DataError, InvariantError
from fedsweep.runs.checkpoints.record_codec import pack, unpack


@dataclass(frozen=True, kw_only=True)
class Inner:
    count: int
    names: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    vector: torch.Tensor
    inner: Mapping[int, Inner]
    state: Any = None
    rate: float = 0.5


@dataclass(frozen=True)
class Odd:
    value: set[int]


def outer() -> Outer:
    return Outer(vector=torch.zeros(1), inner={3: Inner(count=1, names=("a",)), 1: Inner(count=2)}, state=[{"x": 1}])


def test_a_record_becomes_a_tree_of_its_fields() -> None:
    tree = pack(Outer, outer())
    assert tree["inner"] == {3: {"count": 1, "names": ("a",)}, 1: {"count": 2, "names": None}}
    assert tree["state"] is not None and list(tree) == ["vector", "inner", "state", "rate"]


def test_a_record_comes_back() -> None:
    loaded = unpack(Outer, pack(Outer, outer()), path="outer")
    assert loaded.inner == outer().inner and list(loaded.inner) == [3, 1] and loaded.state == [{"x": 1}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": "fast"}, r"outer\.rate must be of type float, but is a str"),
        ({"vector": [0.0]}, r"outer\.vector must be of type Tensor, but is a list"),
        ({"inner": []}, r"outer\.inner must be a dict, but is a list"),
        ({"inner": {"3": {}}}, r"the keys of outer\.inner must be of type int"),
        (
            {"inner": {3: {"count": True, "names": None}}},
            r"outer\.inner\[3\]\.count must be of type int, but is a bool",
        ),
        ({"inner": {3: {"count": 1, "names": ["a"]}}}, r"outer\.inner\[3\]\.names must be a tuple, but is a list"),
        ({"inner": {3: {"count": 1, "names": (1,)}}}, r"outer\.inner\[3\]\.names\[0\] must be of type str"),
        ({"more": 1}, r"outer must have the fields"),
    ],
)
def test_a_tree_that_does_not_fit_is_an_error_that_names_the_field(change: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        unpack(Outer, {**pack(Outer, outer()), **change}, path="outer")


def test_a_declared_type_that_nobody_planned_for_is_the_programmers_error() -> None:
    with pytest.raises(InvariantError, match="declared type"):
        unpack(Odd, {"value": 1}, path="odd")


@dataclass(frozen=True, kw_only=True)
class Grown:
    count: int
    rate: float = 0.5


def test_no_field_may_be_missing_or_unknown() -> None:
    assert unpack(Grown, {"count": 1, "rate": 0.25}, path="grown") == Grown(count=1, rate=0.25)
    for fields in ({"count": 1}, {"count": 1, "rate": 0.25, "more": 2}):
        with pytest.raises(DataError, match="grown must have the fields"):
            unpack(Grown, fields, path="grown")
