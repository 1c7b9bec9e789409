"""Availability: which clients are there in a round.

The chance may depend on how a client's training went so far, so it is asked round by round with the clients' history.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedsweep.errors import ConfigError
from fedsweep.guard import wrong
from fedsweep.parameters.ranges import Checked, Share
from fedsweep.streams import Stream
from fedsweep.world.replay import ScenarioTrace, load_trace

KIND_SPEEDS = (1.0, 0.9, 0.8)  # fast, medium, slow
HISTORY_EPOCHS = 3
SMALLEST_DECAY = 0.5


def capabilities(num_clients: int) -> NDArray[np.float64]:
    """Return each client's capability [N]: 1.0, 0.9, 0.8 (fast, medium, slow) by id mod 3.

    They are the speed weights s_i of FedStg's aggregation as well.

    Source: FedStg, authors' code (20 clients: 7 fast, 7 medium, 6 slow).
    """
    return np.asarray([capability_of(client) for client in range(num_clients)])


def capability_of(client: int) -> float:
    """Return one client's capability."""
    return KIND_SPEEDS[client % len(KIND_SPEEDS)]


Decay = Literal["linear", "exponential", "per_round"]
Performance = Literal["shifted", "mean", "none"]


@dataclass(frozen=True, kw_only=True)
class Availability(Checked, ABC):
    """Presence of clients in a round."""

    section: ClassVar[str] = "scenario.availability"

    @property
    def compares_clients(self) -> bool:
        """True where a client's presence depends on other clients, so that it can't be told alone."""
        return type(self).draw is not Availability.draw  # whoever draws all at once may well compare them

    @abstractmethod
    def probability(
        self, round: int, *, capabilities: NDArray[np.float64], history: Mapping[int, Sequence[float]]
    ) -> NDArray[np.float64]:
        """Return each client's chance to be there [N], 0..1.

        Args:
            round: From 1.
            capabilities: Of all clients [N], in (0, 1].
            history: Accuracies (0..1) of the latest local epochs of the clients that have trained, oldest first.
        """

    def draw(
        self,
        round: int,
        *,
        capabilities: NDArray[np.float64],
        history: Mapping[int, Sequence[float]],
        stream_for: Callable[[int], Stream],
    ) -> tuple[int, ...]:
        """Return the clients that are there, ascending: client i is absent iff u_i > its probability, u_i ~ U(0, 1).

        Args:
            round: From 1.
            capabilities: Of all clients [N].
            history: See :meth:`probability`.
            stream_for: A client's stream of this round; two methods with the same seed draw the same u_i.
        """
        chances = self._chances(round, capabilities, history)
        return tuple(client for client, chance in enumerate(chances) if _is_there(chance, client, stream_for))

    def is_there(
        self, round: int, *, client: int, capability: float, accuracies: Sequence[float], stream: Stream
    ) -> bool:
        """Tell whether one client is there, without a look at any other: the same as :meth:`draw` says of it.

        Args:
            round: From 1.
            client: Its id.
            capability: Its own.
            accuracies: See :meth:`probability`; empty before its first training.
            stream: Its stream of this round.
        """
        (chance,) = self._chances(round, np.asarray([capability]), {0: accuracies})
        return _is_there(chance, client, lambda _: stream)

    def _chances(
        self, round: int, capabilities: NDArray[np.float64], history: Mapping[int, Sequence[float]]
    ) -> list[float]:
        chances = self.probability(round, capabilities=capabilities, history=history)
        is_one_each = isinstance(chances, np.ndarray) and chances.shape == capabilities.shape
        if not is_one_each or not ((chances >= 0) & (chances <= 1)).all():  # NaN is neither: nobody would ever be there
            must = f"a chance from 0 to 1 for each client, an array [{len(capabilities)}]"
            raise wrong(self, "probability", must=must, answer=chances, when=f"in round {round}")
        listed: list[float] = chances.tolist()
        return listed


@dataclass(frozen=True, kw_only=True)
class AlwaysAvailable(Availability):
    """Everybody is there in every round."""

    def probability(
        self, round: int, *, capabilities: NDArray[np.float64], history: Mapping[int, Sequence[float]]
    ) -> NDArray[np.float64]:
        return np.ones(len(capabilities))


_PROFILES: Mapping[str, Mapping[str, Decay | Performance | bool]] = {
    "default": {"decay": "linear", "perf": "shifted", "normalise": False},
    "paper": {"decay": "linear", "perf": "mean", "normalise": False},
    "program": {"decay": "per_round", "perf": "shifted", "normalise": True},
}


