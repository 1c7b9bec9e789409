"""A round whose models meet at other hubs than the server, or whose clients start from models of such hubs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from fedsweep.client.messages import Reply, Segment
from fedsweep.components.base import Published
from fedsweep.engine.cost import Charges
from fedsweep.engine.hubs.merging import HubMerger
from fedsweep.engine.hubs.messages import of_jobs, of_merges
from fedsweep.engine.ledger import Size
from fedsweep.engine.round import Round
from fedsweep.records import ClientUpdate, SyncContext, SyncPoint
from fedsweep.submodel import FULL_MODEL
from fedsweep.world.topology import SERVER


class HubCharges(Charges):
    """Charges what travels between hubs, by its links; not by who works."""

    def download(self, client: int, contents: Mapping[str, Published]) -> None:
        """Charge nothing: see :meth:`between`."""

    def upload(self, client: int, reply: Reply | None = None) -> None:
        """Charge nothing: see :meth:`between`."""

    def between(self, point: SyncPoint) -> None:
        """Charge the messages of a sync point."""
        for node, direction, peer in (*of_jobs(point), *of_merges(point)):
            submodel = self._submodel(node) if node >= 0 else FULL_MODEL
            # Whoever gets a part is told which it is.
            sizes = {**self._costs.sizes(submodel, direction), "mask": Size(0, submodel.index_bytes())}
            self.ledger.message(node, direction, sizes, peer=peer)


class HubRound(Round):
    """A round whose models meet at hubs; arguments are those of :class:`Round`."""

    charges: ClassVar[type[Charges]] = HubCharges

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._merger = HubMerger(self.state.models, self._costs.layout, self._weights)
        self.models = self._merger.models

    def _segment(self, points: tuple[SyncPoint, ...]) -> Segment:
        return replace(super()._segment(points), models=self._merger.started_from(points[0], self.vector))

    def _take_in(self, point: SyncPoint, updates: list[ClientUpdate], sync: SyncContext) -> None:
        """Merge models at the sync point's hubs; where it names none, at the server."""
        assert isinstance(self._charges, HubCharges)
        self._charges.between(point)
        if not point.merges:
            super()._take_in(point, updates, sync)
            return

        def at_server(members: list[ClientUpdate], server: Tensor) -> Tensor:
            super(HubRound, self)._take_in(point, members, replace(sync, vector=server))
            return self.vector

        by_client = {update.client: update for update in updates}
        vector = self._merger.merge(point, by_client, sync, at_server)
        # A model that a client receives afterwards is another than it had before, whether or not the server has it.
        self.version += not any(merge.hub == SERVER and merge.travels for merge in point.merges)
        self.vector = self.anchors[self.version] = vector
        self.attendees, self.weights, self.updates = (tuple(by_client) or self.attendees), (), tuple(updates)
        if sync.ends_round:
            self.figures = self._merger.figures

    def _weights(self, updates: Sequence[ClientUpdate], sync: SyncContext) -> Tensor:
        """Return the weights [M] of models that meet at another hub."""
        weights, self.components["weighting"] = self._tools.aggregator.weigh(
            self.components["weighting"], updates, sync
        )
        return weights
