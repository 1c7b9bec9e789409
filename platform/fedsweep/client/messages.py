"""Messages between the engine and the workers that hold the clients. All of it is picklable and frozen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.base import Published
from fedsweep.components.codec import AsItIs, Codec, Communication
from fedsweep.components.local import LocalSolver, LocalTerm, Objective
from fedsweep.components.probes import Probe
from fedsweep.records import ClientWork, Payload, SyncPoint
from fedsweep.submodel import SubModel
from fedsweep.tasks.base import Task
from fedsweep.tasks.kinds import Classification
from fedsweep.world.population import Drawn

Handle = Any  # what a fleet gives for a client's memory: the memory itself, or a reference to it


@dataclass(frozen=True, kw_only=True)
class LaneSettings:
    """Settings for clients that are stepped together: each is a lane of one batched step, and all lanes are a tile.

    Attributes:
        width: Lanes of a tile, at least 1; as many on all workers.
        fits_memory: Fewer, where a GPU's memory asks for it.
        proves: Before the run's first round a tile is tried beside the loop, see :class:`Stepping`.
        records: A step is recorded as a CUDA graph, once per shape, and then replayed as one launch.
    """

    width: int
    fits_memory: bool = False
    proves: bool = False
    records: bool = False


@dataclass(frozen=True, kw_only=True)
class Stepping:
    """The way in which workers step clients, as a proof on a first tile chose it; it stays the run's.

    Attributes:
        kind: ``loop``: one after another; ``lanes``: many in one step; ``graph``: likewise, by a recording of the step.
        width: Clients that are stepped at once.
        off: The tile's values after lanes against those after the loop, as a share of the loop's move, by 2-norms, of
            the client that is farthest off; None: not found out.
        notes: Why it is not a faster way, in sentences.
    """

    kind: str
    width: int = 1
    off: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def lanes(self) -> LaneSettings | None:
        """The same as settings; None: one after another."""
        return None if self.kind == "loop" else LaneSettings(width=self.width, records=self.kind == "graph")


@dataclass(frozen=True, kw_only=True)
class ClientSide:
    """The experiment as a worker knows it, sent once.

    Attributes:
        seed: The run's.
        objective: What clients minimise.
        terms: What is added to it.
        solver: How steps are taken.
        optimizer: The clients' optimiser.
        indices: For each client the indices of its training samples.
        device: ``"cpu"``, ``"cuda"`` or ``"lazy"``.
        tf32: On a GPU convolutions and products of float32 read rounded factors.
        track_accuracy: Keep the training accuracy of each pass over a client's data.
        codec: What clients' messages go through.
        encodes_payloads: What terms send in the params' form goes through it, too.
        down_codec: What the server's messages go through.
        lanes: How a worker steps clients together; None: one after another.
        job_passes: Forward passes of each of a client's samples that terms take outside the steps of each job.
        task: What is learned.
    """

    seed: int
    objective: Objective
    terms: tuple[LocalTerm, ...]
    solver: LocalSolver
    optimizer: OptimizerSettings
    indices: Sequence[np.ndarray]
    device: str = "cpu"
    tf32: bool = False
    track_accuracy: bool = False
    codec: Codec = AsItIs()
    encodes_payloads: bool = False
    down_codec: Codec = AsItIs()
    lanes: LaneSettings | None = None
    job_passes: float = 0
    task: Task = Classification()

    @cached_property
    def needs_share(self) -> bool:
        """Tell whether a client's :meth:`share` is read."""
        return self.objective.needs_share or any(term.needs_share for term in self.terms)

    @cached_property
    def needs_anchor(self) -> bool:
        """Tell whether terms look at the model that a client received."""
        return any(term.needs_anchor for term in self.terms)

    @cached_property
    def bare_steps(self) -> bool:
        """Tell whether a step is the loss's own gradient times the rate, and nothing more."""
        see_gradients = any(term.has_own("gradient", "after_step") for term in self.terms)
        return self.solver.plain and self.optimizer.is_bare and not see_gradients

    def share(self, client: int) -> float:
        """Return a client's number of samples over the clients' mean."""
        if isinstance(self.indices, Drawn):
            return 1.0  # a drawn population's clients are of one size
        return len(self.indices[client]) * len(self.indices) / self._num_samples

    @cached_property
    def _num_samples(self) -> int:
        return sum(map(len, self.indices))


