"""A part of a data set: its samples, whose they are, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedsweep.config.load import load_config
from fedsweep.driver.run import plan_run
from fedsweep.errors import ConfigError
from fedsweep.world.data.datasets import load_dataset
from fedsweep.world.data.record import Dataset
from fedsweep.world.data.subset import subset

LINES = load_dataset("lines", root=None, download=False)


def part(seed: int = 0, dataset: Dataset = LINES, **of: Any) -> Dataset:
    counts = {name: of.pop(name, None) for name in ("train", "test")}
    return subset(dataset, seed=seed, counts=counts, **of)


def rows(values: np.ndarray) -> set[bytes]:
    return {row.tobytes() for row in values}


def test_a_share_is_drawn_by_the_seed_and_keeps_inputs_targets_and_groups_together() -> None:
    found, again, other = part(share=0.1), part(share=0.1), part(seed=1, share=0.1)
    assert (len(found.train), len(found.test)) == (128, 32)
    assert np.array_equal(found.train.inputs, again.train.inputs)
    assert not np.array_equal(found.train.inputs, other.train.inputs)
    whole = np.c_[LINES.train.inputs, LINES.train.targets, LINES.train.groups]
    assert rows(np.c_[found.train.inputs, found.train.targets, found.train.groups]) <= rows(whole)


def test_first_and_last_groups_are_disjoint_in_both_parts() -> None:
    first, last = part(groups=20, order="first"), part(groups=20, order="last")
    for name in ("train", "test"):
        one, other = (set(getattr(half, name).groups.tolist()) for half in (first, last))
        assert (one, other) == (set(range(20)), set(range(20, 40)))
    assert len(part(groups=3, train=50).train) == 50
    assert len(np.unique(part(groups=3).train.groups)) == 3


def test_first_samples_are_the_sets_own() -> None:
    found = part(train=5, test=2, order="first")
    assert np.array_equal(found.train.inputs, LINES.train.inputs[:5])
    assert np.array_equal(found.test.inputs, LINES.test.inputs[:2])


def test_a_run_has_the_part_and_a_configuration_without_one_is_as_before() -> None:
    assert "subset" not in load_config({}).tree()["scenario"]
    config = load_config({"scenario": {"subset": {"train": 200, "test": 50}, "clients": 5}})
    world = plan_run(config).experiment.world
    assert sum(map(len, world.indices)) == len(world.data.images) == 200 and len(world.test_images) == 50
    more = {
        "dataset": "lines",
        "subset": {"share": 0.5, "groups": 20, "order": "last"},
        "partition": {"kind": "writer"},
    }
    world = plan_run(
        load_config({"scenario": {**more, "clients": 10}, "model": {"name": "transformer"}})
    ).experiment.world
    assert np.array_equal(world.data.images, part(share=0.5, groups=20, order="last").train.inputs)


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ({"train": 1281}, "asks for 1281 train samples, but there are 1280"),
        ({"groups": 41}, "asks for 41 groups, but there are 40"),
    ],
)
def test_more_than_there_is_is_refused(of: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        part(**of)


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ({}, "share, train, test or groups must be given"),
        ({"share": 0.1, "test": 3}, "share excludes train and test"),
        ({"groups": 3}, "'digits' does not say whose its samples are"),
    ],
)
def test_what_a_part_can_not_be_is_refused(of: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_run(load_config({"scenario": {"subset": of}}))
