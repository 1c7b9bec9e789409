"""A user's own transform and partition are tried before the run: what is wrong with them is said in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsweep.config.load import load_config
from fedsweep.driver.run import Plan, plan_run
from fedsweep.engine.forecast import forecast
from fedsweep.errors import ConfigError, DataError

PARTS = """
from dataclasses import dataclass
import numpy as np
import torch
from fedsweep import Partition, Transform

@dataclass(frozen=True, kw_only=True)
class Mine(Transform):
    kind: str = "right"
    random: bool = False

    def __call__(self, images, *, generator, train):
        halves = images.float() / 2
        if self.kind == "raises":
            raise ValueError("mine")
        if self.kind == "draws":
            return halves + torch.rand(halves.shape, generator=generator)
        if self.kind == "in place" and train:
            images.zero_()
        answers = {"none": None, "numpy": halves.numpy(), "fewer": halves[:1], "mean": halves.mean(), "bytes": images}
        return answers.get(self.kind, halves)

def mine(kind):
    return lambda dataset: Mine(kind=kind)

right, raises, draws, in_place = mine("right"), mine("raises"), mine("draws"), mine("in place")
none, numpy, fewer, mean, of_bytes = map(mine, ("none", "numpy", "fewer", "mean", "bytes"))

@dataclass(frozen=True, kw_only=True)
class Part(Partition):
    how: str = "halves"

    def split(self, labels, num_clients, stream, *, num_classes, writers=None):
        if self.how == "twice":
            return [np.arange(5)] * num_clients
        if self.how == "below":
            return [np.array([client - 1]) for client in range(num_clients)]
        if self.how == "floats":
            return [np.array([float(client)]) for client in range(num_clients)]
        if self.how == "few":
            return [np.array([client]) for client in range(num_clients)]
        return np.array_split(np.arange(len(labels)), num_clients)
"""


@pytest.fixture(autouse=True)
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(tmp_path)


def planned(**scenario: Any) -> Plan:
    tree = {
        "scenario": {"dataset": "digits", "clients": 4, "partition": {"kind": "iid"}, **scenario},
        "training": {"rounds": 1, "cohort_size": 2, "local_steps": 1},
    }
    return plan_run(load_config(tree))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", r"Mine\.__call__ \(own_parts\.py, line \d+\) failed before the run: ValueError: mine"),
        ("none", "one tensor for a batch, but returned a NoneType"),
        ("numpy", "one tensor for a batch, but returned a ndarray"),
        ("fewer", r"returned \[1, 1, 8, 8\] for two samples"),
        ("mean", r"returned \[\] for two samples"),
        ("of_bytes", "floats for pictures, but returned torch.uint8"),
        ("draws", "train=False, must return the same for the same batch"),
        ("in_place", "train=True, must leave its batch as it is"),
    ],
)
def test_a_wrong_transform_is_refused_before_the_run(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(transform=f"own_parts:{name}")


def test_a_right_transform_is_taken() -> None:
    data = planned(transform="own_parts:right").experiment.world.data
    tested = data.transformed(data.images[:3], data.transform.dtype)
    assert np.array_equal(tested.numpy(), data.images[:3].astype(np.float32) / 2)


def test_a_wrong_partition_is_wrong_input_and_is_named() -> None:
    with pytest.raises(DataError, match=r"scenario\.partition own_parts:Part: a partition must not use a sample twice"):
        planned(partition={"kind": "own_parts:Part", "how": "twice"})


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("below", r"indices must lie in 0\.\.718, but range from -1"),
        ("floats", "one-dimensional integer arrays"),
    ],
)
def test_a_wrong_partition_in_a_mixture_is_named_with_its_place(how: str, words: str) -> None:
    of = [{"share": 1, "kind": "iid"}, {"share": 1, "kind": "own_parts:Part", "how": how}]
    partition = {"kind": "mixture", "of": of}
    with pytest.raises(DataError, match=rf"partition mixture: scenario\.partition\.of\[1\] .*{words}"):
        planned(partition=partition)


def test_a_partition_that_leaves_samples_out_is_spoken_of() -> None:
    plan = planned(partition={"kind": "own_parts:Part", "how": "few"})
    unused = len(plan.experiment.world.data.images) - 4
    note = f"scenario.partition gives {unused} of {unused + 4} training samples to nobody"
    assert note in forecast(plan.experiment).remarks
    whole = planned(partition={"kind": "own_parts:Part"})
    assert not any("to nobody" in note for note in forecast(whole.experiment).remarks)
