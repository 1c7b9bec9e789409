"""A method's card: what is to be known of a method and can't be read off its builder and its components.

It stands on the builder, in the method's own file. What the program knows by itself (parameters and defaults, the
seams that differ, what is registered, the sources and readings of docstrings) is not repeated;
:mod:`fedsweep.commands.parts.described` joins the two, and ``fedsweep.testing.method_conforms`` holds a method to its
card.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeVar

from fedsweep.errors import ConfigError

NEEDS: Mapping[str, str] = {
    "proxy": "samples on the server, labels not needed (`scenario.server_data.proxy`)",
    "labelled proxy": "labelled samples on the server (`scenario.server_data.proxy`, `labelled: true`)",
    "validation": "labelled validation data on the server (`scenario.server_data.validation`)",
    "evaluation": "a test after every round (`evaluation.every: 1`)",
    "devices": "simulated devices, whose times order what happens (`scenario.devices`)",
    "features": "a network that says where its features and its head are",
    "units": "a network that lists its units",
    "input shape": "a network that tells the shape of its inputs",
    "no batch norm": "a network without batch norm",
    "two samples": "clients of at least two samples",
}

SYMBOLS: Mapping[str, str] = {
    "W": "values of the client's model: params and float buffers",
    "P": "its params",
    "F": "params of the full model",
    "K": "weights of its linear and convolutional layers",
    "X": "values of an input",
    "C": "classes",
    "H": "classes that the client has samples of",
    "D": "features that the head reads",
    "U": "units that the network lists",
    "n": "the client's samples",
    "sizes": "all clients' samples",
    "largest": "whether it is the client with the most samples",
    "round": "the round, from 1",
    "rounds": "rounds of the run",
    "first": "whether it is the client's first round",
}

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "ceil": math.ceil,
    "max": max,
    "min": min,
    "sum": sum,
    "mask": lambda bits: Fraction(-(-bits // 8), 4),
}


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Parameters with which a method is another one.

    Attributes:
        given: The method's parameters.
        of: The other method.
        of_given: That one's parameters.
        tolerance: Greatest difference of two models' values; 0: they are equal bit for bit.
        equal_sizes: Only where all clients have equally many samples.
    """

    given: Mapping[str, Any] = field(default_factory=dict)
    of: str = "fedavg"
    of_given: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 0.0
    equal_sizes: bool = False


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a method's author says of it.

    Formulas are Python expressions in :data:`SYMBOLS` and the method's parameters, with ``ceil``, ``min``, ``max``,
    ``sum``, and ``mask(b)`` for b bits. They count values that travel beside the model, for one client in a round with
    one aggregation.

    Attributes:
        needs: Those of :data:`NEEDS` at the default parameters; a world without is refused before the run.
        up: Formula of what a client sends.
        down: Formula of what it gets.
        setup_up: Formula of what each client sends once, before round 1.
        setup_down: Formula of what it gets for that.
        limits: Parameters with which the method is another one. One without parameters says that its models are
            always the other's: then its answers differ.
        live: Figures of a round that are not 0 where the method is at work.
        differs: Known differences to the paper, beyond those that docstrings have as ``Reading:``.
        small: Parameters with which it does its work in three rounds of a world of milliseconds.
        golden: The model after rounds 1, 2, ... of :func:`fedsweep.testing.golden_problem`, with ``golden_given``.
        golden_given: Parameters of the method there.
    """

    needs: tuple[str, ...] = ()
    up: str = "0"
    down: str = "0"
    setup_up: str = "0"
    setup_down: str = "0"
    limits: tuple[Limit, ...] = ()
    live: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    small: Mapping[str, Any] = field(default_factory=dict)
    golden: tuple[float, ...] = ()
    golden_given: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check what can be checked without the method."""
        unknown = [need for need in self.needs if need not in NEEDS]
        if unknown:
            raise ConfigError(f"a card's needs are {', '.join(NEEDS)}, but got {unknown[0]!r}")

    def evaluate(self, formula: str, symbols: Mapping[str, Any]) -> Fraction:
        """How many values one of the card's formulas comes to.

        Args:
            formula: E.g. ``card.up``.
            symbols: Values of :data:`SYMBOLS` and of the method's parameters.

        Raises:
            ConfigError: It is no expression in these.
        """
        try:
            found = eval(formula, {"__builtins__": {}, **_FUNCTIONS, **symbols})
            return Fraction(found)
        except (NameError, SyntaxError, TypeError, ValueError) as error:
            raise ConfigError(
                f"a card's formula must be an expression in {', '.join(SYMBOLS)} and the method's parameters, but"
                f" {formula!r} is not: {error}"
            ) from error


_Builder = TypeVar("_Builder", bound=Callable[..., Any])


def with_card(card: Card) -> Callable[[_Builder], _Builder]:
    """A decorator that puts a card on a method's builder."""

    def put(builder: _Builder) -> _Builder:
        builder.card = card  # type: ignore[attr-defined]
        return builder

    return put


def card_of(builder: Callable[..., Any]) -> Card | None:
    """The card on a builder; None where there is none."""
    found = getattr(builder, "card", None)
    return found if isinstance(found, Card) else None
