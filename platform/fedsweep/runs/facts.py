"""What a result says of the machine and the sources that made it."""

from __future__ import annotations

import platform
import resource
import subprocess
from importlib import metadata
from typing import Any

from fedsweep import __version__

_VERSIONS_OF = ("torch", "torchvision", "numpy", "pyarrow", "ray", "mlflow")
_told: dict[str, str | None] = {}


def run_facts() -> dict[str, Any]:
    """What a result says of the software: ``versions`` by name (None: not installed) and ``git_commit`` or None.

    The commit is the current folder's: that of the user's own project where the run is started from one.
    """
    versions: dict[str, str | None] = {"python": platform.python_version(), "fedsweep": __version__}
    return {"versions": versions | {name: _version(name) for name in _VERSIONS_OF}, "git_commit": _git_commit()}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def tell_commit(commit: str | None) -> None:
    """Runs of this process, which may stand in any folder, were begun from one at this commit."""
    _told["git_commit"] = commit


def _git_commit() -> str | None:
    if "git_commit" in _told:
        return _told["git_commit"]
    return git_says("rev-parse", "--verify", "HEAD") or None


def git_says(*words: str) -> str | None:
    """What git answers in the current folder; None where that is no checkout, or git is not there."""
    try:
        answer = subprocess.run(["git", *words], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


def peak_memory_mb() -> float:
    """Greatest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
