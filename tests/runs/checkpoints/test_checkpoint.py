from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.client.messages import Progress
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.engine.engine import Engine
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError, InvariantError, RunError
from fedsweep.experiment.experiment import Experiment
from fedsweep.method import FederatedMethod
from fedsweep.records import RoundRecord, State
from fedsweep.runs.checkpoints.checkpoint import CheckpointStore, Loaded
from fedsweep.runs.checkpoints.exchange import replace_checkpoints
from fedsweep.runs.checkpoints.state_codec import to_bytes
from fedsweep.testing import local_engine, run_rounds, tiny_experiment, tiny_record

torch.set_num_threads(1)

HASH = "a" * 64
METHODS: dict[str, Callable[[], FederatedMethod]] = {
    "fedavg": fedavg,
    "dynamicfl": lambda: dynamicfl(high_interval=1, low_interval=3),
}


class Killed(BaseException):
    """Stands for the end of the process: nothing in the code under test may handle it."""


def same(tree: State) -> State:
    return tree


def store_in(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder, keep=2, config_hash=HASH)


def load(folder: Path) -> Loaded:
    return store_in(folder).newest(keep_handle=same)


def loaded_state(folder: Path) -> RunState:
    found = load(folder)
    assert found.state is not None and found.skipped == ()
    return found.state


def experiment_of(method: FederatedMethod, *, double: bool = False) -> Experiment:
    return tiny_experiment(
        method,
        rounds=4,
        local_epochs=2,
        double=double,
        optimizer=OptimizerSettings(momentum=0.9, keep="persist"),
    )


def record_of(round: int, **changes: Any) -> RoundRecord:
    record = tiny_record(
        round,
        timestamp_ms=1_700_000_000_000 + round,
        test_loss=math.inf,
        validation_accuracy=0.1 + 0.2,
        train_loss=math.nan,
        flops=2**60,
        sim_time_s=1.5,
        aggregation_weights=(0.25, 0.75),
        extra={"distance": 1e-300},
    )
    return replace(record, **changes)


def state_of(round: int, **changes: Any) -> RunState:
    """A state with something in every field."""
    state = RunState(
        round=round,
        version=7,
        vector=torch.tensor([1.0, -0.0, math.pi, round], dtype=torch.float32),
        components={"pacing": {"group": [1, 2]}, "weighting": None, "refinement0": ({3: torch.ones(2)}, np.float32(2))},
        memories={4: {"terms": {"a": torch.zeros(2)}}, 0: {"optimizer": {"momentum": np.full(3, float(round))}}},
        held={4: Progress(anchor_version=6, steps=2, effective_steps=1.9, loss_sum=0.5, samples=9, classes=(0, 3))},
        anchors={6: torch.arange(4.0)},
        accuracies={0: (0.5, 1.0)},
        clock=12.5,
        total_bytes=2**40,
        wall_time_s=3.25,
        records=tuple(record_of(r) for r in range(1, round + 1)),
        partial={"refinement0": {"images": torch.zeros(2, 2)}},
    )
    return replace(state, **changes)


