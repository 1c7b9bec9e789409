"""Components find the server's data at each sync point, so that no state has to keep them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.components.aggregation import Refinement
from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError, DataError
from fedsweep.experiment.build import build_experiment
from fedsweep.records import ClientUpdate, State, SyncContext
from fedsweep.testing import local_engine, run_rounds, tiny_data, tiny_experiment

SEEN: list[SyncContext] = []


@dataclass(frozen=True, kw_only=True)
class Watching(Refinement):
    """Notes what it is given."""

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        SEEN.append(sync)
        return vector, state


def test_each_sync_point_refers_to_the_same_tensors() -> None:
    SEEN.clear()
    images, labels = tiny_data(num_samples=8)
    world: dict[str, Any] = {"proxy": (images, None), "validation": (images[:3], labels[:3])}
    run_rounds(local_engine(tiny_experiment(replace(fedavg(), refinements=(Watching(),)), rounds=2, **world)))
    first, second = SEEN
    assert first.proxy_data is second.proxy_data and first.validation_data is second.validation_data
    assert first.proxy_data is not None and first.validation_data is not None
    assert np.array_equal(first.proxy_data[0].numpy(), images) and first.proxy_data[1] is None
    assert torch.equal(first.validation_data[1], torch.from_numpy(labels[:3]))


def test_a_world_without_them_has_none() -> None:
    SEEN.clear()
    run_rounds(local_engine(tiny_experiment(replace(fedavg(), refinements=(Watching(),)), rounds=1)))
    assert (SEEN[0].proxy_data, SEEN[0].validation_data) == (None, None)


def test_proxy_data_of_another_set_must_look_like_the_clients() -> None:
    with pytest.raises(DataError, match=r"5000 samples of digits can't stand beside digits: it has \d+ of shape"):
        build_experiment(load_config({}, ["scenario.server_data.proxy={dataset: digits, samples: 5000}"]))
    for other, shape in (
        ("lines", r"\(32,\)"),
        ("diabetes", r"\(10,\)"),
    ):  # no pictures: there is no size to be changed
        with pytest.raises(
            DataError, match=rf"server_data\.proxy: 9 samples of {other} can't stand .* of shape {shape}"
        ):
            build_experiment(load_config({}, [f"scenario.server_data.proxy={{dataset: {other}, samples: 9}}"]))
    with pytest.raises(ConfigError, match="unknown dataset 'digist'"):
        build_experiment(load_config({}, ["scenario.server_data.proxy={dataset: digist, samples: 9}"]))


@pytest.mark.parametrize(
    ("dataset", "model"),
    [("diabetes", {"name": "mlp"}), ("multi_digits", {"name": "mlp"}), ("lines", {"name": "transformer"})],
)
def test_proxy_data_of_another_set_are_of_its_shape_where_pictures_are_no_squares(
    dataset: str, model: dict[str, Any]
) -> None:
    scenario = {"dataset": dataset, "partition": {"kind": "iid"}}
    words = [f"scenario.server_data.proxy={{dataset: {dataset}, samples: 20}}"]
    world = build_experiment(load_config({"scenario": scenario, "model": model}, words)).world
    assert world.proxy is not None and world.proxy[0].shape[1:] == world.data.images.shape[1:]


def test_proxy_data_of_another_set_follow_from_the_seed() -> None:
    def drawn(seed: int) -> Any:
        words = [f"seed={seed}", "scenario.server_data.proxy={dataset: digits, samples: 20}"]
        proxy = build_experiment(load_config({}, words)).world.proxy
        assert proxy is not None
        return proxy[0]

    assert np.array_equal(drawn(1), drawn(1)) and not np.array_equal(drawn(1), drawn(2))
