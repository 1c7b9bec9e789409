"""P1: the speed comparison of pfl-research, on a GPU, and its first rounds on CPUs.

Source: Granqvist et al. 2024, pfl-research, the speed comparison on CIFAR-10: 1000 clients of 50 images, cohorts of 50,
five steps of ten images, SGD with rate 0.1, 1500 rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedsweep.bench.data import data_for
from fedsweep.bench.plain import PlainLoop, plain_processes, work_of
from fedsweep.bench.rounds import beside, plan_of, playing
from fedsweep.bench.setup import Figure, Request, SetUp, in_turns
from fedsweep.driver.plan import Plan
from fedsweep.world.data.datasets import Dataset

ROUNDS, CPU_ROUNDS = 1500, 20
_QUICK_ROUNDS, _QUICK_CPU_ROUNDS = 20, 2
_GIVEN: Mapping[str, Any] = {
    "scenario": {"clients": 1000},
    "model": {"name": "fedsweep.bench.networks:SpeedCnn"},
    "method": {"name": "fedavg"},
    "training": {
        "cohort_size": 50,
        "local_steps": 5,
        "batch_size": 10,
        "optimizer": {"name": "sgd", "lr": 0.1},
    },
}


def planned(dataset: Dataset, runtime: Mapping[str, Any], **more: Any) -> Plan:
    """Return the comparison's run on CIFAR-10, or noise of its shape; what is given are sections."""
    return plan_of({**_GIVEN, "runtime": runtime, **more}, dataset)


def on_cpus(request: Request) -> Sequence[Figure]:
    """Time two client actors against two plain processes."""
    dataset, called = data_for("cifar10", request)
    plan = planned(dataset, {"backend": "ray", "client_actors": 2, "device": "cpu"})
    rounds = request.rounds or (CPU_ROUNDS if request.is_full else _QUICK_CPU_ROUNDS)
    with plain_processes(work_of(plan, dataset), 2) as plain:
        fields = {"what": f"{rounds} rounds, 2 client actors", "against": "two plain processes", "data": called}
        return [beside(plain, plan, request, rounds=rounds, **fields)]


def on_device(request: Request) -> Sequence[Figure]:
    """Lanes against fedsweep's own loop and against a plain loop, all in this process.

    At full scale the whole run is played once on either side and tested at its end.
    """
    dataset, called = data_for("cifar10", request)
    rounds, repeats = request.rounds or (ROUNDS if request.is_full else _QUICK_ROUNDS), request.repeats
    tested: dict[str, Any] = {"evaluation": {"every": rounds}} if request.is_full else {}
    runtime = {"backend": "local", "device": request.device}
    in_lanes = planned(dataset, {**runtime, "executor": "lanes"}, **tested)
    one_by_one = planned(dataset, {**runtime, "executor": "loop"}, **tested)
    with playing(in_lanes) as lanes, playing(one_by_one) as loop:
        plain = PlainLoop(work_of(one_by_one, dataset))
        times = 1 if request.is_full else repeats
        beside_loop = in_turns(
            lambda: lanes.play(rounds),
            lambda: loop.play(rounds),
            times,
            warm_up=not request.is_full,
            what=f"{rounds} rounds in lanes",
            against="fedsweep's loop",
            asked=8.0,
            limit_s=60.0 if rounds == ROUNDS else None,
            data=called,
        )
        accuracies = (("accuracy_in_lanes", lanes.accuracy), ("accuracy_in_the_loop", loop.accuracy))
        piece = min(rounds, _QUICK_ROUNDS)
        beside_plain = in_turns(
            lambda: lanes.play(piece),
            lambda: plain.play(piece),
            repeats,
            what=f"{piece} rounds in lanes",
            against="a plain loop",
            data=called,
        )
    return [replace(beside_loop, facts=accuracies), beside_plain]


_SIZES = "CNN of 1.6 million, 1000 clients of 50, cohorts of 50, 5 steps of 10"
P1 = SetUp(
    name="P1",
    summary=f"pfl-research's speed test: {_SIZES}, in lanes",
    measure=on_device,
    devices=("cuda",),
    dataset="cifar10",
)
P1_CPU = SetUp(
    name="P1-cpu", summary=f"the same on CPUs: {_SIZES}, 2 client actors", measure=on_cpus, dataset="cifar10"
)
