"""The parts that every round of a run is played with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn

from fedsweep.components.codec import Communication
from fedsweep.engine.aggregation import Aggregator
from fedsweep.engine.ahead.card_traffic import CardTraffic
from fedsweep.engine.cost import CostModel
from fedsweep.engine.state import RunState
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import Fleet


@dataclass(frozen=True, kw_only=True)
class RoundTools:
    """The parts that every round of a run is played with.

    Attributes:
        experiment: The experiment.
        fleet: Where the clients are.
        aggregator: The method's server side.
        costs: What messages count.
        model: A template for the components' forward passes.
        keep: Called with a state that holds a refinement's unfinished work.
        message, note: Take a component's sentences for the user, and what workers have to say.
        working: Takes a component's lines on how far long work is.
        codecs: What messages go through in this round, where that is chosen round by round.
    """

    experiment: Experiment
    fleet: Fleet
    aggregator: Aggregator
    costs: CostModel
    model: nn.Module
    keep: Callable[[RunState], None]
    message: Callable[[str], None]
    note: Callable[[Sequence[str]], None]
    working: Callable[[str], None]
    codecs: Communication | None = None

    @cached_property
    def card_traffic(self) -> CardTraffic:
        """The traffic beside models, as methods' cards say."""
        return CardTraffic(self.experiment, self.costs)

    @cached_property
    def of_syncs(self) -> Mapping[str, Any]:
        """Fields of a :class:`SyncContext` that stay the same throughout a run."""
        experiment, method = self.experiment, self.experiment.method
        proxy, validation = experiment.server_tensors
        return {
            "layout": self.costs.layout,
            "topology": experiment.world.topology,
            "combine": None if method.aggregation.plain_mean else method.aggregation.combine,
            "moves_from": method.moves_from,
            "shares_of": method.weighting.shares_of,
            "model": self.model,
            "message": self.message,
            "working": self.working,
            "forward_flops": self.costs.forward_flops,
            "device": experiment.server_device,
            "proxy_data": proxy,
            "validation_data": validation,
        }

    @cached_property
    def clients_remember(self) -> bool:
        """Tell whether clients keep anything but work that is under way."""
        experiment, optimizer = self.experiment, self.experiment.training.optimizer
        return experiment.method.remembers or experiment.up_codec.error_feedback or optimizer.keep == "persist"
