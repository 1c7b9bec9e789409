"""``scenario.devices.stragglers`` and ``evaluation.targets`` from a configuration to a run's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fedsweep
from fedsweep.config import load_config
from fedsweep.driver.run import plan_run
from fedsweep.errors import ConfigError
from fedsweep.experiment.build import build_experiment
from fedsweep.world.stragglers import Deadline, OverSelect, WaitForAll


def config(devices: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    return {
        "scenario": {"clients": 8, "devices": devices},
        "training": {"rounds": 3, "cohort_size": 4, "local_steps": 3},
        "tracking": {"uri": "none"},
        "runtime": {"backend": "local"},
        **more,
    }


@pytest.mark.parametrize(
    ("devices", "policy"),
    [
        (None, WaitForAll()),
        ({"profile": "phone-slow"}, WaitForAll()),
        ({"stragglers": None}, WaitForAll()),
        ({"stragglers": {"kind": "deadline", "deadline_s": 3}}, Deadline(deadline_s=3)),
        ({"stragglers": {"kind": "over_select"}}, OverSelect(over_selection=1.3)),
    ],
)
def test_the_policy_is_the_worlds(devices: dict[str, Any] | None, policy: object) -> None:
    assert build_experiment(load_config(config(devices))).world.stragglers == policy


@pytest.mark.parametrize(
    ("stragglers", "message"),
    [
        ({"kind": "dedline", "deadline_s": 3}, "scenario.devices.stragglers.*did you mean 'deadline'"),
        ({"kind": "deadline"}, "scenario.devices.stragglers.deadline_s is missing"),
        ({"kind": "deadline", "deadline_s": -1}, "deadline_s must be a number > 0"),
        ("deadline", "scenario.devices.stragglers must be a mapping with kind"),
    ],
)
def test_a_wrong_policy_is_an_error(stragglers: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_experiment(load_config(config({"stragglers": stragglers})))


def test_a_misspelt_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'stragglers'"):
        build_experiment(load_config(config({"straglers": {"kind": "wait"}})))


def test_a_method_that_the_policy_cannot_judge_is_refused_before_anything_is_written() -> None:
    refused = config({"stragglers": {"kind": "over_select"}}, method={"name": "dynamicsgd"})
    with pytest.raises(ConfigError, match="dynamicsgd synchronises"):
        plan_run(load_config(refused))
    carrying = config(
        {"drop_probability": 0.1},
        method={"name": "fedstg"},
    )
    carrying["scenario"]["server_data"] = {"validation": 0.1}
    with pytest.raises(ConfigError, match="it is not defined what a client that drops out"):
        fedsweep.run(carrying, out="unused")
    assert not Path("unused").exists()


def test_targets_are_in_the_result_and_change_no_checkpoint(tmp_path: Path) -> None:
    plain = load_config(config({"profile": "phone-slow"}))
    aiming = load_config(config({"profile": "phone-slow"}, evaluation={"targets": [0.01, 1.0]}))
    assert plain.hash() == aiming.hash()
    result = fedsweep.run(aiming, out=tmp_path / "run")
    stored = json.loads((tmp_path / "run" / "result.json").read_text())["targets"]
    first = result.rounds.to_pydict()
    assert stored["1"] is None
    assert stored["0.01"] == {
        "round": 1,
        "sim_time_s": first["sim_time_s"][0],
        "total_bytes": first["bytes_up"][0] + first["bytes_down"][0] + 4 * 8,
        "flops": first["flops"][0],
    }


@pytest.mark.parametrize("targets", [[0.0], [1.5], [0.5, 0.5], 0.5])
def test_targets_are_different_accuracies(targets: object) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.targets"):
        load_config(config(None, evaluation={"targets": targets}))


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
def test_lost_clients_are_the_same_on_ray(tmp_path: Path) -> None:
    devices = {
        "profile": "phone-slow",
        "drop_probability": 0.2,
        "jitter": 0.4,
        "stragglers": {"kind": "partial", "deadline_s": 1.2},
    }
    runs = []
    for backend in ("local", "ray"):
        runtime = {"backend": backend} | ({"client_actors": 2} if backend == "ray" else {})
        given = config(devices, runtime=runtime)
        given["training"] = {"rounds": 4, "cohort_size": 6, "local_epochs": 3}
        runs.append(fedsweep.run(given, out=tmp_path / backend))
    local, ray = runs
    assert local.summary["model_sha256"] == ray.summary["model_sha256"]
    for name in ("attendees", "cohort", "flops", "bytes_up", "sim_time_s", "local_steps"):
        assert local.rounds.to_pydict()[name] == ray.rounds.to_pydict()[name]
    assert local.rounds.to_pydict()["attendees"] != local.rounds.to_pydict()["cohort"]
