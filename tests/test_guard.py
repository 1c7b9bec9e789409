"""Faulty components of every kind: one line names component, file, line and round; what comes back is checked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.components.aggregation import Refinement
from fedsweep.components.base import Published
from fedsweep.components.codec import Codec
from fedsweep.components.local import LocalStep, LocalTerm, LocalWork
from fedsweep.components.probes import Probe
from fedsweep.engine.forecast import check_first_round
from fedsweep.errors import ClientJobError, ComponentError, ConfigError, FedsweepError, InvariantError
from fedsweep.guard import guarded, place_of
from fedsweep.method import FederatedMethod
from fedsweep.plugins import call_builder
from fedsweep.testing import linear_model, local_engine, run_rounds, tiny_experiment
from fedsweep.world.availability import AlwaysAvailable
from fedsweep.world.drift import Drift, RoundClasses

HERE = r"\(test_guard\.py, line \d+\)"


def boom(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("nothing\nleft")


def faulty(component: Any, **hooks: Callable[..., Any]) -> Any:
    """The component with other hooks; they are no methods, so that they need not know what they are given."""
    own = {name: staticmethod(hook) for name, hook in hooks.items()}
    return type(f"Faulty{type(component).__name__}", (type(component),), own)()


@dataclass(frozen=True, kw_only=True)
class Term(LocalTerm):
    stateful: ClassVar[bool] = True
    sends: ClassVar[bool] = True
    name: str = "mine"


@dataclass(frozen=True, kw_only=True)
class Asked(Probe):
    name: str = "asked"

    def measure(self, client: Any) -> Any:
        return {"one": torch.ones(1)}


@dataclass(frozen=True, kw_only=True)
class Plain(Codec):
    def encode(self, move: Tensor, stream: Any) -> Any:
        return {"move": move}

    def decode(self, message: Any, size: int) -> Tensor:
        return message["move"]


@dataclass(frozen=True, kw_only=True)
class Idle(Refinement):
    needs_updates: ClassVar[bool] = True

    def refine(self, state: Any, vector: Tensor, updates: Any, sync: Any) -> Any:
        return vector, state


def method_with(kind: str, hook: str, given: Callable[..., Any]) -> FederatedMethod:
    plain = fedavg()
    if kind == "term":
        return replace(plain, terms=(faulty(Term(), **{hook: given}),))
    if kind == "refinement":
        return replace(plain, refinements=(faulty(Idle(), **{hook: given}),))
    if kind == "codec":
        return replace(plain, codec=faulty(Plain(), **{hook: given}))
    if kind == "probe":
        probe = faulty(Asked(), **{hook: given})
        return replace(plain, server_update=faulty(plain.server_update, probes=lambda *_: (probe,)))
    return replace(plain, **{kind: faulty(getattr(plain, kind), **{hook: given})})


def played(method: FederatedMethod, **world: Any) -> str:
    with pytest.raises(FedsweepError) as caught:
        run_rounds(local_engine(tiny_experiment(method, **world)))
    return str(caught.value)


SERVER = {
    "selection": ("choose", "learn"),
    "submodels": ("assign", "after_aggregate"),
    "pacing": ("plan",),
    "weighting": ("weigh",),
    "server_update": ("apply", "learn", "observe", "report", "publish", "probes", "setup"),
    "refinement": ("refine",),
    "evaluation": ("predict",),
    "codec": ("encode", "decode"),  # a plan encodes noise
}
CLIENT = {
    "objective": ("loss",),
    "solver": ("step",),
    "term": ("init", "prepare", "loss", "gradient", "after_step", "finish"),
    "probe": ("measure",),
}


@pytest.mark.parametrize(("kind", "hook"), [(kind, hook) for kind, hooks in SERVER.items() for hook in hooks])
def test_what_a_component_of_the_server_raises_is_told_with_its_place(kind: str, hook: str) -> None:
    method = method_with(kind, hook, boom)
    with pytest.raises(ComponentError) as caught:
        run_rounds(local_engine(tiny_experiment(method)))
    when = "before round 1" if hook == "setup" else "in round 1"
    assert str(caught.value).startswith("boom (test_guard.py, line ")
    assert str(caught.value).endswith(f"failed {when}: ZeroDivisionError: nothing\nleft")


@pytest.mark.parametrize(("kind", "hook"), [(kind, hook) for kind, hooks in CLIENT.items() for hook in hooks])
def test_what_a_component_on_a_client_raises_is_told_with_its_place_and_the_client(kind: str, hook: str) -> None:
    with pytest.raises(ClientJobError, match=rf"client \d failed in round 1, .*: boom {HERE}: ZeroDivisionError"):
        run_rounds(local_engine(tiny_experiment(method_with(kind, hook, boom))))


def used_up(*_: Any, **__: Any) -> Any:
    return next(iter(()))


def unmet(*_: Any, **__: Any) -> Any:
    raise AssertionError  # pytest gives an assert a text


def ended(*_: Any, **__: Any) -> Any:
    raise SystemExit


class Stop(BaseException):
    """What a user's own code ends with, beside ``Exception``."""


