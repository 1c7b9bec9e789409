"""The virtual clock: what a round costs when some clients are slow or vanish, and when a target was reached.

A straggler policy gets what every selected client would have done and answers with the round's length and with the
clients whose updates count. Work that is thrown away still costs its FLOPs and bytes: the caller meters what was
selected, and aggregates what survived. With no survivor the model stays and the clock advances all the same.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from fedsweep.parameters.ranges import AtLeastOne, Checked, CountOrZero, Positive


@dataclass(frozen=True, kw_only=True)
class ClientRun:
    """A selected client's round as it would be if nobody cut it short.

    Attributes:
        client: Its id.
        duration_s: T_k, with jitter.
        compute_s: The part of it that its local steps take; only partial work needs it.
        epochs: Passes over its data that the training is, > 0; it can stop after each full one. The last may be a part.
        failed: Whether it vanishes during the round.
    """

    client: int
    duration_s: float
    compute_s: float = 0.0
    epochs: float = 1
    failed: bool = False


@dataclass(frozen=True, kw_only=True)
class RoundOutcome:
    """End of a round.

    Attributes:
        duration_s: From the round's start to its end, without the server's own time.
        survivors: Clients whose updates are aggregated, ascending; weights are renormalised over them.
        epochs: The number of epochs that each survivor trained, in the same order: all, or full ones.
    """

    duration_s: float
    survivors: tuple[int, ...]
    epochs: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class StragglerPolicy(Checked, ABC):
    """When the server stops waiting.

    Attributes:
        over_selection: How many times the wanted number of clients is selected, >= 1.
    """

    section: ClassVar[str] = "scenario.devices.stragglers"
    # Whether a client that is too late has sent its model, or begun to.
    late_clients_send: ClassVar[bool] = True

    over_selection: float = field(default=1.0, init=False)

    @property
    def judges_rounds(self) -> bool:
        """Return whether it compares clients' whole rounds, one message down and one up, with each other or a deadline.

        Such a policy does not go with rounds of several sync points.
        """
        return True

    @abstractmethod
    def close(self, runs: Sequence[ClientRun], wanted: int) -> RoundOutcome:
        """End the round.

        Args:
            runs: All selected clients, each once; none: the round is empty and takes no time.
            wanted: Updates wanted, K; only over-selection depends on it.
        """

    def num_selected(self, wanted: int) -> int:
        """Return the number of clients to select for ``wanted`` updates: ceil(over_selection x wanted)."""
        # The slack keeps 1.3 x 10 at 13 where the product is a hair above.
        return math.ceil(self.over_selection * wanted - 1e-9)


@dataclass(frozen=True, kw_only=True)
class WaitForAll(StragglerPolicy):
    """Wait for every selected client: max T_k.

    A client that failed is noticed when the others are through; where all failed, when the slowest should have been.
    """

    @property
    def judges_rounds(self) -> bool:
        """No: whoever is alive is waited for."""
        return False

    def close(self, runs: Sequence[ClientRun], wanted: int) -> RoundOutcome:
        alive = _alive(runs)
        return _outcome(max((run.duration_s for run in alive or runs), default=0.0), alive)


@dataclass(frozen=True, kw_only=True)
class Deadline(StragglerPolicy):
    """Drop clients with T_k > D; with fewer than ``min_updates`` left, wait until that many have come.

    Attributes:
        deadline_s: D, seconds from the round's start, > 0.
        min_updates: Updates without which the round does not end, >= 0; where fewer clients are alive, all of them.

    Round time: max T_k where all came in time, else D, or the ``min_updates``-th T_k where that is later.
    """

    deadline_s: Positive
    min_updates: CountOrZero = 1

    def close(self, runs: Sequence[ClientRun], wanted: int) -> RoundOutcome:
        return _close_at(runs, deadline_s=self.deadline_s, min_updates=self.min_updates)


@dataclass(frozen=True, kw_only=True)
class OverSelect(StragglerPolicy):
    """Select more clients than wanted and keep the K fastest: the K-th smallest T_k; ties go to the smaller id.

    Attributes:
        over_selection: Selected over wanted, >= 1.

    Where fewer than K are alive, they are kept, and the round lasts as long as the slowest of them (where all failed,
    as the slowest of all).
    """

    over_selection: AtLeastOne = 1.3

    def close(self, runs: Sequence[ClientRun], wanted: int) -> RoundOutcome:
        survivors = _alive(runs)[:wanted]
        return _outcome(max((run.duration_s for run in survivors or runs), default=0.0), survivors)


@dataclass(frozen=True, kw_only=True)
class DropOut(StragglerPolicy):
    """Clients that vanish are noticed at the deadline, or without one when all others are through.

    Attributes:
        deadline_s: D, seconds from the round's start, > 0; null: without a deadline.

    Reading: a server cannot tell a slow client from a lost one, so whoever is not back at D counts as lost.
    """

    deadline_s: Positive | None = None

    @property
    def judges_rounds(self) -> bool:
        """By the deadline, if there is one."""
        return self.deadline_s is not None

    def close(self, runs: Sequence[ClientRun], wanted: int) -> RoundOutcome:
        if self.deadline_s is None:
            return WaitForAll().close(runs, wanted)
        return _close_at(runs, deadline_s=self.deadline_s, min_updates=0)


@dataclass(frozen=True, kw_only=True)
class PartialWork(StragglerPolicy):
    """A client that would be late stops after the last full epoch with which it is back by D.

    Attributes:
        deadline_s: D, seconds from the round's start, > 0.

    A client without one full epoch by then has nothing to send. Round time: at most D.
    """

    late_clients_send: ClassVar[bool] = False

    deadline_s: Positive

    def close(self, runs: Sequence[ClientRun], wanted: int) -> RoundOutcome:
        done = [(run, self._epochs(run)) for run in _alive(runs)]
        survivors = sorted(((run, epochs) for run, epochs in done if epochs), key=lambda pair: pair[0].client)
        ends = [run.duration_s - run.compute_s * (1 - epochs / run.epochs) for run, epochs in survivors]
        missing = len(survivors) < len(runs)
        return RoundOutcome(
            duration_s=self.deadline_s if missing else min(max(ends, default=0.0), self.deadline_s),
            survivors=tuple(run.client for run, _ in survivors),
            epochs=tuple(epochs for _, epochs in survivors),
        )

    def _epochs(self, run: ClientRun) -> float:
        if run.duration_s <= self.deadline_s:
            return run.epochs
        if run.compute_s <= 0:
            return 0
        time_left = self.deadline_s - (run.duration_s - run.compute_s)
        # The slack: a whole number of epochs may come out a hair below.
        return min(math.ceil(run.epochs) - 1, max(0, math.floor(time_left / (run.compute_s / run.epochs) + 1e-9)))


STRAGGLERS: Mapping[str, Callable[..., StragglerPolicy]] = {
    "wait": WaitForAll,
    "deadline": Deadline,
    "over_select": OverSelect,
    "drop_out": DropOut,
    "partial": PartialWork,
}


def _alive(runs: Sequence[ClientRun]) -> list[ClientRun]:
    return sorted((run for run in runs if not run.failed), key=lambda run: (run.duration_s, run.client))


def _close_at(runs: Sequence[ClientRun], *, deadline_s: float, min_updates: int) -> RoundOutcome:
    alive = _alive(runs)
    in_time = sum(run.duration_s <= deadline_s for run in alive)
    survivors = alive[: max(in_time, min_updates)]
    last = survivors[-1].duration_s if survivors else 0.0
    return _outcome(last if len(survivors) == len(runs) else max(deadline_s, last), survivors)


def _outcome(duration_s: float, survivors: Sequence[ClientRun]) -> RoundOutcome:
    ordered = sorted(survivors, key=lambda run: run.client)
    return RoundOutcome(
        duration_s=duration_s,
        survivors=tuple(run.client for run in ordered),
        epochs=tuple(run.epochs for run in ordered),
    )
