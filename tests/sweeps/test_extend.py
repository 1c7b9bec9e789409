"""A sweep that gets more trials keeps every run whose configuration it still has."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsweep.api import run
from fedsweep.commands.sweep import Asked, begin
from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError, OutputError
from fedsweep.results.settings import group_settings, report_runs
from fedsweep.results.view import load_run
from fedsweep.runs.find import find_runs
from fedsweep.runs.remote_folder import read_from
from fedsweep.runs.run_folder import RunFolder
from fedsweep.sweeps.fairness import world_of
from fedsweep.sweeps.prepare import prepare
from fedsweep.sweeps.prepared import PreparedSweep
from fedsweep.sweeps.reuse import cut_by, finished_in, not_taken, take_over, taken_from
from fedsweep.sweeps.summary import summarise
from fedsweep.sweeps.sweep_folder import SweepFolder
from fedsweep.sweeps.trial import ActiveTrial

TinySweep = Callable[..., dict[str, Any]]
SEEDS = {"seed": {"grid": [0, 1]}}


@pytest.fixture(scope="module")
def done(tiny: TinySweep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two seeds, of which the first has finished."""
    path = tmp_path_factory.mktemp("sweep") / "sweep"
    config = load_config(tiny(SEEDS, rounds=1))
    prepared = prepare(config, SweepFolder(path), resume=False)
    prepared.folder.create(prepared.plan, config_yaml=config.to_yaml(), overwrite=False)
    run(prepared.entries[0].config, out=prepared.folder.trial_path(prepared.entries[0].trial))
    return path


def extended(path: Path, given: dict[str, Any]) -> PreparedSweep:
    return prepare(load_config(given), SweepFolder(path), resume=False, extend=True)


def folders(prepared: PreparedSweep) -> list[str]:
    return [trial.folder for trial in prepared.plan.trials]


def test_what_has_finished_is_kept_however_the_configuration_is_written(tiny: TinySweep, done: Path) -> None:
    method = {"method": {"grid": [{"name": "fedprox"}, {"name": "fedavg"}]}, "seed": {"grid": [0, 1]}}
    prepared = extended(done, tiny(method, rounds=1, more={"name": "renamed"}))
    assert folders(prepared) == ["0003-FedProx_seed=0", "0004-FedProx_seed=1", "0001-seed=0", "0005-FedAvg_seed=1"]
    assert prepared.extended == "1 finished trials kept, 3 to run"
    assert [prepared.folder.has_finished(trial) for trial in prepared.plan.trials] == [False, False, True, False]
    assert len(prepared.unfinished) == 3


def test_seeds_before_and_after_an_extension_that_calls_them_otherwise_are_one_setting(
    tiny: TinySweep, done: Path, tmp_path: Path
) -> None:
    path = tmp_path / "copy"
    shutil.copytree(done, path)
    prepared = extended(path, tiny(SEEDS, rounds=1, more={"name": "renamed"}))
    prepared.write_extension()
    run(prepared.unfinished[0].config, out=prepared.folder.trial_path(prepared.unfinished[0].trial))
    settings = group_settings(report_runs([load_run(folder) for folder in find_runs(path)])[0])
    assert [(setting.label, len(setting.counted)) for setting in settings] == [("renamed FedAvg", 2)]


def test_runs_without_a_trial_stay_beside_and_their_numbers_are_not_given_again(tiny: TinySweep, done: Path) -> None:
    prepared = extended(done, tiny(SEEDS, rounds=2))
    assert folders(prepared) == ["0003-seed=0", "0004-seed=1"] and prepared.plan.beside == ("0001-seed=0",)
    assert (
        prepared.extended == "0 finished trials kept, 2 to run; 1 that this configuration has no trial for, beside them"
    )


