"""Clients stepped together are the clients stepped one by one, whoever shares a tile with whom."""

from __future__ import annotations

import collections
import gc
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tiny import stage_on_cpu
from torch import Tensor, nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl, dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.federated_dropout import federated_dropout
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.catalog import build_method
from fedsweep.client.lanes import gpu_memory
from fedsweep.client.lanes.gpu_memory import lanes_that_fit
from fedsweep.client.lanes.grouping import Lanes
from fedsweep.client.lanes.lane import Lane
from fedsweep.client.lanes.optimizer import LaneOptimizer
from fedsweep.client.lanes.tile import Tile
from fedsweep.client.messages import Handle, LaneSettings, Segment, SegmentReply
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.client.shards import Batches
from fedsweep.components.local import LocalStep, LocalTerm, Memory, TaskLoss
from fedsweep.engine.engine import Engine
from fedsweep.engine.forecast import lanes_refused
from fedsweep.engine.state import RunState
from fedsweep.errors import ClientJobError
from fedsweep.experiment.experiment import Experiment
from fedsweep.experiment.schedules import Exponential
from fedsweep.fleet.fleet import LocalFleet, make_worker, merged_answers
from fedsweep.method import FederatedMethod, merge
from fedsweep.models.networks.chains import Mlp
from fedsweep.models.registry import MODELS
from fedsweep.models.unit_submodel import unit_submodel
from fedsweep.streams import stream
from fedsweep.tasks.kinds import Classification
from fedsweep.testing import (
    build_model,
    local_engine,
    run_rounds,
    tiny_data,
    tiny_experiment,
    tiny_pictures,
    with_parts,
)
from fedsweep.testing.fleets import SplitFleet
from fedsweep.trees import FlatLayout, ParamTree, weighted_mean

EXHAUSTIVE = pytest.mark.exhaustive
UNEVEN = (20, 17, 9, 13, 30, 7)


def network() -> nn.Module:
    return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8)


def experiment(method: FederatedMethod, **more: Any) -> Experiment:
    """Six clients of unequal sizes: batches of four, and smaller ones at the end of each pass."""
    images, labels = tiny_data(num_samples=40, seed=9, dtype=np.float64 if more.get("double") else np.float32)
    world = {"proxy": (images, None), "validation": (images[:20], labels[:20])}
    settings = {"build": network, "sizes": UNEVEN, "cohort_size": 5, "local_epochs": 2}
    return tiny_experiment(method, **(settings | world | more))


def in_lanes(work: Experiment, width: int = 3) -> Experiment:
    return replace(work, lanes=LaneSettings(width=width))


def both(work: Experiment, *, width: int = 3) -> tuple[RunState, RunState, list[str]]:
    """One by one, and in lanes with what was said."""
    engine = local_engine(in_lanes(work, width))
    return run_rounds(local_engine(work)), run_rounds(engine), engine.notes


def off(first: RunState, second: RunState) -> float:
    """Largest difference of the models over the largest value."""
    return float((first.vector - second.vector).abs().max() / first.vector.abs().max())


OPTIMIZERS = {
    "sgd": OptimizerSettings(),
    "momentum": OptimizerSettings(momentum=0.9, keep="persist"),
    "averaged momentum": OptimizerSettings(momentum=0.9, keep="average"),
    "everything": OptimizerSettings(momentum=0.9, nesterov=True, weight_decay=0.01, clip_norm=0.5),
    "adam": OptimizerSettings(name="adam", weight_decay=0.01),
    "adam for life": OptimizerSettings(name="adam", keep="persist"),
}


@pytest.mark.parametrize(
    ("optimizer", "double", "within"),
    [
        *((optimizer, True, 1e-12) for optimizer in OPTIMIZERS),
        *(
            pytest.param(optimizer, False, 1e-5, marks=() if optimizer == "adam" else EXHAUSTIVE)
            for optimizer in OPTIMIZERS
        ),
    ],
)
def test_each_optimizer_is_its_own_row_by_row(optimizer: str, double: bool, within: float) -> None:
    alone, together, notes = both(experiment(fedavg(), optimizer=OPTIMIZERS[optimizer], double=double))
    assert off(alone, together) <= within and notes == []
    assert together.records[-1].train_loss == pytest.approx(alone.records[-1].train_loss, rel=within)
    assert [r.local_steps for r in together.records] == [r.local_steps for r in alone.records]


