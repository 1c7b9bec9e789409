"""Convert what travels between the server and client actors: messages with arrays in place of their tensors.

Ray carries arrays beside its pickle, in shared memory on one node; a tensor it would copy into the pickle. What arrives
may be read-only, so it is copied once, here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fedsweep.client.messages import Segment, SegmentReply
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
