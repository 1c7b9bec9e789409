"""``fedsweep reproduce``: what is refused before anything runs, and a small table from start to report."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsweep.cli import main
from fedsweep.reproduce import costs
from fedsweep.reproduce.calibration import Speed
from fedsweep.reproduce.definition import table_file

Command = Callable[..., tuple[int, str, str]]
TABLE = """
# Two methods on digits
name: tiny
scenario: {clients: 6, partition: {kind: iid}}
training: {rounds: 3, cohort_size: 2, local_steps: 2}
checkpoint: {every: 1}
tracking: {uri: none}
table:
  title: Two methods on digits
  source: Somebody 2024, Table 7
  measures:
    - {name: accuracy, label: Accuracy, of: test_accuracy, percent: true, tolerance: 2.0}
    - {name: cost, label: Cost, of: comm_ratio, over: mean, tolerance: 0.05, cost: true}
  rows:
    - {name: FedAvg}
    - {name: FedProx, set: {method: {name: fedprox, mu: 0.1}}}
    - {name: SCAFFOLD, missing: scaffold is not there yet}
  columns:
    - {name: even}
    - {name: K=2, set: {scenario.partition: {kind: classes, classes_per_client: 2}}}
  scales:
    smoke: {set: {training.rounds: 2}}
  printed:
    FedAvg: {even: {accuracy: 99.0, cost: 0.9}}
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TABLE)
    return path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dynamicfl/tabel4"], "did you mean 'dynamicfl/table4'"),
        (["TABLE", "--scale", "samll"], "unknown scale 'samll'; did you mean 'small'"),
        (["TABLE", "--scale", "small"], "has no scale 'small' (it has: smoke, full)"),
        (["TABLE", "--rows", "fedpro"], "unknown row 'fedpro'; did you mean 'FedProx'"),
        (["TABLE", "--columns", "K=3"], "unknown column 'K=3'; did you mean 'K=2'"),
        (["TABLE", "--rows", "SCAFFOLD"], "scaffold is not there yet"),
        (["TABLE", "--seeds", "0,x"], "--seeds takes numbers and ranges from 0, e.g. 0-4 or 0,3,7, but got '0,x'"),
        (["TABLE", "--seeds", "-1"], "numbers and ranges from 0"),
        (["TABLE", "--set", "seed=1"], "give --seeds"),
        (["TABLE", "--set", "table.seeds=[1]"], "stands in its file"),
        (["TABLE", "--set", "training.round=1"], "unknown key 'training.round'; did you mean 'training.rounds'"),
        (["TABLE", "--set", "scenario.dataset=cifra10"], "unknown dataset 'cifra10'; did you mean 'cifar10'"),
        (["TABLE", "--set", "scenario={dataset: svhn, download: false, root: .}"], "svhn"),
        ([], "TABLE is missing"),
        (["TABLE", "--resume"], "--resume goes on with --out DIR"),
        (["--resume", "--out", "nowhere"], "there is no such folder"),
        (["--resume", "--out", "nowhere", "--scale", "full"], "can't be given"),
        (["quickstart/fedavg"], "lacks the section table:"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2_and_nothing_is_written(
    words: list[str], said: str, table: Path, tmp_path: Path, fedsweep: Command
) -> None:
    code, out, err = fedsweep("reproduce", *(str(table) if word == "TABLE" else word for word in words))
    assert code == 2 and out == "" and said in err and err.count("\n") == 1, err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_dry_run_lists_the_cells_and_writes_nothing(table: Path, tmp_path: Path, fedsweep: Command) -> None:
    code, out, err = fedsweep("reproduce", table, "--dry-run", "--rows", "fed*", "--seeds", "3,4")
    assert (code, err) == (0, "")
    # A line for each seed, and one of costs.
    assert out.count("FedAvg | even") == 3 and out.count("FedProx | K=2") == 3 and "SCAFFOLD" not in out
    assert out.splitlines()[-1] == "tiny at scale smoke: 8 runs, 16 rounds in all"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


def test_dry_run_says_what_a_table_costs_also_without_its_data(table: Path, tmp_path: Path, fedsweep: Command) -> None:
    place = f"dataset: cifar10, root: {tmp_path}, download: true, "
    table.write_text(TABLE.replace("scenario: {", f"model: {{name: lenet5}}\nscenario: {{{place}"))
    code, out, err = fedsweep("reproduce", table, "--dry-run", "--scale", "full", "--rows", "FedAvg")
    assert code == 0 and err.strip().endswith("equally frequent classes: cifar10")
    by_name = {line.rpartition("  ")[0].split("  ")[0]: line.split() for line in out.splitlines()}
    assert by_name["FedAvg | even"][3:5] == by_name["FedAvg | K=2"][3:5] == ["1", "12"]
    assert by_name["in all"][2:4] == ["2", "24"]
    assert "on the" in out and out.splitlines()[-1] == "tiny at scale full: 2 runs, 6 rounds in all"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]


