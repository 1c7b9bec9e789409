"""The clients of a world: what the server knows of each, and what a drawn population can't be asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, overload

import numpy as np

from fedsweep.errors import ConfigError
from fedsweep.records import ClientProfile
from fedsweep.world.availability import Availability, capabilities, capability_of
from fedsweep.world.devices import DeviceFleet, DeviceProfile
from fedsweep.world.drift import Drift
from fedsweep.world.label_stats import label_counts
from fedsweep.world.population import Drawn, Split

if TYPE_CHECKING:  # reading a configuration takes more than torch and numpy
    from fedsweep.config.schema import Config


# So many clients are listed in each round, of which `scenario.json` then tells.
_MOST_LISTED = 1_000


@dataclass(frozen=True, kw_only=True, eq=False)
class ClientColumns(Sequence[ClientProfile]):
    """All clients' profiles in columns; a client's is made when it is asked for.

    Attributes:
        num_samples: Training samples of each [N].
        label_counts_NC: Their classes.
        capabilities: See :class:`ClientProfile` [N].
        devices: Theirs, or None.
    """

    num_samples: np.ndarray
    label_counts_NC: np.ndarray
    capabilities: np.ndarray
    devices: Sequence[DeviceProfile] | None

    @classmethod
    def of(cls, profiles: Sequence[ClientProfile]) -> ClientColumns:
        """Return the columns of profiles; clients are numbered by their place in them."""
        if isinstance(profiles, ClientColumns):
            return profiles
        devices = [profile.device for profile in profiles if profile.device is not None]
        return cls(
            num_samples=np.array([profile.num_samples for profile in profiles], dtype=np.int64),
            label_counts_NC=np.array([profile.label_counts for profile in profiles] or np.zeros((0, 0), np.int64)),
            capabilities=np.array([profile.capability for profile in profiles], dtype=np.float64),
            devices=devices or None,
        )

    def __len__(self) -> int:
        return len(self.num_samples)

    @overload
    def __getitem__(self, place: int) -> ClientProfile: ...

    @overload
    def __getitem__(self, place: slice) -> list[ClientProfile]: ...

    def __getitem__(self, place: int | slice) -> ClientProfile | list[ClientProfile]:
        if isinstance(place, slice):
            return [self[k] for k in range(*place.indices(len(self)))]
        client = range(len(self))[place]
        return ClientProfile(
            client=client,
            num_samples=int(self.num_samples[client]),
            label_counts=self.label_counts_NC[client],
            capability=float(self.capabilities[client]),
            device=None if self.devices is None else self.devices[client],
        )


def client_profiles(
    strata: np.ndarray, num_strata: int, indices: Sequence[np.ndarray], fleet: DeviceFleet | None
) -> Sequence[ClientProfile]:
    """Return what the server knows of each client; of a drawn population made when it is asked for.

    Args:
        strata: Each training sample's class, or what stands for it [S].
        num_strata: How many of these there are.
        indices: For each client the indices of its training samples.
        fleet: The simulated devices, or None.
    """
    if isinstance(indices, Drawn):

        def profile(client: int) -> ClientProfile:
            labels = strata[indices[client]]
            return ClientProfile(
                client=client,
                num_samples=len(labels),
                label_counts=np.bincount(labels, minlength=num_strata),
                capability=capability_of(client),
            )

        return Drawn(length=len(indices), build=profile)
    return ClientColumns(
        num_samples=indices.sizes if isinstance(indices, Split) else np.array([len(part) for part in indices]),
        label_counts_NC=label_counts(strata, indices, num_strata),
        capabilities=capabilities(len(indices)),
        devices=None if fleet is None else fleet.devices,
    )


def asks_singly(profiles: Sequence[ClientProfile], drift: Drift | None, availability: Availability | None) -> bool:
    """Check if clients are asked one by one who is there, and with which data, until the cohort is full.

    So a round costs what the cohort costs. Of few clients that change or come and go, and where chances depend on
    other clients, everybody is listed.
    """
    if isinstance(profiles, Drawn):
        return True
    varies = drift is not None or availability is not None
    is_told_alone = availability is None or not availability.compares_clients
    return varies and is_told_alone and len(profiles) > _MOST_LISTED


def check_drawn(config: Config, drift: Drift | None, availability: Availability | None) -> None:
    """Refuse parts of a scenario that ask every client of a drawn population something before the first round.

    Raises:
        ConfigError: There is such a part.
    """
    scenario = config.scenario
    refused = {
        "scenario.devices": scenario.devices is not None,
        "scenario.budgets": scenario.budgets is not None,
        "scenario.topology": scenario.topology is not None,
        "scenario.feature_skew": scenario.feature_skew is not None,
        "scenario.drift of the pool all": drift is not None and drift.pool == "all",
        "scenario.availability with normalise": availability is not None and availability.compares_clients,
        "evaluation.per_client": config.evaluation.per_client,
    }
    if named := [key for key, is_there in refused.items() if is_there]:
        raise ConfigError(
            f"scenario.partition kind drawn makes clients when they take part, but {named[0]} asks all of them; leave"
            " it out, or choose another kind of partition"
        )
