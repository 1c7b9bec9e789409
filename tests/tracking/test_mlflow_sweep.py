from __future__ import annotations

import shutil
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from mlflow_server import MlflowServer

from fedsweep.driver.observers import RunInfo
from fedsweep.records import RoundRecord
from fedsweep.runs.run_folder import RunFolder
from fedsweep.testing import tiny_record
from fedsweep.tracking import mlflow_sweep
from fedsweep.tracking.mlflow_run import MlflowRun, is_complete
from fedsweep.tracking.mlflow_store import check_store, open_store, sqlite_uri
from fedsweep.tracking.mlflow_sweep import SweepTracker
from fedsweep.tracking.mlflow_sync import FolderSync


def record(round: int, *, trial: int = 0, timestamp_ms: int = 0) -> RoundRecord:
    return tiny_record(
        round,
        timestamp_ms=timestamp_ms or 1_700_000_000_000 + 1000 * round,
        test_accuracy=min(1.0, 0.01 * round + 0.0001 * trial),
        test_loss=1.0 / round,
        train_loss=2.0 / round,
        bytes_up=20_000,
        bytes_down=20_000,
    )


def trial(folder: Path, number: int) -> RunInfo:
    path = folder / f"{number:04d}-seed={number}"
    if not path.is_dir():
        RunFolder.create(path, overwrite=False).write_config("scenario: {}\nmethod: {}\n")
    return RunInfo(
        name="s seed", folder=path, config={"seed": number}, tags={"fedsweep.method": "fedavg"}, planned_rounds=20
    )


def finished(one: RunInfo, rounds: int, *, timestamp_ms: int = 0) -> None:
    run = RunFolder(one.folder)
    run.write_rounds([record(k, timestamp_ms=timestamp_ms) for k in range(1, rounds + 1)])
    run.write_result({"status": "finished", "rounds": rounds})


Make = Callable[..., SweepTracker]