@pytest.mark.parametrize("more", [["--resume", "--out", "x"], ["--costs-only"]])
def test_within_is_for_new_tables(more: list[str], table: Path, fedsweep: Command) -> None:
    code, _, err = fedsweep("reproduce", table, "--within", "1h", *more)
    assert code == 2 and "--within" in err


def test_within_chooses_runs(table: Path, fedsweep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "calibrate", lambda experiment: Speed(step=600.0, turn=0.0, test=0.0))
    monkeypatch.setattr(costs, "cores", lambda: 2)
    # Eight steps of ten minutes: a run alone takes eighty minutes, two beside each other on two cores no longer.
    code, out, _ = fedsweep("reproduce", table, "--within", "100m", "--dry-run")
    assert code == 0 and out.splitlines()[-1] == "tiny at scale smoke: 2 runs, 4 rounds in all"
    assert "FedAvg | K=2" in out and "FedProx" not in out
    code, _, err = fedsweep("reproduce", table, "--within", "30m", "--dry-run")
    assert code == 2 and "the shortest takes about 80m here" in err


def test_tables_are_listed_with_their_costs(table: Path, fedsweep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "calibrate", lambda experiment: Speed(step=1.0, turn=0.0, test=0.0))
    other = table.with_name("other.yaml")
    other.write_text(TABLE.replace("name: tiny", "name: other"))
    presets = [(SimpleNamespace(name=str(path)), "") for path in (table, other)]
    monkeypatch.setattr(table_file, "listed_tables", lambda: presets)
    code, out, _ = fedsweep("list", "tables", "--scale", "full", "--costs")
    rows = [line.split() for line in out.splitlines()]
    assert code == 0 and [row[1:3] for row in rows[1:3]] == [["4", "48"]] * 2
    # The two tables have the same runs.
    assert rows[3][:4] == ["in", "all", "4", "48"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["methods", "--costs"], "fedsweep list tables --costs"),
        (["tables", "--scale", "full"], "fedsweep list tables --costs"),
        (["tables", "--costs", "--scale", "smal"], "unknown scale 'smal'; did you mean 'small'"),
    ],
)
def test_only_tables_have_costs(words: list[str], said: str, fedsweep: Command) -> None:
    code, _, err = fedsweep("list", *words)
    assert code == 2 and said in err and err.count("\n") == 1


def test_costs_alone_need_no_run_and_are_compared(table: Path, tmp_path: Path, fedsweep: Command) -> None:
    code, out, err = fedsweep("reproduce", table, "--costs-only", "--out", "costs")
    assert code == 0 and err.splitlines()[-1] == "4: FedProx | K=2"
    assert "0.500*† (0.900)" in out and "Accuracy" not in out and "4 of 4 cells measured" in out
    files = {path.name for path in (tmp_path / "costs").iterdir()}
    assert files == {"measured.json", "table.txt", "table.md", "table.tex", "tabular.tex", "table.html"}
    assert fedsweep("reproduce", table, "--costs-only", "--out", "costs")[0] == 2
    assert fedsweep("reproduce", table, "--costs-only", "--out", "costs", "--overwrite")[0] == 0


