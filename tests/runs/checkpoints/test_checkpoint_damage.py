from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError, OutputError
from fedsweep.records import State
from fedsweep.runs.checkpoints.checkpoint import CheckpointStore, Loaded
from fedsweep.runs.checkpoints.record_codec import pack
from fedsweep.runs.checkpoints.state_codec import to_bytes
from fedsweep.testing import local_engine, run_rounds, tiny_experiment

torch.set_num_threads(1)

HASH = "a" * 64


def same(tree: State) -> State:
    return tree


@functools.cache
def run_after(round: int) -> RunState:
    """A real run after a number of rounds; its clients keep their momentum."""
    experiment = tiny_experiment(fedavg(), rounds=3, optimizer=OptimizerSettings(momentum=0.9, keep="persist"))
    before = None if round == 1 else run_after(round - 1)
    return run_rounds(local_engine(experiment), before, rounds=1)


def store_in(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder, keep=2, config_hash=HASH)


def load(folder: Path) -> Loaded:
    return store_in(folder).newest(keep_handle=same)


def bits(state: RunState) -> bytes:
    """All of a state but its held clients, so that equal bytes mean equal states."""
    return to_bytes({name: part for name, part in pack(RunState, state).items() if name != "held"})


def fell_back(found: Loaded) -> bool:
    """Whether the older checkpoint was taken, and one sentence says why."""
    return found.state is not None and bits(found.state) == bits(run_after(1)) and len(found.skipped) == 1


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def manifest(folder: Path, round: int) -> Path:
    return folder / "checkpoints" / f"round-{round:06d}.json"


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and give it the checksum that belongs to it."""
    body = json.loads(path.read_text())["body"]
    change(body)
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    path.write_text(json.dumps({"body": body, "sha256": hashlib.sha256(text.encode()).hexdigest()}))


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A run folder with checkpoints of rounds 1 and 2."""
    store = store_in(tmp_path / "run")
    for round in (1, 2):
        store.save(run_after(round), fetch=same)
    return tmp_path / "run"


def json_digests(body: dict[str, Any]) -> list[str]:
    return [ref["sha256"] for ref in (body["state"], *body["rows"], *body["memories"].values())]


def damaged_files(folder: Path) -> list[Path]:
    """What only the newest checkpoint has."""
    older = json_digests(json.loads(manifest(folder, 1).read_text())["body"])
    return [p for p in files_of(folder) if p.stem not in older and p != manifest(folder, 1)]


