"""FedDrop: each device trains with its own dropout of hidden neurons, which it neither gets nor sends.

Source: Wen, Jeon, Huang (2022): Federated dropout - a simple approach for enabling federated learning on resource
constrained devices. IEEE Wireless Communications Letters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import cast

import numpy as np
from torch import nn

from fedsweep import Card, ConfigError, FederatedMethod, Limit, Network, with_card
from fedsweep.components import (
    BYTES_PER_VALUE,
    FULL_MODEL,
    BelowOne,
    ClientWork,
    ComponentReport,
    DeviceProfile,
    FlatLayout,
    Positive,
    RoundContext,
    ServerContext,
    State,
    SubModel,
    SubModelPolicy,
    UnitGroup,
    client_time,
    layer_costs,
    training_flops,
    unit_submodel,
)

from .feddhad.dropout_rates import drawn_units
from .parts.server_updates import Aggregate, aggregation
from .parts.unit_draws import unit_groups_of


def hidden_neurons(model: nn.Module | None) -> tuple[UnitGroup, ...]:
    """Return the neurons of hidden fully connected layers; empty where a network has only convolutions or heads."""
    return tuple(group for group in unit_groups_of(model, method="feddrop") if group.kind == "linear")


def costs_by_share(
    model: nn.Module, layout: FlatLayout, groups: Sequence[UnitGroup]
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return values and multiply-accumulates as coefficients of 1, s, s^2, where a share s of the units stays.

    They are the expected values for units that are kept independently with probability s: a layer between two dropped
    ones shrinks with s^2, the first and the last with s.

    Args:
        model: The full network.
        layout: How it lies in its vector.
        groups: Whose units are dropped.
    """
    cuts = Counter(name for group in groups for name, *_ in (*group.produced, *group.consumed))
    values, macs = [0, 0, 0], [0, 0, 0]
    for name, shape in zip(layout.names, layout.shapes, strict=True):
        values[cuts[name]] += prod(shape)
    for name, (layer_macs, _) in layer_costs(model, cast(Network, model).input_shape).items():
        macs[cuts[name]] += layer_macs
    return (values[0], values[1], values[2]), (macs[0], macs[1], macs[2])


def rate_within(
    budget_s: float,
    device: DeviceProfile,
    work: ClientWork,
    *,
    values: Sequence[int],
    macs: Sequence[int],
    cap: float,
) -> float:
    """Return the smallest rate, 0 .. ``cap``, at which the device's round fits the budget; ``cap`` where none does.

    Args:
        budget_s: Seconds for download, training and upload.
        device: Who works.
        work: How much.
        values: See :func:`costs_by_share`.
        macs: Likewise.
        cap: Largest rate, below 1.

    Source: Wen, Jeon, Huang (2022), the rate from the latency constraint. Reading: there all fully connected layers
    are charged (1 - rate)^2; the first and the last are cut along one side only, so they are charged 1 - rate.
    """
    flops = [training_flops(count, work.samples_in(work.steps)) for count in macs]
    bits = [8 * BYTES_PER_VALUE * count for count in values]
    fixed = client_time(device, steps=work.steps, flops=flops[0], bits_down=bits[0], bits_up=bits[0]).total_s
    linear, square = (
        f / device.flops_per_s + b / device.down_bits_per_s + b / device.up_bits_per_s
        for f, b in zip(flops[1:], bits[1:], strict=True)
    )
    left = budget_s - fixed
    if linear + square <= left:
        return 0.0
    if left <= 0:
        return cap
    # The root of square s^2 + linear s = left, in the form that holds for square = 0, too, and cancels no digits.
    share = 2 * left / (linear + sqrt(linear**2 + 4 * square * left))
    return min(1 - share, cap)


@dataclass(frozen=True, kw_only=True)
class DroppedNeurons(SubModelPolicy):
    """Each hidden neuron stays with probability 1 - rate, for each device and round anew; kept ones count 1/(1 - rate).

    Attributes:
        rate: Everybody's rate, or with a budget the largest one; at least 0 and below 1.
        budget_s: Seconds that a device's round may take: its rate is the smallest that fits.

    Source: Wen, Jeon, Huang (2022), section II. Reading: the multiplier acts on the kept activations in training; in
    the weights that travel, it would shrink the steps on the original weights by (1 - rate)^2. Reading: a layer that
    would lose all its neurons keeps its first.
    """

    rate: BelowOne
    budget_s: Positive | None = None

    def init(self, context: ServerContext) -> State:
        """Return the network's costs by the share of units that stays.

        Raises:
            ConfigError: The network lists no units, or there is a budget but no devices.
        """
        state: dict[str, object] = {"values": (0, 0, 0), "macs": (0, 0, 0), "mean_rate": 0.0}
        if not self.rate:
            return state
        groups = hidden_neurons(context.model)
        if self.budget_s is not None:
            if any(profile.device is None for profile in context.profiles):
                raise ConfigError(
                    f"feddrop with budget_s={self.budget_s} needs the devices' speeds; set scenario.devices, or give"
                    " method.rate alone"
                )
            state["values"], state["macs"] = costs_by_share(context.model, context.layout, groups)
        return state

    def assign(self, state: State, context: RoundContext) -> tuple[Mapping[int, SubModel], State]:
        if not self.rate or not context.cohort:
            return dict.fromkeys(context.cohort, FULL_MODEL), {**state, "mean_rate": 0.0}
        groups, rates = hidden_neurons(context.model), {}
        parts: dict[int, SubModel] = {}
        for client in context.cohort:
            rates[client] = self._rate(state, context, client) if groups else 0.0
            units, scales = drawn_units(
                groups,
                {group.name: np.full(group.size, rates[client]) for group in groups},
                generator=context.stream.child("units", client).numpy(),
            )
            every_group = unit_groups_of(context.model, method="feddrop")
            parts[client] = unit_submodel(every_group, units, scales=scales)
        return parts, {**state, "mean_rate": float(np.mean(list(rates.values())))}

    def _rate(self, state: State, context: RoundContext, client: int) -> float:
        device = context.profiles[client].device
        if self.budget_s is None or device is None:
            return self.rate
        return rate_within(
            self.budget_s, device, context.work[client], values=state["values"], macs=state["macs"], cap=self.rate
        )

    def report(self, state: State) -> ComponentReport:
        """Return the mean rate of the round's devices; 0 where the network has no hidden neurons."""
        return ComponentReport(metrics={"dropout_device_rate": state["mean_rate"]})


@with_card(
    Card(
        title="FedDrop",
        source="Wen, Jeon, Huang, IEEE WCL 2022",
        needs=("units",),
        limits=(Limit(given={"rate": 0.0}),),
        live=("dropout_device_rate",),
    )
)
def feddrop(
    *, rate: BelowOne = 0.5, budget_s: Positive | None = None, aggregate: Aggregate = "masked"
) -> FederatedMethod:
    """FedAvg with dropout of hidden neurons in each device's round, so that their weights need not travel.

    Convolutions and attention travel whole; a network without hidden fully connected layers is trained as by FedAvg.

    Args:
        rate: Chance with which a neuron is left out, at least 0 and below 1; 0 is FedAvg bit for bit.
        budget_s: Seconds that a device's round may take: each device has the smallest rate up to `rate` that fits;
            needs scenario.devices.
        aggregate: masked: each value is the mean over the devices that hold it; complete: devices that do not hold a
            value count with the server's.
    """
    return FederatedMethod(
        name="feddrop",
        submodels=DroppedNeurons(rate=rate, budget_s=budget_s),
        server_update=aggregation(aggregate),
    )
