"""Terms that work outside the steps: they look at the client as probes do, and may replace params at a job's end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.components import LocalClient, LocalTerm, LocalWork, Memory, ParamTree, Passes, Payload
from fedsweep.engine.forecast import forecast
from fedsweep.method import FederatedMethod
from fedsweep.testing import local_engine, run_rounds, tiny_device, tiny_experiment, with_devices

torch.set_num_threads(1)
LOOKED: list[dict[str, Any]] = []


def tuned(local: LocalClient) -> ParamTree:
    """One full-batch step of rate 0.5 on all the client's samples."""
    values = {name: value.detach().clone().requires_grad_() for name, value in local.params.items()}
    loss = F.cross_entropy(local.forward_with(values, local.inputs), local.targets)
    gradients = torch.autograd.grad(loss, list(values.values()))
    return {name: (v - 0.5 * g).detach() for (name, v), g in zip(values.items(), gradients, strict=True)}


@dataclass(frozen=True, kw_only=True)
class Outside(LocalTerm):
    """Takes a step on everything before or after the local steps, and notes what it was shown."""

    name: str = "outside"
    where: str

    def passes(self, batch_size: int, num_classes: int) -> Passes:
        return Passes(job=3)

    def prepare(
        self, memory: Memory, anchor: ParamTree, local: LocalClient | None = None
    ) -> tuple[Memory, ParamTree | None]:
        assert local is not None
        LOOKED.append({"samples": len(local.inputs), "client": local.client, "training": local.model.training})
        return memory, tuned(local) if self.where == "prepare" else None

    def finish(
        self, memory: Memory, work: LocalWork, local: LocalClient | None = None
    ) -> tuple[Memory, Payload, ParamTree | None]:
        assert local is not None
        LOOKED.append({"draw": float(torch.rand((), generator=local.stream.torch()))})
        return memory, {}, tuned(local) if self.where == "finish" else None


def method(where: str) -> FederatedMethod:
    return FederatedMethod(name="outside", source="", terms=(Outside(where=where),))


def moved(where: str, rate: float) -> torch.Tensor:
    experiment = tiny_experiment(method(where), rounds=1, num_clients=1, cohort_size=1, learning_rate=rate)
    return run_rounds(local_engine(experiment)).vector


def test_both_hooks_replace_params() -> None:
    # At rate 0 the local steps do nothing, so before and after are the same.
    experiment = tiny_experiment(method("none"), rounds=1, num_clients=1, cohort_size=1)
    model, data = experiment.new_model(), experiment.world.data
    F.cross_entropy(model(torch.from_numpy(data.images)), torch.from_numpy(data.labels)).backward()  # type: ignore[no-untyped-call]
    step = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
    expected = experiment.initial_vector - 0.5 * step
    for where in ("prepare", "finish"):
        assert torch.allclose(moved(where, 0.0), expected, atol=1e-6)
    assert not torch.equal(moved("prepare", 0.1), moved("finish", 0.1))


def test_a_term_sees_all_of_the_clients_samples_and_random_numbers_of_its_own() -> None:
    LOOKED.clear()
    run_rounds(local_engine(tiny_experiment(method("none"), rounds=2)))
    shown = [look for look in LOOKED if "samples" in look]
    assert {(look["samples"], look["training"]) for look in shown} == {(16, False)}
    assert len({look["draw"] for look in LOOKED if "draw" in look}) == 6  # two rounds of three clients


def test_looking_changes_nothing() -> None:
    one, other = (run_rounds(local_engine(tiny_experiment(m))).vector for m in (method("none"), fedavg()))
    assert torch.equal(one, other)


def test_what_the_work_costs_is_in_flops_forecast_and_clock() -> None:
    working, plain = (
        with_devices(tiny_experiment(m, rounds=1, local_epochs=1), [tiny_device(1e6)])
        for m in (method("none"), fedavg())
    )
    row, before = (run_rounds(local_engine(e)).records[-1] for e in (working, plain))
    assert row.flops == 2 * before.flops  # three passes over all samples, as the one epoch of steps
    assert forecast(working).flops == row.flops
    assert row.sim_time_s is not None and before.sim_time_s is not None
    assert row.sim_time_s - before.sim_time_s == pytest.approx(before.flops / 3 / 1e6)  # three clients of a size
