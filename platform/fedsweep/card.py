"""A method's card: what is to be known of a method and can't be read off its builder and its components.

It stands on the builder, in the method's own file. What the program knows by itself (parameters and defaults, the
seams that differ, what is registered, the sources and readings of docstrings) is not repeated;
:mod:`fedsweep.commands.listing.method_description` joins the two, and ``fedsweep.testing.method_conforms`` holds a
method to its card.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeVar

from fedsweep.errors import ConfigError
from fedsweep.parameters.signature import checked

NEEDS: Mapping[str, str] = {
    "proxy": "samples on the server, labels not needed (`scenario.server_data.proxy`)",
    "labelled proxy": "labelled samples on the server (`scenario.server_data.proxy`, `labelled: true`)",
    "validation": "labelled validation data on the server (`scenario.server_data.validation`)",
    "classes": "samples of one class each (`scenario.task`: classification)",
    "evaluation": "a test after every round (`evaluation.every: 1`)",
    "devices": "simulated devices, whose times order what happens (`scenario.devices`)",
    "no drift": "clients whose samples stay the same (`scenario.drift: null`)",
    "features": "a network that says where its features and its head are",
    "graph": "clients that talk with each other (`scenario.topology`: ring, exponential, random, complete, file)",
    "tree": "edge servers (`scenario.topology`: tree)",
    "units": "a network that lists its units",
    "input shape": "a network that tells the shape of its inputs",
    "no batch norm": "a network without batch norm",
    "two clients": "at least two clients",
    "two samples": "clients of at least two samples",
}

SYMBOLS: Mapping[str, str] = {
    "values": "values of the client's model: params and float buffers",
    "params": "its params",
    "raw_params": "its params, as they are with any codec",
    "full_params": "params of the full model",
    "kernel_weights": "weights of its linear and convolutional layers",
    "input_values": "values of an input",
    "classes": "classes",
    "own_classes": "classes that the client has samples of",
    "features": "features that the head reads",
    "units": "units that the network lists",
    "samples": "the client's samples",
    "sizes": "all clients' samples",
    "is_largest": "the client has the most samples",
    "round": "the round, from 1",
    "rounds": "rounds of the run",
    "is_first": "the client's first round",
}

Traffic = Callable[..., "int | Fraction"]
"""Counts values that travel: a function of keyword parameters, each one of :data:`SYMBOLS` or of the method's."""


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
    """A method's description by its author.

    Traffic is counted by functions with the docstring that users read: values that travel beside the model, for one
    client in a round with one aggregation. They name as keyword parameters what they need of :data:`SYMBOLS` and of the
    method's parameters; several are added up.

    Attributes:
        title: The paper's name for the method, in tables and pictures.
        source: Authors, venue and year, in short; the module's docstring has all of it.
        merges: The methods that it is the merge of, if it is one.
        needs: Those of :data:`NEEDS` at the default parameters. A world without classes is refused for it; all else its
            components refuse by themselves, before the run.
        up: Values that a client sends.
        down: Values that it gets.
        setup_up: Values that each client sends once, before round 1.
        setup_down: Values that it gets for that.
        limits: Parameters with which the method is another one. One without parameters says that its models are
            always the other's: then its answers differ.
        live: Figures of a round that are not 0 where the method is at work.
        differs: Known differences to the paper, beyond those that docstrings have as ``Reading:``.
        small: Parameters with which it does its work in three rounds of a world of milliseconds.
        golden: The model after rounds 1, 2, ... of :func:`fedsweep.testing.golden_problem`, with ``golden_given``.
        golden_given: Parameters of the method there.

    Raises:
        ConfigError: A need is unknown, or a function of traffic has no docstring.
    """

    title: str = ""
    source: str = ""
    merges: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    up: tuple[Traffic, ...] = ()
    down: tuple[Traffic, ...] = ()
    setup_up: tuple[Traffic, ...] = ()
    setup_down: tuple[Traffic, ...] = ()
    limits: tuple[Limit, ...] = ()
    live: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    small: Mapping[str, Any] = field(default_factory=dict)
    golden: tuple[float, ...] = ()
    golden_given: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        unknown = [need for need in self.needs if need not in NEEDS]
        if unknown:
            raise ConfigError(f"a card's needs are {', '.join(NEEDS)}, but got {unknown[0]!r}")
        for count in (*self.up, *self.down, *self.setup_up, *self.setup_down):
            if not getattr(count, "__doc__", None):
                raise ConfigError(
                    "a card's traffic is counted by functions whose docstring says what travels, but"
                    f" {getattr(count, '__qualname__', count)!r} has none"
                )


def values_counted(counts: Iterable[Traffic], symbols: Mapping[str, Any]) -> Fraction:
    """Add up what a card's functions count.

    Args:
        counts: E.g. ``card.up``.
        symbols: Values of :data:`SYMBOLS` and of the method's parameters.

    Raises:
        ConfigError: A function needs something else, or fails.
    """
    return sum((_counted(count, symbols) for count in counts), Fraction(0))


def _counted(count: Traffic, symbols: Mapping[str, Any]) -> Fraction:
    names = inspect.signature(count).parameters
    if lacking := [name for name in names if name not in symbols]:
        raise ConfigError(
            f"a card's functions of traffic take {', '.join(SYMBOLS)} and the method's parameters, but"
            f" {count.__qualname__} takes {lacking[0]!r}"
        )
    try:
        return Fraction(count(**{name: symbols[name] for name in names}))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{count.__qualname__} must count values that travel, but gave: {error}") from error


_Builder = TypeVar("_Builder", bound=Callable[..., Any])


def with_card(card: Card) -> Callable[[_Builder], _Builder]:
    """Put a card on a method's builder, which from then on checks the ranges of its parameters."""

    def put(builder: _Builder) -> _Builder:
        built = checked("method")(builder)
        built.card = card  # type: ignore[attr-defined]
        return built

    return put


def card_of(builder: Callable[..., Any]) -> Card | None:
    """Return the card on a builder; None where there is none."""
    card = getattr(builder, "card", None)
    return card if isinstance(card, Card) else None
