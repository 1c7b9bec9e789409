"""What the server has of a client at a sync point: made from what it announced, what it sent, or what it kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fedsweep.client.coding import decoded_model
from fedsweep.client.messages import Reply, Tally
from fedsweep.engine.cost import CostModel
from fedsweep.errors import InvariantError
from fedsweep.guard import check_named
from fedsweep.method import FederatedMethod
from fedsweep.records import ClientUpdate, ClientWork, State
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.trees import FlatLayout

_Named = TypeVar("_Named")


def announced(client: int, work: ClientWork, *, layout: FlatLayout, version: int, learning_rate: float) -> ClientUpdate:
    """What is known of an attendee before it has worked."""
    return ClientUpdate(
        client=client,
        vector=None,
        layout=layout,
        submodel=FULL_MODEL,
        anchor_version=version,
        num_samples=work.num_samples,
        steps=0,
        effective_steps=0.0,
        learning_rate=learning_rate,
        samples_since_anchor=work.num_samples,
        classes_since_anchor=work.classes,
    )


def model_alone(vector: Tensor, layout: FlatLayout) -> ClientUpdate:
    """An update of which no more than the model is known."""
    nothing = ClientWork(steps=0, batch_size=1, whole_batches=False, num_samples=0)
    return replace(announced(0, nothing, layout=layout, version=0, learning_rate=0.0), vector=vector)


def decoded(reply: Reply, submodel: SubModel, *, costs: CostModel, anchors: Mapping[int, Tensor]) -> Reply:
    """The answer with its model in full, where a codec made something else of it."""
    if reply.encoded is None:
        return reply
    # On the model that its client started from, which the server may have left behind since.
    vector = decoded_model(
        costs.codec,
        reply.encoded,
        rest=reply.vector,
        anchor=submodel.extract(anchors[reply.tally.anchor_version], costs.layout),
        travels=costs.travelling(submodel),
    )
    return replace(reply, vector=vector)


def answered(known: ClientUpdate, reply: Reply, submodel: SubModel) -> ClientUpdate:
    """The update of an attendee that has worked, from what was known before."""
    layout = submodel.layout(known.layout)
    return _with_tally(
        replace(known, vector=reply.vector, layout=layout, submodel=submodel, extras=reply.extras), reply.tally
    )


def kept(client: int, tally: Tally, memory: State, *, layout: FlatLayout, learning_rate: float) -> ClientUpdate:
    """The update of a client that worked in earlier rounds only; it sends what it kept then."""
    work = ClientWork(steps=0, batch_size=1, whole_batches=False, num_samples=tally.samples)
    known = announced(client, work, layout=layout, version=tally.anchor_version, learning_rate=learning_rate)
    # Copied: arrays from Ray's object store are read-only, and torch warns of tensors made of them.
    return _with_tally(replace(known, vector=torch.from_numpy(np.array(memory["held"]))), tally)


def _with_tally(update: ClientUpdate, tally: Tally) -> ClientUpdate:
    return replace(
        update,
        anchor_version=tally.anchor_version,
        steps=tally.steps,
        effective_steps=tally.effective_steps,
        samples_since_anchor=tally.samples,
        classes_since_anchor=tally.classes,
        train_loss=tally.loss_sum / tally.steps if tally.steps else float("nan"),
    )


def joined(
    method: FederatedMethod, states: Mapping[str, State], hook: str, of: type[_Named], *whom: int, round: int
) -> dict[str, _Named]:
    """What a method's components say beside models, by name.

    Args:
        method: The method.
        states: Its components'.
        hook: The name of a method that takes a state and ``whom``.
        of: What stands behind each name.
        whom: The client, where the hook asks for one.
        round: For messages.

    Raises:
        InvariantError: A component says something else, or two use the same name.
    """
    found: dict[str, _Named] = {}
    for seam, component in method.server_components():
        given = getattr(component, hook)(states[seam], *whom)
        check_named(given, of, component, hook, when=f"in round {round}")
        if twice := found.keys() & given.keys():
            raise InvariantError(f"two components {hook} something called {min(twice)!r}")
        found |= given
    return found
