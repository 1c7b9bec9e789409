"""The method as a value: defaults, registration and the rules of merging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import pytest
from torch import Tensor

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl, dynamicsgd
from fedsweep.algorithms.fedavg import fedavg, fedsgd
from fedsweep.algorithms.fedprox import Proximal, fedprox
from fedsweep.components.aggregation import Refinement, Uniform
from fedsweep.components.base import Published, ServerComponent
from fedsweep.components.local import LocalTerm
from fedsweep.components.planning import FixedInterval
from fedsweep.errors import ConfigError
from fedsweep.method import FederatedMethod, MethodSettings, merge
from fedsweep.records import ClientUpdate, State, SyncContext


@dataclass(frozen=True, kw_only=True)
class Untouched(Refinement):
    """Changes nothing."""

    label: str

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        return vector, state

    def registration(self) -> tuple[str, ...]:
        return ("label_counts",)


def method(**fields: object) -> FederatedMethod:
    return FederatedMethod(name="mine", source="me", **fields)  # type: ignore[arg-type]


def test_fedavg_is_the_method_with_every_default() -> None:
    plain = fedavg()
    assert plain == FederatedMethod(name=plain.name, source=plain.source)


def test_methods_are_values() -> None:
    assert dynamicfl(high_interval=4) == dynamicfl(high_interval="b")
    assert dynamicfl(high_interval=4) != dynamicfl(high_interval=5)


def test_two_terms_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="names of their own"):
        method(terms=(Proximal(mu=1.0), Proximal(mu=2.0)))


def test_server_components_come_in_one_order_under_keys_of_their_own() -> None:
    named = list(method(refinements=(Untouched(label="a"), Untouched(label="b"))).server_components)
    keys = [key for key, _ in named]
    assert keys == [
        "selection",
        "submodels",
        "pacing",
        "weighting",
        "server_update",
        "refinement0",
        "refinement1",
        "evaluation",
    ]
    assert all(isinstance(component, ServerComponent) for _, component in named)


def test_registration_names_each_thing_once() -> None:
    assert fedavg().registration == ()
    assert method(refinements=(Untouched(label="a"), Untouched(label="b"))).registration == ("label_counts",)


class Learning(Untouched):
    """Learns from every aggregation."""

    def learn(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> State:
        return state


class Talking(Untouched):
    """May publish."""

    def publish(self, state: State) -> Mapping[str, Published]:
        return {}


class Late(Untouched):
    """Acts inside rounds."""

    when: ClassVar[Literal["always", "round_end"]] = "always"


class Sending(LocalTerm):
    """Sends with each update."""

    name = "sending"
    sends: ClassVar[bool] = True


@pytest.mark.parametrize(
    ("fields", "folds", "exchanges"),
    [
        ({}, True, ()),
        ({"refinements": (Untouched(label="a"),)}, True, ()),
        ({"refinements": (Learning(label="a"),)}, False, ()),
        ({"refinements": (Late(label="a"),)}, False, ()),
        ({"refinements": (Untouched(label="a"), Talking(label="b"))}, True, ("its Talking exchanges",)),
        ({"terms": (Sending(),)}, False, ("its term sending sends",)),
    ],
)
def test_what_follows_from_the_method_alone(fields: dict[str, object], folds: bool, exchanges: tuple[str, ...]) -> None:
    assert (method(**fields).folds, method(**fields).exchanges) == (folds, exchanges)


def test_merge_of_one_method_is_that_method() -> None:
    assert merge(fedprox(mu=0.5)) == fedprox(mu=0.5)


def test_merge_takes_what_differs_from_the_default_from_either_side() -> None:
    for merged in (merge(fedprox(mu=0.5), dynamicsgd()), merge(dynamicsgd(), fedprox(mu=0.5))):
        assert merged.terms == (Proximal(mu=0.5),)
        assert merged.pacing == FixedInterval(interval=1)
        assert merged.settings == MethodSettings(equal_steps=True)


def test_merge_with_fedavg_changes_only_the_name() -> None:
    merged = merge(fedavg(), dynamicsgd())
    assert merged.name == "fedavg+dynamicsgd"
    assert (merged.pacing, merged.settings) == (dynamicsgd().pacing, dynamicsgd().settings)


def test_merge_joins_terms_and_refinements_in_order() -> None:
    first = method(terms=(Proximal(mu=1.0, name="one"),), refinements=(Untouched(label="a"),))
    second = method(terms=(Proximal(mu=2.0, name="two"),), refinements=(Untouched(label="b"),))
    merged = merge(first, second)
    assert [term.name for term in merged.terms] == ["one", "two"]
    assert merged.refinements == (Untouched(label="a"), Untouched(label="b"))


def test_merge_of_equal_components_on_one_seam_is_allowed() -> None:
    assert merge(method(weighting=Uniform()), method(weighting=Uniform())).weighting == Uniform()


def test_merge_refuses_two_different_components_on_one_seam_and_names_them() -> None:
    with pytest.raises(ConfigError, match=r"dynamicsgd and dynamicfl .* pacing .*FixedInterval and TwoSpeed"):
        merge(dynamicsgd(), dynamicfl())


def test_merge_refuses_terms_of_one_name() -> None:
    with pytest.raises(ConfigError, match="names of their own"):
        merge(fedprox(mu=0.1), fedprox(mu=0.2))


def test_merge_refuses_settings_that_contradict() -> None:
    with pytest.raises(ConfigError, match="equal_steps=True and equal_steps=False"):
        merge(dynamicsgd(), method(settings=MethodSettings(equal_steps=False)))


def test_merge_of_three_keeps_all_and_names_the_clash() -> None:
    merged = merge(fedprox(), fedsgd(), method(weighting=Uniform()))
    assert merged.name == "fedprox+fedsgd+mine"
    assert merged.settings.local_steps == 1
    assert merged.weighting == Uniform()
    with pytest.raises(ConfigError, match="can't be merged"):
        merge(fedprox(), dynamicsgd(), dynamicfl())
