"""Passwords stay out of configurations: these are written, printed, uploaded and handed on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from fedsweep.errors import ConfigError

_WAY_OUT = {
    "http": "leave it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment",
    "database": "leave the password out: databases take it from their own place (PGPASSWORD or ~/.pgpass; for MySQL"
    " ?read_default_file=), an MLflow server from MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
}


def check_no_credentials(tree: Any, key: str = "") -> None:
    """Refuse a configuration in which an address has a password, or an http address a user.

    Args:
        tree: Mappings, lists and scalars.
        key: The dotted key at which it stands.

    Raises:
        ConfigError: One has; the line names the key, and not what stands there.
    """
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            check_no_credentials(value, f"{key}.{name}" if key else str(name))
    elif isinstance(tree, list | tuple):
        for value in tree:
            check_no_credentials(value, key)
    elif isinstance(tree, str) and "://" in tree and (kind := _with_credentials(tree)):
        what = "a user or password" if kind == "http" else "a password"
        raise ConfigError(
            f"{key}: the address has {what} in it, which would be written into config.yaml and shown; {_WAY_OUT[kind]}"
        )


def _with_credentials(address: str) -> str | None:
    """The kind of an address with credentials in it (``http``, ``database``), or None."""
    scheme, _, rest = address.partition("://")
    # By hand where the address is malformed: a password may hold any of its separators.
    try:
        query = urlsplit(address).query
    except ValueError:
        query = rest.partition("?")[2]
    user = rest.partition("?")[0].rpartition("@")[0] if "@" in rest.partition("?")[0] else ""
    if scheme.lower() in ("http", "https"):
        return "http" if user else None
    has_password = ":" in user or any("passw" in name.lower() for name, _ in parse_qsl(query))
    return "database" if has_password else None
