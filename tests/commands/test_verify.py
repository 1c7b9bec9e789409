from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedsweep.commands import verify
from fedsweep.runs.run_folder import RunFolder

Command = Callable[..., tuple[int, str, str]]


def sha256(folder: Path) -> str:
    return str(json.loads((folder / "result.json").read_text())["model_sha256"])


def test_verify_of_a_repeatable_run_is_exit_0(finished: Path, fedsweep: Command) -> None:
    before = sorted(finished.rglob("*"))
    code, out, err = fedsweep("verify", finished, "-q")
    assert (code, err) == (0, "")
    assert out == f"identical: 2 rounds, model {sha256(finished)}\n"
    assert sorted(finished.rglob("*")) == before and list(Path().iterdir()) == []


def test_a_run_that_a_scheduler_ended_is_not_played_to_its_end(finished: Path, fedsweep: Command) -> None:
    shutil.copytree(finished, "run")
    result = json.loads(Path("run/result.json").read_text())
    Path("run/result.json").write_text(json.dumps({**result, "stopped_by": "scheduler"}))
    code, out, err = fedsweep("verify", "run", "-q")
    assert code != 0 and out == ""
    assert "a sweep's scheduler ended it after 2 rounds, before its own end" in err


def test_verify_says_what_differs(finished: Path, fedsweep: Command) -> None:
    shutil.copytree(finished, "run")
    text = Path("run/config.yaml").read_text()
    Path("run/config.yaml").write_text(text.replace("lr: 0.05", "lr: 0.06"))
    code, out, _ = fedsweep("verify", "run", "-q")
    assert code == 1
    assert f"model_sha256: {sha256(finished)} there, " in out
    assert "lr: 0.05 there, 0.06 here, first in row 1, 2 rows in all" in out
    assert not re.search(r"^(timestamp_ms|wall_time_s|eval_time_s|server_time_s|cohort|bytes_up):", out, re.MULTILINE)


def test_a_changed_bit_in_the_model_is_found(finished: Path, fedsweep: Command) -> None:
    shutil.copytree(finished, "run")
    data = bytearray(Path("run/model.safetensors").read_bytes())
    data[-1] ^= 1
    Path("run/model.safetensors").write_bytes(data)
    code, out, _ = fedsweep("verify", "run", "-q")
    assert code == 1
    assert out.startswith("model.safetensors, SHA-256: ") and f" there, {sha256(finished)} here" in out


def test_a_missing_round_and_a_changed_figure_are_found(finished: Path, fedsweep: Command) -> None:
    shutil.copytree(finished, "run")
    result = json.loads(Path("run/result.json").read_text())
    Path("run/result.json").write_text(json.dumps({**result, "best_test_accuracy": 1.0, "cpu": "Zilog Z80, DEFAULT"}))
    rounds = pq.read_table("run/rounds.parquet")
    pq.write_table(rounds.slice(0, 1), "run/rounds.parquet")
    code, out, _ = fedsweep("verify", "run", "-q")
    assert code == 1
    assert "best_test_accuracy: 1.0 there, " in out
    assert f"; it was played on another CPU (Zilog Z80, DEFAULT; here {result['cpu']})" in out
    assert "rows, by round: 1 there, 2 here" in out


def test_changed_traffic_is_found_and_traffic_that_is_not_there_differs(finished: Path, fedsweep: Command) -> None:
    shutil.copytree(finished, "run")
    traffic = pq.read_table("run/traffic.parquet")
    sizes = traffic.column("bytes").to_pylist()
    changed = pa.array([sizes[0] + 4, *sizes[1:]], traffic.schema.field("bytes").type)
    pq.write_table(traffic.set_column(traffic.schema.get_field_index("bytes"), "bytes", changed), "run/traffic.parquet")
    code, out, _ = fedsweep("verify", "run", "-q")
    assert code == 1 and f"traffic.parquet, bytes: {sizes[0] + 4} there, {sizes[0]} here" in out
    Path("run/traffic.parquet").unlink()
    code, out, _ = fedsweep("verify", "run", "-q")
    assert code == 1 and "traffic.parquet: only here" in out


def test_verify_needs_a_finished_run(finished: Path, fedsweep: Command) -> None:
    shutil.copytree(finished, "run")
    Path("run/result.json").write_text('{"status": "killed"}')
    code, _, err = fedsweep("verify", "run")
    assert code == 2 and "this one is killed; finish it with fedsweep run --resume" in err


