"""A recorded scenario: who was there and with which classes, round by round.

With it another method, or another program, faces exactly the presence and the drift of an earlier run, although
presence depends on how training went. The file is plain JSON and is checked when read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, cast

from annotated_types import Ge, Lt

from fedsweep.errors import ConfigError, DataError
from fedsweep.parameters.ranges import Count, check_value
from fedsweep.world.spec_checks import parse_document, read_text

TRACE_FORMAT = "fedsweep-scenario"
Pool = Literal["partition", "all"]


@dataclass(frozen=True, kw_only=True)
class ScenarioTrace:
    """Presence and class sets of a number of rounds.

    Attributes:
        num_clients: N; ids are below it.
        num_classes: C; classes are below it.
        pool: What the class sets filter: clients' own samples, or the whole training set.
        present: For each round, the clients that were there, ascending.
        class_sets: For each round, each client's classes, ascending; a client that is not named has all classes.
    """

    num_clients: int
    num_classes: int
    pool: Pool = "partition"
    present: tuple[tuple[int, ...], ...] = ()
    class_sets: tuple[Mapping[int, tuple[int, ...]], ...] = ()

    @property
    def num_rounds(self) -> int:
        """Rounds recorded; the first is round 1."""
        return len(self.present)

    def with_round(
        self, present: Sequence[int], class_sets: Mapping[int, Sequence[int]], *, source: str = ""
    ) -> ScenarioTrace:
        """Return the trace with one more round at its end.

        Args:
            present: Clients that were there.
            class_sets: Classes of clients under drift; empty without drift.
            source: Where they come from, for messages; empty: the round's number.

        Raises:
            DataError: An id or a class is outside its range or appears twice, or a class set is empty.
        """
        source = source or f"round {self.num_rounds + 1}"
        there = _ids(present, self.num_clients, f"{source}, present")
        _ids(sorted(class_sets), self.num_clients, f"{source}, clients with classes")
        sets = {
            client: _ids(classes, self.num_classes, f"{source}, classes of client {client}", empty=False)
            for client, classes in sorted(class_sets.items())
        }
        return replace(self, present=(*self.present, there), class_sets=(*self.class_sets, sets))

    def classes_of(self, client: int, round: int) -> tuple[int, ...]:
        """Return a client's classes in a recorded round (from 1); all where none are recorded."""
        return self.class_sets[round - 1].get(client, tuple(range(self.num_classes)))

    def to_json(self) -> str:
        """Return the trace as a JSON document, one line per round."""
        lines = [
            json.dumps({"present": there, "classes": {str(client): sets[client] for client in sorted(sets)}})
            for there, sets in zip(self.present, self.class_sets, strict=True)
        ]
        head = {
            "format": TRACE_FORMAT,
            "version": 1,
            "num_clients": self.num_clients,
            "num_classes": self.num_classes,
            "pool": self.pool,
        }
        return json.dumps(head)[:-1] + ', "rounds": [\n' + ",\n".join(lines) + "\n]}\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "the scenario file") -> ScenarioTrace:
        """Return the trace of a JSON document.

        Args:
            text: What :meth:`to_json` gave.
            source: Where it comes from, for messages.

        Raises:
            DataError: The document is damaged, or an id or a class is outside its range.
        """
        keys = ("num_clients", "num_classes", "pool", "rounds")
        document = parse_document(text, source=source, format=TRACE_FORMAT, keys=keys)
        for key in keys[:2]:
            check_value(f"{key} in {source}", document[key], Count, error=DataError)
        check_value(f"pool in {source}", document["pool"], Pool, error=DataError)
        num_clients, num_classes = (cast(int, document[key]) for key in keys[:2])
        rounds = document["rounds"]
        if not isinstance(rounds, list):
            raise DataError(f"`rounds` in {source} must be a list; write it anew")
        trace = cls(num_clients=num_clients, num_classes=num_classes, pool=cast(Pool, document["pool"]))
        places = [f"{source}, round {k}" for k in range(1, len(rounds) + 1)]
        parts = [
            trace.with_round(*_round_of(entry, place), source=place)
            for entry, place in zip(rounds, places, strict=True)
        ]
        return replace(
            trace,
            present=tuple(part.present[0] for part in parts),
            class_sets=tuple(part.class_sets[0] for part in parts),
        )


def load_trace(
    where: str,
    path: object,
    *,
    num_rounds: int,
    num_classes: int | None = None,
    num_clients: int | None = None,
) -> ScenarioTrace:
    """Read a trace and hold it against the run that will replay it.

    Args:
        where: The key that names the file.
        path: The file.
        num_rounds: Rounds that the run is planned for; the trace must have at least as many.
        num_classes: Classes of the run's data set, if known.
        num_clients: Clients of the run, if known.

    Raises:
        ConfigError: There is no such file, or it was recorded for another scenario.
        DataError: It is damaged.
    """
    trace = ScenarioTrace.from_json(read_text(where, path), source=f"{path} (named by `{where}`)")
    if trace.num_rounds < num_rounds:
        raise ConfigError(
            f"`{where}` must hold at least training.rounds={num_rounds} rounds, but {path} holds {trace.num_rounds}; "
            "lower training.rounds or record more rounds"
        )
    for word, wanted, actual in (
        ("classes", num_classes, trace.num_classes),
        ("clients", num_clients, trace.num_clients),
    ):
        if wanted is not None and wanted != actual:
            raise ConfigError(
                f"`{where}` must be recorded with as many {word} as the scenario has, {wanted}, but {path} has {actual}"
                "; take another file or change the scenario"
            )
    return trace


def _round_of(entry: object, source: str) -> tuple[Sequence[int], Mapping[int, Sequence[int]]]:
    if not isinstance(entry, dict) or set(entry) != {"present", "classes"} or not isinstance(entry["classes"], dict):
        raise DataError(f"{source} must have a list `present` and a mapping `classes`; write the file anew")
    try:
        return entry["present"], {int(client): classes for client, classes in entry["classes"].items()}
    except ValueError as error:
        raise DataError(f"{source} must name clients by number ({error}); write the file anew") from error


def _ids(values: object, limit: int, what: str, *, empty: bool = True) -> tuple[int, ...]:
    if not isinstance(values, list | tuple):
        raise DataError(f"{what} must be a list of numbers, but got {values!r}; write it anew")
    for one in values:
        check_value(what, one, Annotated[int, Ge(0), Lt(limit)], error=DataError)
    ids = sorted(map(int, values))
    if len(set(ids)) != len(ids) or not (ids or empty):
        raise DataError(f"{what} must name each number at most once and must not be empty, but got {values!r}")
    return tuple(ids)
