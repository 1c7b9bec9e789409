"""A population that is drawn: each client's samples follow from the seed and its id."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedsweep.errors import ConfigError
from fedsweep.parameters.ranges import Count, Positive
from fedsweep.streams import Stream
from fedsweep.world.partitions.base import Partition
from fedsweep.world.partitions.draws import SMALLEST_CONCENTRATION, Floats, Indices, log_dirichlet
from fedsweep.world.population import Drawn


@dataclass(frozen=True, kw_only=True)
class DrawnClients(Partition):
    """Any number of clients, each with samples that it draws from the training set by class shares of its own.

    Clients may hold the same sample, as their draws are independent. Nothing of a client is stored, so a million cost
    what those cost that take part.

    Attributes:
        samples: Samples of each client.
        dirichlet_alpha: Concentration of a client's class shares, about those of the training set; None: these.
    """

    source: ClassVar[str] = "Hsu et al. 2019, client by client; cross-device populations"
    draws_clients: ClassVar[bool] = True

    samples: Count = 20
    dirichlet_alpha: Positive | None = None

    def split(
        self, labels: Indices, num_clients: int, stream: Stream, *, num_classes: int, writers: Indices | None = None
    ) -> Drawn[Indices]:
        """Return each client's sample indices, made when they are asked for; see :class:`Partition`.

        Raises:
            ConfigError: Class shares are to be drawn, but there are no classes.
        """
        if self.dirichlet_alpha is not None and num_classes == 1:
            raise ConfigError(
                "scenario.partition.dirichlet_alpha draws each client's shares of the classes, but the samples have"
                " none, or one; set it to null"
            )
        order = np.argsort(labels, kind="stable")
        counts_C = np.bincount(labels, minlength=num_classes)
        starts_C = np.cumsum(counts_C) - counts_C
        shares_C = counts_C / counts_C.sum()

        def of_client(client: int) -> Indices:
            generator = stream.child(client).numpy()
            classes = generator.choice(num_classes, size=self.samples, p=self._shares(shares_C, generator))
            places = starts_C[classes] + (generator.random(self.samples) * counts_C[classes]).astype(np.int64)
            return np.sort(order[places])

        return Drawn(length=num_clients, build=of_client)

    def _shares(self, shares_C: Floats, generator: np.random.Generator) -> Floats:
        """Draw a client's class shares [C]."""
        if self.dirichlet_alpha is None:
            return shares_C
        own_C = np.zeros(len(shares_C))
        # So that the classes' are as large as their shares, however small all are.
        scale = max(self.dirichlet_alpha, SMALLEST_CONCENTRATION / shares_C[shares_C > 0].min())
        concentrations = scale * shares_C[shares_C > 0]
        logs = log_dirichlet(concentrations, concentrations.shape, generator)
        weights = np.exp(logs - logs.max())
        own_C[shares_C > 0] = weights / weights.sum()
        return own_C
