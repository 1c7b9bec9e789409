"""Which store a run writes to, and whether it is there: found out quickly, and before anything is written."""

from __future__ import annotations

import contextlib
import http.server
import os
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsweep.errors import ConfigError, ResourceError
from fedsweep.runs.background import BackgroundCall
from fedsweep.tracking import mlflow_store
from fedsweep.tracking.mlflow_store import (
    check_store,
    needs_mlflow,
    open_store,
    probe_store,
    redacted,
    resolve_uri,
    sqlite_uri,
)

OUT = Path("/runs/a b/run")


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


@pytest.fixture
def silent_port() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        yield int(held.getsockname()[1])


def test_without_an_address_the_store_lies_above_the_run() -> None:
    assert resolve_uri(None, out=OUT) == "sqlite:////runs/a b/mlflow.db"


def test_addresses_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_uri("sqlite:///my.db", out=OUT) == f"sqlite:///{tmp_path}/my.db"
    assert resolve_uri(None, out=Path("runs/x")) == f"sqlite:///{tmp_path}/runs/mlflow.db"
    for uri in ("http://localhost:5000", "postgresql+psycopg2://u@h/db", "databricks"):
        assert resolve_uri(uri, out=OUT) == uri


def test_none_means_no_tracking() -> None:
    assert resolve_uri("none", out=OUT) is None


@pytest.mark.parametrize("uri", ["file:///tmp/mlruns", "./mlruns", "/abs/mlruns", "mlruns"])
def test_file_stores_are_refused_with_the_reason(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"tracking\.uri: .*file store.*migrate-filestore"):
        resolve_uri(uri, out=OUT)


@pytest.mark.parametrize("uri", ["sqlite://", "sqlite:///:memory:", "sqlite:///", "ftp://user:secret@host/x"])
def test_addresses_of_no_store_are_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"tracking\.uri: ") as caught:
        resolve_uri(uri, out=OUT)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["what?", "100%25"])
def test_paths_that_mlflow_misreads_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="MLflow misreads"):
        resolve_uri(None, out=Path("/runs") / name / "run")


def test_passwords_are_blotted_out() -> None:
    assert redacted("see mysql://me:pw@host/db?x=a:b@c") == "see mysql://me:***@host/db?x=a:b@c"
    assert redacted("http://host:80/a@b") == "http://host:80/a@b"


def test_checking_a_store_that_is_not_there_yet_writes_nothing(tmp_path: Path) -> None:
    check_store(sqlite_uri(tmp_path / "deep" / "below" / "mlflow.db"))
    assert list(tmp_path.iterdir()) == []


def test_checking_a_store_leaves_it_as_it_is(store: Path) -> None:
    before = store.read_bytes()
    check_store(sqlite_uri(store))
    assert store.read_bytes() == before and os.listdir(store.parent) == ["mlflow.db"]


