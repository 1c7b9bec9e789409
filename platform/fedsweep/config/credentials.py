"""Passwords stay out of configurations: these are written, printed, uploaded and handed on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

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
    """Return the kind of an address with credentials in it (``http``, ``database``), or None."""
    scheme, _, rest = address.partition("://")
    host = re.split(r"[/?#]", rest, maxsplit=1)[0]
    # Unquoted, a password may hold what ends a host; then a word stands where a port belongs.
    is_cut = "@" in rest and re.search(r":(?!\d*$)[^\]]*$", host) is not None
    if scheme.lower() in ("http", "https"):
        return "http" if "@" in host or is_cut else None
    names = [name.lower() for name, _ in parse_qsl(rest.partition("?")[2])]
    has_password = ":" in host.rpartition("@")[0] or is_cut or any("passw" in name for name in names)
    return "database" if has_password else None
