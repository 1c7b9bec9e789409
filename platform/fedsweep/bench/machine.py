"""The machine that is measured on: what it is, and whether others use it."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

from fedsweep.runs.facts import cpu_name, run_facts

# CPUs that others may use while figures are still judged.
MOST_LOAD_CPUS = 0.2
_LOOK_S, _LOOKS = 1.0, 3


def machine_facts(device: str) -> dict[str, Any]:
    """CPU, cores, memory, torch's threads, versions, commit and GPU, as they go into the JSON."""
    import psutil
    import torch

    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "system": platform.platform(),
        "torch_threads": torch.get_num_threads(),
        "device": device,
        "gpu": torch.cuda.get_device_name(0) if device == "cuda" else None,
    }
    software = run_facts()
    commit = software["git_commit"]
    return {**facts, **software, "git_changed": None if commit is None else commit.endswith("-dirty")}


def load_of_others() -> float:
    """Measure the CPUs that other processes use now, on average: the least of a few looks; any machine hiccups."""
    import psutil

    psutil.cpu_percent()
    loads = []
    for _ in range(_LOOKS):
        time.sleep(_LOOK_S)
        loads.append(psutil.cpu_percent() / 100 * (os.cpu_count() or 1))
        if loads[-1] <= MOST_LOAD_CPUS:
            break
    return min(loads)
