"""Every key of a configuration does what it says in the experiment that is built from it; seeds reach every draw.

One entry a key: what else is set, the key's value, what is read off the experiment, and what it must be. Keys that say
how a run is carried out, not what it computes, are listed with the test that holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from fedsweep.client.messages import LaneSettings
from fedsweep.config.explain import all_keys
from fedsweep.config.load import load_config
from fedsweep.config.scenario import Scenario
from fedsweep.engine.plan import RoundPlan
from fedsweep.errors import DataError
from fedsweep.experiment.build import build_experiment
from fedsweep.experiment.build_world import server_share
from fedsweep.experiment.experiment import Experiment
from fedsweep.testing import local_engine, run_rounds
from fedsweep.trees import model_vector
from fedsweep.world.stragglers import Deadline

Read = Callable[[Experiment], Any]
SMALL = ["scenario.clients=8"]
SGD = "training.optimizer={name: sgd, lr: 0.1, momentum: 0.5, nesterov: true, weight_decay: 0.25}"
ADAM = "training.optimizer={name: adam, lr: 0.2, mean_decay: 0.5, square_decay: 0.75, epsilon: 0.125}"


def built(*overrides: str) -> Experiment:
    return build_experiment(load_config({}, [*SMALL, *overrides]))


def optimizer(name: str) -> Read:
    return lambda experiment: getattr(experiment.training.optimizer, name)


def training(name: str) -> Read:
    return lambda experiment: getattr(experiment.training, name)


def stop(name: str) -> Read:
    return lambda experiment: getattr(experiment.training.stop, name)


def rate(round: int) -> Read:
    return lambda experiment: experiment.training.schedule(round)


def num_validation(experiment: Experiment) -> int:
    assert experiment.world.validation is not None
    return len(experiment.world.validation[1])


def tenths_of_classes(experiment: Experiment) -> int:
    """What a tenth of each class comes to, counted on the whole training set."""
    return sum(round(0.1 * int(count)) for count in np.bincount(experiment.world.data.labels))


EFFECTS: dict[str, tuple[list[str], Read, Any]] = {
    "seed": (["seed=5"], lambda e: e.seed, 5),
    "scenario.dataset": (["scenario.dataset=digits"], lambda e: e.world.data.images.shape[1:], (1, 8, 8)),
    "scenario.transform": (
        ["scenario.transform=fedstg"],
        lambda e: (built().world.data.transform.random, e.world.data.transform.random),
        (False, True),
    ),
    "scenario.image_size": (["scenario.image_size=16"], lambda e: e.world.data.images.shape[2:], (16, 16)),
    "scenario.clients": (["scenario.clients=6"], lambda e: len(e.world.profiles), 6),
    "scenario.partition.kind": (
        ["scenario.partition={kind: iid}"],
        lambda e: max(map(len, e.world.indices)) - min(map(len, e.world.indices)) <= 1,
        True,
    ),
    "scenario.feature_skew.kind": (
        ["scenario.feature_skew={kind: rotation, groups: 2}"],
        lambda e: np.array_equal(
            e.world.data.images[e.world.indices[1]], built().world.data.images[e.world.indices[1]][:, :, ::-1, ::-1]
        ),
        True,
    ),
    "scenario.server_data.validation": (
        ["scenario.server_data.validation=0.1"],
        lambda e: num_validation(e) == tenths_of_classes(e),
        True,
    ),
    "scenario.server_data.proxy.per_class": (
        ["scenario.server_data.proxy={per_class: 3}"],
        lambda e: np.bincount(e.world.proxy[1]).tolist(),
        [3] * 10,
    ),
    "scenario.server_data.proxy.labelled": (
        ["scenario.server_data.proxy={per_class: 3, labelled: false}"],
        lambda e: e.world.proxy[1],
        None,
    ),
    "scenario.server_data.proxy.dataset": (
        ["scenario.server_data.proxy={dataset: digits, samples: 7}"],
        lambda e: (e.world.proxy[0].shape, e.world.proxy[1], sum(map(len, e.world.indices))),
        ((7, 1, 8, 8), None, sum(map(len, built().world.indices))),
    ),
    "scenario.server_data.proxy.samples": (
        ["scenario.server_data.proxy={dataset: digits, samples: 5}"],
        lambda e: len(e.world.proxy[0]),
        5,
    ),
    "scenario.drift.kind": (
        ["scenario.drift={kind: cosine_rotation, rotation_speed: 3.0}"],
        lambda e: e.world.drift.rotation_speed,
        3.0,
    ),
    "scenario.availability.kind": (
        ["scenario.availability={kind: capability, base: 0.25}"],
        lambda e: e.world.availability.base,
        0.25,
    ),
    "scenario.budgets.kind": (
        ["scenario.budgets={kind: fixed, budget_fraction: 0.5}"],
        lambda e: sorted(e.world.budgets.client_budgets(10.0, 1.0)),
        [1.0] * 4 + [10.0] * 4,
    ),
    "scenario.devices": (
        ["scenario.devices={profile: phone-wifi, drop_probability: 0.125}"],
        lambda e: {p.device.drop_probability for p in e.world.profiles},
        {0.125},
    ),
    "scenario.devices.stragglers.kind": (
        ["scenario.devices={profile: phone-wifi, stragglers: {kind: deadline, deadline_s: 3}}"],
        lambda e: e.world.stragglers,
        Deadline(deadline_s=3.0),
    ),
    "model.name": (["model={name: mlp, hidden_width: 7}"], lambda e: next(e.build_model().parameters()).shape[0], 7),
    "method": (["method={name: fedprox, mu: 0.5}"], lambda e: e.method.terms[0].mu, 0.5),
    "training.rounds": (["training.rounds=7"], training("rounds"), 7),
    # 0.3 of 8 clients is 2.4: rounded up
    "training.cohort_fraction": (["training.cohort_fraction=0.3"], training("cohort_size"), 3),
    "training.cohort_size": (["training.cohort_size=5"], training("cohort_size"), 5),
    "training.local_epochs": (["training.local_epochs=3"], training("local_epochs"), 3),
    "training.local_epochs.range": (["training.local_epochs={range: [2, 4]}"], training("local_epochs"), (2, 4)),
    "training.local_steps": (["training.local_steps=9"], training("local_steps"), 9),
    "training.local_steps.range": (["training.local_steps={range: [5, 6]}"], training("local_steps"), (5, 6)),
    "training.equal_steps": (["training.equal_steps=true"], training("equal_steps"), True),
    "training.batch_size": (["training.batch_size=13"], training("batch_size"), 13),
    "training.batch_size.range": (["training.batch_size={range: [3, 4]}"], training("batch_size"), (3, 4)),
    "training.optimizer.name": ([ADAM], optimizer("name"), "adam"),
    "training.optimizer.lr": ([SGD], training("learning_rate"), 0.1),
    "training.optimizer.momentum": ([SGD], optimizer("momentum"), 0.5),
    "training.optimizer.nesterov": ([SGD], optimizer("nesterov"), True),
    "training.optimizer.weight_decay": ([SGD], optimizer("weight_decay"), 0.25),
    "training.optimizer.mean_decay": ([ADAM], lambda e: e.training.optimizer.betas[0], 0.5),
    "training.optimizer.square_decay": ([ADAM], lambda e: e.training.optimizer.betas[1], 0.75),
    "training.optimizer.epsilon": ([ADAM], optimizer("eps"), 0.125),
    "training.clip_norm": (["training.clip_norm=1.5"], optimizer("clip_norm"), 1.5),
    "training.optimizer_state": ([SGD, "training.optimizer_state=persist"], optimizer("keep"), "persist"),
    "training.schedule.kind": (["training.schedule={kind: exponential, decay: 0.5}"], rate(2), 0.025),
    "training.stop.target_accuracy": (["training.stop.target_accuracy=0.75"], stop("target_accuracy"), 0.75),
    "training.stop.total_bytes": (["training.stop.total_bytes=2e9"], stop("total_bytes"), 2_000_000_000),
    "training.stop.sim_time_s": (
        ["scenario.devices={profile: edge-accel}", "training.stop.sim_time_s=9.5"],
        stop("sim_time_s"),
        9.5,
    ),
    "training.stop.wall_time_s": (["training.stop.wall_time_s=3.5"], stop("wall_time_s"), 3.5),
    "evaluation.every": (["evaluation.every=3"], lambda e: e.evaluate_every, 3),
    "evaluation.batch_size": (["evaluation.batch_size=17"], lambda e: e.evaluation_batch, 17),
    "evaluation.per_client": (["evaluation.per_client=true"], lambda e: e.evaluate_per_client, True),
    "evaluation.targets": (["evaluation.targets=[0.5, 0.25]"], lambda e: e.targets, (0.5, 0.25)),
    "runtime.executor": (["runtime.executor=lanes"], lambda e: e.lanes, LaneSettings(width=4)),  # the cohort
    "runtime.lanes": (["runtime.executor=lanes", "runtime.lanes=3"], lambda e: e.lanes, LaneSettings(width=3)),
    "runtime.tf32": (["runtime.tf32=true"], lambda e: e.tf32, True),
    "runtime.device": (["runtime.device=cpu"], lambda e: (e.device, e.server_device), ("cpu", "cpu")),
}

# Keys that say where the data lies or how a run is carried out; the bits of a run do not depend on them.
ELSEWHERE = {
    "name": "tests/runs/test_run_folder.py",
    "model.init_from": "tests/experiment/test_initial_model.py",
    "model.init_sha256": "tests/experiment/test_initial_model.py",
    "training.stop.target.metric": "tests/tasks/test_runs.py",
    "training.stop.target.value": "tests/tasks/test_runs.py",
    "scenario.task.kind": "tests/tasks/test_runs.py",
    "scenario.task.metrics": "tests/tasks/test_runs.py",
    "model.adapter.kind": "tests/models/test_adapters.py",
    **{
        f"scenario.subset.{key}": "tests/world/data/test_subset.py"
        for key in ("share", "train", "test", "groups", "order")
    },
    "training.optimizer.groups": "tests/client/test_optimizer_state.py",
    "scenario.root": "tests/world/data/test_torchvision_sets.py",
    "scenario.download": "tests/world/data/test_torchvision_sets.py",
    "scenario.topology.kind": "tests/world/test_topology.py",
    "planner.name": "tests/engine/test_spending.py",
    "planner.choices": "tests/engine/test_spending.py",
    "communication.up.name": "tests/engine/test_communication.py",
    "communication.down.name": "tests/engine/test_communication.py",
    "evaluation.metrics": "tests/components/test_metrics.py",
    "runtime.backend": "tests/fleet/test_ray_fleet.py",
    "runtime.client_actors": "tests/fleet/test_ray_fleet.py",
    "runtime.cpus_per_client": "tests/sweeps/test_resources.py",
    "runtime.gpus_per_client": "tests/sweeps/test_resources.py",
    "runtime.cpus_per_server": "tests/sweeps/test_resources.py",
    "runtime.gpus_per_server": "tests/sweeps/test_resources.py",
    "runtime.address": "tests/fleet/test_nodes.py",
    "checkpoint.every": "tests/runs/checkpoints/test_checkpoint.py",
    "checkpoint.keep": "tests/runs/checkpoints/test_checkpoint.py",
    "tracking.uri": "tests/tracking/test_mlflow_observer.py",
    "tracking.experiment": "tests/tracking/test_mlflow_observer.py",
    "tracking.also": "tests/tracking/loggers/test_loggers.py",
}


def leaves() -> list[str]:
    """Keys with a value of their own: no section, and nothing of a sweep, which is not part of a run."""
    keys = [key for key in all_keys() if key != "sweep" and not key.startswith("sweep.")]
    sections = {key for key in keys if any(other.startswith(f"{key}.") for other in keys)}
    return [key for key in keys if key not in sections or key in EFFECTS]


def test_each_key_has_an_effect_that_is_tested() -> None:
    assert set(leaves()) == set(EFFECTS) | set(ELSEWHERE)


@pytest.mark.parametrize("key", EFFECTS)
def test_a_key_does_what_it_says(key: str) -> None:
    overrides, read, expected = EFFECTS[key]
    assert read(built(*overrides)) == expected


def test_clients_are_stepped_one_by_one_unless_lanes_are_asked_for() -> None:
    for executor in ("loop", "auto"):  # auto is lanes where clients have a share of a GPU
        assert built(f"runtime.executor={executor}", "runtime.lanes=3").lanes is None
    assert built("runtime.executor=lanes", "training.cohort_size=3").lanes == LaneSettings(width=3)
    many = ["scenario.clients=30", "training.cohort_size=30"]
    assert built("runtime.executor=lanes", *many).lanes == LaneSettings(width=8)
    chosen = ["planner={choices: {training.cohort_size: [2, 6]}}", "scenario.budgets={total_bytes: 2 MB}"]
    assert built("runtime.executor=lanes", *chosen).lanes == LaneSettings(width=6)


def test_lanes_are_part_of_what_names_a_checkpoint_where_there_are_some() -> None:
    def named(*overrides: str) -> str:
        return load_config({}, [*SMALL, *overrides]).hash()

    assert named() == named("runtime.lanes=3")
    assert len({named(), named("runtime.executor=lanes"), named("runtime.executor=lanes", "runtime.lanes=3")}) == 3


WORLD = [
    "scenario.budgets={kind: fixed, budget_fraction: 0.5}",
    "scenario.devices={profile: phone-wifi}",
    "scenario.drift={kind: cosine_rotation}",
    "scenario.availability={kind: capability}",
    "scenario.server_data.validation=0.1",
    "training.cohort_size=3",
    "training.local_steps=2",
]

NOISE = "scenario.feature_skew={kind: noise}"
DRAWS: dict[str, Read] = {
    "partition": lambda e: np.concatenate(built(f"seed={e.seed}").world.indices).tolist(),
    "initial model": lambda e: model_vector(e.build_model(), local_engine(e).layout).tolist(),
    "budgets": lambda e: e.world.budgets.client_budgets(10.0, 1.0).tolist(),
    "feature skew": lambda e: built(*WORLD[:2], NOISE, f"seed={e.seed}").world.data.images[0].tolist(),
    "devices": lambda e: [p.device.flops_per_s for p in e.world.profiles],
    "validation data": lambda e: e.world.validation[0].tolist(),
    "drift": lambda e: [tuple(e.classes(round).items()) for round in (1, 2)],
    "who is there": lambda e: [plan(e, round).context.present for round in range(6)],
    "cohort": lambda e: [plan(e, round).context.cohort for round in range(6)],
    "batches": lambda e: run_rounds(local_engine(frozen_model(e)), rounds=1).vector.tolist(),
}


def plan(experiment: Experiment, rounds_done: int) -> RoundPlan:
    engine = local_engine(experiment)
    return engine.planner.plan(replace(engine.start(), round=rounds_done))


@dataclass(frozen=True)
class SameModel:
    """The same initial values whatever the seed."""

    build: Callable[[], torch.nn.Module]

    def __call__(self) -> torch.nn.Module:
        model = self.build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).reshape(parameter.shape))
        return model


def frozen_model(experiment: Experiment) -> Experiment:
    """One client, one world, one initial model: nothing but the batches is left to depend on the seed."""
    first = built(*WORLD)
    world = replace(first.world, availability=None, drift=None)
    training = replace(first.training, cohort_size=len(world.profiles))
    return replace(experiment, world=world, training=training, build_model=SameModel(first.build_model))


def test_proxy_data_by_class_pass_over_a_class_without_samples() -> None:
    strata = np.repeat([1, 3], 6)
    scenario = Scenario.model_validate({"server_data": {"proxy": {"per_class": 2}}})
    _, proxy, rest = server_share(strata, 4, scenario, 0)
    assert proxy is not None and strata[proxy].tolist() == [1, 1, 3, 3] and len(rest) == 8
    with pytest.raises(DataError, match="0 \\+ 2 samples of class 2, but the training set has 1"):
        server_share(np.append(strata, 2), 4, scenario, 0)


@pytest.mark.parametrize("kind", ["iid", "drawn"])
def test_a_server_that_keeps_every_sample_is_refused(kind: str) -> None:
    some = ["scenario.subset={train: 20, test: 20, order: first}", "scenario.server_data.validation=0.9"]
    with pytest.raises(DataError, match=r"server_data keeps all 20 training samples, so that clients have none; lower"):
        built(*some, f"scenario.partition={{kind: {kind}}}")


def test_classes_of_the_test_alone_are_told() -> None:
    first = ["scenario.subset={train: 9, test: 60, order: first}", "scenario.clients=3", "training.cohort_size=3"]
    experiment = built(*first, "scenario.partition={kind: iid}")
    number = np.isin(experiment.world.test_labels, (3, 4, 8)).sum()
    assert number and experiment.world.notes == (
        f"{number} of 60 test samples are of classes that no training sample has (3, 4, 8), so that they count as"
        " wrong",
    )
    assert built().world.notes == ()


def test_a_share_for_validation_that_keeps_no_sample_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"validation of 0\.001 keeps no sample of any class of a training set of \d+; raise"
    ):
        built("scenario.server_data.validation=0.001")


@pytest.mark.parametrize("what", DRAWS)
def test_a_draw_follows_the_seed_and_nothing_else(what: str) -> None:
    zero, again, one = (DRAWS[what](built(*WORLD, f"seed={seed}")) for seed in (0, 0, 1))
    assert zero == again
    assert zero != one


def test_augmentation_differs_from_round_to_round() -> None:
    """Two rounds of one client whose whole set is one batch: only the augmentation can change what it sees."""
    seen: list[Any] = []
    experiment = built("scenario.clients=1", "scenario.partition={kind: iid}", "training.local_steps=1")

    class Seeing:
        random = True

        def __call__(self, images: torch.Tensor, *, generator: torch.Generator | None, train: bool) -> torch.Tensor:
            if generator is not None:
                seen.append(torch.rand(4, generator=generator).tolist())
            return images.float()

    world = replace(experiment.world, data=replace(experiment.world.data, transform=Seeing()))
    run_rounds(local_engine(replace(experiment, world=world)), rounds=2)
    assert len(seen) == 2 and seen[0] != seen[1]