class Mute(Exception):
    """An error that has no text."""

    def __str__(self) -> str:
        raise LookupError("not there")


def stopped(*_: Any, **__: Any) -> Any:
    raise Stop("enough")


def mute(*_: Any, **__: Any) -> Any:
    raise Mute


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("kind", "hook", "error", "at"),
    [
        ("term", "loss", ClientJobError, r"client \d failed in round 1, .*: "),
        ("probe", "measure", ClientJobError, r"client \d failed in round 1, .*: "),
        ("server_update", "apply", ComponentError, ""),
    ],
)
def test_a_class_of_ones_own_beside_exception_is_an_error_of_ones_code_and_an_interrupt_is_not(
    kind: str, hook: str, error: type[Exception], at: str
) -> None:
    with pytest.raises(error, match=rf"^{at}stopped {HERE}.*: Stop: enough$"):
        run_rounds(local_engine(tiny_experiment(method_with(kind, hook, stopped))))
    with pytest.raises(KeyboardInterrupt):
        run_rounds(local_engine(tiny_experiment(method_with(kind, hook, interrupted))))


@pytest.mark.parametrize(("kind", "hook"), [("server_update", "apply"), ("term", "loss")])
def test_an_error_whose_text_can_not_be_had_is_told_all_the_same(kind: str, hook: str) -> None:
    text = played(method_with(kind, hook, mute))
    assert "mute (test_guard.py, line " in text
    assert text.endswith("Mute: its text can't be had (LookupError in Mute.__str__)")


@pytest.mark.parametrize(("kind", "hook"), [("server_update", "apply"), ("term", "loss"), ("probe", "measure")])
@pytest.mark.parametrize(
    ("fault", "name"), [(used_up, "StopIteration"), (unmet, "AssertionError"), (ended, "SystemExit")]
)
def test_an_error_without_a_text_is_told_with_its_place_by_its_name(
    kind: str, hook: str, fault: Callable[..., Any], name: str
) -> None:
    text = played(method_with(kind, hook, fault))
    assert f"{fault.__qualname__} (test_guard.py, line " in text and text.endswith(f": {name}")


def wrong_shape(*_: Any, **__: Any) -> Any:
    return torch.ones(4), {}


def nothing(*_: Any, **__: Any) -> Any:
    return None