@dataclass(frozen=True, kw_only=True)
class CapabilityAvailability(Availability):
    """A client is there with a chance that follows its capability, its accuracy and the round (FedStg).

    P_i(R) = min(ceiling, max(floor, base x c_i x perf_i(R) x decay(R))).

    decay(R) is 1 - R / (2 T) (linear), 2^(-R / T) (exponential, 0.5 at the end as well) or 1 - R / 100 (per_round),
    never below 0.5. m is the mean accuracy of the client's last up to 3 local epochs; before its first training perf_i
    is 1. With perf none, presence does not depend on training, and every method at a seed meets the same.

    Attributes:
        num_rounds: Rounds that the run is planned for.
        profile: ``default``: linear, shifted, not normalised; ``paper``, as printed: linear, mean, not normalised;
            ``program``, the authors': per_round, shifted, normalised.
        base: p0, 0..1.
        floor: Smallest probability.
        ceiling: Largest probability.
        decay: From 1 to 0.5 over the run (linear, exponential), or by 0.01 a round; null: the profile's.
        perf: How a client's accuracy m raises its chance: shifted is min(1.5, 0.7 + m), mean is m, none is 1; null: the
            profile's.
        normalise: Divide capabilities by their mean over all clients; null: the profile's.
        adaptive: false: the chance is base for all (ablation).

    Raises:
        ConfigError: A value is outside its range, or floor above ceiling.

    Source: FedStg, participation model and ablation "no adaptive participation".
    Reading: the default takes ``shifted``, because with the plain mean the floor nearly always wins and the reported
        participation cannot come about; capabilities are not normalised and the decay ends at T, as in the paper. The
        authors' code normalises and decays by 0.01 a round.
    """

    num_rounds: int
    profile: Literal["default", "paper", "program"] = field(default="default", compare=False)
    base: Share = 0.8
    floor: Share = 0.3
    ceiling: Share = 0.95
    decay: Decay | None = None
    perf: Performance | None = None
    normalise: bool | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.floor > self.ceiling:
            raise ConfigError(
                f"`floor <= ceiling` must hold, but got floor={self.floor}, ceiling={self.ceiling}; swap them"
            )
        for name, value in _PROFILES[self.profile].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def probability(
        self, round: int, *, capabilities: NDArray[np.float64], history: Mapping[int, Sequence[float]]
    ) -> NDArray[np.float64]:
        if not self.adaptive:
            return np.full(len(capabilities), self.base)
        scale = float(np.mean(capabilities)) if self.normalise else 1.0
        performance = np.asarray([self._performance(history.get(i, ())) for i in range(len(capabilities))])
        product = self.base * (capabilities / scale) * performance * self.decay_factor(round)
        return np.asarray(np.clip(product, self.floor, self.ceiling))

    @property
    def compares_clients(self) -> bool:
        return bool(self.normalise)

    def decay_factor(self, round: int) -> float:
        """Return decay(R), in [0.5, 1]."""
        if self.decay == "exponential":
            factor = math.exp2(-round / self.num_rounds)
        elif self.decay == "linear":
            factor = 1 - 0.5 * round / self.num_rounds
        else:
            factor = 1 - 0.01 * round
        return max(SMALLEST_DECAY, factor)

    def _performance(self, accuracies: Sequence[float]) -> float:
        latest = accuracies[-HISTORY_EPOCHS:]
        if not latest or self.perf == "none":
            return 1.0
        mean = math.fsum(latest) / len(latest)
        return mean if self.perf == "mean" else min(1.5, 0.7 + mean)


@dataclass(frozen=True, kw_only=True)
class ReplayAvailability(Availability):
    """The presence of a recorded run.

    Attributes:
        trace: What was recorded.
    """

    trace: ScenarioTrace

    def probability(
        self, round: int, *, capabilities: NDArray[np.float64], history: Mapping[int, Sequence[float]]
    ) -> NDArray[np.float64]:
        """Return 1 for the clients that were there, 0 for the others."""
        chances = np.zeros(self.trace.num_clients)
        chances[list(self.trace.present[round - 1])] = 1.0
        return chances

    def is_there(
        self, round: int, *, client: int, capability: float, accuracies: Sequence[float], stream: Stream
    ) -> bool:
        there = self.trace.present[round - 1]
        place = bisect_left(there, client)
        return place < len(there) and there[place] == client


def replay(*, file: str, num_rounds: int, num_clients: int) -> Availability:
    """The presence of a recorded run.

    Args:
        file: The ``scenario.json`` of a run folder.
        num_rounds: Rounds that the run is planned for.
        num_clients: Clients of the run.
    """
    trace = load_trace("scenario.availability.file", file, num_rounds=num_rounds, num_clients=num_clients)
    return ReplayAvailability(trace=trace)


AVAILABILITIES: Mapping[str, Callable[..., Availability]] = {
    "always": AlwaysAvailable,
    "capability": CapabilityAvailability,
    "replay": replay,
}


def _is_there(chance: float, client: int, stream_for: Callable[[int], Stream]) -> bool:
    # The ends need no number: with thousands of clients that are always there, none is drawn.
    if chance <= 0 or chance >= 1:
        return chance >= 1
    return stream_for(client).seed(64) / 2.0**64 <= chance
