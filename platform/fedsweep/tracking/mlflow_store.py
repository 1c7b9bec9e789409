"""MLflow tracking stores: which one a run writes to, whether it is there, and opening it safely.

MLflow creates and migrates a fresh sqlite file on first use, and several processes that do so at once leave it broken
for good: here that happens under a file lock. MLflow also tries for minutes to reach a store that is not there: here
every store is tried first with a few seconds' patience. ``mlflow`` itself is imported by the functions that need it.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import http.client
import os
import re
import socket
import sqlite3
import ssl
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fedsweep.config.credentials import check_no_credentials
from fedsweep.errors import ConfigError, ResourceError
from fedsweep.processes import silenced
from fedsweep.runs.background import SILENT_S, BackgroundCall, NoAnswer
from fedsweep.tracking.mlflow_empty import copy_empty_store, has_schema, keep_empty_store

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

NO_TRACKING = "none"
ARTIFACTS = "mlartifacts"
PATIENCE_S = 3.0
_MOST_ANSWER_BYTES = 64 * 2**20  # thousands of runs with all of their tags are shorter
_CREATION_S = 120.0  # a fresh file takes 2 s; several processes may wait for one another
_SQLITE = "sqlite:///"
_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
OWN_STORES = ("databricks", "databricks-uc", "uc")
_FILE_STORE = (
    "tracking.uri: {uri!r} is a file store, which MLflow no longer supports; use sqlite:////abs/mlflow.db, the address"
    " of an MLflow server, or none (`mlflow migrate-filestore` converts an old store)"
)
# Defaults that the user's environment overrides.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_DISABLE_AGENT_HINT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "GIT_PYTHON_REFRESH": "quiet",
}
_POOL = "MLFLOW_SQLALCHEMYSTORE_POOL"
# They write tracebacks and retries of what is reported in one line anyway.
_CHATTY = ("mlflow.store.db.utils", "alembic", "urllib3.connectionpool")


def local_store() -> Path:
    """Return a folder as a run of this place would have it; the store is looked for above it."""
    runs = Path("runs") / "run"
    return Path("run") if not (runs.parent / "mlflow.db").is_file() and Path("mlflow.db").is_file() else runs


def resolve_uri(uri: str | None, *, out: Path) -> str | None:
    """Return the store that a run writes to, as an absolute address; None: no tracking.

    Args:
        uri: ``tracking.uri`` as configured; None: a sqlite file in the folder above ``out``.
        out: The run's or sweep's folder.

    Raises:
        ConfigError: The address is of a file store, of no known kind, or cannot be written as an address.
    """
    check_no_credentials(uri, "tracking.uri")
    if uri is None:
        return sqlite_uri(out.absolute().parent / "mlflow.db")
    if uri == NO_TRACKING:
        return None
    scheme = urlsplit(uri).scheme.split("+")[0]
    if scheme == "sqlite":
        path = uri.removeprefix(_SQLITE)
        if not uri.startswith(_SQLITE) or path in ("", ":memory:"):
            raise ConfigError(f"tracking.uri: {uri!r} must name a file, as in sqlite:////abs/mlflow.db")
        return sqlite_uri(Path(path).absolute())
    if scheme in (*_PORTS, "http", "https", *OWN_STORES) or uri in OWN_STORES:
        return uri
    if scheme in ("", "file"):
        raise ConfigError(_FILE_STORE.format(uri=uri))
    kinds = ", ".join(("sqlite", *_PORTS, "http", "https", *OWN_STORES))
    raise ConfigError(f"tracking.uri: {redacted(uri)!r} is of no known kind (known: {kinds}; null; none)")


def sqlite_uri(path: Path) -> str:
    """Return the address of a sqlite file.

    Raises:
        ConfigError: The path has characters that MLflow would take for something else.
    """
    if re.search(r"\?|%[0-9a-fA-F]{2}", str(path)):
        raise ConfigError(
            f"tracking.uri: MLflow misreads '?' and '%' in {str(path)!r}; choose another --out, or give tracking.uri"
        )
    return f"{_SQLITE}{path}"


def sqlite_path(uri: str) -> Path | None:
    """Return the file of a sqlite store; None for other stores."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def redacted(text: str) -> str:
    """Return the text, of a library or a configuration, with the password of any address in it blotted out."""
    return re.sub(r"(://[^/\s:@]*:)[^/\s@]+@", r"\1***@", text)


