"""``traffic.parquet`` adds up to what the rounds and the result say, and has each row once whatever happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedsweep
from fedsweep.algorithms.registry import METHODS
from fedsweep.driver.run import plan_run, resumable, run_plan
from fedsweep.engine.cost import registration_bytes
from fedsweep.engine.ledger import NOTHING
from fedsweep.finished.growth import grow
from fedsweep.records import RoundRecord
from fedsweep.runs.run_folder import CONFIG, RESULT, TRAFFIC, RunFolder
from fedsweep.runs.tables.per_client import REGISTRATION, traffic_table
from fedsweep.testing import local_engine, run_rounds, subject_of

torch.set_num_threads(1)


def summed(rows: list[dict[str, Any]]) -> Counter[tuple[int, str]]:
    """Bytes by round and direction."""
    found: Counter[tuple[int, str]] = Counter()
    for row in rows:
        found[row["round"], row["direction"]] += row["bytes"]
    return found


def told(records: Any) -> dict[tuple[int, str], int]:
    """The same, as the rounds tell it; without what is nothing."""
    pairs = {(r.round, way): getattr(r, f"bytes_{way}") for r in records for way in ("down", "up")}
    return {key: size for key, size in pairs.items() if size}


@pytest.mark.parametrize("name", METHODS)
def test_every_methods_rows_add_up_to_its_rounds(name: str) -> None:
    engine = local_engine(subject_of(name).world(rounds=2))
    state = run_rounds(engine)
    rows = traffic_table(engine.experiment, state.setup_traffic, state.records).to_pylist()
    at_start, sums = [row for row in rows if not row["round"]], summed(rows)
    assert {key: size for key, size in sums.items() if key[0] and size} == told(state.records)
    assert sums[0, "down"] + sums[0, "up"] == registration_bytes(engine.experiment) + (state.setup_bytes or 0)
    assert {row["client"] for row in at_start if row["kind"] == REGISTRATION} == set(range(6))
    keys = [(row["round"], row["client"], row["direction"], row["kind"], row.get("peer", -1)) for row in rows]
    assert len(set(keys)) == len(keys)
    assert sorted(keys[len(at_start) :]) == keys[len(at_start) :]
    assert all((row["bytes"] == 0) == (row["kind"] == NOTHING) for row in rows)
    for record in state.records:
        did = {row["client"]: row for row in rows if row["round"] == record.round}
        assert sum(row["steps"] for row in did.values()) == record.local_steps
        flops = 2 * sum(row["macs"] for row in did.values()) + record.extra.get("server_flops", 0)
        assert flops == pytest.approx(record.flops, abs=2 * len(did)) and record.flops > 0
        assert {client for client, row in did.items() if row["syncs"]} >= set(record.attendees)
        if name == "dynamicfl":
            assert max(row["syncs"] for row in did.values()) == record.sync_points > 1


TINY: dict[str, Any] = {
    "name": "tiny",
    "scenario": {"clients": 6},
    "training": {"rounds": 4, "cohort_size": 3, "local_steps": 4},
    "runtime": {"backend": "local"},
    "checkpoint": {"every": 2},
    "tracking": {"uri": "none"},
}
DEVICES = {"scenario": {"clients": 6, "devices": {"profile": "phone-lte"}}}
# Inner synchronisation, element masks, published content, messages of a codec, work that outlasts its round.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], set[str]]] = {
    "dynamicfl": ({"name": "dynamicfl", "high_interval": 1, "group_size": 2}, {}, {"params"}),
    "prunefl": ({"name": "prunefl"}, {}, {"params", "mask"}),
    "fedmix": ({"name": "fedmix"}, {}, {"params"}),
    "fedbuff": ({"name": "fedbuff", "buffer_size": 2}, DEVICES, {"params"}),
}


def made(folder: Path, kind: str, **training: Any) -> Path:
    method, world, _ = KINDS[kind]
    config = {**TINY, **world, "method": method, "training": {**TINY["training"], **training}}
    return fedsweep.run(config, out=folder).folder


def table(folder: Path) -> list[dict[str, Any]]:
    found = RunFolder(folder).client_table(TRAFFIC)
    assert found is not None
    rows: list[dict[str, Any]] = found.to_pylist()
    return rows


def records(folder: Path) -> list[RoundRecord]:
    return RunFolder(folder).read_rounds()


@pytest.mark.slow
@pytest.mark.usefixtures("short_first_stage")
@pytest.mark.parametrize("kind", KINDS)
def test_a_folders_rows_are_those_of_its_rounds_after_a_kill_and_more_rounds(kind: str, tmp_path: Path) -> None:
    whole = made(tmp_path / "whole", kind, rounds=6)
    rows, result = table(whole), RunFolder(whole).read_result()
    assert sum(row["bytes"] for row in rows) == result["total_bytes"] == records(whole)[-1].total_bytes
    assert sum(row["bytes"] for row in rows if not row["round"]) == result["registration_bytes"]
    assert {key: size for key, size in summed(rows).items() if key[0]} == told(records(whole))
    assert KINDS[kind][2] <= {row["kind"] for row in rows}
    # A kill after round 3: files as they were then, the newest checkpoint is of round 2.
    short = made(tmp_path / "short", kind, rounds=3)
    for path in (short / "checkpoints").glob("round-000003*"):
        path.unlink()
    (short / RESULT).unlink()
    run_plan(plan_run(resumable(short)[0]), short, resume=True)
    assert table(short) == [row for row in rows if row["round"] <= 3]
    run_plan(plan_run(grow(short, rounds=6)), short, resume=True)
    assert table(short) == rows


CODEC = """
from dataclasses import dataclass

from fedsweep import FederatedMethod
from fedsweep.components import Codec


@dataclass(frozen=True, kw_only=True)
class Halves(Codec):
    def encode(self, move, stream):
        return {"half": move.abs().half(), "sign": move < 0}

    def decode(self, message, size):
        return message["half"].float() * (1 - 2 * message["sign"].float())


def halves() -> FederatedMethod:
    return FederatedMethod(name="halves", source="", codec=Halves())
"""


def test_a_codecs_messages_are_kinds_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "traffic_codecs.py").write_text(CODEC)
    folder = fedsweep.run({**TINY, "method": {"name": "traffic_codecs:halves"}}, out=tmp_path / "run").folder
    rows = table(folder)
    assert {row["kind"] for row in rows if row["direction"] == "up" and row["round"]} == {"update/half", "update/sign"}
    assert {key: size for key, size in summed(rows).items() if key[0]} == told(records(folder))


def test_rounds_of_an_older_version_have_no_rows(tmp_path: Path) -> None:
    engine = local_engine(subject_of("fedavg").world(rounds=2))
    state = run_rounds(engine)
    old = replace(state.records[0], traffic=None)
    found = traffic_table(engine.experiment, None, [old, state.records[1]])
    assert set(found.column("round").to_pylist()) == {0, 2}


@pytest.mark.exhaustive
@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
def test_actors_leave_the_same_rows(tmp_path: Path) -> None:
    local = made(tmp_path / "local", "dynamicfl")
    runtime = ["runtime={backend: ray, client_actors: 2, cpus_per_client: 0.1}"]
    there = fedsweep.run(local / CONFIG, overrides=runtime, out=tmp_path / "ray").folder
    assert table(there) == table(local)
