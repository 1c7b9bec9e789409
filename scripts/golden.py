"""Do two checkouts give the same models, bit for bit? For changes of the code that must not change a result.

    .venv/bin/python scripts/golden.py OTHER_CHECKOUT [THIS_CHECKOUT]

Seven short runs on digits are made by the installed command of each checkout (``.venv/bin/fedsweep``), and the SHA-256
of their models compared. No hash is kept in the repository: it differs between kinds of CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_BASE = {
    "scenario": {"dataset": "digits", "clients": 8, "partition": {"kind": "dirichlet", "dirichlet_alpha": 0.3}},
    "model": {"name": "mlp"},
    "training": {"rounds": 4, "cohort_size": 5, "local_epochs": 1, "batch_size": 16},
    "tracking": {"uri": "none"},
}
_DEVICES = ["scenario.devices={profile: phone-wifi}"]
_SERVER_DATA = ["scenario.server_data.validation=0.05", "scenario.server_data.proxy={per_class: 5}"]
_ON_ACTORS = ["runtime.backend=ray", "runtime.client_actors=2"]

RUNS: dict[str, list[str]] = {
    "fedavg": ["method={name: fedavg}"],
    "fedprox_momentum": [
        "method={name: fedprox, mu: 0.1}",
        "training.optimizer={name: sgd, lr: 0.05, momentum: 0.9}",
        "training.optimizer_state=average",
    ],
    "dynamicfl": ["method={name: dynamicfl}", "scenario.budgets={kind: fixed, budget_fraction: 0.4}"],
    "dynamicfl_two_actors": [
        "method={name: dynamicfl}",
        "scenario.budgets={kind: fixed, budget_fraction: 0.4}",
        *_ON_ACTORS,
    ],
    "feddh_fedad": ["method={merge: [{name: feddh}, {name: fedad, check_every: 1}]}", *_DEVICES, *_SERVER_DATA],
    "dynafed": ["dynafed/digits", "training.rounds=4"],
    "fedstg": [
        "method={name: fedstg}",
        "scenario.drift={kind: cosine_rotation}",
        "scenario.availability={kind: capability}",
        *_DEVICES,
        *_SERVER_DATA,
    ],
}


def main() -> int:
    """Compare; returns the exit code: 1 if any model differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout with its own .venv")
    parser.add_argument("this", type=Path, nargs="?", default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--only", choices=sorted(RUNS), action="append", help="of the seven runs, these")
    given = parser.parse_args()
    differing = 0
    for name in given.only or RUNS:
        hashes = [_hash(checkout.resolve(), name) for checkout in (given.other, given.this)]
        differing += hashes[0] != hashes[1]
        print(f"{name:22} {hashes[0][:12]}  {hashes[1][:12]}  {'same' if hashes[0] == hashes[1] else 'DIFFERENT'}")
    return 1 if differing else 0


def _hash(checkout: Path, name: str) -> str:
    """The model of one run of one checkout; made in an empty folder, so that nothing of the other is imported."""
    sets = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "golden.json"
        preset = sets[0] if "=" not in sets[0] else str(source)
        source.write_text(json.dumps(_BASE))
        options = [word for text in [*sets, "tracking.uri=none"] if "=" in text for word in ("--set", text)]
        command = [str(checkout / ".venv/bin/fedsweep"), "run", preset, *options, "--out", f"{folder}/run", "--quiet"]
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{name} in {checkout} ended with {done.returncode}:\n{done.stderr.strip()}")
        result = json.loads((Path(folder) / "run" / "result.json").read_text())
    return str(result["model_sha256"])


if __name__ == "__main__":
    sys.exit(main())