def test_the_plan_is_gone_on_by_and_extended_again(tiny: TinySweep, done: Path, tmp_path: Path) -> None:
    path = tmp_path / "copy"
    shutil.copytree(done, path)
    extended(path, tiny(SEEDS, rounds=2)).write_extension()
    resumed = prepare(load_config(tiny(SEEDS, rounds=2)), SweepFolder(path), resume=True)
    assert folders(resumed) == ["0003-seed=0", "0004-seed=1"] and resumed.plan.beside == ("0001-seed=0",)
    again = extended(path, tiny(SEEDS, rounds=1))
    assert folders(again) == ["0001-seed=0", "0005-seed=1"] and not again.plan.beside
    SweepFolder(path)._clear()
    assert not (path / "0001-seed=0").exists()


def test_a_run_that_took_the_place_of_another_codes_is_kept_by_the_next_extension(
    tiny: TinySweep, done: Path, tmp_path: Path
) -> None:
    path = tmp_path / "copy"
    shutil.copytree(done, path)
    result = path / "0001-seed=0" / "result.json"
    fresh = result.read_text()
    result.write_text(fresh.replace('"fedsweep/engine": "', '"fedsweep/engine": "x'))
    first = extended(path, tiny(SEEDS, rounds=1))
    assert folders(first) == ["0003-seed=0", "0004-seed=1"] and first.plan.beside == ("0001-seed=0",)
    first.write_extension()
    shutil.copytree(path / "0001-seed=0", path / "0003-seed=0")
    (path / "0003-seed=0" / "result.json").write_text(fresh)
    again = extended(path, tiny(SEEDS, rounds=1))
    assert folders(again) == ["0003-seed=0", "0005-seed=1"] and again.plan.beside == ("0001-seed=0",)
    assert again.extended.startswith("1 finished trials kept, 1 to run; 1 that this configuration has no trial for")


def test_what_can_not_be_extended_is_refused(tiny: TinySweep, done: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="known beforehand"):
        extended(done, tiny({"training.optimizer.lr": {"uniform": [0.1, 0.2]}}, scheduler="pbt", samples=2))
    with pytest.raises(OutputError, match="holds no sweep"):
        extended(tmp_path, tiny(SEEDS))


def test_a_hostile_name_beside_the_trials_is_refused(tiny: TinySweep, done: Path, tmp_path: Path) -> None:
    plan = (done / "sweep.json").read_text()
    (tmp_path / "sweep.json").write_text(plan.replace('"trials"', '"beside": ["../other"], "trials"', 1))
    with pytest.raises(OutputError, match="no name of a trial"):
        extended(tmp_path, tiny(SEEDS))


def test_links_in_a_foreign_run_and_its_address_are_not_taken_over(tiny: TinySweep, done: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    shutil.copytree(done / "0001-seed=0", foreign)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "secret").write_text("mine")
    (foreign / "folder").symlink_to(tmp_path / "mine")
    (foreign / "checkpoints" / "file").symlink_to(tmp_path / "mine" / "secret")
    (foreign / ".copy.json").write_text("{}")  # whose address is not the trial's
    config = load_config(tiny({"seed": {"grid": [0, 1]}}, rounds=1, more={"name": "other"}))
    prepared = prepare(config, SweepFolder(tmp_path / "other"), resume=False)
    runs, _ = finished_in([foreign], prepared)
    take_over(prepared, runs, begun=False, overwrite=False)
    (taken,) = runs
    names = {path.name for path in taken.rglob("*")}
    assert "model.safetensors" in names and not names & {"folder", "file", "secret", ".copy.json"}


def test_runs_from_an_address_are_taken_over_from_there(tiny: TinySweep, done: Path, tmp_path: Path) -> None:
    config = load_config(tiny({"seed": {"grid": [0, 1]}}, rounds=1, more={"name": "other"}))
    prepared = prepare(config, SweepFolder(tmp_path / "other"), resume=False)
    with read_from([f"file://{done}"]) as places:
        runs, _ = finished_in(map(Path, places), prepared)
        take_over(prepared, runs, begun=False, overwrite=False)
    ((taken, run_there),) = runs.items()
    assert taken_from(taken) == f"file://{done}/0001-seed=0"
    assert "same configuration in sweep not taken over" in not_taken({run_there: "torch"})
    with read_from([f"file://{done}/0001-seed=0"]) as places:
        runs, _ = finished_in(map(Path, places), prepare(config, SweepFolder(tmp_path / "third"), resume=False))
    assert "same configuration in sweep not taken over" in not_taken(dict.fromkeys(runs.values(), "torch"))


