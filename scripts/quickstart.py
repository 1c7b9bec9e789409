"""A first comparison: FedAvg, DynamicSGD and DynamicFL on the same label-skewed digits, in about a minute.

Runs the three presets under ``quickstart/`` one after the other through the installed command, lays them side by side,
and says where everything is. Each call makes new runs in the folder ``runs``, beside those of earlier calls.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

_METHODS = ("fedavg", "dynamicsgd", "dynamicfl")


def main() -> int:
    """Run the comparison; returns the exit code."""
    program = _program()
    runs = Path("runs").absolute()
    folder = _new_folder(runs)
    store = f"sqlite:///{runs / 'mlflow.db'}"
    for method in _METHODS:
        print(f"\n== {method}", flush=True)
        where = ["--out", str(folder / method), "--set", f"tracking.uri={store}"]
        if code := _call([*program, "run", f"quickstart/{method}", *where]):
            return code
    print("\n== the three side by side", flush=True)
    picture = folder / "accuracy_against_bytes.png"
    folders = [str(folder / method) for method in _METHODS]
    if code := _call([*program, "compare", *folders, "--plot", str(picture)]):
        return code
    print(f"\nruns, one folder each:       {folder}")
    print(f"accuracy against bytes sent: {picture}")
    print(f"MLflow store:                {store}")
    print(f"the MLflow pages, on http://127.0.0.1:5000: {shlex.join([*program, 'ui', '--uri', store])}")
    return 0


def _program() -> list[str]:
    """The console script that belongs to this Python, as short as the shell understands it."""
    beside = Path(sys.executable).parent / "fedsweep"
    found = shutil.which("fedsweep")
    if found is not None and (Path(found) == beside or not beside.is_file()):
        return ["fedsweep"]
    return [str(beside)] if beside.is_file() else [sys.executable, "-m", "fedsweep"]


def _new_folder(runs: Path) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = [f"quickstart-{stamp}", *(f"quickstart-{stamp}-{number}" for number in range(2, 100))]
    return next(runs / name for name in names if not (runs / name).exists())


def _call(command: list[str]) -> int:
    """Runs a command and waits for it; Ctrl-C reaches it as well, and it needs time to write its checkpoint."""
    with subprocess.Popen(command) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue


if __name__ == "__main__":
    sys.exit(main())
