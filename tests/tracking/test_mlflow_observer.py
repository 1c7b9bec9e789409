"""Runs in MLflow: every point once, whatever happens on the way."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import shutil
import socket
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Metric, Run
from mlflow.tracking import MlflowClient

from fedsweep.driver.observers import RunInfo
from fedsweep.errors import ResourceError
from fedsweep.records import RoundRecord
from fedsweep.runs.background import BackgroundCall
from fedsweep.runs.run_folder import RunFolder
from fedsweep.testing import tiny_record
from fedsweep.tracking import mlflow_observer, mlflow_run, mlflow_sync
from fedsweep.tracking.mlflow_observer import MlflowObserver
from fedsweep.tracking.mlflow_run import MlflowRun
from fedsweep.tracking.mlflow_store import open_store, sqlite_uri
from fedsweep.tracking.mlflow_sync import FolderSync

CONFIG = {"name": "run", "seed": 0, "scenario.dataset": "digits", "scenario.root": None, "training.lr": 1e-3}
BOMB = gzip.compress(bytes(2**20)) * 100  # many members in a row are one file, too
TAGS = {"fedsweep.git_commit": "abc", "fedsweep.config_hash": "123", "fedsweep.method": "fedavg"}


def record(round: int, *, attempt: int = 0, **values: Any) -> RoundRecord:
    """A round that sends 1200 bytes; another attempt at it happens at another time."""
    plain = {
        "timestamp_ms": 1_700_000_000_000 + 1000 * round + attempt,
        "test_accuracy": 0.1 * round,
        "test_loss": 1.0 / round,
        "train_loss": 2.0,
        "wall_time_s": 0.1 + attempt,
    }
    return tiny_record(round, **(plain | values))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = RunFolder.create(tmp_path / "run", overwrite=False)
    run.write_config("name: run\nscenario: {}\nmethod: {name: fedavg}\n")
    return run.path


class Played:
    """A run that writes its folder, which is sent to a store after each round."""

    def __init__(self, store: Path, folder: Path, *, records: tuple[RoundRecord, ...] = (), **values: Any) -> None:
        values = {"config": CONFIG, "tags": TAGS, **values}
        info = RunInfo(name="run", folder=folder, planned_rounds=9, **values)
        self.folder, self.records = RunFolder(folder), [*records]
        self.sync = FolderSync(sqlite_uri(store), experiment="fedsweep", info=info)
        self.write()
        self.sync.send()

    def write(self) -> None:
        if self.records:
            self.folder.write_rounds(self.records)

    def round_done(self, record: RoundRecord, *, send: bool = True) -> None:
        self.records.append(record)
        self.write()
        if send:
            self.sync.send()

    @property
    def run_id(self) -> str | None:
        return self.sync.run_id


def stored(store: Path, run: Played | MlflowObserver) -> tuple[MlflowClient, Run]:
    assert run.run_id is not None
    client = open_store(sqlite_uri(store))
    return client, client.get_run(run.run_id)


def points(store: Path, observer: Played | MlflowObserver, key: str) -> list[tuple[int, float]]:
    client, run = stored(store, observer)
    history: list[Metric] = client.get_metric_history(run.info.run_id, key)
    return sorted((metric.step, metric.value) for metric in history)


def number_of_runs(store: Path) -> int:
    with contextlib.closing(sqlite3.connect(store)) as connection:
        return int(connection.execute("SELECT count(*) FROM runs").fetchone()[0])


@contextlib.contextmanager
def locked(store: Path) -> Iterator[None]:
    with contextlib.closing(sqlite3.connect(store, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


def test_rounds_become_metrics_by_round_and_by_bytes(store: Path, folder: Path) -> None:
    observer = Played(store, folder)
    observer.round_done(record(1, extra={"rank (mean)": 3.0}))
    observer.round_done(record(2, test_accuracy=0.05, best_accuracy=0.1))
    observer.sync.send("finished")
    _, run = stored(store, observer)
    assert run.info.status == "FINISHED" and run.info.run_name == "run"
    assert points(store, observer, "test_accuracy") == [(1, 0.1), (2, 0.05)]
    assert points(store, observer, "best_test_accuracy") == [(1, 0.1), (2, 0.1)]
    assert points(store, observer, "total_bytes") == [(1, 1200.0), (2, 2400.0)]
    assert points(store, observer, "by_bytes/test_accuracy") == [(1, 0.1), (2, 0.05)]
    assert points(store, observer, "rank _mean_") == [(1, 3.0)]
    scalars = {name for name, value in vars(record(1)).items() if isinstance(value, int | float)}
    expected = scalars - {"round", "timestamp_ms", "best_accuracy"} | {
        "total_bytes",
        "best_test_accuracy",
        "rank _mean_",
    }
    learnt = {name for name in expected if "accuracy" in name or "loss" in name} | {"total_bytes", "comm_ratio"}
    by_bytes = {f"by_bytes/{name}" for name in learnt & expected}
    assert "by_bytes/local_steps" not in by_bytes and set(run.data.metrics) == expected | by_bytes


def test_a_round_of_which_a_part_was_sent_is_sent_again(
    store: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow sends 1000 metrics at once; a process that is killed between two requests leaves the first."""
    many = {f"figure {number}": float(number) for number in range(1100)}
    run, requests = Played(store, folder), 0
    kind = type(open_store(sqlite_uri(store))._tracking_client.store)
    log_batch = kind.log_batch

    def dies(*arguments: Any, **options: Any) -> None:
        nonlocal requests
        requests += 1
        if requests == 2:
            raise OSError("killed")
        log_batch(*arguments, **options)

    monkeypatch.setattr(kind, "log_batch", dies)
    run.round_done(record(1, extra=many), send=False)
    with pytest.raises(OSError, match="killed"):
        run.sync.send()
    monkeypatch.undo()
    again = Played(store, folder, records=(record(1, extra=many),))
    assert len(stored(store, again)[1].data.metrics) > 1100 and points(store, again, "local_steps")[0][0] == 1


