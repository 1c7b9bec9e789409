"""Kills processes of runs and sweeps at random moments and goes on with them, until each has ended.

Each trial is a run of 12 rounds on Ray, with --sweeps a sweep of four runs. One of its processes (driver, server actor
or sweep trial, a client actor, raylet, GCS server) is killed by SIGKILL, once to three times, at a moment drawn by the
clock or, half of the times, by the round; whenever the command ends, it is called again with --resume. In the end
the models must be those of the undisturbed run in one process, each round and each MLflow point there once, no message
a bug, and each last line fedsweep's own.

    .venv/bin/python scripts/storm.py --trials 100 --seed 1
    .venv/bin/python scripts/storm.py --trials 10 --seed 1 --sweeps
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
import pyarrow.parquet as pq

ROUNDS = 12
CONFIG = """
name: storm
scenario: {clients: 8}
training: {rounds: 12, cohort_size: 4, local_steps: 100, optimizer: {momentum: 0.9}, optimizer_state: persist}
method: {name: fedavg}
checkpoint: {every: 2}
runtime: {backend: ray, client_actors: 2}
"""
SWEEP = """
runtime: {backend: ray, client_actors: 1}
sweep: {space: {seed: {grid: [0, 1]}, method.name: {grid: [fedavg, fedsgd]}}}
"""
# What a process's command line begins with; the driver is the process that was started.
TARGETS = {
    "driver": "",
    "server actor": "ray::ServerActor",
    "client actor": "ray::ClientActor",
    "raylet": "raylet/raylet",
    "GCS server": "gcs/gcs_server",
}
SWEEP_TARGETS = {"sweep trial" if name == "server actor" else name: begin for name, begin in TARGETS.items()}
SWEEP_TARGETS["sweep trial"] = "ray::SweepTrial"
LONGEST_S = 300.0
# So long after it was seen a process is killed at most: the driver is there first. By the round: after the round.
LATEST_S, LATEST_BY_ROUND_S = {"driver": 20.0}, 0.3


@dataclass
class Outcome:
    """What came of a trial.

    Attributes:
        kills: What was killed, with the exit code of the command that it hit.
        problems: What was not as it must be.
    """

    kills: list[tuple[str, int]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Storm:
    """What is run and killed.

    Attributes:
        command: ``run`` or ``sweep``.
        config: The configuration's text.
        targets: What may be killed, and how its command line begins.
        latest_s: So long after it was seen a process is killed at most; 10 s, or the driver 20 s, by default.
    """

    command: str
    config: str
    targets: dict[str, str]
    latest_s: float | None = None

    def start(self, words: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Starts the command; what it says is added to the log."""
        with log.open("ab") as file:
            command = [sys.executable, "-m", "fedsweep", self.command, *words]
            return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

    def resumed(self, out: Path) -> list[str]:
        """The words after the command that go on with it; without a plan or a configuration it begins anew."""
        if not any((out / name).is_file() for name in ("config.yaml", "sweep.json")):
            return self.begun(out)
        return ["--resume", str(out)] if self.command == "run" else ["--resume", "--out", str(out)]

    def begun(self, out: Path) -> list[str]:
        """The words after the command that begin with it."""
        return [str(out.parent / "storm.yaml"), "--out", str(out)]

    def processes(self, driver: int, target: str) -> list[psutil.Process]:
        """Those that are called so."""
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(driver)
            if target == "driver":
                return [root]
            found = []
            for process in root.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if self.targets[target] in " ".join(process.cmdline()[:1]):
                        found.append(process)
            return found
        return []

    def kill_at_random(self, process: subprocess.Popen[bytes], target: str, draw: random.Random, log: Path) -> bool:
        """Waits until such a process is there, then for a while, then kills it; whether it was still going on."""
        deadline, said = time.monotonic() + LONGEST_S, log.stat().st_size
        after = draw.choice([0, draw.randrange(1, ROUNDS)]) if self.command == "run" else 0
        latest_s = LATEST_BY_ROUND_S if after else self.latest_s or LATEST_S.get(target, 10.0)
        while process.poll() is None and time.monotonic() < deadline:
            if last_round(log, said) >= after and self.processes(process.pid, target):
                time.sleep(draw.uniform(0.0, latest_s))
                victims = self.processes(process.pid, target)
                if process.poll() is not None or not victims:
                    return False
                with contextlib.suppress(psutil.Error):
                    draw.choice(victims).kill()
                    return True
            time.sleep(0.1)
        return False

    def play(self, folder: Path, draw: random.Random, targets: list[str]) -> Outcome:
        """A trial in a folder: from the first call to the end, with kills of these on the way."""
        outcome = Outcome()
        (folder / "storm.yaml").write_text(self.config)
        log, out = folder / "log", folder / "run"
        words = self.begun(out)
        while True:
            process = self.start(words, log)
            target = targets.pop(0) if targets else None
            hit = self.kill_at_random(process, target, draw, log) if target else False
            try:
                code = process.wait(timeout=LONGEST_S)
            except subprocess.TimeoutExpired:
                process.kill()
                outcome.problems.append(f"hung after {target}")
                return outcome
            time.sleep(0.5)  # where Ray ends the driver from within C++, the last word is another process's
            if hit and target:
                outcome.kills.append((target, code))
            check_words(log, code, outcome)
            if code == 0:
                return outcome
            # 2: the cluster lost a process before anything was begun, so the machine could not give what was asked for.
            if code not in (1, 2, -9) or (not hit and code != 0):
                outcome.problems.append(f"exit code {code} after {target if hit else 'nothing'}")
                return outcome
            words = self.resumed(out)