def test_adams_steps_are_counted_beyond_those_that_bfloat16_tells_apart() -> None:
    layout = FlatLayout(names=("w",), shapes=((2,),), num_params=2, num_buffers=0, dtype=torch.bfloat16)
    rows, gradients = torch.zeros(2, 3, 2, dtype=torch.bfloat16)
    optimizer = LaneOptimizer(OPTIMIZERS["adam"], rows, gradients, layout=layout)
    for _ in range(300):
        optimizer.step()
    assert optimizer.slots["step"].flatten().tolist() == [300.0] * 3


IN_LANES: dict[str, dict[str, object]] = {
    "fedsgd": {},
    "fedprox": {"mu": 0.1},
    "fedadam": {},
    "scaffold": {},
    "feddyn": {"weighting": "size"},
    "fednova": {},
    "fedensemble": {"members": "all"},
    "abavg": {},
    "dynamicsgd": {},
    "dynamicfl": {"high_interval": 1, "low_interval": 4, "high_only": False},
    "fedstg": {},
    "dynafed": {"snapshots": 2, "horizon_rounds": 1, "inner_steps": 2, "iterations": 2, "images_per_class": 1},
    "feddh": {},
    "fedjs": {},
    "fedad": {"base_rate": 0.3},
    "federated_dropout": {},
    "heterofl": {},
}
WITH_WHOLE_BATCHES: dict[str, dict[str, object]] = {"moon": {}}
ONE_BY_ONE: dict[str, tuple[dict[str, object], str]] = {
    "fedmix": ({}, "random numbers"),
    "fedgen": ({"noise_width": 3, "hidden_width": 5, "generator_steps": 4}, "random numbers"),
    "fjord": ({}, "changes from step to step"),
}


# Plain, a term, memories, two speeds, work that outlasts its round, synthetic data, sub-models, features.
SHOWN = ("fedsgd", "fedprox", "scaffold", "dynamicfl", "fedstg", "dynafed", "fedad", "moon")
SINGLE = "scaffold"


@pytest.mark.parametrize(
    ("name", "double", "within"),
    [
        pytest.param(name, double, within, marks=() if name == SINGLE or (double and name in SHOWN) else EXHAUSTIVE)
        for name in (*IN_LANES, *WITH_WHOLE_BATCHES)
        for double, within in ((True, 1e-12), (False, 1e-5))
    ],
)
def test_each_method_is_itself_in_lanes(name: str, double: bool, within: float) -> None:
    method = build_method({"name": name, **(IN_LANES | WITH_WHOLE_BATCHES)[name]})
    steps = {"local_steps": 3} if name in WITH_WHOLE_BATCHES else {}
    alone, together, notes = both(experiment(method, double=double, **steps))
    assert off(alone, together) <= within and notes == []
    assert [r.bytes_up for r in together.records] == [r.bytes_up for r in alone.records]


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_what_does_not_fit_is_stepped_one_by_one_to_the_same_bits_and_says_so(name: str) -> None:
    parameters, said = ONE_BY_ONE[name]
    work = experiment(build_method({"name": name, **parameters}), local_steps=3)
    alone, together, notes = both(work)
    assert torch.equal(alone.vector, together.vector)
    assert len(notes) == 1 and said in notes[0] and "one by one" in notes[0]
    assert lanes_refused(work) == tuple(notes)


CLASSIFIERS = [name for name, entry in MODELS.items() if entry.classifies]
# Without and with convolutions, batch norm, attention.
SMALL = ("mlp", "feddhad_cnn", "vit_tiny")


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in SMALL
        else pytest.param(name, marks=pytest.mark.slow if name == "resnet18" else (pytest.mark.slow, EXHAUSTIVE))
        for name in CLASSIFIERS
    ],
)
def test_each_network_is_itself_in_lanes(name: str) -> None:
    """Dropout is each client's own, batch norm's statistics too."""
    size = {"resnet18": 8, "feddhad_resnet18": 16}.get(name, 32)
    images, labels = tiny_pictures(18, size=size)
    alone, together, notes = both(
        tiny_experiment(
            fedprox(mu=0.1),
            build=lambda: build_model(name, input_shape=(3, size, size), num_classes=10, stream=stream(0, "m")),
            images=images,
            labels=labels,
            num_clients=3,
            rounds=1,
            learning_rate=1e-3,
            batch_size=3,
            local_steps=2,
        ),
        width=2,
    )
    assert off(alone, together) <= 1e-5 and notes == []


