"""An empty store is kept in the user's cache, so that MLflow makes one by all of its migrations once per version."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import pytest

from fedsweep.tracking.mlflow_empty import copy_empty_store, has_schema, keep_empty_store
from fedsweep.tracking.mlflow_store import check_store, open_store, sqlite_uri


@pytest.fixture
def kept(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that was kept of a store, in a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep_empty_store(store)
    (kept,) = (tmp_path / "cache/fedsweep").iterdir()
    return kept


def _write(path: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement)


def test_a_new_store_is_a_copy_of_the_kept_one_with_a_default_experiment_of_its_own(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(kept, "CREATE TABLE it_was_copied (x TEXT)")
    place = tmp_path / "elsewhere"
    place.mkdir()
    monkeypatch.chdir(place)
    path = place / "mlflow.db"
    (default,) = open_store(sqlite_uri(path)).search_experiments()
    assert default.name == "Default" and str(place) in default.artifact_location
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT * FROM it_was_copied").fetchall() == []
    check_store(sqlite_uri(path))


def test_a_run_in_the_store_that_was_kept_is_in_no_copy(kept: Path, store: Path, tmp_path: Path) -> None:
    open_store(sqlite_uri(store)).create_experiment("mine")
    copy = tmp_path / "copy.db"
    assert copy_empty_store(copy)
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        assert has_schema(connection)
    assert [one.name for one in open_store(sqlite_uri(copy)).search_experiments()] == ["Default"]


@pytest.mark.parametrize("fault", ["of another version", "no database", "gone"])
def test_what_is_not_in_order_is_not_copied(fault: str, kept: Path, tmp_path: Path) -> None:
    if fault == "of another version":
        _write(kept, "UPDATE alembic_version SET version_num = 'other'")
    elif fault == "no database":
        kept.write_bytes(b"damaged" * 100)
    else:
        kept.unlink()
    assert not copy_empty_store(tmp_path / "copy.db")
    assert not (tmp_path / "copy.db").exists()


def test_where_the_cache_can_not_be_written_nothing_is_kept(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    keep_empty_store(store)
    assert not copy_empty_store(tmp_path / "copy.db")