def test_without_out_the_folder_is_named_after_table_and_scale(table: Path, tmp_path: Path, fedsweep: Command) -> None:
    code, _, _ = fedsweep("reproduce", table, "--costs-only", "--quiet")
    (folder,) = (tmp_path / "runs").iterdir()
    assert code == 0 and folder.name.startswith("tiny-full-20")


def test_costs_alone_take_the_paper_s_scale_and_few_rounds_unless_told(table: Path, fedsweep: Command) -> None:
    table.write_text(TABLE.replace("rounds: 3,", "rounds: 500,"))
    _, out, _ = fedsweep("reproduce", table, "--costs-only", "--out", "few")
    assert "scale full; digits; mlp; 80 rounds" in out
    _, out, _ = fedsweep("reproduce", table, "--costs-only", "--out", "all", "--set", "training.rounds=90")
    assert "scale full; digits; mlp; 90 rounds" in out
    _, out, _ = fedsweep("reproduce", table, "--costs-only", "--out", "smoke", "--scale", "smoke")
    assert "scale smoke; digits; mlp; 2 rounds" in out


def test_costs_alone_of_a_table_without_such_a_measure_is_an_error(table: Path, fedsweep: Command) -> None:
    table.write_text(TABLE.replace(", cost: true", ""))
    code, _, err = fedsweep("reproduce", table, "--costs-only")
    assert code == 2 and "no measure of cost (it has: accuracy, cost)" in err


OWN_KIND = """
from dataclasses import dataclass
from fedsweep.errors import ConfigError
from fedsweep.reproduce.measured.grid import GridCell, grid_of, summed_up
from fedsweep.reproduce.measured.table_kind import TableKind

@dataclass(frozen=True, kw_only=True)
class Own(TableKind):
    sizes: list[int]
    fails: str = ""

    def measure(self, table, cells, *, scale, folder, notify):
        assert folder.is_dir()
        if self.fails == "late":
            (folder / "first").mkdir(exist_ok=True)
            (folder / "first" / "config.yaml").write_text("name: first\\n")
        if self.fails:
            raise ConfigError(self.fails)
        notify(f"{len(cells)} cells of {cells[0].config.training.rounds} rounds, sizes {self.sizes}")

        def one(group):
            place = {"row": group[0].row, "column": group[0].column}
            if place == {"row": "FedProx", "column": "K=2"}:
                return GridCell(**place, problems=("it took too long",))
            return GridCell(**place, measured={m.name: summed_up([0.25], m) for m in table.measures})

        return grid_of(table, cells, one, scale=scale)
"""


def own_kind(table: Path, options: str) -> None:
    table.with_name("my_kinds.py").write_text(OWN_KIND)
    table.write_text(TABLE.replace("  title:", f"  kind: my_kinds:Own\n  options: {options}\n  title:"))


def test_a_kind_of_table_of_ones_own_measures_its_cells_without_runs(
    table: Path, tmp_path: Path, fedsweep: Command
) -> None:
    own_kind(table, "{sizes: [1, 2]}")
    code, out, err = fedsweep("reproduce", table, "--out", "own")
    assert code == 1 and "3 of 4 cells measured, 1 failed" in out and "FedProx | K=2: it took too long" in out
    assert "SCAFFOLD is missing" in out and "fedsweep report" not in out
    assert err == "4 cells of 2 rounds, sizes [1, 2]\n"
    assert fedsweep("reproduce", "--resume", "--out", "own", "--quiet")[0] == 1
    code, _, err = fedsweep("reproduce", table, "--resume", "--out", "own", "--seeds", "5")
    assert code == 2 and "begun with other cells" in err
    assert fedsweep("reproduce", table, "--out", "own")[0] == 2
    assert fedsweep("reproduce", table, "--out", "own", "--overwrite", "--seeds", "5")[0] == 1