def test_dropout_in_smaller_batches_is_each_clients_own() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    alone, together, notes = both(experiment(fedavg(), build=build, double=True))
    assert off(alone, together) <= 1e-12 and notes == []


@dataclass(frozen=True, kw_only=True)
class OfItself(LocalTerm):
    """Pulls by all that differs from client to client, round to round and step to step."""

    name: str = "of itself"

    def gradient(self, step: LocalStep) -> ParamTree:
        facts = step.client
        size: Any = facts.client + 2 * facts.round + facts.num_samples + facts.label_counts[0] + step.position
        return {name: value * size * step.learning_rate * 1e-3 for name, value in step.params.items()}


@pytest.mark.parametrize("width", [3, 6])
def test_what_a_client_knows_of_itself_is_its_own_in_each_round_and_step(width: int) -> None:
    method = merge(
        dynamicfl(high_interval=1, low_interval=3, group_size=3),
        FederatedMethod(name="t", source="", terms=(OfItself(),)),
    )
    work = experiment(method, cohort_size=4, local_epochs=None, local_steps=6, rounds=4, double=True)
    decaying = replace(work.training, schedule=Exponential(rate=0.1, decay=0.5))
    alone, together, notes = both(replace(work, training=decaying), width=width)
    assert off(alone, together) <= 1e-12 and notes == []


class WithPlaces(nn.Module):
    """Dropout of a parameter, as of places in a sequence, or of a sequence whose places come before its samples."""

    def __init__(self, *, of_samples: bool) -> None:
        super().__init__()
        self.of_samples = of_samples
        self.first, self.head = nn.Linear(1, 8), nn.Linear(8, 4)
        self.places = nn.Parameter(torch.ones(6, 1, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        steps = self.first(inputs.flatten(1).T.unsqueeze(-1))  # [6, B, 8]
        dropped = steps if self.of_samples else self.places
        dropped = nn.functional.dropout(dropped, 0.5, self.training)
        return cast(Tensor, self.head((dropped if self.of_samples else steps + dropped).relu().mean(0)))


@pytest.mark.parametrize("batch_size", [4, 8])
@pytest.mark.parametrize("sizes", [(8,) * 6, (5,) * 6])
@pytest.mark.parametrize("of_samples", [True, False])
def test_dropout_of_what_is_no_row_per_sample_is_each_clients_own(
    batch_size: int, sizes: tuple[int, ...], *, of_samples: bool
) -> None:
    work = experiment(
        fedavg(), build=lambda: WithPlaces(of_samples=of_samples), batch_size=batch_size, sizes=sizes, double=True
    )
    alone, together, notes = both(work)
    assert off(alone, together) <= 1e-12
    smaller = of_samples and sizes[0] % batch_size
    assert len(notes) == bool(smaller) and all("does not go sample by sample" in note for note in notes)


def test_dropout_of_maps_is_each_clients_own_however_they_lie_in_memory() -> None:
    """On a CPU small networks of convolutions have their channels innermost, and dropout draws in memory's order.

    In float32, so for one round: in a second one rounding grows to 6e-5 on an AMD EPYC with AVX2.
    """
    work = pictured("fedsweep.bench.networks:SpeedCnn", clients=2)
    work = replace(work, training=replace(work.training, rounds=1))
    assert work.new_model().pixels_last
    alone, together, notes = both(work, width=2)
    assert off(alone, together) <= 1e-5 and notes == []


SYNCHRONISED: dict[str, FederatedMethod] = {
    "once a round": fedavg(),
    "after each step": dynamicsgd(),
    "in two groups": dynamicfl(high_interval=1, low_interval=3, group_size=3),
    "after every fourth step": dynamicfl(high_interval=4, low_interval=4),
}


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))


