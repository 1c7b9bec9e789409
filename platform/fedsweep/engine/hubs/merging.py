"""Merging models at hubs: what a sync point's attendees trained, and models that other hubs have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedsweep.client.messages import Progress, Reply
from fedsweep.components.aggregation import combined
from fedsweep.engine.aggregation import client_update
from fedsweep.engine.state import HubModel
from fedsweep.records import ClientUpdate, SyncContext, SyncPoint
from fedsweep.submodel import FULL_MODEL
from fedsweep.trees import FlatLayout
from fedsweep.world.topology import SERVER

Weigh = Callable[[Sequence[ClientUpdate], SyncContext], Tensor]
Aggregate = Callable[[list[ClientUpdate], Tensor], Tensor]


class HubMerger:
    """Merges models at a round's hubs.

    Args:
        models: Of hubs, before the round, the server's where the run's is another; stays as it is.
        layout: The full model's.
        weigh: Gives the weights [M] of models that meet.

    Attributes:
        models: Of hubs, by now.
    """

    def __init__(self, models: Mapping[int, HubModel], layout: FlatLayout, weigh: Weigh) -> None:
        self.models, self._layout, self._weigh = dict(models), layout, weigh

    def merge(
        self, point: SyncPoint, updates: Mapping[int, ClientUpdate], sync: SyncContext, aggregate: Aggregate
    ) -> Tensor:
        """Go through a sync point's merges, one after another.

        Args:
            point: The sync point.
            updates: Its attendees', by client.
            sync: The sync point, at the server.
            aggregate: Takes what meets at the server and the server's model [V], and gives its next one.

        Returns:
            The model [V] at the server by then, or the one that the simulation has in its place.
        """
        vector = sync.vector
        for merge in point.merges:
            members = [
                self._whole(updates[client], sync) if client == merge.hub else updates[client]
                for client in merge.clients
            ]
            members += [self._hub_update(hub, vector, sync) for hub in merge.hubs]
            if merge.hub == SERVER and merge.travels:
                vector = aggregate(members, self.at(SERVER, vector))
                self.models.pop(SERVER, None)
                continue
            here = sync if merge.hub == SERVER else replace(sync, hub=merge.hub, vector=self.at(merge.hub, vector))
            mean = self._mean(members, here)
            if merge.hub == SERVER:
                if any(hub < SERVER for hub in merge.hubs):
                    # Nobody has this mean: the server goes on with its own model, and edges begin with that.
                    self.models.setdefault(SERVER, HubModel(vector=vector))
                vector = mean
            else:
                # A client's are its own, not those of all whose models are in its model.
                own = [updates[merge.hub]] if merge.hub in updates else members
                samples = 0 if merge.hubs == (SERVER,) else sum(member.num_samples for member in own)
                self.models[merge.hub] = HubModel(vector=mean, num_samples=samples)
        return vector

    @property
    def figures(self) -> dict[str, float]:
        """Columns of a round: how far the clients' own models are from their mean, where they have some."""
        own = [model.vector for hub, model in self.models.items() if hub >= 0]
        return {"consensus_distance": consensus_distance(own, self._layout)} if own else {}

    def started_from(self, point: SyncPoint, server: Tensor) -> dict[int, Tensor]:
        """Return the models [V] of other hubs than the server that a sync point's jobs start from, by hub."""
        return {job.model: self.at(job.model, server) for job in point.start if job.model != SERVER}

    def at(self, hub: int, server: Tensor) -> Tensor:
        """Return the model [V] at a hub; the server's where it has none of its own yet."""
        return self.models[hub].vector if hub in self.models else server

    def _whole(self, update: ClientUpdate, sync: SyncContext) -> ClientUpdate:
        """Return a client's update at home: what its part leaves out is as it was."""
        if update.submodel == FULL_MODEL or update.vector is None:
            return update
        part = update.submodel.embed(update.vector, self._layout)
        before = self.at(update.client, sync.vector)
        vector = part.vector if part.cover is None else torch.where(part.cover, part.vector, before)
        return replace(update, vector=vector, submodel=FULL_MODEL, sent_as=update.submodel, layout=self._layout)

    def _hub_update(self, hub: int, server: Tensor, sync: SyncContext) -> ClientUpdate:
        samples = self.models[hub].num_samples if hub in self.models else 0
        reply = Reply(
            client=hub, vector=self.at(hub, server), progress=Progress(anchor_version=sync.version, samples=samples)
        )
        return client_update(reply, learning_rate=sync.learning_rate, layout=self._layout)

    def _mean(self, members: list[ClientUpdate], here: SyncContext) -> Tensor:
        # A single whole model is its own mean, whatever it would weigh.
        if len(members) == 1 and members[0].submodel == FULL_MODEL and members[0].vector is not None:
            return members[0].vector.cpu()  # a client's may lie where it was trained
        return combined(members, self._weigh(members, here), here)


def consensus_distance(models: Sequence[Tensor], layout: FlatLayout) -> float:
    """Compute the root of the clients' mean squared distance from their mean, over the params.

    Args:
        models: The clients' own [V].
        layout: How they lie.
    """
    params_NP = torch.stack([vector[: layout.num_params] for vector in models]).double()
    return float((params_NP - params_NP.mean(0)).square().sum(1).mean().sqrt())
