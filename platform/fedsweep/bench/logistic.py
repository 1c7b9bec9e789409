"""L1: logistic regression on MNIST, the comparison that FLUTE prints.

Source: Garcia et al. 2022, FLUTE, its comparison with FedML and Flower: 1000 clients, 10 a round, 100 rounds; rate
0.03, batches of ten, one pass. Reading: clients have 60 images each; FLUTE's are a split by power law.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedsweep.bench.data import data_for
from fedsweep.bench.plain import PlainLoop, work_of
from fedsweep.bench.rounds import beside, plan_of, whole_command
from fedsweep.bench.setup import Figure, Request, SetUp

_ROUNDS = 100
_GIVEN: Mapping[str, Any] = {
    "scenario": {"clients": 1000},
    "model": {"name": "fedsweep.bench.networks:Logistic"},
    "method": {"name": "fedavg"},
    "training": {"cohort_size": 10, "local_steps": 6, "batch_size": 10, "optimizer": {"name": "sgd", "lr": 0.03}},
    "runtime": {"backend": "local", "device": "cpu"},
}


def logistic(request: Request) -> Sequence[Figure]:
    """Time a hundred rounds in one process against a plain loop, and the whole command from its start to its end."""
    dataset, called = data_for("mnist", request)
    rounds = request.rounds or _ROUNDS
    plan = plan_of(_GIVEN, dataset)
    plain = PlainLoop(work_of(plan, dataset)).play
    fields = {"what": f"{rounds} rounds, in one process", "against": "a plain loop", "data": called}
    rounds_alone = beside(plain, plan, request, rounds=rounds, **fields)
    if not request.is_full:
        return [rounds_alone]
    whole = tuple(_command(request, rounds, named=called == "mnist") for _ in range(request.repeats))
    return [rounds_alone, Figure(what=f"the whole command, {rounds} rounds", ours_s=whole, data=called)]


def _command(request: Request, rounds: int, *, named: bool) -> float:
    """Time ``fedsweep run`` in a process of its own, with tables, checkpoints and tests as by default; in seconds."""
    scenario = {"partition": {"kind": "iid"}, "root": request.root} | _GIVEN["scenario"]
    scenario["dataset"] = "mnist" if named else "fedsweep.bench.data:noise_like_mnist"
    training = {**_GIVEN["training"], "rounds": rounds}
    tree = {"name": "L1", **_GIVEN, "scenario": scenario, "training": training, "tracking": {"uri": "none"}}
    return whole_command(tree)[0]


L1 = SetUp(
    name="L1",
    summary="FLUTE's comparison: logistic regression on MNIST, 1000 clients of 60, 10 a round, 100 rounds",
    measure=logistic,
    dataset="mnist",
)
