"""Kills processes of runs at random moments and goes on with the runs, until each has ended.

Each trial is a run of 15 rounds on Ray. One of its processes (driver, server actor, a client actor, raylet, GCS server)
is killed by SIGKILL at a moment drawn by the clock, once to three times; whenever the command ends, it is called again
with --resume. In the end the model must be the undisturbed run's, each round and each MLflow point there once, no
message a bug, and each last line fedsweep's own.

    .venv/bin/python scripts/storm.py --trials 100 --seed 1
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pyarrow.parquet as pq

ROUNDS = 15
CONFIG = """
name: storm
scenario: {clients: 8}
training: {rounds: 15, cohort_size: 4, local_steps: 40, optimizer: {momentum: 0.9}, optimizer_state: persist}
method: {name: fedavg}
checkpoint: {every: 2}
runtime: {backend: ray, client_actors: 2}
"""
# What a process's command line begins with; the driver is the process that was started.
TARGETS = {
    "driver": "",
    "server actor": "ray::ServerActor",
    "client actor": "ray::ClientActor",
    "raylet": "raylet/raylet",
    "GCS server": "gcs/gcs_server",
}
LONGEST_S = 300.0


@dataclass
class Outcome:
    """What came of a trial.

    Attributes:
        kills: What was killed, with the exit code of the command that it hit.
        problems: What was not as it must be.
    """

    kills: list[tuple[str, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def start(words: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Starts the command; what it says is added to the log."""
    with log.open("ab") as file:
        command = [sys.executable, "-m", "fedsweep", "run", *words]
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def processes(driver: int, target: str) -> list[psutil.Process]:
    """Those of a run that are called so."""
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(driver)
        if target == "driver":
            return [root]
        found = []
        for process in root.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if TARGETS[target] in " ".join(process.cmdline()[:1]):
                    found.append(process)
        return found
    return []


def kill_at_random(process: subprocess.Popen[bytes], target: str, draw: random.Random) -> bool:
    """Waits until such a process is there, then for a while, then kills it; whether the run was still going on."""
    deadline = time.monotonic() + LONGEST_S
    while process.poll() is None and time.monotonic() < deadline:
        if processes(process.pid, target):
            time.sleep(draw.uniform(0.0, 12.0))
            victims = processes(process.pid, target)
            if process.poll() is not None or not victims:
                return False
            with contextlib.suppress(psutil.Error):
                draw.choice(victims).kill()
                return True
        time.sleep(0.05)
    return False


def play(folder: Path, draw: random.Random, targets: list[str]) -> Outcome:
    """One trial."""
    outcome = Outcome()
    (folder / "storm.yaml").write_text(CONFIG)
    words = [str(folder / "storm.yaml"), "--out", str(folder / "run")]
    log = folder / "log"
    while True:
        process = start(words, log)
        target = targets.pop(0) if targets else None
        hit = kill_at_random(process, target, draw) if target else False
        try:
            code = process.wait(timeout=LONGEST_S)
        except subprocess.TimeoutExpired:
            process.kill()
            outcome.problems.append(f"hung after {target}")
            return outcome
        if hit and target:
            outcome.kills.append((target, code))
        check_words(log, code, outcome)
        if code == 0:
            return outcome
        # 2: the cluster lost a process before anything was begun, so the machine could not give what was asked for.
        if code not in (1, 2, -9) or (not hit and code != 0):
            outcome.problems.append(f"exit code {code} after {target if hit else 'nothing'}")
            return outcome
        if (folder / "run" / "config.yaml").is_file():
            words = ["--resume", str(folder / "run")]


def check_words(log: Path, code: int, outcome: Outcome) -> None:
    """Whether the user was told what happened, and what to do."""
    text = log.read_text(errors="replace")
    last = (text.strip().splitlines() or [""])[-1]
    if "this is a bug" in text or "Traceback" in text:
        outcome.problems.append("a bug or a traceback")
    if code == 1 and not (last.startswith("error: ") and "--resume" in last):
        outcome.problems.append(f"last line: {last[:150]}")
    if code == 2 and not last.startswith("error: "):
        outcome.problems.append(f"last line: {last[:150]}")


def check_end(folder: Path, whole: Path, outcome: Outcome) -> None:
    """Compares with the undisturbed run."""
    if model(folder) != model(whole):
        outcome.problems.append("another model")
    if pq.read_table(folder / "run" / "rounds.parquet").column("round").to_pylist() != list(range(1, ROUNDS + 1)):
        outcome.problems.append("rounds missing or twice")
    if points(folder) != points(whole):
        outcome.problems.append("MLflow points lost or doubled")


def model(folder: Path) -> str:
    """The hash of the final model."""
    return str(json.loads((folder / "run" / "result.json").read_text())["model_sha256"])


def points(folder: Path) -> tuple[list[str], collections.Counter[tuple[str, int]]]:
    """Statuses of the runs, and how often each metric has each step."""
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as base:
        statuses = [status for (status,) in base.execute("SELECT status FROM runs")]
        return statuses, collections.Counter(base.execute("SELECT key, step FROM metrics").fetchall())


def main() -> int:
    """Runs the storm; 1 where something was not as it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--targets", default=",".join(TARGETS), help="what is killed, comma-separated")
    parser.add_argument("--most-kills", type=int, default=3, help="in one trial")
    given = parser.parse_args()
    names = given.targets.split(",")
    print(f"seed {given.seed}", flush=True)
    bad = 0
    codes: collections.Counter[tuple[str, int]] = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="fedsweep-storm-") as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        play(whole, random.Random(0), [])
        for trial in range(given.trials):
            draw = random.Random(f"{given.seed} {trial}")
            folder = Path(scratch) / str(trial)
            folder.mkdir()
            first = names[trial % len(names)]
            more = [draw.choice(names) for _ in range(draw.randint(0, given.most_kills - 1))]
            outcome = play(folder, draw, [first, *more])
            if not outcome.problems:
                check_end(folder, whole, outcome)
            codes.update(outcome.kills)
            bad += bool(outcome.problems)
            said = "; ".join(outcome.problems) or "identical"
            print(f"trial {trial}: {outcome.kills}: {said}", flush=True)
            if outcome.problems:
                print((folder / "log").read_text(errors="replace")[-3000:], flush=True)
    for (target, code), count in sorted(codes.items()):
        print(f"{target} killed, exit code {code}: {count}")
    print(
        f"{given.trials - bad} of {given.trials} trials as they must be, {sum(codes.values())} kills, seed {given.seed}"
    )
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