def test_a_run_has_the_times_of_its_rounds(store: Path, folder: Path) -> None:
    rounds = tuple(record(k, timestamp_ms=1_700_000_000_000 + 1000 * k, wall_time_s=0.5) for k in (1, 2))
    run = Played(store, folder, records=rounds)
    run.sync.send("finished")
    info = stored(store, run)[1].info
    assert (info.start_time, info.end_time) == (1_700_000_000_500, 1_700_000_002_000)


def test_what_goes_on_elsewhere_with_another_configuration_has_its_tags(store: Path, folder: Path) -> None:
    Played(store, folder, tags=TAGS | {"fedsweep.config_hash": "short"})
    moved = folder.rename(folder.with_name("moved"))
    run = Played(store, moved, tags=TAGS | {"fedsweep.config_hash": "long"})
    tags = stored(store, run)[1].data.tags
    assert (tags["fedsweep.folder"], tags["fedsweep.config_hash"], number_of_runs(store)) == (str(moved), "long", 1)


def test_a_copy_of_a_folder_is_a_run_of_its_own(store: Path, folder: Path) -> None:
    first = Played(store, folder, records=(record(1),))
    copied = Path(shutil.copytree(folder, folder.with_name("copied")))
    copy = Played(store, copied, records=(record(1), record(2)))
    assert copy.run_id != first.run_id
    linked = folder.with_name("linked")
    linked.symlink_to(folder)
    again = Played(store, linked, records=(record(1),))
    again.sync.send("finished")
    client, run = stored(store, again)
    assert again.run_id == first.run_id and [file.path for file in client.list_artifacts(run.info.run_id)]
    assert [step for step, _ in points(store, first, "lr")] == [1]
    assert [step for step, _ in points(store, copy, "lr")] == [1, 2]


def test_keys_of_other_alphabets_stay_apart(store: Path, folder: Path) -> None:
    run = Played(store, folder, config={"method.w.Ä": 1, "method.w.Ö": 2})
    assert stored(store, run)[1].data.params == {"method.w.Ä": "1", "method.w.Ö": "2"}