RETURNS = [
    ("server_update", "apply", lambda *_: torch.ones(28), "must return (vector [28], state), but returned a tensor of"),
    ("server_update", "apply", wrong_shape, "must return a vector of shape [28] and torch.float32, and its state, but"),
    ("server_update", "learn", lambda *_: None, "must return the new state (or the one that it was given)"),
    ("server_update", "observe", nothing, "must return the new state (or the one that it was given)"),
    ("server_update", "report", nothing, "must return a ComponentReport, but returned NoneType"),
    ("server_update", "publish", nothing, "must return a mapping to Published, but returned NoneType"),
    ("server_update", "publish", lambda *_: {"a": 1.0}, "but returned {'a': float 1.0}"),
    ("server_update", "publish", lambda *_: {"a": torch.ones(1)}, "must return a mapping to Published"),
    ("refinement", "refine", nothing, "must return (vector [28], state), but returned NoneType None in round 1"),
    ("submodels", "after_aggregate", wrong_shape, "must return a vector of shape [28]"),
    ("submodels", "assign", lambda *_: ({0: "all"}, {}), "must return a mapping to SubModel"),
    ("weighting", "weigh", lambda *_: torch.ones(3) / 3, "must return (weights [3], state), but returned a tensor"),
    ("weighting", "weigh", lambda *_: ([1 / 3] * 3, {}), "must return a tensor of weights"),
    ("selection", "choose", lambda *_: (0, 1, 2), "must return (a tuple of client ids, state)"),
    ("selection", "choose", lambda *_: (("0", "1"), {}), "must return a tuple of int"),
    ("selection", "choose", lambda *_: ((True, False), {}), "must return a tuple of int"),
    (
        "server_update",
        "apply",
        lambda *_: (torch.ones(28, requires_grad=True), {}),
        "must return a vector without a grad",
    ),
    ("pacing", "plan", nothing, "must return (sync points, state)"),
    ("pacing", "plan", lambda *_: ((1, 2), {}), "must return a tuple of SyncPoint"),
    ("evaluation", "predict", lambda *_: torch.ones(3), "must return logits ["),
    ("evaluation", "predict", lambda s, m, u, inputs: torch.ones(len(inputs), 2), "4 classes or more], but returned a"),
    ("evaluation", "predict", lambda s, m, u, inputs: torch.ones(len(inputs), 4).long(), "must return float logits ["),
    ("evaluation", "predict", lambda s, m, u, inputs: torch.ones(len(inputs), 4, 1), "must return float logits ["),
    ("objective", "loss", lambda step: step.logits, "must return a scalar tensor, but returned a tensor of shape [4, "),
    ("objective", "loss", nothing, "must return a scalar tensor, but returned NoneType"),
    ("term", "init", nothing, "must return a memory, a mapping"),
    ("term", "prepare", nothing, "must return (memory, params or None)"),
    ("term", "prepare", lambda *_: ({}, {"w": torch.ones(1)}), "but returned the name 'w' on client"),
    ("term", "loss", lambda step: step.targets, "must return a scalar tensor, but returned a tensor of shape"),
    ("term", "gradient", lambda step: {"nowhere": torch.ones(1)}, "but returned the name 'nowhere' on client"),
    ("term", "gradient", lambda step: {name: torch.ones(1) for name in step.params}, "must return a tensor of shape ["),
    ("term", "after_step", lambda *_: {}, "must return (memory, params or None)"),
    ("term", "finish", lambda *_: {}, "must return (memory, payload) or (memory, payload, params or None)"),
    ("term", "finish", lambda *_: ({}, {"a": 1}), "must return a mapping to Tensor"),
    ("codec", "encode", lambda move, stream: move, "must return a mapping to Tensor"),
    ("codec", "decode", lambda message, size: torch.ones(1), "must decode 28 finite values"),
    ("codec", "decode", nothing, "nothing (test_guard.py, line "),
    ("probe", "measure", lambda client: 0.5, "must return a mapping to Tensor"),
]


@pytest.mark.parametrize(("kind", "hook", "given", "expected"), RETURNS)
def test_what_a_component_should_not_return_is_told(kind: str, hook: str, given: Any, expected: str) -> None:
    with pytest.raises(InvariantError) as caught:
        run_rounds(local_engine(tiny_experiment(method_with(kind, hook, given))))
    assert expected in str(caught.value)
    if hook != "decode":
        assert "(test_guard.py, line " in str(caught.value)


def test_what_is_right_passes() -> None:
    method = replace(fedavg(), terms=(Term(),), refinements=(Idle(),), codec=Plain())
    probe = Asked()
    published = {"all": Published(value=torch.ones(1))}
    hooks = {"probes": lambda *_: (probe,), "publish": lambda *_: published}
    method = replace(method, server_update=faulty(method.server_update, **hooks))
    assert len(run_rounds(local_engine(tiny_experiment(method))).records) == 3


@dataclass(frozen=True, kw_only=True)
class Scribbler(Term):
    """Adds to its memory in place, which a resumed run would not see."""

    adds_key: bool = False

    def init(self, params: Any) -> Any:
        return {"sum": torch.zeros(1)}

    def loss(self, step: LocalStep) -> None:
        if self.adds_key:
            step.memory["more"] = torch.ones(1)  # type: ignore[index]
        else:
            step.memory["sum"].add_(1.0)


@dataclass(frozen=True, kw_only=True)
class Honest(Scribbler):
    """The same in the way that is kept."""

    def loss(self, step: LocalStep) -> None:
        return None

    def after_step(self, step: LocalStep, gradients: Any) -> Any:
        return {"sum": step.memory["sum"] + 1}, None

    def finish(self, memory: Any, work: LocalWork) -> Any:
        return {"sum": memory["sum"] * 2}, {}


@pytest.mark.parametrize("adds_key", [False, True])
def test_a_memory_that_is_changed_in_place_is_told(adds_key: bool) -> None:
    method = replace(fedavg(), terms=(Scribbler(adds_key=adds_key),))
    assert "the term 'mine' (Scribbler) changed its memory in place" in played(method)
    run_rounds(local_engine(tiny_experiment(replace(fedavg(), terms=(Honest(),)))))


