"""The clients of a world: what the server knows of each, and what a drawn population can't be asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedsweep.errors import ConfigError
from fedsweep.records import ClientProfile
from fedsweep.world.availability import KIND_SPEEDS, Availability, capabilities
from fedsweep.world.devices import DeviceFleet
from fedsweep.world.drift import Drift
from fedsweep.world.label_stats import label_counts
from fedsweep.world.population import Built, Drawn

if TYPE_CHECKING:  # reading a configuration takes more than torch and numpy
    from fedsweep.config.schema import Config


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
                capability=KIND_SPEEDS[client % len(KIND_SPEEDS)],
            )

        return Built(length=len(indices), build=profile)
    counts_NC = label_counts(strata, indices, num_strata)
    num_clients = len(indices)
    able = capabilities(num_clients)
    return tuple(
        ClientProfile(
            client=k,
            num_samples=len(indices[k]),
            label_counts=counts_NC[k],
            capability=float(able[k]),
            device=None if fleet is None else fleet.devices[k],
        )
        for k in range(num_clients)
    )


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
