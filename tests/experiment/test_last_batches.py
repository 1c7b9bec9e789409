"""A batch norm has no statistics of one value: a pass that would end with one sample is refused before the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsweep.config.load import load_config
from fedsweep.driver.run import plan_run
from fedsweep.errors import ConfigError

NETS = """
from torch import nn

def normed(norm):
    return lambda *, input_shape, num_classes: nn.Sequential(
        nn.Flatten(), nn.Linear(64, 6), norm, nn.Linear(6, num_classes)
    )

by_batch = normed(nn.BatchNorm1d(6))
frozen = normed(nn.BatchNorm1d(6).requires_grad_(False))
by_layer = normed(nn.LayerNorm(6))
"""


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "last_batch_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(tmp_path)


def planned(net: str, method: str = "fedavg", **training: Any) -> list[int]:
    """Plan a run and return its clients' numbers of samples."""
    tree: dict[str, Any] = {
        "scenario": {"dataset": "digits", "clients": 5, "partition": {"kind": "iid"}},
        "method": {"name": method},
        "model": {"name": f"last_batch_nets:{net}"},
        "training": {"rounds": 1, "cohort_size": 2, **training},
    }
    return [profile.num_samples for profile in plan_run(load_config(tree)).experiment.world.profiles]


def test_a_pass_that_ends_with_one_sample_is_refused_where_the_network_needs_two() -> None:
    smallest, *_, largest = sorted(planned("by_batch", batch_size=16))
    assert largest == smallest + 1 and smallest % 16 != 1 != largest % 16
    words = rf"of one sample \(Expected more than 1 value .*which has {largest}, comes to .*batch_size: {smallest}\)"
    for training in ({"batch_size": smallest}, {"batch_size": smallest, "local_epochs": 3}):
        with pytest.raises(ConfigError, match=words):
            planned("by_batch", **training)
    with pytest.raises(ConfigError, match=r"training.batch_size: 1\)"):
        planned("by_batch", batch_size=1, local_steps=2)


@pytest.mark.parametrize(
    ("net", "training"),
    [
        ("by_layer", {}),
        ("frozen", {}),
        ("by_batch", {"local_steps": 3}),
        ("by_batch", {"equal_steps": True}),
    ],
)
def test_what_sees_no_batch_of_one_or_needs_no_two_is_planned(net: str, training: dict[str, Any]) -> None:
    sizes = planned(net, batch_size=287, **training)
    assert 288 in sizes


def test_a_method_with_one_step_comes_to_no_last_batch(tmp_path: Path) -> None:
    assert 288 in planned("by_batch", method="fedsgd", batch_size=287)
    with pytest.raises(ConfigError, match=r"comes to one \(training.batch_size: 1\); normalise without"):
        planned("by_batch", method="fedsgd", batch_size=1)
