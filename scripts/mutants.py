"""Which small faults do the tests notice? Puts faults into a copy of the tree, one at a time, and runs the tests on it.

    .venv/bin/python scripts/mutants.py              all faults, some minutes
    .venv/bin/python scripts/mutants.py cosine rate  those whose name has one of the words

The faults stand in ``scripts/mutants.yaml``: what is replaced by what in which file, and the tests that should notice.
The text must occur once in its file, so a fault whose code has changed must be written anew (``tests/test_layout.py``
says so). Quick tests come first, slow ones where those see nothing, none that starts Ray. Run by hand, not by the
continuous integration.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedsweep.config import yaml12

_ROOT = Path(__file__).resolve().parent.parent
_COPIED = ("platform", "algorithms", "tune_configs", "tests", "docs", "scripts", "pyproject.toml", "README.md")


_MARKS = "not ray and not gpu"
_NONE_RAN = 5  # as pytest says it
_LIBRARIES = ("torch._dynamo", "ray", "pyarrow.parquet", "sklearn.datasets")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One small fault.

    Attributes:
        name: What is wrong then.
        file: Where, from the repository's root.
        old: What stands there, once.
        new: What takes its place.
        tests: Files or folders of tests that should notice.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


def main(words: list[str]) -> int:
    """Put in one fault after another; returns the exit code: 1 if any goes unnoticed or can't be put in."""
    given = yaml12.read(_ROOT / "scripts" / "mutants.yaml")  # which refuses a key that is there twice
    faults = [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in given]
    faults = [fault for fault in faults if not words or any(word in fault.name for word in words)]
    missed = 0
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")  # as in the tests; and a process with threads can't be forked
    for library in _LIBRARIES:
        importlib.import_module(library)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "fedsweep"
        for name in _COPIED:
            source = _ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "images"))
            else:
                copy.mkdir(exist_ok=True)
                shutil.copy(source, copy / name)
        for fault in faults:
            begun = time.monotonic()
            verdict = _verdict(copy, fault)
            missed += verdict != "caught"
            print(f"{verdict:9} {time.monotonic() - begun:5.1f} s  {fault.name}  ({fault.file})", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults caught")
    return 1 if missed else 0


def _verdict(copy: Path, fault: Fault) -> str:
    path = copy / fault.file
    text = path.read_text() if path.is_file() else ""
    if text.count(fault.old) != 1:
        return "STALE"
    path.write_text(text.replace(fault.old, fault.new))
    codes = []
    for marks in ("not slow", "slow"):  # the dear ones only where the quick ones see nothing
        codes.append(_tested(copy, ["-q", "-x", "-p", "no:cacheprovider", "-m", f"{marks} and {_MARKS}", *fault.tests]))
        if codes[-1] not in (0, _NONE_RAN):
            break
    path.write_text(text)
    if codes[-1] == 1:
        return "caught"
    # Otherwise there is a wrong path, no test there, or an error while tests were collected.
    return "MISSED" if set(codes) <= {0, _NONE_RAN} and 0 in codes else "BROKEN"


def _tested(copy: Path, words: list[str]) -> int:
    """The exit code of pytest in a process that has the libraries, which take seconds to import, but not ours."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 3
    try:
        os.chdir(copy)
        os.environ["PYTHONPATH"] = str(copy / "platform")  # processes that tests start have the fault, too
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1), os.dup2(nowhere, 2)
        for name in [name for name in sys.modules if name.partition(".")[0] == "fedsweep"]:
            del sys.modules[name]
        code = int(pytest.main(words))
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