@pytest.fixture
def cut(done: Path, tmp_path: Path) -> RunFolder:
    """A run of a sweep, in the folder ``cut``, for tests to say what ended it."""
    shutil.copytree(done, tmp_path / "cut")
    return RunFolder(tmp_path / "cut" / "0001-seed=0")


def sweep_without_runs_ended_by(reason: str, cut: RunFolder, tiny: TinySweep) -> PreparedSweep:
    """The run's sweep, extended, which plays it anew; nor does another sweep take it over."""
    cut.write_result({**cut.read_result(), "stopped_by": reason})
    other = SweepFolder(cut.path.parents[1] / "o")
    whole = prepare(load_config(tiny(SEEDS, rounds=1, more={"name": "o"})), other, resume=False)
    assert finished_in([cut.path.parent], whole) == ({}, {})
    prepared = extended(cut.path.parent, tiny(SEEDS, rounds=1))
    assert folders(prepared) == ["0003-seed=0", "0004-seed=1"]
    return prepared


def test_runs_that_a_scheduler_ended_are_no_whole_runs(tiny: TinySweep, cut: RunFolder, tmp_path: Path) -> None:
    prepared = sweep_without_runs_ended_by("scheduler", cut, tiny)
    assert prepared.plan.beside == ("0001-seed=0",)
    assert prepared.extended.endswith(
        "; 1 that this configuration has no trial for or that a scheduler ended, beside them"
    )
    raced = extended(tmp_path / "cut", tiny(SEEDS, rounds=1, scheduler="median"))
    assert folders(raced)[0] == "0001-seed=0"
    own, worlds = [entry.trial for entry in raced.entries], [world_of(entry.config) for entry in raced.entries]
    summary = summarise(raced.folder, own, worlds, config=raced.config)
    assert [setting.cut_short for setting in summary.settings] == [1]


def test_runs_that_a_studys_budget_ended_are_no_whole_runs(tiny: TinySweep, cut: RunFolder, tmp_path: Path) -> None:
    prepared = sweep_without_runs_ended_by("total_bytes", cut, tiny)
    assert "or that a budget ended, beside" in prepared.extended
    assert folders(extended(tmp_path / "cut", tiny(SEEDS, rounds=1, budget={"trials": 9})))[0] == "0001-seed=0"
    # A limit of its own, also one that its method spends, is its own end.
    config = load_config(cut.path / "config.yaml").tree()
    config["scenario"]["budgets"] = {"kind": "total", "total_bytes": "1 GB"}
    cut.write_config(load_config(config).to_yaml())
    assert cut_by(cut.path) == ""


def test_runs_of_a_folder_that_is_overwritten_are_not_taken_over_from_there(
    tiny: TinySweep, done: Path, tmp_path: Path
) -> None:
    shutil.copytree(done, tmp_path / "sweep")
    config = load_config(tiny({"seed": {"grid": [5, 0]}}, rounds=1))
    for place in (tmp_path, tmp_path / "sweep"):
        asked = Asked(reuse=(place,), dry_run=False, overwrite=True, dashboard=False, quiet=True)
        with pytest.raises(
            ConfigError, match=r"--overwrite removes .* can't take over its runs .* --extend keeps them"
        ):
            begin(config, SweepFolder(tmp_path / "sweep"), asked)
    assert (tmp_path / "sweep" / "0001-seed=0" / "model.safetensors").is_file()