@pytest.fixture
def make(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes trackers that rest no longer than ``every_s`` and warn of nothing: here nobody else needs the machine."""
    monkeypatch.setattr(mlflow_sweep, "_REST", 0.0)
    monkeypatch.setattr(mlflow_sweep, "_warn", pytest.fail)
    folder = tmp_path / "sweep"
    folder.mkdir()

    def begin(every_s: float = 0.01, *, uri: str = sqlite_uri(store)) -> SweepTracker:
        monkeypatch.setattr(mlflow_sweep, "_EVERY_S", every_s)
        tracker = SweepTracker(uri=uri, experiment="e", folder=folder)
        tracker.start(name="s", config={"seed": 0}, tags={})
        return tracker

    return begin


def kill(tracker: SweepTracker) -> None:
    """What a SIGKILL leaves: what was not sent yet is not sent any more."""
    tracker._over.set()
    while any(thread.name == "fedsweep-tracking" for thread in threading.enumerate()):
        time.sleep(0.01)


def played(tracker: SweepTracker, trials: list[RunInfo], records: list[RoundRecord]) -> None:
    """Trials that have written these rounds, of which the store has got the last."""
    for one in trials:
        RunFolder(one.folder).write_rounds(records)
        tracker.round_done(one)
    deadline = time.monotonic() + 100
    for one in trials:
        while (
            one.folder.name not in tracker._syncs
            or records[-1].round not in tracker._syncs[one.folder.name]._sent_rounds
        ):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def steps(store: Path, key: str) -> Counter[tuple[str, int]]:
    with sqlite3.connect(store) as base:
        found = base.execute(
            "SELECT t.value, m.step FROM metrics m JOIN tags t ON t.run_uuid = m.run_uuid"
            " AND t.key = 'fedsweep.folder' WHERE m.key = ?",
            (key,),
        )
        return Counter((Path(folder).name, step) for folder, step in found)


def expected(trials: list[RunInfo], rounds: int) -> Counter[tuple[str, int]]:
    return Counter((t.folder.name, k) for t in trials for k in range(1, rounds + 1))


def children(store: Path) -> list[tuple[str, str]]:
    with sqlite3.connect(store) as base:
        return base.execute(
            "SELECT t.value, r.status FROM runs r JOIN tags t ON t.run_uuid = r.run_uuid"
            " WHERE t.key = 'mlflow.parentRunId' AND r.lifecycle_stage = 'active'"
        ).fetchall()


def delete_run(store: Path, folder: Path) -> None:
    """Delete the run of a folder, as MLflow's pages do."""
    with sqlite3.connect(store) as base:
        base.execute(
            "UPDATE runs SET lifecycle_stage = 'deleted' WHERE run_uuid IN"
            " (SELECT run_uuid FROM tags WHERE key = 'fedsweep.folder' AND value = ?)",
            (str(folder),),
        )


SERVER_MARKS = (pytest.mark.slow, pytest.mark.filterwarnings("ignore:starlette"))


@pytest.fixture(params=["file", pytest.param("server", marks=SERVER_MARKS)])
def uri(request: pytest.FixtureRequest, store: Path) -> str:
    """The address of ``store``: its own, or that of a server over it."""
    return sqlite_uri(store) if request.param == "file" else str(request.getfixturevalue("server").address)


def test_each_trial_is_a_child_of_one_parent(make: Make, store: Path, tmp_path: Path) -> None:
    tracker, trials = make(), [trial(tmp_path / "sweep", k) for k in (1, 2)]
    for one in trials:
        played(tracker, [one], [record(1)])
        finished(one, 1)
        tracker.trial_done(one)
    tracker.finish(trials, status="finished", figures={"best_setting/test_accuracy": 0.5}, timestamp_ms=1)
    found = children(store)
    assert len(found) == 2 and len({parent for parent, _ in found}) == 1
    assert {status for _, status in found} == {"FINISHED"}


def test_rounds_that_others_may_take_the_place_of_are_sent_when_the_trial_has_finished(
    make: Make, store: Path, tmp_path: Path
) -> None:
    one, other = trials = [trial(tmp_path / "sweep", k) for k in (1, 2)]
    tracker = make()
    tracker.rewrites = True
    for each in trials:
        RunFolder(each.folder).write_rounds([record(k, trial=1) for k in (1, 2)])
        tracker.round_done(each)
    time.sleep(0.2)  # of which a pass takes a twentieth
    finished(one, 3)
    RunFolder(other.folder).write_result({"status": "failed", "rounds": 2})
    for each in trials:
        tracker.trial_done(each)
    tracker.finish(trials, status="killed")
    assert steps(store, "train_loss") == expected([one], 3) and not is_complete(other.folder, sqlite_uri(store))
    with sqlite3.connect(store) as base:
        accuracies = base.execute("SELECT value FROM metrics WHERE key = 'test_accuracy' ORDER BY step").fetchall()
    assert [value for (value,) in accuracies] == [record(k).test_accuracy for k in (1, 2, 3)]
    finished(other, 3)
    make().finish(trials, status="finished")
    assert steps(store, "train_loss") == expected(trials, 3)


def test_rounds_come_from_the_folder_while_a_trial_runs(make: Make, store: Path, tmp_path: Path) -> None:
    tracker, one = make(), trial(tmp_path / "sweep", 1)
    played(tracker, [one], [record(1), record(2)])
    assert steps(store, "train_loss") == expected([one], 2) and children(store)[0][1] == "RUNNING"
    finished(one, 5)
    tracker.finish([one], status="finished")
    assert steps(store, "train_loss") == expected([one], 5)


def test_rounds_that_are_played_again_after_a_retry_are_logged_once(make: Make, store: Path, tmp_path: Path) -> None:
    tracker, one = make(every_s=60.0), trial(tmp_path / "sweep", 1)
    for last in (3, 1, 2, 4):  # the checkpoint held one
        RunFolder(one.folder).write_rounds([record(k, timestamp_ms=10 * last + k) for k in range(1, last + 1)])
        tracker.round_done(one)
        tracker._send_all()
    finished(one, 4, timestamp_ms=99)
    tracker.finish([one], status="finished")
    assert steps(store, "train_loss") == expected([one], 4)
    assert set(steps(store, "by_bytes/test_accuracy").values()) == {1}


def sent_in_part(tracker: SweepTracker, folder: Path) -> list[RunInfo]:
    """Send a trial that has finished and one that goes on, and return both."""
    one, other = trials = [trial(folder, k) for k in (1, 2)]
    finished(one, 2)
    tracker.trial_done(one)
    RunFolder(other.folder).write_rounds([record(1)])
    tracker.round_done(other)
    tracker._send_all()
    return trials


def test_a_store_that_is_deleted_meanwhile_gets_all_trials_under_a_new_parent(
    make: Make, store: Path, tmp_path: Path
) -> None:
    tracker = make(every_s=60.0)
    trials = one, other = sent_in_part(tracker, tmp_path / "sweep")
    earlier = tracker._parent.run_id
    store.unlink()
    tracker._send_all()
    assert steps(store, "train_loss") == {(other.folder.name, 1): 1}
    finished(other, 2)
    tracker.finish(trials, status="finished", figures={"best_setting/test_accuracy": 0.5})
    assert steps(store, "train_loss") == expected(trials, 2)
    assert children(store) == [(tracker._parent.run_id, "FINISHED")] * 2 and tracker._parent.run_id != earlier
    assert all(is_complete(folder, sqlite_uri(store)) for folder in (tmp_path / "sweep", one.folder, other.folder))


def test_what_the_store_does_not_have_any_more_is_sent_again_and_nothing_else(
    uri: str, make: Make, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = [trial(tmp_path / "sweep", k) for k in (1, 2, 3)]
    for one in trials:
        finished(one, 2)
    make(uri=uri).finish(trials, status="finished")
    deleted, older, _ = trials
    delete_run(store, deleted.folder)
    with sqlite3.connect(store) as base:  # as in a copy that was put back
        run = "SELECT run_uuid FROM tags WHERE key = 'fedsweep.folder' AND value = ?"
        base.execute(
            f"UPDATE tags SET value = '' WHERE key = 'fedsweep.sent' AND run_uuid = ({run})", [f"{older.folder}"]
        )
    sent, send = list[Path](), FolderSync.send

    def noted(sync: FolderSync, *arguments: Any, **options: Any) -> MlflowRun:
        if sync.folder != tmp_path / "sweep":
            sent.append(sync.folder)
        return send(sync, *arguments, **options)

    monkeypatch.setattr(FolderSync, "send", noted)
    for _ in range(2):
        make(uri=uri).finish(trials, status="finished")
        assert sent == [deleted.folder, older.folder]
    assert len(children(store)) == 3 and {status for _, status in children(store)} == {"FINISHED"}
    assert steps(store, "train_loss") == expected(trials, 2) + expected([deleted], 2)


def test_what_can_not_be_sent_again_is_said(
    uri: str, make: Make, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, said = trial(tmp_path / "sweep", 1), list[str]()
    finished(one, 2)
    make(uri=uri).finish([one], status="finished")
    delete_run(store, one.folder)

    send = FolderSync.send

    def refused(sync: FolderSync, *arguments: Any, **options: Any) -> MlflowRun:
        if sync.folder == one.folder:
            raise OSError("the store is full")
        return send(sync, *arguments, **options)

    tracker = make(uri=uri)
    monkeypatch.setattr(mlflow_sweep, "_warn", said.append)
    monkeypatch.setattr(FolderSync, "send", refused)
    tracker.finish([one], status="finished")
    assert len(said) == 1 and "1 runs" in said[0] and "(the store is full)" in said[0]


def test_a_parent_that_is_deleted_meanwhile_is_begun_again_and_all_children_move_to_it(
    uri: str, make: Make, store: Path, tmp_path: Path
) -> None:
    tracker = make(every_s=60.0, uri=uri)
    trials = _, other = sent_in_part(tracker, tmp_path / "sweep")
    earlier = tracker._parent.run_id
    delete_run(store, tmp_path / "sweep")
    tracker._send_all()
    assert sorted(children(store)) == sorted([(earlier, "FINISHED"), (tracker._parent.run_id, "RUNNING")])
    finished(other, 2)
    tracker.finish(trials, status="finished")
    assert children(store) == [(tracker._parent.run_id, "FINISHED")] * 2 and tracker._parent.run_id != earlier
    assert steps(store, "train_loss") == expected(trials, 2)
    delete_run(store, tmp_path / "sweep")  # after its end, and then it is resumed
    again = make(uri=uri)
    again.finish(trials, status="finished")
    assert children(store) == [(again._parent.run_id, "FINISHED")] * 2
    assert steps(store, "train_loss") == expected(trials, 2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:starlette")
def test_a_server_is_asked_for_all_trials_at_once(
    server: MlflowServer, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedsweep.tracking.mlflow_run._RUNS_PER_ANSWER", 2)
    trials = [trial(tmp_path / "sweep", k) for k in (1, 2, 3)]
    for one in trials:
        finished(one, 1)
    make(uri=server.address).finish(trials, status="finished")
    tracker = make(every_s=60.0, uri=server.address)
    begin = len(server.asked)
    tracker.finish(trials, status="finished")
    searches = [path for path in server.asked[begin:] if path.endswith("runs/search")]
    assert len(searches) == 2 + 2  # for the parent, before the trials and after them; two pages of trials


def test_a_parent_that_was_begun_by_half_is_begun_again(
    make: Make, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, one = make(every_s=60.0), trial(tmp_path / "sweep", 1)
    earlier, log_params = tracker._parent.run_id, MlflowRun.log_params
    store.unlink()

    def locked(run: MlflowRun, config: Mapping[str, Any]) -> None:
        monkeypatch.setattr(MlflowRun, "log_params", log_params)
        raise OSError("the store is locked")

    monkeypatch.setattr(MlflowRun, "log_params", locked)
    finished(one, 2)
    tracker.trial_done(one)
    tracker._send_all()
    assert tracker._trouble == "the store is locked" and tracker._parent_id == earlier
    tracker._send_all()
    assert children(store) == [(tracker._parent.run_id, "FINISHED")] and tracker._parent.run_id != earlier
    assert not tracker._syncs  # it would keep the rounds of all trials
    tracker.finish([one], status="finished")


def interrupted_twice(make: Make, store: Path, folder: Path, *, num_trials: int, rounds: int) -> None:
    """Two drivers die on the way; rounds since a checkpoint are played again with other timestamps."""
    trials = [trial(folder, k) for k in range(1, num_trials + 1)]
    third = rounds // 3
    for life, (first, last) in enumerate([(1, 2 * third), (third + 1, 2 * third + 1), (2 * third, rounds)]):
        tracker = make()
        if last == rounds:
            for one in trials:
                finished(one, rounds, timestamp_ms=1_800_000_000_000)
        else:
            begun = [record(k) for k in range(1, first)]
            fresh = [record(k, timestamp_ms=1_700_000_000_000 + 10**6 * life + k) for k in range(first, last + 1)]
            played(tracker, trials, begun + fresh)
        if last < rounds:
            kill(tracker)
        else:
            tracker.finish(trials, status="finished")
    for key in ("train_loss", "test_accuracy", "total_bytes"):
        assert steps(store, key) == expected(trials, rounds)
    found = children(store)
    assert len(found) == num_trials and {status for _, status in found} == {"FINISHED"}


@pytest.mark.slow
def test_no_point_is_lost_or_doubled_when_two_drivers_die(make: Make, store: Path, tmp_path: Path) -> None:
    interrupted_twice(make, store, tmp_path / "sweep", num_trials=4, rounds=6)


@pytest.mark.exhaustive
def test_sixty_trials_of_twenty_rounds_have_each_point_once(make: Make, store: Path, tmp_path: Path) -> None:
    interrupted_twice(make, store, tmp_path / "sweep", num_trials=60, rounds=20)


def test_a_parent_that_could_not_be_ended_is_not_complete(
    make: Make, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, uri = trial(tmp_path / "sweep", 1), sqlite_uri(store)
    finished(one, 2)
    tracker, end = make(), MlflowRun.end
    monkeypatch.setattr(mlflow_sweep, "_warn", lambda text: None)
    parent = tracker._parent.run_id

    def locked(run: MlflowRun, status: str, **options: Any) -> None:
        if run.run_id == parent:
            raise OSError("the store is locked")
        end(run, status, **options)

    monkeypatch.setattr(MlflowRun, "end", locked)
    tracker.finish([one], status="finished")
    assert (is_complete(one.folder, uri), is_complete(tmp_path / "sweep", uri)) == (True, False)
    monkeypatch.setattr(MlflowRun, "end", end)
    make().finish([one], status="finished")
    assert is_complete(tmp_path / "sweep", uri)


def test_a_trial_that_is_logged_completely_is_left_alone(
    make: Make, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = trial(tmp_path / "sweep", 1)
    finished(one, 2)
    make().finish([one], status="finished")
    before = steps(store, "train_loss")
    send = FolderSync.send

    def sent(sync: FolderSync, *arguments: Any, **options: Any) -> MlflowRun:
        assert sync.folder != one.folder, "it was sent again"
        return send(sync, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(FolderSync, "send", sent)
        make().finish([one], status="finished")
    assert steps(store, "train_loss") == before and len(children(store)) == 1
    again = make()
    again.round_done(one)  # unless it goes on
    finished(one, 3)
    again.finish([one], status="finished")
    assert steps(store, "train_loss") == expected([one], 3) and len(children(store)) == 1


def test_the_parents_figures_are_the_last_sweeps(make: Make, store: Path) -> None:
    for value in (0.5, 0.5, 0.7):
        make().finish(
            [], status="finished", figures={"best_setting/test_accuracy": value}, timestamp_ms=int(value * 10)
        )
    with sqlite3.connect(store) as base:
        assert base.execute("SELECT value FROM metrics ORDER BY timestamp").fetchall() == [(0.5,), (0.7,)]
        assert base.execute("SELECT value FROM latest_metrics").fetchall() == [(0.7,)]


@pytest.mark.slow
def test_a_store_that_is_gone_costs_one_warning_and_can_be_caught_up(
    store: Path, tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker, trials = make(), [trial(tmp_path / "sweep", k) for k in (1, 2)]
    said: list[str] = []
    monkeypatch.setattr(mlflow_sweep, "_warn", said.append)
    for one in trials:
        finished(one, 2)
    lock = sqlite3.connect(store, isolation_level=None)
    lock.execute("BEGIN IMMEDIATE")
    tracker.finish(trials, status="finished")
    lock.execute("ROLLBACK")
    lock.close()
    assert len(said) == 1 and "sweep --resume" in said[0]
    make().finish(trials, status="finished")
    assert len(said) == 1 and steps(store, "train_loss") == expected(trials, 2)


def begun(store: Path, folder: Path, *, experiment: str | None = None, name: str = "study") -> SweepTracker:
    """A sweep that was begun and has ended, with a trial."""
    folder.mkdir(exist_ok=True)
    check_store(sqlite_uri(store), experiment=experiment)
    tracker = SweepTracker(
        uri=sqlite_uri(store),
        experiment=experiment,
        folder=folder,
    )
    tracker.start(name=name, config={"seed": 0}, tags={})
    one = trial(folder, 1)
    finished(one, 1)
    tracker.finish([one], status="finished")
    return tracker


def where(store: Path) -> dict[str, set[str]]:
    """Names of experiments -> names of the folders whose runs are in them."""
    with sqlite3.connect(store) as base:
        found = base.execute(
            "SELECT e.name, t.value FROM experiments e JOIN runs r ON r.experiment_id = e.experiment_id"
            " JOIN tags t ON t.run_uuid = r.run_uuid WHERE t.key = 'fedsweep.folder' AND r.lifecycle_stage = 'active'"
        ).fetchall()
    return {name: {Path(folder).name for other, folder in found if other == name} for name, _ in found}


def test_each_sweep_has_an_experiment_of_its_own_name_or_the_one_that_was_named(store: Path, tmp_path: Path) -> None:
    begun(store, tmp_path / "a")
    begun(store, tmp_path / "b")
    begun(store, tmp_path / "c", experiment="ours")
    begun(store, tmp_path / "d", experiment="ours")
    child = "0001-seed=1"
    assert where(store) == {"study": {"a", child}, "study (b)": {"b", child}, "ours": {"c", "d", child}}


def test_a_sweep_goes_on_in_the_experiment_that_it_began_in(store: Path, tmp_path: Path) -> None:
    begun(store, tmp_path / "old", experiment="fedsweep")
    (tmp_path / "old" / "0001-seed=1" / "mlflow.json").unlink()  # what is logged anew goes to the parent's experiment
    assert begun(store, tmp_path / "old").experiment == "fedsweep"
    begun(store, tmp_path / "new")
    (tmp_path / "new" / "mlflow.json").unlink()  # as --overwrite leaves it
    assert begun(store, tmp_path / "new").experiment == "study"
    assert set(where(store)) == {"fedsweep", "study"}


def test_a_copied_sweep_is_logged_whole_beside_the_original(store: Path, tmp_path: Path) -> None:
    begun(store, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert not any(
        is_complete(folder, sqlite_uri(store)) for folder in (tmp_path / "b", trial(tmp_path / "b", 1).folder)
    )
    begun(store, tmp_path / "b")
    assert len({parent for parent, _ in children(store)}) == len(children(store)) == 2
    assert where(store) == {"study": {"a", "0001-seed=1"}, "study (b)": {"b", "0001-seed=1"}}
    begun(store, tmp_path / "b")
    assert len(children(store)) == 2


def test_a_sweep_that_was_moved_has_its_new_folders_in_the_store(store: Path, tmp_path: Path) -> None:
    begun(store, tmp_path / "a")
    (tmp_path / "a").rename(tmp_path / "b")
    begun(store, tmp_path / "b")
    with sqlite3.connect(store) as base:
        places = base.execute("SELECT value FROM tags WHERE key = 'fedsweep.folder'").fetchall()
    assert sorted(places) == [(str(tmp_path / "b"),), (str(tmp_path / "b" / "0001-seed=1"),)]


def test_the_name_of_a_deleted_experiment_is_not_taken(store: Path, tmp_path: Path) -> None:
    client = open_store(sqlite_uri(store))
    for name in ("study", "study (a)"):
        client.delete_experiment(client.create_experiment(name))
    assert begun(store, tmp_path / "a").experiment == "study (a 2)"