def test_wrong_options_of_a_kind_are_told_before_a_folder_is_made(
    table: Path, tmp_path: Path, fedsweep: Command
) -> None:
    own_kind(table, "{size: [1]}")
    code, _, err = fedsweep("reproduce", table, "--out", "own")
    assert code == 2 and "table.options.size: unknown parameter 'size'; did you mean 'sizes'?" in err
    own_kind(table, "{sizes: [1], fails: no sizes}")
    assert fedsweep("reproduce", table, "--out", "own") == (2, "", "error: no sizes\n")
    assert not (tmp_path / "own").exists()


def test_wrong_input_of_a_later_cell_leaves_the_finished_ones_to_go_on_with(
    table: Path, tmp_path: Path, fedsweep: Command
) -> None:
    own_kind(table, "{sizes: [1], fails: late}")
    for words in ((table,), ("--resume",)):
        assert fedsweep("reproduce", *words, "--out", "gap") == (2, "", "error: late\n")
    assert (tmp_path / "gap" / "first" / "config.yaml").is_file()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("  title:", "  kind: grups\n  title:", "table.kind: unknown table 'grups'; did you mean 'groups'"),
        ("  title:", "  kind: nowhere:Own\n  title:", "the module 'nowhere' cannot be imported"),
        ("  title:", "  figures: [{name: f, kind: scater}]\n  title:", "figures: f: unknown figure 'scater'"),
        ("of: test_accuracy", "of: 'nowhere:mine'", "measures: accuracy: measure 'nowhere:mine': the module 'nowhere'"),
    ],
)
def test_names_that_lead_nowhere_are_told_at_once(
    table: Path, old: str, new: str, words: str, fedsweep: Command
) -> None:
    assert old in TABLE
    table.write_text(TABLE.replace(old, new))
    code, out, err = fedsweep("reproduce", table, "--out", "none")
    assert (code, out) == (2, "") and words in err and err.count("\n") == 1


def test_help_teaches_with_examples(fedsweep: Command) -> None:
    code, out, _ = fedsweep("reproduce", "--help")
    assert code == 0 and "dynamicfl/table4 --scale small" in out and "--costs-only" in out


# -- with runs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(shared_ray: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a table that was made; not to be changed."""
    above = tmp_path_factory.mktemp("made")
    (above / "tiny.yaml").write_text(TABLE)
    with contextlib.chdir(above):  # runs keep the commit of the folder that they were begun in
        assert main(["reproduce", "tiny.yaml", "--out", "out", "--quiet"]) == 0
    return above / "out"


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_table_is_made_from_a_run_for_each_cell(made: Path) -> None:
    runs = [path.name for path in sorted(made.iterdir()) if (path / "result.json").is_file()]
    assert runs == [
        "0001-FedAvg_even_seed=0",
        "0002-FedAvg_K=2_seed=0",
        "0003-FedProx_even_seed=0",
        "0004-FedProx_K=2_seed=0",
    ]
    tree = json.loads((made / "measured.json").read_text())
    assert [(cell["row"], cell["column"], cell["problems"]) for cell in tree["cells"]] == [
        ("FedAvg", "even", []),
        ("FedAvg", "K=2", []),
        ("FedProx", "even", []),
        ("FedProx", "K=2", []),
    ]
    result = json.loads((made / runs[0] / "result.json").read_text())
    first = tree["cells"][0]["measured"]
    assert first["accuracy"]["mean"] == pytest.approx(100 * result["test_accuracy"])
    assert first["cost"]["mean"] == pytest.approx(result["comm_ratio"]) and first["cost"]["deviates"]
    assert not first["accuracy"]["deviates"]
    assert tree["setting"]["rounds"] == [2, 2] and tree["setting"]["versions"]["torch"]


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_resume_runs_only_what_is_not_finished_and_makes_the_same_table(
    made: Path, tmp_path: Path, fedsweep: Command
) -> None:
    folder = tmp_path / "out"
    shutil.copytree(made, folder)
    (folder / "table.txt").unlink()
    broken = folder / "0002-FedAvg_K=2_seed=0"
    shutil.rmtree(broken)
    kept = folder / "0003-FedProx_even_seed=0" / "result.json"
    before = kept.stat().st_mtime_ns
    _, out, _ = fedsweep("reproduce", "--resume", "--out", folder, "--dry-run")
    assert out.splitlines()[-1].endswith("1 runs, 2 rounds in all; 3 more have finished") and out.count("even") == 0
    code, out, _ = fedsweep("reproduce", "--resume", "--out", folder, "--quiet")
    assert code == 0 and "4 of 4 cells measured" in out
    assert kept.stat().st_mtime_ns == before and (broken / "result.json").is_file()
    cells = [json.loads((place / "measured.json").read_text())["cells"] for place in (made, folder)]
    assert cells[0] == cells[1] and (folder / "table.txt").read_text() == (made / "table.txt").read_text()
    code, out, err = fedsweep("reproduce", "--resume", "--out", folder)
    assert code == 0 and "nothing is run" in err and "Two methods on digits" in out


