"""Unit-wise sub-models through whole rounds: what is trained, what stays, and what it costs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import part_of, run_units, units_experiment
from torch import nn

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.feddhad.fedad import fedad
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.planning import FixedInterval
from fedsweep.config.load import load_config
from fedsweep.driver.run import plan_run
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError
from fedsweep.experiment.experiment import Experiment
from fedsweep.method import FederatedMethod
from fedsweep.models.network import Network
from fedsweep.models.networks.chains import LeNet5
from fedsweep.models.slicing import attach_unit_scales, ordered_kept
from fedsweep.models.unit_submodel import UnitSubModel, unit_submodel
from fedsweep.streams import stream
from fedsweep.submodel import FULL_MODEL
from fedsweep.testing import (
    build_model,
    local_engine,
    play_round,
    run_rounds,
    tiny_device,
    tiny_pictures,
    with_parts,
)

torch.set_num_threads(1)

PARAMS = 6 * 8 + 8 + 8 * 8 + 8 + 8 * 4 + 4


# -- sub-models in training --------------------------------------------------------------------------------------


def test_client_learns_what_the_masked_full_model_learns() -> None:
    """R4, three steps of SGD in float64: removed activations 0, kept ones scaled; nothing else moves."""
    kept = {"fc1": (0, 2, 3, 7), "fc2": (1, 4, 5)}
    scales = {"fc1": (1.0, 1.5, 2.0, 1.25), "fc2": (3.0, 1.0, 1.1)}
    engine = local_engine(
        units_experiment(with_parts(part_of(kept, scales)), double=True, local_epochs=1, sizes=[12] * 6, rounds=1)
    )
    start = engine.start()
    found = play_round(engine, start).updates[0]
    full = engine.experiment.build_model()
    masks = {name: torch.zeros(8, dtype=torch.float64) for name in kept}
    for name, units in kept.items():
        masks[name][list(units)] = torch.tensor(scales[name], dtype=torch.float64)
    attach_unit_scales(full, masks)  # type: ignore[arg-type]
    full.train()
    optimizer = torch.optim.SGD(full.parameters(), lr=0.1)
    order = stream(0, "batches", 1, found.client).numpy().permutation(12)
    indices = engine.experiment.world.indices[found.client]
    for step in range(3):
        rows = indices[order[step * 4 : step * 4 + 4]]
        inputs = torch.from_numpy(engine.experiment.world.data.images[rows])
        targets = torch.from_numpy(engine.experiment.world.data.labels[rows])
        optimizer.zero_grad()
        nn.functional.cross_entropy(full(inputs), targets).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    expected = engine.layout.flatten(dict(full.named_parameters()))
    assert found.vector is not None
    covered = found.submodel.embed(found.vector, engine.layout)
    assert covered.cover is not None
    torch.testing.assert_close(covered.vector[covered.cover], expected[covered.cover], rtol=1e-10, atol=1e-12)
    assert torch.equal(expected[~covered.cover], start.vector[~covered.cover])


@pytest.mark.parametrize("keep", ["reset", "persist", "average"])
def test_what_nobody_holds_does_not_move_under_momentum_and_weight_decay(keep: str) -> None:
    """R6, R9: two rounds, everybody without unit 0 of both layers; the full model trains in between for client 0."""
    part = part_of({"fc1": range(1, 8), "fc2": range(1, 8)})
    optimizer = OptimizerSettings(momentum=0.9, weight_decay=0.1, keep=keep)
    engine = local_engine(units_experiment(with_parts(part), optimizer=optimizer, rounds=3))
    start = engine.start()
    end = run_rounds(engine)
    covered = part.embed(part.extract(start.vector, engine.layout), engine.layout).cover
    assert covered is not None
    trained = slice(0, engine.layout.num_params)
    assert torch.equal(end.vector[trained][~covered[trained]], start.vector[trained][~covered[trained]])
    assert not torch.equal(end.vector[trained][covered[trained]], start.vector[trained][covered[trained]])


def test_kept_momentum_follows_the_units_through_changing_parts() -> None:
    """A client that trained unit 0 in round 1 has its momentum unchanged after rounds without it."""
    methods = [with_parts(FULL_MODEL), with_parts(part_of({"fc1": range(1, 8)}))]
    optimizer = OptimizerSettings(momentum=0.9, keep="persist")
    full, cut = (local_engine(units_experiment(m, optimizer=optimizer, cohort_size=6, rounds=2)) for m in methods)
    first = run_rounds(full, rounds=1)
    second = run_rounds(cut, first, rounds=1)
    before = engine_buffers(first)
    after = engine_buffers(second)
    row = slice(0, 6)  # the incoming weights of unit 0 of fc1 lie first
    assert np.array_equal(before[:, row], after[:, row]) and before[:, row].any()
    assert not np.array_equal(before[:, 6:12], after[:, 6:12])


def engine_buffers(state: RunState) -> np.ndarray:
    return np.stack([state.memories[k]["optimizer"]["momentum_buffer"] for k in range(6)])


def test_evaluation_knows_neither_factors_nor_masks() -> None:
    """R10: accuracy and loss are those of a fresh full model with the final vector."""
    engine = local_engine(units_experiment(fedad(base_rate=0.5, refresh=(1,)), rounds=3))
    state = run_rounds(engine)
    fresh = engine.experiment.build_model().eval()
    for name, value in fresh.named_parameters():
        value.data.copy_(engine.layout.views(state.vector)[name])
    world = engine.experiment.world
    with torch.no_grad():
        logits = fresh(torch.from_numpy(world.test_images))
    loss = nn.functional.cross_entropy(logits, torch.from_numpy(world.test_labels))
    assert state.records[-1].test_loss == pytest.approx(float(loss), rel=1e-6)


def test_parts_without_a_common_unit_are_joined() -> None:
    """R5: crossing weights are held by nobody and stay; every other hidden weight is its only holder's."""
    halves = [part_of({"fc1": range(s, s + 4), "fc2": range(s, s + 4)}) for s in (0, 4)]
    engine = local_engine(units_experiment(with_parts(*halves), cohort_size=2, num_clients=2, rounds=1))
    start = engine.start()
    round = play_round(engine, start)
    found, before = engine.layout.views(round.vector), engine.layout.views(start.vector)
    for update, units in zip(round.updates, (slice(0, 4), slice(4, 8)), strict=True):
        torch.testing.assert_close(found["fc2.weight"][units, units], update.params["fc2.weight"], rtol=1e-6, atol=0)
    assert torch.equal(found["fc2.weight"][:4, 4:], before["fc2.weight"][:4, 4:])
    assert torch.equal(found["fc2.weight"][4:, :4], before["fc2.weight"][4:, :4])


