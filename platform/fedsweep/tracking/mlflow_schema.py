"""Whether a sqlite store is in order, without MLflow, which takes long to import."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sqlite3
from pathlib import Path

_REVISION = re.compile(r"^revision\b[^=\n]*=\s*[\"'](\w+)", re.MULTILINE)
_FOLLOWS = re.compile(r"^down_revision\b[^=\n]*=\s*[\"'](\w+)", re.MULTILINE)


def is_in_order(path: Path, experiment: str | None) -> bool:
    """Whether that is certain; whatever is out of the ordinary is left to MLflow to judge."""
    ours = _schema_version()
    try:
        with contextlib.closing(sqlite3.connect(path)) as connection:
            theirs = [row[0] for row in connection.execute("SELECT version_num FROM alembic_version")]
            deleted = "SELECT count(*) FROM experiments WHERE name = ? AND lifecycle_stage <> 'active'"
            return theirs == [ours] and connection.execute(deleted, (experiment,)).fetchone() == (0,)
    except sqlite3.Error:
        return False


def _schema_version() -> str | None:
    """The newest migration of the installed MLflow, which no other one follows; None where that is not clear."""
    package = importlib.util.find_spec("mlflow")
    places = [] if package is None else package.submodule_search_locations or []
    texts = [
        file.read_text(encoding="utf-8")
        for place in places
        for file in Path(place).glob("store/db_migrations/versions/*.py")
    ]
    all_of_them = {found[1] for text in texts if (found := _REVISION.search(text))}
    followed = {found[1] for text in texts if (found := _FOLLOWS.search(text))}
    newest = all_of_them - followed
    return newest.pop() if len(newest) == 1 else None
