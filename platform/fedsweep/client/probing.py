"""A client as probes see it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedsweep.client.shards import Shard
from fedsweep.components.local import ClientFacts, Memory
from fedsweep.components.probes import LocalClient, Probe
from fedsweep.records import Payload
from fedsweep.streams import Stream, stream
from fedsweep.trees import ParamTree


def client_view(
    facts: ClientFacts,
    module: nn.Module,
    shards: tuple[Shard, Shard | None],
    *,
    trees: tuple[ParamTree, ParamTree],
    memories: Mapping[str, Memory],
    reads_data: bool,
) -> LocalClient:
    """The client as it is now.

    Args:
        facts: What it knows of itself.
        module: Its module, loaded.
        shards: Its samples, and its share of the test set.
        trees: Its anchor and its params.
        memories: What its terms remember.
        reads_data: Its samples are looked at.
    """
    own, tests = shards
    test_inputs, test_targets = (None, None) if tests is None else tests.everything()

    def forward_with(params: ParamTree, inputs: Tensor) -> Tensor:
        logits: Tensor = torch.func.functional_call(module, params, (inputs,), strict=False)
        return logits

    return LocalClient(
        client=facts.client,
        round=facts.round,
        inputs=own.everything()[0] if reads_data else torch.empty(0),
        targets=own.targets,
        num_classes=len(facts.label_counts),
        anchor=trees[0],
        params=trees[1],
        model=module,
        forward_with=forward_with,
        stream=Stream(("unset",)),
        memories=memories,
        test_inputs=test_inputs,
        test_targets=test_targets,
    )


def asked(probe: Probe, view: LocalClient, seed: int) -> Payload:
    """What a probe measures.

    Args:
        probe: The probe.
        view: The client.
        seed: The run's.
    """
    view.model.eval()
    draws = stream(seed, f"probe {probe.name}", view.round, view.client)
    return probe.measure(dataclasses.replace(view, stream=draws))
