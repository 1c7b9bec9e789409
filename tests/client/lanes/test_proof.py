"""A faster way of stepping clients proves itself on a first tile, and a fault in it is never the end of a run.

Recorded steps need a GPU, so a stand-in records here: it calls the step again, into the same places.
"""

from __future__ import annotations

import functools
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedsweep.algorithms.dynamicfl.two_speed import dynamicsgd
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.catalog import build_method
from fedsweep.client.lanes import gpu_memory, recording, tile
from fedsweep.client.lanes.gpu_memory import lanes_that_fit
from fedsweep.client.lanes.lane import Lane
from fedsweep.client.lanes.optimizer import LaneOptimizer
from fedsweep.client.lanes.tile import Tile
from fedsweep.client.local_round import LocalRound
from fedsweep.client.messages import Handle, LaneSettings, Segment, Stepping
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.config.load import load_config
from fedsweep.driver.run import plan_run, run_plan
from fedsweep.engine.engine import Engine
from fedsweep.engine.state import RunState
from fedsweep.errors import WorkerLost
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.runs.checkpoints.record_codec import pack, unpack
from fedsweep.runs.run_folder import RunFolder
from fedsweep.testing import local_engine, run_rounds, tiny_data, tiny_experiment

MOMENTUM = OptimizerSettings(momentum=0.9, keep="persist")


def played_again(step: recording.Step) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    outputs = step()

    def replay() -> None:
        for place, value in zip(outputs, step(), strict=True):
            place.copy_(value)

    return replay, outputs


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "captured", played_again)


def experiment(method: Any = None, **more: Any) -> Experiment:
    images, labels = tiny_data(num_samples=40, seed=9)
    settings = {"cohort_size": 5, "num_clients": 6, "local_epochs": 2, "rounds": 3, "optimizer": MOMENTUM}
    return tiny_experiment(method or fedprox(mu=0.1), images=images, labels=labels, **(settings | more))


@functools.cache
def of_one_by_one() -> RunState:
    """The run of :func:`experiment`, whose clients step one by one."""
    return run_rounds(local_engine(experiment()))


def proving(work: Experiment, *, width: int = 4, **more: Any) -> Experiment:
    return replace(work, lanes=LaneSettings(width=width, proves=True, records=True, **more))


def played(work: Experiment) -> tuple[RunState, list[str]]:
    engine = local_engine(work)
    return run_rounds(engine), engine.notes


def off(found: RunState, expected: RunState) -> float:
    return float((found.vector - expected.vector).norm() / expected.vector.norm())


def chosen(state: RunState) -> Stepping:
    assert state.stepping is not None
    return state.stepping


# -- all is well -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("records")
@pytest.mark.parametrize("method", [fedprox(mu=0.1), dynamicsgd(), build_method({"name": "scaffold"})])
def test_a_device_that_does_all_gets_recorded_steps_with_the_bits_of_lanes(method: Any) -> None:
    work = experiment(method)
    state, notes = played(proving(work))
    assert chosen(state).kind == "graph" and chosen(state).width == 4 and notes == []
    assert 0.0 <= chosen(state).off < 1e-5  # type: ignore[operator]
    lanes = run_rounds(local_engine(replace(work, lanes=LaneSettings(width=4))))
    assert torch.equal(state.vector, lanes.vector)


def test_without_recording_lanes_are_left_and_one_sentence_says_so() -> None:
    state, notes = played(proving(experiment()))
    assert chosen(state).kind == "lanes"
    assert notes == ["lanes: a step can't be recorded (only CUDA GPUs record): its kernels are launched one by one"]


@pytest.mark.usefixtures("records")
def test_a_run_that_goes_on_makes_the_same_choice_without_trying_again(monkeypatch: pytest.MonkeyPatch) -> None:
    work = proving(experiment())
    half = run_rounds(local_engine(work), rounds=1)
    kept = unpack(Stepping, pack(Stepping, chosen(half)), path="stepping")
    assert kept == chosen(half)
    whole = run_rounds(local_engine(work))
    monkeypatch.setattr(LocalFleet, "prove", lambda *_: pytest.fail("it was tried again"))
    assert torch.equal(run_rounds(local_engine(work), replace(half, stepping=kept)).vector, whole.vector)


def test_what_can_not_go_together_is_the_loop_to_its_bits() -> None:
    work = experiment(build_method({"name": "fedmix"}))
    state, notes = played(proving(work))
    assert chosen(state).kind == "loop" and len(notes) == 1 and "random numbers" in notes[0]
    assert torch.equal(state.vector, run_rounds(local_engine(work)).vector)


