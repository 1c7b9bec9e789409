"""Runs, sweeps and tables from Python: the figures of the commands, as frames and axes."""

from __future__ import annotations

import ast
import csv
import importlib
import io
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

import fedsweep
from fedsweep.cli import main
from fedsweep.components.metrics import TABLE_COLUMNS
from fedsweep.config.tables import TABLES
from fedsweep.errors import InputError
from fedsweep.figures.style import setting_looks
from fedsweep.records import RoundRecord
from fedsweep.reports.setting_table import FIGURES, OF_REPLAYS
from fedsweep.results.selection import FIGURE_NAMES
from fedsweep.results.view import SPENT

torch.set_num_threads(1)
matplotlib.use("agg")
CONFIG: dict[str, Any] = {
    "scenario": {"clients": 6, "partition": {"kind": "iid"}},
    "training": {"rounds": 2, "cohort_size": 3, "local_steps": 2},
    "evaluation": {"per_client": True},
    "runtime": {"backend": "local"},
    "tracking": {"uri": "none"},
}
METHODS = ("fedprox", "fedavg")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with two seeds each."""
    place = tmp_path_factory.mktemp("study")
    for name in METHODS:
        for seed in (0, 1):
            fedsweep.run({**CONFIG, "name": name, "method": {"name": name}, "seed": seed}, out=place / f"{name}-{seed}")
    return place


@pytest.fixture(scope="module")
def results(folder: Path) -> fedsweep.Results:
    found = fedsweep.load(folder)
    assert isinstance(found, fedsweep.Results)
    return found


def one(folder: Path) -> fedsweep.Result:
    found = fedsweep.load(folder / "fedprox-1")
    assert isinstance(found, fedsweep.Result)
    return found


def test_a_metric_has_no_name_that_tables_have_for_something_else(folder: Path) -> None:
    taken = {field.name for field in fields(RoundRecord)} | {*TABLE_COLUMNS}
    of_one_setting = fedsweep.load(folder / "fedavg-0", folder / "fedavg-1")  # no column for a key that differs
    assert isinstance(of_one_setting, fedsweep.Results)
    shown = {*of_one_setting.to_pandas().columns, *(figure.name for figure in (*FIGURES, *OF_REPLAYS))}
    assert {*shown, *FIGURE_NAMES.values(), *SPENT} <= taken


def test_a_folder_of_runs_is_results_and_a_run_is_a_result(folder: Path, results: fedsweep.Results) -> None:
    assert [result.config.name for result in results] == ["fedavg", "fedavg", "fedprox", "fedprox"]
    assert results[3].summary == one(folder).summary
    assert [result.folder.name for result in results[1:3]] == ["fedavg-1", "fedprox-0"]
    several = fedsweep.load(folder / "fedprox-1", folder / "fedavg-0")
    assert isinstance(several, fedsweep.Results)
    assert [result.folder.name for result in several] == ["fedprox-1", "fedavg-0"]
    with pytest.raises(InputError, match="nor one with runs below it"):
        fedsweep.load(folder / "fedavg-0" / "checkpoints")


def test_frames_have_the_figures_of_the_tables(folder: Path, results: fedsweep.Results) -> None:
    runs = results.to_pandas()
    assert runs["test_accuracy"].tolist() == [result.summary["test_accuracy"] for result in results]
    assert runs["total_bytes"].tolist() == [result.summary["total_bytes"] for result in results]
    assert runs["method.name"].tolist() == ["fedavg"] * 2 + ["fedprox"] * 2
    by_setting = results.to_pandas("setting")
    told = list(csv.DictReader(io.StringIO(fedsweep.compare(folder, by="setting", form="csv"))))
    assert [row["setting"] for row in told] == by_setting["setting"].tolist()
    assert [float(row["test_accuracy_mean"]) for row in told] == by_setting["test_accuracy_mean"].tolist()
    by_round = results.to_pandas("round")
    assert len(by_round) == 8
    sent = [sum(result.rounds.column("bytes_up").to_pylist()) for result in results]
    assert by_round.groupby("setting")["bytes_up"].sum().tolist() == [sum(sent[:2]), sum(sent[2:])]


def test_rounds_of_several_runs_are_a_frame_of_numbers(folder: Path, tmp_path: Path) -> None:
    """A round whose loss is no number has no accuracy, here as in every table; a figure of some runs is one."""
    for name, changes in (("fedavg-0", {"kl_divergence": [0.5, 0.25]}), ("fedavg-1", {"test_loss": [float("nan"), 1]})):
        shutil.copytree(folder / name, tmp_path / name)
        table = pq.read_table(tmp_path / name / "rounds.parquet")
        for column, cells in changes.items():
            place = table.column_names.index(column)
            table = table.set_column(place, table.schema.field(column), pa.array(cells, pa.float64()))
        pq.write_table(table, tmp_path / name / "rounds.parquet")
    frame: Any = fedsweep.load(tmp_path).to_pandas("round")  # type: ignore[call-overload]
    assert frame.index.tolist() == [0, 1, 2, 3] and frame["seed"].tolist() == [0, 0, 1, 1]
    assert frame["test_accuracy"].isna().tolist() == [False, False, True, False]
    assert frame["kl_divergence"].dtype == float and frame["kl_divergence"].mean() == 0.375


def test_a_varied_key_with_numbers_is_a_column_of_numbers(folder: Path, tmp_path: Path) -> None:
    methods = ({"name": "fedavgm", "momentum": 0.5}, {"name": "fedprox", "mu": 0.1}, {"name": "fedprox", "mu": 1})
    for number, method in enumerate(methods):
        (tmp_path / str(number)).mkdir()
        tree = yaml.safe_load((folder / "fedavg-0" / "config.yaml").read_text())
        training = {**tree["training"], "rounds": (4, 16, 8)[number]}
        text = yaml.safe_dump({**tree, "method": method, "training": training})
        (tmp_path / str(number) / "config.yaml").write_text(text)
    frame = fedsweep.load(tmp_path).to_pandas()  # type: ignore[call-overload]
    assert frame.sort_values("training.rounds")["training.rounds"].tolist() == [4, 8, 16]
    assert frame[frame["method.mu"] == 1]["run"].tolist() == [frame["run"][2]] and np.isnan(frame["method.mu"][0])
    assert frame["method.name"].tolist() == ["fedavgm", "fedprox", "fedprox"]


def test_runs_without_a_round_are_an_empty_frame(folder: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        shutil.copy(folder / "fedavg-0" / "config.yaml", tmp_path / name)
    found = fedsweep.load(tmp_path)
    assert isinstance(found, fedsweep.Results)
    assert found.to_pandas()["rounds"].tolist() == [0, 0]
    by_round = found.to_pandas("round")
    assert len(by_round) == 0 and by_round.columns.tolist() == ["run", "setting", "seed"]


def test_a_runs_tables_are_frames(folder: Path) -> None:
    result = one(folder)
    frame = result.to_pandas()
    assert frame.index.tolist() == [1, 2]
    assert frame.loc[2, "test_accuracy"] == result.summary["test_accuracy"]
    assert result.clients.num_rows == 6
    assert result.traffic is not None and result.client_accuracy is not None
    assert sum(result.traffic.column("bytes").to_pylist()) == (result.summary["total_bytes"])
    assert result.client_accuracy.num_rows == 12
    assert result.to_pandas("traffic")["bytes"].tolist() == result.traffic.column("bytes").to_pylist()
    with pytest.raises(InputError, match="but not 'models'"):
        result.to_pandas("models")


def test_a_model_is_tested_on_data_as_it_wants_them(folder: Path) -> None:
    result = one(folder)
    inputs, targets = result.test_data()
    with torch.no_grad():
        right = (result.model(inputs).argmax(1) == targets).sum()
    assert int(right) / len(targets) == result.summary["test_accuracy"]
    found = result.evaluate()
    assert isinstance(found, fedsweep.Evaluated)
    assert found.test_accuracy == result.summary["test_accuracy"]
    by_class: Any = result.evaluate(by="class")
    assert by_class["accuracy"].tolist() == list(found.class_accuracies)
    by_client: Any = result.evaluate(by="client")
    assert by_client["accuracy"].tolist() == found.client_accuracies.tolist()
    with pytest.raises(InputError, match="not by 'round'"):
        result.evaluate(by="round")  # type: ignore[arg-type]


def test_a_models_inputs_are_of_its_type_whatever_a_notebook_has_set(folder: Path) -> None:
    result = one(folder)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            inputs, _ = result.test_data()
    finally:
        torch.set_default_dtype(torch.float32)
    assert inputs.dtype == torch.float32 and not inputs.is_inference()


def test_curves_have_the_looks_of_every_picture(results: fedsweep.Results, tmp_path: Path) -> None:
    axes = results.plot(x="total_bytes", path=tmp_path / "curves.pdf")
    looks = setting_looks(["FedAvg", "FedProx"])
    assert [line.get_color() for line in axes.lines] == [look.colour for look in looks]
    assert [line.get_marker() for line in axes.lines] == [look.marker for look in looks]
    assert axes.get_xlabel() == "bytes sent, both ways, log scale" and axes.get_xscale() == "log"
    assert len(axes.collections) == 2  # bands over seeds
    assert b"/Type3" not in (tmp_path / "curves.pdf").read_bytes()
    again = results.plot("client_accuracy_worst10", ax=axes)
    assert again is axes and len(axes.lines) == 4
    with pytest.raises(InputError, match="no run has a column 'accuracy'"):
        results.plot("accuracy")
    with pytest.raises(InputError, match="x must be one of"):
        results.plot(x="steps")
    confusion = results[0].plot_confusion()
    assert confusion.get_ylabel() == "true class"
    matplotlib.pyplot.close("all")


def test_pages_show_what_is_there(results: fedsweep.Results) -> None:
    assert "fedavg" in results._repr_html_() and "test_accuracy_mean" in results._repr_html_()
    assert "folder" not in results[0]._repr_html_()


def test_functions_say_what_the_commands_say(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, options in (([], {}), (["--by", "setting"], {"by": "setting"})):
        assert main(["compare", str(folder), *words]) == 0
        lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert "\n".join(lines).rstrip() == fedsweep.compare(folder, **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is for means over seeds"):
        fedsweep.compare(folder, form="latex")
    with pytest.raises(InputError, match="must be one of run, setting"):
        fedsweep.compare(folder, by="seed")  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    page = fedsweep.report(folder, out=tmp_path / "page.html")
    assert "fedprox" in page.read_text()


def test_a_reproduced_table_is_a_frame(tmp_path: Path) -> None:
    request = fedsweep.TableRequest(
        table="dynamicfl/table4",
        rows="FedAvg",
        columns="K=1",
        seeds=tuple(np.arange(1)),
        overrides=("training.rounds=2",),
    )
    made = fedsweep.reproduce(request, out=tmp_path / "table", costs_only=True)
    table = fedsweep.load(tmp_path / "table")
    assert isinstance(table, fedsweep.Table)
    frame = table.to_pandas()
    assert frame.equals(made.table.to_pandas())
    assert set(frame["row"]) == {"FedAvg"} and frame["mean"].notna().all() and frame["printed"].notna().any()
    assert table.written("md") == (tmp_path / "table" / "table.md").read_text()
    assert "<table" in table._repr_html_()
    with pytest.raises(InputError, match="written as one of txt, md, tex, tabular, html"):
        table.written("pdf")


def test_importing_the_package_of_tables_leaves_a_function() -> None:
    import fedsweep.reproduce.task

    assert callable(fedsweep.reproduce)
    with pytest.raises(InputError, match="did you mean 'dynamicfl/table4'"):
        fedsweep.reproduce("dynamicfl/table44")


PLUGIN_PAGES = ("docs/adding-a-method.md", "docs/data.md", "docs/asynchronous.md", "README.md")


def test_what_pages_import_is_offered_by_the_package_or_its_components() -> None:
    root = Path(__file__).resolve().parents[1]
    allowed = {"fedsweep", "fedsweep.components", "fedsweep.testing", "fedsweep.trees"}
    found = set()
    for page in PLUGIN_PAGES:
        for block in (root / page).read_text().split("```python")[1:]:
            tree = ast.parse(block.split("\n", 1)[1].split("```")[0])
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedsweep"):
                    found |= {(page, node.module, alias.name) for alias in node.names}
    outside = {item for item in found if item[1] not in allowed}
    assert not outside, outside
    for _, module, name in found:
        assert hasattr(__import__(str(module), fromlist=[name]), name)


def test_what_a_plug_in_may_give_is_offered_by_the_package() -> None:
    for table in TABLES.values():
        module, _, name = table.gives.partition(":")
        if module.startswith("fedsweep"):
            assert getattr(fedsweep, name) is getattr(importlib.import_module(module), name)


def test_worlds_are_columns_of_frames_and_panels_of_pictures(folder: Path, tmp_path: Path) -> None:
    for alpha in (1.0, 10.0):
        partition = {"kind": "dirichlet", "dirichlet_alpha": alpha}
        config = {**CONFIG, "name": f"d{alpha}", "scenario": {"clients": 6, "partition": partition}}
        fedsweep.run(config, out=tmp_path / "runs" / f"{alpha}")
    results = fedsweep.load(tmp_path / "runs")
    assert isinstance(results, fedsweep.Results)
    frame = results.to_pandas(rows="method", columns=["dirichlet_alpha"], values=["acc", "bytes"])
    assert frame.index.tolist() == ["FedAvg"] and [*frame.columns.levels[0]] == [
        "dirichlet_alpha=1",
        "dirichlet_alpha=10",
    ]
    last = frame.loc["FedAvg", ("dirichlet_alpha=10", "test_accuracy", "mean")]
    assert last == results[1].summary["test_accuracy"]
    assert results.to_pandas("setting")["world"].tolist() == ["dirichlet_alpha=1", "dirichlet_alpha=10"]
    assert [result.config.name for result in results.only("dirichlet_alpha=10")] == ["d10.0"]
    results.plot_worlds(tmp_path / "worlds.png", x="rounds")
    assert (tmp_path / "worlds.png").read_bytes().startswith(b"\x89PNG")
    style = fedsweep.TableStyle(columns=["dirichlet_alpha"])
    assert r"\begin{tabular}{lrr}" in fedsweep.compare(tmp_path / "runs", by="setting", form="latex", style=style)
    with pytest.raises(InputError, match="unknown key 'alpha'"):
        results.to_pandas(columns="alpha")
    one = fedsweep.TableStyle(rows="method", columns="dirichlet_alpha", figures="bytes")
    several = fedsweep.TableStyle(rows=["method"], columns=["dirichlet_alpha"], figures=["bytes"])
    texts = [fedsweep.compare(tmp_path / "runs", only="seed=0", style=style) for style in (one, several)]
    assert texts[0] == texts[1]