@pytest.mark.parametrize("synchronised", SYNCHRONISED)
@pytest.mark.parametrize(
    ("steps", "sizes", "width"),
    [(2, UNEVEN, 4), (3, UNEVEN, 6), (64, UNEVEN, 4), (64, UNEVEN, 6), (64, (48, 44), 3)],
)
def test_batches_that_are_laid_out_together_are_those_of_each_step(
    steps: int, sizes: Sequence[int], width: int, synchronised: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU many steps' batches are: smaller ones, clients that have no more, empty lanes and dropout among them.

    Also of steps behind the next sync point.
    """
    settings = {"build": with_dropout, "optimizer": OPTIMIZERS["momentum"], "equal_steps": False, "sizes": sizes}
    settings |= {"num_clients": len(sizes), "cohort_size": min(5, len(sizes))}
    work = in_lanes(experiment(SYNCHRONISED[synchronised], **settings), width=width)
    one_by_one = run_rounds(local_engine(work))
    stage_on_cpu(monkeypatch, steps)
    engine = local_engine(work)
    assert torch.equal(run_rounds(engine).vector, one_by_one.vector) and engine.notes == []


def test_batches_are_laid_out_once_for_many_sync_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the same clients go on; on a GPU laying them out takes longer than a step."""
    rounds: list[tuple[int, int]] = []
    joined = Batches.joined

    def noted(batches: Batches, first: int, steps: int) -> Any:
        rounds.append((first, steps))
        return joined(batches, first, steps)

    monkeypatch.setattr(Batches, "joined", noted)
    stage_on_cpu(monkeypatch, 8)
    settings = {"sizes": (8,) * 6, "local_epochs": None, "local_steps": 20, "rounds": 1}
    run_rounds(local_engine(in_lanes(experiment(dynamicsgd(), **settings), width=5)))
    laid_out = collections.Counter(call for call in rounds if call[1] > 1)
    assert laid_out == {(2, 2): 5, (4, 4): 5, (8, 8): 5, (16, 4): 5}
    rounds.clear()
    # Where others come in between, little is laid out in vain: a client's 20 steps at most twice.
    two_groups = dynamicfl(high_interval=1, low_interval=4, group_size=3)
    run_rounds(local_engine(in_lanes(experiment(two_groups, **settings), width=5)))
    assert sum(steps for _, steps in rounds) <= 2 * 5 * 20 + 1  # and one for the tile's shape


class ThreeWorkers(LocalFleet):
    """Clients on three workers of this process, as on three actors: each has tiles of its own."""

    def __init__(self, work: Experiment) -> None:
        self._workers = [make_worker(work, index) for index in range(3)]

    @property
    def num_workers(self) -> int:
        return 3

    @property
    def folds(self) -> bool:
        return False

    def play(self, segment: Segment, anchor: Tensor, memories: Mapping[int, Handle]) -> SegmentReply:
        return merged_answers([worker.run(segment, anchor, memories) for worker in self._workers])


PLACED: dict[str, tuple[FederatedMethod, OptimizerSettings]] = {
    "fedavg": (fedavg(), OPTIMIZERS["momentum"]),
    "fedprox": (fedprox(mu=0.1), OPTIMIZERS["averaged momentum"]),
    "scaffold": (build_method({"name": "scaffold"}), OPTIMIZERS["everything"]),
    "dynamicsgd": (dynamicsgd(), OPTIMIZERS["sgd"]),
    "dynamicfl": (dynamicfl(high_interval=1, low_interval=4, high_only=False), OPTIMIZERS["momentum"]),
    "fedad": (build_method({"name": "fedad", "base_rate": 0.3}), OPTIMIZERS["adam"]),
}


@pytest.mark.parametrize("name", PLACED)
def test_a_lanes_bits_do_not_depend_on_who_shares_its_tile(name: str) -> None:
    method, optimizer = PLACED[name]
    work = in_lanes(experiment(method, optimizer=optimizer), width=4)
    engine = Engine(work, ThreeWorkers(work))
    here, apart = run_rounds(local_engine(work)), run_rounds(engine)
    assert torch.equal(here.vector, apart.vector) and engine.notes == []
    assert [r.train_loss for r in here.records] == [r.train_loss for r in apart.records]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "convnet3", "fedstg_cnn", "vit_tiny"])
def test_a_lanes_bits_depend_on_no_other_lane_in_any_kind_of_network(name: str) -> None:
    """These computed another result in two lanes than in three or more: the number of lanes is part of the run."""
    images, labels = tiny_pictures(20)
    work = tiny_experiment(
        fedavg(),
        build=lambda: build_model(name, input_shape=(3, 32, 32), num_classes=10, stream=stream(0, "m")),
        images=images,
        labels=labels,
        num_clients=4,
        cohort_size=4,
        rounds=1,
        batch_size=5,
        local_steps=2,
    )
    work = in_lanes(work, width=3)
    assert torch.equal(run_rounds(local_engine(work)).vector, run_rounds(Engine(work, ThreeWorkers(work))).vector)


