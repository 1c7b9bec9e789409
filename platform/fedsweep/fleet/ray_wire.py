"""Convert what travels between the server and client actors: messages with arrays in place of their tensors.

Ray carries arrays beside its pickle, in shared memory on one node; a tensor it would copy into the pickle. What arrives
may be read-only, so it is copied once, here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedsweep.client.messages import Segment, SegmentReply
from fedsweep.records import State
from fedsweep.trees import to_arrays, to_tensors


def sent_segment(segment: Segment) -> Segment:
    """Make a segment ready to be sent."""
    return _segment(segment, to_arrays)


def received_segment(sent: Segment) -> Segment:
    """Return the segment that was sent."""
    return _segment(sent, to_tensors)


def sent_answer(answer: SegmentReply) -> SegmentReply:
    """Make an answer ready to be sent; its memories are results of their own."""
    return _answer(replace(answer, memories={}), to_arrays)


def received_answer(sent: SegmentReply, memories: Mapping[int, object]) -> SegmentReply:
    """Return the answer that was sent, with references to the clients' memories."""
    return replace(_answer(sent, to_tensors), memories=memories)


def sent_memory(memory: State) -> State:
    """Make a client's memory ready to be sent: its tensors stay tensors, but no views of larger ones."""
    if isinstance(memory, dict):
        return {key: sent_memory(value) for key, value in memory.items()}
    if type(memory) in (list, tuple):
        return type(memory)(map(sent_memory, memory))
    # A pickled view takes along all that it is a view of: a model of a hundred tensors would travel a hundred times.
    is_plain = isinstance(memory, Tensor) and memory.layout == torch.strided
    return memory.clone() if is_plain and memory.untyped_storage().nbytes() > memory.nbytes else memory


def _segment(segment: Segment, change: Callable[[Any], Any]) -> Segment:
    published = {name: replace(content, value=change(content.value)) for name, content in segment.published.items()}
    return replace(segment, published=published, residual=change(segment.residual), models=change(segment.models))


def _answer(answer: SegmentReply, change: Callable[[Any], Any]) -> SegmentReply:
    replies = tuple(
        replace(
            reply,
            vector=change(reply.vector),
            extras=change(reply.extras),
            encoded=change(reply.encoded),
            encoded_extras=change(reply.encoded_extras),
        )
        for reply in answer.replies
    )
    return replace(
        answer,
        replies=replies,
        aggregate=change(answer.aggregate),
        residual=change(answer.residual),
        anchors=change(answer.anchors),
    )