PART = """
# One method of the other table
extends: tiny.yaml
name: part
evaluation: {targets: [0.05]}
table:
  measures: [{name: rounds, of: round, target: cell}]
  printed: {}
  only: {rows: [FedAvg]}
"""


def beside(made: Path, place: Path) -> Path:
    """A table of some of the same runs, in a folder where the whole table is too."""
    shutil.copytree(made, place / "whole")
    shutil.copy(made.parent / "tiny.yaml", place / "tiny.yaml")
    path = place / "part.yaml"
    path.write_text(PART)
    return path


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_table_takes_over_what_one_beside_it_has_finished(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fedsweep: Command
) -> None:
    path = beside(made, tmp_path)
    monkeypatch.setattr("fedsweep.sweeps.tuner.run_sweep", None)  # nothing is left to run
    for more, told in (([], "0 runs, 0 rounds in all; 2 more have finished"), (["--fresh"], "2 runs, 4 rounds in all")):
        _, out, _ = fedsweep("reproduce", path, "--out", "part", "--dry-run", *more)
        assert out.splitlines()[-1].endswith(told)
    code, out, err = fedsweep("reproduce", path, "--out", "part")
    assert code == 0 and "2 of 2 runs have finished in whole already and are taken over" in err
    assert "nothing is run" in err and "2 of 2 cells measured" in out
    tree = json.loads((tmp_path / "part" / "measured.json").read_text())
    assert any("2 of 2 runs were not made for this table: they are those of whole" in note for note in tree["notes"])
    # Its own target counts, which the runs were made without.
    assert [cell["measured"]["rounds"]["count"] for cell in tree["cells"]] == [1, 1]
    first = tmp_path / "part" / "0001-FedAvg_even_seed=0"
    assert (first / "rounds.parquet").read_bytes() == (made / first.name / "rounds.parquet").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(
            "fedsweep.sweeps.tuner.run_sweep", lambda prepared, *_, **__: pytest.fail(f"{prepared.total} runs")
        )
        with pytest.raises(pytest.fail.Exception, match="2 runs"):
            fedsweep("reproduce", path, "--out", "fresh", "--fresh")
    shutil.rmtree(tmp_path / "whole")
    assert fedsweep("reproduce", "--resume", "--out", "part", "--quiet")[0] == 0


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.parametrize("change", ["config", "sources", "torch", "unfinished", "other seed"])
def test_only_the_same_finished_run_of_the_same_software_is_taken_over(change: str, made: Path, tmp_path: Path) -> None:
    from fedsweep.reproduce.reproduction import TableRequest, finished_elsewhere, reproduction
    from fedsweep.sweeps.sweep_folder import SweepFolder

    path = beside(made, tmp_path)
    for run in (tmp_path / "whole").glob("*FedAvg*"):
        result = json.loads((run / "result.json").read_text())
        if change == "config":
            (run / "config.yaml").write_text((run / "config.yaml").read_text().replace("rounds: 2", "rounds: 5"))
        elif change == "sources":
            other = {**result["sources"], "fedsweep/engine": "0" * 16}
            (run / "result.json").write_text(json.dumps({**result, "sources": other}))
        elif change == "torch":
            other = {**result["versions"], "torch": "0"}
            (run / "result.json").write_text(json.dumps({**result, "versions": other}))
        elif change == "unfinished":
            (run / "result.json").write_text(json.dumps({**result, "status": "killed"}))
    seeds = (3,) if change == "other seed" else None
    found = reproduction(TableRequest(table=str(path), scale="smoke", seeds=seeds))
    runs, refused = finished_elsewhere(found, SweepFolder(tmp_path / "part"))
    told = {"sources": "changed since: fedsweep/engine", "torch": f"torch was 0 and is {version('torch')}"}.get(change)
    assert runs == {} and (len(refused), {*refused.values()}) == ((2, {told}) if told else (0, set()))


