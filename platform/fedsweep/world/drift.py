"""Drift: which classes a client's data has in a round.

Drift only filters: a client's samples of a round are those of its pool whose label is in the round's class set. Inside
the chosen classes nothing is reweighted.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedsweep.errors import ConfigError
from fedsweep.guard import wrong
from fedsweep.parameters.ranges import Checked, Count, NotNegative
from fedsweep.streams import Stream, stream
from fedsweep.world.replay import Pool, ScenarioTrace, load_trace

WEIGHT_LIFT = 1.1  # w = (cos + 1.1)^2 lies between 0.01 and 4.41: rare classes stay possible


@dataclass(frozen=True, kw_only=True)
class Drift(Checked, ABC):
    """Change of the clients' classes over the rounds.

    Attributes:
        pool: What the class set filters: ``partition``, the client's own samples, or ``all``, the whole training set.
    """

    section: ClassVar[str] = "scenario.drift"

    pool: Pool = "partition"

    @abstractmethod
    def class_set(self, client: int, round: int, stream: Stream) -> tuple[int, ...]:
        """Return the classes of a client in a round: distinct, ascending.

        Args:
            client: From 0.
            round: From 1.
            stream: The client's stream for drift, **the same one in every round** (``stream(seed, "drift", 0,
                client)``): the round's own numbers are drawn below it, and a frozen drift needs the same ones always.
        """


@dataclass(frozen=True, kw_only=True)
class CosineRotation(Drift):
    """Class weights that go round like a cosine, each client out of phase with the others.

    phase_i(R) = 2 pi R / num_rounds x rotation_speed + client_offset x i;
    w_ic(R) = (cos(phase_i(R) + c x class_shift) + 1.1)^2;  p_ic = w_ic / sum_c w_ic.
    The class set: its size is uniform from min_classes to max_classes, its members are drawn one after the other
    without replacement with p_ic, renormalised after each.

    The fields are the parameters of :func:`cosine_rotation`; 1 <= min_classes <= max_classes <= num_classes.

    Raises:
        ConfigError: A value is outside its range.

    Source: FedStg, drift model and ablation "no rotation".
    Reading: p_ic draws classes, not single samples, as the authors' code does; R counts from 1; frozen keeps the drawn
        set and not only the probabilities.
    """

    num_classes: int
    num_rounds: int
    rotation_speed: NotNegative = 2.0
    class_shift: float = 0.5
    client_offset: float = 0.4
    min_classes: Count
    max_classes: Count
    frozen: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.min_classes <= self.max_classes <= self.num_classes:
            raise ConfigError(
                f"`min_classes <= max_classes <= {self.num_classes}` (the classes of the data set) must hold, but got"
                f" min_classes={self.min_classes}, max_classes={self.max_classes}; correct one or give both"
            )

    def class_probabilities(self, client: int, round: int) -> NDArray[np.float64]:
        """Return the chance of each class to be drawn first [C], sums to 1."""
        turned = self._drawn_round(round) / self.num_rounds * self.rotation_speed
        phase = 2 * math.pi * turned + self.client_offset * client
        # The scalar cosine gives the same bits on every machine; a vectorised one need not.
        weights = [(math.cos(phase + c * self.class_shift) + WEIGHT_LIFT) ** 2 for c in range(self.num_classes)]
        return np.asarray(weights) / math.fsum(weights)

    def class_set(self, client: int, round: int, stream: Stream) -> tuple[int, ...]:
        numbers = stream.child("classes", self._drawn_round(round)).numpy()
        size = int(numbers.integers(self.min_classes, self.max_classes + 1))
        left = dict(enumerate(self.class_probabilities(client, round).tolist()))
        chosen = []
        for u in numbers.random(size).tolist():
            drawn = _pick(left, u)
            chosen.append(drawn)
            del left[drawn]
        return tuple(sorted(chosen))

    def _drawn_round(self, round: int) -> int:
        return 1 if self.frozen else round


@dataclass(frozen=True, kw_only=True)
class ReplayDrift(Drift):
    """The class sets of a recorded run.

    Attributes:
        trace: What was recorded.
    """

    trace: ScenarioTrace

    def class_set(self, client: int, round: int, stream: Stream) -> tuple[int, ...]:
        return self.trace.classes_of(client, round)


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundClasses(Mapping[int, tuple[int, ...]]):
    """All clients' class sets of a round, as a run with this seed draws them, each when it is asked for.

    Attributes:
        drift: The drift.
        seed: The run's.
        num_clients: N.
        num_classes: C.
        round: From 1.
    """

    drift: Drift
    seed: int
    num_clients: int
    num_classes: int
    round: int
    _drawn: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def __getitem__(self, client: int) -> tuple[int, ...]:
        if client not in self._drawn:
            if not 0 <= client < self.num_clients:
                raise KeyError(client)
            classes = self.drift.class_set(client, self.round, stream(self.seed, "drift", 0, client))
            if not self._are_classes(classes):
                must = f"a tuple of classes, some of 0 to {self.num_classes - 1}, each once"
                when = f"for client {client} in round {self.round}"
                raise wrong(self.drift, "class_set", must=must, answer=classes, when=when)
            self._drawn[client] = classes
        return self._drawn[client]

    def _are_classes(self, answer: object) -> bool:
        if not (isinstance(answer, tuple) and answer and all(isinstance(item, int | np.integer) for item in answer)):
            return False
        return 0 <= min(answer) and max(answer) < self.num_classes and len(set(answer)) == len(answer)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_clients))

    def __len__(self) -> int:
        return self.num_clients


def cosine_rotation(
    *,
    num_classes: int,
    num_rounds: int,
    profile: Literal["paper", "program"] = "paper",
    rotation_speed: NotNegative | None = None,
    class_shift: float = 0.5,
    client_offset: float = 0.4,
    min_classes: Count | None = None,
    max_classes: Count | None = None,
    pool: Pool | None = None,
    frozen: bool = False,
) -> Drift:
    """Class weights that go round like a cosine, each client out of phase with the others (FedStg).

    Args:
        num_classes: Classes of the data set.
        num_rounds: Rounds that the run is planned for.
        profile: ``paper``: 2 cycles, 6 to 8 of 10 classes, from the client's own samples; ``program``, the
            authors': 0.15 cycles, 4 to 6 of 10 classes, from the whole training set. Other data sets keep the
            fraction.
        rotation_speed: Full cycles in the run, >= 0; null: the profile's.
        class_shift: Phase between neighbouring classes, radians.
        client_offset: Phase between neighbouring clients, radians.
        min_classes: Smallest class set, from 1; null: the profile's.
        max_classes: Largest class set; null: the profile's.
        pool: What the class set filters, the client's own samples or the whole training set; null: the profile's.
        frozen: The class set of round 1 in all rounds (ablation).
    """
    profiles: dict[str, tuple[float, int, int, Pool]] = {
        "paper": (2.0, 6, 8, "partition"),
        "program": (0.15, 4, 6, "all"),
    }
    speed, fewest, most, source = profiles[profile]
    return CosineRotation(
        num_classes=num_classes,
        num_rounds=num_rounds,
        rotation_speed=speed if rotation_speed is None else rotation_speed,
        class_shift=class_shift,
        client_offset=client_offset,
        min_classes=_tenths(fewest, num_classes) if min_classes is None else min_classes,
        max_classes=_tenths(most, num_classes) if max_classes is None else max_classes,
        pool=source if pool is None else pool,
        frozen=frozen,
    )


def replay(*, file: str, num_classes: int, num_rounds: int, num_clients: int, pool: Pool | None = None) -> Drift:
    """The class sets of a recorded run.

    Args:
        file: The ``scenario.json`` of a run folder.
        num_classes: Classes of the data set.
        num_rounds: Rounds that the run is planned for.
        num_clients: Clients of the run.
        pool: What the class set filters, the client's own samples or the whole training set; null: as in that run.
    """
    trace = load_trace(
        "scenario.drift.file", file, num_rounds=num_rounds, num_classes=num_classes, num_clients=num_clients
    )
    return ReplayDrift(trace=trace, pool=trace.pool if pool is None else pool)


DRIFTS: Mapping[str, Callable[..., Drift]] = {"cosine_rotation": cosine_rotation, "replay": replay}


def _tenths(tenths: int, num_classes: int) -> int:
    return max(1, (2 * tenths * num_classes + 10) // 20)


def _pick(weights: Mapping[int, float], u: float) -> int:
    # One draw by weight; u in [0, 1) is scaled to what is left, which is the renormalisation.
    rest = u * math.fsum(weights.values())
    for item, weight in weights.items():
        rest -= weight
        if rest < 0:
            return item
    return max(weights)  # rounding let u reach past the last one