def test_a_run_goes_on_to_the_same_bits() -> None:
    work = in_lanes(experiment(build_method({"name": "scaffold"}), optimizer=OPTIMIZERS["momentum"]))
    half = run_rounds(local_engine(work), rounds=1)
    assert torch.equal(run_rounds(local_engine(work), half).vector, run_rounds(local_engine(work)).vector)


def test_parts_of_one_size_are_trained_together_whatever_units_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=8).unit_groups()
    parts = [unit_submodel(groups, {"fc1": kept}) for kept in ((0, 1, 2), (3, 4, 7), (1, 5), (0, 6))]
    seen: list[list[int]] = []
    run = Tile.run
    monkeypatch.setattr(
        Tile, "run", lambda tile, lanes: (seen.append([lane.facts.client for lane in lanes]), run(tile, lanes))[1]
    )
    work = experiment(with_parts(*parts), num_clients=4, cohort_size=4, sizes=(8, 8, 8, 8), rounds=1, double=True)
    alone, together, _ = both(work, width=4)
    assert off(alone, together) <= 1e-12
    assert sorted(seen) == [[0, 1], [2, 3]]


def frozen() -> nn.Module:
    """A network whose first layer is cut by what a client draws, and never trained."""
    module = network()
    module.get_submodule("fc1").requires_grad_(False)
    return module


@pytest.mark.parametrize("shared", [False, True])
def test_clients_with_frozen_weights_of_their_own_are_stepped_one_by_one(*, shared: bool) -> None:
    """Of one shape they are not those of another draw, nor of another round."""
    work = experiment(federated_dropout(keep=0.5, shared=shared), build=frozen, rounds=3, double=True)
    alone, together, notes = both(work, width=3)
    assert torch.equal(alone.vector, together.vector) and "has frozen weights of its own" in notes[0]
    apart = run_rounds(Engine(in_lanes(work), SplitFleet(in_lanes(work))))
    assert torch.equal(apart.vector, together.vector)


def test_a_constant_that_no_part_cuts_keeps_nobody_out_of_lanes() -> None:
    def scaled() -> nn.Module:
        module = network()
        module.register_buffer("scale", torch.ones(3), persistent=False)
        return module

    alone, together, notes = both(experiment(federated_dropout(keep=0.5), build=scaled, double=True), width=3)
    assert off(alone, together) <= 1e-12 and notes == []


# -- on a GPU --------------------------------------------------------------------------------------------------------


def on_gpu(work: Experiment) -> Experiment:
    return replace(work, device="cuda")


