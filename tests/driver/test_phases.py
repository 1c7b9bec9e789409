"""What a run says that it waits for, and the split of its time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fedsweep
from fedsweep.driver.phases import TIMING, Phases, process_began

CONFIG: dict[str, Any] = {
    "scenario": {"clients": 4},
    "training": {"rounds": 3, "cohort_size": 2, "local_steps": 1, "local_epochs": None},
    "tracking": {"uri": "none"},
}


def test_phases_and_rounds_add_up_to_the_whole() -> None:
    now, said = [10.0], list[str]()
    phases = Phases(began=7.0, first="command", say=said.append, clock=lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    phases.enter("libraries", "libraries")
    passes(2.0)
    phases.enter("plan")
    passes(0.5)
    phases.enter("libraries")
    passes(1.0)
    phases.rounds()
    for seconds in (4.0, 0.25, 0.5):
        passes(seconds)
        phases.round_done()
    passes(0.125)  # the last round is shown
    phases.enter("results")
    passes(1.0)
    split = phases.split()
    assert said == ["libraries"]
    assert split["before"] == {"command": 3.0, "libraries": 3.0, "plan": 0.5}
    assert split["after"] == {"results": 1.0}
    assert (split["ready_s"], split["first_round_s"], split["end_s"]) == (6.5, 4.0, 1.0)
    assert split["rounds_s"] == pytest.approx(4.875)
    assert split["total_s"] == pytest.approx(split["ready_s"] + split["rounds_s"] + split["end_s"])


def test_the_process_began_a_while_ago() -> None:
    code = "from fedsweep.driver.phases import process_began; import time; print(time.monotonic() - process_began())"
    before = time.monotonic()
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert 0.0 < age <= time.monotonic() - before + 0.01
    assert process_began() < before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "method"),
    [
        ({}, {"name": "fedavg"}),
        ({"momentum": 0.9}, {"name": "dynafed", "snapshots": 2, "horizon_rounds": 1, "iterations": 1}),
    ],
    ids=["plain", "client's and server's optimisers"],
)
def test_the_split_stands_in_the_result_and_a_short_run_loads_no_more_than_it_needs(
    optimizer: dict[str, float], method: dict[str, object], tmp_path: Path
) -> None:
    config = {**CONFIG, "training": {**CONFIG["training"], "optimizer": optimizer}, "method": method}
    # torch._dynamo is torch's compiler: a second of imports, which torch's own optimisers ask for at their first step.
    code = f"""
import json, sys
from fedsweep.cli import main
from pathlib import Path
Path("c.yaml").write_text({json.dumps(config)!r})
code = main(["run", "c.yaml", "--out", "run"])
print(*sorted({{"torch._dynamo", "sklearn", "ray", "mlflow", "torchvision"}} & {{*sys.modules}}))
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == ""  # what was loaded of those
    (first,) = (line for line in lines if ": 3 rounds, in" in line)
    assert first.endswith(
        "3 rounds, in this process (about 0.0 s of training on one core; runtime.backend=auto is Ray from 60 s)"
    )
    timing = json.loads((tmp_path / "run" / "result.json").read_text())[TIMING]
    assert {"libraries", "data", "plan", "clients"} <= set(timing["before"])
    assert {"results", "pictures"} <= set(timing["after"])
    assert timing["total_s"] == pytest.approx(timing["ready_s"] + timing["rounds_s"] + timing["end_s"], abs=0.002)
    assert 0 < timing["first_round_s"] <= timing["rounds_s"]


def test_what_is_shown_and_started_at_first_needs_no_torch() -> None:
    names = "cli commands.running.one_run tracking.terminal.run_progress tracking.mlflow_store"
    names += " fleet.ray_start driver.phases config.load"
    code = "import sys; from importlib import import_module\n"
    code += f"for name in {names.split()}: import_module('fedsweep.' + name)\n"
    code += "print(*sorted({'torch', 'numpy', 'ray', 'mlflow'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


def test_a_run_from_python_has_its_split_too(tmp_path: Path) -> None:
    result = fedsweep.run(CONFIG, out=tmp_path / "run")
    assert result.summary[TIMING] == json.loads((tmp_path / "run" / "result.json").read_text())[TIMING]
    assert result.summary[TIMING]["ready_s"] < 60  # from the call, not from the start of the tests' process
