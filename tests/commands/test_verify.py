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