def test_cells_that_come_to_the_same_run_share_one(table: Path, fedsweep: Command) -> None:
    table.write_text(TABLE.replace("- {name: even}", "- {name: even}\n    - {name: also even}"))
    code, out, _ = fedsweep("reproduce", table, "--dry-run")
    assert code == 0 and out.splitlines()[-1] == "tiny at scale smoke: 4 runs, 8 rounds in all"


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_folder_goes_on_only_with_the_cells_that_it_was_begun_with(made: Path, fedsweep: Command) -> None:
    table = made.parent / "tiny.yaml"
    for more in (["--scale", "full"], ["--seeds", "1"], ["--rows", "FedAvg"], ["--set", "training.batch_size=4"]):
        code, _, err = fedsweep("reproduce", table, "--resume", "--out", made, *more)
        assert code == 2 and "begun with other cells" in err
    code, _, err = fedsweep("reproduce", table, "--out", made)
    assert code == 2 and "--resume" in err and "--overwrite" in err
    assert fedsweep("reproduce", table, "--out", made, "--costs-only")[0] == 2


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_a_cell_that_fails_says_why_and_the_rest_is_shown(
    shared_ray: Any, table: Path, tmp_path: Path, fedsweep: Command
) -> None:
    table.write_text(TABLE.replace("mu: 0.1", "mu: 1.0e+30"))
    code, out, _ = fedsweep("reproduce", table, "--columns", "even", "--out", "out")
    assert code == 1 and "1 of 2 cells measured, 1 failed" in out
    text = (tmp_path / "out" / "table.txt").read_text()
    assert "FedProx | even: seed 0: failed after round" in text and "(99.0)" in text


@pytest.mark.ray
@pytest.mark.timeout(300)
def test_the_report_of_the_folder_shows_the_table(made: Path, tmp_path: Path, fedsweep: Command) -> None:
    folder = tmp_path / "out"
    shutil.copytree(made, folder)
    code, _, err = fedsweep("report", folder, "--out", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert (code, err) == (0, "") and "Measured beside printed" in page and "(99.0)" in page
    assert "fedsweep reproduce" in page and "different worlds" not in page
    tree = json.loads((folder / "measured.json").read_text())
    tree["notes"] = ["<script>alert(1)</script>"]
    (folder / "measured.json").write_text(json.dumps(tree))
    fedsweep("report", folder, "--out", "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<script>alert(1)" not in page and "&lt;script&gt;alert(1)" in page
    (folder / "measured.json").write_text("{}")
    code, _, err = fedsweep("report", folder, "--out", "page.html")
    assert code == 0 and "measured.json: not a table" in err
