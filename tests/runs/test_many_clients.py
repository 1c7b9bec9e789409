"""What grows with the clients that did something, and what with all of them: counts, not times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from client_tables import profiles_of

from fedsweep.engine.state import RunState
from fedsweep.records import State
from fedsweep.runs import files
from fedsweep.runs.checkpoints.checkpoint import CheckpointStore
from fedsweep.runs.files import ObjectStore
from fedsweep.runs.tables.clients import clients_table
from fedsweep.testing import tiny_record
from fedsweep.world.label_stats import js_divergence, kl_divergence, population

CLIENTS, COHORT, VALUES = 1000, 20, 2000
MEMORY_BYTES = 8 * VALUES


def memory() -> State:
    return {"optimizer": np.random.default_rng().normal(size=VALUES)}


def same(tree: State) -> State:
    return tree


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the files that were written."""
    sizes: list[int] = []
    write: Callable[[Path, bytes], None] = files.write_durably

    def counting(path: Path, data: bytes) -> None:
        sizes.append(len(data))
        write(path, data)

    monkeypatch.setattr(files, "write_durably", counting)
    return sizes


def test_a_checkpoint_writes_what_the_cohort_changed(tmp_path: Path, written: list[int]) -> None:
    store = CheckpointStore(tmp_path, keep=2, config_hash="a" * 64)
    state = RunState(
        vector=torch.zeros(3), components={}, memories={client: memory() for client in range(CLIENTS)}, round=1
    )
    state_at: dict[int, RunState] = {}
    for round in range(1, 5):
        changed = {client: memory() for client in range(COHORT * round, COHORT * (round + 1))}
        memories: dict[int, Any] = {**state.memories, **changed}
        records = tuple(tiny_record(k) for k in range(1, round + 1))
        state = RunState(vector=torch.zeros(3), components={}, round=round, memories=memories, records=records)
        state_at[round] = state
        written.clear()
        store.save(state, fetch=same)
        if round > 1:
            assert len(written) <= COHORT + 2  # the state and the rows, beside the memories
            assert sum(written) < COHORT * (MEMORY_BYTES + 500) + 20_000
    # Two checkpoints are kept: all clients once, and what the last cohort had before.
    objects = list((tmp_path / "checkpoints" / "objects").iterdir())
    assert len(objects) <= CLIENTS + COHORT + 4
    found = CheckpointStore(tmp_path, keep=2, config_hash="a" * 64).newest(keep_handle=same).state
    assert found is not None
    for client, kept in state_at[4].memories.items():
        assert found.memories[client]["optimizer"].tobytes() == kept["optimizer"].tobytes()


def test_equal_contents_are_written_once_and_all_of_them_named(tmp_path: Path, written: list[int]) -> None:
    store = ObjectStore(tmp_path / "objects", suffix=".x")
    refs = store.put_all([b"one", b"two", b"one", b"three"] * 20)
    assert sorted(written) == [3, 3, 5]
    assert [store.get(ref) for ref in refs] == [b"one", b"two", b"one", b"three"] * 20


def test_a_disk_that_is_full_for_one_of_several_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore(tmp_path / "objects", suffix=".x")
    write = files.write_durably

    def full(path: Path, data: bytes) -> None:
        if data == b"7":
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(files, "write_durably", full)
    with pytest.raises(OSError, match="No space"):
        store.put_all([str(k).encode() for k in range(30)])
    monkeypatch.undo()
    refs = store.put_all([str(k).encode() for k in range(30)])
    assert [store.get(ref) for ref in refs] == [str(k).encode() for k in range(30)]


def test_divergences_of_many_clients_are_those_of_each() -> None:
    counts_NC = np.random.default_rng(0).integers(0, 5, size=(9000, 10))
    counts_NC[17] = 0
    table = clients_table(profiles_of(counts_NC))
    shares_C = population(counts_NC)
    for name, divergence in (("kl_divergence", kl_divergence), ("js_divergence", js_divergence)):
        values = table.column(name).to_pylist()
        assert values[17] is None
        for client in (0, 16, 18, 4095, 4096, 8999):
            assert values[client] == float(divergence(counts_NC[client], shares_C))


def test_divergences_are_computed_for_many_clients_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsweep.runs.tables import clients as client_table

    calls: list[int] = []

    def counting(p: np.ndarray, q: np.ndarray) -> Any:
        calls.append(len(p))
        return kl_divergence(p, q)

    monkeypatch.setattr(client_table, "kl_divergence", counting)
    counts_NC = np.ones((50_000, 10), dtype=np.int64)
    clients_table(profiles_of(counts_NC))
    assert len(calls) < 50


@pytest.mark.slow
def test_the_picture_of_the_split_has_no_object_for_each_client() -> None:
    from matplotlib.figure import Figure

    from fedsweep.figures.partition import _totals

    drawn = []
    for clients in (200, 201, 100_000):
        axes = Figure().subplots()
        _totals(axes, np.arange(clients))
        drawn.append(len(axes.patches))
        assert axes.dataLim.y1 == clients - 1
    assert drawn == [200, 1, 1]
