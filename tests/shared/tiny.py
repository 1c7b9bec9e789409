"""What tests of methods and of the engine need again and again: a small network, runs, places in a run, updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl, dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.client.lanes.staging import StagedBatches
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.local import LocalStep
from fedsweep.components.planning import FixedInterval
from fedsweep.engine.engine import Engine
from fedsweep.engine.state import RunState
from fedsweep.experiment.experiment import Experiment
from fedsweep.method import FederatedMethod, merge
from fedsweep.models.networks.chains import LeNet5, Mlp
from fedsweep.models.unit_submodel import unit_submodel
from fedsweep.records import ClientUpdate, RoundRecord, ServerContext, SyncContext
from fedsweep.runs.checkpoints.checkpoint import CheckpointStore
from fedsweep.streams import stream
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.testing import linear_model, local_engine, run_rounds, tiny_experiment, tiny_pictures, with_devices
from fedsweep.trees import layout_of
from fedsweep.world.devices import DeviceProfile

METHODS = {
    "fedavg": fedavg(),
    "dynamicsgd": dynamicsgd(),
    "two speeds": dynamicfl(high_interval=2, low_interval=3, group="random", sync_rule="paper"),
    "only high": dynamicfl(high_interval=2, low_interval=5, group="random", high_only=True, idle_clients="authors"),
    "proximal": merge(fedprox(mu=0.5), dynamicsgd()),
}
KEPT = {keep: OptimizerSettings(momentum=0.9, nesterov=True, keep=keep) for keep in ("reset", "persist", "average")}

# -- networks ----------------------------------------------------------------------------------------------------------


def net() -> Mlp:
    """Features, a head and two groups of eight units."""
    return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)


class Halves(nn.Module):
    """A linear model that is trained in bfloat16, which numpy has not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear_model().bfloat16()

    def forward(self, images: Tensor) -> Tensor:
        outputs: Tensor = self.linear(images.to(next(self.parameters()).dtype))
        return outputs.float()


def normed() -> nn.Module:
    """Float buffers between the inputs and a linear layer; only the statistics, no params."""
    return nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 4))


def part_of(kept: Mapping[str, Any], scales: Mapping[str, Any] | None = None) -> SubModel:
    """These units of :func:`net`."""
    return unit_submodel(net().unit_groups(), kept, scales=scales)


# -- runs --------------------------------------------------------------------------------------------------------------


def run(method: FederatedMethod, **options: Any) -> RunState:
    """The end of a run; options as of ``tiny_experiment``."""
    return run_rounds(local_engine(tiny_experiment(method, **options)))


def run_net(method: FederatedMethod, **options: Any) -> RunState:
    """The same with :func:`net`."""
    return run(method, **({"build": net} | options))


def vector(method: FederatedMethod, **options: Any) -> Tensor:
    """The model in the end."""
    return run(method, **options).vector


def units_experiment(method: FederatedMethod, *, devices: Sequence[DeviceProfile] = (), **more: Any) -> Experiment:
    """Two epochs with a network that has units, on devices where there are any."""
    made = tiny_experiment(method, **({"build": net, "local_epochs": 2} | more))
    return with_devices(made, devices) if devices else made


def run_units(method: FederatedMethod, **more: Any) -> RunState:
    """The end of such a run."""
    return run_rounds(local_engine(units_experiment(method, **more)))


def lenet_run(method: FederatedMethod) -> RoundRecord:
    """A round of two clients with LeNet-5."""
    images, labels = tiny_pictures(4)
    world: dict[str, Any] = {"images": images, "labels": labels, "num_clients": 2, "cohort_size": 2, "sizes": (2, 2)}
    build = lambda: LeNet5(input_shape=(3, 32, 32), num_classes=10)  # noqa: E731
    return run(method, build=build, rounds=1, **world).records[0]


def seams_engine(**fields: Any) -> Engine:
    """Six clients, three of them in each of three rounds; a round of four steps is cut in two where asked."""
    cut = FixedInterval(interval=2, sync_rule="paper") if fields.pop("cut", False) else fedavg().pacing
    options = {key: fields.pop(key) for key in ("rounds", "seed") if key in fields}
    method = FederatedMethod(name="test", source="", pacing=cut, **fields)
    return local_engine(tiny_experiment(method, local_steps=4, **options))