# -- costs -------------------------------------------------------------------------------------------------------


def lenet() -> nn.Module:
    return LeNet5(input_shape=(3, 32, 32), num_classes=10)


def test_half_width_lenet_has_its_share_of_flops_and_bytes_and_all_the_steps() -> None:
    """FLOPs x 251,340 / 651,720, bytes x 15,888 / 62,006, the overhead of steps unchanged; rate 0 is the full clock."""
    images, labels = tiny_pictures()
    groups = LeNet5(input_shape=(3, 32, 32), num_classes=10).unit_groups()
    half = unit_submodel(groups, ordered_kept(groups, 0.5))
    parts = {
        "flops": tiny_device(1e9, bits_per_s=float("inf")),
        "bytes": tiny_device(float("inf"), bits_per_s=1e6),
        "steps": tiny_device(float("inf"), overhead_s=0.5, bits_per_s=float("inf")),
    }
    shares = {"flops": 251_340 / 651_720, "bytes": 15_888 / 62_006, "steps": 1.0}
    for name, profile in parts.items():
        clocks: list[float] = []
        for method in (with_parts(half), fedavg(), fedad(base_rate=0.0)):
            made = units_experiment(
                method,
                devices=(profile,),
                build=lenet,
                images=images,
                labels=labels,
                num_clients=2,
                cohort_size=2,
                local_epochs=1,
            )
            clocks.append(local_engine(made).planner.plan(local_engine(made).start()).clock or 0.0)
        assert clocks[0] == pytest.approx(clocks[1] * shares[name], rel=1e-12)
        assert clocks[1] == clocks[2] > 0


