"""fedsweep's side: rounds of a run as ``fedsweep run`` plays them, folder and server actor included; or all of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fedsweep.bench.setup import Figure, Request, in_turns
from fedsweep.config.load import load_config
from fedsweep.driver.backend import cluster_for
from fedsweep.driver.plan import Plan
from fedsweep.driver.run import Session, open_session, plan_run
from fedsweep.errors import RunError
from fedsweep.experiment.checks import check_experiment
from fedsweep.processes import scratch_folder
from fedsweep.runs.folder_lock import sole_writer
from fedsweep.runs.run_folder import RunFolder
from fedsweep.world.data.datasets import Dataset

# More than any benchmark plays: neither evaluation nor checkpoint falls into what is timed.
_NEVER = 1_000_000


def plan_of(sections: Mapping[str, Any], dataset: Dataset) -> Plan:
    """Plan the run of a set-up's configuration.

    Args:
        sections: ``scenario``, ``model``, ``method``, ``training`` and ``runtime``, as in a file; clients are split
            alike, rounds never end, and nothing is tested, checkpointed or tracked, unless it says so.
        dataset: What the clients train on.
    """
    scenario = {"dataset": dataset.name, "partition": {"kind": "iid"}, **sections["scenario"]}
    training = {"rounds": _NEVER, **sections["training"]}
    quiet = {"evaluation": {"every": _NEVER}, "checkpoint": {"every": _NEVER}, "tracking": {"uri": "none"}}
    tree = {"name": "bench", **quiet, **sections, "scenario": scenario, "training": training}
    return plan_run(load_config(tree), dataset)


class Player:
    """A run that is under way.

    Args:
        session: Open.

    Attributes:
        accuracy: The last test accuracy; None before a first test.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.accuracy: float | None = None

    def play(self, rounds: int) -> float:
        """Return seconds of so many further rounds."""
        began = time.perf_counter()
        for _ in range(rounds):
            step = self._session.step()
            if step.record is None or step.stopped_by is not None:
                raise RunError(f"the benchmark's run ended early: {step.stopped_by}")
            if step.record.test_accuracy is not None:
                self.accuracy = step.record.test_accuracy
        return time.perf_counter() - began


@contextlib.contextmanager
def playing(plan: Plan) -> Iterator[Player]:
    """Prepare a run for its first round, with the cluster that it needs; ended afterwards.

    Ray makes its workers give way to other processes (niceness 15): beside plain processes that would be measured, and
    on a busy machine nothing else. Here they do not.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")
    check_experiment(plan.experiment)
    with scratch_folder() as scratch:
        folder = scratch / "run"
        with sole_writer(folder), cluster_for(plan, folder):
            RunFolder.create(folder, overwrite=False)
            with open_session(plan, folder) as session:
                session.open(resume=False)
                yield Player(session)


def beside(plain: Callable[[int], float], plan: Plan, request: Request, *, rounds: int, **fields: Any) -> Figure:
    """Time rounds of a run in turns with those of a plain loop, which returns its seconds; ``fields`` of the figure."""
    with playing(plan) as ours:
        return in_turns(lambda: ours.play(rounds), lambda: plain(rounds), request.repeats, **fields)


def whole_command(tree: Mapping[str, Any]) -> tuple[float, Mapping[str, Any]]:
    """Time ``fedsweep run`` in a process of its own and an empty folder; also returns its ``result.json``.

    Raises:
        RunError: It failed.
    """
    with scratch_folder() as folder:
        source, out = folder / "bench.yaml", folder / "runs" / "run"
        source.write_text(json.dumps(tree), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "fedsweep", "run", str(source), "--out", str(out), "--quiet"]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - began
        if done.returncode:
            raise RunError(f"fedsweep run ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        return seconds, RunFolder(out).read_result()
