"""Components that travel to actors: a term whose process ends, stops or fails at a given place, once; a chatty pair."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from fedsweep.components.aggregation import Refinement
from fedsweep.components.base import Published
from fedsweep.components.local import NOBODY, ClientFacts, LocalStep, LocalTerm, LocalWork, Memory
from fedsweep.method import FederatedMethod, merge
from fedsweep.records import ClientUpdate, Payload, ServerContext, State, SyncContext
from fedsweep.trees import ParamTree


@dataclass(frozen=True, kw_only=True)
class FaultAt(LocalTerm):
    """Ends its process at a client and position, unless the marker exists already."""

    client: int
    round: int
    position: int
    marker: str
    how: str = "kill"
    name: str = "fault"

    def loss(self, step: LocalStep) -> torch.Tensor | None:
        _, _, round, client, position = step.stream.key
        here = (client, round, position) == (self.client, self.round, self.position)
        if here and self.how == "nan":
            return step.logits.sum() * float("nan")
        if here and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGSTOP if self.how == "stop" else signal.SIGKILL)
        return None


@dataclass(frozen=True, kw_only=True)
class FaultAtStart(LocalTerm):
    """Ends its process when a client's job starts, unless the marker exists already; looks at no step."""

    needs_anchor: ClassVar[bool] = False
    client: int
    round: int
    marker: str
    name: str = "fault at start"

    def prepare(
        self, memory: Memory, anchor: ParamTree, client: ClientFacts = NOBODY
    ) -> tuple[Memory, ParamTree | None]:
        if (client.client, client.round) == (self.client, self.round) and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return memory, None


def with_fault_at_start(method: FederatedMethod, **where: object) -> FederatedMethod:
    return merge(method, FederatedMethod(name="fault", source="", terms=(FaultAtStart(**where),)))  # type: ignore[arg-type]


def with_fault(method: FederatedMethod, **where: object) -> FederatedMethod:
    return merge(method, FederatedMethod(name="fault", source="", terms=(FaultAt(**where),)))  # type: ignore[arg-type]


class Speaker(Refinement):
    """Publishes a number and a bank, and the params of the model, which change each round."""

    def init(self, context: ServerContext) -> State:
        return {"control": torch.zeros(context.layout.num_params)}

    def publish(self, state: State) -> Mapping[str, Published]:
        bank, number = Published(value=torch.arange(5.0)), Published(value=torch.tensor([3.0]))
        return {"bank": bank, "number": number, "control": Published(value=state["control"], like="params")}

    def refine(
        self, state: State, vector: torch.Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[torch.Tensor, State]:
        heard = torch.stack([update.extras["listener/heard"] for update in updates]).sum(0)
        return vector, {"control": 0.1 * vector[: sync.layout.num_params] + 1e-3 * heard}


@dataclass(frozen=True, kw_only=True)
class Listener(LocalTerm):
    """Puts what it hears into the gradient, remembers its share and sends the sum."""

    sends: ClassVar[bool] = True
    stateful: ClassVar[bool] = True
    name: str = "listener"

    def gradient(self, step: LocalStep) -> ParamTree:
        said = step.broadcast
        return {
            name: 0.01 * said[f"control/{name}"] + 1e-3 * (said["number"] + said["bank"].sum()) for name in step.params
        }

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, Payload]:
        heard = sum((value.sum() for value in work.values.values()), start=torch.zeros(()))
        before = memory.get("heard", torch.zeros(()))
        assert isinstance(before, torch.Tensor)
        return {"heard": before + heard}, {"heard": before + heard}


def spoken() -> FederatedMethod:
    return FederatedMethod(name="spoken", source="", terms=(Listener(),), refinements=(Speaker(),))
