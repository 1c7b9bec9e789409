"""The files of a run: written whole, read back checked."""

from __future__ import annotations

import importlib.machinery
import json
import math
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from client_tables import profiles_of, write_clients

from fedsweep.errors import InvariantError, OutputError
from fedsweep.records import RoundRecord
from fedsweep.runs import facts
from fedsweep.runs.facts import own_commit, run_facts
from fedsweep.runs.files import atomic_write
from fedsweep.runs.find import find_runs
from fedsweep.runs.run_folder import RunFolder
from fedsweep.runs.tables.clients import clients_table
from fedsweep.runs.tables.rounds import records_to_table, scalar_figures
from fedsweep.testing import tiny_record
from fedsweep.world.devices import DeviceProfile

torch.set_num_threads(1)

CONFIG = "name: a\nseed: 0\nscenario: {}\nmethod: {name: fedavg}\n"
# The contract with users: names, order and types, with a question mark where a method may have no such thing.
COLUMNS = {
    "round": "int64",
    "test_accuracy": "double?",
    "test_loss": "double?",
    "validation_accuracy": "double?",
    "train_loss": "double?",
    "lr": "double",
    "cohort": "list<int64>",
    "high_frequency": "list<int64>?",
    "kl_divergence": "double?",
    "attendees": "list<int64>",
    "present": "list<int64>?",
    "sync_points": "int64",
    "values_up": "int64",
    "values_down": "int64",
    "bytes_up": "int64",
    "bytes_down": "int64",
    "over_budget": "int64?",
    "comm_cost": "int64",
    "comm_ratio": "double?",
    "local_steps": "int64",
    "flops": "int64",
    "fwd_macs_per_sample": "double?",
    "sim_time_s": "double?",
    "wall_time_s": "double",
    "eval_time_s": "double",
    "server_time_s": "double",
    "full_time_s": "double?",
    "aggregation_weights": "list<double>",
    "staleness": "list<int64>?",
    "best_accuracy": "double?",
    "total_bytes": "int64",
    "timestamp_ms": "int64",
    "class_accuracies": "list<double>?",
    "client_scores": "list<double>?",
    "personal_accuracies": "list<double>?",
}


def record(round: int = 1, **values: Any) -> RoundRecord:
    full = tiny_record(
        round,
        timestamp_ms=1_700_000_000_000 + round,
        test_accuracy=0.25 * round,
        cohort=(0, 2, 5),
        attendees=(0, 2),
        flops=3_000_000_000_000,
        fwd_macs_per_sample=100.5,
        bytes_up=40,
        bytes_down=80,
        aggregation_weights=(0.25, 0.75),
    )
    return replace(full, **values)


def create(path: Path) -> RunFolder:
    folder = RunFolder.create(path, overwrite=False)
    folder.write_config(CONFIG)
    return folder


