"""A configuration is read once: bound once, one network, one start of each component; what a run keeps repeats it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from torch import nn

import fedsweep.catalog
import fedsweep.experiment.build
from fedsweep import run
from fedsweep.catalog import resolve
from fedsweep.cli import main
from fedsweep.components.aggregation import Weighting
from fedsweep.config.load import load_config
from fedsweep.driver.observers import Observer
from fedsweep.driver.run import plan_run, run_plan
from fedsweep.experiment.build import build_experiment
from fedsweep.records import RoundRecord
from fedsweep.sweeps.prepare import prepare
from fedsweep.sweeps.space import list_trials
from fedsweep.sweeps.sweep_folder import SweepFolder
from fedsweep.sweeps.trial import ActiveTrial

TINY = {
    "scenario": {"clients": 6, "partition": {"kind": "iid"}},
    "training": {"rounds": 2, "cohort_size": 3, "local_steps": 2},
    "runtime": {"backend": "local"},
    "tracking": {"uri": "none"},
}
WORLD = {
    "drift": {"kind": "cosine_rotation", "profile": "program"},
    "availability": {"kind": "capability", "base": 0.7},
    "budgets": {"kind": "values", "clients": 100_000_000},
    "devices": {"profile": "phone-lte", "jitter": 0.4, "stragglers": {"kind": "deadline", "deadline_s": 1000}},
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts what is bound by key, and how often a network is built and weights begin."""
    counted: Counter[str] = Counter()

    def counting(function: Callable[..., Any], name: Callable[..., str]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted[name(*args)] += 1
            return function(*args, **kwargs)

        return call

    monkeypatch.setattr(fedsweep.catalog, "bind", counting(fedsweep.catalog.bind, lambda key, *_: key))
    builder = counting(fedsweep.experiment.build.make_network, lambda *_: "network")
    monkeypatch.setattr(fedsweep.experiment.build, "make_network", builder)
    monkeypatch.setattr(Weighting, "init", counting(Weighting.init, lambda *_: "start of weights"))
    return counted


def test_a_run_binds_once_builds_one_network_and_begins_once(tmp_path: Path, calls: Counter[str]) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump({**TINY, "scenario": {**TINY["scenario"], **WORLD}}))
    assert main(["run", str(file), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    assert calls == {
        "scenario.partition": 1,
        "scenario.drift": 1,
        "scenario.availability": 1,
        "scenario.budgets": 1,
        "scenario.devices": 1,
        "scenario.devices.stragglers": 1,
        "training.schedule": 1,
        "model": 1,
        "method": 1,
        "network": 1,
        "start of weights": 1,
    }


def test_a_model_is_built_from_what_was_bound_and_not_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("users_models")
    module.net = lambda *, input_shape, num_classes: nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "users_models", module)
        config = resolve(load_config({**TINY, "model": {"name": "users_models:net"}}))
    assert "users_models" not in sys.modules
    assert sum(p.numel() for p in build_experiment(config).build_model().parameters()) == 650


def test_a_trial_is_bound_by_the_driver_and_by_its_process(tmp_path: Path, calls: Counter[str]) -> None:
    config = load_config({**TINY, "sweep": {"space": {"method": {"grid": [{"name": "fedprox", "mu": 0.5}]}}}})
    prepared = prepare(config, SweepFolder(tmp_path / "sweep"), resume=False)
    assert len(list_trials(config)) == calls["method"] == calls["scenario.partition"] == calls["model"] == 1
    calls.clear()
    (entry,) = prepared.entries
    trial = ActiveTrial(prepared.describe(entry)["spec"])
    while not trial.step()["done"]:
        pass
    assert trial.config is not None and trial.config.method == {"name": "fedprox", "mu": 0.5, "penalty": "half"}
    assert calls["method"] == calls["scenario.partition"] == calls["model"] == calls["network"] == 1


SKEW = {"share": 3, "kind": "dirichlet", "dirichlet_alpha": 0.3}
DEFAULTS = {"min_samples": 5, "max_draws": 1000, "repair": False}
MIXTURE = {"kind": "mixture", "of": [{"share": 1, "kind": "iid"}, SKEW]}


class Interrupt(Observer):
    """Ctrl-C after round 1."""

    def round_done(self, record: RoundRecord) -> None:
        if record.round == 1:
            raise KeyboardInterrupt


def test_a_run_keeps_every_parameter_of_each_kind_of_a_mixture_and_repeats_from_them(tmp_path: Path) -> None:
    given = {**TINY, "scenario": {"clients": 6, "partition": MIXTURE}}
    first = run(given, out=tmp_path / "first")
    kept = yaml.safe_load((tmp_path / "first" / "config.yaml").read_text())
    assert kept["scenario"]["partition"] == {**MIXTURE, "of": [MIXTURE["of"][0], {**SKEW, **DEFAULTS}]}
    again = run(tmp_path / "first" / "config.yaml", out=tmp_path / "again")
    assert again.summary["model_sha256"] == first.summary["model_sha256"]
    assert again.config.hash() == first.config.hash()


def test_a_run_does_not_go_on_where_its_config_says_something_else(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan_run(load_config(TINY)), tmp_path / "run", observers=[Interrupt()])
    kept = tmp_path / "run" / "config.yaml"
    kept.write_text(kept.read_text().replace("batch_size: 10", "batch_size: 9"))
    assert main(["run", "--resume", str(tmp_path / "run"), "--quiet"]) == 2


OPEN = """
# null stands for
#   scenario.drift.rotation_speed: 0.15
#   scenario.drift.min_classes: 4
#   scenario.drift.max_classes: 6
#   scenario.drift.pool: all
#   scenario.availability.decay: linear
#   scenario.availability.perf: shifted
#   scenario.availability.normalise: false
#   scenario.devices.seed: 0
#   scenario.devices.compute_sigma: 0.52
#   scenario.devices.drop_probability: 0.0
#   scenario.devices.compute_jitter: 0.0
"""


def test_another_profile_takes_its_own_values_also_in_a_configuration_made_from_a_runs(tmp_path: Path) -> None:
    given = {**TINY, "scenario": {**TINY["scenario"], **WORLD}}
    run(given, out=tmp_path / "first")
    other = [
        "scenario.drift.profile=paper",
        "scenario.availability.profile=program",
        "scenario.devices.profile=flash-tiers",
    ]
    derived = run(tmp_path / "first" / "config.yaml", overrides=other, out=tmp_path / "derived")
    plain = run(given, overrides=other, out=tmp_path / "plain")
    assert derived.summary["model_sha256"] == plain.summary["model_sha256"]
    assert derived.rounds["sim_time_s"].to_pylist() == plain.rounds["sim_time_s"].to_pylist()
    texts = [(tmp_path / name / "config.yaml").read_text() for name in ("first", "derived", "plain")]
    assert texts[1] == texts[2]
    assert "drift.rotation_speed: 0.15" in texts[0] and "drift.rotation_speed: 2.0" in texts[1]


def test_a_run_keeps_every_parameter_of_every_component_and_repeats_from_them(tmp_path: Path) -> None:
    scenario = {**TINY["scenario"], **WORLD}
    longer = {**TINY, "training": {**TINY["training"], "rounds": 6}, "scenario": scenario}
    first = run({**longer, "model": {"name": "convnet3", "width": 8}}, out=tmp_path / "first")
    kept = yaml.safe_load((tmp_path / "first" / "config.yaml").read_text())
    assert kept["model"] == {"name": "convnet3", "width": 8, "projection": None}
    found = kept["scenario"]
    assert found["drift"] == {
        "kind": "cosine_rotation",
        "profile": "program",
        "rotation_speed": None,
        "class_shift": 0.5,
        "client_offset": 0.4,
        "min_classes": None,
        "max_classes": None,
        "pool": None,
        "frozen": False,
    }
    assert found["availability"] == {
        "kind": "capability",
        "profile": "default",
        "base": 0.7,
        "floor": 0.3,
        "ceiling": 0.95,
        "decay": None,
        "perf": None,
        "normalise": None,
        "adaptive": True,
    }
    assert found["budgets"] == {"kind": "values", "clients": 100_000_000, "server": float("inf")}
    assert found["devices"] == {
        "stragglers": {"kind": "deadline", "deadline_s": 1000, "min_updates": 1},
        "profile": "phone-lte",
        "of": None,
        "seed": None,
        "compute_sigma": None,
        "file": None,
        "bandwidth_factor": 1.0,
        "drop_probability": None,
        "jitter": 0.4,
        "compute_jitter": None,
        "slow_share": 0.0,
        "slow_factor": 10.0,
    }
    assert (tmp_path / "first" / "config.yaml").read_text().endswith(OPEN)
    again = run(tmp_path / "first" / "config.yaml", out=tmp_path / "again")
    assert again.summary["model_sha256"] == first.summary["model_sha256"]
    assert again.config == first.config and again.config.hash() == first.config.hash()
    taken = ["timestamp_ms", "wall_time_s", "eval_time_s", "server_time_s"]
    assert again.rounds.drop_columns(taken).to_pylist() == first.rounds.drop_columns(taken).to_pylist()
