"""Very many clients in a round: whether one is there, and with how many samples, is found out when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedsweep.experiment.experiment import World
from fedsweep.streams import stream
from fedsweep.world.availability import capability_of
from fedsweep.world.population import Drawn, DrawnPresence


@dataclass(frozen=True, kw_only=True)
class LazyClients:
    """All clients in a round, as sequences that look at one when they are indexed.

    Attributes:
        world: The scenario.
        seed: The run's.
        round: From 1.
        classes: Under drift, clients' classes; empty without.
        history: Accuracies of the latest local epochs of the clients that have trained.
    """

    world: World
    seed: int
    round: int
    classes: Mapping[int, tuple[int, ...]]
    history: Mapping[int, Sequence[float]]

    @property
    def samples(self) -> Sequence[int]:
        """Each client's number of samples of the round's classes."""
        return Drawn(length=len(self.world.profiles), build=self._num_samples)

    @property
    def available(self) -> Sequence[int]:
        """The clients that are there and have data."""
        return DrawnPresence(length=len(self.world.profiles), is_there=self._is_available)

    def _num_samples(self, client: int) -> int:
        profile = self.world.profiles[client]
        return int(profile.label_counts[list(self.classes[client])].sum()) if self.classes else profile.num_samples

    def _is_available(self, client: int) -> bool:
        availability, world = self.world.availability, self.world
        # To draw a client's data for its capability alone would cost more than all else that it is asked.
        if availability is not None and not availability.is_there(
            self.round,
            client=client,
            capability=capability_of(client) if world.is_drawn else world.profiles[client].capability,
            accuracies=self.history.get(client, ()),
            stream=stream(self.seed, "availability", self.round, client),
        ):
            return False
        return not self.classes or self._num_samples(client) > 0
