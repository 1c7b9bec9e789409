from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsweep import run
from fedsweep.config.load import load_config
from fedsweep.driver.session import RunSession
from fedsweep.errors import ClientJobError, ComponentError, ConfigError
from fedsweep.results.view import load_run
from fedsweep.runs.run_folder import RunFolder
from fedsweep.runs.tables.rounds import scalar_figures
from fedsweep.sweeps.prepared_trial import PreparedTrial, make_entry
from fedsweep.sweeps.space import list_trials
from fedsweep.sweeps.trial import ENDED_BY_SCHEDULER, ActiveTrial, TrialSpec, metric_values


@pytest.fixture
def entry_of(tiny: Callable[..., dict[str, Any]]) -> Callable[..., PreparedTrial]:
    def make(space: dict[str, Any], **more: Any) -> PreparedTrial:
        config = load_config(tiny(space, more=more))
        return make_entry(config, list_trials(config)[0], uri=None)

    return make


QUANTITY = {"kind": "quantity", "dirichlet_alpha": 0.5}


def trial_of(entry: PreparedTrial, folder: Path, **more: Any) -> ActiveTrial:
    return ActiveTrial(
        TrialSpec(folder=folder, config_json=json.dumps(entry.config.tree()), **{"metrics": ("test_accuracy",), **more})
    )


def played(trial: ActiveTrial) -> list[dict[str, Any]]:
    reports = [trial.step()]
    while not reports[-1]["done"]:
        reports.append(trial.step())
    return reports


def test_a_trial_gives_the_same_model_as_a_run_with_its_configuration(
    tmp_path: Path, entry_of: Callable[..., PreparedTrial]
) -> None:
    entry = entry_of({"method": {"grid": [{"name": "fedprox", "mu": 0.5}]}})
    played(trial_of(entry, tmp_path / "trial"))
    alone = run(tmp_path / "trial" / "config.yaml", out=tmp_path / "run")
    assert RunFolder(tmp_path / "trial").read_result()["model_sha256"] == alone.summary["model_sha256"]
    assert alone.config.method["mu"] == 0.5


def test_reports_carry_sums_and_say_when_it_is_over(tmp_path: Path, entry_of: Callable[..., PreparedTrial]) -> None:
    reports = played(trial_of(entry_of({"seed": {"grid": [1]}}), tmp_path / "t", resource="total_bytes"))
    assert [r["round"] for r in reports] == [1, 2, 3]
    assert [r["done"] for r in reports] == [False, False, True]
    sent = [row.bytes_up + row.bytes_down for row in RunFolder(tmp_path / "t").read_rounds()]
    registered = 6 * 4  # each client's number of samples
    assert [r["total_bytes"] - registered for r in reports] == [sent[0], sum(sent[:2]), sum(sent)]
    assert [r["resource"] for r in reports] == [r["total_bytes"] for r in reports]


def test_a_report_has_of_the_row_of_the_table_what_is_compared_and_little_else(
    tmp_path: Path, entry_of: Callable[..., PreparedTrial]
) -> None:
    entry = entry_of({"seed": {"grid": [1]}}, evaluation={"every": 2})
    asked = ("test_accuracy", "lr", "fwd_macs_per_sample")
    reports = played(trial_of(entry, tmp_path / "t", metrics=asked))
    rows = RunFolder(tmp_path / "t").read_rounds()
    for report, row in zip(reports, rows, strict=True):
        figures = {name: x for name, x in scalar_figures(row).items() if name in (*asked, "test_loss", "train_loss")}
        assert len(figures) >= 3 and {name: report[name] for name in figures} == figures
        assert "bytes_up" not in report and "wall_time_s" not in report
    assert rows[0].test_accuracy is None
    assert math.isnan(reports[0]["test_accuracy"])