@dataclass(frozen=True, kw_only=True)
class ClientTask:
    """A client's part in a round, sent when its first job of the round starts.

    Attributes:
        client: Its id.
        work: How much it does.
        submodel: What part of the model it trains.
        progress: It goes on from the params that it kept, with these figures; None: it starts from the server's.
    """

    client: int
    work: ClientWork
    submodel: SubModel
    progress: Progress | None = None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """A client's work since it last received a model.

    Attributes:
        anchor_version: Version of that model.
        steps: Local steps since.
        effective_steps: See ``ClientUpdate``.
        momentum_weight: The momentum buffer after as many gradients of 1, for work that goes on.
        loss_sum: Sum of the steps' losses.
        samples: Samples held in the rounds since, in total.
        classes: Classes seen since; None: all of the client's.
    """

    anchor_version: int = 0
    steps: int = 0
    effective_steps: float = 0.0
    momentum_weight: float = 0.0
    loss_sum: float = 0.0
    samples: int = 0
    classes: tuple[int, ...] | None = None

    def carried_on(self, samples: int, classes: tuple[int, ...] | None) -> Progress:
        """Return the same, carried into a round with so many samples of these classes."""
        union = None if self.classes is None or classes is None else tuple(sorted({*self.classes, *classes}))
        return replace(self, samples=self.samples + samples, classes=union)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Consecutive sync points of a round that the workers go through without the server.

    All but the last are aggregated among the workers as the weighted mean of the attendees; the last one's
    attendees send their models to the server.

    Attributes:
        round: From 1.
        attempt: How often this round was begun before; late replies of an earlier attempt are ignored.
        learning_rate: The round's.
        points: The sync points.
        weights: For each point but the last its attendees' weights, in the order of ``attend``.
        tasks: Parts of the clients whose first job of the round starts in this segment, on any worker.
        version: Version of the server's model at the first point; each aggregation adds one.
        published: Named contents, for jobs that start from the server's model.
        probes: This round's extra measurements.
        closes: The round ends with this segment: clients finish what is left and hand back their memories.
        workers: Which worker each client is on.
        remembers: Some client may have something to remember when the round closes.
        stepping: How clients are stepped, where that was tried; None: as the experiment says.
        residual: Of error feedback downwards, before the first point [P]; None: nothing is left out.
        models: Models [V] of other hubs that jobs start from, by hub.
        codecs: What messages go through, where that is chosen round by round; None: as the experiment says.
    """

    round: int
    # Without it a worker that is still there would go on with what it has of a round that was given up.
    attempt: int
    learning_rate: float
    points: tuple[SyncPoint, ...]
    weights: tuple[tuple[float, ...], ...]
    tasks: tuple[ClientTask, ...]
    version: int
    published: Mapping[str, Published] = field(default_factory=dict)
    probes: tuple[Probe, ...] = ()
    closes: bool = False
    workers: Mapping[int, int] = field(default_factory=dict)
    remembers: bool = True
    stepping: Stepping | None = None
    residual: Tensor | None = None
    models: Mapping[int, Tensor] = field(default_factory=dict)
    codecs: Communication | None = None


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question to clients outside a round's work: the set-up before round 1, or a test of their own models.

    Attributes:
        clients: Who is asked.
        probes: What they measure.
        round: Rounds that are done.
        classes: Under drift, clients' classes of the round.
        models: Models [V] that clients are asked about in place of the server's, by client.
        broadcast: What comes with the model.
    """

    clients: tuple[int, ...]
    probes: tuple[Probe, ...]
    round: int = 0
    classes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    models: Mapping[int, Tensor] = field(default_factory=dict)
    broadcast: Payload = field(default_factory=dict)

    def of(self, clients: Sequence[int]) -> Question:
        """Return the same question to some of them."""
        models = {client: self.models[client] for client in clients if client in self.models}
        return replace(self, clients=tuple(clients), models=models)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """A client's answer at the last sync point of a segment.

    Attributes:
        client: Its id.
        vector: Its model [V of its sub-model]; without the params where they are encoded.
        progress: What it has done since it last received a model.
        extras: What it sends beside the model.
        encoded: What it sends of its params instead, made by a codec.
        encoded_extras: Likewise of extras, by owner.
    """

    client: int
    vector: Tensor
    progress: Progress
    extras: Payload = field(default_factory=dict)
    encoded: Payload | None = None
    encoded_extras: Mapping[str, Payload] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RoundTotals:
    """A client's work in the whole round, counted when the round closes.

    Attributes:
        steps: Local steps.
        samples: Samples that went through a step, repeats included.
        loss_sum: Sum of the steps' losses.
        progress: Its work since its anchor, where it goes on next round from its own params.
        pass_accuracies: Training accuracy of each pass over the data, where the scenario asks for it.
        probed: Forward passes of one sample that its measurements took.
    """

    steps: int
    samples: int
    loss_sum: float
    progress: Progress | None = None
    pass_accuracies: tuple[float, ...] = ()
    probed: float = 0


@dataclass(frozen=True, kw_only=True)
class SegmentReply:
    """The answer of a worker, or of a whole fleet, to a segment.

    Attributes:
        replies: One per attendee of the last point that has worked, ascending.
        totals: By client, when the round closes.
        memories: By client, when the round closes and the client remembers something.
        aggregate: The server's model [V] after the last folded point, from the one worker that is asked for it; None
            where none was folded.
        notes: Sentences for the user.
        residual: Of error feedback downwards by then [P], from the same worker; None: nothing is left out.
        anchors: The models that encoded moves start from [V], by version, where points were folded: the server has not
            seen those of inner points.
    """

    replies: tuple[Reply, ...]
    totals: Mapping[int, RoundTotals]
    memories: Mapping[int, Handle]
    aggregate: Tensor | None = None
    notes: tuple[str, ...] = ()
    residual: Tensor | None = None
    anchors: Mapping[int, Tensor] = field(default_factory=dict)
