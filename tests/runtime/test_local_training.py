"""One client's work: steps, optimiser state, clipping, batches, and the figures that travel with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsweep.algorithms.dynamicfl import dynamicsgd
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.components.local import CrossEntropy, LocalStep, LocalTerm, LocalWork, Memory, Objective
from fedsweep.components.pacing import FixedInterval
from fedsweep.components.solver import LocalSolver
from fedsweep.method import FederatedMethod
from fedsweep.records import ClientUpdate, ClientWork
from fedsweep.runtime.engine import Engine
from fedsweep.runtime.messages import OptimizerSettings
from fedsweep.runtime.playing import Played
from fedsweep.runtime.shards import batch_order
from fedsweep.runtime.state import RunState
from fedsweep.streams import stream
from fedsweep.testing import local_engine, run_rounds, tiny_experiment
from fedsweep.trees import ParamTree


def method(**fields: object) -> FederatedMethod:
    return FederatedMethod(name="test", source="", **fields)  # type: ignore[arg-type]


def played(engine: Engine, state: RunState | None = None) -> Played:
    state = engine.start() if state is None else state
    return engine._player.play(engine.planner.plan(state), state, attempt=0, keep=lambda seam, tree: None)


def vector(update: ClientUpdate) -> Tensor:
    assert update.vector is not None
    return update.vector


# -- one step by hand ------------------------------------------------------------------------------------------------


class TwoWeights(nn.Module):
    """Two parameters, both 0: the logits of x are (w0 x, w1 x)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(inputs.flatten(1))
        return logits


def two_weights(
    *, steps: int = 1, learning_rate: float = 0.1, method: FederatedMethod | None = None, **optimizer: object
) -> list[float]:
    """The two parameters of one client with the sample x = 1 of class 0."""
    experiment = tiny_experiment(
        method or fedavg(),
        num_clients=1,
        cohort_size=1,
        local_steps=steps,
        batch_size=1,
        learning_rate=learning_rate,
        optimizer=OptimizerSettings(**optimizer),  # type: ignore[arg-type]
        build=TwoWeights,
        double=True,
        images=np.array([1.0, 1.0]).reshape(2, 1, 1, 1),
        labels=np.array([0, 1]),
        sizes=(1,),
    )
    weights: list[float] = vector(played(local_engine(experiment)).updates[0]).tolist()
    return weights


def test_one_step_by_hand() -> None:
    """w = (0, 0): softmax (1/2, 1/2), gradient (1/2 - 1, 1/2) = (-1/2, 1/2), step -0.1 x that = (0.05, -0.05)."""
    assert two_weights() == pytest.approx([0.05, -0.05], abs=1e-15)


def test_clipping_bounds_the_norm_over_all_parameters_by_hand() -> None:
    """The gradient's norm is sqrt(1/2); clipped to 0.1 it is (-0.1, 0.1) / sqrt(2)."""
    assert two_weights(learning_rate=1.0, clip_norm=0.1) == pytest.approx([0.1 / 2**0.5, -0.1 / 2**0.5], abs=1e-6)
    assert two_weights(learning_rate=1.0, clip_norm=0.8) == pytest.approx([0.5, -0.5], abs=1e-15)


def test_weight_decay_is_added_after_clipping_by_hand() -> None:
    """Step 1: (0.5, -0.5) at rate 1, unclipped. Step 2: softmax of (1/2, -1/2) is p = 1/(1 + e^-1) for class 0, the
    gradient (p - 1, 1 - p) has norm (1 - p) sqrt(2) = 0.38 and is clipped to 0.1, then 0.2 w is added.
    """
    by_norm = 0.1 / 2**0.5
    first = two_weights(steps=1, learning_rate=1.0, clip_norm=0.1, weight_decay=0.2)
    assert first == pytest.approx([by_norm, -by_norm], abs=1e-6)
    second = two_weights(steps=2, learning_rate=1.0, clip_norm=0.1, weight_decay=0.2)
    assert second == pytest.approx([by_norm * (1 + 1 - 0.2), -by_norm * (1 + 1 - 0.2)], abs=1e-5)


def test_nesterov_momentum_by_hand() -> None:
    """Step 1: the buffer is g1 and the move g1 + 0.9 g1, so w = 0.1 x 1.9 x (1/2, -1/2) = (0.095, -0.095).

    Step 2: p = 1 / (1 + e^-0.19) for class 0, g2 = p - 1; the buffer is 0.9 g1 + g2, the move g2 + 0.9 x that.
    """
    assert two_weights(momentum=0.9, nesterov=True) == pytest.approx([0.095, -0.095], abs=1e-15)
    g1, g2 = -0.5, 1 / (1 + np.exp(-0.19)) - 1
    expected = 0.095 - 0.1 * (g2 + 0.9 * (0.9 * g1 + g2))
    assert two_weights(steps=2, momentum=0.9, nesterov=True)[0] == pytest.approx(expected, abs=1e-15)