def test_what_tables_sum_over_rounds_a_search_and_a_scheduler_sum_too(
    tmp_path: Path, entry_of: Callable[..., PreparedTrial]
) -> None:
    asked = ("comm_cost", "bytes_up", "local_steps", "comm_ratio", "wall_time_s", "flops", "train_loss")
    space, training = {"seed": {"grid": [1]}}, {"rounds": 3, "local_epochs": 1, "cohort_size": 2}
    entry = entry_of(space, training=training, scenario={"clients": 6, "partition": QUANTITY})
    reports = played(trial_of(entry, tmp_path / "t", metrics=asked))
    rows, view = RunFolder(tmp_path / "t").read_rounds(), load_run(tmp_path / "t")
    assert reports[1]["comm_ratio"] == pytest.approx((rows[0].comm_ratio + rows[1].comm_ratio) / 2, rel=1e-12)
    assert reports[1]["comm_cost"] == rows[0].comm_cost + rows[1].comm_cost != rows[1].comm_cost
    values = metric_values(reports[-1], asked)
    assert values == pytest.approx({name: view.figure(name) for name in asked}, rel=1e-9)


def test_what_is_not_measured_in_a_round_is_reported_with_its_last_value(
    tmp_path: Path, entry_of: Callable[..., PreparedTrial]
) -> None:
    entry = entry_of({"seed": {"grid": [1]}}, evaluation={"every": 2}, training={"rounds": 4, "local_steps": 1})
    reports = played(trial_of(entry, tmp_path / "t"))
    assert reports[2]["test_accuracy"] == reports[1]["test_accuracy"]
    assert RunFolder(tmp_path / "t").read_rounds()[2].test_accuracy is None


def test_a_trial_that_is_put_away_goes_on_to_the_same_model(
    tmp_path: Path, entry_of: Callable[..., PreparedTrial]
) -> None:
    entry = entry_of({"seed": {"grid": [3]}})
    played(trial_of(entry, tmp_path / "whole"))
    first = trial_of(entry, tmp_path / "broken")
    first.step()
    first.end_early()
    assert RunFolder(tmp_path / "broken").read_result()["status"] == "killed"
    reports = played(trial_of(entry, tmp_path / "broken"))
    assert [r["round"] for r in reports] == [2, 3]
    whole, broken = (RunFolder(tmp_path / name).read_result()["model_sha256"] for name in ("whole", "broken"))
    assert whole == broken
    assert len(RunFolder(tmp_path / "broken").read_rounds()) == 3


