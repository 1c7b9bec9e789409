"""A step that trains a part of the client's part: batch norm's statistics, and what the rest of a step sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.local import LocalStep, Objective
from fedsweep.models.networks.chains import FedstgCnn
from fedsweep.models.slicing import ordered_kept
from fedsweep.models.unit_submodel import UnitSubModel, unit_submodel
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.testing import local_engine, run_rounds, tiny_experiment, tiny_pictures, with_parts


def net() -> nn.Module:
    return FedstgCnn(input_shape=(3, 8, 8), num_classes=4, dropout=0.0)


@dataclass(frozen=True, kw_only=True)
class InSteps(UnitSubModel):
    """The whole model, of which each step trains a part."""

    part: SubModel

    @property
    def step_parts(self) -> Sequence[SubModel]:
        return (self.part,) * 100


GROUPS = FedstgCnn(input_shape=(3, 8, 8), num_classes=4).unit_groups()
HALF = unit_submodel(GROUPS, ordered_kept(GROUPS, 0.5))


def run(part: SubModel, **more: Any) -> Tensor:
    images, labels = tiny_pictures(8, size=8)
    made = tiny_experiment(
        with_parts(part),
        build=net,
        images=images,
        labels=labels % 4,
        num_clients=1,
        cohort_size=1,
        sizes=(8,),
        rounds=1,
        learning_rate=0.01,
        **more,
    )
    return run_rounds(local_engine(made)).vector


def start() -> Tensor:
    images, labels = tiny_pictures(8, size=8)
    made = tiny_experiment(
        with_parts(FULL_MODEL), build=net, images=images, labels=labels % 4, sizes=(8,), num_clients=1
    )
    return local_engine(made).start().vector


def test_statistics_of_batch_norm_move_where_the_part_has_them_and_nowhere_else() -> None:
    """Two steps at half the width leave parameters and buffers of the half model, and everything else as it was."""
    layout = local_engine(
        tiny_experiment(
            with_parts(FULL_MODEL), build=net, images=tiny_pictures(8, size=8)[0], labels=tiny_pictures(8)[1]
        )
    ).layout
    before, found = start(), run(InSteps(groups=GROUPS, kept=(), part=HALF))
    narrow = HALF.embed(HALF.extract(run(HALF), layout), layout)
    assert narrow.cover is not None and layout.num_buffers > 0
    torch.testing.assert_close(found[narrow.cover], narrow.vector[narrow.cover], rtol=1e-5, atol=1e-6)
    assert torch.equal(found[~narrow.cover], before[~narrow.cover])
    buffers = slice(layout.num_params, None)
    assert not torch.equal(found[buffers][narrow.cover[buffers]], before[buffers][narrow.cover[buffers]])


def test_a_part_that_is_all_of_it_is_an_ordinary_step() -> None:
    whole = unit_submodel(GROUPS, {group.name: range(group.size) for group in GROUPS})
    assert whole == FULL_MODEL
    assert torch.equal(run(InSteps(groups=GROUPS, kept=(), part=whole)), run(FULL_MODEL))


@dataclass(frozen=True, kw_only=True)
class Whole(Objective):
    """Only what the client has in all is trained."""

    def loss(self, step: LocalStep) -> Tensor:
        return nn.functional.cross_entropy(step.whole_logits, step.targets)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_loss_of_the_whole_model_trains_all_of_it(momentum: float) -> None:
    """A loss that reads the whole logits alone is training without parts."""
    images, labels = tiny_pictures(8, size=8)
    vectors = []
    for part in (InSteps(groups=GROUPS, kept=(), part=HALF), FULL_MODEL):
        made = tiny_experiment(
            replace(with_parts(part), objective=Whole()),
            build=net,
            images=images,
            labels=labels % 4,
            num_clients=1,
            cohort_size=1,
            sizes=(8,),
            rounds=1,
            learning_rate=0.01,
            optimizer=OptimizerSettings(momentum=momentum, weight_decay=0.1),
        )
        engine = local_engine(made)
        vectors.append(run_rounds(engine).vector[: engine.layout.num_params])
    torch.testing.assert_close(vectors[0], vectors[1], rtol=0, atol=1e-6)
