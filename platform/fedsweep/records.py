"""The frozen records that travel between the engine, the components and the fleet.

Ids of clients start at 0, rounds at 1. Tuples of clients are in ascending order. See the words and units in
``docs/concepts.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from torch import Tensor, nn

from fedsweep.streams import Stream
from fedsweep.trees import FlatLayout, ParamTree
from fedsweep.world.topology import SERVER, Merge, Star, Topology

if TYPE_CHECKING:
    from fedsweep.submodel import SubModel
    from fedsweep.world.budgets import BudgetPlan, RunSpending
    from fedsweep.world.devices import DeviceProfile

Payload = dict[str, Tensor]
State = Any  # a tree of dicts, lists, tuples, tensors, arrays, numbers, strings and None


@dataclass(frozen=True, kw_only=True)
class ClientProfile:
    """A client as the server knows it before it trains.

    Attributes:
        client: Its id, from 0.
        num_samples: Training samples that it holds.
        label_counts: Samples per class [C], int64.
        capability: In (0, 1]; 1 is the fastest kind.
        device: The simulated device, or None where the scenario has no devices.
    """

    client: int
    num_samples: int
    label_counts: np.ndarray
    capability: float = 1.0
    device: DeviceProfile | None = None


@dataclass(frozen=True, kw_only=True)
class LocalJob:
    """Work for one client: a number of local steps.

    Attributes:
        client: Who works.
        steps: Local steps; 0 only measures.
        resume: Go on from the client's own params; otherwise from the anchor, which is sent.
        not_before: Earliest start on the virtual clock, in seconds.
        model: The hub whose present model it starts from; that of another place is sent to the client.
    """

    client: int
    steps: int
    resume: bool = False
    not_before: float = 0.0
    model: int = SERVER


@dataclass(frozen=True, kw_only=True)
class SyncPoint:
    """A moment at which some clients' models are aggregated.

    Attributes:
        start: Jobs to launch now, from the server's present model.
        attend: Clients whose results are waited for and aggregated; none: nothing is aggregated.
        idle: Clients that did nothing and count with the model of the round's start; nothing travels for them.
        discard: The attendees send their models, but the server throws them away and keeps its own.
        merges: Where the attendees' models meet, one after another; none: all of them at the server.
    """

    start: tuple[LocalJob, ...]
    attend: tuple[int, ...]
    idle: tuple[int, ...] = ()
    discard: bool = False
    merges: tuple[Merge, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ClientWork:
    """A client's work in a round, from the training section alone.

    Attributes:
        steps: Local steps of the round.
        batch_size: Samples per step.
        whole_batches: Batches have exactly ``batch_size`` samples and may cross from one pass over the data into
            the next; otherwise each pass ends with what is left.
        num_samples: Samples that the client has in this round.
        classes: Classes of this round under drift; None: all.
    """

    steps: int
    batch_size: int
    whole_batches: bool
    num_samples: int
    classes: tuple[int, ...] | None = None

    def samples_in(self, steps: int) -> int:
        """Return samples that go through this many steps from the round's start."""
        if self.whole_batches:
            return steps * self.batch_size
        full, rest = divmod(steps, -(-self.num_samples // self.batch_size))
        return full * self.num_samples + min(rest * self.batch_size, self.num_samples)


@dataclass(frozen=True, kw_only=True)
class ServerContext:
    """The run as a server component may know it when it makes its state.

    Attributes:
        num_clients: Clients in the federation.
        num_classes: Classes of the data set.
        num_rounds: Rounds that the run is planned for.
        has_classes: Whether a sample's target is its class.
        evaluate_every: Rounds between two evaluations.
        profiles: All clients.
        model: A template on the CPU, for structure and forward passes; never trained in place.
        layout: How the model lies in its vector.
        vector: The initial model [V].
        proxy_data: Inputs and labels (labels None where unlabelled) that the server holds, or None.
        validation_data: Inputs and labels held out of the training set, or None.
        budgets: Who affords what; None: no limits.
        topology: Who talks with whom.
        stream: The component's own random stream.
        count_flops: After the exchange before round 1, as in :class:`SyncContext`.
        forward_flops: Likewise.
    """

    num_clients: int
    num_classes: int
    num_rounds: int
    profiles: Sequence[ClientProfile]
    model: nn.Module
    layout: FlatLayout
    vector: Tensor
    has_classes: bool = True
    evaluate_every: int = 1
    proxy_data: tuple[Tensor, Tensor | None] | None = None
    validation_data: tuple[Tensor, Tensor] | None = None
    budgets: BudgetPlan | None = None
    topology: Topology = Star()
    stream: Stream
    count_flops: Callable[[float], None] = lambda flops: None
    forward_flops: Callable[[SubModel], int] = lambda part: 0


@dataclass(frozen=True, kw_only=True)
class RoundContext:
    """A round as selection, sub-model policy and pacing may know it at its start.

    Attributes:
        round: From 1.
        available: Clients that are there and have data; a :class:`DrawnPresence` where each is asked.
        present: Clients that are there.
        classes: Under drift, all clients' classes of this round; empty without.
        cohort_size: Clients asked for, at most as many as are there.
        full_cohort_size: Clients asked for where all are there; 0 in contexts made by hand.
        profiles: All clients.
        cohort: The chosen clients; empty while they are being chosen.
        drawn: The same in the order in which they were chosen.
        work: Each cohort member's work.
        submodels: Each cohort member's sub-model.
        in_flight: Clients that hold results nobody has aggregated yet.
        clock: Virtual seconds at the round's start.
        ready: When clients whose work went on over a round's end are done, in virtual seconds.
        durations: Virtual seconds that each member needs; to train where it ``has_hubs``. Empty without devices.
        num_values: |W|, scalars of the full model; with codecs as many as its message has bytes for, mean of both ways.
        budgets: Who affords what; None: no limits.
        topology: Who talks with whom.
        hub_times: Virtual seconds at which hubs but the server had their present models, where these are kept.
        spending: Of the whole run; None in contexts made by hand.
        model: A template of the full model, for its structure; None in contexts made by hand.
        stream: Random numbers of this seam in this round.
    """

    round: int
    available: Sequence[int]
    cohort_size: int
    profiles: Sequence[ClientProfile]
    present: Sequence[int] = ()
    classes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    full_cohort_size: int = 0
    cohort: tuple[int, ...] = ()
    drawn: tuple[int, ...] = ()
    work: Mapping[int, ClientWork] = field(default_factory=dict)
    submodels: Mapping[int, SubModel] = field(default_factory=dict)
    in_flight: tuple[int, ...] = ()
    clock: float = 0.0
    ready: Mapping[int, float] = field(default_factory=dict)
    durations: Mapping[int, float] = field(default_factory=dict)
    num_values: int = 0
    budgets: BudgetPlan | None = None
    topology: Topology = Star()
    hub_times: Mapping[int, float] = field(default_factory=dict)
    spending: RunSpending | None = None
    model: nn.Module | None = None
    stream: Stream = Stream(("unset",))


@dataclass(frozen=True, kw_only=True)
class ClientUpdate:
    """One client at a sync point, as the server has it.

    Attributes:
        client: Its id.
        vector: Its model [V of its sub-model]; None for components that said they need no updates.
        layout: How the vector lies.
        submodel: Which part of the full model it is.
        sent_as: Which part the client sent, where it stands completed by what its hub has; None: ``submodel``.
        anchor_version: Version of the server's model that it started from.
        num_samples: Samples that it holds in this round; of work that went on over rounds' ends, in all rounds since
            the anchor in total.
        steps: Local steps since the anchor.
        effective_steps: Sum of the weights with which the steps' gradients entered the move: ``steps`` for plain
            SGD, more with momentum (Wang et al. 2020, FedNova); NaN where no such number exists.
        learning_rate: The rate that was applied.
        classes_since_anchor: Classes seen since the anchor; None: all of the client's.
        train_loss: Mean loss over the steps since the anchor; NaN without steps.
        extras: What else it sent.
    """

    client: int
    vector: Tensor | None
    layout: FlatLayout
    submodel: SubModel
    anchor_version: int
    num_samples: int
    steps: int
    effective_steps: float
    learning_rate: float
    sent_as: SubModel | None = None
    classes_since_anchor: tuple[int, ...] | None = None
    train_loss: float = float("nan")
    extras: Payload = field(default_factory=dict)

    @cached_property
    def params(self) -> ParamTree:
        """The model's tensors by name, as views; a KeyError cannot occur, an absent vector is a ValueError."""
        if self.vector is None:
            raise ValueError("this component declared needs_updates = False, so it sees no models")
        return self.layout.views(self.vector)


@dataclass(frozen=True, kw_only=True)
class SyncContext:
    """A sync point as server components may know it.

    Attributes:
        round: From 1.
        index: The sync point's number within the round, from 0.
        ends_round: Whether it is the round's last.
        version: The server's, which each aggregation raises by 1.
        hub, topology: Where models meet, by its number; who talks with whom.
        combine: Makes one vector [V] of the attendees' models; None: their mean.
        vector: The hub's model before this aggregation [V].
        layout: How it lies.
        anchors: Earlier versions that updates started from.
        learning_rate: The round's rate.
        cohort: The round's clients.
        classes: Under drift, all clients' classes of this round; empty without.
        moves_from: None: weights are shares of a mean. Else steps, from the server's model or each client's anchor.
        shares_of: The weighting's shares, which steps are multiples of; None: of their sum.
        model: A template on the CPU for forward passes.
        stream: Random numbers of this component at this sync point.
        checkpoint: ``checkpoint(tree)`` keeps work that takes minutes; ``resumed`` holds what was kept.
        resumed: What an earlier, interrupted try of this very call kept; None otherwise.
        message: Takes a sentence for the user, heard at once.
        working: Takes a line on how far work that takes minutes is; each replaces the one before, none is kept.
        count_flops: ``count_flops(flops)`` counts work on the server, which the round's FLOPs then have; work that may
            be resumed is counted as a whole, when it is done.
        forward_flops: FLOPs of one sample's forward pass through a part of the model, ``forward_flops(u.submodel)``.
        device: Where heavy work belongs: ``"cpu"`` or ``"cuda"``; all that is handed in and out lies on the CPU.
        proxy_data: As in ``ServerContext``: read here, they need no place in a state, and so in no checkpoint.
        validation_data: Likewise.
    """

    round: int
    index: int
    ends_round: bool
    vector: Tensor
    layout: FlatLayout
    anchors: Mapping[int, Tensor]
    learning_rate: float
    cohort: tuple[int, ...]
    model: nn.Module
    stream: Stream = Stream(("unset",))
    checkpoint: Callable[[State], None] = lambda tree: None
    resumed: State = None
    message: Callable[[str], None] = lambda text: None
    working: Callable[[str], None] = lambda text: None
    count_flops: Callable[[float], None] = lambda flops: None
    forward_flops: Callable[[SubModel], int] = lambda part: 0
    device: str = "cpu"
    classes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    moves_from: Literal["server", "anchor"] | None = None
    shares_of: Callable[[Sequence[ClientUpdate]], Tensor | None] = lambda updates: None
    version: int = 0
    hub: int = SERVER
    combine: Callable[[Sequence[ClientUpdate], Tensor, SyncContext], Tensor] | None = None
    topology: Topology = Star()
    proxy_data: tuple[Tensor, Tensor | None] | None = None
    validation_data: tuple[Tensor, Tensor] | None = None

    @cached_property
    def params(self) -> ParamTree:
        """The server's model before this aggregation, as views."""
        return self.layout.views(self.vector)


@dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
    """A round's traffic by client, direction and kind; in columns, since it may have tens of thousands of clients.

    An entry for each client, direction and kind, ascending, down before up. Legend: E entries.

    Attributes:
        clients: [E] int32.
        up: Whether the client sent it [E] bool.
        kinds: Places in ``names`` [E] int16.
        num_bytes: [E] int64.
        steps: Local steps of the client in the round, the same in all of its entries [E] int32.
        names: What travels, see :class:`~fedsweep.engine.ledger.Ledger`; ascending.
        syncs: Sync points that the client attended in the round, likewise [E] int32.
        macs: Multiply-accumulates of all the client's work in the round, likewise [E] int64.
        peers: Hubs at the other end [E] int32; None: the server.
    """

    clients: Tensor
    up: Tensor
    kinds: Tensor
    num_bytes: Tensor
    steps: Tensor
    names: tuple[str, ...]
    syncs: Tensor
    macs: Tensor
    peers: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class RoundRecord:
    """One row of ``rounds.parquet``; None where a method has no such thing.

    ``total_bytes`` counts both ways, from before round 1 up to and with the round; ``best_accuracy`` is that of all
    tests so far. ``staleness`` (None where no work outlasts its round) is, for each attendee, how often the server's
    model changed since it received the one that it trained. ``class_accuracies`` are the tested model's by class index,
    ``client_scores`` its leading figure over each client's own test samples, ``personal_accuracies`` those of the
    clients' own models by client, each on its share of the test set; NaN without test samples. ``full_time_s`` is
    ``sim_time_s`` with payloads, the server's work and what goes before round 1; ``traffic`` has a table of its own.
    """

    round: int
    timestamp_ms: int = 0
    test_accuracy: float | None = None
    test_loss: float | None = None
    validation_accuracy: float | None = None
    best_accuracy: float | None = None
    train_loss: float | None = None
    lr: float = 0.0
    cohort: tuple[int, ...] = ()
    high_frequency: tuple[int, ...] | None = None
    kl_divergence: float | None = None
    attendees: tuple[int, ...] = ()
    sync_points: int = 0
    values_up: int = 0
    values_down: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    total_bytes: int = 0
    over_budget: int | None = None
    comm_cost: int = 0
    comm_ratio: float | None = None
    local_steps: int = 0
    flops: int = 0
    fwd_macs_per_sample: float | None = None
    sim_time_s: float | None = None
    full_time_s: float | None = None
    wall_time_s: float = 0.0
    eval_time_s: float = 0.0
    server_time_s: float = 0.0
    aggregation_weights: tuple[float, ...] = ()
    staleness: tuple[int, ...] | None = None
    present: tuple[int, ...] | None = None
    class_accuracies: tuple[float, ...] | None = None
    client_scores: tuple[float, ...] | None = None
    personal_accuracies: tuple[float, ...] | None = None
    traffic: Traffic | None = field(default=None, compare=False, repr=False)
    extra: Mapping[str, float] = field(default_factory=dict)


def best_of(*accuracies: float | None) -> float | None:
    """Return the largest of those that are known and numbers; None without any."""
    return max((value for value in accuracies if value is not None and value == value), default=None)
