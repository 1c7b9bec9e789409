"""The content of ``result.json``: a run's figures, how it was played, and remarks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedsweep.driver.caveats import caveats
from fedsweep.engine.ahead.spending import decisions_in_words
from fedsweep.engine.engine import Engine
from fedsweep.engine.forecast import notes_after
from fedsweep.engine.state import RunState
from fedsweep.experiment.experiment import Experiment
from fedsweep.results.view import run_so_far
from fedsweep.runs.facts import cpu_name, data_facts, peak_memory_mb, test_figures
from fedsweep.runs.targets import targets_reached


def figures_of(engine: Engine, state: RunState, folder: Path) -> dict[str, Any]:
    """Return what a run's rounds came to, of which the folder has the table."""
    so_far = run_so_far(folder, state.records)
    return {
        "rounds": state.round,
        "test_accuracy": so_far.figure("test_accuracy"),
        "best_test_accuracy": so_far.figure("best_test_accuracy"),
        "total_bytes": state.total_bytes,
        "registration_bytes": engine.registration_bytes + state.setup_bytes,
        "comm_ratio": so_far.figure("comm_ratio"),
        "comm_cost": sum(r.comm_cost for r in state.records),
        "flops": sum(r.flops for r in state.records),
        "sim_time_s": state.clock,
        "targets": targets_reached(state.records, engine.experiment.targets),
        "wall_time_s": state.wall_time_s,
        "peak_memory_mb": peak_memory_mb(),
    }


def remarks_on(experiment: Experiment, state: RunState, facts: Mapping[str, Any]) -> list[str]:
    """Return sentences on a finished run, what its facts say of other code and other machines included."""
    own = [*notes_after(experiment, state), *caveats(experiment, state.records, state.vector)]
    own += decisions_in_words(experiment, state)
    return [*own, *facts.get("sources_changed", ()), *facts.get("machines_changed", ())]


def played_as(engine: Engine, state: RunState) -> dict[str, Any]:
    """Return which run it is, of which data, and how it was played."""
    experiment = engine.experiment
    return {
        "num_params": engine.layout.num_params,
        "input_shape": [int(size) for size in experiment.world.data.images.shape[1:]],
        **data_facts(experiment),
        **test_figures(experiment, state.records),
        "method": experiment.method.name,
        "seed": experiment.seed,
        "config_hash": experiment.config_hash,
        "executor": _executor(engine, state),
        "exchange": asdict(engine.fleet.exchange),
        "cpu": cpu_name(),
    }


def _executor(engine: Engine, state: RunState) -> dict[str, Any]:
    """Return how clients were stepped, and why not faster."""
    tried = state.stepping
    if tried is None:
        return {"name": "loop" if engine.experiment.lanes is None else "lanes", "notes": engine.notes}
    return {
        "name": "loop" if tried.kind == "loop" else "lanes",
        "lanes": tried.width,
        "recorded": tried.kind == "graph",
        "off": tried.off,
        "notes": [*dict.fromkeys([*tried.notes, *engine.notes])],
    }