def test_a_store_below_a_file_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match=r"file/mlflow\.db cannot be used: .*not a folder"):
        check_store(sqlite_uri(tmp_path / "file" / "mlflow.db"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_that_may_not_be_written_cannot_be_used(store: Path) -> None:
    store.chmod(0o400)
    with pytest.raises(ResourceError, match="no permission to write"):
        check_store(sqlite_uri(store))


def test_a_file_that_is_no_database_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    path.write_text("no database " * 100)
    with pytest.raises(ResourceError, match="file is not a database"):
        check_store(sqlite_uri(path))


def test_another_programs_database_is_let_be(tmp_path: Path) -> None:
    path = tmp_path / "mlflow.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE recipes (name)")
    before = path.read_bytes()
    with pytest.raises(ResourceError, match="a database of another program"):
        check_store(sqlite_uri(path))
    assert path.read_bytes() == before


def test_a_store_of_another_mlflow_cannot_be_used(store: Path) -> None:
    with contextlib.closing(sqlite3.connect(store)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = 'from the future'")
    with pytest.raises(ResourceError, match=r"tracking\.uri: the store .* cannot be used") as caught:
        check_store(sqlite_uri(store))
    assert "\n" not in str(caught.value)


def test_a_locked_store_is_waited_for_a_moment_only(store: Path) -> None:
    with contextlib.closing(sqlite3.connect(store, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        began = time.monotonic()
        with pytest.raises(ResourceError, match="database is locked"):
            probe_store(sqlite_uri(store), patience_s=0.05)
        assert time.monotonic() - began < 2
        other.execute("ROLLBACK")
    probe_store(sqlite_uri(store))


_HOLD = """
import sys, time
from pathlib import Path
from fedsweep.tracking import mlflow_store
with mlflow_store._locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_killed_holder_gives_the_lock_of_a_new_store_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "mlflow.db"
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    with holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            monkeypatch.setattr(mlflow_store, "_CREATION_S", 0.1)
            with pytest.raises(ResourceError, match=r"db-lock: another process has held this lock for 0 s; end it"):
                open_store(sqlite_uri(path))
            assert not path.exists()
        finally:
            holder.kill()
    monkeypatch.undo()
    with mlflow_store._locked(path):
        assert [file.name for file in path.parent.iterdir()] == ["mlflow.db-lock"]


def test_a_lock_that_cannot_be_opened_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db-lock").mkdir()
    with pytest.raises(ResourceError, match=r"mlflow\.db cannot be used: .*mlflow\.db-lock.*; set tracking\.uri"):
        open_store(sqlite_uri(tmp_path / "mlflow.db"))


@pytest.mark.parametrize("name", ["POOL_SIZE", "MAX_OVERFLOW"])
def test_a_pool_that_the_user_sizes_is_theirs(store: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"MLFLOW_SQLALCHEMYSTORE_{name}", "3")
    monkeypatch.delenv("MLFLOW_SQLALCHEMYSTORE_POOLCLASS", raising=False)
    open_store(sqlite_uri(store)).search_experiments()
    assert "MLFLOW_SQLALCHEMYSTORE_POOLCLASS" not in os.environ


def test_a_deleted_experiment_is_named(store: Path) -> None:
    client = open_store(sqlite_uri(store))
    number = client.create_experiment("gone")
    client.delete_experiment(number)
    with pytest.raises(ResourceError, match=f"'gone' is deleted.*--experiment-id {number}"):
        check_store(sqlite_uri(store), experiment="gone")


def test_a_server_that_is_not_there_is_found_out_quickly(
    closed_port: int, silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_store, "SILENT_S", 0.05)
    began = time.monotonic()
    with pytest.raises(ResourceError, match=r"cannot be used: .*refused.*; set tracking\.uri"):
        check_store(f"http://me:secret@127.0.0.1:{closed_port}")
    with pytest.raises(ResourceError, match="timed out"):
        probe_store(f"http://127.0.0.1:{silent_port}")
    with pytest.raises(ResourceError, match="refused"):
        check_store(f"postgresql://me:secret@127.0.0.1:{closed_port}/db")
    assert time.monotonic() - began < 5


def test_a_server_that_never_ends_its_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_store, "_check", lambda *_: threading.Event().wait(5))
    monkeypatch.setattr(BackgroundCall.wait, "__kwdefaults__", {"silent_s": 0.05, "at_most_s": 1.0})
    with pytest.raises(
        ResourceError, match=r"tracking.uri: the store http://h:1 cannot be used: no answer within 0 s; set"
    ):
        check_store("http://h:1")


def test_any_server_that_answers_is_there() -> None:
    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(401)

        def log_message(self, *_: object) -> None:
            pass

    asked: list[str] = []
    with http.server.HTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        probe_store(f"http://me:secret@127.0.0.1:{server.server_port}/prefix/")
        thread.join()
    assert asked == ["/prefix/health"]


def test_a_server_that_wants_a_password_is_told_where_it_belongs() -> None:
    refused = OSError("API request to endpoint /search failed with error code 401 != 200")
    text = str(mlflow_store._unusable("http://127.0.0.1:5000", refused))
    assert "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in text


_COUNT = """
import sys
from fedsweep.tracking.mlflow_store import open_store
print(len(open_store(sys.argv[1]).search_experiments()))
"""


@pytest.fixture
def none_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow itself makes the store."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.usefixtures("none_is_kept")
def test_a_fresh_store_survives_being_opened_by_two_processes_at_once(tmp_path: Path) -> None:
    uri = sqlite_uri(tmp_path / "mlflow.db")
    command = [sys.executable, "-c", _COUNT, uri]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in processes] == ["1"] * 2
    check_store(uri)


@pytest.mark.slow
@pytest.mark.usefixtures("none_is_kept")
@pytest.mark.parametrize("ends", ["with an error", "at once"])
def test_a_store_that_could_not_be_made_to_its_end_is_made_again(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mlflow.db"
    whole = sqlite3.connect

    def short_of_room(*args: object, **kwargs: object) -> sqlite3.Connection:
        connection = whole(*args, **kwargs)  # type: ignore[call-overload]
        connection.execute("PRAGMA max_page_count = 20")
        return connection  # type: ignore[no-any-return]

    if ends == "with an error":
        monkeypatch.setattr(sqlite3.dbapi2, "connect", short_of_room)
        with pytest.raises(ResourceError, match=f"{path} cannot be used"):
            open_store(sqlite_uri(path))
        monkeypatch.undo()
    else:  # what a process that was killed meanwhile leaves
        with contextlib.closing(sqlite3.connect(f"{path}-new-1")) as half:
            half.execute("CREATE TABLE logged_models (name TEXT)")
    assert not path.exists()
    assert open_store(sqlite_uri(path)).search_experiments()
    assert sorted(file.name for file in tmp_path.glob("mlflow*")) == ["mlflow.db", "mlflow.db-lock"]


def test_a_store_in_order_is_known_without_mlflow(store: Path, tmp_path: Path) -> None:
    uri = sqlite_uri(store)
    assert not needs_mlflow(sqlite_uri(tmp_path / "new.db"), experiment="fedsweep")
    assert not needs_mlflow(uri, experiment="fedsweep")
    client = open_store(uri)
    client.delete_experiment(client.create_experiment("gone"))
    assert not needs_mlflow(uri, experiment="fedsweep") and needs_mlflow(uri, experiment="gone")
    with contextlib.closing(sqlite3.connect(store)) as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'older'")
        connection.commit()
    assert needs_mlflow(uri, experiment="fedsweep")
    assert needs_mlflow("http://127.0.0.1:5000", experiment="fedsweep")
