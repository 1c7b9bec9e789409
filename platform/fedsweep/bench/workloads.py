"""W1 to W3: LeNet-5 on 100 clients, in long rounds, in rounds of one step, and in step with each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fedsweep.bench.data import data_for
from fedsweep.bench.plain import PlainLoop, plain_processes, work_of
from fedsweep.bench.rounds import beside, plan_of, playing
from fedsweep.bench.setup import Figure, Request, SetUp, in_turns
from fedsweep.driver.plan import Plan
from fedsweep.world.data.datasets import Dataset

_STEPS, _QUICK_STEPS = 250, 50
# Rounds of one step in one measurement.
_SHORT_ROUNDS, _QUICK_SHORT_ROUNDS = 200, 40
_ACTORS: Mapping[str, Any] = {"backend": "ray", "client_actors": 2, "device": "cpu"}


def planned(dataset: Dataset, *, method: Mapping[str, Any], steps: int, runtime: Mapping[str, Any]) -> Plan:
    """Plan a run on LeNet-5 with CIFAR-10, or noise of its shape; each client takes ``steps`` in a round."""
    training = {"cohort_size": 10, "local_steps": steps, "batch_size": 10, "optimizer": {"name": "sgd", "lr": 0.01}}
    sections = {
        "scenario": {"clients": 100},
        "model": {"name": "lenet5"},
        "method": method,
        "training": training,
        "runtime": runtime,
    }
    return plan_of(sections, dataset)


def long_rounds(request: Request) -> Sequence[Figure]:
    """Time two client actors against two plain processes."""
    steps = _STEPS if request.is_full else _QUICK_STEPS
    dataset, called = data_for("cifar10", request)
    plan = planned(dataset, method={"name": "fedavg"}, steps=steps, runtime=_ACTORS)
    rounds = request.rounds or 1
    what = f"{rounds} x {steps} steps, 2 client actors"
    with plain_processes(work_of(plan, dataset), 2) as plain:
        fields = {"what": what, "against": "two plain processes", "asked": 0.96, "data": called}
        return [beside(plain, plan, request, rounds=rounds, **fields)]


def short_rounds(request: Request) -> Sequence[Figure]:
    """Time one process against two plain loops: the cost of a round beside its steps.

    The least ratio is asked against the loop that readies all images of a client, as plain programs do. The other one
    readies those ten that the step looks at, and so does fedsweep.
    """
    rounds = request.rounds or (_SHORT_ROUNDS if request.is_full else _QUICK_SHORT_ROUNDS)
    local = {"backend": "local", "device": request.device}
    dataset, called = data_for("cifar10", request)
    plan = planned(dataset, method={"name": "fedavg"}, steps=1, runtime=local)
    work = work_of(plan, dataset)
    loops = {
        "a plain loop that makes clients ready": (PlainLoop(work, readies_clients=True), 1.0),
        "a plain loop that makes batches ready": (PlainLoop(work), None),
    }
    with playing(plan) as ours:
        return [
            in_turns(
                lambda: ours.play(rounds),
                partial(plain.play, rounds),
                request.repeats,
                what=f"{rounds} rounds of one step, in one process",
                against=name,
                asked=least_ratio,
                data=called,
            )
            for name, (plain, least_ratio) in loops.items()
        ]


def rounds_in_step(request: Request) -> Sequence[Figure]:
    """Time DynamicSGD on two client actors against a plain loop that averages after every step."""
    steps = _STEPS if request.is_full else _QUICK_STEPS
    method = {"name": "dynamicsgd", "sync_rule": "paper"}
    dataset, called = data_for("cifar10", request)
    plan = planned(dataset, method=method, steps=steps, runtime=_ACTORS)
    rounds = request.rounds or 1
    plain = PlainLoop(work_of(plan, dataset)).play_in_step
    what = f"{rounds} x {steps} steps, averaged after each, 2 client actors"
    fields = {"what": what, "against": "a plain loop", "asked": 1.8, "data": called}
    return [beside(plain, plan, request, rounds=rounds, **fields)]


_LENET = "LeNet-5, 100 clients of 500, cohorts of 10, batches of 10"
W1 = SetUp(name="W1", summary=f"{_LENET}: 250 steps a round, 2 client actors", measure=long_rounds, dataset="cifar10")
W2 = SetUp(
    name="W2",
    summary=f"{_LENET}: 1 step a round, in one process",
    measure=short_rounds,
    devices=("cpu", "cuda"),
    dataset="cifar10",
)
W3 = SetUp(
    name="W3",
    summary=f"{_LENET}: DynamicSGD, 250 steps a round, 2 client actors",
    measure=rounds_in_step,
    dataset="cifar10",
)