@pytest.fixture
def played(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is played again is the finished run, at once; the folder ``run`` is a copy of it."""

    def play(original: RunFolder, again: RunFolder, *, quiet: bool) -> dict[str, Any]:
        shutil.copytree(finished, again.path)
        return again.read_result()

    monkeypatch.setattr(verify, "_play_again", play)
    shutil.copytree(finished, "run")


def change_result(**values: Any) -> None:
    result = json.loads(Path("run/result.json").read_text())
    Path("run/result.json").write_text(json.dumps({**result, **values}))


@pytest.mark.usefixtures("played")
def test_what_a_foreign_result_says_is_no_line_of_its_own_and_no_code_for_the_terminal(fedsweep: Command) -> None:
    forged = "\x1b[2J\nidentical: 3 rounds"
    more = {"sources": {forged: "1"}, "machines_changed": [forged], "cpu": forged, "versions": {"torch": forged}}
    change_result(stopped_by=forged, test_accuracy=forged, **more)
    code, out, err = fedsweep("verify", "run", "-q")
    assert (code, err) == (1, "") and "stopped_by: ?[2J?identical: 3 rounds there, rounds here\n" in out
    assert "\x1b" not in out and not any(line.startswith("identical") for line in out.splitlines())


@pytest.mark.usefixtures("played")
@pytest.mark.parametrize("sentences", [None, 5, {}])
def test_machines_that_are_no_list_are_passed_over(sentences: Any, fedsweep: Command) -> None:
    change_result(machines_changed=sentences, best_test_accuracy=2.0)
    code, out, err = fedsweep("verify", "run", "-q")
    assert (code, err) == (1, "") and out.endswith("differs: run does not repeat bit by bit\n")


@pytest.mark.usefixtures("played")
def test_a_run_that_a_scheduler_ended_need_not_say_after_how_many_rounds(fedsweep: Command) -> None:
    Path("run/result.json").write_text('{"status": "finished", "stopped_by": "scheduler"}')
    code, out, err = fedsweep("verify", "run", "-q")
    assert (code, out) == (2, "") and "ended it after some rounds" in err


@pytest.mark.usefixtures("played")
def test_a_table_without_its_rounds_differs(fedsweep: Command) -> None:
    traffic = pq.read_table("run/traffic.parquet")
    sizes = pa.array([size + 4 for size in traffic.column("bytes").to_pylist()])
    place = traffic.column_names.index("bytes")
    pq.write_table(traffic.set_column(place, "bytes", sizes).drop_columns(["round"]), "run/traffic.parquet")
    code, out, err = fedsweep("verify", "run", "-q")
    assert (code, err) == (1, "") and "traffic.parquet, round: only here" in out
    assert re.search(rf"traffic\.parquet, bytes: .* first in row 1, {len(sizes)} rows in all", out)


@pytest.mark.usefixtures("played")
def test_equal_figures_of_another_type_are_not_the_same_bits(fedsweep: Command) -> None:
    traffic = pq.read_table("run/traffic.parquet")
    place, sizes = traffic.column_names.index("bytes"), traffic.column("bytes").cast(pa.float64())
    pq.write_table(traffic.set_column(place, "bytes", sizes), "run/traffic.parquet")
    code, out, _ = fedsweep("verify", "run", "-q")
    assert code == 1 and "traffic.parquet, bytes: double there, int64 here, in all rows" in out


@pytest.mark.parametrize("name", ["model.safetensors", "rounds.parquet", "clients.parquet", "traffic.parquet"])
def test_a_damaged_folder_is_told_before_it_is_played_again(
    name: str, finished: Path, fedsweep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_play_again", lambda *_, **__: pytest.fail("it is played"))
    shutil.copytree(finished, "run")
    path = Path("run", name)
    if name == "model.safetensors":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-100])
    code, out, err = fedsweep("verify", "run", "-q")
    assert (code, out) == (2, "") and str(path) in err


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (float("nan"), float("nan"), True),
        ([1, float("nan")], [1, float("nan")], True),
        ([1, 2], [1], False),
        (None, 0.0, False),
        (0.1 + 0.2, 0.3, False),
    ],
)
def test_cells_are_compared_bit_by_bit_and_nan_equals_nan(one: Any, other: Any, same: bool) -> None:
    assert verify._same(one, other) is same


@pytest.mark.parametrize("name", ["train_loss", "test_loss", "lr", "local_steps", "flops", "bytes_up"])
def test_a_changed_figure_of_any_column_is_found(finished: Path, fedsweep: Command, name: str) -> None:
    shutil.copytree(finished, "run")
    rounds = pq.read_table("run/rounds.parquet")
    place, column = rounds.column_names.index(name), rounds.column(name).to_pylist()
    changed = pa.array([column[0] + 1, *column[1:]], type=rounds.schema.field(name).type)
    pq.write_table(rounds.set_column(place, rounds.schema.field(name), changed), "run/rounds.parquet")
    code, out, _ = fedsweep("verify", "run", "-q")
    assert code == 1 and f"{name}: " in out
