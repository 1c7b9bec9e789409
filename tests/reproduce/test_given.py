"""Finished runs that a table takes from another's ``runs.json``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsweep.errors import ConfigError, OutputError
from fedsweep.reproduce import given
from fedsweep.reproduce.given import RUNS_FILE, read_runs, taken_from_files, write_runs
from fedsweep.reproduce.reproduction import TableRequest, reproduction
from fedsweep.reproduce.task import begin, reproduce_table
from fedsweep.results.view import load_run
from fedsweep.sweeps.prepared import PreparedSweep
from fedsweep.sweeps.sweep_folder import SweepFolder, SweepPlan
from fedsweep.tracking.terminal.sweep_progress import SweepProgress

KEY, OTHER = "a" * 64, "b" * 64
CREATED: dict[str, Any] = {"config_yaml": None, "overwrite": False}


@pytest.fixture
def kept(make_run: Callable[..., Path], tmp_path: Path) -> Path:
    """A file with one finished run of three rounds."""
    columns = {"test_accuracy": [0.5, None, 0.1 + 0.2], "test_loss": [1.0, None, float("inf")], "bytes_up": [7, 7, 7]}
    run = make_run(tmp_path / "run", columns=columns, sources={"fedsweep": "0"}, git_commit="c" * 40)
    return write_runs({KEY: load_run(run)}, tmp_path / "kept")


def test_a_kept_run_is_the_run_to_the_last_bit_but_for_what_is_no_number(kept: Path, tmp_path: Path) -> None:
    run, again = load_run(tmp_path / "run"), read_runs(kept)[KEY]
    for name in ("round", "test_accuracy", "test_loss", "bytes_up", "lr", "comm_ratio", "total_bytes"):
        assert list(again.column(name)) == list(run.column(name))
    assert again.result == run.result and again.rounds == 3
    assert not {"cohort", "aggregation_weights", "timestamp_ms"} & again.columns.keys()
    tree = json.loads(kept.read_text())["runs"][KEY]
    assert tree["columns"]["bytes_up"] == 7 and tree["columns"]["test_loss"] == [1.0, None, "inf"]
    write_runs(read_runs(kept), tmp_path / "twice")
    assert (tmp_path / "twice" / RUNS_FILE).read_bytes() == kept.read_bytes()


def test_a_kept_run_has_the_size_of_its_group_and_its_best_accuracy(
    make_run: Callable[..., Path], tmp_path: Path
) -> None:
    columns = {"high_frequency": [(0, 3), (1,), None], "best_accuracy": [0.5, 0.5, 0.7]}
    run = load_run(make_run(tmp_path / "run", columns=columns))
    again = read_runs(write_runs({KEY: run}, tmp_path / "kept"))[KEY]
    for name in ("group_size", "best_accuracy"):
        assert list(again.column(name)) == list(run.column(name)) != []
    assert write_runs({KEY: again}, tmp_path / "twice").read_bytes() == (tmp_path / "kept" / RUNS_FILE).read_bytes()


def test_a_run_that_ended_before_its_first_round_is_not_kept(
    table_path: Path, make_run: Callable[..., Path], tmp_path: Path
) -> None:
    request, folder = TableRequest(table=str(table_path), scale="small"), SweepFolder(tmp_path / "out")
    task = begin(request, folder, resume=False, overwrite=False, costs_only=False)
    folder.create(SweepPlan(config_tree={}, trials=(), request=task.left.plan_request), **CREATED)
    for rounds, trial in enumerate(task.left.by_key.values()):
        make_run(folder.trial_path(trial), columns={"test_accuracy": [0.5] * rounds})
    assert [*read_runs(task._write_finished())] == [*task.left.by_key][1:]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "fedsweep table"}, "not a runs.json"),
        ({"version": 2}, "not a runs.json"),
        ({"runs": None}, "damaged"),
        ({"runs": {"../../etc": {"rounds": 1, "result": {}, "columns": {}}}}, "damaged"),
        ({"runs": {KEY: {"rounds": 0, "result": {}, "columns": {}}}}, "damaged"),
        ({"runs": {KEY: {"rounds": 1, "result": {"status": "failed"}, "columns": {"round": [1]}}}}, "has not finished"),
        ({"runs": {KEY: {"rounds": 1, "result": {"status": "finished"}, "columns": {}}}}, "not of 1 rounds"),
        (
            {"runs": {KEY: {"rounds": 2, "result": {"status": "finished"}, "columns": {"round": [1]}}}},
            "not of 2 rounds",
        ),
        ({"runs": {KEY: {"rounds": 1, "result": {}, "columns": {"round": ["<script>"]}}}}, "damaged"),
        ({"runs": {KEY: {"rounds": 10**9, "result": {"status": "finished"}, "columns": {"round": 1}}}}, "figures"),
        ({"runs": {KEY: {"rounds": 1, "result": {}, "columns": {"round": [1]}, "more": 1}}}, "damaged"),
    ],
)
def test_a_file_of_somebody_elses_is_refused_in_one_line(change: dict[str, Any], said: str, kept: Path) -> None:
    kept.write_text(json.dumps(json.loads(kept.read_text()) | change))
    with pytest.raises(OutputError, match=said) as caught:
        read_runs(kept)
    assert str(caught.value).startswith(str(kept)) and "\n" not in str(caught.value)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    for name, text in (("none.json", None), ("text.json", "hello"), ("list.json", "[]"), ("deep.json", "[" * 10**5)):
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(OutputError, match=name):
            read_runs(tmp_path / name)


def test_runs_of_other_code_stand_alone_but_not_beside_runs_to_come(kept: Path) -> None:
    alone, both = {KEY: {"fedsweep": "1"}}, {KEY: {"fedsweep": "1"}, OTHER: {"fedsweep": "1"}}
    assert [*taken_from_files([str(kept)], alone, allow_changed_code=False)] == [KEY]
    assert [*taken_from_files([str(kept.parent)], both, allow_changed_code=True)] == [KEY]
    with pytest.raises(
        ConfigError, match=r"changed since: fedsweep.* beside 1 that are still to be run.*allow-changed"
    ):
        taken_from_files([str(kept)], both, allow_changed_code=False)
    with pytest.raises(ConfigError, match="no run of those that are asked for"):
        taken_from_files([str(kept)], {OTHER: {"fedsweep": "1"}}, allow_changed_code=False)


@pytest.fixture
def given_all(table_path: Path, make_run: Callable[..., Path], tmp_path: Path) -> TableRequest:
    """A table all of whose runs are given."""
    return all_given(table_path, make_run, tmp_path)


def all_given(table: Path, make_run: Callable[..., Path], tmp_path: Path) -> TableRequest:
    request = TableRequest(table=str(table), scale="small")
    runs = {
        key: load_run(make_run(tmp_path / key, columns={"test_accuracy": [0.5]}))
        for key in reproduction(request).firsts
    }
    return replace(request, runs_from=(str(write_runs(runs, tmp_path)),))


def test_a_picture_that_the_table_no_longer_has_does_not_stay(given_all: TableRequest, tmp_path: Path) -> None:
    made = reproduce_table(given_all, out=tmp_path / "out")
    (made.folder / "figures").mkdir()
    for again in ({"resume": True}, {"overwrite": True}):
        old = made.folder / "figures" / "old.png"
        old.write_bytes(b"")
        request = replace(given_all, runs_from=()) if "resume" in again else given_all
        assert reproduce_table(request, out=made.folder, **again).grid.cells == made.grid.cells
        assert not old.exists() and "old" not in (made.folder / "table.html").read_text()


def test_what_replaces_a_table_begins_with_its_plan(given_all: TableRequest, tmp_path: Path) -> None:
    """Killed before it has run anything, it goes on; from the first table's plan and these runs nothing would."""
    made = reproduce_table(given_all, out=tmp_path / "out")
    request, folder = replace(given_all, runs_from=()), SweepFolder(made.folder)
    task = begin(request, folder, resume=False, overwrite=True, costs_only=False)

    def killed(prepared: PreparedSweep, going_on: bool) -> None:
        assert going_on and folder.read_plan().trials == prepared.plan.trials
        raise OSError

    with pytest.raises(OSError):
        replace(task, fresh=True).make(run=killed)
    again = begin(request, folder, resume=True, overwrite=False, costs_only=False)
    assert again.going_on and again.prepared().plan.trials == folder.read_plan().trials