def reason_of(error: Exception) -> str:
    """Return an error's reason in one line: MLflow's, SQLAlchemy's, requests' or the system's."""
    lines = [line.strip() for line in redacted(str(error)).splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith("(raised as a result of")]
    return (telling or lines or [type(error).__name__])[0]


def check_store(uri: str, *, experiment: str | None = "fedsweep") -> None:
    """Make sure, without writing anything, that a run can be tracked.

    Args:
        uri: An address from :func:`resolve_uri`.
        experiment: The MLflow experiment; None: any.

    Raises:
        ResourceError: The store is not there, cannot be written, is not MLflow's, is of another version of MLflow,
            or the experiment is deleted; in one line, within seconds.
    """
    try:
        BackgroundCall(lambda: _check(uri, experiment)).wait()
    except NoAnswer as error:
        raise _unusable(uri, error) from error


def _check(uri: str, experiment: str | None) -> None:
    probe_store(uri)
    if not needs_mlflow(uri, experiment=experiment):
        return
    with quiet_mlflow():
        client = _client(uri)
        try:
            entry = client.get_experiment_by_name(experiment) if experiment is not None else None
        except Exception as error:  # MLflow raises its own, SQLAlchemy's and requests' exceptions alike
            raise _unusable(uri, error) from error
    if entry is not None and entry.lifecycle_stage != "active":
        raise ResourceError(
            f"tracking.experiment: {experiment!r} is deleted in {redacted(uri)}; restore it (mlflow experiments restore"
            f" --experiment-id {entry.experiment_id}) or choose another name"
        )


def needs_mlflow(uri: str, *, experiment: str | None) -> bool:
    """Check if only MLflow, which takes long to import, can tell that a run can be tracked."""
    path = sqlite_path(uri)
    if path is None or not has_tables(path):
        return path is None
    deleted = "SELECT count(*) FROM experiments WHERE name = ? AND lifecycle_stage <> 'active'"
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as connection:
        return not has_schema(connection) or connection.execute(deleted, (experiment,)).fetchone() != (0,)
    return True


def probe_store(uri: str, *, patience_s: float = PATIENCE_S) -> None:
    """Sees whether a store can be written right now, waiting so many seconds for a lock or a database.

    A server of MLflow's may take longer for its answer: as long as anybody waits for one.

    Raises:
        ResourceError: It cannot, in one line.
    """
    path = sqlite_path(uri)
    try:
        if path is not None:
            _probe_sqlite(path, patience_s)
        elif uri.startswith(("http://", "https://")):
            _probe_server(uri)
        else:
            _probe_database(uri, patience_s)
    except (OSError, sqlite3.Error) as error:
        raise _unusable(uri, error) from error


def open_store(uri: str) -> MlflowClient:
    """Return a client of the store, which is created where it is a sqlite file that is not there yet.

    Raises:
        ResourceError: The store cannot be opened, in one line.
    """
    path = sqlite_path(uri)
    with quiet_mlflow(), contextlib.nullcontext() if path is None else _locked(path):
        if path is not None and not has_tables(path):
            _make(path)
        return _client(uri)