def test_links_of_a_foreign_folder_are_not_followed(store: Path, folder: Path) -> None:
    secret = folder.with_name("secret")
    (secret / "pictures").mkdir(parents=True)
    for name in ("traffic.parquet", "pictures/a.png"):
        (secret / name).write_text("secret")
    (folder / "traffic.parquet").symlink_to(secret / "traffic.parquet")
    (folder / "pictures").symlink_to(secret / "pictures")
    run = Played(store, folder, records=(record(1),))
    run.sync.send("finished")
    client, entry = stored(store, run)
    assert {file.path for file in client.list_artifacts(entry.info.run_id)} == {"config.yaml", "rounds.parquet"}


def test_the_step_by_bytes_is_in_kilobytes_sent_so_far(store: Path, folder: Path) -> None:
    observer = Played(store, folder)
    for number in (1, 2, 3):
        observer.round_done(record(number, bytes_up=1_000_000, bytes_down=500))
    observer.sync.send("finished")
    assert [step for step, _ in points(store, observer, "by_bytes/test_loss")] == [1000, 2001, 3001]


def test_points_carry_the_rounds_time(store: Path, folder: Path) -> None:
    observer = Played(store, folder)
    observer.round_done(record(1))
    observer.sync.send("finished")
    client, run = stored(store, observer)
    (point,) = client.get_metric_history(run.info.run_id, "lr")
    assert point.timestamp == record(1).timestamp_ms


def test_configuration_and_facts_become_params_tags_and_an_input(store: Path, folder: Path) -> None:
    config = CONFIG | {f"key{n}": n for n in range(250)} | {"long": "x" * 7000, "model.init_from": "mysql://u:pw@h/db"}
    config |= {"empty": "", "listed": [1, None], "odd[key]": True, "../a//b/": 1, "/": 2}
    observer = Played(store, folder, config=config, tags={**TAGS, "mlflow.parentRunId": "p"})
    _, run = stored(store, observer)
    params = run.data.params
    assert set(config) - {"scenario.root", "odd[key]", "../a//b/", "/"} == set(params) - {"odd_key_", "a/b", "_"}
    assert (params["training.lr"], params["key249"]) == ("0.001", "249")
    assert (params["listed"], params["odd_key_"], params["empty"]) == ("[1, null]", "true", "")
    assert (params["a/b"], params["_"]) == ("1", "2")
    assert len(params["long"]) == 6000 and params["model.init_from"] == "mysql://u:***@h/db"
    tags = run.data.tags
    assert TAGS.items() <= tags.items() and tags["mlflow.source.git.commit"] == "abc"
    assert tags["mlflow.parentRunId"] == "p" and tags["fedsweep.folder"] == str(folder)
    assert run.inputs is not None
    (used,) = run.inputs.dataset_inputs
    assert used.dataset.name == "digits" and used.tags[0].value == "training"


def test_the_same_world_is_the_same_input(store: Path, tmp_path: Path) -> None:
    digests = []
    changes: list[dict[str, Any]] = [{}, {"scenario.root": "/data", "seed": 1}, {"scenario.clients": 3}]
    for number, change in enumerate(changes):
        folder = tmp_path / str(number)
        folder.mkdir()
        observer = Played(store, folder, config=CONFIG | change)
        inputs = stored(store, observer)[1].inputs
        assert inputs is not None
        digests.append(inputs.dataset_inputs[0].dataset.digest)
    assert digests[0] == digests[1] != digests[2]


def test_files_and_pictures_become_artifacts_beside_the_store(store: Path, folder: Path) -> None:
    observer = Played(store, folder)
    observer.round_done(record(1))
    RunFolder(folder).write_rounds([record(1)])
    RunFolder(folder).write_result({"status": "finished"})
    (folder / "pictures").mkdir()
    (folder / "pictures" / "groups.png").touch()
    observer.sync.send("finished")
    client, run = stored(store, observer)
    names = {item.path for item in client.list_artifacts(run.info.run_id)}
    assert names == {"config.yaml", "result.json", "rounds.parquet", "pictures"}
    assert [item.path for item in client.list_artifacts(run.info.run_id, "pictures")] == ["pictures/groups.png"]
    assert str(run.info.artifact_uri).startswith(str(store.parent / "mlartifacts" / "fedsweep"))


