"""How many local steps a training section asks for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.config import load_config
from fedsweep.errors import ConfigError
from fedsweep.experiment.build import build_training
from fedsweep.experiment.experiment import Experiment
from fedsweep.testing import tiny_experiment


def experiment(sizes: list[int], *overrides: str) -> Experiment:
    samples = sum(sizes)
    small = tiny_experiment(
        fedavg(),
        num_clients=len(sizes),
        sizes=sizes,
        images=np.zeros((samples, 1, 1, 1), dtype=np.float32),
        labels=np.zeros(samples, dtype=np.int64),
    )
    config = load_config({"scenario": {"clients": len(sizes)}}, overrides)
    return replace(small, training=build_training(config))


@pytest.mark.parametrize("how", ["training.local_steps=auto", "training.equal_steps=true"])
@pytest.mark.parametrize(
    ("samples", "epochs", "batch", "steps"),
    [
        (50_000, 5, 10, 250),  # CIFAR: 50000 / 100 x 5 / 10
        (644_210, 5, 10, 3221),  # FEMNIST: floor(3221.05)
        (1_437, 1, 10, 1),  # floor(1.437)
        (700, 1, 10, 1),  # never none
    ],
)
def test_equal_steps_are_equation_4(how: str, samples: int, epochs: int, batch: int, steps: int) -> None:
    sizes = [samples // 100 + (k < samples % 100) for k in range(100)]
    run = experiment(sizes, how, f"training.local_epochs={epochs}", f"training.batch_size={batch}")
    assert run.equal_steps() == steps
    assert {run.local_steps(k, sizes[k]) for k in range(100)} == {(steps, batch, True)}


def test_clients_of_unequal_size_take_equally_many_steps_only_where_asked() -> None:
    """Sizes 10 and 30, batches of 10: floor(40 x 2 / (2 x 10)) = 4 steps each, or 2 x 1 and 2 x 3."""
    both = ("training.local_epochs=2",)
    auto = experiment([10, 30], "training.local_steps=auto", *both)
    own = experiment([10, 30], *both)
    assert [auto.local_steps(k, n)[0] for k, n in ((0, 10), (1, 30))] == [4, 4]
    assert [own.local_steps(k, n)[0] for k, n in ((0, 10), (1, 30))] == [2, 6]


def test_auto_needs_epochs_and_goes_by_the_default_of_one() -> None:
    assert load_config({}, ["training.local_steps=auto"]).training.local_epochs == 1
    assert load_config({"training": {"local_steps": "auto", "local_epochs": 5}}).training.local_epochs == 5
    with pytest.raises(ConfigError, match=r"auto goes by local_epochs, but that is null"):
        load_config({}, ["training.local_steps=auto", "training.local_epochs=null"])
    with pytest.raises(ConfigError, match=r"equally many steps for all clients, but got equal_steps=False"):
        load_config({}, ["training.local_steps=auto", "training.equal_steps=false"])
    with pytest.raises(ConfigError, match=r"training\.local_steps must be an integer .* 'auto' or null, but got 'all'"):
        load_config({}, ["training.local_steps=all"])


def test_a_number_still_takes_the_place_of_epochs() -> None:
    assert experiment([10, 30], "training.local_steps=7").local_steps(0, 10) == (7, 10, True)
    with pytest.raises(ConfigError, match="local_epochs and local_steps exclude each other"):
        load_config({}, ["training.local_steps=7", "training.local_epochs=2"])


def test_auto_needs_one_number_of_epochs_for_all() -> None:
    run = experiment([10, 30], "training.local_steps=auto", "training.local_epochs={range: [1, 2]}")
    with pytest.raises(ConfigError, match="equal steps for all clients need one number"):
        run.local_steps(0, 10)
