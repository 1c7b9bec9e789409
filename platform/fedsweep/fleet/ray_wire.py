"""What travels between the server and client actors: tensors as arrays.

Ray carries arrays beside its pickle, in shared memory on one node; a tensor it would copy into the pickle. What arrives
may be read-only, so it is copied once, here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedsweep.client.messages import Reply, Segment, SegmentReply, Tally
from fedsweep.components.base import Published
from fedsweep.records import Payload

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class SentSegment:
    """A segment on its way.

    Attributes:
        segment: Without its broadcasts and published contents.
        broadcasts: Those, by client.
        published: Those, by name, each with how it lies.
    """

    segment: Segment
    broadcasts: Mapping[int, Arrays]
    published: Mapping[str, tuple[np.ndarray, Literal["params"] | None]]


@dataclass(frozen=True, kw_only=True)
class SentAnswer:
    """A worker's answer on its way.

    Attributes:
        rest: Without replies, aggregate and memories; those are results of their own.
        replies: Client, model, tally, payload and encoded params of each.
        aggregate: The server's model after the last folded point.
    """

    rest: SegmentReply
    replies: tuple[tuple[int, np.ndarray, Tally, Arrays, Arrays | None], ...]
    aggregate: np.ndarray | None


def sent_segment(segment: Segment) -> SentSegment:
    """The segment, ready to be sent."""
    broadcasts = {client: to_arrays(tensors) for client, tensors in segment.broadcasts.items()}
    published = {name: (content.value.numpy(), content.like) for name, content in segment.published.items()}
    rest = replace(segment, broadcasts={}, published={})
    return SentSegment(segment=rest, broadcasts=broadcasts, published=published)


def received_segment(sent: SentSegment) -> Segment:
    """The segment that was sent."""
    return replace(
        sent.segment,
        broadcasts={client: to_tensors(arrays) for client, arrays in sent.broadcasts.items()},
        published={name: Published(value=to_tensor(v), like=like) for name, (v, like) in sent.published.items()},
    )


def sent_answer(answer: SegmentReply) -> SentAnswer:
    """The answer, ready to be sent, without its memories."""
    return SentAnswer(
        rest=replace(answer, replies=(), memories={}, aggregate=None),
        replies=tuple(
            (
                r.client,
                r.vector.numpy(),
                r.tally,
                to_arrays(r.extras),
                None if r.encoded is None else to_arrays(r.encoded),
            )
            for r in answer.replies
        ),
        aggregate=None if answer.aggregate is None else answer.aggregate.numpy(),
    )


def received_answer(sent: SentAnswer, memories: Mapping[int, object]) -> SegmentReply:
    """The answer that was sent.

    Args:
        sent: What arrived.
        memories: References to the clients' memories.
    """
    return replace(
        sent.rest,
        replies=tuple(
            Reply(
                client=client,
                vector=to_tensor(vector),
                tally=tally,
                extras=to_tensors(extras),
                encoded=None if encoded is None else to_tensors(encoded),
            )
            for client, vector, tally, extras, encoded in sent.replies
        ),
        memories=memories,
        aggregate=None if sent.aggregate is None else to_tensor(sent.aggregate),
    )


def to_arrays(tensors: Payload) -> Arrays:
    """Tensors on the CPU as arrays that share their memory."""
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def to_tensors(arrays: Arrays) -> Payload:
    """Tensors of their own from arrays."""
    return {name: to_tensor(array) for name, array in arrays.items()}


def to_tensor(array: np.ndarray) -> Tensor:
    """A tensor of its own from an array that may be read-only."""
    return torch.from_numpy(np.array(array))
