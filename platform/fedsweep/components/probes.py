"""Probes: extra measurements that clients make for server components.

What a probe returns travels to the server in ``update.extras`` and is metered like everything else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from fedsweep.components.local import ClientFacts
from fedsweep.records import Payload
from fedsweep.streams import Stream
from fedsweep.trees import ParamTree


@dataclass(frozen=True, kw_only=True)
class LocalClient:
    """What a probe may look at: one client, on its own actor.

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


def client_view(
    facts: ClientFacts,
    module: nn.Module,
    batch: tuple[Tensor, Tensor],
    *,
    trees: tuple[ParamTree, ParamTree],
    stream: Stream,
) -> LocalClient:
    """A client as a probe sees it.

    Args:
        facts: What the client knows of itself.
        module: Its module, loaded.
        batch: All its inputs and targets.
        trees: Its anchor and its params.
        stream: Random numbers of the probe.
    """
    return LocalClient(
        client=facts.client,
        round=facts.round,
        inputs=batch[0],
        targets=batch[1],
        num_classes=len(facts.label_counts),
        anchor=trees[0],
        params=trees[1],
        model=module,
        forward_with=lambda params, x: torch.func.functional_call(module, params, (x,), strict=False),
        stream=stream,
    )


class Probe(ABC):
    """An extra measurement.

    Class attributes:
        when: ``"start"``: at the anchor, before the job's first step; ``"end"``: after its last; ``"round_end"``: the
            same, but only in the round's last job where a round has several sync points.
        reads_model: Whether it looks at the model. In the exchange before round 1 clients are then sent it.

    A concrete probe is a frozen dataclass with a ``name``, unique in a round; its tensors arrive under
    ``"<name>/<key>"``.
    """

    when: ClassVar[Literal["start", "end", "round_end"]] = "end"
    reads_model: ClassVar[bool] = True
    name: str

    @property
    def passes(self) -> float:
        """What a measurement costs, in forward passes of all the client's samples; 3 with a backward pass."""
        return 0

    @abstractmethod
    def measure(self, client: LocalClient) -> Payload:
        """The measurement; never changes what it is given."""