def test_rounds_have_the_columns_that_users_rely_on(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    folder.write_rounds([record()])
    schema = pq.ParquetFile(folder.path / "rounds.parquet").schema_arrow
    found = {f.name: str(f.type).replace("element: ", "") + "?" * f.nullable for f in schema}
    found = {name: kind.replace("item: ", "") for name, kind in found.items()}
    assert list(found.items()) == list(COLUMNS.items())


def test_every_field_of_a_record_is_a_column() -> None:
    assert {*COLUMNS, "extra", "traffic"} == set(RoundRecord.__dataclass_fields__)


def test_rounds_come_back_as_they_were_written(tmp_path: Path) -> None:
    folder = create(tmp_path)
    rows = [
        record(1, test_accuracy=None, high_frequency=(), attendees=(), aggregation_weights=()),
        record(2, high_frequency=(2,), kl_divergence=0.1, over_budget=1, sim_time_s=math.inf, extra={"rank": 3.0}),
        record(4, cohort=(), extra={"rate": 0.5}),
    ]
    folder.write_rounds(rows)
    assert folder.read_rounds() == rows


def test_nan_is_kept_apart_from_what_is_not_there(tmp_path: Path) -> None:
    folder = create(tmp_path)
    folder.write_rounds([record(1, train_loss=math.nan, extra={"x": math.nan}), record(2, train_loss=None)])
    first, second = folder.read_rounds()
    assert first.train_loss is not None and math.isnan(first.train_loss) and math.isnan(first.extra["x"])
    assert second.train_loss is None and second.extra == {}


def test_rounds_are_read_from_a_folder_named_like_a_partition(tmp_path: Path) -> None:
    folder = create(tmp_path / "lr=0.1")
    folder.write_rounds([record()])
    assert "lr" in folder.rounds_table().column_names
    assert folder.read_rounds() == [record()]


def test_no_rounds_yet_is_an_empty_table(tmp_path: Path) -> None:
    folder = create(tmp_path)
    folder.write_rounds([])
    assert folder.read_rounds() == []


def test_rounds_must_ascend(tmp_path: Path) -> None:
    with pytest.raises(InvariantError, match="round 2 follows round 2"):
        create(tmp_path).write_rounds([record(2), record(2)])


def test_an_extra_figure_may_not_take_a_columns_name(tmp_path: Path) -> None:
    with pytest.raises(InvariantError, match="flops"):
        create(tmp_path).write_rounds([record(extra={"flops": 1.0})])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["lr"]), "'lr' is missing"),
        (lambda t: t.set_column(0, "round", pa.array(["1"])), "'round' must hold int64"),
        (lambda t: t.set_column(5, "lr", pa.array([None], pa.float64())), "'lr' has 1 empty"),
        (lambda t: t.set_column(6, "cohort", pa.array([[0, None]])), "'cohort' has 1 empty"),
        (lambda t: t.append_column("more", pa.array(["x"])), "'more' must hold double"),
        (lambda t: t.set_column(0, "round", pa.array([0])), "round 0 follows round 0"),
    ],
)
def test_a_table_that_is_not_of_rounds_is_refused_by_name(tmp_path: Path, change: Any, message: str) -> None:
    folder = create(tmp_path)
    table = records_to_table([record()])
    pq.write_table(change(table), folder.path / "rounds.parquet")
    with pytest.raises(OutputError, match=message) as caught:
        folder.read_rounds()
    assert str(folder.path / "rounds.parquet") in str(caught.value)


def test_a_cut_table_is_refused_by_name(tmp_path: Path) -> None:
    folder = create(tmp_path)
    folder.write_rounds([record()])
    path = folder.path / "rounds.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(OutputError, match=r"rounds\.parquet: not a readable parquet file"):
        folder.read_rounds()
    path.unlink()
    with pytest.raises(OutputError, match=r"rounds\.parquet: cannot be read: no such file"):
        folder.read_rounds()


def test_scalar_figures_leave_out_lists_and_what_is_not_there() -> None:
    figures = scalar_figures(record(1, extra={"rank": 2.0}))
    assert figures["flops"] == 3e12 and figures["rank"] == 2.0
    assert not {"round", "timestamp_ms", "cohort", "sim_time_s"} & set(figures)


def test_clients_carry_their_divergence_from_the_population(tmp_path: Path) -> None:
    """Counts (2, 0) and (0, 2): the population is (1/2, 1/2), so KL is ln 2 and JS is that of (1, 0) to it."""
    folder = create(tmp_path)
    write_clients(folder, [[2, 0], [0, 2], [0, 0]])
    table = folder.read_clients().to_pydict()
    assert table["client"] == [0, 1, 2] and table["num_samples"] == [2, 2, 0]
    assert table["label_counts"] == [[2, 0], [0, 2], [0, 0]]
    js = 0.5 * math.log(1 / 0.75) + 0.5 * (0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25))
    assert table["kl_divergence"] == [pytest.approx(math.log(2)), pytest.approx(math.log(2)), None]
    assert table["js_divergence"] == [pytest.approx(js), pytest.approx(js), None]
    assert table["budget_values"] == table["flops_per_s"] == [None] * 3


def test_clients_carry_budgets_and_devices(tmp_path: Path) -> None:
    folder = create(tmp_path)
    links = {"down_bits_per_s": 2e6, "up_bits_per_s": 1e6, "down_latency_s": 0.0, "up_latency_s": 0.25}
    device = DeviceProfile(flops_per_s=1e9, overhead_s=0.5, **links)
    first, second = profiles_of([[1], [1]])
    profiles = [replace(first, device=device, capability=0.5), replace(second, device=replace(device, flops_per_s=2e9))]
    folder.write_table("clients.parquet", clients_table(profiles, [None, 7]))
    table = folder.read_clients().to_pydict()
    assert table["budget_values"] == [None, 7.0] and table["capability"] == [0.5, 1.0]
    assert table["flops_per_s"] == [1e9, 2e9] and table["overhead_s"] == [0.5, 0.5]
    assert table["down_bits_per_s"] == [2e6] * 2 and table["up_bits_per_s"] == [1e6] * 2
    assert table["down_latency_s"] == [0.0] * 2 and table["up_latency_s"] == [0.25] * 2
    assert clients_table([first, second]).column("flops_per_s").to_pylist() == [None, None]


