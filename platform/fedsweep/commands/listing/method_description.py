"""The description of a method: from its card, and read off its builder and components."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedsweep.card import NEEDS, SYMBOLS, Card, Limit, card_of
from fedsweep.catalog import method_builder
from fedsweep.config.signatures import ParameterRow, describe, first_paragraph
from fedsweep.config.tables import TABLES
from fedsweep.errors import ConfigError, FedsweepError
from fedsweep.method import SEAMS, FederatedMethod, merge
from fedsweep.plugins import call_builder


@dataclass(frozen=True, kw_only=True)
class MethodFacts:
    """The facts of one method in ``fedsweep show`` and on the page of methods, at its default parameters.

    Attributes:
        name: As a configuration has it.
        summary: One line.
        source: Authors, year, title.
        changes: What differs from FedAvg: seam and what stands there, in words.
        sends: What travels beside the model, in words.
        needs: What it needs, in words.
        parameters: Its hyper-parameters.
        equations: Where in the source its components are.
        differs: Readings and known differences to the source.
        limits: Where it is another method, in words.
        refuses: Which methods it can't be merged with, and why.
        live: Figures that must not be 0.
    """

    name: str
    summary: str
    source: str
    changes: Mapping[str, str]
    sends: tuple[str, ...]
    needs: tuple[str, ...]
    parameters: tuple[ParameterRow, ...]
    equations: tuple[str, ...]
    differs: tuple[str, ...]
    limits: tuple[str, ...]
    refuses: Mapping[str, tuple[str, ...]]
    live: tuple[str, ...]

    def text(self) -> str:
        """Return the same for the terminal, without what ``fedsweep show`` has above it: summary, parameters."""
        parts = [
            ("changes", [f"{seam}: {what}" for seam, what in self.changes.items()]),
            ("sends beside the model", self.sends or ["nothing"]),
            ("needs", self.needs or ["nothing"]),
            ("limits", self.limits),
            ("can't be merged with", [f"{', '.join(names)} ({why})" for why, names in self.refuses.items()]),
            ("figures that are not 0", [", ".join(self.live)] if self.live else []),
            ("in the source", self.equations),
            ("readings and differences", self.differs),
        ]
        blocks = ["\n  ".join([f"{title}:", *lines]) for title, lines in parts if lines]
        return "\n".join(["", *blocks, f"source in full: {self.source}"])


def method_facts(name: str) -> MethodFacts:
    """Return what there is to say of a method.

    Args:
        name: A method, ``package.module:callable``, or an installed package's entry point.

    Raises:
        ConfigError: There is no such method, or it has no card.
    """
    builder = method_builder(name)
    card = card_of(builder)
    if card is None:
        raise ConfigError(f"method {name} has no card; put @with_card(Card(...)) on its builder")
    method: FederatedMethod = call_builder("method", name, builder, gives=FederatedMethod)
    components = list(_components(method))
    docs = [inspect.getdoc(builder) or "", *(inspect.getdoc(type(c)) or "" for c in components)]
    return MethodFacts(
        name=name,
        summary=first_paragraph(builder),
        source=_source(builder, method),
        changes=_changes(method),
        sends=tuple(_sends(card, method)),
        needs=tuple(_needs(card, method)),
        parameters=describe(builder),
        equations=tuple(dict.fromkeys(text for doc in docs for text in _texts_after(doc, "Source"))),
        differs=tuple(dict.fromkeys([*(text for doc in docs for text in _texts_after(doc, "Reading")), *card.differs])),
        limits=tuple(limit_text(limit) for limit in card.limits),
        refuses=refused_merges(method),
        live=card.live,
    )


def limit_text(limit: Limit) -> str:
    """Put a limit in words: ``mu=0: fedavg, bit for bit``."""
    parameters = ", ".join(f"{key}={value}" for key, value in limit.given.items()) or "any parameters"
    of = f"{limit.of}({', '.join(f'{key}={value}' for key, value in limit.of_given.items())})"
    near = f"to {limit.tolerance:g}" if limit.tolerance else "bit for bit"
    where = " where clients have equally many samples" if limit.equal_sizes else ""
    return f"{parameters}: the models of {of.removesuffix('()')}, {near}{where}"


def refused_merges(method: FederatedMethod) -> dict[str, tuple[str, ...]]:
    """Return the reasons why a method can't be merged with registered ones at their defaults, and which those are."""
    refused: dict[str, tuple[str, ...]] = {}
    for other in TABLES["method"].names():
        if other == method.name:
            continue
        try:
            merge(method, method_builder(other)())
        except ConfigError as error:
            reason = re.sub(r"^.*?: |( \(|, but |; ).*", "", str(error))
            refused[reason] = (*refused.get(reason, ()), other)
    return refused


