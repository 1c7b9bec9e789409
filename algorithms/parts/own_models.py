"""Parts of methods whose clients keep a model of their own, of which a part or nothing travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, cast

from torch import Tensor, nn

from fedsweep.components import (
    ClientTest,
    ClientUpdate,
    Evaluation,
    LocalClient,
    LocalTerm,
    LocalWork,
    Memory,
    ParamTree,
    PartOfModel,
    Payload,
    RoundContext,
    ServerContext,
    State,
    SubModel,
    SubModelPolicy,
    head_names,
    logits_with,
)

from .features import network_with_features


def own_values(memory: Mapping[str, object]) -> ParamTree | None:
    """Return the model that :class:`KeepsModel` put there; None before the first."""
    return cast(ParamTree | None, memory.get("values"))


class KeepsModel(LocalTerm):
    """Remembers the model that the client ends a job with, float buffers too, and starts the next one from it.

    Reading: where its sub-model holds what none of its earlier ones did, it starts from what it received.
    """

    stateful: ClassVar[bool] = True
    keeps_models: ClassVar[bool] = True

    def prepare(self, memory: Memory, anchor: ParamTree) -> tuple[Memory, ParamTree | None]:
        # A copy: what a step notes there stays out of what was handed in.
        return dict(memory), own_values(memory)

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, Payload]:
        return {"values": {name: value.detach().cpu().clone() for name, value in work.values.items()}}, {}


@dataclass(frozen=True, kw_only=True)
class Travels(SubModelPolicy):
    """The clients' models are whole, but only a part of them travels.

    Attributes:
        method: For the message where a network does not say where its head is.
        part: ``"body"``: all but the head; ``"nothing"``.
    """

    withholds: ClassVar[bool] = True
    method: str
    part: Literal["body", "nothing"]

    def init(self, context: ServerContext) -> State:
        """Return the names of what travels.

        Raises:
            ConfigError: The network does not say where its features and its head are.
        """
        model = network_with_features(context.model, method=self.method, use="keeps with the clients")
        if self.part == "nothing":
            return {"names": []}
        return {"names": sorted(context.layout.model(context.vector).keys() - head_names(model))}

    def assign(self, state: State, context: RoundContext) -> tuple[Mapping[int, SubModel], State]:
        return dict.fromkeys(context.cohort, PartOfModel(names=frozenset(state["names"]))), state


@dataclass(frozen=True, kw_only=True)
class OwnModelTest(ClientTest):
    """The model that a client trained last, on its share of the test set; the server's, where it never took part.

    Attributes:
        term: Whose memory it is in.
    """

    term: str

    def predictor(self, client: LocalClient) -> Callable[[Tensor], Tensor]:
        own = own_values(client.memories.get(self.term, {})) or {}
        values = {name: value.to(client.targets.device) for name, value in own.items()}
        return lambda inputs: logits_with(client.model, values, inputs)


@dataclass(frozen=True, kw_only=True)
class OwnModels(Evaluation):
    """The server's model answers the server's tests; clients test their own.

    Attributes:
        term: Whose memory they are in.
    """

    term: str

    def predict(self, state: State, model: nn.Module, updates: Sequence[ClientUpdate], inputs: Tensor) -> Tensor:
        logits: Tensor = model(inputs)
        return logits

    def client_test(self) -> ClientTest:
        return OwnModelTest(term=self.term)