def test_a_table_of_something_else_is_no_table_of_clients(tmp_path: Path) -> None:
    folder = create(tmp_path)
    pq.write_table(pa.table({"client": [0]}), folder.path / "clients.parquet")
    with pytest.raises(OutputError, match=r"clients\.parquet: the column 'num_samples'"):
        folder.read_clients()
    pq.write_table(
        pa.table({"client": [math.nan], "num_samples": [1], "label_counts": [[1]]}), folder.path / "clients.parquet"
    )
    with pytest.raises(OutputError, match="the column 'client' must hold int64, but it holds double"):
        folder.read_clients()


def test_result_is_strict_json_with_sorted_keys(tmp_path: Path) -> None:
    folder = create(tmp_path)
    result = {"status": "finished", "b": math.nan, "a": [math.inf, np.float64(0.5), np.int64(3)], "folder": tmp_path}
    folder.write_result(result)
    text = (folder.path / "result.json").read_text()
    strict = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert strict == {"a": [None, 0.5, 3], "b": None, "folder": str(tmp_path), "status": "finished"}
    assert list(strict) == sorted(strict)
    assert folder.read_result() == strict


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"status": "fine"}', '{"status": ["finished"]}', "\udcff", "[" * 100_000]
)
def test_a_result_that_is_none_is_refused_by_name(tmp_path: Path, text: str) -> None:
    folder = create(tmp_path)
    (folder.path / "result.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(OutputError, match=r"result\.json"):
        folder.read_result()


def test_equal_models_give_equal_bytes(tmp_path: Path) -> None:
    weight, bias = torch.arange(6.0).reshape(2, 3), torch.tensor(1.0)
    one, two = create(tmp_path / "1"), create(tmp_path / "2")
    first = one.write_model({"weight": weight, "bias": bias})
    second = two.write_model({"bias": bias.clone(), "weight": weight.t().contiguous().t()})
    assert first == second
    assert (one.path / "model.safetensors").read_bytes() == (two.path / "model.safetensors").read_bytes()
    read = one.read_model(num_values=100)
    assert set(read) == {"weight", "bias"} and torch.equal(read["weight"], weight) and torch.equal(read["bias"], bias)


def test_views_of_one_vector_can_be_a_model(tmp_path: Path) -> None:
    vector = torch.arange(4.0)
    folder = create(tmp_path)
    folder.write_model({"a": vector[:2], "b": vector[2:], "tied": vector[:2]})
    assert folder.read_model(num_values=100)["b"].tolist() == [2.0, 3.0]


def test_a_model_that_is_not_the_results_is_refused(tmp_path: Path) -> None:
    folder = create(tmp_path)
    digest = folder.write_model({"a": torch.zeros(2)})
    folder.write_result({"status": "finished", "model_sha256": digest})
    assert folder.read_model(num_values=100)["a"].tolist() == [0.0, 0.0]
    folder.write_model({"a": torch.ones(2)})
    with pytest.raises(OutputError, match=r"model\.safetensors: its SHA-256 is"):
        folder.read_model(num_values=100)


OF_ANOTHER_TYPE = b'{"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}'


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04N.", b"\xff" * 64, len(OF_ANOTHER_TYPE).to_bytes(8, "little") + OF_ANOTHER_TYPE + b"\0"]
)
def test_a_damaged_model_is_refused(tmp_path: Path, data: bytes) -> None:
    folder = create(tmp_path)
    (folder.path / "model.safetensors").write_bytes(data)
    with pytest.raises(OutputError, match=r"model\.safetensors: not a safetensors file"):
        folder.read_model(num_values=100)


