"""Test samples that really are the clients': the model is judged for each client by them alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from ray_pool import Pool, play
from torch.nn import functional as F

import fedsweep
from fedsweep.cli import main
from fedsweep.config.load import load_config
from fedsweep.driver.run import plan_run, run_plan
from fedsweep.engine.engine import Engine
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.experiment.experiment import Experiment
from fedsweep.finished.growth import grow
from fedsweep.reports.compare import compared_runs
from fedsweep.reports.page import build_report
from fedsweep.reports.sources import find_sources
from fedsweep.reports.who_pays import share_rows
from fedsweep.results.worlds import study_of
from fedsweep.testing import local_engine, run_rounds
from fedsweep.trees import layout_of, load_vector

torch.set_num_threads(1)
LINES: dict[str, Any] = {
    "name": "lines",
    "scenario": {"dataset": "lines", "clients": 40, "partition": {"kind": "writer"}},
    "model": {"name": "transformer", "width": 16, "depth": 1, "heads": 2},
    "training": {"rounds": 2, "cohort_size": 3, "local_steps": 3, "batch_size": 8},
    "evaluation": {"per_client": True, "batch_size": 100},
    "runtime": {"backend": "local"},
    "tracking": {"uri": "none"},
}
HOSPITALS = """
import numpy as np
from fedsweep import Dataset


def data(*, root, download):
    draws = np.random.default_rng(2)

    def part(count, hospitals):
        labels, places = draws.integers(0, 3, count), draws.choice(hospitals, count)
        pictures = (80 * labels[:, None, None, None] + draws.integers(0, 60, (count, 1, 4, 4))).astype(np.uint8)
        return pictures, labels, places

    (train, labels, places), (test, test_labels, test_places) = part(120, [3, 5, 7, 900, 901]), part(90, [3, 7, 8, 900])
    return Dataset.images(
        name="hospitals", train_images=train, train_labels=labels, test_images=test, test_labels=test_labels,
        num_classes=3, scale=255.0, mean=(0.4,), std=(0.3,), writers=places, test_writers=test_places,
    )
"""


def hospitals(folder: Path, monkeypatch: pytest.MonkeyPatch, **scenario: Any) -> Experiment:
    (folder / "own_hospitals.py").write_text(HOSPITALS)
    monkeypatch.syspath_prepend(folder)
    scenario = {"dataset": "own_hospitals:data", "clients": 4, "partition": {"kind": "writer"}, **scenario}
    config = {**LINES, "scenario": scenario, "model": {"name": "mlp", "hidden_width": 8}}
    experiment = plan_run(load_config(config)).experiment
    check_experiment(experiment)
    return experiment


def outputs_of(engine: Engine, vector: torch.Tensor) -> torch.Tensor:
    """The final model's answers to the whole test set."""
    model, world = engine.experiment.new_model(), engine.experiment.world
    load_vector(model, layout_of(model), vector)
    with torch.no_grad():
        outputs: torch.Tensor = model.eval()(
            world.data.transform(torch.from_numpy(world.test_images), generator=None, train=False)
        )
    return outputs