def test_adam_by_hand() -> None:
    """The first step of Adam is the rate times the gradient's sign, up to eps."""
    assert two_weights(name="adam") == pytest.approx([0.1, -0.1], abs=1e-6)


# -- a solver may look at the loss several times ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LookAhead(LocalSolver):
    """Extragradient: a trial step, then the gradient there is taken from where it began."""

    def step(self, optimizer: torch.optim.Optimizer, evaluate: Callable[[], Tensor]) -> Tensor:
        (flat,) = optimizer.param_groups[0]["params"]
        before = flat.detach().clone()
        loss = evaluate()
        optimizer.step()
        evaluate()
        with torch.no_grad():
            flat.copy_(before)
        optimizer.step()
        return loss


def test_a_solver_sees_the_loss_at_the_present_parameters_each_time() -> None:
    """The trial step leads to (0.5, -0.5); the gradient there is p - 1 with p = 1 / (1 + e^-1)."""
    p = 1 / (1 + np.exp(-1.0))
    assert two_weights(learning_rate=1.0, method=method(solver=LookAhead())) == pytest.approx([1 - p, p - 1], abs=1e-15)


# -- terms -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Push(LocalTerm):
    """Adds a constant to the gradient of every parameter, and as much again as a loss."""

    by: float
    name: str = "push"

    def gradient(self, step: LocalStep) -> ParamTree:
        return {name: torch.full_like(value, self.by) for name, value in step.params.items()}

    def loss(self, step: LocalStep) -> Tensor:
        return self.by * torch.stack([p.sum() for p in step.model.parameters()]).sum()


def test_terms_add_to_the_gradient_before_clipping_by_hand() -> None:
    """(-1/2, 1/2) + 2 x (0.3, 0.3) = (0.1, 1.1); clipped to norm 1/2."""
    push = method(terms=(Push(by=0.3),))
    assert two_weights(learning_rate=1.0, method=push) == pytest.approx([-0.1, -1.1], abs=1e-15)
    scale = 0.5 / (0.1**2 + 1.1**2) ** 0.5
    assert two_weights(learning_rate=1.0, method=push, clip_norm=0.5) == pytest.approx(
        [-0.1 * scale, -1.1 * scale], abs=1e-6
    )


@dataclass(frozen=True, kw_only=True)
class Diary(LocalTerm):
    """Remembers how often its hooks ran, and sends it."""

    name: str = "diary"
    sends: ClassVar[bool] = True
    stateful: ClassVar[bool] = True

    def init(self, params: ParamTree) -> Memory:
        return {"jobs": 0, "steps": 0, "finished": 0}

    def prepare(self, memory: Memory, anchor: ParamTree) -> tuple[Memory, ParamTree | None]:
        return memory | {"jobs": int(memory["jobs"]) + 1}, None  # type: ignore[call-overload]

    def after_step(self, step: LocalStep, gradients: ParamTree) -> tuple[Memory, ParamTree | None]:
        return step.memory | {"steps": int(step.memory["steps"]) + 1}, None  # type: ignore[call-overload]

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, dict[str, Tensor]]:
        memory = memory | {"finished": int(memory["finished"]) + 1}  # type: ignore[call-overload]
        counts = [int(memory[key]) for key in ("jobs", "steps", "finished")]  # type: ignore[call-overload]
        return memory, {"counts": torch.tensor([*counts, work.steps, work.num_samples])}


def test_a_stateful_term_keeps_its_memory_between_participations() -> None:
    engine = local_engine(tiny_experiment(method(terms=(Diary(),)), num_clients=2, cohort_size=2, local_steps=3))
    state = run_rounds(engine, rounds=2)
    third = played(engine, state)
    assert third.updates[0].extras["diary/counts"].tolist() == [3, 9, 3, 3, 48]
    assert third.ledger.values[0, "up", "diary/counts"] == 5


def test_a_terms_hooks_run_once_a_job_and_once_a_step() -> None:
    cut = method(terms=(Diary(),), pacing=FixedInterval(interval=2, sync_rule="paper"))
    round = played(local_engine(tiny_experiment(cut, num_clients=2, cohort_size=2, local_steps=6)))
    assert round.updates[0].extras["diary/counts"].tolist() == [3, 6, 3, 2, 48]