# -- faults: the run comes to its end, close to the loop's model, and says what it was ---------------------------------


def failing(function: Callable[..., Any], at: int, error: Callable[[], Exception]) -> Callable[..., Any]:
    """Return the function, which raises at its n-th call."""
    calls = 0

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error()
        return function(*args, **kwargs)

    return called


PLACES: dict[str, tuple[object, str]] = {
    "a tile is made": (Tile, "__init__"),
    "clients are laid in": (Tile, "_load"),
    "batches are laid out": (Tile, "_next_batch"),
    "a step": (Tile, "_taken"),
    "a loss": (Tile, "_losses"),
    "the optimiser moves": (LaneOptimizer, "step"),
    "values are taken or given back": (tile, "_copy"),
    "a state is taken or given back": (LaneOptimizer, "pairs"),
    "recording": (recording, "captured"),
    "a replay": (recording.Recording, "replayed"),
    "the memory is probed": (gpu_memory, "device_memory"),
}
ERRORS: dict[str, Callable[[], Exception]] = {
    "no memory": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "a broken kernel": lambda: RuntimeError("CUDA error: an illegal memory access was encountered"),
    "a bug": lambda: AssertionError(),
}


def is_shown(place: str, error: str) -> bool:
    """One kind of error at every place, and all kinds at two; the others are exhaustive."""
    return error == "a bug" or place in ("a tile is made", "a step")