def test_a_tables_file_may_be_called_otherwise(given_all: TableRequest, table_path: Path, tmp_path: Path) -> None:
    made = reproduce_table(given_all, out=tmp_path / "out")
    other = table_path.rename(table_path.with_name("other.yaml"))
    request = replace(given_all, table=str(other), runs_from=())
    assert reproduce_table(request, out=made.folder, resume=True).grid.cells == made.grid.cells


def test_runs_that_lie_where_a_table_begins_are_not_replaced(given_all: TableRequest, tmp_path: Path) -> None:
    (kept,) = given_all.runs_from
    folder, none = SweepFolder(tmp_path / "out"), replace(given_all, runs_from=())
    write_runs(read_runs(Path(kept)), folder.path)
    with pytest.raises(OutputError, match=r"runs\.json has runs, which this table would replace; choose another --out"):
        begin(none, folder, resume=False, overwrite=False, costs_only=False)
    for request, overwrite in ((given_all, False), (none, True)):
        assert begin(request, folder, resume=False, overwrite=overwrite, costs_only=False).folder is folder
    write_runs({}, folder.path)  # as a start that was ended before its plan leaves it
    assert begin(none, folder, resume=False, overwrite=False, costs_only=False).folder is folder


def test_given_runs_that_are_gone_are_to_be_brought_back(given_all: TableRequest, tmp_path: Path) -> None:
    made = reproduce_table(given_all, out=tmp_path / "out")
    (made.folder / RUNS_FILE).unlink()
    with pytest.raises(OutputError, match=r"not readable: .*; bring that file back, or begin again with --from and"):
        begin(
            replace(given_all, runs_from=()), SweepFolder(made.folder), resume=True, overwrite=False, costs_only=False
        )