@pytest.mark.slow
def test_a_flipped_byte_in_any_file_falls_back_to_the_older_one_and_says_so(two: Path) -> None:
    paths = damaged_files(two)
    assert len(paths) > 3  # manifest, state, rows, memories that changed
    for path in paths:
        whole = path.read_bytes()
        for position in range(0, len(whole), max(1, len(whole) // 20)):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x04]) + whole[position + 1 :])
            found = load(two)
            assert fell_back(found) and found.skipped[0].startswith("checkpoints/round-000002: ")
        path.write_bytes(whole)
    assert load(two).skipped == ()


def test_the_sentence_says_what_is_wrong(two: Path) -> None:
    path = damaged_files(two)[0]
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert load(two).skipped == (f"checkpoints/round-000002: checksum differs (objects/{path.name})",)


@pytest.mark.slow
def test_a_file_cut_off_anywhere_falls_back_to_the_older_one(two: Path) -> None:
    for path in damaged_files(two):
        whole = path.read_bytes()
        for part in range(20):
            path.write_bytes(whole[: len(whole) * part // 20])
            found = load(two)
            assert fell_back(found)
        path.write_bytes(whole)


def test_a_missing_object_falls_back_to_the_older_one(two: Path) -> None:
    for path in damaged_files(two)[:-1]:
        content = path.read_bytes()
        path.unlink()
        found = load(two)
        assert fell_back(found) and "No such file" in found.skipped[0]
        path.write_bytes(content)


def test_with_none_left_there_is_no_state_but_a_sentence_for_each(two: Path) -> None:
    for path in files_of(two / "checkpoints" / "objects"):
        path.write_bytes(b"")
    found = load(two)
    assert found.state is None and found.path is None
    assert [sentence.split(":")[0] for sentence in found.skipped] == [
        "checkpoints/round-000002",
        "checkpoints/round-000001",
    ]


def test_a_damaged_object_is_written_again_when_the_run_comes_to_it_again(two: Path) -> None:
    for path in damaged_files(two):
        path.write_bytes(b"damaged")
    store = store_in(two)
    assert fell_back(store.newest(keep_handle=same))
    store.save(run_after(2), fetch=same)
    found = load(two)
    assert found.state is not None and bits(found.state) == bits(run_after(2)) and found.skipped == ()


# Other people's checkpoints.


def test_another_configuration_is_refused(two: Path) -> None:
    with pytest.raises(ConfigError, match=r"round-000002\.json belongs to another configuration \(hash aaaaaaaaaaaa, "):
        CheckpointStore(two, keep=2, config_hash="b" * 64).newest(keep_handle=same)


def test_another_version_of_the_format_is_refused(two: Path) -> None:
    rewrite(manifest(two, 2), lambda body: body.update(version=2, something="new"))
    with pytest.raises(ConfigError, match="version 2 of the checkpoint format, but this program reads version 1"):
        load(two)


def set_state(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["state"].update({key: value})


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "parent": set_state("sha256", "../../../etc/passwd"),
    "absolute": set_state("sha256", "/etc/passwd"),
    "upper case": set_state("sha256", "A" * 64),
    "newline": set_state("sha256", "a" * 64 + "\n"),
    "no digest": set_state("sha256", 5),
    "huge size": set_state("size", 2**62),
    "small size": set_state("size", 3),
    "negative size": set_state("size", -1),
    "size as text": set_state("size", "1"),
    "size as bool": set_state("size", True),
    "more in a reference": set_state("path", "/etc/passwd"),
    "a reference as text": lambda body: body.update(state="/etc/passwd"),
    "another round": lambda body: body.update(round=1),
    "round as text": lambda body: body.update(round="2"),
    "huge round": lambda body: body.update(round=10**3000),
    "another format": lambda body: body.update(format="something else"),
    "more fields": lambda body: body.update(more=1),
    "hash as number": lambda body: body.update(config_hash=1),
    "rows as mapping": lambda body: body.update(rows={}),
    "rows left out": lambda body: body.update(rows=[]),
    "rows twice": lambda body: body.update(rows=body["rows"] * 2),
    "state as rows": lambda body: body.update(rows=[body["state"]]),
    "rows as state": lambda body: body.update(state=body["rows"][0]),
    "memories as list": lambda body: body.update(memories=[]),
    "a client by path": lambda body: body["memories"].update({"../1": body["state"]}),
    "a client with zeros": lambda body: body["memories"].update({"00": body["state"]}),
    "a negative client": lambda body: body["memories"].update({"-1": body["state"]}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifests_are_passed_over(two: Path, name: str) -> None:
    rewrite(manifest(two, 2), HOSTILE[name])
    found = load(two)
    assert fell_back(found)


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", '{"body":{},"sha256":1}', "[" * 100_000, "\x00", '{"body":NaN}']
)
def test_files_that_are_no_manifest_are_passed_over(two: Path, text: str) -> None:
    manifest(two, 2).write_text(text)
    found = load(two)
    assert fell_back(found)
    assert found.skipped[0].endswith(("it is no manifest of a checkpoint", "checksum differs (round-000002.json)"))


def test_links_and_pipes_are_not_followed(two: Path, tmp_path: Path) -> None:
    path = manifest(two, 2)
    elsewhere = tmp_path / "elsewhere.json"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert "it is a link" in load(two).skipped[0]
    path.unlink()
    os.mkfifo(path)
    assert "no regular file" in load(two).skipped[0]
    path.unlink()
    path.mkdir()
    assert "no regular file" in load(two).skipped[0]


def test_an_object_that_is_a_link_is_not_followed(two: Path, tmp_path: Path) -> None:
    path = damaged_files(two)[0]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    found = load(two)
    assert fell_back(found) and "it is a link" in found.skipped[0]


def test_folders_that_are_links_are_refused(two: Path, tmp_path: Path) -> None:
    objects = two / "checkpoints" / "objects"
    objects.rename(tmp_path / "elsewhere")
    objects.symlink_to(tmp_path / "elsewhere")
    assert load(two).state is None
    with pytest.raises(OutputError, match="is a link"):
        store_in(two).save(run_after(3), fetch=same)
    (two / "checkpoints").rename(tmp_path / "all")
    (two / "checkpoints").symlink_to(tmp_path / "all")
    with pytest.raises(OutputError, match="is a link"):
        load(two)
    with pytest.raises(OutputError, match="is a link"):
        store_in(two).save(run_after(3), fetch=same)


@pytest.mark.parametrize(
    "change",
    [
        {"round": 1},
        {"vector": "a string"},
        {"vector": torch.zeros(2, 2)},
        {"vector": torch.zeros(4, dtype=torch.int64)},
        {"anchors": {6: torch.zeros(3)}},
        {"anchors": {6: torch.zeros(4, dtype=torch.float64)}},
        {"components": {1: None}},
        {"held": {4: {"steps": 1}}},
        {"accuracies": {0: [0.5]}},
        {"clock": "noon"},
        {"total_bytes": True},
        {"partial": None},
        {"more": 1},
    ],
)
def test_a_state_whose_fields_are_not_what_they_should_be_is_passed_over(two: Path, change: dict[str, Any]) -> None:
    replace_state(two, change)
    assert fell_back(load(two))


def test_a_state_that_was_made_up_well_is_taken(two: Path) -> None:
    replace_state(two, {"clock": 5.0})
    found = load(two)
    assert found.state is not None and found.state.clock == 5.0


def replace_state(folder: Path, change: dict[str, Any]) -> None:
    """Put another state into the newest checkpoint, with the checksums that belong to it."""
    data = to_bytes({**pack(RunState, run_after(2)), "memories": {}, "records": (), **change})
    digest = hashlib.sha256(data).hexdigest()
    (folder / "checkpoints" / "objects" / f"{digest}.safetensors").write_bytes(data)
    rewrite(manifest(folder, 2), lambda body: body.update(state={"sha256": digest, "size": len(data)}))