@pytest.mark.parametrize("where", ["write_details", "write_model", "write_result"])
def test_a_trial_whose_process_dies_while_it_ends_is_finished_by_the_next_one(
    tmp_path: Path, entry_of: Callable[..., PreparedTrial], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    class Killed(BaseException):
        """As SIGKILL: what lies on the disk stays, and nothing more is written."""

    def killed(*unused: Any, **also_unused: Any) -> None:
        raise Killed

    entry = entry_of({"seed": {"grid": [3]}}, checkpoint={"every": 10})
    played(trial_of(entry, tmp_path / "whole"))
    place = (RunSession, "_write_details") if where == "write_details" else (RunFolder, where)
    with monkeypatch.context() as during:
        during.setattr(*place, killed)
        with pytest.raises(Killed):
            played(trial_of(entry, tmp_path / "broken"))
    assert RunFolder(tmp_path / "broken").status == "unfinished"
    assert len(RunFolder(tmp_path / "broken").read_rounds()) == 3
    played(trial_of(entry, tmp_path / "broken"))
    whole, broken = (RunFolder(tmp_path / name).read_result() for name in ("whole", "broken"))
    assert broken["status"] == "finished" and broken["model_sha256"] == whole["model_sha256"]


def test_a_trial_writes_what_tracking_asks_for_into_its_own_folder(
    tmp_path: Path, entry_of: Callable[..., PreparedTrial]
) -> None:
    entry = entry_of({"seed": {"grid": [3]}}, tracking={"uri": "none", "also": ["csv"]})
    first = trial_of(entry, tmp_path / "t")
    first.step()
    first.end_early()
    played(trial_of(entry, tmp_path / "t"))
    lines = (tmp_path / "t" / "rounds.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["round", "1", "2", "3"]


def test_a_trial_that_the_scheduler_ends_has_finished_with_a_model(
    tmp_path: Path, entry_of: Callable[..., PreparedTrial]
) -> None:
    trial = trial_of(entry_of({"seed": {"grid": [3]}}), tmp_path / "t")
    trial.step()
    (tmp_path / "t" / ENDED_BY_SCHEDULER).touch()
    trial.end_early()
    result = RunFolder(tmp_path / "t").read_result()
    assert (result["status"], result["stopped_by"], result["rounds"]) == ("finished", "scheduler", 1)
    assert RunFolder(tmp_path / "t").read_model(num_values=100)
    assert not (tmp_path / "t" / ENDED_BY_SCHEDULER).exists()


def test_a_trial_whose_process_dies_once_it_wrote_the_schedulers_end_was_ended_by_the_scheduler(
    tmp_path: Path, entry_of: Callable[..., PreparedTrial], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """As SIGKILL right after the first write."""

    def write_and_die(folder: RunFolder, result: dict[str, Any]) -> None:
        write(folder, result)
        raise Killed

    write, entry = RunFolder.write_result, entry_of({"seed": {"grid": [3]}})
    trial = trial_of(entry, tmp_path / "t")
    trial.step()
    (tmp_path / "t" / ENDED_BY_SCHEDULER).touch()
    with monkeypatch.context() as during, pytest.raises(Killed):
        during.setattr(RunFolder, "write_result", write_and_die)
        trial.end_early()
    [again] = played(trial_of(entry, tmp_path / "t"))
    assert again["round"] == 1
    (tmp_path / "t" / ENDED_BY_SCHEDULER).unlink()
    result = RunFolder(tmp_path / "t").read_result()
    assert (result["status"], result["stopped_by"], result["rounds"]) == ("finished", "scheduler", 1)


def test_a_trial_that_had_finished_reports_its_rounds_again_where_a_scheduler_compares_them(
    tmp_path: Path, entry_of: Callable[..., PreparedTrial]
) -> None:
    entry = entry_of({"seed": {"grid": [3]}})
    before = played(trial_of(entry, tmp_path / "t"))
    [last] = played(trial_of(entry, tmp_path / "t"))
    again = played(trial_of(entry, tmp_path / "t", replays=True))
    assert [report["done"] for report in again] == [False, False, True] and again[-1] == {**last, "replayed": True}
    assert [{**report, "replayed": True} for report in before] == again


def test_a_trial_whose_process_died_before_it_heard_of_the_schedulers_end_can_be_put_away(
    tmp_path: Path, entry_of: Callable[..., PreparedTrial]
) -> None:
    entry = entry_of({"seed": {"grid": [3]}})
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / ENDED_BY_SCHEDULER).touch()
    trial = trial_of(entry, tmp_path / "t")
    trial.step()
    trial.end_early()
    assert RunFolder(tmp_path / "t").read_result()["status"] == "killed"
    assert played(trial_of(entry, tmp_path / "t"))[-1]["round"] == 3


def test_a_finished_trial_only_says_its_last_round_again(
    tmp_path: Path, entry_of: Callable[..., PreparedTrial]
) -> None:
    entry = entry_of({"seed": {"grid": [3]}})
    last = played(trial_of(entry, tmp_path / "t"))[-1]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "t").rglob("*")}
    [again] = played(trial_of(entry, tmp_path / "t"))
    assert again == last
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "t").rglob("*")} == before


def test_a_trial_that_cannot_begin_leaves_the_reason(tmp_path: Path, entry_of: Callable[..., PreparedTrial]) -> None:
    entry = entry_of({"seed": {"grid": [3]}})
    given = {**entry.config.tree(), "method": {"name": "fedprox", "muu": 1.0}}
    trial = ActiveTrial(TrialSpec(folder=tmp_path / "t", config_json=json.dumps(given), metrics=("test_accuracy",)))
    with pytest.raises(ValueError, match="muu"):
        trial.step()
    result = RunFolder(tmp_path / "t").read_result()
    assert result["status"] == "failed" and "muu" in result["reason"]


def test_what_fails_a_trial_is_told_with_its_kind_where_it_is_no_error_of_this_package(
    tmp_path: Path, entry_of: Callable[..., PreparedTrial], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunSession, "step", lambda self: {}["x"])
    with pytest.raises(KeyError):
        trial_of(entry_of({"seed": {"grid": [3]}}), tmp_path / "t").step()
    assert RunFolder(tmp_path / "t").read_result()["reason"].endswith("KeyError: 'x'")


