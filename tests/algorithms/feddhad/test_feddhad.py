"""FedDHAD by its own name is the merge of its two parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fedsweep.algorithms.feddhad.fedad import fedad
from fedsweep.algorithms.feddhad.feddh import feddh
from fedsweep.algorithms.feddhad.feddhad import feddhad
from fedsweep.catalog import build_method, resolve
from fedsweep.config.load import load_config
from fedsweep.config.signatures import describe
from fedsweep.errors import ConfigError
from fedsweep.experiment.build import build_experiment
from fedsweep.parameters.signature import signature_of
from fedsweep.testing import local_engine, run_rounds

BOTH = {"merge": [{"name": "feddh", "floor": 0.02}, {"name": "fedad", "base_rate": 0.3, "refresh": [1]}]}
OURS = {"name": "feddhad", "floor": 0.02, "base_rate": 0.3, "refresh": [1]}


def played(method: dict[str, Any]) -> torch.Tensor:
    training = {"rounds": 3, "cohort_size": 2, "local_steps": 2}
    config = load_config({"scenario": {"clients": 4}, "training": training, "method": method})
    return run_rounds(local_engine(build_experiment(config))).vector


def test_it_is_the_merge_bit_for_bit() -> None:
    assert build_method(OURS) == dataclasses.replace(build_method(BOTH), name="feddhad")
    ours = played(OURS)
    assert torch.equal(ours, played(BOTH))
    assert not torch.equal(ours, played({"name": "feddh", "floor": 0.02}))


def test_it_takes_what_both_take_with_their_defaults_and_words() -> None:
    assert describe(feddhad) == (*describe(feddh), *describe(fedad))
    shared = signature_of(feddh).keys() & signature_of(fedad).keys()
    assert not shared  # or one key would stand for two things
    config = resolve(load_config({"method": {"name": "feddhad", "base_rate": 0.2, "decay_v": 0.9}}))
    assert (config.method["base_rate"], config.method["decay_v"], config.method["patience"]) == (0.2, 0.9, 3)
    assert build_method(config).name == "feddhad"
    with pytest.raises(ConfigError, match="did you mean 'base_rate'"):
        resolve(load_config({"method": {"name": "feddhad", "base_rat": 0.2}}))
