"""A run that other code began goes on only where that is allowed, and then says so."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsweep.cli import main
from fedsweep.config.load import load_config
from fedsweep.driver.observers import Observer
from fedsweep.driver.run import Launch, plan_run, run_plan
from fedsweep.errors import ConfigError, OutputError
from fedsweep.finished.growth import grow
from fedsweep.records import RoundRecord
from fedsweep.runs import source_log
from fedsweep.runs.facts import computed_by
from fedsweep.runs.run_folder import RunFolder
from fedsweep.runs.source_log import begin_log, changed_since, changes_on_the_way, read_log
from fedsweep.runs.sources import changes, shared_sources, sources_of
from fedsweep.sweeps.prepare import prepare
from fedsweep.sweeps.reuse import finished_in, not_taken
from fedsweep.sweeps.sweep_folder import SweepFolder
from fedsweep.sweeps.trial import ActiveTrial, TrialSpec

TINY: dict[str, Any] = {
    "scenario": {"clients": 4, "partition": {"kind": "iid"}},
    "training": {"rounds": 3, "cohort_size": 2, "local_steps": 1},
    "checkpoint": {"every": 1},
    "tracking": {"uri": "none"},
}
Code = Callable[[str], None]


class Interrupt(Observer):
    def round_done(self, record: RoundRecord) -> None:
        raise KeyboardInterrupt


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Code:
    """Sets what the user's module is."""

    def is_now(digest: str) -> None:
        for place in ("fedsweep.driver.run", "fedsweep.sweeps.prepared_trial"):
            monkeypatch.setattr(f"{place}.sources_of", lambda tree: {"fedsweep": "1", "my.py": digest})

    is_now("first")
    return is_now


@pytest.fixture
def begun(tmp_path: Path, code: Code) -> Path:
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan_run(load_config(TINY)), tmp_path / "run", observers=[Interrupt()])
    return tmp_path / "run"


def test_a_run_of_the_same_code_goes_on(begun: Path) -> None:
    result = run_plan(plan_run(load_config(TINY)), begun, resume=True)
    assert result["sources"].keys() == {"fedsweep", "my.py", "the samples of digits"}
    assert result["sources"]["my.py"] == "first"
    assert result["sources_changed"] == []


def test_a_run_of_other_code_goes_on_where_it_is_allowed_and_says_so(
    begun: Path, code: Code, capsys: pytest.CaptureFixture[str]
) -> None:
    code("second")
    before = (begun / "sources.json").read_text()
    assert main(["run", "--resume", str(begun), "--quiet"]) == 2
    told = capsys.readouterr().err
    assert "made by other code or files (changed since: my.py)" in told and "--allow-changed-code" in told
    assert (begun / "sources.json").read_text() == before and RunFolder(begun).read_result()["rounds"] == 1
    assert main(["run", "--resume", str(begun), "--quiet", "--allow-changed-code"]) == 0
    result = RunFolder(begun).read_result()
    sentence = "from round 2 on, other code played it (changed since: my.py)"
    assert result["sources_changed"] == [sentence] and sentence in result["remarks"]
    assert f"note: {sentence}" in capsys.readouterr().err
    # Whatever comes back, such a run is nobody else's.
    swept = {**TINY, "sweep": {"space": {"seed": {"grid": [0]}}}}
    prepared = prepare(load_config(swept), SweepFolder(begun.parent / "sweep"), resume=False)
    runs, refused = finished_in([begun], prepared)
    assert not runs and "sources changed on the way" in not_taken(refused)


def test_a_run_without_a_checkpoint_begins_anew_with_what_is_here(begun: Path, code: Code) -> None:
    for path in (begun / "checkpoints").glob("*.json"):
        path.unlink()
    code("second")
    result = run_plan(plan_run(load_config(TINY)), begun, resume=True)
    assert result["sources_changed"] == [] and result["sources"]["my.py"] == "second"


@pytest.mark.parametrize("other", ["nothing", "code", "configuration"])
def test_a_run_that_begins_anew_otherwise_tells_nothing_of_the_rounds_before(
    tmp_path: Path, code: Code, other: str
) -> None:
    """MLflow would have kept the figures of the old ones, and the folder their pictures and tables."""

    class Failure(Observer):
        def round_done(self, record: RoundRecord) -> None:
            raise ValueError

    tree = {**TINY, "checkpoint": {"every": 10}, "evaluation": {"per_client": True}}
    folder = tmp_path / "run"
    with pytest.raises(ValueError):
        run_plan(plan_run(load_config(tree)), folder, observers=[Failure()])
    left = [folder / name for name in ("mlflow.json", "pictures/own.png", "client_accuracy.parquet")]
    assert left[-1].is_file()
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"{}")
    if other == "code":
        code("second")
    if other == "configuration":
        tree["evaluation"] = {}
    run_plan(plan_run(load_config(tree)), folder, resume=True)
    stays = {"nothing": left, "code": left[-1:], "configuration": []}[other]  # with the same configuration made anew
    assert [path for path in left if path.exists()] == stays
    assert RunFolder(folder).status == "finished" and len(RunFolder(folder).read_rounds()) == 3