def test_records_count_the_parts_that_were_trained() -> None:
    """R8: one part of 3 and 5 units and a full model; 2 mask bytes for the part that is no prefix, 4 per factor."""
    part = part_of({"fc1": (0, 1, 7), "fc2": range(5)}, {"fc1": (2.0, 2.0, 2.0), "fc2": (1.0, 2.0, 3.0, 4.0, 5.0)})
    record = run_units(with_parts(part, FULL_MODEL), num_clients=2, cohort_size=2, rounds=1, sizes=(8, 8)).records[0]
    own = 6 * 3 + 3 + 3 * 5 + 5 + 5 * 4 + 4
    assert (record.values_up, record.values_down) == (own + PARAMS, own + PARAMS)
    assert record.bytes_down == 4 * (own + PARAMS) + 1 + 4 + 4 * 5
    small, whole = 6 * 3 + 3 * 5 + 5 * 4, 6 * 8 + 8 * 8 + 8 * 4
    assert record.fwd_macs_per_sample == (small + whole) / 2
    assert record.flops == 6 * (small + whole) * 16


def in_short_intervals(method: FederatedMethod, interval: int) -> FederatedMethod:
    return replace(method, pacing=FixedInterval(interval=interval, sync_rule="paper"))


def test_masks_travel_once_a_round_however_often_the_part_is_sent() -> None:
    """Four downloads: the first with one byte of masks of fc1 (8 units) and four per factor, by plan, row and clock."""
    factors = {"fc1": (2.0, 3.0)}
    scattered, prefix = part_of({"fc1": (0, 7)}, factors), part_of({"fc1": (0, 1)})
    assert (scattered.index_bytes(), prefix.index_bytes()) == (1 + 8, 0)
    clocks = []
    for part in (scattered, prefix):
        made = units_experiment(
            in_short_intervals(with_parts(part), 1),
            devices=(tiny_device(float("inf"), bits_per_s=8.0),),
            local_steps=4,
            rounds=2,
        )
        engine = local_engine(made)
        plan = engine.planner.plan(engine.start())
        state = run_rounds(engine)
        record = state.records[0]
        assert record.sync_points == 4 and record.values_down == record.values_up == plan.values / 2
        assert record.bytes_down == 4 * record.values_down + 3 * part.index_bytes()
        assert plan.index_bytes == 3 * part.index_bytes()
        clocks.append((plan.clock, state.clock))
    (first, both), (first_prefix, both_prefix) = clocks
    assert first is not None and both is not None
    assert first - first_prefix == pytest.approx(9.0)
    assert both - both_prefix == pytest.approx(2 * 9.0)


def test_each_sync_point_of_a_round_is_a_coverage_mean_of_the_same_parts() -> None:
    """Full batches of plain SGD: a round of three steps, synchronised after each, is three rounds of one step."""
    parts = with_parts(part_of({"fc1": (0, 2, 3), "fc2": (1, 7)}, {"fc2": (2.0, 1.5)}), part_of({"fc1": (2, 5)}))
    options: dict[str, Any] = {"double": True, "batch_size": 16, "cohort_size": 6}
    paced = run_units(in_short_intervals(parts, 1), local_steps=3, rounds=1, **options)
    single = run_units(parts, local_steps=1, rounds=3, **options)
    assert paced.records[0].sync_points == 3
    torch.testing.assert_close(paced.vector, single.vector, rtol=1e-12, atol=1e-13)
    once = run_units(parts, local_steps=3, rounds=1, **options)
    assert not torch.allclose(once.vector, paced.vector, rtol=1e-6)