def last_round(log: Path, begin: int) -> int:
    """The last round that was told of, beyond so many bytes of a log; 0 before the first."""
    rounds = re.findall(rb"^round +(\d+)/", log.read_bytes()[begin:], re.MULTILINE)
    return int(rounds[-1]) if rounds else 0


def check_words(log: Path, code: int, outcome: Outcome) -> None:
    """Whether the user was told what happened, and what to do."""
    text = log.read_text(errors="replace")
    last = (text.strip().splitlines() or [""])[-1]
    if "this is a bug" in text or "Traceback" in text:
        outcome.problems.append("a bug or a traceback")
    if code == 1 and not (last.startswith("error: ") and ("--resume" in last or last.endswith("; try again"))):
        outcome.problems.append(f"last line: {last[:150]}")
    if code == 2 and not last.startswith("error: "):
        outcome.problems.append(f"last line: {last[:150]}")


def check_end(folder: Path, whole: Path, outcome: Outcome) -> None:
    """Compares with the undisturbed one."""
    if models(folder) != models(whole):
        outcome.problems.append("another model")
    for table in [path.with_name("rounds.parquet") for path in results_of(folder / "run")]:
        if pq.read_table(table).column("round").to_pylist() != list(range(1, ROUNDS + 1)):
            outcome.problems.append(f"rounds missing or twice in {table.parent.name}")
    if points(folder) != points(whole):
        outcome.problems.append("MLflow points lost or doubled")


def results_of(run: Path) -> list[Path]:
    """The result of a run, or those of a sweep's trials."""
    return sorted(run.glob("0*/result.json")) or [run / "result.json"]


def models(folder: Path) -> dict[str, str]:
    """The hashes of the final models."""
    return {path.parent.name: str(json.loads(path.read_text())["model_sha256"]) for path in results_of(folder / "run")}


def points(folder: Path) -> tuple[list[str], collections.Counter[tuple[str, int]]]:
    """Statuses of the runs, and how often each metric has each step."""
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as base:
        statuses = [status for (status,) in base.execute("SELECT status FROM runs")]
        return statuses, collections.Counter(base.execute("SELECT key, step FROM metrics").fetchall())


def blow(storm: Storm, names: list[str], given: argparse.Namespace) -> list[Outcome]:
    """All trials."""
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="fedsweep-storm-") as scratch:
        whole = Path(scratch) / "whole"
        whole.mkdir()
        # In one process, whose bits those on Ray must have.
        calm = replace(storm, config=storm.config.replace("backend: ray", "backend: local"))
        calm.play(whole, random.Random(0), [])
        until = time.monotonic() + 60 * given.minutes
        for trial in range(given.first, given.first + given.trials):
            if time.monotonic() > until:
                break
            draw = random.Random(f"{given.seed} {trial}")
            folder = Path(scratch) / str(trial)
            folder.mkdir()
            more = [draw.choice(names) for _ in range(draw.randint(0, given.most_kills - 1))]
            outcome = storm.play(folder, draw, [names[trial % len(names)], *more])
            if not outcome.problems:
                check_end(folder, whole, outcome)
            outcomes.append(outcome)
            said = "; ".join(outcome.problems) or "identical"
            print(f"trial {trial}: {outcome.kills}: {said}", flush=True)
            if outcome.problems:
                print((folder / "log").read_text(errors="replace")[-3000:], flush=True)
    return outcomes


def main() -> int:
    """Runs the storm; 1 where something was not as it must be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first trial's number, to go on with a storm")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="no trial is begun after so many")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--sweeps", action="store_true", help="sweeps instead of runs")
    parser.add_argument("--targets", help="what is killed, comma-separated; by default all")
    parser.add_argument("--most-kills", type=int, default=3, help="in one trial")
    parser.add_argument("--latest", type=float, help="so many seconds after it was seen a process is killed at most")
    given = parser.parse_args()
    storm = Storm("run", CONFIG, TARGETS, given.latest)
    if given.sweeps:
        kept = [line for line in CONFIG.splitlines() if not line.startswith("runtime")]
        storm = Storm("sweep", "\n".join(kept) + SWEEP, SWEEP_TARGETS, given.latest)
    names = given.targets.split(",") if given.targets else list(storm.targets)
    print(f"seed {given.seed}", flush=True)
    outcomes = blow(storm, names, given)
    codes = collections.Counter(kill for outcome in outcomes for kill in outcome.kills)
    for (target, code), count in sorted(codes.items()):
        print(f"{target} killed, exit code {code}: {count}")
    bad = sum(bool(outcome.problems) for outcome in outcomes)
    print(f"{len(outcomes) - bad} of {len(outcomes)} trials as they must be, {codes.total()} kills, seed {given.seed}")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