@pytest.mark.parametrize(("status", "expected"), [("killed", "KILLED"), ("failed", "FAILED")])
def test_a_run_ends_as_it_ended(store: Path, folder: Path, status: str, expected: str) -> None:
    observer = Played(store, folder)
    assert stored(store, observer)[1].info.status == "RUNNING"
    observer.sync.send(status)
    assert stored(store, observer)[1].info.status == expected


def test_a_run_that_failed_before_it_started_leaves_no_trace(store: Path) -> None:
    MlflowObserver(sqlite_uri(store), experiment="fedsweep").finished("failed", {})
    assert number_of_runs(store) == 0


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_every_point_once(store: Path, folder: Path) -> None:
    """Rounds 1 to 5 are logged; the checkpoint holds 3, so 4 and 5 are played again, at another time, then 6."""
    first = Played(store, folder)
    for number in range(1, 6):
        first.round_done(record(number))
    second = Played(store, folder, records=tuple(record(n) for n in (1, 2, 3)))
    assert second.run_id == first.run_id and stored(store, second)[1].info.status == "RUNNING"
    for number in range(4, 7):
        second.round_done(record(number, attempt=1))
    second.sync.send("finished")
    _, run = stored(store, second)
    for key in run.data.metrics:
        steps = Counter(step for step, _ in points(store, second, key))
        assert sorted(steps.elements()) == ([1, 2, 3, 4, 6, 7] if key.startswith("by_bytes/") else [1, 2, 3, 4, 5, 6])
    assert number_of_runs(store) == 1 and run.info.end_time is not None


def test_steps_that_several_rounds_share_are_kept_apart_on_a_resume(store: Path, folder: Path) -> None:
    """Rounds of 100 bytes: many have the step 0 by kB sent."""
    small = {"bytes_up": 50, "bytes_down": 50}
    first = Played(store, folder)
    for number in (1, 2):
        first.round_done(record(number, **small))
    second = Played(store, folder, records=(record(1, **small),))
    for number in (2, 3):
        second.round_done(record(number, attempt=1, **small))
    second.sync.send("finished")
    steps, accuracies = zip(*points(store, second, "by_bytes/test_accuracy"), strict=True)
    assert steps == (0, 0, 0) and accuracies == pytest.approx((0.1, 0.2, 0.3))


def test_what_was_never_logged_is_logged_on_a_resume(store: Path, folder: Path) -> None:
    second = Played(store, folder, records=(record(1), record(2)))
    assert [step for step, _ in points(store, second, "lr")] == [1, 2]


def test_a_resume_with_another_config_keeps_the_params(store: Path, folder: Path) -> None:
    Played(store, folder)
    second = Played(store, folder, config=CONFIG | {"seed": 7, "new": 1})
    params = stored(store, second)[1].data.params
    assert (params["seed"], params["new"]) == ("0", "1")


@pytest.mark.parametrize("spoil", ["{", "[]", '{"http://elsewhere": {"mark": "x"}}', "deleted", "unknown", "odd"])
def test_without_the_earlier_run_a_new_one_has_everything(store: Path, folder: Path, spoil: str) -> None:
    first = Played(store, folder)
    assert first.run_id is not None
    uri, ids = next(iter(json.loads((folder / "mlflow.json").read_text()).items()))
    if spoil == "deleted":
        open_store(sqlite_uri(store)).delete_run(first.run_id)
    else:
        wrong = {"unknown": {"mark": "0" * 32}, "odd": {"mark": "x' or '1'='1"}}
        (folder / "mlflow.json").write_text(json.dumps({uri: ids | wrong[spoil]}) if spoil in wrong else spoil)
    second = Played(store, folder, records=(record(1),))
    assert second.run_id != first.run_id
    again = json.loads((folder / "mlflow.json").read_text())[uri]
    assert again == ids | {"mark": again["mark"]}
    assert points(store, second, "lr") == [(1, 0.1)]