class Stumbling(nn.Module):
    """A network of a user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear_model()

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and inputs.shape[0] < 4:
            raise ValueError("too few")
        return self.inner(inputs)  # type: ignore[no-any-return]


def test_an_error_in_a_network_names_its_line() -> None:
    said = played(fedavg(), build=Stumbling, batch_size=3)
    assert said.startswith("client ") and "Stumbling.forward (test_guard.py, line " in said


@dataclass(frozen=True, kw_only=True)
class Turning(Drift):
    classes: Any = None

    def class_probabilities(self, client: int, round: int) -> Any:
        return boom()

    def class_set(self, client: int, round: int, stream: Any) -> Any:
        return boom() if self.classes is None else self.classes


@dataclass(frozen=True, kw_only=True)
class Gone(AlwaysAvailable):
    present: Any = None

    def draw(self, *_: Any, **__: Any) -> Any:
        return boom() if self.present is None else self.present


def test_parts_of_the_world_are_guarded_as_methods_are() -> None:
    world = tiny_experiment(fedavg()).world
    for part in ({"availability": Gone()}, {"drift": Turning()}):
        experiment = replace(tiny_experiment(fedavg()), world=replace(world, **part))
        with pytest.raises(ComponentError, match=rf"{HERE} failed in round 1: ZeroDivisionError"):
            run_rounds(local_engine(experiment))
        with pytest.raises(ConfigError, match=rf"{HERE} failed as its first round was planned"):
            check_first_round(experiment)
    for present in ([0, 1], (0, 99)):
        experiment = replace(tiny_experiment(fedavg()), world=replace(world, availability=Gone(present=present)))
        with pytest.raises(InvariantError, match=rf"Gone.draw {HERE} must return a tuple of client ids from 0 to 5"):
            run_rounds(local_engine(experiment))
    with pytest.raises(InvariantError, match=rf"Turning.class_set {HERE} must return a tuple of classes, .* client 0"):
        RoundClasses(drift=Turning(classes=[0]), seed=0, num_clients=2, num_classes=4, round=1)[0]


def test_a_schedule_is_asked_for_every_round_before_the_run() -> None:
    experiment = tiny_experiment(fedavg())

    def schedule(round: int) -> Any:
        return {1: 0.1, 2: float("nan")}[round]

    training = replace(experiment.training, schedule=schedule)
    with pytest.raises(ConfigError, match=rf"schedule {HERE} must give .* but gave nan for round 2"):
        check_first_round(replace(experiment, training=training))
    training = replace(experiment.training, schedule=boom)
    with pytest.raises(ConfigError, match=rf"boom {HERE} failed as its first round was planned: ZeroDivisionError"):
        check_first_round(replace(experiment, training=training))


def test_rounds_without_end_are_not_all_asked_for() -> None:
    experiment = tiny_experiment(fedavg(), rounds=10**30)
    asked: list[int] = []

    def schedule(round: int) -> float:
        asked.append(round)
        return 0.1

    check_first_round(replace(experiment, training=replace(experiment.training, schedule=schedule)))
    assert asked[:100_000] == [*range(1, 100_000), 10**30]


def test_a_builder_that_fails_is_told_with_its_line() -> None:
    with pytest.raises(ConfigError, match=rf"partition 'mine' cannot be built \(boom {HERE}: ZeroDivisionError"):
        call_builder("partition", "mine", boom, gives=object)


def test_what_no_component_had_a_part_in_is_the_platforms_own() -> None:
    error = ZeroDivisionError("ours")
    assert place_of(error) is None
    with pytest.raises(ConfigError, match="as it is"), guarded(when="now"):
        raise ConfigError("as it is")


def test_sys_exit_is_the_components_own_where_a_library_has_replaced_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library: dict[str, Any] = {"__name__": "wandb.sdk.lib.exit_hooks"}
    exec("def end(code):\n    raise SystemExit(code)", library)
    monkeypatch.setattr(sys, "exit", library["end"])
    text = played(method_with("term", "loss", lambda *_, **__: sys.exit(3)))
    assert "<lambda> (test_guard.py, line " in text and text.endswith(": SystemExit: 3")


def test_the_end_that_ray_asks_for_is_no_fault_of_the_component_it_met() -> None:
    handler: dict[str, Any] = {"__name__": "ray._private.worker"}
    exec("def end():\n    raise SystemExit(1)", handler)  # as a worker's handler of SIGTERM
    method = method_with("term", "loss", lambda *_, **__: handler["end"]())
    with pytest.raises(SystemExit):
        run_rounds(local_engine(tiny_experiment(method)))
