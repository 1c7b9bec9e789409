"""What a method declares to pass through beside the plain step shows in FLOPs, MACs, the clock and the forecast."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import pytest
import torch

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.components.aggregation import Refinement
from fedsweep.components.local import LocalTerm, Passes, TaskLoss
from fedsweep.components.planning import FixedInterval
from fedsweep.components.probes import LocalClient, Probe
from fedsweep.engine.forecast import forecast
from fedsweep.method import FederatedMethod
from fedsweep.records import Payload, RoundRecord, State
from fedsweep.testing import local_engine, run_rounds, tiny_device, tiny_experiment, with_devices

# One sample's forward pass is 24 MACs, a step on it 6 x 24 FLOPs. 16 samples a client in 4 steps.
PLAIN = 6 * 24 * 16


@dataclass(frozen=True, kw_only=True)
class TwoTeachers(LocalTerm):
    name: str = "teachers"

    def passes(self, batch_size: int, num_classes: int) -> Passes:
        return Passes(step=2.0)


@dataclass(frozen=True, kw_only=True)
class Doubled(TaskLoss):
    passes = 6


class Look(Probe):
    """Measures nothing, at the price of a forward and a backward pass."""

    name = "look"
    passes = 3

    def measure(self, client: LocalClient) -> Payload:
        return {"seen": torch.zeros(1)}


class LookOnce(Look):
    when: ClassVar[Literal["start", "end", "round_end"]] = "round_end"
    name = "look once"


@dataclass(frozen=True, kw_only=True)
class Asking(Refinement):
    """Has clients measure."""

    probe: Probe

    def probes(self, state: State, round: int) -> tuple[Probe, ...]:
        return (self.probe,)

    def refine(self, state: State, vector: Any, updates: Any, sync: Any) -> Any:
        return vector, state


def first_row(method: FederatedMethod) -> tuple[RoundRecord, int]:
    """A round's row, and the forecast of its FLOPs; each client computes at PLAIN FLOPs a second."""
    experiment = tiny_experiment(method, num_clients=3, cohort_size=3, sizes=(16, 16, 16), rounds=1, local_steps=4)
    experiment = with_devices(experiment, [tiny_device(PLAIN, bits_per_s=1e30)])
    told = forecast(experiment)
    row = run_rounds(local_engine(experiment)).records[0]
    assert told.sim_time_s == row.sim_time_s
    return row, told.flops


CUT = FixedInterval(interval=2, sync_rule="paper")


@pytest.mark.parametrize(
    ("fields", "times", "macs"),
    [
        ({}, 1, 24),
        ({"terms": (TwoTeachers(),)}, 5 / 3, 24 * 5 / 3),
        ({"objective": Doubled()}, 2, 48),
        ({"objective": Doubled(), "terms": (TwoTeachers(),)}, 8 / 3, 24 * 8 / 3),
        # Three passes of all 16 samples are what the training itself costs.
        ({"refinements": (Asking(probe=Look()),)}, 2, 24),
        ({"refinements": (Asking(probe=Look()),), "pacing": CUT}, 3, 24),
        ({"refinements": (Asking(probe=LookOnce()),), "pacing": CUT}, 2, 24),
    ],
)
def test_declared_passes_cost_flops_macs_and_time(fields: dict[str, Any], times: float, macs: float) -> None:
    row, told = first_row(replace(fedavg(), **fields))
    assert row.flops == told == pytest.approx(3 * PLAIN * times, abs=0.5)
    assert row.fwd_macs_per_sample == pytest.approx(macs)
    assert row.sim_time_s == pytest.approx(times)