@pytest.mark.usefixtures("records")
@pytest.mark.parametrize(
    ("place", "error"),
    [
        pytest.param(place, error, marks=() if is_shown(place, error) else pytest.mark.exhaustive)
        for place in PLACES
        for error in ERRORS
    ],
)
def test_an_exception_at_any_place_is_no_end_of_a_run(place: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work, expected = experiment(), of_one_by_one()
    owner, name = PLACES[place]
    draw = random.Random(f"{place} {error}")
    monkeypatch.setattr(Tile, "peak_memory", lambda tile, lane: 1000 * tile._width)
    monkeypatch.setattr(gpu_memory, "device_memory", lambda: 1e6)
    original = getattr(owner, name)
    for at in sorted({1, draw.randint(2, 6), draw.randint(7, 40)}):
        monkeypatch.setattr(owner, name, failing(original, at, ERRORS[error]))
        state, notes = played(proving(work, fits_memory=True))
        assert off(state, expected) < 1e-5, (at, notes)
        # The later ones are not reached where a place is passed once in a run.
        if at == 1:
            assert len(notes) == 1 and notes[0].startswith("lanes: ")


@pytest.mark.usefixtures("records")
def test_lanes_that_give_other_numbers_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    work = experiment()
    step = LaneOptimizer.step
    monkeypatch.setattr(LaneOptimizer, "step", lambda self: (step(self), self._params.mul_(1.001))[0])
    state, notes = played(proving(work))
    assert torch.equal(state.vector, run_rounds(local_engine(work)).vector)
    assert chosen(state).kind == "loop" and chosen(state).off > 1e-4  # type: ignore[operator]
    assert len(notes) == 1 and "of the move, and 1e-04 is allowed" in notes[0]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_lanes_without_a_finite_result_are_not_used(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    work = experiment()
    monkeypatch.setattr(LaneOptimizer, "step", lambda self: self._params.fill_(wrong))
    state, notes = played(proving(work))
    assert chosen(state) == Stepping(kind="loop", notes=tuple(notes))
    assert torch.equal(state.vector, run_rounds(local_engine(work)).vector)


@pytest.mark.parametrize("first", [1, 2, 9, 30])
def test_a_recording_that_gives_other_numbers_is_not_used_whenever_it_begins_to(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each recording is played once beside its step; what is recorded later, for another shape, likewise."""
    made = 0

    def captured(step: recording.Step) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        nonlocal made
        made += 1
        replay, outputs = played_again(step)
        return (replay if made < first else lambda: outputs[0].add_(1e-6)), outputs  # type: ignore[return-value]

    monkeypatch.setattr(recording, "captured", captured)
    work = experiment(sizes=(20, 17, 9, 13, 30, 7))
    state, notes = played(proving(work))
    lanes = run_rounds(local_engine(replace(work, lanes=LaneSettings(width=4))))
    assert torch.equal(state.vector, lanes.vector)
    if made >= first:
        assert notes == [
            "lanes: a step can't be recorded (it gives other values than the step): its kernels are launched one by one"
        ]


class Dying(LocalFleet):
    """Its worker dies of what is tried, and is replaced."""

    repaired = 0

    def prove(self, segment: Segment, anchor: Tensor, memories: Any) -> Stepping:
        raise WorkerLost("client actor 0 died (ActorDiedError)")

    def repair(self) -> None:
        self.repaired += 1


def test_a_worker_that_dies_of_it_is_replaced_and_the_run_is_the_loops() -> None:
    work = experiment()
    fleet = Dying(proving(work))
    engine = Engine(proving(work), fleet)
    state = run_rounds(engine)
    assert fleet.repaired == 1 and chosen(state).kind == "loop"
    assert engine.notes == [
        "lanes: the process that tried them was lost (client actor 0 died (ActorDiedError)): clients are stepped one by"
        " one"
    ]
    assert torch.equal(state.vector, run_rounds(local_engine(work)).vector)


# -- from outside: a whole run, and what its result says ---------------------------------------------------------------


def whole_run(folder: Path, lanes: LaneSettings | None) -> dict[str, Any]:
    tree = {
        "name": "whole",
        "scenario": {"clients": 6},
        "training": {"rounds": 2, "cohort_size": 5, "local_steps": 4},
        "tracking": {"uri": "none"},
    }
    plan = plan_run(load_config(tree))
    run_plan(replace(plan, experiment=replace(plan.experiment, lanes=lanes)), folder)
    return RunFolder(folder).read_result()


@pytest.fixture(scope="module")
def of_the_loop(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return whole_run(tmp_path_factory.mktemp("loop") / "run", None)


def a_moved_optimizer(by: float, lanes: slice = slice(None)) -> Callable[[pytest.MonkeyPatch], None]:
    step = LaneOptimizer.step
    moved = lambda self: (step(self), self._params[lanes].mul_(by))[0]  # noqa: E731
    return lambda patch: patch.setattr(LaneOptimizer, "step", moved)


def a_changed_replay(patch: pytest.MonkeyPatch) -> None:
    def captured(step: recording.Step) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
        replay, outputs = played_again(step)
        return lambda: (replay(), outputs[0].add_(1e-6))[0], outputs  # type: ignore[func-returns-value]

    patch.setattr(recording, "captured", captured)


def an_error(place: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Raised at the first call, and at one that is drawn where the place is passed so often."""
    owner, name = PLACES[place]
    ats = (1, random.Random(place).randint(2, 20))

    def put(patch: pytest.MonkeyPatch) -> None:
        raised = getattr(owner, name)
        for at in ats:
            raised = failing(raised, at, ERRORS["a broken kernel"])
        patch.setattr(owner, name, raised)

    return put


# Where the fault is put -> how clients are stepped in the end, and what the result says of it.
IN_A_RUN: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "error: a tile is made": (an_error("a tile is made"), "graph", "can't be probed (CUDA error"),  # for probing, first
    **{f"error: {place}": (an_error(place), "loop", "illegal memory access") for place in list(PLACES)[1:8]},
    "error: recording": (an_error("recording"), "lanes", "a step can't be recorded (CUDA error: an illegal memory"),
    "error: a replay": (an_error("a replay"), "lanes", "a step can't be recorded (CUDA error: an illegal memory"),
    "error: probing": (an_error("the memory is probed"), "graph", "can't be probed"),
    "numbers of lanes": (a_moved_optimizer(1.001), "loop", "of the move, and 1e-04 is allowed"),
    "no numbers of lanes": (a_moved_optimizer(float("nan")), "loop", "is off by nan"),
    "no numbers of the last lane": (a_moved_optimizer(float("nan"), lanes=slice(-1, None)), "loop", "is off by nan"),
    "numbers of a replay": (a_changed_replay, "lanes", "it gives other values than the step"),
    "figures of the memory": (
        lambda patch: patch.setattr(gpu_memory, "device_memory", lambda: -5.0),
        "graph",
        "be probed",
    ),
}


@pytest.mark.usefixtures("records")
@pytest.mark.parametrize("fault", IN_A_RUN)
def test_a_whole_run_with_a_fault_comes_to_its_end_and_its_result_names_the_fault(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_the_loop: dict[str, Any]
) -> None:
    monkeypatch.setattr(Tile, "peak_memory", lambda tile, lane: 1000 * tile._width)
    monkeypatch.setattr(gpu_memory, "device_memory", lambda: 1e6)
    put, kind, words = IN_A_RUN[fault]
    put(monkeypatch)
    result = whole_run(tmp_path / "run", LaneSettings(width=4, proves=True, records=True, fits_memory=True))
    assert (result["status"], result["rounds"]) == ("finished", 2)
    told = result["executor"]
    assert ("graph" if told["recorded"] else told["name"]) == kind
    assert any(words in note for note in told["notes"]), told
    if kind == "loop":
        assert result["model_sha256"] == of_the_loop["model_sha256"]
    assert result["test_accuracy"] == pytest.approx(of_the_loop["test_accuracy"], abs=0.01)


# -- memory ------------------------------------------------------------------------------------------------------------


class Card:
    """A stand-in for a GPU: lanes take so much each, and beyond its memory there is none."""

    def __init__(self, total: float, *, each: float = 10.0, held: float = 10.0) -> None:
        self.total, self.each, self.held = total, each, held
        self.widths: list[int] = []

    def use(self, monkeypatch: pytest.MonkeyPatch) -> Card:
        taken = Tile._taken

        def step(tile: Tile, *, idle: bool) -> tuple[Tensor, Tensor]:
            self.widths.append(tile._width)
            if self.held + self.each * tile._width > self.total:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return taken(tile, idle=idle)

        monkeypatch.setattr(Tile, "_taken", step)
        monkeypatch.setattr(Tile, "peak_memory", lambda tile, lane: self.held + self.each * tile._width)
        monkeypatch.setattr(gpu_memory, "device_memory", lambda: self.total)
        return self


@pytest.mark.usefixtures("records")
@pytest.mark.parametrize(("total", "width"), [(1000.0, 10), (120.0, 5), (100.0, 5), (91.0, 5)])
def test_as_many_lanes_are_stepped_at_once_as_the_memory_has_room_for(
    total: float, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(total).use(monkeypatch)
    work = experiment(num_clients=12, cohort_size=10, rounds=1)
    state, notes = played(proving(work, width=10, fits_memory=True))
    assert chosen(state).width == width and notes == [] and set(card.widths) == {width}
    assert width == lanes_that_fit(30, 90, total=total, wanted=10)


@pytest.mark.usefixtures("records")
@pytest.mark.parametrize(("total", "width"), [(75.0, 6), (41.0, 3), (21.0, 1), (15.0, 1)])
def test_lanes_that_were_asked_for_and_do_not_fit_are_halved(
    total: float, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """12, 6, 3, 2, 1; where not even one fits, it is the loop."""
    Card(total).use(monkeypatch)
    work = experiment(num_clients=12, cohort_size=12, rounds=1)
    state, notes = played(proving(work, width=12))
    assert chosen(state).width == width
    assert chosen(state).kind == ("loop" if total < 20 else "graph")
    assert notes[0] == "lanes: 12 do not fit into the device's memory: 6 at once"
    assert off(state, run_rounds(local_engine(work))) < 1e-5


@pytest.mark.usefixtures("records")
def test_clients_whose_tile_does_not_fit_are_let_go_before_they_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(75.0).use(monkeypatch)
    failed: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []
    run, begin = Tile.run, LocalRound.begin

    def noting(tile: Tile, lanes: Sequence[Lane]) -> Any:
        try:
            return run(tile, lanes)
        except torch.OutOfMemoryError:
            failed.extend(weakref.ref(lane.vector) for lane in lanes)
            raise

    def beginning(local: LocalRound, *args: Any, **more: Any) -> None:
        alive.extend(vector() is not None for vector in failed)
        begin(local, *args, **more)

    monkeypatch.setattr(Tile, "run", noting)
    monkeypatch.setattr(LocalRound, "begin", beginning)
    state, _ = played(proving(experiment(num_clients=12, cohort_size=12, rounds=1), width=12))
    assert chosen(state).width == 6 and alive and not any(alive)


@pytest.mark.usefixtures("records")
@pytest.mark.parametrize("figures", [(0, 0), (90, 30), (-5, 10), (30, 1e9), (float("nan"), 1)])
def test_impossible_figures_of_the_memory_are_not_believed(
    figures: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tile, "peak_memory", lambda tile, lane: figures[tile._width > 2])
    monkeypatch.setattr(gpu_memory, "device_memory", lambda: 100.0)
    state, notes = played(proving(experiment(num_clients=12, cohort_size=10, rounds=1), width=10, fits_memory=True))
    assert chosen(state).width == 8 and chosen(state).kind == "graph"
    assert len(notes) == 1 and "can't be probed" in notes[0] and notes[0].endswith("8 at once")


def test_a_fleet_that_can_not_try_steps_one_by_one() -> None:
    class Plain(LocalFleet):
        def prove(self, segment: Segment, anchor: Tensor, memories: dict[int, Handle]) -> Stepping:  # type: ignore[override]
            return super(LocalFleet, self).prove(segment, anchor, memories)

    work = experiment()
    engine = Engine(proving(work), Plain(proving(work)))
    assert torch.equal(run_rounds(engine).vector, run_rounds(local_engine(work)).vector)
    assert len(engine.notes) == 1
