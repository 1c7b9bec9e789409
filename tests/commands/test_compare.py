"""``fedsweep compare`` on a study of two worlds: its options, and what it says where they are wrong."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedsweep.runs.run_folder import RunFolder
from fedsweep.testing import tiny_record

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Two methods at two skews, the last three rounds of which have a loss."""
    for place, (method, clients) in enumerate((m, c) for m in ("fedavg", "scaffold") for c in (10, 20)):
        folder = RunFolder.create(tmp_path / "runs" / str(place), overwrite=False)
        folder.write_config(f"name: s {method} clients={clients}\nseed: 0\nmethod: {{name: {method}}}\n")
        with open(folder.path / "config.yaml", "a") as file:
            file.write(f"scenario: {{clients: {clients}}}\n")
        record = tiny_record(bytes_up=1000, bytes_down=1000, flops=5)
        folder.write_rounds(
            [replace(record, round=r, test_accuracy=0.1 * r + 0.1 * place, test_loss=1.0 / r) for r in (1, 2, 3)]
        )
        folder.write_result({"status": "finished"})
    return tmp_path / "runs"


def test_rows_columns_and_figures_are_chosen_by_short_names(study: Path, fedsweep: Command) -> None:
    options = ["--rows", "method", "--columns", "clients", "--y", "acc,loss", "--format", "csv"]
    code, out, err = fedsweep("compare", study, *options)
    assert (code, err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["row"] for row in rows] == ["FedAvg", "SCAFFOLD"]
    assert float(rows[1]["clients=20 test_accuracy_mean"]) == pytest.approx(0.6)
    assert float(rows[0]["clients=10 test_loss_mean"]) == pytest.approx(1 / 3)


def test_lines_are_chosen_sorted_and_cut(study: Path, fedsweep: Command) -> None:
    code, out, _ = fedsweep("compare", study, "--only", "clients=20", "--sort", "acc", "--top", "1")
    assert code == 0 and [line.split()[0] for line in out.splitlines()] == ["run", "scaffold"]


def test_a_run_that_a_scheduler_ended_is_named(study: Path, fedsweep: Command) -> None:
    RunFolder(study / "2").write_result({"status": "finished", "stopped_by": "scheduler"})
    _, out, err = fedsweep("compare", study)
    assert "note: ended early by a sweep's scheduler: s scaffold clients=10, seed 0\n" in out + err
    assert "ended early" not in "".join(fedsweep("compare", study, "--only", "method=FedAvg")[1:])


@pytest.mark.parametrize("form", ["latex", "md"])
def test_tables_of_a_paper_say_that_a_scheduler_ended_runs(study: Path, fedsweep: Command, form: str) -> None:
    RunFolder(study / "2").write_result({"status": "finished", "stopped_by": "scheduler"})
    _, out, _ = fedsweep("compare", study, "--by", "setting", "--format", form)
    assert "ended early by a sweep's scheduler" in out


@pytest.mark.parametrize("name", ["s scaffold clients=10", "SCAFFOLD clients=10", "a, b & c", "x,scaffold clients=10"])
def test_runs_are_chosen_by_their_names_with_commas_and_without_what_all_begin_with(
    study: Path, fedsweep: Command, name: str
) -> None:
    if "&" in name:
        config = study / "2" / "config.yaml"
        config.write_text(config.read_text().replace("s scaffold clients=10", "'s a, b & c'"))
    code, out, _ = fedsweep("compare", study, "--only", f"name={name}")
    assert code == 0 and len(out.splitlines()) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--columns", "client"], "did you mean 'clients'"),
        (["--y", "acuracy", "--by", "setting"], "did you mean 'accuracy'"),
        (["--only", "method=FedPro"], "no run is left; method is FedAvg, SCAFFOLD"),
        (["--only", "method"], "--only takes KEY=VALUE"),
        (["--sort", "bites"], "did you mean 'bytes'"),
        (["--label", "clients"], "--label takes KEY=TEXT"),
        (["--label", "clients=n"], "give --format latex or --plot FILE, too"),
        (["--interval"], "--interval is of cells over seeds"),
        (["--by", "setting", "--rows", "method", "--format", "csv", "--interval"], "no csv of rows and columns"),
        (["--x", "rounds"], "give --plot FILE, too"),
        (["--y", "loss"], "give --by setting or --plot FILE, too"),
        (["--plot", "a.png", "--x", "rnds"], "did you mean 'rounds'"),
        (["--plot", "a.png", "--x", "method"], "or a key whose values are numbers"),
        (["--top", "0"], "greater than or equal to 1"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    study: Path, fedsweep: Command, options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = fedsweep("compare", study, *options)
    assert code == 2 and words in err and not Path("a.png").exists()
    assert len([line for line in err.splitlines() if line.startswith("error: ")]) <= 1


@pytest.mark.parametrize("command", [["compare", ""], ["report", "", "--out", "page.html"]])
def test_an_empty_name_is_no_folder(
    study: Path, fedsweep: Command, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(study)
    code, out, err = fedsweep(*command)
    assert (code, out) == (2, "") and "a folder's name is empty, as of a variable that is not set" in err


def test_labels_of_keys_go_into_the_table_of_a_paper(study: Path, fedsweep: Command) -> None:
    code, out, _ = fedsweep("compare", study, "--by", "setting", "--format", "latex", "--label", "clients=$\\alpha$")
    assert code == 0 and r"$\alpha$=10" in out and r"\toprule" in out


def test_a_run_that_diverged_is_said_with_its_reason(study: Path, fedsweep: Command) -> None:
    record = tiny_record(round=1, test_accuracy=0.99, test_loss=float("nan"))
    RunFolder(study / "0").write_rounds([record])
    code, out, err = fedsweep("compare", study, "--only", "clients=10")
    assert code == 0 and "99.00%" not in out and "failed" in out
    assert (
        err == "note: s fedavg clients=10, seed 0: diverged: its last test_loss is nan, so its model counts as failed\n"
    )
