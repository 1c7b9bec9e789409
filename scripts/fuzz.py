"""Damages run folders and configurations at random and looks at them: no case may be a bug, run long or grow large.

A case copies a finished run, alone or as a sweep's trial, spoils up to three of its files (bytes, cuts, values at any
depth of JSON and YAML, columns, headers, a link, a pipe, a hole) and calls a command; or it spoils a configuration,
a preset's text or what a method resolves to, and calls ``run --dry-run``. The seed makes the cases; a case is repeated
by its number alone.

    .venv/bin/python scripts/fuzz.py --cases 2000 --seed 1
    .venv/bin/python scripts/fuzz.py --only 1234 --seed 1
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import io
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fedsweep.api import load_model
from fedsweep.catalog import method_names, resolve
from fedsweep.cli import explain, main
from fedsweep.config import yaml12
from fedsweep.config.load import load_config
from fedsweep.config.presets import list_presets

MOST_CPU_S, MOST_MB, LONGEST_LINE = 10.0, 1000.0, 500
TINY = """
name: tiny
scenario: {clients: 4, partition: {kind: iid}, availability: {kind: capability}, devices: {profile: edge-accel}}
training: {rounds: 2, cohort_size: 2, local_steps: 1}
evaluation: {per_client: true}
checkpoint: {every: 1}
runtime: {backend: local}
tracking: {uri: none}
"""
PLAN = {"number": 1, "folder": "0001-x", "label": "seed=0", "values": {"seed": 0}}
SWEEP = {"format": "fedsweep sweep", "version": 1, "given": {"sweep": {"space": {"seed": {"grid": [0]}}}}}
LONG, CONTROL = "x" * 10_000, "\x1b[31m"
VALUES: tuple[Any, ...] = (None, True, -1, 0, 10**30, 1e308, "", LONG, [], [None], {}, {"a": [1]}, CONTROL, ":")
MORE_VALUES: tuple[Any, ...] = (*VALUES, 0.5, "nan", "../../x", "\ud800", [[]] * 50, {"": {}}, "null", -0.0, 2**63)
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
# A changed configuration is carried out by these, so it is the cases with --dry-run that change it.
PLAYED = ("resume", "verify", "evaluate", "sync")
COMMANDS = ("compare", "compare --by setting", "report", "load_model", *PLAYED)


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


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Each place below a tree: the mapping or list, and the key or position in it."""
    below = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in below:
        yield tree, key
        yield from places(value)


def any_value(draw: random.Random) -> Any:
    """One that nobody expects; its own."""
    return copy.deepcopy(draw.choice(MORE_VALUES))


def tree_changed(tree: Any, draw: random.Random) -> Any:
    """Another value at one to three places, or a key less, or one that is called otherwise."""
    for _ in range(draw.randrange(1, 4)):
        found = [*places(tree)]
        if not found:
            return any_value(draw)
        holder, key = draw.choice(found)
        value = holder[key]
        kind = draw.randrange(6)
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, dict):
            holder[f"{key}{draw.choice(['x', '.', ' ', CONTROL])}"] = holder.pop(key)
        elif kind == 2:
            other, place = draw.choice(found)
            there = isinstance(other, dict) and place in other
            holder[key] = copy.deepcopy(other[place] if there else [value])  # or a tree might contain itself
        elif kind == 3 and isinstance(value, int | float) and not isinstance(value, bool):
            holder[key] = draw.choice([-value, value / 3, value * 1000, value + 1, str(value), [value]])
        else:
            holder[key] = any_value(draw)
    return tree


def json_changed(data: bytes, draw: random.Random) -> bytes:
    """Other values in a document."""
    return json.dumps(tree_changed(json.loads(data), draw)).encode()


def lines_changed(data: bytes, draw: random.Random) -> bytes:
    """Another value in one of the lines, or a line twice, or one less."""
    lines = data.decode("utf-8", "replace").splitlines()
    place = draw.randrange(len(lines))
    key = lines[place].partition(":")[0]
    choices = [[f"{key}: {json.dumps(draw.choice(VALUES))}"], [lines[place]] * 2, []]
    lines[place : place + 1] = draw.choice(choices)
    return "\n".join(lines).encode()


