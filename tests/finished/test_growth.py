"""A run that gets more rounds has the bits of one that was begun with as many; or it is refused, and why."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsweep.api import run
from fedsweep.config.load import load_config
from fedsweep.driver.run import plan_run, resumable, run_plan
from fedsweep.driver.session import RunSession
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError, OutputError
from fedsweep.finished.growth import grow
from fedsweep.records import RoundRecord
from fedsweep.runs.run_folder import RunFolder

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "dynamicfl": {"name": "dynamicfl", "high_interval": 2, "low_interval": 4, "group": "random", "group_size": 2},
    "fedad": {"name": "fedad", "base_rate": 0.3, "refresh": [2, 6]},
    "scaffold": {"name": "scaffold"},
}
TINY = {
    "name": "tiny",
    "scenario": {"clients": 6},
    "training": {"rounds": 4, "cohort_size": 3, "local_steps": 4},
    "runtime": {"backend": "local"},
    "checkpoint": {"every": 3},
    "tracking": {"uri": "none"},
}


def begun(folder: Path, *overrides: str, rounds: int = 4, method: str = "fedavg") -> Path:
    given = {**TINY, "method": METHODS[method], "training": {**TINY["training"], "rounds": rounds}}  # type: ignore[dict-item]
    run(given, out=folder, overrides=overrides)
    return folder


def grown(folder: Path, rounds: int) -> Path:
    run_plan(plan_run(grow(folder, rounds=rounds)), folder, resume=True)
    return folder


def untimed(folder: Path) -> list[RoundRecord]:
    still: dict[str, Any] = {"wall_time_s": 0.0, "eval_time_s": 0.0, "server_time_s": 0.0, "timestamp_ms": 0}
    return [replace(record, **still) for record in RunFolder(folder).read_rounds()]


def result(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found


def same(first: Path, second: Path) -> bool:
    keys = (
        "status",
        "rounds",
        "model_sha256",
        "config_hash",
        "total_bytes",
        "best_test_accuracy",
        "registration_bytes",
    )
    assert untimed(first) == untimed(second)
    return [result(first)[key] for key in keys] == [result(second)[key] for key in keys]


@pytest.mark.slow
@pytest.mark.parametrize("method", list(METHODS))
def test_more_rounds_give_the_bits_of_a_longer_run(method: str, tmp_path: Path) -> None:
    short = begun(tmp_path / "short", method=method)
    long = begun(tmp_path / "long", method=method, rounds=8)
    assert result(short)["model_sha256"] != result(long)["model_sha256"]
    assert same(grown(short, 8), long)


@pytest.mark.slow
def test_it_may_grow_again_and_the_last_test_of_a_shorter_run_leaves_no_trace(tmp_path: Path) -> None:
    settings = ("evaluation={every: 3, per_client: true}", "training.schedule={kind: exponential, decay: 0.9}")
    short = begun(tmp_path / "short", *settings)
    assert RunFolder(short).read_rounds()[-1].test_accuracy is not None
    long = begun(tmp_path / "long", *settings, rounds=8)
    assert same(grown(grown(short, 5), 8), long)
    assert [r.test_accuracy is None for r in untimed(short)] == [True, True, False, True, True, False, True, False]


def test_a_run_whose_growth_was_cut_off_resumes_to_the_new_number(tmp_path: Path) -> None:
    short = begun(tmp_path / "short")
    grow(short, rounds=6)
    assert result(short)["status"] == "killed"  # and so a reader does not take it for the longer run
    assert grow(short, rounds=6).training.rounds == 6
    (short / "result.json").unlink()
    assert same(grown(short, 6), begun(tmp_path / "long", rounds=6))


def test_a_kill_between_a_checkpoint_and_its_table_hides_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round 3 is in the checkpoint, the table has none of it."""

    def killed(session: RunSession, state: RunState) -> None:
        if state.round >= 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(RunSession, "_write_rounds", killed)
        begun(tmp_path / "run", "training.schedule=cosine")
    for path in (tmp_path / "run").glob("*.parquet"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"the 3 rounds done are not those .* training\.schedule goes by the number"):
        grow(tmp_path / "run", rounds=6)


DYNAFED = {"snapshots": 3, "horizon_rounds": 1, "inner_steps": 3, "iterations": 10, "images_per_class": 1}


@pytest.mark.parametrize(
    ("snapshots", "setting"), [(2, "scenario.drift={kind: cosine_rotation}"), (3, "training.schedule=cosine")]
)
def test_work_that_was_begun_in_the_next_round_is_begun_anew(
    snapshots: int, setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A synthesis within round 1 or 2, whose snapshots may be others in the longer run."""
    given = {**TINY, "method": {"name": "dynafed", **DYNAFED, "snapshots": snapshots, "checkpoint_seconds": 0}}
    saved = []

    def killed(session: RunSession, state: RunState, save: Any = RunSession._save_partial) -> None:
        save(session, state)
        saved.append(state.round)
        if len(saved) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(RunSession, "_save_partial", killed)
        run(given, out=tmp_path / "run", overrides=(setting,))
    assert saved == [snapshots - 2] * 5
    run({**given, "training": {**given["training"], "rounds": 6}}, out=tmp_path / "long", overrides=(setting,))
    assert same(grown(tmp_path / "run", 6), tmp_path / "long")


def test_a_run_that_another_process_gave_more_rounds_is_not_ended_after_fewer(tmp_path: Path) -> None:
    plan = plan_run(load_config({**TINY, "method": METHODS["fedavg"]}))
    run_plan(plan, tmp_path / "run")
    grow(tmp_path / "run", rounds=6)  # while this one was still planning
    with pytest.raises(OutputError, match="was given 6 rounds meanwhile, in place of 4; go on with it once more"):
        run_plan(plan, tmp_path / "run", resume=True)


@pytest.mark.parametrize("where", ["write_config", "write_result"])
def test_a_kill_in_the_midst_of_growth_leaves_no_longer_run_that_has_finished(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = begun(tmp_path / "short")
    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(RunFolder, where, lambda *unused: (_ for _ in ()).throw(KeyboardInterrupt))
        grow(short, rounds=6)
    config, has_finished = resumable(short)
    assert config.training.rounds == 4 and has_finished == (where == "write_result")
    assert grow(short, rounds=6).training.rounds == 6 and not resumable(short)[1]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("training.schedule=cosine", r"training\.schedule goes by the number of rounds"),
        ("scenario.drift={kind: cosine_rotation}", r"scenario\.drift goes by the number of rounds"),
        ("scenario.availability={kind: capability}", r"scenario\.availability goes by the number of rounds"),
        (
            "scenario.budgets={total_bytes: 1 MB}; planner={name: even, choices: {training.cohort_size: [1, 3]}}",
            "the planner goes by the number of rounds",
        ),
        ("training.stop.target_accuracy=0.0001", "ended by target_accuracy"),
    ],
)
def test_what_goes_by_the_number_of_rounds_is_refused_and_the_folder_stays(
    setting: str, reason: str, tmp_path: Path
) -> None:
    folder = begun(tmp_path / "run", *setting.split("; "))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=reason):
        grow(folder, rounds=6)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_fewer_rounds_and_damaged_lists_are_refused(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run")
    with pytest.raises(ConfigError, match="at least its present 4, but got 3"):
        grow(folder, rounds=3)
    (folder / "earlier.json").write_text('{"a": 1}')
    with pytest.raises(OutputError, match=r"earlier\.json: it must be a list"):
        grow(folder, rounds=5)