def pictured(name: str = "cnn", clients: int = 6, *, double: bool = False) -> Experiment:
    images, labels = tiny_pictures(30)
    return tiny_experiment(
        fedprox(mu=0.1),
        build=lambda: build_model(name, input_shape=(3, 32, 32), num_classes=10, stream=stream(0, "m")),
        images=images,
        labels=labels,
        num_clients=clients,
        cohort_size=clients,
        rounds=2,
        learning_rate=0.01,
        batch_size=5,
        local_steps=6,
        optimizer=OPTIMIZERS["momentum"],
        double=double,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mlp", "lenet5", "cnn", "feddhad_cnn", "convnet3", "vit_tiny"])
@pytest.mark.parametrize("double", [True, False])
def test_lanes_are_the_loop_on_a_gpu(name: str, *, double: bool) -> None:
    alone, together, notes = both(on_gpu(pictured(name, double=double)), width=6)
    # In float32 cuDNN's kernels for several lanes round convnet3's maps otherwise: 6e-5 on an H200.
    within = 1e-12 if double else 1e-4 if name == "convnet3" else 1e-5
    assert off(alone, together) <= within and notes == []


@pytest.mark.gpu
def test_a_recorded_step_has_the_bits_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    work = in_lanes(on_gpu(pictured()), width=4)  # two of eight lanes have no client
    recorded = run_rounds(local_engine(work))
    monkeypatch.setattr(Tile, "_replayed", Tile._taken)
    assert torch.equal(run_rounds(local_engine(work)).vector, recorded.vector)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mlp", "lenet5", "cnn", "convnet3", "vit_tiny"])
def test_a_lanes_bits_do_not_depend_on_who_shares_its_tile_on_a_gpu(name: str) -> None:
    work = in_lanes(on_gpu(pictured(name)), width=4)
    assert torch.equal(run_rounds(local_engine(work)).vector, run_rounds(Engine(work, ThreeWorkers(work))).vector)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mlp", "lenet5", "cnn", "vit_tiny"])
def test_halving_lanes_changes_no_bit_on_a_gpu(name: str) -> None:
    """Where this fails, the number of lanes belongs to the result, as docs/speed.md says of convnet3."""
    work = on_gpu(pictured(name))
    states = [run_rounds(local_engine(in_lanes(work, width))) for width in (6, 3)]
    assert torch.equal(states[0].vector, states[1].vector)


@pytest.mark.gpu
def test_lanes_fit_into_a_gpus_memory_or_are_halved() -> None:
    # The clients' values, state and anchors take 2 of the 4 GiB, and as many lanes of them another 4.
    work = on_gpu(pictured("vgg11", clients=16))

    def notes_with(lanes: LaneSettings) -> list[str]:
        engine = local_engine(replace(work, lanes=lanes))
        run_rounds(engine)
        return engine.notes

    gc.collect()
    torch.cuda.empty_cache()  # what the tests before have left counts, too
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, 4 * 2**30 / total))
    try:
        assert notes_with(LaneSettings(width=16, fits_memory=True)) == []
        gc.collect()
        torch.cuda.empty_cache()
        assert any("do not fit" in note for note in notes_with(LaneSettings(width=16)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
def test_the_mean_on_a_gpu_has_the_bits_of_the_mean_on_the_cpu() -> None:
    rows = list(torch.randn(5, 40_000, generator=stream(0, "rows").torch()))
    weights = [0.1, 0.2, 0.3, 0.25, 0.15]
    here, there = torch.empty(40_000), torch.empty(40_000, device="cuda")
    weighted_mean(rows, weights, here)
    weighted_mean([row.cuda() for row in rows], weights, there)
    assert torch.equal(here, there.cpu())
    # The server's model lies on the CPU, as an idle client's does.
    mixed = torch.empty(40_000)
    weighted_mean([rows[0], *(row.cuda() for row in rows[1:])], weights, mixed)
    assert torch.equal(here, mixed)


# -- what can't be had -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Branching(LocalTerm):
    """Looks at a value."""

    name: str = "branching"

    def loss(self, step: LocalStep) -> Tensor | None:
        total = step.params["layer.weight" if "layer.weight" in step.params else "fc1.weight"].sum()
        return total if float(total) > 1e9 else None


@dataclass(frozen=True, kw_only=True)
class Drawing(LocalTerm):
    """Draws, without having said so."""

    name: str = "drawing"

    def loss(self, step: LocalStep) -> Tensor | None:
        return 0.0 * float(step.stream.numpy().random()) * step.logits.sum()


@dataclass(frozen=True, kw_only=True)
class After(LocalTerm):
    """Works after each step."""

    name: str = "after"

    def after_step(self, step: LocalStep, gradients: ParamTree) -> tuple[Memory, ParamTree | None]:
        return {}, None


@dataclass(frozen=True, kw_only=True)
class Own(TaskLoss):
    """Does not know of padding."""

    skips_padding = False


@dataclass(frozen=True, kw_only=True)
class Focal(TaskLoss):
    """Has a loss of its own, and says nothing of padding."""

    def loss(self, step: LocalStep) -> Tensor:
        each = nn.functional.cross_entropy(step.logits, step.targets, reduction="none")
        return ((1 - torch.exp(-each)) * each).mean()


def normed() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))


class LooksUp(nn.Module):
    """Looks up a row for each value."""

    def __init__(self, table: nn.Embedding | nn.EmbeddingBag) -> None:
        super().__init__()
        self.table, self.last = table, nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = self.table((inputs.flatten(1) + 4).long().clamp(0, 8))
        logits: Tensor = self.last(rows if rows.dim() == 2 else rows.mean(1))
        return logits


def padded() -> nn.Module:
    return LooksUp(nn.Embedding(9, 4, padding_idx=3))