def _make(path: Path) -> None:
    """Make a store beside its place: who is killed meanwhile, or finds the disk full, leaves no half of one there."""
    place = Path(os.path.realpath(path))
    for old in place.parent.glob(f"{glob.escape(place.name)}-new-*"):
        old.unlink(missing_ok=True)
    # Another name each time: MLflow would go on with its open connection to what was removed.
    new = place.with_name(f"{place.name}-new-{time.time_ns()}")
    try:
        if not copy_empty_store(new):
            _client(sqlite_uri(new), named=sqlite_uri(path))
            keep_empty_store(new)
        new.replace(place)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def quiet_mlflow() -> Iterator[None]:
    """Set MLflow up for being called: no telemetry, bounded waits, no tracebacks on stderr."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Between MLflow and its dependencies; for good, since threads have the filters in common.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="mlflow|sqlalchemy|alembic")
    with silenced(*_CHATTY):
        yield


def _client(uri: str, *, named: str | None = None) -> MlflowClient:
    try:
        from mlflow.tracking import MlflowClient

        _bound_answers()
        # A connection that is kept goes on with pages of a file that was deleted or replaced. No pool has a size.
        if uri.startswith(_SQLITE) and not {f"{_POOL}_SIZE", "MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW"} & {*os.environ}:
            os.environ.setdefault(f"{_POOL}CLASS", "NullPool")
        client = MlflowClient(uri)
        client.search_experiments(max_results=1)
    except Exception as error:  # MLflow raises its own, SQLAlchemy's and requests' exceptions alike
        raise _unusable(named or uri, error) from error
    return client


@cache
def _bound_answers() -> None:
    """Let MLflow take no answer that is longer than any it could need; a few compressed bytes can become gigabytes.

    MLflow has no setting for it, nor a public way to its sessions: mlflow.utils.request_utils is private. In a version
    without that name answers are as long as the server likes.
    """
    from mlflow.utils import request_utils

    make = getattr(request_utils, "_get_request_session", None)
    if make is None:
        return

    def bounded(*arguments: Any, **options: Any) -> Any:
        session = make(*arguments, **options)
        session.hooks["response"] = [_take_answer]
        return session

    request_utils._get_request_session = bounded


def _take_answer(response: Any, *_: Any, stream: bool = False, **__: Any) -> None:
    """A hook of ``requests``: take the body, which is not read yet, in pieces, and no more than is allowed."""
    if stream:
        return
    parts, size = [], 0
    for part in response.iter_content(2**14):
        size += len(part)
        if size > _MOST_ANSWER_BYTES:
            response.close()
            raise OSError(f"the server's answer is longer than {_MOST_ANSWER_BYTES >> 20} MB")
        parts.append(part)
    response._content = b"".join(parts)  # where requests itself would have put it


def _unusable(uri: str, error: Exception) -> ResourceError:
    reason, way_out = reason_of(error), "set tracking.uri to another store, or to none"
    if "error code 401" in reason:
        way_out = f"set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD to what it knows, or {way_out[4:]}"
    return ResourceError(f"tracking.uri: the store {redacted(uri)} cannot be used: {reason}; {way_out}")


def _probe_sqlite(path: Path, patience_s: float) -> None:
    if not path.exists():
        above = next(folder for folder in path.parents if folder.exists())
        if not above.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(above))
        _check_writable(above)
        return
    _check_writable(path)
    _check_writable(path.parent)  # for sqlite's journal
    with contextlib.closing(sqlite3.connect(path, timeout=patience_s, isolation_level=None)) as connection:
        # Takes the write lock and gives it back: nothing is written.
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if tables and "alembic_version" not in tables:
        raise sqlite3.DatabaseError(f"it is a database of another program (tables: {', '.join(sorted(tables)[:3])})")


def _check_writable(path: Path) -> None:
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, "no permission to write", str(path))


def has_tables(path: Path) -> bool:
    """Check that there is a store in a sqlite file, by its size."""
    return path.exists() and path.stat().st_size > 0


def _probe_server(uri: str) -> None:
    parts = urlsplit(uri)
    host = parts.netloc.rpartition("@")[2]  # urllib knows no passwords in addresses
    try:
        with urllib.request.urlopen(f"{parts.scheme}://{host}{parts.path.rstrip('/')}/health", timeout=SILENT_S):
            return
    except urllib.error.HTTPError as error:
        # Whoever answers is there; what it thinks of the request is found out when the store is opened.
        error.close()
    except urllib.error.URLError as error:
        if not isinstance(error.reason, ssl.SSLCertVerificationError):  # MLflow has its own settings for these
            raise OSError(str(error.reason)) from error
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"no MLflow server answers there ({error})") from error


def _probe_database(uri: str, patience_s: float) -> None:
    parts = urlsplit(uri)
    kind = parts.scheme.split("+")[0]
    if kind not in _PORTS or parts.hostname is None:
        return  # a socket file or a managed store: opening it will tell
    socket.create_connection((parts.hostname, parts.port or _PORTS[kind]), timeout=patience_s).close()
    import sqlalchemy

    try:
        # MLflow would try ten times over two minutes where a password or a driver is wrong.
        engine = sqlalchemy.create_engine(uri, poolclass=sqlalchemy.pool.NullPool)
        engine.connect().close()
    except (sqlalchemy.exc.SQLAlchemyError, ImportError) as error:
        raise OSError(str(error)) from error


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}-lock")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a sqlite store; processes on this machine take turns, and one that is killed gives it back.

    Raises:
        ResourceError: Another process holds it for minutes, or its file cannot be opened.
    """
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(_lock_path(path), timeout=_CREATION_S):
            yield
    except Timeout as error:
        raise ResourceError(
            f"{_lock_path(path)}: another process has held this lock for {_CREATION_S:.0f} s; end it"
        ) from error
    except OSError as error:
        raise _unusable(sqlite_uri(path), error) from error
