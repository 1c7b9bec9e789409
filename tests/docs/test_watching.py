"""docs/watching.md: its metric of ten lines stands in rows, tables, the page and MLflow."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

import fedsweep
from fedsweep.cli import main

PAGE = "docs/watching.md"
LOCAL = ["--set", "runtime.backend=local"]


@pytest.mark.slow
def test_the_pages_metric_is_followed_everywhere(pages: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, compare, evaluate = (shlex.split(command)[1:] for command in pages.commands(PAGE))
    assert main([*run, *LOCAL]) == 0, capsys.readouterr().err
    result = fedsweep.load(folder / "runs" / "metrics")
    assert isinstance(result, fedsweep.Result)
    f1s, losses = (result.rounds[name].to_pylist() for name in ("macro_f1", "worst_loss"))
    assert len(f1s) == 3 and 0 < f1s[-1] < 1 and losses[-1] is not None
    capsys.readouterr()
    assert main(compare) == 0
    table = capsys.readouterr().out
    assert "worst_loss (nats)" in table and f"{f1s[-1]:.4g}" in table
    assert main([*evaluate, *LOCAL]) == 0
    assert f"macro_f1 {f1s[-1]:.4f}\nbrier_score 0." in capsys.readouterr().out
    assert main(["report", "runs", "--out", "page.html"]) == 0
    page = (folder / "page.html").read_text()
    assert "worst_loss (nats), chance 2.303" in page and "the smaller the better" in page
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/runs/mlflow.db")
    (tracked,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert tracked.data.metrics["macro_f1"] == f1s[-1]