def executors(builder: Callable[..., FederatedMethod]) -> str:
    """Return the executors that a method knows, in words; tried in milliseconds, with its card's small parameters."""
    from fedsweep.driver.run import one_thread

    card = card_of(builder)
    small = functools.partial(builder, **(card.small if card else {}))
    try:
        with one_thread():
            whole, uneven = _refused(small, local_steps=2), _refused(small, local_steps=None)
    except (FedsweepError, TypeError) as error:
        return f"loop (lanes can't be tried without more: {error})"
    if whole:
        return f"loop ({'; '.join(whole)})"
    return "loop, lanes" + (", the latter where all batches are whole" if uneven else "")


def _refused(builder: Callable[..., FederatedMethod], *, local_steps: int | None) -> tuple[str, ...]:
    from fedsweep.engine.forecast import lanes_refused
    from fedsweep.models.networks.chains import Mlp
    from fedsweep.testing import tiny_data, tiny_experiment

    images, labels = tiny_data()
    experiment = tiny_experiment(
        builder(),
        sizes=(6,) * 6,  # not a multiple of the batch size
        local_steps=local_steps,
        build=functools.partial(Mlp, input_shape=(1, 1, 6), num_classes=4, hidden_width=8),
        proxy=(images, None),
        validation=(images, labels),
    )
    return lanes_refused(experiment)


# -- what the program knows --------------------------------------------------------------------------------------


def _components(method: FederatedMethod) -> Iterator[Any]:
    """Return what differs from FedAvg, and the parts that such components hold."""
    for component in itertools.chain(*_own_parts(method).values()):
        yield component
        parts = (getattr(component, field.name) for field in dataclasses.fields(component))
        yield from (part for part in parts if dataclasses.is_dataclass(part))


def _own_parts(method: FederatedMethod) -> dict[str, tuple[Any, ...]]:
    """Return what differs from FedAvg, by seam."""
    plain = FederatedMethod(name="fedavg", source="")
    own = (seam for seam in SEAMS if getattr(method, seam) != getattr(plain, seam))
    return {seam: (getattr(method, seam),) for seam in own} | {"terms": method.terms, "refinements": method.refinements}


def _changes(method: FederatedMethod) -> dict[str, str]:
    components_of = {
        seam.replace("_", " "): "; ".join(f"{type(c).__name__}, {first_paragraph(type(c))}" for c in components)
        for seam, components in _own_parts(method).items()
        if components
    }
    settings = [f"{f.name}={getattr(method.settings, f.name)}" for f in dataclasses.fields(method.settings)]
    settings = [text for text in settings if not text.endswith("=None")]
    return components_of | ({"training section": ", ".join(settings)} if settings else {})


def _sends(card: Card, method: FederatedMethod) -> Iterator[str]:
    """Yield the card's traffic, and what is registered."""
    for where, counts in (
        ("up", card.up),
        ("down", card.down),
        ("up, once before round 1", card.setup_up),
        ("down, once before round 1", card.setup_down),
    ):
        for count in counts:
            names = inspect.signature(count).parameters
            legend = "; ".join(f"{name}: {SYMBOLS[name]}" for name in names if SYMBOLS.get(name, name) != name)
            text = " ".join((inspect.getdoc(count) or "").split())
            yield f"{where}: {text.rstrip('.')}" + (f" ({legend})" if legend else "")
    if method.submodels.cuts:
        yield "of the model each client's part alone, and which units it has where that is drawn"
    if method.registration or method.needs_share:
        at_start = ["label counts (one for each class) up"] if "label_counts" in method.registration else []
        at_start += ["the mean number of samples (1 value) down"] if method.needs_share else []
        yield f"at registration: {', '.join(at_start)}"


def _needs(card: Card, method: FederatedMethod) -> Iterator[str]:
    yield from (NEEDS[need] for need in card.needs)
    if method.needs_effective_steps:
        yield "SGD on the clients, with any momentum that begins with the round: moves are divided by effective steps"
    if any(term.stateful for term in method.terms):
        yield "clients that remember something between their rounds"
    if method.pacing.carries_work():
        yield "clients that never drop out: they keep work over a round's end"


def _source(builder: Callable[..., Any], method: FederatedMethod) -> str:
    """Return the builder's module's; what the method itself names where that has none."""
    module = sys.modules.get(builder.__module__) or importlib.import_module(builder.__module__)
    return " ".join(_texts_after(inspect.getdoc(module) or "", "Source")) or method.source


def _texts_after(docstring: str, word: str) -> list[str]:
    """Return the texts after ``Source:`` or ``Reading:`` in a docstring, each without the next one's."""
    texts = re.findall(rf"\b{word}: (.*?)(?=\s+(?:Source|Reading):|\n\s*\n|\Z)", docstring, flags=re.DOTALL)
    return [" ".join(text.split()).replace("``", "`") for text in texts]