@pytest.mark.parametrize("beyond", [0, 1])
def test_other_code_that_plays_rounds_again_gets_another_run_in_mlflow(begun: Path, code: Code, beyond: int) -> None:
    """A store keeps what it has of a round; the checkpoint is of round 1."""
    (record,) = RunFolder(begun).read_rounds()
    RunFolder(begun).write_rounds([record, *[replace(record, round=2)] * beyond])
    note = begun / "mlflow.json"
    note.write_text("{}")
    plan = plan_run(load_config(TINY))
    begin_log(begun, plan.sources, resume=True, allow_changed=False)
    other = {**plan.sources, "my.py": "second"}
    with pytest.raises(ConfigError, match="made by other code"):
        begin_log(begun, other, resume=True, allow_changed=False)
    assert note.exists()
    begin_log(begun, other, resume=True, allow_changed=True)
    assert note.exists() == (not beyond)
    # And back, where the other code may have played rounds without a checkpoint.
    note.write_text("{}")
    begin_log(begun, plan.sources, resume=True, allow_changed=False)
    assert note.exists() == (not beyond)


def test_a_run_that_does_not_say_what_began_it_is_of_other_code(begun: Path) -> None:
    (begun / "sources.json").unlink()
    with pytest.raises(ConfigError, match="does not say of which sources"):
        run_plan(plan_run(load_config(TINY)), begun, resume=True)


def test_a_run_that_goes_on_all_the_same_says_that_nobody_knows_what_began_it(begun: Path) -> None:
    (begun / "sources.json").unlink()
    begin_log(begun, {"my.py": "first"}, resume=True, allow_changed=True)
    (sentence,) = changes_on_the_way(begun)
    assert sentence.startswith("from round 2 on, other code played it (it does not say of which sources")


def test_a_run_that_goes_on_on_another_machine_says_so(
    begun: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = computed_by()
    assert read_log(begun)[0].machine == here and f"torch {torch.__version__.partition('+')[0]}" in here
    monkeypatch.setattr(source_log, "computed_by", lambda: "another CPU, torch 1")
    assert main(["run", "--resume", str(begun), "--quiet"]) == 0
    result = RunFolder(begun).read_result()
    (sentence,) = result["machines_changed"]
    assert sentence.startswith(f"from round 2 on it was driven by another CPU, torch 1, before by {here}")
    assert sentence in result["remarks"] and not result["sources_changed"]
    capsys.readouterr()
    RunFolder(begun).write_result({**result, "test_accuracy": 0.5})
    assert main(["verify", str(begun), "--quiet"]) == 1
    assert sentence in capsys.readouterr().out


def test_a_log_that_says_nothing_of_machines_is_gone_on_with_in_silence(begun: Path) -> None:
    (entry,) = json.loads((begun / "sources.json").read_text())
    (begun / "sources.json").write_text(
        json.dumps([{key: entry[key] for key in ("first_round", "sources", "changed")}])
    )
    result = run_plan(plan_run(load_config(TINY)), begun, resume=True)
    assert result["machines_changed"] == [] and len(read_log(begun)) == 2


def test_code_that_played_no_round_is_forgotten(begun: Path) -> None:
    """Interrupted before its first round; then the code is what it was before."""
    first = read_log(begun)
    begin_log(begun, {"my.py": "second"}, resume=True, allow_changed=True)
    assert changed_since(begun, first[0].sources) == ""
    begin_log(begun, first[0].sources, resume=True, allow_changed=False)
    assert read_log(begun) == first


@pytest.mark.parametrize(
    "text", ["{", "{}", '[{"first_round": 1}]', '[{"first_round": 1, "sources": 3, "changed": ""}]']
)
def test_a_damaged_log_is_told(begun: Path, text: str) -> None:
    (begun / "sources.json").write_text(text)
    with pytest.raises(OutputError, match=r"sources\.json"):
        run_plan(plan_run(load_config(TINY)), begun, resume=True)


def test_work_within_the_first_round_is_of_one_code(tmp_path: Path) -> None:
    begin_log(tmp_path, {"my.py": "first"}, resume=False, allow_changed=False)
    (tmp_path / "checkpoints").mkdir()
    now = {"my.py": "second"}
    assert not changed_since(tmp_path, now)  # nothing has been played
    (tmp_path / "checkpoints" / "round-000000.json").write_text("{}")
    assert changed_since(tmp_path, now) == "changed since: my.py"
    with pytest.raises(ConfigError, match=r"was made by other code or files \(changed since: my\.py\)"):
        begin_log(tmp_path, now, resume=True, allow_changed=False)
    begin_log(tmp_path, now, resume=True, allow_changed=True)
    assert changes_on_the_way(tmp_path) == ["from round 1 on, other code played it (changed since: my.py)"]
    assert not changed_since(tmp_path, now)


GRAPH = "0 1\n1 2\n2 3\n3 0\n"


@pytest.mark.parametrize("key", ["path", "file"])
def test_a_file_that_the_scenario_names_is_a_source(key: str, tmp_path: Path) -> None:
    path = tmp_path / "given.txt"
    tree = {"scenario": {"topology": {"kind": "file", key: str(path)}}}
    assert str(path) not in sources_of(tree)  # who reads it says that it is not there
    path.write_text(GRAPH)
    before = sources_of(tree)
    path.write_text(f"{GRAPH}0 2\n")
    assert changes(before, sources_of(tree)) == f"changed since: {path}"
    assert str(path) not in shared_sources(tree)  # other nodes need not have it
    replayed = {"scenario": {"availability": {"kind": "replay", key: str(path)}}}
    assert str(path) not in sources_of(replayed)  # what was recorded may go on


def test_a_run_does_not_go_on_in_another_world(tmp_path: Path) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(GRAPH)
    scenario = {"clients": 4, "partition": {"kind": "iid"}, "topology": {"kind": "file", "path": str(path)}}
    given = {
        **TINY,
        "method": {"name": "dpsgd"},
        "scenario": scenario,
        "training": {**TINY["training"], "cohort_size": 4},
    }
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan_run(load_config(given)), tmp_path / "run", observers=[Interrupt()])
    path.write_text("0 2\n2 1\n1 3\n3 0\n")
    with pytest.raises(ConfigError, match=r"was made by other code or files \(changed since: .*graph\.txt\)"):
        run_plan(plan_run(load_config(given)), tmp_path / "run", resume=True)