def test_a_trial_that_meets_other_code_fails_with_the_rounds_that_it_has_and_goes_on_with_its_own(
    tmp_path: Path, entry_of: Callable[..., PreparedTrial]
) -> None:
    entry = entry_of({"seed": {"grid": [3]}})
    first = trial_of(entry, tmp_path / "t")
    first.step()
    first.end_early()
    given = json.dumps(entry.config.tree())
    spec = TrialSpec(folder=tmp_path / "t", config_json=given, metrics=("test_accuracy",))
    with pytest.raises(ConfigError, match="is not that with which the sweep was begun"):
        ActiveTrial(spec, sources={"fedsweep": "another"}).step()
    result = RunFolder(tmp_path / "t").read_result()
    assert (result["status"], result["rounds"]) == ("failed", 1)
    assert [report["round"] for report in played(trial_of(entry, tmp_path / "t"))] == [2, 3]


def test_runs_that_differ_in_method_alone_meet_the_same_clients_and_split(
    tmp_path: Path, tiny: Callable[..., dict[str, Any]]
) -> None:
    config = load_config(tiny({"method": {"grid": [{"name": "fedavg"}, {"name": "fedprox", "mu": 1.0}]}}))
    folders = [RunFolder(tmp_path / str(k)) for k in range(2)]
    for folder, trial in zip(folders, list_trials(config), strict=True):
        played(trial_of(make_entry(config, trial, uri=None), folder.path))
    first, second = (folder.read_rounds() for folder in folders)
    assert [r.cohort for r in first] == [r.cohort for r in second]
    assert folders[0].read_clients().equals(folders[1].read_clients())
    assert first[0].train_loss != second[0].train_loss or first[-1].test_loss != second[-1].test_loss


def test_short_rounds_are_reported_as_one(tmp_path: Path, entry_of: Callable[..., PreparedTrial]) -> None:
    entry = entry_of({"seed": {"grid": [1]}})
    [whole] = played(trial_of(entry, tmp_path / "whole", report_every_s=1e9))
    assert whole["round"] == 3 and {**whole} == played(trial_of(entry, tmp_path / "each"))[-1]
    hashes = {RunFolder(tmp_path / name).read_result()["model_sha256"] for name in ("whole", "each")}
    assert len(hashes) == 1


def test_flops_as_a_resource_are_added_up(tmp_path: Path, entry_of: Callable[..., PreparedTrial]) -> None:
    reports = played(trial_of(entry_of({"seed": {"grid": [1]}}), tmp_path / "t", resource="flops"))
    spent = [row.flops for row in RunFolder(tmp_path / "t").read_rounds()]
    assert [r["resource"] for r in reports] == [sum(spent[: n + 1]) for n in range(len(spent))] and min(spent) > 0


def test_a_trials_process_goes_by_the_commit_and_the_umask_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsweep.runs import facts
    from fedsweep.sweeps.trainable import Driver, SweepTrial

    monkeypatch.setattr(facts, "_told", {})
    monkeypatch.setattr(SweepTrial, "_begin", lambda self, config: None)
    before = os.umask(0o077)
    try:
        object.__new__(SweepTrial).setup({}, driver=Driver(umask=0o027, git_commit="abc"))
        assert facts.run_facts()["git_commit"] == "abc" and os.umask(before) == 0o027
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    "error", [ComponentError("a metric failed"), ClientJobError(client=0, round=1, step=1, reason="it diverged")]
)
def test_what_would_come_again_is_not_tried_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsweep.sweeps.trainable import FATAL_MARK, SweepTrial

    class Failing:
        def step(self) -> dict[str, Any]:
            raise error

        def last_report(self) -> dict[str, Any]:
            return {}

    monkeypatch.setattr(SweepTrial, "_begin", lambda self, config: Failing())
    monkeypatch.setattr(os, "umask", lambda mask: mask)
    trial = object.__new__(SweepTrial)
    trial.setup({})
    assert trial.step() == {FATAL_MARK: True}
    with pytest.raises(type(error)):
        trial.step()