def bits(state: RunState) -> bytes:
    """All of a state, so that equal bytes mean equal states."""
    parts = {
        entry.name: getattr(state, entry.name) for entry in fields(RunState) if entry.name not in ("held", "records")
    }
    held = {client: vars(progress) for client, progress in state.held.items()}
    return to_bytes({**parts, "held": held, "records": tuple(vars(record) for record in state.records)})


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def manifest(folder: Path, round: int) -> Path:
    return folder / "checkpoints" / f"round-{round:06d}.json"


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A run folder with checkpoints of rounds 10 and 20."""
    store = store_in(tmp_path)
    for round in (10, 20):
        store.save(state_of(round), fetch=same)
    return tmp_path


# What goes in comes out.


def test_every_field_of_a_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = state_of(3)
    path = store_in(tmp_path).save(state, fetch=same)
    assert path == manifest(tmp_path, 3)
    assert bits(loaded_state(tmp_path)) == bits(state)
    assert load(tmp_path).path == path


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_model_keeps_its_type(tmp_path: Path, dtype: torch.dtype) -> None:
    vector = torch.tensor([1 / 3, 1e-5], dtype=dtype)
    store_in(tmp_path).save(state_of(1, vector=vector, anchors={}), fetch=same)
    loaded = loaded_state(tmp_path).vector
    assert loaded.dtype == dtype and torch.equal(loaded, vector)


def test_the_run_before_round_1_can_be_kept(tmp_path: Path) -> None:
    state = RunState(vector=torch.zeros(2), components={}, partial={"refinement0": 5})
    store_in(tmp_path).save(state, fetch=same)
    assert bits(loaded_state(tmp_path)) == bits(state)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_going_on_from_any_checkpoint_gives_the_bits_of_the_unbroken_run(
    tmp_path: Path, name: str, double: bool
) -> None:
    experiment = experiment_of(METHODS[name](), double=double)
    unbroken = run_rounds(local_engine(experiment))
    for rounds in range(4):
        engine = local_engine(experiment)
        state = run_rounds(engine, rounds=rounds)
        store_in(tmp_path / str(rounds)).save(state, fetch=engine.fleet.fetch)
        assert state.memories or not rounds
        resumed = run_rounds(*resumed_from(tmp_path / str(rounds), experiment))
        assert resumed.round == 4 and torch.equal(resumed.vector, unbroken.vector)
        assert to_bytes(dict(resumed.memories)) == to_bytes(dict(unbroken.memories))
        assert [untimed(r) for r in resumed.records] == [untimed(r) for r in unbroken.records]


def resumed_from(folder: Path, experiment: Experiment) -> tuple[Engine, RunState]:
    engine = local_engine(experiment)
    found = store_in(folder).newest(keep_handle=engine.fleet.keep)
    assert found.state is not None
    return engine, found.state


def untimed(record: RoundRecord) -> RoundRecord:
    return replace(record, timestamp_ms=0, wall_time_s=0.0, eval_time_s=0.0, server_time_s=0.0)


def test_without_memories_from_the_checkpoint_the_run_would_differ(tmp_path: Path) -> None:
    experiment = experiment_of(fedavg())
    engine = local_engine(experiment)
    state = run_rounds(engine, rounds=2)
    forgetful = run_rounds(local_engine(experiment), replace(state, memories={}))
    assert not torch.equal(forgetful.vector, run_rounds(engine, state).vector)


def test_what_is_no_state_tree_is_an_error_that_names_the_place(tmp_path: Path) -> None:
    with pytest.raises(InvariantError, match=r"state\['components'\]\['pacing'\]\['group'\] is a builtins.set"):
        store_in(tmp_path).save(state_of(1, components={"pacing": {"group": {1}}}), fetch=same)
    with pytest.raises(InvariantError, match=r"memory of client 3\['x'\]"):
        store_in(tmp_path).save(state_of(1, memories={3: {"x": object()}}), fetch=same)
    assert load(tmp_path).state is None


def test_keep_must_be_at_least_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.keep must be at least 1, but got 0"):
        CheckpointStore(tmp_path, keep=0, config_hash=HASH)


# Only what changed is written, and what nobody needs is dropped.


def test_memories_whose_handle_is_the_same_are_neither_fetched_nor_written_again(tmp_path: Path) -> None:
    store, fetched = store_in(tmp_path), []

    def fetch(handle: tuple[int]) -> State:
        fetched.append(handle)
        return {"value": handle[0]}

    first, second, third = (1,), (2,), (3,)
    store.save(state_of(1, memories={0: first, 1: second}), fetch=fetch)
    before = {path: path.stat().st_mtime_ns for path in files_of(tmp_path)}
    store.save(state_of(2, memories={0: first, 1: third}), fetch=fetch)
    assert fetched == [first, second, third]
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert loaded_state(tmp_path).memories == {0: {"value": 1}, 1: {"value": 3}}


def test_after_loading_known_memories_are_not_fetched_again(two: Path) -> None:
    store = store_in(two)
    found = store.newest(keep_handle=lambda tree: [tree])
    assert found.state is not None
    fetched: list[object] = []
    changed = replace(found.state, round=21, records=(*found.state.records, record_of(21)))
    store.save(changed, fetch=lambda handle: fetched.append(handle))
    assert fetched == []
    assert bits(loaded_state(two)) == bits(replace(changed, memories={k: h[0] for k, h in changed.memories.items()}))


def test_equal_memories_of_two_clients_are_one_object(tmp_path: Path) -> None:
    memories = {client: {"m": np.ones(2)} for client in range(3)}
    store_in(tmp_path).save(state_of(1, memories=memories), fetch=same)
    assert len(files_of(tmp_path / "checkpoints" / "objects")) == 3  # the state, the rows, one memory


def test_old_rows_are_not_written_again(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.save(state_of(250), fetch=same)
    before = set(files_of(tmp_path))
    longer = replace(state_of(250), round=251, records=(*state_of(250).records, record_of(251)))
    store.save(longer, fetch=same)
    assert len(set(files_of(tmp_path)) - before) == 3  # the manifest, the state, the last block of rows
    assert [r.round for r in loaded_state(tmp_path).records] == list(range(1, 252))


@pytest.mark.slow
def test_a_manifest_names_few_blocks_of_rows_however_long_the_run_is_and_resuming_writes_none_again(
    tmp_path: Path,
) -> None:
    store_in(tmp_path).save(state_of(2345), fetch=same)
    before = set(files_of(tmp_path / "checkpoints" / "objects"))
    assert len(before) == 3 + 2 + 3 + 1  # the state and two memories, blocks of 1,000 and of 100 rows, the rest
    state = loaded_state(tmp_path)
    assert [row.round for row in state.records] == list(range(1, 2346))
    store = store_in(tmp_path)
    resumed = store.newest(keep_handle=same).state
    assert resumed is not None
    store.save(replace(resumed, clock=99.0), fetch=same)
    assert len(set(files_of(tmp_path / "checkpoints" / "objects")) - before) == 1  # the state alone


def test_nothing_to_load_is_no_error(tmp_path: Path) -> None:
    assert load(tmp_path / "absent") == Loaded(state=None, path=None, skipped=())


def test_the_newest_are_kept_and_nothing_else_stays(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for round in (1, 2, 3, 4):
        store.save(state_of(round), fetch=same)
    kept = [path for path in files_of(tmp_path / "checkpoints") if path.suffix == ".json"]
    assert [path.name for path in kept] == ["round-000003.json", "round-000004.json"]
    used = {digest for path in kept for digest in json_digests(json.loads(path.read_text())["body"])}
    assert {path.stem for path in files_of(tmp_path / "checkpoints" / "objects")} == used


def json_digests(body: dict[str, Any]) -> list[str]:
    return [ref["sha256"] for ref in (body["state"], *body["rows"], *body["memories"].values())]


def test_a_kept_older_checkpoint_is_whole(two: Path) -> None:
    manifest(two, 20).unlink()
    assert bits(loaded_state(two)) == bits(state_of(10))


def test_a_run_that_went_back_drops_what_lies_ahead(two: Path) -> None:
    store_in(two).save(state_of(15), fetch=same)
    assert not manifest(two, 20).exists()
    assert loaded_state(two).round == 15


def test_the_same_round_can_be_saved_again(two: Path) -> None:
    store_in(two).save(state_of(20, partial={"refinement0": 1}), fetch=same)
    assert loaded_state(two).partial == {"refinement0": 1}
    assert manifest(two, 10).exists()


def test_foreign_files_stay_and_left_over_temporaries_go(two: Path) -> None:
    folder = two / "checkpoints"
    left = [folder / ".round-000020.json.tmp", folder / "objects" / f".{'b' * 64}.safetensors.tmp"]
    foreign = [folder / "notes.txt", folder / "objects" / "notes.safetensors"]
    for path in (*left, *foreign):
        path.write_text("x")
    store_in(two).save(state_of(30), fetch=same)
    assert not any(path.exists() for path in left) and all(path.exists() for path in foreign)


# Kills and full disks.


def copy_of(folder: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    return to


def failing(monkeypatch: pytest.MonkeyPatch, *, at: int, error: BaseException) -> list[str]:
    """Let the k-th operation on files raise, before it or (odd k) after it was carried out."""
    calls: list[str] = []

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def operation(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) - 1 == at // 2 and at % 2 == 0:
                raise error
            result = real(*args, **kwargs)
            if len(calls) - 1 == at // 2:
                raise error
            return result

        monkeypatch.setattr(os, name, operation)

    for name in ("replace", "fsync", "unlink", "mkdir"):
        wrap(name)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("error", [Killed(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_stop_at_any_operation_leaves_a_valid_checkpoint_and_the_next_save_succeeds(
    two: Path, tmp_path: Path, error: BaseException
) -> None:
    stops, outcomes = 0, set()
    while True:
        folder = copy_of(two, tmp_path / "copy")
        store = store_in(folder)
        store.newest(keep_handle=same)
        with pytest.MonkeyPatch.context() as patch:
            calls = failing(patch, at=stops, error=error)
            try:
                store.save(state_of(30), fetch=same)
            except (Killed, RunError) as stopped:
                assert isinstance(stopped, Killed) == isinstance(error, Killed)
        if len(calls) <= stops // 2:
            break
        found = load(folder)
        assert found.state is not None and found.skipped == ()
        assert bits(found.state) == bits(state_of(found.state.round))
        outcomes.add(found.state.round)
        store_in(folder).save(state_of(30), fetch=same)
        assert bits(loaded_state(folder)) == bits(state_of(30))
        assert not [path for path in files_of(folder) if path.name.endswith(".tmp")]
        stops += 1
    assert stops > 20 and outcomes == {20, 30}


def test_a_kill_at_any_operation_leaves_checkpoints_while_anothers_take_their_place(two: Path, tmp_path: Path) -> None:
    store_in(tmp_path / "other").save(state_of(15), fetch=same)
    stops, outcomes = 0, set()
    while True:
        folder = copy_of(two, tmp_path / "copy")
        with pytest.MonkeyPatch.context() as patch:
            calls = failing(patch, at=stops, error=Killed())
            with contextlib.suppress(Killed):
                replace_checkpoints(folder / "checkpoints", tmp_path / "other" / "checkpoints")
        outcomes.add(loaded_state(folder).round)
        if len(calls) <= stops // 2:
            break
        replace_checkpoints(folder / "checkpoints", tmp_path / "other" / "checkpoints")
        assert [path.name for path in (folder / "checkpoints").glob("*.json")] == ["round-000015.json"]
        stops += 1
    assert stops > 10 and outcomes == {15, 20} and bits(loaded_state(folder)) == bits(state_of(15))


def test_a_kill_while_a_file_is_half_written_leaves_the_older_ones(two: Path) -> None:
    half = two / "checkpoints" / ".round-000030.json.tmp"
    for part in range(20):
        content = manifest(two, 20).read_bytes()
        half.write_bytes(content[: len(content) * part // 20])
        assert loaded_state(two).round == 20


def test_a_full_disk_is_a_run_error_that_says_what_to_do(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, at=2, error=OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(
        RunError, match=r"can't write the checkpoint of round 30 to .*: No space left on device; .*--resume"
    ):
        store_in(two).save(state_of(30), fetch=same)


def test_an_error_of_the_fleet_is_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    def fetch(handle: object) -> State:
        raise ConnectionError("the actor is gone")

    with pytest.raises(ConnectionError):
        store_in(tmp_path).save(state_of(1), fetch=fetch)
