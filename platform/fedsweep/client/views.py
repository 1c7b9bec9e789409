"""One client as probes, and terms outside the steps, see it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from fedsweep.client.shards import Shard
from fedsweep.components.local import Memory
from fedsweep.components.probes import LocalClient, Probe
from fedsweep.guard import check_named
from fedsweep.records import Payload
from fedsweep.streams import stream
from fedsweep.trees import ParamTree


@dataclass(kw_only=True)
class ClientViews:
    """Makes a client's views in a round; its data are made ready once, where somebody looks at them.

    Attributes:
        client: Its id.
        round: The round; 0 for the set-up exchange.
        seed: The run's.
        num_classes: Classes of the data set.
        shard: Its samples of the round.
        test_shard: Its share of the test set, where it is to test a model.
    """

    client: int
    round: int
    seed: int
    num_classes: int
    shard: Shard
    test_shard: Shard | None = None

    @cached_property
    def _inputs(self) -> Tensor:
        return self.shard.everything()[0]

    def view(
        self,
        purpose: str,
        model: nn.Module,
        *,
        params: ParamTree,
        anchor: ParamTree,
        memories: dict[str, Memory],
        reads_data: bool = True,
    ) -> LocalClient:
        """The client as it is now.

        Args:
            purpose: Names its random numbers.
            model: The module, loaded with ``params``; put into evaluation mode.
            params: Its params.
            anchor: The model that it last received; empty where nobody asked for it.
            memories: What it remembers, by term.
            reads_data: Whether its training samples are looked at.
        """
        model.eval()
        tests = (None, None) if self.test_shard is None else self.test_shard.everything()
        return LocalClient(
            client=self.client,
            round=self.round,
            inputs=self._inputs if reads_data else torch.empty(0),
            targets=self.shard.targets,
            num_classes=self.num_classes,
            anchor={name: anchor[name] for name in params if anchor},
            params=params,
            model=model,
            forward_with=lambda values, inputs: torch.func.functional_call(model, values, (inputs,), strict=False),
            stream=stream(self.seed, purpose, self.round, self.client),
            memories=memories,
            test_inputs=tests[0],
            test_targets=tests[1],
        )


def measured(probe: Probe, client: LocalClient, *, when: object) -> Payload:
    """What a probe measures on a client, checked; ``when`` is for the error's words."""
    found = probe.measure(client)
    check_named(found, Tensor, probe, "measure", when=when)
    return found