@pytest.mark.parametrize("name", ["lenet5", "feddhad_resnet18", "fedstg_cnn", "vit_tiny"])
def test_costs_from_layers_are_those_of_a_forward_pass_of_the_part(name: str) -> None:
    images, labels = tiny_pictures()

    def build() -> Network:
        return build_model(name, input_shape=(3, 32, 32), num_classes=10, stream=stream(0, "m"))

    costs = local_engine(
        units_experiment(fedavg(), build=build, images=images, labels=labels, num_clients=2, cohort_size=2)
    ).costs
    model = build()
    generator = stream(0, "kept").numpy()
    kept = {
        g.name: sorted(generator.choice(g.size, -(-g.size // 3), replace=False).tolist()) for g in model.unit_groups()
    }
    part = unit_submodel(model.unit_groups(), kept)
    assert isinstance(part, UnitSubModel)
    for count_batch_norm in (False, True):
        scaled = costs._scaled(part, count_batch_norm)
        costs._counted, of_whole = costs._counted._replace(layers={"gone.weight": (1, 0)}), costs._counted
        counted = costs.macs(part, count_batch_norm=count_batch_norm)
        costs._counted = of_whole
        assert scaled == counted > 0


OWN = """
import fedsweep
from torch import nn


class Small(nn.Module):
    def __init__(self, norm, layers, norms, classes):
        super().__init__()
        self.first, self.norm, self.relu = nn.Conv2d(1, 8, 3, padding=1), norm, nn.ReLU()
        self.head = nn.Linear(8 * 64, classes)
        self._parts = layers, norms

    def forward(self, images):
        return self.head(self.relu(self.norm(self.first(images))).flatten(1))

    def unit_groups(self):
        layers, norms = self._parts
        made = {"name": "a", "layers": layers, "norms": norms, "consumers": ["head"], "modules": ["relu"]}
        return (fedsweep.unit_group(self, **made),)


class OverChannels(nn.LayerNorm):
    def forward(self, maps):
        return super().forward(maps.movedim(1, -1)).movedim(-1, 1)


def depthwise(input_shape, num_classes):
    return Small(nn.Conv2d(8, 8, 3, padding=1, groups=8), ["first", "norm"], [], num_classes)


class Rows(nn.Conv1d):
    def forward(self, maps):
        return super().forward(maps.flatten(2)).reshape(maps.shape)


def depthwise_1d(input_shape, num_classes):
    return Small(Rows(8, 8, 3, padding=1, groups=8), ["first", "norm"], [], num_classes)


def layer_norm(input_shape, num_classes):
    return Small(OverChannels(8), ["first"], ["norm"], num_classes)


def group_norm(input_shape, num_classes):
    return Small(nn.GroupNorm(2, 8), ["first"], ["norm"], num_classes)


def pairs(input_shape, num_classes):
    return Small(nn.Conv2d(8, 8, 3, padding=1, groups=4), ["first"], [], num_classes)
"""


def of_own_network(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    (folder / "own_cut.py").write_text(OWN)
    monkeypatch.syspath_prepend(folder)
    tree = {
        "scenario": {"dataset": "digits", "clients": 4, "partition": {"kind": "iid"}},
        "model": {"name": f"own_cut:{name}"},
        "method": {"name": "fedad", "base_rate": 0.3, "refresh": [1]},
        "training": {"rounds": 2, "cohort_size": 2, "local_steps": 2},
    }
    try:
        return plan_run(load_config(tree)).experiment
    finally:
        sys.modules.pop("own_cut", None)


@pytest.mark.parametrize("name", ["depthwise", "depthwise_1d", "layer_norm"])
def test_a_network_of_ones_own_is_cut_at_depthwise_convolutions_and_layer_norms(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = run_rounds(local_engine(of_own_network(name, tmp_path, monkeypatch))).records
    assert first.fwd_macs_per_sample is not None and second.fwd_macs_per_sample is not None
    assert second.fwd_macs_per_sample < first.fwd_macs_per_sample


@pytest.mark.parametrize(("name", "reason"), [("group_norm", "2 groups for 8 channels"), ("pairs", "7 channels")])
def test_what_can_not_be_cut_is_refused_before_the_run(
    name: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=f"unit_groups can't be cut, as method fedad does: .*{reason}"):
        of_own_network(name, tmp_path, monkeypatch)
