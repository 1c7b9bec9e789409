"""Further places that a run goes to: each read back with its own library, offline, every point once."""

from __future__ import annotations

import csv
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedsweep.config.load import load_config
from fedsweep.driver.observers import Observer, RunInfo
from fedsweep.errors import ConfigError, ResourceError
from fedsweep.records import RoundRecord
from fedsweep.runs.run_folder import RunFolder
from fedsweep.testing import tiny_record
from fedsweep.tracking.loggers.registry import LOGGERS, Sheltered, further_loggers
from fedsweep.tracking.rows import telling

CONFIG = {"name": "run", "seed": 0, "method.name": "fedavg", "training.lr": 0.5, "tracking.uri": "none"}
TAGS = {"fedsweep.method": "fedavg", "fedsweep.setting": "FedAvg", "fedsweep.seed": "0"}


def record(round: int, *, attempt: int = 0, **values: Any) -> RoundRecord:
    plain = {"timestamp_ms": 1_700_000_000_000 + 1000 * round + attempt, "test_accuracy": 0.125 * round}
    return tiny_record(round, **(plain | values))


def logger(name: str, folder: Path) -> Observer:
    config = load_config({"tracking": {"uri": "none", "also": [name]}})
    (made,) = further_loggers(config, folder)
    made.check()
    return made


def started(name: str, folder: Path, *, records: tuple[RoundRecord, ...] = ()) -> Observer:
    made = logger(name, folder)
    made.started(RunInfo(name="run", folder=folder, config=CONFIG, tags=TAGS, planned_rounds=9, records=records))
    return made


Points = list[tuple[int, float]]


def in_csv(folder: Path) -> Points:
    with (folder / "rounds.csv").open(newline="") as file:
        return [(int(row["round"]), float(row["test_accuracy"])) for row in csv.DictReader(file)]


def in_tensorboard(folder: Path) -> Points:
    """What the event files have, before TensorBoard drops anything that a restart would have orphaned."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    return [
        (event.step, value.tensor.float_val[0])
        for path in sorted((folder / "tensorboard").iterdir())
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.tag == "test_accuracy"
    ]


def wandb_records(folder: Path) -> list[Any]:
    """The records of the one offline run: a header, then blocks of 32 KiB with parts of records, as LevelDB's log."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # its process writes on for a moment
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, place, found, part = path.read_bytes(), 7, [], b""
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        part += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or its last part
            found.append(Record.FromString(part))
            part = b""
    return found


def in_wandb(folder: Path) -> Points:
    rows = [
        {item.nested_key[0] if item.nested_key else item.key: item.value_json for item in one.history.item}
        for one in wandb_records(folder)
        if one.WhichOneof("record_type") == "history"
    ]
    return [(int(row["round"]), float(row["test_accuracy"])) for row in rows]


READ: Mapping[str, Callable[[Path], Points]] = {"csv": in_csv, "tensorboard": in_tensorboard, "wandb": in_wandb}


