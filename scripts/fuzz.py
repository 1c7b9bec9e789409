"""Damages run folders and configurations at random and looks at them: no case may be a bug, run long or grow large.

A case copies a finished run, spoils one of its files (bytes, cuts, JSON and YAML values, a link, a pipe, a hole) and
calls a command; or it spoils a preset's text and calls ``run --dry-run``. The seed makes the cases; a case is repeated
by its number alone.

    .venv/bin/python scripts/fuzz.py --cases 2000 --seed 1
    .venv/bin/python scripts/fuzz.py --only 1234 --seed 1
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedsweep.api import load_model
from fedsweep.cli import explain, main
from fedsweep.config.presets import list_presets

MOST_CPU_S, MOST_MB, LONGEST_LINE = 10.0, 1000.0, 500
TINY = """
name: tiny
scenario: {clients: 4, partition: {kind: iid}}
training: {rounds: 2, cohort_size: 2, local_steps: 1}
runtime: {backend: local}
tracking: {uri: none}
"""
FILES = ("config.yaml", "result.json", "rounds.parquet", "clients.parquet", "model.safetensors")
LONG, CONTROL = "x" * 10_000, "\x1b[31m"
VALUES: tuple[Any, ...] = (None, True, -1, 0, 10**30, 1e308, "", LONG, [], [None], {}, {"a": [1]}, CONTROL, ":")
TEXTS = (
    b"!!bool maybe",
    b"*a",
    b"&a [*a]",
    b"[" * 200,
    b"{",
    b"\x00",
    b"\xff\xfe",
    b"0x" + b"f" * 5000,
    b"\\UFFFFFFFF",
)


def bytes_changed(data: bytes, draw: random.Random) -> bytes:
    """Flips, holes, cuts and foreign pieces."""
    kind = draw.randrange(4)
    place = draw.randrange(len(data) + 1)
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + draw.choice(TEXTS) + data[place:]
    if kind == 2:
        return data[:place] + bytes(draw.randrange(1, 200)) + data[place + draw.randrange(200) :]
    changed = bytearray(data)
    for _ in range(draw.randrange(1, 20)):
        if changed:
            changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def json_changed(data: bytes, draw: random.Random) -> bytes:
    """Another value for one of the keys."""
    tree = json.loads(data)
    tree[draw.choice(sorted(tree))] = draw.choice(VALUES)
    return json.dumps(tree).encode()


def lines_changed(data: bytes, draw: random.Random) -> bytes:
    """Another value in one of the lines, or a line twice, or one less."""
    lines = data.decode("utf-8", "replace").splitlines()
    place = draw.randrange(len(lines))
    key = lines[place].partition(":")[0]
    choices = [[f"{key}: {json.dumps(draw.choice(VALUES))}"], [lines[place]] * 2, []]
    lines[place : place + 1] = draw.choice(choices)
    return "\n".join(lines).encode()


def spoil(path: Path, draw: random.Random) -> None:
    """One of the files of a run."""
    data = path.read_bytes()
    odd: list[Callable[[], Any]] = [
        lambda: path.symlink_to("/dev/zero"),
        lambda: os.mkfifo(path),
        path.mkdir,
        lambda: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**40),
        lambda: None,
    ]
    if draw.random() < 0.15:
        path.unlink()
        draw.choice(odd)()
        return
    special = {"config.yaml": lines_changed, "result.json": json_changed}.get(path.name, bytes_changed)
    path.write_bytes(draw.choice([special, bytes_changed])(data, draw))


def look(words: list[str]) -> tuple[int, str]:
    """Exit code and standard error of a command, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, err.getvalue()


def load(folder: Path) -> tuple[int, str]:
    """The same for ``load_model``."""
    try:
        load_model(folder)
    except Exception as error:
        said, code = explain(error)
        return code, f"error: {said}\n"
    return 0, ""


def play(case: int, seed: int, finished: Path, scratch: Path) -> tuple[str, int, str]:
    """A case: what was called, its exit code and what it said."""
    draw = random.Random(f"{seed} {case}")
    folder = scratch / "case"
    shutil.rmtree(folder, ignore_errors=True)
    if draw.random() < 0.5:
        preset = draw.choice(list_presets()).path
        text = draw.choice([lines_changed, bytes_changed])(preset.read_bytes(), draw)
        folder.mkdir()
        (folder / "case.yaml").write_bytes(text)
        words = ["run", str(folder / "case.yaml"), "--dry-run", "--out", str(scratch / "never")]
        return "run --dry-run", *look([*words, "--set", "runtime.backend=local", "--set", "tracking.uri=none"])
    shutil.copytree(finished, folder)
    name = draw.choice(FILES)
    spoil(folder / name, draw)
    command = draw.choice(["compare", "report", "load_model"])
    if command == "load_model":
        return f"{command} {name}", *load(folder)
    more = ["--out", str(scratch / "page.html"), "--overwrite"] if command == "report" else []
    return f"{command} {name}", *look([command, str(folder), *more])


def peak_megabytes() -> float:
    """The most memory that this program held; getrusage's figure would start at that of whoever started it."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


def problems(code: int, said: str, *, cpu_s: float, scratch: Path) -> list[str]:
    """What is not as it must be."""
    found = []
    if code not in (0, 2) or "this is a bug" in said or "Traceback" in said:
        found.append(f"exit code {code}")
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    if code == 2 and (len(lines) != 1 or len(lines[0]) > LONGEST_LINE or not lines[0].isprintable()):
        found.append(f"{len(lines)} lines, of {max(map(len, lines), default=0)} characters")
    if cpu_s > MOST_CPU_S:
        found.append(f"{cpu_s:.1f} s of CPU")
    if (megabytes := peak_megabytes()) > MOST_MB:
        found.append(f"{megabytes:.0f} MB")
    if (scratch / "never").exists():
        found.append("something was written")
    return found


def fuzz() -> int:
    """Plays the cases; 1 where one has a problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--only", type=int)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    bad = 0
    codes: collections.Counter[int] = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="fedsweep-fuzz-") as place:
        scratch = Path(place)
        (scratch / "tiny.yaml").write_text(TINY)
        look(["run", str(scratch / "tiny.yaml"), "--out", str(scratch / "run"), "-q"])
        for case in [given.only] if given.only is not None else range(given.cases):
            began = time.process_time()
            called, code, said = play(case, given.seed, scratch / "run", scratch)
            codes[code] += 1
            found = problems(code, said, cpu_s=time.process_time() - began, scratch=scratch)
            if found or given.only is not None:
                bad += bool(found)
                print(f"case {case}: {called}: {'; '.join(found) or code}: {said.strip()[:300]!r}", flush=True)
    print(f"{sum(codes.values())} cases, seed {given.seed}, exit codes {dict(codes)}, {bad} with a problem")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(fuzz())
