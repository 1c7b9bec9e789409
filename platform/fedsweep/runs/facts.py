"""A result's facts on the machine and the sources that made it, its data, and its last test."""

from __future__ import annotations

import importlib.util
import platform
import resource
import subprocess
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from fedsweep import __version__
from fedsweep.experiment.experiment import Experiment
from fedsweep.records import RoundRecord
from fedsweep.runs.sources import LIBRARIES_THAT_COUNT

_VERSIONS_OF = ("torch", "torchvision", "numpy", "pyarrow", "ray", "mlflow")
_told: dict[str, str | None] = {}
_FOLDERS = ("fedsweep", "fedsweep.algorithms")


def run_facts() -> dict[str, Any]:
    """Return the software, for a result: ``versions`` by name (None: not installed) and ``git_commit``.

    The commit is that of the checkout in which fedsweep's sources lie, with ``-dirty`` where these are not as
    committed; None where fedsweep was installed from a wheel.
    """
    versions: dict[str, str | None] = {"python": platform.python_version(), "fedsweep": __version__}
    return {"versions": versions | {name: _version(name) for name in _VERSIONS_OF}, "git_commit": _git_commit()}


@cache  # a process has imported what it runs, and reading a version takes milliseconds
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def tell_commit(commit: str | None) -> None:
    """Set the commit that runs of this process are said to be of: the driver's, since a node may have no git."""
    _told["git_commit"] = commit


def _git_commit() -> str | None:
    if "git_commit" not in _told:  # once: what this process runs it has imported
        _told["git_commit"] = own_commit()
    return _told["git_commit"]


def own_commit() -> str | None:
    """Return the commit of fedsweep's own checkout, see :func:`run_facts`."""
    specs = [importlib.util.find_spec(name) for name in _FOLDERS]
    folders = [Path(place) for spec in specs if spec for place in spec.submodule_search_locations or ()]
    own = folders[0]
    # A wheel may be installed somewhere below a checkout of the user's, which does not track it.
    if _git_says("ls-files", "--error-unmatch", "__init__.py", folder=own) is None:
        return None
    commit = _git_says("rev-parse", "--verify", "HEAD", folder=own)
    changes = _git_says("status", "--porcelain", "--", *map(str, folders), folder=own)
    return commit and f"{commit}-dirty" if changes else commit


def _git_says(*words: str, folder: Path) -> str | None:
    """Return the answer of git in a folder; None where that is no checkout, or git is not there."""
    try:
        answer = subprocess.run(["git", *words], capture_output=True, text=True, timeout=5, check=True, cwd=folder)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip()


@cache
def cpu_name() -> str:
    """Return the CPU's name, with the vector units that torch's own kernels use: on another, last digits differ."""
    import torch

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{(named or [platform.processor() or platform.machine()])[0]}, {torch.backends.cpu.get_cpu_capability()}"


def computed_by() -> str:
    """Return what last digits depend on, in words: the CPU, and the libraries that compute."""
    return ", ".join([cpu_name(), *(f"{name} {_version(name)}" for name in LIBRARIES_THAT_COUNT)])


def peak_memory_mb() -> float:
    """Return greatest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def data_facts(experiment: Experiment) -> dict[str, Any]:
    """Return what a model is made for beside its inputs' shape: as ever where pictures are classified."""
    data = experiment.world.data
    if data.learned.has_classes and data.images.ndim == 4:
        return {"num_classes": data.num_classes}
    inputs = data.images.dtype
    return {
        "input_types": inputs.str if inputs.names is None else inputs.descr,
        "num_classes": data.learned.num_classes,
        "target_shape": [int(size) for size in data.learned.target_shape],
    }


def test_figures(experiment: Experiment, records: Sequence[RoundRecord]) -> dict[str, Any]:
    """Return the last test's figures of the task, the leading one first; nothing where samples are classified."""
    task = experiment.world.data.learned
    tested = [record.extra for record in records if all(name in record.extra for name in task.measures)]
    if task.has_classes or not tested:
        return {}
    return {"test_figures": {name: tested[-1][name] for name in task.measures}}
