"""FedAS: its limits, an alignment and a trace by hand, what travels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import net, part_of, resumed

from fedsweep.algorithms.fedas import AlignedBody, FisherTrace, fedas
from fedsweep.components import LocalClient
from fedsweep.errors import ConfigError
from fedsweep.method import FederatedMethod, merge
from fedsweep.models.adapters import Part
from fedsweep.models.functional import features_with, head_names
from fedsweep.streams import Stream
from fedsweep.submodel import FULL_MODEL
from fedsweep.testing import GivenParts, build_model, local_engine, play_round, run_rounds, tiny_experiment

torch.set_num_threads(1)


def network() -> torch.nn.Module:
    return build_model("mlp", input_shape=(1, 1, 6), num_classes=4, stream=Stream(("m",)), hidden_width=5)


def experiment(method: Any, **options: Any) -> Any:
    return tiny_experiment(method, build=network, **options)


PER = partial(fedas, align_epochs=0, weights="samples")


def test_without_alignment_by_samples_it_is_fedper() -> None:
    """FedPer by hand: each client trains the server's body under its own head, and the bodies' mean is the next one."""
    engine = local_engine(experiment(PER(), cohort_size=6, rounds=2))
    first = run_rounds(engine, rounds=1)
    second = play_round(engine, first)
    heads = head_names(engine.tester.model)
    total = sum(update.num_samples for update in second.updates)
    for name, value in engine.layout.views(second.vector).items():
        if name in heads:
            assert torch.equal(value, engine.layout.views(engine.experiment.initial_vector)[name])
        else:
            mean = sum(update.params[name] * update.num_samples for update in second.updates) / total
            assert torch.allclose(value, mean, atol=1e-6)  # type: ignore[arg-type]
    # A client's second round begins under its own head: a rate of 0 leaves it there.
    frozen = local_engine(experiment(PER(), cohort_size=6, rounds=2, learning_rate=0.0))
    after = run_rounds(frozen, first)
    for client in range(6):
        before = first.memories[client]["terms"]["fedas"]["values"]
        kept = after.memories[client]["terms"]["fedas"]["values"]
        for name in before:
            assert torch.equal(kept[name], before[name] if name in heads else engine.layout.views(first.vector)[name])


@pytest.mark.parametrize("goes_on", [False, True], ids=["unbroken", "resumed"])
def test_of_its_head_a_client_goes_on_with_the_received_part_where_it_never_held_one(
    goes_on: bool, tmp_path: Path
) -> None:
    """Half the units in round 1, all in round 2 at a rate of 0: the server's head stays, the others' columns too."""
    half = part_of({group.name: range(4) for group in net().unit_groups()})
    parts = FederatedMethod(name="parts", source="", submodels=GivenParts(rounds=((half,), (FULL_MODEL,))))
    options: dict[str, Any] = {"build": net, "num_clients": 2, "cohort_size": 2, "rounds": 2, "double": True}
    made = tiny_experiment(merge(PER(head="averaged"), parts), **options)
    made = replace(made, training=replace(made.training, schedule=lambda number: 0.1 if number == 1 else 0.0))
    engine = local_engine(made)
    first = run_rounds(engine, rounds=1)
    second = resumed(made, tmp_path, rounds=1) if goes_on else run_rounds(engine, first)
    before, after = (made.layout.views(state.vector)["classifier.weight"] for state in (first, second))
    assert torch.equal(before[:, 4:], made.layout.views(made.initial_vector)["classifier.weight"][:, 4:])
    torch.testing.assert_close(after, before, rtol=0, atol=1e-15)


def view(inputs: torch.Tensor, targets: torch.Tensor) -> LocalClient:
    model = network().eval()
    params = dict(model.named_parameters())
    return LocalClient(
        client=0,
        round=1,
        inputs=inputs,
        targets=targets,
        num_classes=4,
        anchor=params,
        params=params,
        model=model,
        forward_with=lambda values, x: torch.func.functional_call(model, values, (x,)),
        stream=Stream(("s",)),
    )


INPUTS = torch.randn(6, 1, 1, 6, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([0, 0, 2, 2, 2, 3])


def test_an_alignment_step_by_hand() -> None:
    local = view(INPUTS, TARGETS)
    body = {name: value.detach() + 0.1 for name, value in local.params.items()}
    own = {name: value.detach() for name, value in local.params.items()}
    term = AlignedBody(epochs=1, learning_rate=0.5, batch_size=6, keeps_head=True)
    _, start = term.prepare({"values": own}, body, local)
    assert start is not None
    heads = head_names(local.model)
    leaves = {n: v.clone().requires_grad_() for n, v in body.items() if n not in heads}
    with torch.no_grad():
        prototypes = features_with(local.model, own, INPUTS)
    found = features_with(local.model, {**body, **leaves}, INPUTS)
    loss = sum(((found[TARGETS == c] - prototypes[TARGETS == c].mean(0)) ** 2).mean() for c in (0, 2, 3))
    gradients = torch.autograd.grad(loss, list(leaves.values()))  # type: ignore[arg-type]
    for (name, value), gradient in zip(leaves.items(), gradients, strict=True):
        assert torch.allclose(start[name], value - 0.5 * gradient, atol=1e-6)
    assert all(start[name] is own[name] for name in heads)
    assert all(torch.equal(body[n], local.params[n] + 0.1) for n in body)  # what was received stays as it was


def test_fisher_traces_by_hand() -> None:
    local = view(INPUTS, TARGETS)
    params = list(local.params.values())

    def norm(part: slice) -> float:
        loss = F.cross_entropy(local.model(INPUTS[part]), TARGETS[part])
        return sum(float(g.square().sum()) for g in torch.autograd.grad(loss, params))

    batch = FisherTrace(of="batch", batch_size=4).measure(local)["trace"]
    assert float(batch) == pytest.approx(norm(slice(0, 4)) + norm(slice(4, 6)), rel=1e-5)
    sample = FisherTrace(of="sample", batch_size=4).measure(local)["trace"]
    assert float(sample) == pytest.approx(sum(norm(slice(k, k + 1)) for k in range(6)), rel=1e-5)


def test_the_body_and_one_value_travel() -> None:
    engine = local_engine(experiment(fedas()))
    row = run_rounds(engine, rounds=1).records[-1]
    sizes = {n: v.numel() for n, v in engine.layout.views(engine.experiment.initial_vector).items()}
    body = sum(size for name, size in sizes.items() if name not in head_names(engine.tester.model))
    assert (row.values_down, row.values_up) == (3 * body, 3 * (body + 1))
    assert sum(row.aggregation_weights) == pytest.approx(1)
    assert row.extra["personal_accuracy"] > 0


def test_of_a_frozen_body_nothing_travels_but_the_value() -> None:
    """A linear probe; it failed before round 1."""

    def probe() -> torch.nn.Module:
        model = network()
        Part(train=("classifier",)).attach(model)
        return model

    rows = run_rounds(local_engine(tiny_experiment(fedas(), build=probe, rounds=3))).records
    assert [(row.values_down, row.values_up) for row in rows] == [(0, 3)] * 3


def test_a_network_without_a_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="fedas keeps with the clients what a model's head reads"):
        local_engine(tiny_experiment(fedas())).experiment.initial_states  # noqa: B018
