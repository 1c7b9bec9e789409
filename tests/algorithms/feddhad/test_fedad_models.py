"""FedAD on every network that is shipped, and on the transformer, whose heads are units, too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.feddhad.fedad import AdaptiveDropout, fedad
from fedsweep.algorithms.feddhad.feddh import feddh
from fedsweep.algorithms.feddhad.unit_scores import maskable_groups
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.engine.state import RunState
from fedsweep.method import FederatedMethod, merge
from fedsweep.models.network import Network
from fedsweep.models.registry import MODELS
from fedsweep.models.slicing import kept_index
from fedsweep.models.unit_submodel import UnitSubModel
from fedsweep.streams import stream
from fedsweep.testing import build_model, local_engine, play_round, run_rounds, tiny_experiment, tiny_pictures

torch.set_num_threads(1)

HEADS, NEURONS = 2 * 4, 2 * 16
TWO_SPEEDS = dynamicfl(high_interval=1, low_interval=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, entry in MODELS.items() if entry.classifies])
def test_every_network_with_units_can_drop_some(name: str) -> None:
    """Residual networks lose units of the blocks' first convolutions alone."""
    images, labels = tiny_pictures(4)

    def build() -> nn.Module:
        return build_model(name, input_shape=(3, 32, 32), num_classes=10, stream=stream(0, "m"))

    policy = AdaptiveDropout(base_rate=0.3, refresh=(99,))
    made = tiny_experiment(
        FederatedMethod(name="x", source="", submodels=policy),
        build=build,
        images=images,
        labels=labels,
        num_clients=2,
        cohort_size=1,
        rounds=1,
        local_epochs=1,
        learning_rate=1e-3,
    )
    engine = local_engine(made)
    start = engine.start()
    model = build()
    size = sum(g.size for g in model.unit_groups() if not g.residual)  # type: ignore[operator]
    ready = {**start.components["submodels"], "scores": torch.rand(size), "base_rate": 0.3, "target_s": 0.7}
    engine_state = replace(start, components={**start.components, "submodels": ready})
    round = play_round(engine, engine_state)
    part = round.updates[0].submodel
    assert isinstance(part, UnitSubModel)
    residual = {g.name for g in part.groups if g.residual}
    assert not residual & {group for group, _ in part.kept}
    assert len(part.kept) == len(part.groups) - len(residual)
    assert part.layout(engine.layout).num_params < engine.layout.num_params


# -- the transformer ---------------------------------------------------------------------------------------------


def small_vit() -> Network:
    """Two blocks of four heads and sixteen neurons."""
    return build_model(
        "vit_tiny",
        input_shape=(1, 8, 8),
        num_classes=10,
        stream=stream(0, "m"),
        depth=2,
        width=16,
        mlp_ratio=1,
    )


def run(method: FederatedMethod, **more: Any) -> RunState:
    images, labels = tiny_pictures(48, size=8, channels=1)
    options: dict[str, Any] = {
        "build": small_vit,
        "images": images,
        "labels": labels,
        "optimizer": OptimizerSettings(name="adam"),
        "learning_rate": 1e-3,
    }
    return run_rounds(local_engine(tiny_experiment(method, **(options | more))))


@pytest.mark.parametrize(
    ("method", "plain"),
    [
        (fedad(base_rate=0.0, refresh=(1,)), fedavg()),
        (fedad(base_rate=0.2, refresh=(9,)), fedavg()),
        (merge(feddh(), fedad(base_rate=0.0)), feddh()),
        (
            merge(dynamicfl(high_interval=1, low_interval=2), fedad(base_rate=0.0)),
            dynamicfl(high_interval=1, low_interval=2),
        ),
    ],
    ids=["rate 0", "before the first refresh", "FedDHAD at rate 0", "two speeds at rate 0"],
)
def test_transformer_without_dropout_is_the_plain_method_bit_for_bit(
    method: FederatedMethod, plain: FederatedMethod
) -> None:
    found, expected = run(method), run(plain)
    assert torch.equal(found.vector, expected.vector)
    assert [(r.bytes_up, r.bytes_down, r.flops) for r in found.records] == [
        (r.bytes_up, r.bytes_down, r.flops) for r in expected.records
    ]


@pytest.mark.parametrize("pacing", [fedavg(), TWO_SPEEDS], ids=["once", "two speeds"])
def test_transformer_sends_a_score_per_head_and_neuron_then_trains_parts(pacing: FederatedMethod) -> None:
    first, *later = run(merge(pacing, fedad(base_rate=0.4, refresh=(1,)))).records
    assert first.values_up - first.values_down == 3 * (HEADS + NEURONS)
    assert all(r.values_up < 0.9 * first.values_down for r in later)
    assert all((r.fwd_macs_per_sample or 0) < 0.9 * (first.fwd_macs_per_sample or 0) for r in later)


def test_curvature_of_a_transformer_is_measured() -> None:
    """It takes second derivatives of the attention, which torch's fused kernels do not have."""
    record = run(fedad(refresh=(1,), base_rate_cap=0.4), rounds=1, cohort_size=1).records[0]
    assert record.values_up - record.values_down == HEADS + NEURONS + 1
    assert 0 <= record.extra["dropout_base_rate"] <= min(0.4, record.extra["dropout_base_rate_raw"])


def test_what_no_client_holds_of_a_transformer_stays() -> None:
    images, labels = tiny_pictures(48, size=8, channels=1)
    made = tiny_experiment(
        fedad(base_rate=0.5, refresh=(1,)), build=small_vit, images=images, labels=labels, cohort_size=1
    )
    engine = local_engine(made)
    before = run_rounds(engine, rounds=1)
    round = play_round(engine, before)
    part = round.updates[0].submodel
    assert isinstance(part, UnitSubModel)
    found, start = engine.layout.views(round.vector), engine.layout.views(before.vector)
    index = kept_index(part.groups, dict(part.kept))
    heads = next(group for group in part.groups if group.kind == "head" and group.name in dict(part.kept))
    for name, dim in (*heads.produced, heads.consumed[0][:2]):
        ((_, kept),) = [cut for cut in index[name] if cut[0] == dim]
        gone = torch.tensor(sorted({*range(start[name].shape[dim])} - {*kept.tolist()}))
        assert torch.equal(found[name].index_select(dim, gone), start[name].index_select(dim, gone))
    assert not torch.equal(found[heads.consumed[0][0]], start[heads.consumed[0][0]])


def test_heads_and_neurons_each_have_the_devices_mean_rate() -> None:
    policy = AdaptiveDropout(base_rate=0.3, refresh=(1,))
    groups = maskable_groups(small_vit())
    scores = torch.rand(HEADS + NEURONS, generator=stream(0, "scores").torch())
    rates = policy._unit_rates(groups, scores, 0.3)
    for kind, count in (("head", HEADS), ("linear", NEURONS)):
        of_kind = np.concatenate([rates[group.name] for group in groups if group.kind == kind])
        assert len(of_kind) == count
        assert of_kind.mean() == pytest.approx(0.3, abs=1e-12)
        assert of_kind.std() > 0