def test_a_store_that_is_deleted_meanwhile_is_made_again(store: Path, folder: Path) -> None:
    run = Played(store, folder, records=(record(1),))
    store.unlink()
    run.round_done(record(2))
    assert points(store, run, "test_loss") == [(1, 1.0), (2, 0.5)] and number_of_runs(store) == 1


def test_a_server_that_comes_back_without_the_run_gets_all_of_it_at_the_end(
    store: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Played(store, folder, records=(record(1),))
    # A server's file is not there to be looked into.
    monkeypatch.setattr(mlflow_run, "sqlite_path", lambda uri: None)
    first = str(run.run_id)
    open_store(sqlite_uri(store)).delete_run(first)
    run.sync.send("finished")
    assert run.run_id != first and points(store, run, "test_loss") == [(1, 1.0)]
    assert stored(store, run)[1].info.status == "FINISHED"


def test_what_a_server_lost_is_lacking(store: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Played(store, folder, records=(record(1),))
    monkeypatch.setattr(mlflow_run, "sqlite_path", lambda uri: None)
    open_store(sqlite_uri(store)).delete_run(str(run.run_id))
    monkeypatch.setattr(MlflowRun, "begin", gone)
    with pytest.raises(OSError, match="gone"):
        run.sync.send("finished")
    assert run.sync.lacking() == "round 1, its files, its status"


def gone(*_: Any, **__: Any) -> MlflowRun:
    raise OSError("gone")


def test_infinite_figures_are_nan_and_a_tag(store: Path, folder: Path) -> None:
    observer = Played(store, folder)
    observer.round_done(record(1, test_loss=math.nan, test_accuracy=math.nan))
    observer.round_done(record(2, test_loss=math.inf))
    observer.round_done(record(3, test_loss=math.inf))
    observer.sync.send("finished")
    losses = points(store, observer, "test_loss")
    assert [step for step, _ in losses] == [1, 2, 3] and all(math.isnan(value) for _, value in losses)
    assert points(store, observer, "best_test_accuracy") == [(2, 0.2), (3, pytest.approx(0.3))]
    tags = stored(store, observer)[1].data.tags
    assert {key: value for key, value in tags.items() if key.startswith("infinite.")} == {
        "infinite.test_loss": "inf in round 2"
    }


@pytest.mark.slow
def test_many_rounds_are_sent_in_batches_that_a_store_takes(
    store: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    log_points = MlflowRun.log_points

    def counted(run: MlflowRun, batch: Any, tags: Any) -> None:
        sizes.append(len(batch))
        log_points(run, batch, tags)

    monkeypatch.setattr(MlflowRun, "log_points", counted)
    run = Played(store, folder)
    for number in range(1, 161):
        run.round_done(record(number), send=number in (64, 128))
    run.sync.send("finished")
    assert max(sizes) <= 1000 and len(sizes) <= 7
    run.sync.send("finished")
    assert len(sizes) <= 7  # nothing is sent again
    assert [step for step, _ in points(store, run, "lr")] == list(range(1, 161))


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What :class:`Watched` sets is put back."""
    for name in ("_EVERY_S", "_PATIENCE_S", "_warn"):
        monkeypatch.setattr(mlflow_observer, name, getattr(mlflow_observer, name))


class Watched:
    """An observer that looks at its folder all the time, and what it warned of."""

    def __init__(self, store: Path | str, folder: Path, *, every_s: float = 0.01) -> None:
        self.warnings: list[str] = []
        self.folder, self.records = RunFolder(folder), list[RoundRecord]()
        uri = store if isinstance(store, str) else sqlite_uri(store)
        mlflow_observer._EVERY_S, mlflow_observer._PATIENCE_S = every_s, 0.01
        mlflow_observer._warn = self.warnings.append  # type: ignore[assignment]
        self.observer = MlflowObserver(uri, experiment="fedsweep")
        self.info = RunInfo(name="run", folder=folder, config=CONFIG, planned_rounds=9)

    def round_done(self, number: int) -> None:
        self.records.append(record(number))
        self.folder.write_rounds(self.records)

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_rounds_are_in_the_store_while_the_run_goes_on(
    store: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_observer, "_REST", 0.0)
    watched = Watched(store, folder)
    watched.observer.check()
    watched.observer.started(watched.info)
    for number in (1, 2):
        watched.round_done(number)
        watched.until(lambda: watched.observer.run_id is not None)
        watched.until(lambda: len(points(store, watched.observer, "lr")) == len(watched.records))
        assert stored(store, watched.observer)[1].info.status == "RUNNING"
    watched.round_done(3)
    watched.observer.finished("finished", {})
    assert [step for step, _ in points(store, watched.observer, "lr")] == [1, 2, 3]
    assert stored(store, watched.observer)[1].info.status == "FINISHED" and watched.warnings == []


def test_training_goes_on_while_the_store_is_locked(store: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_sync, "PATIENCE_S", 0.01)
    monkeypatch.setattr(FolderSync.send, "__kwdefaults__", {"patience_s": 0.01})
    watched = Watched(store, folder)
    watched.observer.check()
    with locked(store):
        watched.observer.started(watched.info)
        watched.round_done(1)
        watched.until(lambda: bool(watched.warnings))
        assert watched.observer.run_id is None
    assert "locked" in watched.warnings[0] and "\n" not in watched.warnings[0] and "goes on" in watched.warnings[0]
    watched.round_done(2)
    watched.observer.finished("finished", {})
    _, run = stored(store, watched.observer)
    assert [step for step, _ in points(store, watched.observer, "lr")] == [1, 2]
    assert (len(watched.warnings), run.info.status, run.data.params["seed"]) == (1, "FINISHED", "0")


def test_what_is_missing_in_the_end_is_said_in_one_line(store: Path, folder: Path) -> None:
    watched = Watched(store, folder)
    watched.observer.started(watched.info)
    watched.round_done(1)
    watched.until(lambda: watched.observer.run_id is not None and bool(points(store, watched.observer, "lr")))
    store.rename(store.with_name("gone"))
    store.mkdir()
    for number in (2, 3):
        watched.round_done(number)
    watched.observer.finished("finished", {})
    *_, last = watched.warnings
    assert len(watched.warnings) <= 2
    assert "lacks rounds 2 to 3, its files, its status" in last and str(folder) in last and "\n" not in last


def test_artifacts_that_fail_do_not_keep_the_run_open(
    store: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(MlflowRun, "log_file", full)
    watched = Watched(store, folder)
    watched.observer.started(watched.info)
    watched.observer.finished("finished", {})
    assert stored(store, watched.observer)[1].info.status == "FINISHED"
    assert len(watched.warnings) == 1 and "lacks some of its files (no space left" in watched.warnings[0]


def test_a_damaged_folder_does_not_keep_the_run_open(store: Path, folder: Path) -> None:
    (folder / "rounds.parquet").write_bytes(b"no table")
    watched = Watched(store, folder, every_s=60.0)
    watched.observer.started(watched.info)
    watched.observer.finished("failed", {})
    assert stored(store, watched.observer)[1].info.status == "FAILED" and "rounds.parquet" in watched.warnings[0]


@contextlib.contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server on this machine that does with each connection what it is told."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = server.accept()
                    threading.Thread(target=quietly, args=(answer, client), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def quietly(answer: Callable[[socket.socket], None], client: socket.socket) -> None:
    with contextlib.suppress(OSError), client:
        answer(client)


def silence(client: socket.socket) -> None:
    while client.recv(2**16):
        pass


def drip(client: socket.socket) -> None:
    """An answer of a byte at a time, each before anybody loses patience with a socket."""
    client.recv(2**16)
    for byte in b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b" " * 1000:
        client.sendall(bytes([byte]))
        time.sleep(0.2)


def bomb(client: socket.socket) -> None:
    """100 kB that become 100 MB, to whatever but a question after its health."""
    request = client.recv(2**16)
    if b"/health" in request:
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
    else:
        head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(BOMB)}\r\n\r\n"
        client.sendall(head.encode() + BOMB)
    client.close()


@pytest.mark.slow
@pytest.mark.parametrize("answer", [silence, drip, bomb])
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # sockets that nobody waits for any more
def test_a_server_that_means_no_good_holds_nobody_up(
    folder: Path, answer: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A bomb comes from a thread of this process, which may have to wait for its turn.
    silent_s = 2.0 if answer is bomb else 0.5
    monkeypatch.setattr(BackgroundCall.wait, "__kwdefaults__", {"silent_s": silent_s, "at_most_s": 30.0})
    with serving(answer) as uri:
        watched = Watched(uri, folder, every_s=60.0)
        began = time.monotonic()
        with pytest.raises(ResourceError) as refused:
            watched.observer.check()
        watched.observer.started(watched.info)
        watched.round_done(1)
        watched.observer.finished("finished", {})
        assert time.monotonic() - began < 60
    assert "\n" not in str(refused.value)
    assert "longer than 64 MB" in str(refused.value) or answer is not bomb
    (line,) = watched.warnings
    assert "lacks round 1, its files, its status" in line and f"fedsweep sync {folder}" in line


def test_a_batch_whose_fate_is_unknown_is_asked_for(store: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is lost once before and once after the store has taken the batch."""
    log_batch, lost, sent = MlflowClient.log_batch, ["before", "after"], list[int]()

    def breaks(client: MlflowClient, *arguments: Any, metrics: Any = (), **options: Any) -> None:
        when = lost.pop(0) if metrics and lost else "never"
        if when != "before":
            sent.extend(metric.step for metric in metrics if metric.key == "lr")
            log_batch(client, *arguments, metrics=metrics, **options)
        if when != "never":
            raise OSError("the line is dead")

    run = Played(store, folder)
    monkeypatch.setattr(MlflowClient, "log_batch", breaks)
    for number in (1, 2):
        with pytest.raises(OSError, match="dead"):
            run.round_done(record(number))
    run.round_done(record(3))
    assert lost == [] and sent == [step for step, _ in points(store, run, "lr")] == [1, 2, 3]
    assert len(points(store, run, "by_bytes/test_accuracy")) == 3


def test_a_run_of_which_the_store_never_told_is_found_again(
    store: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = MlflowClient.create_run

    def breaks(*arguments: Any, **options: Any) -> None:
        create(*arguments, **options)
        raise OSError("the line is dead")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "create_run", breaks)
        with pytest.raises(OSError, match="dead"):
            Played(store, folder)
    run = Played(store, folder, records=(record(1), record(2)))
    assert number_of_runs(store) == 1
    assert [step for step, _ in points(store, run, "lr")] == [1, 2]


def test_a_run_that_its_folder_cannot_name_is_not_left_in_the_store(store: Path, folder: Path) -> None:
    (folder / "mlflow.json").mkdir()
    for _ in range(2):
        with pytest.raises(OSError, match="directory"):
            MlflowRun.begin(sqlite_uri(store), experiment="fedsweep", name="run", tags={}, folder=folder)
    client = open_store(sqlite_uri(store))
    assert client.search_runs([item.experiment_id for item in client.search_experiments()]) == []


def test_a_sweep_has_a_parent_run(store: Path, folder: Path, tmp_path: Path) -> None:
    parent = MlflowRun.begin(sqlite_uri(store), experiment="fedsweep", name="sweep", tags={}, folder=tmp_path)
    child = Played(store, folder, tags={"mlflow.parentRunId": parent.run_id})
    child.sync.send("finished")
    parent.end("finished")
    client, run = stored(store, child)
    found = client.search_runs([run.info.experiment_id], f"tags.mlflow.parentRunId = '{parent.run_id}'")
    assert [item.info.run_id for item in found] == [child.run_id]