def columns_changed(data: bytes, draw: random.Random) -> bytes:
    """A table with another column, with one twice or less, or with its rows in disorder."""
    table = pq.read_table(io.BytesIO(data))
    place = draw.randrange(table.num_columns)
    name, rows = table.column_names[place], table.num_rows
    fill = draw.choice(
        [None, -1, 2**62, float("nan"), float("inf"), "x", CONTROL, b"\xff", [1, None], {"a": None}, True]
    )
    if isinstance(fill, str) and draw.random() < 0.3:
        fill = LONG
    changed = [
        lambda: table.set_column(place, name, pa.array([fill] * rows)),
        lambda: table.set_column(place, name, pa.array([fill if k else None for k in range(rows)])),
        lambda: table.append_column(name, table.column(place)),
        lambda: table.append_column(draw.choice(["", LONG, CONTROL, "extra"]), table.column(place)),
        lambda: table.drop_columns([name]),
        lambda: table.take(list(reversed(range(rows)))),
        lambda: table.slice(0, draw.choice([0, 1])),
        lambda: pa.concat_tables([table, table]),
    ]
    page = io.BytesIO()
    pq.write_table(draw.choice(changed)(), page)
    return page.getvalue()


def header_changed(data: bytes, draw: random.Random) -> bytes:
    """A model whose header claims something else."""
    size = int.from_bytes(data[:8], "little")
    header = json_changed(data[8 : 8 + size], draw)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


CHANGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".yaml": lines_changed,
    ".json": json_changed,
    ".parquet": columns_changed,
    ".safetensors": header_changed,
}


def spoil(path: Path, draw: random.Random, outside: Path) -> None:
    """One of the files of a run."""
    data = path.read_bytes()
    odd: list[Callable[[], Any]] = [
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(outside / "mine"),
        lambda: os.mkfifo(path),
        path.mkdir,
        lambda: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 2**40),
        lambda: None,
    ]
    if draw.random() < 0.15:
        path.unlink()
        draw.choice(odd)()
        return
    try:
        data = draw.choice([CHANGES.get(path.suffix, bytes_changed), bytes_changed])(data, draw)
    except (ValueError, KeyError, pa.ArrowException):  # nothing is made of it
        data = bytes_changed(data, draw)
    path.write_bytes(data)


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


def configuration(draw: random.Random) -> bytes:
    """A configuration with something wrong: a preset's text, or all parameters of a method."""
    if draw.random() < 0.5:
        return draw.choice([lines_changed, bytes_changed])(draw.choice(list_presets()).path.read_bytes(), draw)
    training = {"rounds": 3, "cohort_size": draw.choice([1, 4])}
    given = {"scenario": {"clients": 8}, "training": training, "method": {"name": draw.choice(method_names())}}
    tree = resolve(load_config(given)).tree()
    text = yaml12.dump(tree_changed(tree, draw)).encode("utf-8", "replace")
    return text if draw.random() < 0.8 else bytes_changed(text, draw)


def words_for(command: str, folder: Path, scratch: Path) -> list[str]:
    """What is called on a folder."""
    if command == "report":
        return [command, str(folder), "--out", str(scratch / "page.html"), "--overwrite"]
    if command == "resume":
        return ["run", "--resume", str(folder), "--quiet"]
    if command == "sweep":
        return ["sweep", "--resume", "--dry-run", "--out", str(folder)]
    return [*command.split(), str(folder)]


