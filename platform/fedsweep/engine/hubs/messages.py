"""The messages of a sync point whose models meet at other hubs than the server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fedsweep.errors import InvariantError
from fedsweep.records import SyncPoint
from fedsweep.submodel import Direction
from fedsweep.world.topology import SERVER, hub_name


class Message(NamedTuple):
    """A model sent between two nodes, counted once in the ledger: at the end whose traffic is metered.

    Attributes:
        node: That end: the client (of two, the one that sends), or the edge where no client takes part.
        direction: ``"up"`` where that end sends, ``"down"`` where it receives.
        peer: The other end.
    """

    node: int
    direction: Direction
    peer: int


def message(sender: int, receiver: int) -> Message:
    """Return the message from one hub to another."""
    if sender >= 0 or receiver == SERVER:
        return Message(sender, "up", receiver)
    return Message(receiver, "down", sender)


def of_jobs(point: SyncPoint) -> Iterator[Message]:
    """Yield the messages with which jobs start; who starts from its own model is sent none."""
    for job in point.start:
        if not job.resume and job.model != job.client:
            yield message(job.model, job.client)


def of_merges(point: SyncPoint) -> Iterator[Message]:
    """Yield the messages with which models meet."""
    for merge in point.merges:
        if merge.travels:
            for sender in (*merge.clients, *merge.hubs):
                if sender != merge.hub:
                    yield message(sender, merge.hub)


def check_merges(point: SyncPoint) -> None:
    """Refuse a point with merges where these are not of its attendees.

    Raises:
        InvariantError: Attendees' models meet nowhere, or somebody's who does not attend.
    """
    merged = {client for merge in point.merges for client in merge.clients}
    for client in sorted(merged ^ set(point.attend)):
        what = "attends, but its model meets no other" if client in point.attend else "is merged, but does not attend"
        raise InvariantError(f"client {client} {what} at a sync point with merges")
    if empty := [merge.hub for merge in point.merges if not merge.clients and not merge.hubs]:
        raise InvariantError(f"nothing is merged at the hub {hub_name(empty[0])}")
    if point.idle or point.discard:
        raise InvariantError("a sync point with merges has no idle clients, and discards nothing")
