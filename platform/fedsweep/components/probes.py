"""Probes: extra measurements that clients make for server components.

What a probe returns travels to the server in ``update.extras`` and is metered like everything else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from fedsweep.guard import named, returns
from fedsweep.parameters.ranges import Checked
from fedsweep.records import Payload
from fedsweep.streams import Stream
from fedsweep.trees import Inputs, ParamTree, taken

# A pass over all of a client's share at once might be more than the memory has room for.
_TESTED_AT_ONCE = 1000
# The key under which a probe tells what it took; see Probe.passes.
PASSES_TAKEN = "passes"


@dataclass(frozen=True, kw_only=True)
class LocalClient:
    """One client, on its own actor, as a probe may look at it.

    Attributes:
        client: Its id.
        round: The round; 0 for the set-up exchange.
        inputs: Its transformed samples of the round [n, ...]; no augmentation.
        targets: Their labels [n].
        num_classes: Classes of the data set.
        anchor: The params that it last received.
        params: Its params now.
        model: The module, loaded with ``params``, in evaluation mode; a probe leaves it as it was.
        forward_with: ``forward_with(params, inputs) -> logits``, a functional call.
        stream: Random numbers of this probe.
        broadcast: What the server sent beside the model; for a :class:`ClientTest` see there.
        memories: What it remembers of each stateful term, by the term's name; empty before its first round.
        test_inputs: Its share of the test set [t, ...], for a :class:`ClientTest`; None for other probes.
        test_targets: Their labels [t].
    """

    client: int
    round: int
    inputs: Tensor
    targets: Tensor
    num_classes: int
    anchor: ParamTree
    params: ParamTree
    model: nn.Module
    forward_with: Callable[[ParamTree, Tensor], Tensor]
    stream: Stream
    broadcast: Payload = field(default_factory=dict)
    memories: Mapping[str, dict[str, object]] = field(default_factory=dict)
    test_inputs: Inputs | None = None
    test_targets: Tensor | None = None


class Probe(Checked, ABC):
    """An extra measurement.

    Class attributes:
        when: ``"start"``: at the anchor, before the job's first step; ``"end"``: after its last; ``"round_end"``: the
            same, but only in the round's last job where a round has several sync points.
        reads_model: Whether it looks at the model. In the exchange before round 1 clients are then sent it.
        reads_data: Whether it looks at the training samples; otherwise they need not be made ready.

    A concrete probe is a frozen dataclass with a ``name``, unique in a round; its tensors arrive under
    ``"<name>/<key>"``.
    """

    when: ClassVar[Literal["start", "end", "round_end"]] = "end"
    reads_model: ClassVar[bool] = True
    reads_data: ClassVar[bool] = True
    name: str

    def asks(self, client: int) -> bool:
        """Tell whether a client is asked; who is not gets and sends nothing for it.

        Asked in the exchange before round 1, and in rounds where ``ServerComponent.probes_stay``.
        """
        return True

    @property
    def passes(self) -> float:
        """Cost of a measurement, in forward passes of all the client's samples; 3 with a backward pass.

        Where only the measurement can tell, this is the most that it may cost, and what ``measure`` returns under
        ``PASSES_TAKEN`` is what it did cost; that is told to the platform, and not sent.
        """
        return 0

    def passes_over(self, num_samples: int) -> float:
        """Return the same for a client with so many samples, in forward passes of one: :attr:`passes` of each."""
        return self.passes * num_samples

    @abstractmethod
    @returns(named(Tensor))
    def measure(self, client: LocalClient) -> Payload:
        """Return the measurement; never changes what it is given."""


def sent_of(answer: Payload, probes: Sequence[Probe]) -> Payload:
    """Return what a client sends of its answer to these probes."""
    unsent = {f"{probe.name}/{PASSES_TAKEN}" for probe in probes}
    return {name: tensor for name, tensor in answer.items() if name not in unsent}


def passes_taken(answer: Payload, probes: Sequence[Probe]) -> dict[str, float]:
    """Return what the probes took that tell it in a client's answer, by their names; see :attr:`Probe.passes`."""
    taken = {probe.name: answer.get(f"{probe.name}/{PASSES_TAKEN}") for probe in probes}
    return {name: float(tensor) for name, tensor in taken.items() if tensor is not None}


class ClientTest(Probe):
    """A test of the model that a client itself would use, on its own share of the test set.

    The server's tests and these never mix: they are columns of their own. What is found out is nothing that a client
    would send, so it is not metered.

    Class attributes:
        reads_broadcast: What the server would send beside its model is read.
    """

    reads_broadcast: ClassVar[bool] = False
    name: ClassVar[str] = "test"  # type: ignore[misc]
    reads_data = False

    @abstractmethod
    def predictor(self, client: LocalClient) -> Callable[[Tensor], Tensor]:
        """Return the client's own model: inputs [B, ...] to logits [B, C].

        Args:
            client: ``anchor`` and ``params`` are the server's model; what it remembers is in ``memories``.
        """

    def measure(self, client: LocalClient) -> Payload:
        inputs, targets = client.test_inputs, client.test_targets
        if inputs is None or targets is None or not len(targets):
            # None of none: the server makes NaN of it, so the client is in no mean.
            return {"hits": torch.tensor(0), "samples": torch.tensor(0)}
        predict = self.predictor(client)
        with torch.no_grad():
            starts = range(0, len(targets), _TESTED_AT_ONCE)
            parts = (taken(cast(Tensor, inputs), slice(start, start + _TESTED_AT_ONCE)) for start in starts)
            predictions = [predict(part).argmax(1) for part in parts]
        return {"hits": (torch.cat(predictions) == targets).sum(), "samples": torch.tensor(len(targets))}