def resumed(made: Experiment, folder: Path, *, rounds: int) -> RunState:
    """The end of a run that was stopped after so many rounds and went on from its checkpoint on the disk."""
    engine, again = local_engine(made), local_engine(made)
    CheckpointStore(folder, keep=1, config_hash="x").save(run_rounds(engine, rounds=rounds), fetch=engine.fleet.fetch)
    state = CheckpointStore(folder, keep=1, config_hash="x").newest(keep_handle=again.fleet.keep).state
    assert state is not None and state.round == rounds
    return run_rounds(again, state)


def stopped(experiment: Experiment) -> tuple[int, str | None]:
    """The round after which it ends, and why."""
    engine = local_engine(experiment)
    state, reason = engine.start(), None
    while reason is None:
        reason = engine.finished_by(state)
        if reason is None:
            state, reason = engine.advance(state)
    return state.round, reason


# -- comparisons -------------------------------------------------------------------------------------------------------


def timeless(records: Sequence[RoundRecord]) -> list[RoundRecord]:
    """The rows without what a clock says."""
    return [replace(r, timestamp_ms=0, wall_time_s=0, eval_time_s=0, server_time_s=0) for r in records]


def assert_same(run: RunState, expected: RunState) -> None:
    assert torch.equal(run.vector, expected.vector)
    assert run.version == expected.version
    assert timeless(run.records) == timeless(expected.records)
    assert run.held == expected.held


def comparable(state: RunState) -> list[tuple[object, ...]]:
    """Accuracy, loss, traffic, arithmetic and time of each round."""
    return [
        (r.test_accuracy, r.train_loss, r.bytes_up, r.bytes_down, r.flops, r.fwd_macs_per_sample, r.sim_time_s)
        for r in state.records
    ]


# -- what components are given -----------------------------------------------------------------------------------------


def tiny_update(client: int = 0, vector: Tensor | None = None, **more: Any) -> ClientUpdate:
    """One step at 0.1 on one sample, unless ``more`` says otherwise; needs a ``layout``."""
    facts: dict[str, Any] = {"num_samples": 1, "steps": 1, "effective_steps": 1.0, "learning_rate": 0.1} | more
    facts = {"submodel": FULL_MODEL, "anchor_version": 0} | facts
    return ClientUpdate(client=client, vector=vector, **facts)


def tiny_sync(model: nn.Module, vector: Tensor, **more: Any) -> SyncContext:
    """The end of round 1, with the layout of the model."""
    facts: dict[str, Any] = {"round": 1, "index": 0, "ends_round": True, "anchors": {}, "learning_rate": 0.1}
    facts |= {"cohort": (0,), "stream": stream(0, "test")} | more
    layout = facts.pop("layout", None) or layout_of(model)
    return SyncContext(model=model, vector=vector, layout=layout, **facts)


def tiny_server(model: nn.Module, vector: Tensor, **more: Any) -> ServerContext:
    """One client, four classes, ten rounds; nobody's profile."""
    facts: dict[str, Any] = {"num_clients": 1, "num_classes": 4, "num_rounds": 10, "profiles": ()}
    facts |= {"stream": stream(0, "test")} | more
    return ServerContext(model=model, vector=vector, **({"layout": layout_of(model)} | facts))


def tiny_step(model: nn.Module, **more: Any) -> LocalStep:
    """The first step on one input of zero, with the params of the model."""
    facts: dict[str, Any] = {"inputs": torch.zeros(1), "targets": torch.zeros(1), "anchor": {}, "memory": {}}
    facts |= {"params": dict(model.named_parameters()), "broadcast": {}, "stream": stream(0, "test")}
    return LocalStep(model=model, **(facts | {"position": 0, "learning_rate": 0.1} | more))


def with_totals(records: Iterable[RoundRecord]) -> list[RoundRecord]:
    """A run's rows from its first on, with the bytes so far as the engine counts them."""
    rows = list(records)
    totals = accumulate(row.bytes_up + row.bytes_down for row in rows)
    return [replace(row, total_bytes=total) for row, total in zip(rows, totals, strict=True)]


def stage_on_cpu(patch: pytest.MonkeyPatch, steps: int) -> None:
    """Have tiles lay out the batches of so many steps at once, as on a GPU."""
    number = property(lambda staged: steps, lambda staged, value: None)
    patch.setattr(StagedBatches, "_num_staged", number, raising=False)
