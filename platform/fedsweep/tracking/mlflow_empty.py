"""An MLflow store without runs, kept in the user's cache and copied where a store is not there yet.

MLflow makes a store by all migrations since its first version, a second's work; a run of some rounds takes less.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import sqlite3
import time
from functools import cache
from pathlib import Path

from fedsweep.world.data.files import default_root

# In MLflow's migrations: what each is called, and which it follows.
_REVISION = re.compile(r"^revision\b[^=\n]*=\s*[\"'](\w+)", re.MULTILINE)
_FOLLOWS = re.compile(r"^down_revision\b[^=\n]*=\s*[\"'](\w+)", re.MULTILINE)


@cache
def schema_version() -> str | None:
    """Return the newest migration of the installed MLflow, which no other follows; None where that is not clear."""
    package = importlib.util.find_spec("mlflow")
    places = (package.submodule_search_locations if package else None) or []
    files = [file for place in places for file in Path(place).glob("store/db_migrations/versions/*.py")]
    texts = [file.read_text(encoding="utf-8") for file in files]
    followed = {match[1] for text in texts if (match := _FOLLOWS.search(text))}
    newest = {match[1] for text in texts if (match := _REVISION.search(text))} - followed
    return newest.pop() if len(newest) == 1 else None


def has_schema(connection: sqlite3.Connection) -> bool:
    """Check that a store is of the installed MLflow's version."""
    return [row[0] for row in connection.execute("SELECT version_num FROM alembic_version")] == [schema_version()]


def copy_empty_store(path: Path) -> bool:
    """Copy the empty store that the installed MLflow has made before to a file; False where there is none."""
    place = _place()
    with contextlib.suppress(OSError, sqlite3.Error):
        if place is not None and place.is_file():
            shutil.copyfile(place, path)
            with contextlib.closing(sqlite3.connect(path)) as connection:
                if has_schema(connection):
                    return True
    path.unlink(missing_ok=True)
    return False


def keep_empty_store(path: Path) -> None:
    """Keep a copy of a store that MLflow has just made; where the cache can't be written, the next is made again."""
    place = _place()
    if place is None:
        return
    new = place.with_name(f"{place.name}-new-{os.getpid()}-{time.time_ns()}")
    with contextlib.suppress(OSError, sqlite3.Error):
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.copyfile(path, new)
            with contextlib.closing(sqlite3.connect(new)) as connection, connection:
                # MLflow makes its default experiment where there is none, and notes the folder that it then stands in.
                connection.execute("DELETE FROM experiments")
            new.replace(place)
        finally:
            new.unlink(missing_ok=True)


def _place() -> Path | None:
    version = schema_version()
    return None if version is None else default_root() / f"mlflow-{version}.db"