@pytest.mark.slow
def test_a_speakers_perplexity_is_that_of_its_own_test_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = fedsweep.run(LINES, out=tmp_path / "run")
    experiment = plan_run(result.config).experiment
    engine = local_engine(experiment)
    state = run_rounds(engine)
    owners, record = experiment.world.test_owners, state.records[-1]
    assert owners is not None and np.bincount(owners).tolist() == [8] * 40
    outputs = outputs_of(engine, state.vector)
    targets = torch.from_numpy(experiment.world.test_labels)
    by_hand = [
        float(F.cross_entropy(outputs[owners == k].flatten(0, 1).double(), targets[owners == k].flatten()).exp())
        for k in range(40)
    ]
    assert record.client_scores == pytest.approx(by_hand, abs=1e-5)
    assert record.extra["client_perplexity"] == pytest.approx(np.mean(by_hand), abs=1e-5)
    assert record.extra["client_perplexity_worst10"] == pytest.approx(np.mean(sorted(by_hand)[-4:]), abs=1e-5)
    assert record.extra["client_perplexity_best10"] == pytest.approx(np.mean(sorted(by_hand)[:4]), abs=1e-5)
    rows = pq.read_table(result.folder / "client_accuracy.parquet").to_pylist()
    assert [row["perplexity"] for row in rows if row["round"] == 2] == list(record.client_scores or ())
    assert [row["samples"] for row in rows] == [8] * 80
    assert main(["evaluate", str(result.folder), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert [row["perplexity"] for row in again["clients"]] == list(record.client_scores or ())
    assert again["client_perplexity_worst10"] == record.extra["client_perplexity_worst10"]
    assert main(["evaluate", str(result.folder)]) == 0
    assert "clients, on their own tests" in capsys.readouterr().out
    assert result.evaluate(by="client")["perplexity"].tolist() == list(record.client_scores or ())
    with pytest.raises(ConfigError, match="nothing by class: samples are not classified"):
        result.evaluate(by="class")


def test_tables_and_the_page_tell_whose_figures_they_are(tmp_path: Path) -> None:
    fedsweep.run(LINES, out=tmp_path / "run")
    (row,) = share_rows(study_of(compared_runs([tmp_path])))
    assert row.of == "clients' perplexity, on their own tests" and not row.is_share
    assert row.worst is not None and row.best is not None and row.worst > row.best > 1
    report = build_report(find_sources([str(tmp_path)], uri=None))
    assert report.shares == (row,)


def test_a_client_of_several_groups_has_the_tests_of_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = local_engine(hospitals(tmp_path, monkeypatch))
    state = run_rounds(engine)
    owners = engine.experiment.test_owners(2)
    assert owners is not None and (owners == -1).any()  # hospital 8 trains nobody
    right = outputs_of(engine, state.vector).argmax(1).numpy() == engine.experiment.world.test_labels
    by_hand = [right[owners == k].mean() if (owners == k).any() else math.nan for k in range(4)]
    assert sum(map(math.isnan, by_hand)) >= 1  # two hospitals of training have no tests
    assert state.records[-1].client_scores == pytest.approx(by_hand, nan_ok=True)
    assert state.records[-1].class_accuracies is not None
    assert [len(own) for own in engine.experiment.test_shares] == [int((owners == k).sum()) for k in range(4)]


def test_where_a_group_is_divided_class_shares_stand_for_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = hospitals(tmp_path, monkeypatch, partition={"kind": "iid"})
    assert experiment.world.test_owners is None
    record = run_rounds(local_engine(experiment)).records[-1]
    assert record.client_scores is None and "client_accuracy" in record.extra
    told = hospitals(tmp_path, monkeypatch)
    alone = replace(told, world=replace(told.world, test_owners=None))
    one, other = (run_rounds(local_engine(made)) for made in (told, alone))
    assert torch.equal(one.vector, other.vector)
    assert [r.test_accuracy for r in one.records] == [r.test_accuracy for r in other.records]


def test_under_drift_own_tests_are_those_of_the_rounds_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experiment = hospitals(tmp_path, monkeypatch, drift={"kind": "cosine_rotation", "pool": "partition"})
    all_owners, classes = experiment.world.test_owners, experiment.classes(1)
    assert all_owners is not None
    owners = experiment.test_owners(1)
    for owner, kept, label in zip(all_owners, owners, experiment.world.test_labels, strict=True):
        assert kept == (owner if owner >= 0 and label in classes[owner] else -1)


def test_a_shorter_runs_last_test_by_client_leaves_no_trace(tmp_path: Path) -> None:
    config = {**LINES, "evaluation": {**LINES["evaluation"], "every": 2}}
    for name, rounds in (("short", 1), ("long", 3)):
        fedsweep.run({**config, "training": {**LINES["training"], "rounds": rounds}}, out=tmp_path / name)
    run_plan(plan_run(grow(tmp_path / "short", rounds=3)), tmp_path / "short", resume=True)
    left, right = (pq.read_table(tmp_path / name / "rounds.parquet").to_pandas() for name in ("short", "long"))
    told = ["perplexity", "token_accuracy", "client_perplexity", "client_perplexity_worst10"]
    assert left[told].equals(right[told]) and left["perplexity"].isna().tolist() == [True, False, False]
    assert left["client_scores"].isna().tolist() == [True, False, False]


@pytest.mark.ray
def test_actors_measure_each_client_as_one_process_does(pool: Pool) -> None:
    experiment = plan_run(load_config(LINES)).experiment
    found, _ = play(pool, experiment, 2)
    assert [r.client_scores for r in found.records] == [
        r.client_scores for r in run_rounds(local_engine(experiment)).records
    ]