def test_each_door_is_read_back_here() -> None:
    assert set(READ) == set(LOGGERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_a_resumed_run_has_every_point_once(name: str, tmp_path: Path) -> None:
    """Rounds 1 to 5 are out; the checkpoint holds 3, so 4 and 5 are played again, at another time, then 6."""
    first = started(name, tmp_path)
    for number in range(1, 6):
        first.round_done(record(number))
    first.checkpointed(5)
    first.finished("killed", {"rounds": 5, "test_accuracy": 0.625})
    assert READ[name](tmp_path) == [(number, 0.125 * number) for number in range(1, 6)]
    second = started(name, tmp_path, records=tuple(record(number) for number in (1, 2, 3)))
    for number in range(4, 7):
        second.round_done(record(number, attempt=1))
    second.finished("finished", {"rounds": 6, "test_accuracy": 0.75, "best_test_accuracy": None})
    assert READ[name](tmp_path) == [(number, 0.125 * number) for number in range(1, 7)]


@pytest.mark.slow
def test_weights_and_biases_keeps_the_runs_id_and_does_not_name_the_machine(tmp_path: Path) -> None:
    ids = []
    for _ in range(2):
        made = started("wandb", tmp_path)
        made.round_done(record(1))
        made.finished("finished", {})
        (run,) = [one.run for one in wandb_records(tmp_path) if one.WhichOneof("record_type") == "run"]
        ids.append(run.run_id)
        config = {item.key: item.value_json for item in run.config.update}
        assert config["method.name"] == '"fedavg"' and "tracking.uri" not in config
        assert (run.display_name, run.project, run.host) == ("run", "fedsweep", "")
    assert ids[0] == ids[1]


def test_tensorboard_has_what_was_learnt_by_bytes_and_the_configuration(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = started("tensorboard", tmp_path)
    made.round_done(record(1, bytes_up=3000, bytes_down=2000))
    made.finished("finished", {"rounds": 1, "test_accuracy": 0.125})
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    (point,) = read.Scalars("by_bytes/test_accuracy")
    assert (point.step, point.value, point.wall_time) == (5, 0.125, 1_700_000_001.0)
    assert "by_bytes/local_steps" not in read.Tags()["scalars"]
    assert read.Scalars("last/test_accuracy")[0].value == 0.125
    shown = read.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert b"training.lr" in shown and b"tracking.uri" not in shown


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_library_that_is_missing_is_said_in_one_line(
    name: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ResourceError, match=rf"{name} can't be imported .*install fedsweep\[{name}\]") as raised:
        logger(name, tmp_path)
    assert "\n" not in str(raised.value)


def test_unknown_loggers_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tracking.also: unknown observer 'tensorbord'; did you mean 'tensorboard'"):
        logger("tensorbord", tmp_path)
    with pytest.raises(ConfigError, match=r"tracking.also: where MLflow keeps a run is said by tracking.uri"):
        logger("mlflow", tmp_path)


class Broken(Observer):
    """A logger of a user's own that cannot write."""

    def __init__(self, config: Any, folder: Path) -> None:
        self.told = 0
        self.error: BaseException = OSError("no space\nleft")

    def started(self, info: RunInfo) -> None:
        return

    def round_done(self, record: RoundRecord) -> None:
        self.told += 1
        raise self.error

    checkpointed = finished = round_done  # type: ignore[assignment]


@pytest.mark.parametrize("error", [OSError("no space\nleft"), SystemExit("no space\nleft")])
def test_a_door_of_ones_own_that_fails_is_left_out_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setitem(sys.modules, "my_loggers", sys.modules[__name__])
    made = logger("my_loggers:Broken", tmp_path)
    assert isinstance(made, Sheltered)
    said: list[str] = []
    own = Broken(None, tmp_path)
    own.error = error
    made = Sheltered("mine", own, warn=said.append)
    made.started(RunInfo(name="run", folder=tmp_path, config={}, planned_rounds=1))
    made.round_done(record(1))
    made.round_done(record(2))
    made.finished("finished", {})
    (line,) = said
    assert own.told == 1 and line.startswith(f"mine: {type(error).__name__}: no space left") and "\n" not in line
    assert ", at Broken.round_done (test_loggers.py, line " in line


def test_overwriting_a_run_clears_what_its_loggers_left_and_nothing_else(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", overwrite=False)
    folder.write_config("scenario: {}\nmethod: {name: fedavg}\n")
    for name in READ:
        made = started(name, folder.path)
        made.round_done(record(1))
        made.finished("finished", {})
    theirs = [folder.path / "wandb" / "offline-run-1-other", folder.path / "tensorboard" / "events.out.tfevents.1"]
    for path in theirs:
        path.mkdir()
    RunFolder.create(folder.path, overwrite=True)
    left = {path.relative_to(folder.path).parts[0] for path in folder.path.rglob("*fedsweep*")}
    assert not left and not (folder.path / "rounds.csv").exists() and all(path.exists() for path in theirs)


def test_what_a_run_is_shown_by() -> None:
    config = load_config({"training": {"rounds": 3}, "runtime": {"client_actors": 2}, "sweep": {"samples": 4}}).flat()
    shown = telling(config)
    assert shown["training.rounds"] == 3 and shown["scenario.dataset"] == "digits" and shown["seed"] == 0
    assert shown["runtime.client_actors"] == 2 and shown["sweep.samples"] == 4
    kept = [key for key in shown if key.startswith(("checkpoint.", "tracking.", "sweep.", "runtime."))]
    assert sorted(kept) == ["runtime.client_actors", "runtime.executor", "sweep.samples"]
    assert None not in shown.values() and len(shown) < len(config)
