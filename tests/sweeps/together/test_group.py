"""Trials that are played side by side are the runs that each is alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsweep import run
from fedsweep.config.load import load_config
from fedsweep.driver.observers import RunInfo
from fedsweep.errors import ConfigError
from fedsweep.runs.run_folder import RunFolder
from fedsweep.sweeps.prepare import prepare
from fedsweep.sweeps.prepared import PreparedSweep
from fedsweep.sweeps.schedulers import ListedTrials
from fedsweep.sweeps.space import TRIAL
from fedsweep.sweeps.sweep_folder import SweepFolder
from fedsweep.sweeps.together.group import REASON, TOGETHER, TrialGroup
from fedsweep.sweeps.trial import FINISHED, OTHERS, TrialSpec
from fedsweep.sweeps.tune_callback import Watcher
from fedsweep.tracking.terminal.sweep_progress import SweepProgress

LANES = {"runtime": {"executor": "lanes", "lanes": 5}}
RATE = "training.optimizer.lr"
SAME = ("status", "rounds", "model_sha256", "total_bytes", "flops", "test_accuracy", "config_hash", "executor")


@pytest.fixture
def prepared(tmp_path: Path, tiny: Callable[..., dict[str, Any]]) -> Callable[..., PreparedSweep]:
    def make(space: dict[str, Any], *, more: dict[str, Any] = LANES, **sweep: Any) -> PreparedSweep:
        config = load_config(tiny(space, more=more, **{"together": 3, **sweep}))
        return prepare(config, SweepFolder(tmp_path / "sweep"), resume=False)

    return make


@pytest.fixture
def specs(prepared: Callable[..., PreparedSweep]) -> list[TrialSpec]:
    """Three seeds, which report each round."""
    study = prepared({"seed": {"grid": [0, 1, 2]}})
    given = [study.describe(entry)["spec"] for entry in study.entries]
    return [TrialSpec(folder=s.folder, config_json=s.config_json, metrics=s.metrics) for s in given]


def played(group: TrialGroup) -> list[dict[str, Any]]:
    reports = [group.step()]
    while not reports[-1]["done"]:
        reports.append(group.step())
    return reports


def left_in(folder: Path) -> tuple[Any, ...]:
    """What a run leaves that says what it computed."""
    trial = RunFolder(folder)
    result = trial.read_result()
    ledger = [(r.cohort, r.bytes_up, r.bytes_down, r.train_loss, r.test_accuracy) for r in trial.read_rounds()]
    files = sorted(path.name for path in (folder / "checkpoints").iterdir())
    return tuple(result[key] for key in SAME), ledger, files


@pytest.fixture(scope="module")
def alone(tiny: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """What runs of the three seeds leave."""
    above = tmp_path_factory.mktemp("alone")
    for seed in range(3):
        run(tiny({}, more={**LANES, "seed": seed}), out=above / str(seed))
    return [left_in(above / str(seed)) for seed in range(3)]


def test_three_seeds_leave_what_each_leaves_alone(specs: list[TrialSpec], alone: list[Any]) -> None:
    reports = played(TrialGroup(specs))
    names = [spec.folder.name for spec in specs]
    assert [[*report[TOGETHER]] for report in reports] == [names] * 3
    assert [[report["round"], report[FINISHED]] for report in reports] == [[1, False], [2, False], [3, True]]
    assert [left_in(spec.folder) for spec in specs] == alone
    assert len({RunFolder(spec.folder).read_result()["model_sha256"] for spec in specs}) == 3


def test_trials_that_are_put_away_go_on_together_to_the_same_models(specs: list[TrialSpec], alone: list[Any]) -> None:
    group = TrialGroup(specs)
    group.step()
    group.end_early()
    told = [RunFolder(spec.folder).read_result() for spec in specs]
    assert [(result["status"], result["reason"], result["rounds"]) for result in told] == [
        ("killed", "interrupted", 1)
    ] * 3
    group.end_early()  # nothing more to end
    assert [report["round"] for report in played(TrialGroup(specs))] == [2, 3]
    assert [left_in(spec.folder) for spec in specs] == alone


def test_one_that_has_finished_only_says_so_and_the_others_go_on(specs: list[TrialSpec], alone: list[Any]) -> None:
    played(TrialGroup(specs[:1]))
    before = RunFolder(specs[0].folder).read_result()
    first, *rest = played(TrialGroup(specs))
    assert first[TOGETHER][specs[0].folder.name][FINISHED]
    assert all([*report[TOGETHER]] == [spec.folder.name for spec in specs[1:]] for report in rest)
    assert RunFolder(specs[0].folder).read_result() == before
    assert [left_in(spec.folder) for spec in specs] == alone


def test_one_that_fails_ends_alone_with_its_reason(specs: list[TrialSpec], alone: list[Any]) -> None:
    tree = json.loads(specs[1].config_json)
    tree["training"]["optimizer"]["lr"] = 1e30
    wild = TrialSpec(folder=specs[1].folder, config_json=json.dumps(tree), metrics=specs[1].metrics)
    nowhere = TrialSpec(folder=specs[2].folder, config_json='{"model": {"name": "none"}}', metrics=specs[2].metrics)
    reports = played(TrialGroup([specs[0], wild, nowhere]))
    failed = {name: own[REASON] for report in reports for name, own in report[TOGETHER].items() if REASON in own}
    assert [*failed] == [nowhere.folder.name, wild.folder.name] or [*failed] == [wild.folder.name, nowhere.folder.name]
    assert failed[wild.folder.name].startswith("ClientJobError: ")
    assert failed[nowhere.folder.name].startswith("ConfigError: ")
    assert RunFolder(wild.folder).read_result()["status"] == "failed"
    assert left_in(specs[0].folder) == alone[0]


def begun(study: PreparedSweep, at_once: int = 1) -> list[list[int]]:
    """The numbers of the trials that begin in each process, one process after the other."""
    feed, numbers = ListedTrials(study, at_once), {entry.trial.folder: entry.trial.number for entry in study.entries}
    groups = []
    while isinstance(one := feed.suggest(str(len(groups))), dict):
        folders = [one[TRIAL]["spec"].folder.name, *(spec.folder.name for spec in one[TRIAL].get(OTHERS, ()))]
        groups.append([numbers[folder] for folder in folders])
    return groups


def test_trials_of_one_step_begin_together_seeds_of_a_setting_first(prepared: Callable[..., PreparedSweep]) -> None:
    study = prepared({RATE: {"grid": [0.1, 0.2]}, "seed": {"grid": [0, 1]}})
    rates = {entry.trial.number: entry.trial.values[RATE] for entry in study.entries}
    assert [[rates[number] for number in group] for group in begun(study)] == [[0.1, 0.1, 0.2], [0.2]]


@pytest.mark.parametrize(
    ("key", "values", "groups"),
    [
        ("training.batch_size", [4, 8], 2),
        ("model.hidden_width", [8, 16], 2),
        ("training.optimizer", [{"name": "sgd"}, {"name": "sgd", "momentum": 0.5}], 2),
        ("method", [{"name": "fedavg"}, {"name": "fedprox"}], 2),
        ("method", [{"name": "fedavg"}, {"name": "fedavgm"}], 1),
        ("scenario.partition.dirichlet_alpha", [0.3, 1.0], 1),
        ("training.cohort_size", [1, 2], 1),
    ],
)
def test_what_takes_another_step_begins_apart(
    prepared: Callable[..., PreparedSweep], key: str, values: list[Any], groups: int
) -> None:
    partition = {"kind": "dirichlet", "dirichlet_alpha": 1.0}
    more = {**LANES, "scenario": {"clients": 6, "partition": partition}}
    study = prepared({key: {"grid": values}, "seed": {"grid": [0, 1]}}, more=more, together=4)
    assert len(begun(study)) == groups


def test_trials_of_other_rates_and_servers_leave_what_each_leaves_alone(
    prepared: Callable[..., PreparedSweep], tmp_path: Path
) -> None:
    methods = [{"name": "fedavg"}, {"name": "fedavgm"}]
    study = prepared({RATE: {"grid": [0.05, 0.2]}, "method": {"grid": methods}}, together=4)
    specs = [study.describe(entry)["spec"] for entry in study.entries]
    played(TrialGroup(specs))
    for spec in specs:
        alone = tmp_path / "alone" / spec.folder.name
        run(json.loads(spec.config_json), out=alone)
        assert left_in(spec.folder) == left_in(alone)
    assert len({RunFolder(spec.folder).read_result()["model_sha256"] for spec in specs}) == 4


def test_no_more_begin_together_than_are_asked_for(prepared: Callable[..., PreparedSweep]) -> None:
    feed = ListedTrials(prepared({"seed": {"grid": [0, 1, 2]}}, together=2))
    assert [len(feed.suggest(name)[TRIAL].get(OTHERS, ())) for name in "ab"] == [1, 0]


@pytest.mark.parametrize(
    ("sweep", "more", "words"),
    [
        ({"scheduler": "asha"}, LANES, "goes with no sweep.scheduler"),
        ({"budget": {"trials": 2}}, LANES, "goes with no sweep.budget"),
        ({}, {"runtime": {**LANES["runtime"], "address": "auto"}}, "goes with no runtime.address"),
        ({}, {}, "set runtime.executor=lanes"),
        ({}, {"runtime": {**LANES["runtime"], "client_actors": 2}}, "without client actors"),
    ],
)
def test_what_has_to_be_alone_is_refused(
    prepared: Callable[..., PreparedSweep], sweep: dict[str, Any], more: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match="sweep.together=3 .*" + words):
        prepared({"seed": {"grid": [0, 1]}}, more=more, **sweep)


def test_trials_that_share_no_step_are_refused(prepared: Callable[..., PreparedSweep]) -> None:
    with pytest.raises(ConfigError, match="no two of these"):
        prepared({"training.batch_size": {"grid": [4, 8]}})


AUTO: dict[str, Any] = {"runtime": {"executor": "auto"}}


def test_small_networks_are_taken_in_lanes_where_the_sweep_leaves_it_open(
    prepared: Callable[..., PreparedSweep],
) -> None:
    study = prepared({"model.hidden_width": {"grid": [8, 4000]}, "seed": {"grid": [0, 1]}}, more=AUTO, together="auto")
    runtimes = [(entry.trial.values["model.hidden_width"], entry.config.runtime) for entry in study.entries]
    assert [(width, runtime.executor, runtime.lanes) for width, runtime in runtimes] == [
        (8, "lanes", 40),
        (4000, "auto", "auto"),
    ] * 2
    assert [entry.user_config.runtime.lanes for entry in study.entries] == [40, "auto"] * 2
    assert begun(study) == [[1, 3], [2], [4]]
    assert any("takes 2 of 4 trials in lanes" in note for note in study.notes)


@pytest.mark.parametrize(
    ("cohort", "at_once", "lanes", "groups"),
    [
        (2, 1, 40, [5]),
        (2, 2, 40, [3, 2]),
        (2, 8, 40, [1] * 5),
        (20, 1, 40, [2, 2, 1]),
        (30, 1, 30, [1] * 5),
        (50, 1, 25, [1] * 5),
    ],
)
def test_as_many_are_played_together_as_fill_the_lanes_and_keep_all_processes_busy(
    prepared: Callable[..., PreparedSweep], cohort: int, at_once: int, lanes: int, groups: list[int]
) -> None:
    more = {**AUTO, "scenario": {"clients": 60}, "training": {"cohort_fraction": None, "cohort_size": cohort}}
    study = prepared({"seed": {"grid": [0, 1, 2, 3, 4]}}, more=more, together="auto")
    assert {entry.config.runtime.lanes for entry in study.entries} == {lanes}
    assert [len(group) for group in begun(study, at_once)] == groups


@pytest.mark.parametrize(
    ("more", "sweep"),
    [
        ({}, {}),  # the loop is what is asked for
        ({**AUTO, "method": {"name": "fedgen"}}, {}),  # whose objective draws random numbers
        (AUTO, {"scheduler": "asha"}),
        (AUTO, {"budget": {"trials": 2}}),
    ],
)
def test_where_lanes_are_no_use_nothing_is_chosen(
    prepared: Callable[..., PreparedSweep], more: dict[str, Any], sweep: dict[str, Any]
) -> None:
    study = prepared({"seed": {"grid": [0, 1]}}, more=more, together="auto", **sweep)
    assert {entry.config.runtime.executor for entry in study.entries} <= {"auto", "loop"}
    assert not any("together" in note for note in study.notes)
    assert begun(study) == [[1], [2]]


def test_the_audience_hears_of_each_trials_rounds_and_end(tmp_path: Path) -> None:
    heard: list[tuple[str, ...]] = []

    class Audience(SweepProgress):
        def round_done(self, name: str, result: Any) -> None:
            heard.append((name, str(result["round"])))

        def ended(self, name: str, status: str, remark: str | None) -> None:
            heard.append((name, status, str(remark)))

    names = ("0001", "0002")
    watcher = Watcher(Audience(), None)
    first, second = (SimpleNamespace(folder=tmp_path / name) for name in names)
    for spec in (first, second):
        watcher.add(RunInfo(name="t", folder=spec.folder, config={}, tags={}, planned_rounds=3))
    trial: Any = SimpleNamespace(config={TRIAL: {"spec": first, OTHERS: [second]}}, last_result={FINISHED: True})
    reports = {"0001": {"round": 3, FINISHED: True}, "0002": {"round": 2, FINISHED: False, REASON: "E: no"}}
    watcher.on_trial_result(1, [], trial, {"round": 3, TOGETHER: reports})
    watcher.on_trial_complete(1, [], trial)
    assert heard == [("0001", "3"), ("0001", "finished", "None"), ("0002", "2"), ("0002", "failed", "E: no")]