def test_more_rounds_are_for_the_same_code(begun: Path, code: Code) -> None:
    run_plan(plan_run(load_config(TINY)), begun, resume=True)
    code("second")
    config = (begun / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"changed since: my\.py"):
        grow(begun, rounds=5)
    assert (begun / "config.yaml").read_text() == config
    longer = grow(begun, rounds=5, allow_changed_code=True)
    result = run_plan(plan_run(longer), begun, resume=True, launch=Launch(allow_changed_code=True))
    assert result["rounds"] == 5 and "from round 4 on" in result["sources_changed"][0]


def test_a_sweeps_trials_are_of_one_code(tmp_path: Path, code: Code) -> None:
    given = {**TINY, "sweep": {"space": {"seed": {"grid": [0, 1]}}}}
    config, folder = load_config(given), SweepFolder(tmp_path / "sweep")
    prepared = prepare(config, folder, resume=False)
    folder.create(prepared.plan, config_yaml=config.to_yaml(), overwrite=False)
    first = folder.trial_path(prepared.plan.trials[0])
    run_plan(plan_run(prepared.entries[0].config), first)
    assert prepare(config, folder, resume=True).unfinished == prepared.entries[1:]
    code("second")
    with pytest.raises(ConfigError, match=r"0001-seed=0 was made by other code or files \(changed since: my\.py\)"):
        prepare(config, folder, resume=True)
    assert len(prepare(config, folder, resume=True, allow_changed_code=True).unfinished) == 1
    again = prepare(config, folder, resume=False, extend=True)
    assert [trial.folder for trial in again.plan.trials] == ["0003-seed=0", "0004-seed=1"]
    assert "1 of them by other code (changed since: my.py)" in again.extended and again.plan.beside == (first.name,)
    folder.write_plan(replace(folder.read_plan(), request={"table": "t.yaml"}))
    with pytest.raises(ConfigError, match=r"run such trials again \(remove their folders\) or keep them with"):
        prepare(config, folder, resume=True)
    folder.write_plan(replace(folder.read_plan(), request={}))
    kept = prepare(config, folder, resume=False, extend=True, allow_changed_code=True)
    assert [trial.folder for trial in kept.plan.trials] == ["0001-seed=0", "0003-seed=1"]


def test_a_sweep_that_has_finished_is_looked_at_whatever_the_code(tmp_path: Path, code: Code) -> None:
    config, folder = load_config({**TINY, "sweep": {"space": {"seed": {"grid": [0]}}}}), SweepFolder(tmp_path / "s")
    prepared = prepare(config, folder, resume=False)
    folder.create(prepared.plan, config_yaml=config.to_yaml(), overwrite=False)
    run_plan(plan_run(prepared.entries[0].config), folder.trial_path(prepared.plan.trials[0]))
    code("second")
    assert not prepare(config, folder, resume=True).unfinished


def test_a_trial_is_not_played_by_other_code_than_the_sweeps(tmp_path: Path, code: Code) -> None:
    spec = TrialSpec(
        folder=tmp_path / "t", config_json=json.dumps(load_config(TINY).tree()), metrics=("test_accuracy",)
    )
    there = {"fedsweep": "1", "my.py": "second", "of another trial.py": "3"}
    with pytest.raises(ConfigError, match=r"is not that with which the sweep was begun \(changed since: my\.py\)"):
        ActiveTrial(spec, sources=there).step()
    assert json.loads((tmp_path / "t" / "result.json").read_text())["status"] == "failed"
    assert ActiveTrial(TrialSpec(**{**vars(spec), "folder": tmp_path / "u"}), sources={"my.py": "first"}).step()