def test_a_picture_that_is_not_made_of_given_runs_is_no_failure(
    changed: Callable[[str, str], Path], make_run: Callable[..., Path], tmp_path: Path
) -> None:
    path = changed(
        "  notes:\n", "  figures: [{name: parts, kind: participation}, {name: few, kind: curves, y: mu}]\n  notes:\n"
    )
    made = reproduce_table(all_given(path, make_run, tmp_path), out=tmp_path / "out")
    assert made.grid.notes[-1].startswith("The figure parts is left out: no run that it shows has any rounds, or they")
    assert "The figure parts is left out" in (made.folder / "table.txt").read_text()
    (problem,) = made.problems  # what is wrong with the table itself still is
    assert problem == "the figure few can't be drawn: figure few: no run has the column mu"


def test_a_table_without_given_runs_goes_on_whatever_its_file_of_runs_holds(table_path: Path, tmp_path: Path) -> None:
    request, folder = TableRequest(table=str(table_path), scale="small"), SweepFolder(tmp_path / "out")
    folder.create(SweepPlan(config_tree={}, trials=(), request=reproduction(request).plan_request), **CREATED)
    (folder.path / RUNS_FILE).write_text("cut off")
    assert not begin(request, folder, resume=True, overwrite=False, costs_only=False).given_runs


def test_a_file_has_room_for_the_largest_table() -> None:
    cells = reproduction(TableRequest(table="dynamicfl/figure1", scale="full")).cells
    rounds = sum(cell.config.training.rounds for cell in cells)
    assert 200 * rounds < given._MOST_BYTES and 35 * rounds < given._MOST_CELLS


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("shared_ray")
def test_a_table_goes_on_in_portions_from_its_files_alone(table_path: Path, tmp_path: Path) -> None:
    """One seed here, the other there; then both without a run, and the same again after --resume."""

    def wanted(*seeds: int, runs_from: Path | None = None) -> TableRequest:
        places = () if runs_from is None else (str(runs_from),)
        return TableRequest(table=str(table_path), scale="small", seeds=seeds, runs_from=places)

    first = reproduce_table(wanted(0), out=tmp_path / "here" / "first").folder / RUNS_FILE
    second = reproduce_table(wanted(0, 1, runs_from=first), out=tmp_path / "there" / "second")
    assert [path.name.partition("seed=")[2] for path in second.folder.glob("0*")] == ["1"]
    task = begin(wanted(0, 1), SweepFolder(tmp_path / "whole"), resume=False, overwrite=False, costs_only=False)

    def interrupted(prepared: PreparedSweep, going_on: bool) -> None:
        from fedsweep.sweeps.tuner import run_sweep

        run_sweep(prepared, SweepProgress(), resume=going_on)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace(task, fresh=True).make(run=interrupted)
    assert len(read_runs(task.folder.path / RUNS_FILE)) == 2
    whole = reproduce_table(wanted(0, 1), out=task.folder.path, resume=True)
    assert second.grid.cells == whole.grid.cells and not second.problems
    alone = reproduce_table(wanted(0, 1, runs_from=second.folder), out=tmp_path / "alone" / "table")
    assert alone.grid.cells == whole.grid.cells and not [*alone.folder.glob("0*")]
    assert any("2 of 2 runs were made before" in note for note in alone.grid.notes)
    assert (alone.folder / RUNS_FILE).read_bytes() == (second.folder / RUNS_FILE).read_bytes()
    for made in (second, alone):
        again = reproduce_table(wanted(0, 1), out=made.folder, resume=True)
        assert again.grid == made.grid


def test_given_runs_go_with_a_new_table_of_runs_alone(table_path: Path, kept: Path, tmp_path: Path) -> None:
    request, folder = (
        TableRequest(table=str(table_path), scale="small", runs_from=(str(kept),)),
        SweepFolder(tmp_path / "out"),
    )
    with pytest.raises(ConfigError, match="--from begins a table of runs"):
        begin(request, folder, resume=True, overwrite=False, costs_only=False)
    assert not folder.path.exists()