def play(case: int, seed: int, finished: Path, scratch: Path) -> tuple[str, int, str]:
    """A case: what was called, its exit code and what it said."""
    draw = random.Random(f"{seed} {case}")
    folder = scratch / "case"
    shutil.rmtree(folder, ignore_errors=True)
    if draw.random() < 0.6:
        folder.mkdir()
        (folder / "case.yaml").write_bytes(configuration(draw))
        words = ["run", str(folder / "case.yaml"), "--dry-run", "--out", str(scratch / "never")]
        given = ["runtime.backend=local", "tracking.uri=none", "scenario.download=false"]
        if draw.random() < 0.5:
            given.append("scenario.dataset=digits")  # or most presets end where their data are missing
        return "run --dry-run", *look([*words, *(word for text in given for word in ("--set", text))])
    run = folder
    command = draw.choice(COMMANDS)
    if draw.random() < 0.3:  # as a sweep's trial
        run = folder / PLAN["folder"]
        command = draw.choice(["compare", "compare --by setting", "report", "sweep"])
    shutil.copytree(finished, run)
    if run != folder:
        (folder / "sweep.json").write_text(json.dumps({**SWEEP, "trials": [PLAN]}))
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".png")
    files = [path for path in files if command not in PLAYED or path.name != "config.yaml"]
    spoilt = draw.sample(files, draw.choice([1, 1, 2, 3]))
    for path in spoilt:
        spoil(path, draw, scratch / "outside")
    if command == "resume" and draw.random() < 0.8:
        shutil.rmtree(run / "result.json", ignore_errors=True)
        (run / "result.json").unlink(missing_ok=True)
    if draw.random() < 0.05:
        shutil.rmtree(run / "pictures", ignore_errors=True)
        (run / "pictures").symlink_to(scratch / "outside")
    called = f"{command} {', '.join(path.name for path in spoilt)}"
    return called, *(load(folder) if command == "load_model" else look(words_for(command, folder, scratch)))


def peak_megabytes() -> float:
    """The most memory that this program held since it was last asked."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    Path("/proc/self/clear_refs").write_text("5")
    return int(line.split()[1]) / 1024


def problems(called: str, code: int, said: str, *, cpu_s: float, scratch: Path) -> list[str]:
    """What is not as it must be."""
    found = []
    # 1: verify says what differs; a resumed run says what it can't write.
    differs, resumed = called.startswith("verify") and "error: " not in said, called.startswith("resume")
    is_said = differs or (resumed and ("can't write" in said or "cannot be written" in said))
    if (code not in (0, 2) and not (code == 1 and is_said)) or "this is a bug" in said or "Traceback" in said:
        found.append(f"exit code {code}")
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    if code == 2 and (len(lines) != 1 or len(lines[0]) > LONGEST_LINE or not lines[0].isprintable()):
        found.append(f"{len(lines)} lines, of {max(map(len, lines), default=0)} characters")
    if cpu_s > MOST_CPU_S:
        found.append(f"{cpu_s:.1f} s of CPU")
    if (megabytes := peak_megabytes()) > MOST_MB:
        found.append(f"{megabytes:.0f} MB")
    there = {path.name for path in scratch.iterdir()} - {"case", "run", "outside", "page.html", "tiny.yaml"}
    if there or (scratch / "outside" / "mine").read_text() != "mine" or len([*(scratch / "outside").iterdir()]) > 1:
        found.append(f"something was written: {sorted(there)}")
        for name in there:  # the next case has its own
            shutil.rmtree(scratch / name, ignore_errors=True)
            (scratch / name).unlink(missing_ok=True)
    return found


def fuzz() -> int:
    """Plays the cases; 1 where one has a problem."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first case's number, to go on")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="no case is begun after so many")
    parser.add_argument("--only", type=int)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    bad, slowest = 0, (0.0, -1)
    codes: collections.Counter[tuple[str, int]] = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="fedsweep-fuzz-") as place:
        scratch = Path(place)
        (scratch / "tiny.yaml").write_text(TINY)
        (scratch / "outside").mkdir()
        (scratch / "outside" / "mine").write_text("mine")
        look(["run", str(scratch / "tiny.yaml"), "--out", str(scratch / "run"), "-q"])
        numbers = range(given.first, given.first + given.cases) if given.only is None else [given.only]
        until = time.monotonic() + 60 * given.minutes
        for case in numbers:
            if time.monotonic() > until:
                break
            began = time.process_time()
            called, code, said = play(case, given.seed, scratch / "run", scratch)
            cpu_s = time.process_time() - began
            slowest = max(slowest, (cpu_s, case))
            codes["configurations" if called.startswith("run") else "folders", code] += 1
            found = problems(called, code, said, cpu_s=cpu_s, scratch=scratch)
            if found or given.only is not None:
                bad += bool(found)
                print(f"case {case}: {called}: {'; '.join(found) or code}: {said.strip()[:300]!r}", flush=True)
    ended = ", ".join(f"{count} {kind} with exit code {code}" for (kind, code), count in sorted(codes.items()))
    print(f"{codes.total()} cases, seed {given.seed}: {ended}; slowest {slowest[0]:.1f} s of CPU (case {slowest[1]})")
    print(f"{bad} with a problem")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(fuzz())