def test_parents_are_made_and_other_files_are_let_be(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert RunFolder.create(tmp_path, overwrite=False).path == tmp_path
    assert RunFolder.create(tmp_path / "a" / "b", overwrite=False).path.is_dir()
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["config.yaml", "rounds.parquet", "model.safetensors", "checkpoints"])
def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(OutputError, match=rf"holds a run already \({name}\).*--overwrite"):
        RunFolder.create(tmp_path, overwrite=False)


def test_overwriting_clears_the_run_and_nothing_else(tmp_path: Path) -> None:
    folder = create(tmp_path)
    folder.write_rounds([record()])
    folder.write_result({"status": "finished"})
    folder.checkpoints.mkdir()
    (folder.checkpoints / "round-1").touch()
    (tmp_path / ".rounds.parquet.12345.tmp").touch()
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder.create(tmp_path, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_overwriting_never_follows_a_link_out_of_the_folder(tmp_path: Path) -> None:
    folder = create(tmp_path / "run")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").touch()
    folder.checkpoints.symlink_to(elsewhere)
    RunFolder.create(folder.path, overwrite=True)
    assert (elsewhere / "kept").exists() and not folder.checkpoints.exists()


@pytest.mark.parametrize("config", [None, "learning_rate: 1\n"])
def test_files_that_no_run_wrote_are_never_cleared(tmp_path: Path, config: str | None) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "theirs.pt").touch()
    if config is not None:
        (tmp_path / "config.yaml").write_text(config)
    with pytest.raises(OutputError, match=r"no config\.yaml that a run wrote"):
        RunFolder.create(tmp_path, overwrite=True)
    assert (tmp_path / "checkpoints" / "theirs.pt").exists()


def test_a_file_is_no_folder_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be made a run's folder"):
        RunFolder.create(tmp_path / "file" / "run", overwrite=False)


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    atomic_write(path, b"old")

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="No space"):
        atomic_write(path, b"new")
    folder = RunFolder(tmp_path)
    with pytest.raises(OutputError, match=r"config\.yaml: cannot be written: no space left"):
        folder.write_config(CONFIG)
    assert path.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_config_is_text(tmp_path: Path) -> None:
    folder = create(tmp_path)
    assert folder.read_config() == CONFIG
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(OutputError, match=r"config\.yaml: not a text file"):
        folder.read_config()


def test_runs_are_found_below_a_folder(tmp_path: Path) -> None:
    for name in ("b/run", "a", "broken-off", "mlartifacts/1/artifacts", ".hidden", "a/checkpoints/x"):
        create(tmp_path / name)
    for name in ("b/run", "a", "mlartifacts/1/artifacts"):
        RunFolder(tmp_path / name).write_rounds([record()])
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "tune").mkdir()
    (tmp_path / "tune" / "result.json").write_text("{}")
    os.symlink(tmp_path, tmp_path / "loop")
    assert find_runs(tmp_path) == [tmp_path / "a", tmp_path / "b" / "run", tmp_path / "broken-off"]
    assert find_runs(tmp_path / "a") == [tmp_path / "a"]
    assert find_runs(tmp_path / "tune") == []
    with pytest.raises(OutputError, match="no such folder"):
        find_runs(tmp_path / "missing")


def test_facts_name_versions_and_the_commit_of_fedsweeps_own_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = run_facts()
    assert facts["versions"]["numpy"] == np.__version__
    assert {"python", "fedsweep", "numpy", "ray", "mlflow"} <= set(facts["versions"])
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@x"]
    monkeypatch.chdir(tmp_path)
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "the user's own"]):
        subprocess.run([*git, *words], check=True)
    assert run_facts()["git_commit"] == facts["git_commit"]  # the working folder's is another
    package = tmp_path / "site-packages" / "fedsweep"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    spec = importlib.machinery.ModuleSpec("fedsweep", None, is_package=True)
    spec.submodule_search_locations = [str(package)]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert own_commit() is None  # installed below somebody's checkout, which does not track it
    for words in (["add", "."], ["commit", "-q", "-m", "fedsweep"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert own_commit() == head
    (package / "__init__.py").write_text("changed")
    assert own_commit() == f"{head}-dirty"


def test_facts_need_neither_git_nor_all_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(facts, "_told", {})
    monkeypatch.setattr(facts, "_VERSIONS_OF", ("no-such-package",))
    found = run_facts()
    assert found["git_commit"] is None and found["versions"]["no-such-package"] is None