def bounded() -> nn.Module:
    return LooksUp(nn.Embedding(9, 4, max_norm=1.0))


def bounded_sums() -> nn.Module:
    return LooksUp(nn.EmbeddingBag(9, 4, max_norm=1.0))


def by_frequency() -> nn.Module:
    return LooksUp(nn.Embedding(9, 4, scale_grad_by_freq=True))


TABLES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: LooksUp(nn.Embedding(9, 4)),
    "frozen, with padding": lambda: LooksUp(nn.Embedding(9, 4, padding_idx=3).requires_grad_(False)),
}


@pytest.mark.parametrize("table", TABLES)
def test_tables_are_themselves_in_lanes(table: str) -> None:
    alone, together, notes = both(experiment(fedavg(), build=TABLES[table], double=True))
    assert off(alone, together) <= 1e-12 and notes == []


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a term that branches": ({"terms": (Branching(),)}, {"local_steps": 2}, "vmap: It looks like"),
    "a term that draws": (
        {"terms": (Drawing(),)},
        {"local_steps": 2},
        "a stream of random numbers (numpy) is asked for",
    ),
    "a term after each step": ({"terms": (After(),)}, {}, "term after works after each step"),
    "an objective of smaller batches": ({"objective": Own()}, {}, "objective Own would take in"),
    "one with a loss of its own": ({"objective": Focal()}, {}, "objective Focal would take in"),
    "batch norm in smaller batches": ({}, {"build": normed}, "batch norm would take in"),
    "a table of bounded norms": ({}, {"build": bounded}, "an embedding changes its rows as it reads them (max_norm)"),
    "one of sums": ({}, {"build": bounded_sums}, "an embedding changes its rows as it reads them (max_norm)"),
    "a table by frequency": ({}, {"build": by_frequency}, "an embedding (scale_grad_by_freq) would count what fills"),
    "a table with padding": ({}, {"build": padded, "double": True}, "an embedding has a row of padding (padding_idx)"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_fallback_says_why_and_changes_no_bit(what: str) -> None:
    fields, settings, said = REFUSED[what]
    work = experiment(FederatedMethod(name="test", source="", **fields), **({"sizes": (6,) * 6} | settings))
    alone, together, notes = both(work)
    assert torch.equal(alone.vector, together.vector)
    assert len(notes) == 1 and said in notes[0] and notes[0].endswith("clients are stepped one by one")
    assert lanes_refused(work) == tuple(notes)


@dataclass(frozen=True, kw_only=True)
class Smoothed(Classification):
    """Has a loss of its own, and says nothing of padding."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def test_a_task_with_a_loss_of_its_own_is_named() -> None:
    work = experiment(fedavg())
    data = work.world.data
    data = replace(data, task=Smoothed(num_classes=data.num_classes))
    work = replace(work, world=replace(work.world, data=data))
    (note,) = lanes_refused(in_lanes(work))
    assert "the task Smoothed would take in what fills up smaller batches" in note


def test_lanes_that_do_not_fit_into_memory_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Tile._taken

    def small(tile: Tile, *, idle: bool) -> tuple[Tensor, Tensor]:
        if tile._width > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return taken(tile, idle=idle)

    work = experiment(fedprox(mu=0.1), optimizer=OPTIMIZERS["momentum"])
    expected = run_rounds(local_engine(in_lanes(work, width=3)))
    monkeypatch.setattr(Tile, "_taken", small)
    engine = local_engine(in_lanes(work, width=12))
    assert torch.equal(run_rounds(engine).vector, expected.vector)
    assert engine.notes == [
        "lanes: 12 do not fit into the device's memory: 6 at once from now on",
        "lanes: 6 do not fit into the device's memory: 3 at once from now on",
    ]


def test_a_first_tile_has_as_many_clients_as_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside their optimisers' state, which is there before the memory is looked at."""
    work = experiment(fedprox(mu=0.1), optimizer=OPTIMIZERS["momentum"])
    expected = run_rounds(local_engine(in_lanes(work, width=3)))
    with_state: list[int] = []

    def peak(tile: Tile, lane: Lane) -> int:
        with_state.append(sum("as_torch" in vars(other.optimizer) for other in waiting))
        return 10 + tile._width

    take, waiting = Lanes.take, list[Lane]()
    monkeypatch.setattr(Lanes, "take", lambda self, lanes: (waiting.extend(lanes), take(self, lanes))[1])
    monkeypatch.setattr(Tile, "peak_memory", peak)
    monkeypatch.setattr(gpu_memory, "device_memory", lambda: 18.0)
    engine = local_engine(replace(work, lanes=LaneSettings(width=5, fits_memory=True)))
    assert torch.equal(run_rounds(engine).vector, expected.vector) and engine.notes == []
    assert with_state == [5, 5]


def test_lanes_are_counted_by_what_a_step_takes_whatever_laying_out_its_batches_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU few lanes lay out more steps at once, which takes more than their step."""
    figures = {"peak": 0}
    lay_out, taken = Tile._next_batch, Tile._taken

    def laid_out(tile: Tile, tick: int) -> bool:
        figures["peak"] = max(figures["peak"], 100 // tile._width)
        return lay_out(tile, tick)

    def step(tile: Tile, *, idle: bool) -> tuple[Tensor, Tensor]:
        figures["peak"] = max(figures["peak"], 10 + tile._width)
        return taken(tile, idle=idle)

    monkeypatch.setattr(Tile, "_next_batch", laid_out)
    monkeypatch.setattr(Tile, "_taken", step)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: figures.update(peak=0))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: figures["peak"])
    monkeypatch.setattr(gpu_memory, "device_memory", lambda: 18.0)
    engine = local_engine(replace(experiment(fedavg()), lanes=LaneSettings(width=5, fits_memory=True)))
    run_rounds(engine)
    assert engine.notes == [] and engine.fleet._worker._lanes._width == 3


def test_a_tile_that_failed_is_not_kept_with_what_its_clients_have(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors: list[weakref.ref[Tensor]] = []

    def failing(tile: Tile, *, idle: bool) -> tuple[Tensor, Tensor]:
        vectors.extend(weakref.ref(lane.vector) for lane in tile._lanes)
        raise ValueError("no step")

    monkeypatch.setattr(Tile, "_taken", failing)
    engine = local_engine(in_lanes(experiment(fedavg(), num_clients=5)))
    run_rounds(engine)
    assert len(engine.notes) == 1 and "no step" in engine.notes[0]
    gc.collect()
    assert vectors and all(vector() is None for vector in vectors)


def test_lanes_fill_the_memory_that_there_is_with_equally_full_tiles() -> None:
    """2 lanes take 30, 8 take 90, so each takes 10 and 10 are there without any; 80 of 100 may be filled: 7 lanes."""
    assert lanes_that_fit(30, 90, total=100, wanted=7) == 7
    assert lanes_that_fit(30, 90, total=100, wanted=10) == 5  # two tiles of five, not one of seven and one of three
    assert lanes_that_fit(30, 90, total=100, wanted=50) == 7  # in eight tiles
    assert lanes_that_fit(90, 270, total=100, wanted=4) == 1


@pytest.mark.parametrize(
    ("rate", "steps", "what"), [(1e30, 5, "its loss is not finite"), (3e38, 1, "its model has values that are not")]
)
def test_a_client_that_diverges_is_named_as_in_the_loop(rate: float, steps: int, what: str) -> None:
    optimizer = OptimizerSettings(momentum=0.9, weight_decay=10.0, keep="persist")
    settings = {"local_epochs": None, "local_steps": steps}
    work = experiment(fedavg(), learning_rate=rate, optimizer=optimizer, **settings)
    with pytest.raises(ClientJobError) as one_by_one:
        run_rounds(local_engine(work))
    with pytest.raises(ClientJobError, match=what) as together:
        run_rounds(local_engine(in_lanes(work)))
    assert str(together.value) == str(one_by_one.value)


def test_accuracies_of_passes_are_those_of_the_loop() -> None:
    method = merge(fedprox(mu=0.1), dynamicsgd())
    work = experiment(method, double=True)
    sides: Sequence[Experiment] = (work, in_lanes(work))
    found = []
    for side in sides:
        fleet = LocalFleet(side)
        fleet._worker._side = replace(fleet._worker._side, track_accuracy=True)
        if fleet._worker._lanes is not None:
            fleet._worker._lanes._side = fleet._worker._side
        found.append(run_rounds(Engine(side, fleet)).accuracies)
    assert found[0] == found[1] and any(math.isfinite(value) for values in found[0].values() for value in values)