@dataclass(frozen=True, kw_only=True)
class Reset(LocalTerm):
    """Sets all parameters to a number, at a job's start or after each step."""

    value: float
    moment: str
    name: str = "reset"

    def prepare(self, memory: Memory, anchor: ParamTree) -> tuple[Memory, ParamTree | None]:
        return memory, self._params(anchor) if self.moment == "start" else None

    def after_step(self, step: LocalStep, gradients: ParamTree) -> tuple[Memory, ParamTree | None]:
        return step.memory, self._params(step.params) if self.moment == "step" else None

    def _params(self, like: ParamTree) -> ParamTree:
        return {name: torch.full_like(value, self.value) for name, value in like.items()}


def test_a_term_may_replace_the_starting_and_the_present_parameters() -> None:
    assert two_weights(method=method(terms=(Reset(value=3.0, moment="step"),))) == [3.0, 3.0]
    assert two_weights(method=method(terms=(Reset(value=3.0, moment="start"),))) == pytest.approx([3.05, 2.95])


# -- the optimiser's state between participations --------------------------------------------------------------------

OPTIMIZERS = {
    "heavy ball": OptimizerSettings(momentum=0.9),
    "nesterov": OptimizerSettings(momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": OptimizerSettings(name="adam"),
}


def torch_optimizer(params: Sequence[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    if settings.name == "adam":
        return torch.optim.Adam(params, lr=0.1, betas=settings.betas, eps=settings.eps)
    return torch.optim.SGD(
        params, lr=0.1, momentum=settings.momentum, nesterov=settings.nesterov, weight_decay=settings.weight_decay
    )


def reference(settings: OptimizerSettings, keep: str, *, rounds: int, steps: int) -> tuple[Tensor, Tensor]:
    """Two clients of 4 and 8 samples, one torch optimiser each; the model and the mean of the first state tensor."""
    experiment = unequal_pair(settings, keep, rounds=rounds, steps=steps)
    data = experiment.world.data
    models = [experiment.build_model() for _ in range(2)]
    optimizers = [torch_optimizer(list(m.parameters()), settings) for m in models]
    shares = (1 / 3, 2 / 3)
    for _ in range(rounds):
        if keep == "reset":
            optimizers = [torch_optimizer(list(m.parameters()), settings) for m in models]
        for k, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            part = experiment.world.indices[k]
            inputs, targets = torch.from_numpy(data.images[part]), torch.from_numpy(data.labels[part])
            for _ in range(steps):
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        with torch.no_grad():
            for pair in zip(*(m.parameters() for m in models), strict=True):
                mean = shares[0] * pair[0] + shares[1] * pair[1]
                for p in pair:
                    p.copy_(mean)
                states = [optimizer.state[p] for optimizer, p in zip(optimizers, pair, strict=True)]
                if keep == "average":
                    for name in states[0]:
                        middle = shares[0] * states[0][name] + shares[1] * states[1][name]
                        for s in states:
                            s[name].copy_(middle)
    first = [next(iter(optimizers[0].state[p].items()))[1] for p in models[0].parameters()]
    if settings.name == "adam":
        first = [optimizers[0].state[p]["exp_avg"] for p in models[0].parameters()]
    return _flat(models[0].parameters()), _flat(first)  # type: ignore[arg-type]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def unequal_pair(settings: OptimizerSettings, keep: str, *, rounds: int, steps: int):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    return tiny_experiment(
        fedavg(),
        num_clients=2,
        cohort_size=2,
        rounds=rounds,
        local_steps=steps,
        batch_size=8,
        sizes=(4, 8),
        double=True,
        optimizer=replace(settings, keep=keep),
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("keep", ["reset", "persist", "average"])
def test_optimizer_state_at_the_next_participation(name: str, keep: str) -> None:
    """Against torch's own optimisers, whose states are made anew, kept, or averaged by the clients' shares."""
    experiment = unequal_pair(OPTIMIZERS[name], keep, rounds=3, steps=4)
    engine = local_engine(experiment)
    state = run_rounds(engine)
    model, buffer = reference(OPTIMIZERS[name], keep, rounds=3, steps=4)
    torch.testing.assert_close(state.vector[: model.numel()], model, rtol=0, atol=1e-11)
    if keep == "average":
        torch.testing.assert_close(state.vector[28:56], buffer, rtol=0, atol=1e-11)
    else:
        assert state.vector.numel() == 28


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_ways_to_keep_the_state_differ(name: str) -> None:
    ends = [
        run_rounds(local_engine(unequal_pair(OPTIMIZERS[name], keep, rounds=3, steps=4))).vector[:28]
        for keep in ("reset", "persist", "average")
    ]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert float((ends[a] - ends[b]).abs().max()) > 1e-5


@pytest.mark.parametrize(("name", "riders"), [("heavy ball", 28), ("nesterov", 28), ("adam", 57)])
def test_averaged_state_travels_with_the_model_and_is_metered(name: str, riders: int) -> None:
    """Momentum is as large as the model; Adam moves two moments and the count of steps."""
    engine = local_engine(unequal_pair(OPTIMIZERS[name], "average", rounds=1, steps=2))
    round = played(engine)
    for direction in ("up", "down"):
        assert round.ledger.values[0, direction, "optimizer"] == riders  # type: ignore[index]
        assert round.ledger.values[0, direction, "params"] == 28  # type: ignore[index]
    record = run_rounds(engine).records[0]
    assert record.values_up == record.values_down == 2 * (28 + riders)


def test_plain_sgd_has_no_state_to_average() -> None:
    engine = local_engine(unequal_pair(OptimizerSettings(), "average", rounds=1, steps=2))
    assert {kind for _, _, kind in played(engine).ledger.values} == {"params"}


@pytest.mark.parametrize("keep", ["reset", "persist", "average"])
def test_state_lasts_through_the_sync_points_of_a_round(keep: str) -> None:
    """One client averages with itself, so cutting its round must change nothing, momentum included."""
    optimizer = OptimizerSettings(momentum=0.9, nesterov=True, keep=keep)
    options = {"num_clients": 1, "cohort_size": 1, "local_steps": 9, "optimizer": optimizer}
    whole = run_rounds(local_engine(tiny_experiment(fedavg(), **options))).vector  # type: ignore[arg-type]
    cut = run_rounds(local_engine(tiny_experiment(dynamicsgd(), **options))).vector  # type: ignore[arg-type]
    assert torch.equal(whole, cut)


# -- effective steps -------------------------------------------------------------------------------------------------


def unit_move(settings: OptimizerSettings, steps: int) -> float:
    """How far torch's SGD goes at rate 1 on a gradient that is always 1."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=settings.momentum, nesterov=settings.nesterov)
    for _ in range(steps):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return -float(parameter.detach())


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
@pytest.mark.parametrize("name", ["plain", "heavy ball", "nesterov"])
def test_effective_steps_are_the_move_under_unit_gradients(name: str, steps: int) -> None:
    settings = {"plain": OptimizerSettings(), **OPTIMIZERS}[name]
    engine = local_engine(tiny_experiment(fedavg(), local_steps=steps, optimizer=settings))
    update = played(engine).updates[0]
    assert update.steps == steps
    assert update.effective_steps == pytest.approx(unit_move(settings, steps), rel=1e-12)


@pytest.mark.parametrize(
    ("nesterov", "steps", "expected"),
    [(False, 1, 1.0), (False, 3, 5.61), (False, 250, 2410.0), (True, 1, 1.9), (True, 3, 8.049), (True, 250, 2419.0)],
)
def test_effective_steps_have_the_specifications_values(nesterov: bool, steps: int, expected: float) -> None:
    optimizer = OptimizerSettings(momentum=0.9, nesterov=nesterov)
    engine = local_engine(tiny_experiment(fedavg(), cohort_size=1, local_steps=steps, optimizer=optimizer))
    assert played(engine).updates[0].effective_steps == pytest.approx(expected, abs=0.5e-3 if steps < 250 else 0.5)


def test_adam_has_no_effective_steps() -> None:
    engine = local_engine(tiny_experiment(fedavg(), optimizer=OptimizerSettings(name="adam")))
    assert np.isnan(played(engine).updates[0].effective_steps)


# -- batches ---------------------------------------------------------------------------------------------------------

works = st.builds(
    ClientWork,
    steps=st.integers(1, 12),
    batch_size=st.integers(1, 9),
    whole_batches=st.booleans(),
    num_samples=st.integers(1, 20),
)


@settings(max_examples=60, deadline=None)
@given(work=works, round=st.integers(1, 50))
def test_batches_go_through_permutations_of_the_whole_shard(work: ClientWork, round: int) -> None:
    batches = batch_order(work, stream(0, "batches", round, 3))
    assert len(batches) == work.steps
    seen = np.concatenate(batches)
    n = work.num_samples
    for start in range(0, len(seen), n):
        one_pass = seen[start : start + n]
        assert len(set(one_pass.tolist())) == len(one_pass)
        assert set(one_pass.tolist()) <= set(range(n))
    if work.whole_batches:
        assert {len(batch) for batch in batches} == {work.batch_size}
    else:
        per_pass = -(-n // work.batch_size)
        sizes = [min(work.batch_size, n - (k % per_pass) * work.batch_size) for k in range(work.steps)]
        assert [len(batch) for batch in batches] == sizes


@settings(max_examples=30, deadline=None)
@given(work=works, more=st.integers(1, 10))
def test_more_steps_only_append_batches(work: ClientWork, more: int) -> None:
    from dataclasses import replace

    key = stream(0, "batches", 1, 0)
    short, long = batch_order(work, key), batch_order(replace(work, steps=work.steps + more), key)
    assert all(np.array_equal(a, b) for a, b in zip(short, long, strict=False))


def test_both_kinds_of_batches_begin_with_the_same_permutation() -> None:
    key = stream(0, "batches", 1, 0)
    whole, cut = (
        batch_order(ClientWork(steps=3, batch_size=4, whole_batches=w, num_samples=12), key) for w in (True, False)
    )
    assert all(np.array_equal(a, b) for a, b in zip(whole, cut, strict=True))


def test_rounds_and_clients_have_orders_of_their_own() -> None:
    work = ClientWork(steps=1, batch_size=16, whole_batches=True, num_samples=16)
    orders = {tuple(batch_order(work, stream(0, "batches", r, k))[0].tolist()) for r in (1, 2) for k in (0, 1)}
    assert len(orders) == 4


SEEN: list[tuple[object, ...]] = []


@dataclass(frozen=True, kw_only=True)
class Watched(Objective):
    """Cross-entropy that notes which client sees what at which step."""

    def loss(self, step: LocalStep) -> Tensor:
        _, _, round, client, position = step.stream.key
        SEEN.append(
            (round, client, position, step.position, step.inputs.numpy().tobytes(), tuple(step.targets.tolist()))
        )
        return CrossEntropy().loss(step)


def watched(term_source: FederatedMethod, pacing: FederatedMethod) -> list[tuple[object, ...]]:
    SEEN.clear()
    mine = method(objective=Watched(), terms=term_source.terms, pacing=pacing.pacing)
    run_rounds(local_engine(tiny_experiment(mine, rounds=2, local_steps=6)))
    return sorted(SEEN)


def test_batches_are_the_same_for_every_cut_of_the_round_and_every_method() -> None:
    plain = watched(fedavg(), fedavg())
    assert len(plain) == 2 * 3 * 6
    assert all(position == by_hand for _, _, position, by_hand, _, _ in plain)
    assert plain == watched(fedavg(), dynamicsgd())
    assert plain == watched(fedprox(mu=0.5), fedavg())
    assert plain == watched(fedprox(mu=0.5), dynamicsgd(sync_rule="paper"))


# -- randomness inside the model -------------------------------------------------------------------------------------


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))


class FunctionalDropout(nn.Module):
    """A user's network that calls dropout as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(F.dropout(inputs.flatten(1), 0.5, training=self.training))
        return logits


@pytest.mark.parametrize("build", [with_dropout, FunctionalDropout])
def test_dropout_follows_from_seed_round_client_and_step(build: Callable[[], nn.Module]) -> None:
    """Whatever the process has drawn before, and however the round is cut."""

    def run(pacing: FederatedMethod, global_seed: int) -> Tensor:
        torch.manual_seed(global_seed)
        options = {"num_clients": 1, "cohort_size": 1, "local_steps": 6, "build": build}
        return run_rounds(local_engine(tiny_experiment(pacing, **options))).vector  # type: ignore[arg-type]

    with torch.random.fork_rng(devices=[]):
        assert torch.equal(run(fedavg(), 1), run(fedavg(), 2))
        assert torch.equal(run(fedavg(), 1), run(dynamicsgd(), 3))


def test_dropout_differs_between_steps_and_clients() -> None:
    class Masks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, inputs: Tensor) -> Tensor:
            MASKS.append(tuple(F.dropout(torch.ones(32), training=self.training).tolist()))
            return (inputs.flatten(1) * self.weight)[:, :4]

    MASKS: list[tuple[float, ...]] = []
    engine = local_engine(tiny_experiment(fedavg(), build=Masks, cohort_size=2, local_steps=3))
    state = engine.start()
    MASKS.clear()
    played(engine, state)
    assert len(MASKS) == len(set(MASKS)) == 6
