"""``fedsweep doctor``: whether this machine can run experiments, and what is missing where it can't."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from fedsweep.commands.terminal.options import examples
from fedsweep.errors import ConfigError

EXAMPLES = examples("fedsweep doctor", "fedsweep doctor --clear", "fedsweep doctor --gpu --json gpu.json")

_LEAST_DISK_GB, _LEAST_SHM_MB = 1.0, 200
# The main job, small: a few clients, two rounds.
_TINY = {
    "name": "doctor",
    "scenario": {"clients": 4},
    "training": {"rounds": 2, "cohort_size": 2},
    "runtime": {"backend": "local"},
    "tracking": {"uri": "none"},
}


class Problem(Exception):
    """An obstacle to the main job, and the way out."""


def doctor(
    clear: Annotated[
        bool, typer.Option("--clear", metavar="", help="First remove what Ray left of runs that are over.")
    ] = False,
    gpu: Annotated[
        bool,
        typer.Option("--gpu", metavar="", help="Instead try each network on the GPU: the loop, lanes, recorded steps."),
    ] = False,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="With [b]--gpu[/b]: also write all that is known.")
    ] = None,
) -> None:
    """Check this machine: versions, GPUs, data sets, disk and memory, and two rounds of a tiny experiment.

    Exit code 1, with the problem's name, where experiments can't run here; with --gpu, where a network can't.
    """
    if json is not None and not gpu:
        raise ConfigError("--json belongs to --gpu; add it")
    if clear:
        from fedsweep.fleet.ray_leftovers import dead_sessions, remove_session

        for folder in dead_sessions():
            remove_session(folder)
            print(f"removed  {folder}", flush=True)
    if gpu:
        from fedsweep.commands.running.device import try_device

        raise typer.Exit(try_device("cuda", json))
    problems = 0
    for name, check in _CHECKS.items():
        try:
            print(f"ok       {name}: {check()}", flush=True)
        except Problem as problem:
            problems += 1
            print(f"PROBLEM  {name}: {problem}", flush=True)
    if problems:
        print(f"{problems} {'problem' if problems == 1 else 'problems'}: experiments can't run here as things are")
        raise typer.Exit(1)
    print("all is well: try fedsweep run quickstart/dynamicfl")


def _python() -> str:
    return f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} CPUs"


def _imported(name: str) -> str:
    try:
        importlib.import_module(name)
        return metadata.version(name)
    except Exception as error:  # a broken library raises anything when it is imported
        reason = str(error).strip().partition("\n")[0]
        raise Problem(f"cannot be imported ({type(error).__name__}: {reason}); install fedsweep again") from error


def _torch() -> str:
    version = _imported("torch")
    import torch

    return f"{version}, {torch.get_num_threads()} threads"


def _torchvision() -> str:
    from fedsweep.world.data.torchvision_compat import import_torchvision, imports_alone

    try:
        import_torchvision()
    except Exception as error:  # as above
        raise Problem(f"cannot be imported ({error}); install the release that fits torch") from error
    version = metadata.version("torchvision")
    if imports_alone():
        return version
    return (
        f"{version}, but a plain import of it fails beside this torch: fedsweep gets round that, a module of your own"
        " would not; install the build that belongs to torch's"
    )


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none; experiments run on the CPUs"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _data_sets() -> str:
    from fedsweep.world.data.datasets import DATASETS, default_root, is_present

    there = [name for name in DATASETS if is_present(name, root=None)]
    return f"{', '.join(there)} (in {default_root()}; others are downloaded there, or set scenario.root)"


def _disk() -> str:
    free_gb = shutil.disk_usage(Path.cwd()).free / 1e9
    if free_gb < _LEAST_DISK_GB:
        raise Problem(f"{free_gb:.2f} GB free in {Path.cwd()}; make room, or use --out on another disk")
    return f"{free_gb:.0f} GB free in {Path.cwd()}"


def _shared_memory() -> str:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return "no /dev/shm; Ray keeps its objects in /tmp"
    total, _, free = shutil.disk_usage(folder)
    if free < _LEAST_SHM_MB * 1e6:
        raise Problem(
            f"/dev/shm has {free / 1e6:.0f} MB free, and Ray needs {_LEAST_SHM_MB}; in a container: --shm-size=2g"
        )
    return f"{free / 1e9:.1f} of {total / 1e9:.1f} GB free in /dev/shm"


def _leftovers() -> str:
    from fedsweep.fleet.ray_leftovers import dead_sessions

    sessions = dead_sessions()
    if not sessions:
        return "no folders of runs that are over"
    return (
        f"{len(sessions)} folders of runs that are over, in {sessions[0].parent}; fedsweep doctor --clear removes them"
    )


def _permission() -> str:
    try:
        with tempfile.NamedTemporaryFile(dir=Path.cwd(), prefix=".fedsweep-doctor-"):
            return f"{Path.cwd()} can be written"
    except OSError as error:
        raise Problem(f"{Path.cwd()} cannot be written ({error.strerror}); use --out elsewhere") from error


def _main_job() -> str:
    began = time.perf_counter()
    try:
        from fedsweep.config.load import load_config
        from fedsweep.driver.run import plan_run, run_plan
        from fedsweep.processes import scratch_folder

        with scratch_folder() as scratch:
            result = run_plan(plan_run(load_config(_TINY)), scratch / "run")
    except Exception as error:  # whatever it is, it is what the user has to know
        raise Problem(f"two tiny rounds fail: {type(error).__name__}: {error}") from error
    return f"{result['rounds']} tiny rounds in {time.perf_counter() - began:.1f} s"


_CHECKS: dict[str, Callable[[], str]] = {
    "Python": _python,
    "torch": _torch,
    "torchvision": _torchvision,
    "Ray": partial(_imported, "ray"),
    "MLflow": partial(_imported, "mlflow"),
    "GPUs": _gpus,
    "data sets": _data_sets,
    "disk": _disk,
    "shared memory": _shared_memory,
    "permission": _permission,
    "Ray's leftovers": _leftovers,
    "main job": _main_job,
}