def test_runs_whose_values_were_moved_on_the_way_are_no_runs_of_the_last_ones(tiny: TinySweep, tmp_path: Path) -> None:
    key = "training.optimizer.lr"
    config = load_config(tiny({key: {"uniform": [0.01, 0.1]}}, rounds=2, scheduler="pbt", samples=2))
    pbt = prepare(config, SweepFolder(tmp_path / "pbt"), resume=False)
    pbt.folder.create(pbt.plan, config_yaml=config.to_yaml(), overwrite=False)
    finished, begun = (ActiveTrial(pbt.describe(entry)["spec"]) for entry in pbt.entries)
    while not finished.step()["done"]:
        pass
    begun.step()
    begun.end_early()
    (begun.folder / "result.json").unlink()
    space = {key: {"grid": [entry.trial.values[key] for entry in pbt.entries]}}
    plain = prepare(load_config(tiny(space, rounds=2)), SweepFolder(tmp_path / "plain"), resume=False)
    assert finished_in([pbt.folder.path], plain) == ({}, {})
    prepared = extended(pbt.folder.path, tiny(space, rounds=2))
    assert [trial.number for trial in prepared.plan.trials] == [3, 4] and prepared.plan.beside == tuple(folders(pbt))


def test_finished_runs_of_another_folder_are_taken_over(tiny: TinySweep, done: Path, tmp_path: Path) -> None:
    method = {"method": {"grid": [{"name": "fedprox"}, {"name": "fedavg"}]}, "seed": {"grid": [0, 1]}}
    config = load_config(tiny(method, rounds=1, more={"name": "other"}))
    prepared = prepare(config, SweepFolder(tmp_path / "other"), resume=False)
    runs, refused = finished_in([done], prepared)
    assert runs == {tmp_path / "other" / "0003-FedAvg_seed=0": done / "0001-seed=0"} and not refused
    take_over(prepared, runs, begun=False, overwrite=False)
    assert [entry.trial.number for entry in prepared.unfinished] == [1, 2, 4]
    kept, copied = (
        path / "model.safetensors" for path in (done / "0001-seed=0", tmp_path / "other/0003-FedAvg_seed=0")
    )
    assert kept.read_bytes() == copied.read_bytes()
    names = [load_config(path.parent / "config.yaml").name for path in (kept, copied)]
    assert names == ["tiny FedAvg", "other FedAvg"]
    assert finished_in([done, done / "0001-seed=0"], prepared) == ({}, {})
    space = {"training.optimizer.lr": {"uniform": [0.1, 0.2]}}
    pbt = prepare(load_config(tiny(space, scheduler="pbt", samples=2)), SweepFolder(tmp_path / "pbt"), resume=False)
    assert any("settings are named by the values that trials began with" in note for note in pbt.notes)
    with pytest.raises(ConfigError, match="trials known beforehand, but"):
        finished_in([done], pbt)
    (tmp_path / "empty").mkdir()
    with pytest.raises(OutputError, match="neither a run's folder nor one with runs"):
        finished_in([tmp_path / "empty"], prepared)


def test_a_search_begins_with_the_finished_runs_of_its_space(tiny: TinySweep, done: Path, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    methods = {"choice": [{"name": "fedprox", "mu": 0.1}, {"name": "fedavg"}]}
    space = {"method": methods, "training.optimizer.lr": {"loguniform": [0.01, 0.1]}}
    search = prepare(
        load_config(tiny(space, rounds=1, search="optuna", samples=3)), SweepFolder(tmp_path / "s"), resume=False
    )
    runs, refused = finished_in([done], search)
    [entry] = search.entries
    assert not refused and list(runs) == [search.folder.trial_path(entry.trial)]
    assert entry.trial.values == {"method": {"name": "fedavg"}, "training.optimizer.lr": 0.05, "seed": 0}
    take_over(search, runs, begun=False, overwrite=False)
    assert search.most == 4 and search.outcomes()[1].values is not None and search.spent.trials == 0
    assert finished_in([done], search)[0] == {} and len(search.entries) == 1
    other = prepare(
        load_config(tiny(space, rounds=2, search="optuna", samples=3)), SweepFolder(tmp_path / "t"), resume=False
    )
    assert finished_in([done], other) == ({}, {}) and not other.entries
