"""A method's card: what it holds, what the program adds, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest

from fedsweep.algorithms.registry import METHODS
from fedsweep.card import Card, Limit, card_of, values_counted, with_card
from fedsweep.catalog import method_builder
from fedsweep.cli import main
from fedsweep.commands.listing.method_description import limit_text, method_facts, refused_merges
from fedsweep.config.signatures import bind, describe
from fedsweep.errors import ConfigError
from fedsweep.method import FederatedMethod
from fedsweep.parameters.signature import parameters_of, takes
from fedsweep.testing import subject_of
from fedsweep.testing.checks import bytes_are_the_cards, passes_are_those_that_torch_counts

Show = Callable[..., str]


@dataclass(frozen=True, kw_only=True)
class Pull:
    """A part.

    Attributes:
        strength: How hard, above 0.
        sides: On how many
            sides.

    Source: nobody.
    """

    strength: float = 0.5
    sides: int | None = None


@with_card(Card())
@takes(Pull)
def pulled(*, name: str = "mine", **parameters: Any) -> tuple[str, Pull, dict[str, Any]]:
    """A method.

    Args:
        name: What it is called.
    """
    return name, Pull(**parameters_of(Pull, parameters)), parameters


def test_a_builder_takes_its_components_fields_with_types_defaults_and_meanings() -> None:
    rows = [(row.name, row.type, row.default, row.doc) for row in describe(pulled)]
    assert rows == [
        ("name", "str", "mine", "What it is called."),
        ("strength", "float", "0.5", "How hard, above 0."),
        ("sides", "int | null", "null", "On how many sides."),
    ]
    assert pulled(sides=2) == ("mine", Pull(sides=2), {"strength": 0.5, "sides": 2}) and card_of(pulled) == Card()
    with pytest.raises(TypeError, match="strenght"):
        pulled(strenght=1.0)
    with pytest.raises(ConfigError, match="sides must be an integer or null"):
        bind("method", "pulled", pulled, {"sides": "two"})


@dataclass(frozen=True, kw_only=True)
class Open:
    """A part.

    Attributes:
        size: How many.
        inner: Another part,
            which the builder makes.
    """

    size: int
    inner: Pull = Pull()


@takes(Open, but=("inner",))
def opened(**parameters: Any) -> dict[str, Any]:
    """A method."""
    return parameters


def test_what_a_component_leaves_open_is_null_and_what_the_builder_makes_is_no_parameter() -> None:
    rows = [(row.name, row.type, row.default, row.doc) for row in describe(opened)]
    assert rows == [("size", "int | null", "null", "How many.")]
    assert opened() == {"size": None} and parameters_of(Open, opened(size=3)) == {"size": 3}


@pytest.mark.parametrize("name", METHODS)
def test_every_registered_method_has_a_card(name: str) -> None:
    assert card_of(method_builder(name)) is not None, f"put @with_card(Card(...)) on the builder of {name}"


def moves(*, params: int, round: int) -> int:
    """A move."""
    return params if round > 1 else 0


def bits(*, classes: int, mode: str) -> Fraction:
    """Bits."""
    return Fraction(classes, 8) if mode == "wide" else Fraction(0)


def nothing_said(*, params: int) -> int:
    return params


def a_word(*, params: int) -> str:
    """No number."""
    return f"{params} values"


def test_functions_of_traffic_take_what_they_name_and_are_added_up() -> None:
    symbols = {"params": 10, "classes": 4, "round": 2, "mode": "wide", "rounds": 3}
    assert values_counted((moves, bits), symbols) == 10 + Fraction(1, 2)
    assert values_counted((moves, bits), {**symbols, "round": 1, "mode": "deep"}) == 0 == values_counted((), {})


def test_what_does_not_count_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"take values, params, .* and the .*, but bits takes 'mode'"):
        values_counted((bits,), {"classes": 1})
    with pytest.raises(ConfigError, match="a_word must count values that travel, but gave: "):
        values_counted((a_word,), {"params": 1})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="whose docstring says what travels, but 'nothing_said' has none"):
        Card(up=(nothing_said,))


def test_an_unknown_need_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"a card's needs are proxy, .*, but got 'money'"):
        Card(needs=("money",))  # type: ignore[arg-type]


def test_limits_in_words() -> None:
    assert limit_text(Limit(given={"mu": 0.0})) == "mu=0.0: the models of fedavg, bit for bit"
    near = Limit(of="fedprox", of_given={"mu": 1}, tolerance=1e-6, equal_sizes=True)
    said = "any parameters: the models of fedprox(mu=1), to 1e-06 where clients have equally many samples"
    assert limit_text(near) == said


def test_what_the_program_knows_is_not_on_the_card() -> None:
    """Parameters, seams, sources, readings, registration and restrictions come from the code."""
    facts = method_facts("scaffold")
    assert [row.name for row in facts.parameters] == ["server_learning_rate", "weighting", "rebuild"]
    assert list(facts.changes) == ["weighting", "terms", "refinements"]
    assert facts.source.startswith("Karimireddy et al. (2020): SCAFFOLD") and "Option II" in facts.source
    assert facts.needs[0].startswith("SGD on the clients") and "remember" in facts.needs[1]
    assert facts.sends[0] == (
        "up: The move of the client's control variate: `params`; nothing with `rebuild` (params: its params)"
    )
    assert any("with momentum" in text for text in facts.differs)
    assert "label counts (one for each class) up" in method_facts("fedgen").sends[-1]
    assert method_facts("fedsgd").changes == {"training section": "local_steps=1"}


def test_merges_that_are_refused_are_found_with_their_reason() -> None:
    method = method_builder("fedgen")()
    (reason,) = [why for why, names in refused_merges(method).items() if "fjord" in names]
    assert reason == "its LatentGenerator needs clients that train the whole model"
    assert "fedprox" not in [name for names in refused_merges(method).values() for name in names]


def test_show_prints_the_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "feddyn"]) == 0
    out = capsys.readouterr().out
    assert "limits:\n  strength=0.0: the models of fedavg, bit for bit\n" in out
    assert "figures that are not 0:\n  feddyn_offset_norm\n" in out
    assert "can't be merged with:\n" in out


def test_show_prints_the_card_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "abavg", "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["name"] == "abavg" and tree["live"] == ["abavg_accuracy_max"]
    assert tree["parameters"][0] | {"doc": ""} == {"name": "times_size", "type": "bool", "default": "false", "doc": ""}


def test_a_method_without_a_card_says_how_to_get_one() -> None:
    with pytest.raises(ConfigError, match=r"has no card; put @with_card\(Card\(\.\.\.\)\) on its builder"):
        method_facts("fedsweep.method:FederatedMethod")


def test_a_card_stays_with_its_builder() -> None:
    card = Card(up=(moves,))

    @with_card(card)
    def mine(*, pull: float = 1.0) -> FederatedMethod:
        return FederatedMethod(name="mine", source="")

    assert card_of(mine) is card and mine(pull=2.0).name == "mine"


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("fedmix", {"strength": 0.0}),
        ("fedad", {"base_rate": "hessian"}),
        ("fedad", {"base_rate": 0.0}),
        ("feddh", {"gradient": "explicit"}),
        ("feddh", {"gradient": "explicit", "learning_rate_v": 0.0, "learning_rate_b": 0.0}),
    ],
)
def test_the_bytes_are_the_cards_at_other_parameters(name: str, given: dict[str, Any]) -> None:
    subject = subject_of(name)
    bytes_are_the_cards(replace(subject, card=replace(subject.card, small={**subject.card.small, **given})))


def test_a_meta_step_without_adaptation_costs_what_fedavgs_does() -> None:
    """The query half's gradient, beside the support half's, without the difference of two more."""
    subject = subject_of("augfl")
    small = {**subject.card.small, "adaptation_rate": 0.0}
    passes_are_those_that_torch_counts(replace(subject, card=replace(subject.card, small=small)))
