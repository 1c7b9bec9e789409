"""The state of a run: one value per finished round, from which the next round follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from fedsweep.client.messages import Handle, Progress, Stepping
from fedsweep.records import RoundRecord, State, Traffic


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """The model that is at a hub.

    Attributes:
        vector: [V].
        num_samples: Samples of the clients whose work is in it since it last came from the server.
    """

    vector: Tensor
    num_samples: int = 0


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A choice of the budget's planner: how a round is played.

    Attributes:
        round: From 1.
        choice: Number of the option, from 0.
        cost: Of the plan, in the budget's unit; what travels beside models as methods' cards say.
        left: Of the budget, before the round.
        reason: Why, in a few words.
    """

    round: int
    choice: int
    cost: float
    left: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run's state after a round. No part of it is ever changed in place, so an interrupted round leaves it whole.

    Attributes:
        round: Rounds done.
        version: Version of the server's model.
        vector: The server's model [V].
        components: The server components' states by seam.
        memories: What clients remember, by client, as the fleet's handles.
        held: For each client that goes on from its own params its progress since its anchor.
        anchors: Earlier models that held clients started from, by version.
        accuracies: Training accuracies of each client's last passes, where the scenario asks for them.
        clock: Virtual seconds; None without devices.
        ready: When clients whose work went on over the round's end are done, in virtual seconds.
        total_bytes: Bytes both ways so far, those before round 1 among them.
        setup_bytes: Bytes of the set-up before round 1, without registration.
        setup_traffic: What travelled then.
        setup_flops: What clients computed for it; 0 from round 1 on, whose row has them.
        setup_server_flops: What the server computed before round 1; likewise.
        setup_s: Virtual seconds of registration and set-up; None without devices.
        published: Which version of each published content clients have.
        left: The residual of error feedback: what the server's messages have left out so far [P]; None: nothing.
        sent_contents: Published content that goes through a codec, by name: as it was given, as clients have it, and
            the codecs of the messages that were made of it.
        last_models: Clients that have taken a model, and the version that each took last [2, K]; None without a codec
            downwards.
        made: Which codec made each of the server's messages, by stretches: the number of a stretch's last message, from
            1, and the codec's number; see ``ServerMessages``.
        wall_time_s: Seconds of all rounds so far, resumed parts included.
        records: One per round.
        decisions: One per round, where a planner of the configuration spends a budget.
        stepping: How clients are stepped, where that was tried in the first round.
        notes: What workers had to say of that so far, each thing once.
        models: Models of hubs, by hub; of the server only where it has another than ``vector``, which nobody has then.
        hub_times: Virtual seconds at which these had them; empty without devices.
        partial: What a refinement kept in the middle of the next round's work.
    """

    round: int = 0
    version: int = 0
    vector: Tensor
    components: Mapping[str, State]
    memories: Mapping[int, Handle] = field(default_factory=dict)
    held: Mapping[int, Progress] = field(default_factory=dict)
    anchors: Mapping[int, Tensor] = field(default_factory=dict)
    accuracies: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    clock: float | None = None
    ready: Mapping[int, float] = field(default_factory=dict)
    total_bytes: int = 0
    setup_bytes: int = 0
    setup_traffic: Traffic | None = field(default=None, compare=False, repr=False)
    setup_flops: int = 0
    setup_server_flops: float = 0.0
    setup_s: float | None = None
    published: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    left: Tensor | None = None
    sent_contents: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    last_models: Tensor | None = None
    made: tuple[tuple[int, ...], ...] = ()
    wall_time_s: float = 0.0
    records: tuple[RoundRecord, ...] = ()
    decisions: tuple[Decision, ...] = ()
    stepping: Stepping | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)
    models: Mapping[int, HubModel] = field(default_factory=dict)
    hub_times: Mapping[int, float] = field(default_factory=dict)
    partial: Mapping[str, State] = field(default_factory=dict)

    @property
    def taken_part(self) -> set[int]:
        """Clients that have taken part in a round; with published content those that have it: who drops out forgets."""
        return {*self.published} or {client for record in self.records for client in record.cohort}
