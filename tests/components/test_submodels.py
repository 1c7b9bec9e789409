"""Sub-models through whole rounds: what travels, how it is averaged, and what stays with the client."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.planning import WholeModel
from fedsweep.engine.engine import Engine
from fedsweep.method import FederatedMethod
from fedsweep.submodel import FULL_MODEL, Covered, SubModel
from fedsweep.testing import GivenParts, local_engine, play_round, run_rounds, tiny_experiment
from fedsweep.trees import FlatLayout


class Narrow(nn.Module):
    """A linear classifier of the first features alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.layer = nn.Linear(width, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(inputs.flatten(1)[:, : self.width])
        return logits


@dataclass(frozen=True, kw_only=True)
class Columns(SubModel):
    """The first columns of the weight [4, 6], and the bias [4]."""

    width: int

    def key(self) -> str:
        return f"columns {self.width}"

    def layout(self, full: FlatLayout) -> FlatLayout:
        return replace(full, shapes=((4, self.width), (4,)), num_params=4 * self.width + 4)

    def extract(self, vector: Tensor, full: FlatLayout) -> Tensor:
        weight, bias = full.views(vector).values()
        return torch.cat([weight[:, : self.width].flatten(), bias])

    def embed(self, vector: Tensor, full: FlatLayout) -> Covered:
        whole = torch.full((full.num_values,), float("nan"), dtype=vector.dtype)
        cover = torch.zeros(full.num_values, dtype=torch.bool)
        for target, source in ((full.views(whole), self.layout(full).views(vector)), (full.views(cover), None)):
            weight, bias = target.values()
            parts = (torch.tensor(True), torch.tensor(True)) if source is None else tuple(source.values())
            weight[:, : self.width], bias[:] = parts
        return Covered(vector=whole, cover=cover)

    def build(self, model: nn.Module) -> nn.Module:
        return Narrow(self.width).to(next(model.parameters()).dtype)

    def index_bytes(self) -> int:
        return 1


@dataclass(frozen=True, kw_only=True)
class Masked(SubModel):
    """Every value at its place, but only those of one parity are trained and sent back; a module of full size."""

    parity: int

    def key(self) -> str:
        return f"parity {self.parity}"

    def layout(self, full: FlatLayout) -> FlatLayout:
        return full

    def extract(self, vector: Tensor, full: FlatLayout) -> Tensor:
        return vector * self._mask(full)

    def embed(self, vector: Tensor, full: FlatLayout) -> Covered:
        return Covered(vector=vector, cover=self._mask(full))

    def _mask(self, full: FlatLayout) -> Tensor:
        return torch.arange(full.num_values) % 2 == self.parity

    def build(self, model: nn.Module) -> nn.Module:
        return model


def method(*rounds: tuple[SubModel, ...], like: FederatedMethod | None = None) -> FederatedMethod:
    return replace(fedavg() if like is None else like, submodels=GivenParts(rounds=rounds))


def engine_of(method: FederatedMethod, **more: object) -> Engine:
    options: dict[str, object] = {"num_clients": 3, "cohort_size": 3, "sizes": (4, 8, 12), "local_steps": 3} | more
    return local_engine(tiny_experiment(method, **options))  # type: ignore[arg-type]


def narrow_model() -> nn.Module:
    return Narrow(6)


WIDTHS = tuple(Columns(width=w) for w in (2, 4, 4))


@pytest.mark.parametrize("double", [False, True])
def test_each_value_is_averaged_over_the_clients_that_hold_it(double: bool) -> None:
    """Columns 0-1: all three clients; 2-3: clients 1 and 2, of weights 2/5 and 3/5; 4-5: nobody, as they were."""
    engine = engine_of(method(WIDTHS), build=narrow_model, double=double)
    start = engine.start()
    round = play_round(engine, start)
    weights = [u.layout.views(u.vector)["layer.weight"] for u in round.updates if u.vector is not None]
    biases = [u.layout.views(u.vector)["layer.bias"] for u in round.updates if u.vector is not None]
    found, before = engine.layout.views(round.vector), engine.layout.views(start.vector)
    shares = np.array([4, 8, 12]) / 24
    atol = 1e-14 if double else 1e-7
    everybody = sum(s * w[:, :2] for s, w in zip(shares, weights, strict=True))
    torch.testing.assert_close(found["layer.weight"][:, :2], everybody, rtol=0, atol=atol)
    two = 0.4 * weights[1][:, 2:4] + 0.6 * weights[2][:, 2:4]
    torch.testing.assert_close(found["layer.weight"][:, 2:4], two, rtol=0, atol=atol)
    assert torch.equal(found["layer.weight"][:, 4:], before["layer.weight"][:, 4:])
    torch.testing.assert_close(
        found["layer.bias"], sum(s * b for s, b in zip(shares, biases, strict=True)), rtol=0, atol=atol
    )


def test_a_part_is_trained_as_a_model_of_its_own_size() -> None:
    """Client 0's part of two columns learns what a two-column model learns from the same values and batches."""
    engine = engine_of(method(WIDTHS), build=narrow_model)
    start = engine.start()
    update = play_round(engine, start).updates[0]
    model = Narrow(2)
    part = WIDTHS[0].layout(engine.layout).views(WIDTHS[0].extract(start.vector, engine.layout))
    with torch.no_grad():
        model.layer.weight.copy_(part["layer.weight"])
        model.layer.bias.copy_(part["layer.bias"])
    world = engine.experiment.world
    inputs = torch.from_numpy(world.data.images[world.indices[0]])
    targets = torch.from_numpy(world.data.labels[world.indices[0]])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        sgd.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
        sgd.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(update.vector, expected, rtol=0, atol=1e-6)


def test_messages_flops_and_masks_are_those_of_the_parts() -> None:
    engine = engine_of(method(WIDTHS), build=narrow_model, rounds=1)
    record = run_rounds(engine).records[0]
    sizes = (4 * 2 + 4, 4 * 4 + 4, 4 * 4 + 4)
    assert record.values_up == record.values_down == sum(sizes)
    assert (record.bytes_up, record.bytes_down) == (4 * sum(sizes), 4 * sum(sizes) + 3)
    assert record.fwd_macs_per_sample == (4 * 2 + 4 * 4 + 4 * 4) / 3
    assert record.flops == 6 * (8 + 16 + 16) * 3 * 4
    plan = engine.planner.plan(engine.start())
    assert (plan.values, plan.index_bytes) == (2 * sum(sizes), 3)


@pytest.mark.parametrize("like", [fedavg(), dynamicsgd()], ids=["once", "every step"])
def test_the_whole_model_as_a_part_is_the_whole_model(like: FederatedMethod) -> None:
    parts = (Columns(width=6),) * 3
    options = {"build": narrow_model, "double": True, "optimizer": OptimizerSettings(momentum=0.9, keep="persist")}
    found = run_rounds(engine_of(method(parts, like=like), **options)).vector
    expected = run_rounds(engine_of(replace(like, submodels=WholeModel()), **options)).vector
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_optimizer_state_of_what_a_client_does_not_hold_waits_for_it() -> None:
    """Two columns, then one: the second column's momentum is as it was; columns never held have none."""
    rounds = tuple((Columns(width=w), Columns(width=4), Columns(width=4)) for w in (2, 1))
    engine = engine_of(
        method(*rounds), build=narrow_model, rounds=2, optimizer=OptimizerSettings(momentum=0.9, keep="persist")
    )
    buffers = []
    state = engine.start()
    for _ in range(2):
        state = run_rounds(engine, state, rounds=1)
        buffers.append(np.array(state.memories[0]["optimizer"]["momentum_buffer"])[:24].reshape(4, 6))
    assert np.abs(buffers[0][:, :2]).min() > 0 and not buffers[0][:, 2:].any()
    assert np.array_equal(buffers[1][:, 1], buffers[0][:, 1])
    assert not np.array_equal(buffers[1][:, 0], buffers[0][:, 0])


def test_parts_that_share_the_full_module_do_not_share_gradients() -> None:
    """Three clients in one process, two of them with masks: each as if it were alone."""
    parts: tuple[SubModel, ...] = (Masked(parity=0), Masked(parity=1), FULL_MODEL)
    crowd = play_round(engine_of(method(parts)))
    for client, part in enumerate(parts):
        alone = play_round(engine_of(method((part,) * 3)))
        found, expected = crowd.updates[client].vector, alone.updates[client].vector
        assert found is not None and expected is not None
        assert torch.equal(found, expected)
        start = engine_of(fedavg()).start().vector
        assert not torch.equal(found, part.extract(start, engine_of(fedavg()).layout))
