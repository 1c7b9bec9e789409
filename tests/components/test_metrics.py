"""Metrics of the test: the built-in ones beside scikit-learn, declarations, what a run's rows have, and errors."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedsweep
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.catalog import build_metrics, resolve
from fedsweep.components.metrics import METRICS, Metric, declarations, measured
from fedsweep.config.load import load_config
from fedsweep.errors import ComponentError, ConfigError, InvariantError
from fedsweep.results.selection import is_less_better
from fedsweep.results.view import RunView, metrics_of
from fedsweep.tasks.declaration import Declaration
from fedsweep.testing import local_engine, run_rounds, tiny_experiment

SAMPLES, CLASSES = 300, 12


@pytest.fixture
def outputs() -> tuple[Tensor, Tensor]:
    """Logits, and targets of which class 11 has none and class 10 is never predicted."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(SAMPLES, CLASSES, generator=generator)
    logits[:, 10] = -9
    return logits, torch.randint(0, CLASSES - 1, (SAMPLES,), generator=generator)


def scikit_learn() -> Any:
    """Its metrics, which take more than a second to load."""
    from sklearn import metrics

    return metrics


def the(function: Any, name: str = "mine:own", **changes: Any) -> Metric:
    return Metric.of(name, function, changes=changes)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("macro_f1", lambda z, y: scikit_learn().f1_score(y, z.argmax(1), average="macro")),
        ("balanced_accuracy", lambda z, y: scikit_learn().balanced_accuracy_score(y, z.argmax(1))),
        ("top5_accuracy", lambda z, y: scikit_learn().top_k_accuracy_score(y, z, k=5, labels=range(CLASSES))),
        ("brier_score", lambda z, y: ((z.double().softmax(1).numpy() - np.eye(CLASSES)[y]) ** 2).sum(1).mean()),
    ],
)
@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
def test_the_built_in_metrics_are_scikit_learns(name: str, reference: Any, outputs: tuple[Tensor, Tensor]) -> None:
    figures = measured([the(METRICS[name], name)], *outputs, when="now")
    assert figures == {name: pytest.approx(float(reference(*outputs)), abs=1e-12)}


def test_a_function_may_change_what_it_is_given(outputs: tuple[Tensor, Tensor]) -> None:
    def spoils(logits: Tensor, targets: Tensor) -> float:
        logits.zero_(), targets.zero_()
        return 0.0

    built_in = the(METRICS["macro_f1"], "macro_f1")
    alone, beside = (measured(ms, *outputs, when="now") for ms in ([built_in], [the(spoils), built_in]))
    assert beside == {"own": 0.0, **alone}


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), torch.tensor(0.5), np.array(2), math.inf])
def test_numbers_of_any_library_are_numbers(value: Any, outputs: tuple[Tensor, Tensor]) -> None:
    assert the(lambda logits, targets: value).figures(*outputs, when="now") == {"own": float(value)}


@pytest.mark.parametrize("value", [None, True, "0.5", torch.zeros(3), np.zeros(1), [0.5], {"a": 1.0}, 1j])
def test_anything_else_is_refused_with_metric_and_round(value: Any, outputs: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(InvariantError, match=r"^the metric 'mine:own': .* must return a number, .* in round 7$"):
        the(lambda logits, targets: value).figures(*outputs, when="in round 7")


def test_a_mapping_must_have_the_parts_that_are_declared(outputs: tuple[Tensor, Tensor]) -> None:
    parts = {"low": 0.25, "high": 1.0}
    own = the(fedsweep.metric(parts=("low", "high"), unit="share")(lambda logits, targets: parts), "mine:recall")
    assert own.figures(*outputs, when="now") == {"recall/low": 0.25, "recall/high": 1.0}
    for wrong, must in (
        ({"low": 1.0}, "the keys low, high"),
        (0.5, "the keys low, high"),
        ({**parts, "low": "x"}, "low"),
    ):
        parts = wrong  # type: ignore[assignment]
        with pytest.raises(InvariantError, match=rf"'mine:recall'.* must return .*{must}"):
            own.figures(*outputs, when="now")


class Stop(BaseException):
    """What a user's own code ends with, beside ``Exception``."""


def stopped(logits: Tensor, targets: Tensor) -> float:
    raise Stop


def test_a_failure_names_metric_line_and_round(outputs: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(
        ComponentError, match=r"'mine:own' failed in round 2 \(.*test_metrics.py, line \d+\): KeyError: 'x'\)"
    ):
        the(lambda logits, targets: {}["x"]).figures(*outputs, when="in round 2")
    with pytest.raises(ComponentError, match=r"'numpy:sum' failed in round 2 \(TypeError"):
        the(partial(np.sum, 1, 2, 3, 4, 5, 6, 7, 8), "numpy:sum").figures(*outputs, when="in round 2")
    with pytest.raises(ComponentError, match=r"'mine:own' failed in round 2 \(.*test_metrics.py, line \d+\): Stop\)"):
        the(stopped).figures(*outputs, when="in round 2")


@pytest.mark.parametrize("options", [{"mode": "up"}, {"parts": ("a/b",)}, {"parts": (1,)}])
def test_a_declaration_that_nobody_could_read_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a metric's"):
        fedsweep.metric(**options)


def test_the_configuration_wins_over_the_declaration_and_the_folder_keeps_both() -> None:
    entries = ["brier_score", {"name": "macro_f1", "mode": "min", "chance": 0.1}]
    config = resolve(load_config({"evaluation": {"metrics": entries}}))
    tree = config.tree()
    assert tree["evaluation"]["metrics"] == [
        {"name": "brier_score", "mode": "min", "unit": "", "chance": None},
        {"name": "macro_f1", "mode": "min", "unit": "share", "chance": 0.1},
    ]
    assert declarations(tree)["macro_f1"] == Declaration(mode="min", unit="share", chance=0.1)
    assert resolve(load_config(tree)).tree() == tree
    none, left_out = (resolve(load_config(given)) for given in ({"evaluation": {"metrics": []}}, {}))
    assert none.hash() == left_out.hash() != config.hash()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("macro_f2", r"evaluation.metrics: unknown metric 'macro_f2'; did you mean 'macro_f1'"),
        ("nowhere:f1", r"evaluation.metrics: metric 'nowhere:f1': the module 'nowhere' cannot be imported"),
        ("math:pi", r"must be callable"),
        (
            "os:getcwd",
            r"metric 'os:getcwd' must take the outputs and the targets of the test, but: too many positional",
        ),
        ("fedsweep.components.metrics:macro_f1", r"the column 'macro_f1' would be there twice"),
        ("somewhere:train_loss", r"the column 'train_loss' would be there twice"),
        ("somewhere:seed", r"the column 'seed' would be there twice"),
        ("somewhere:best_test_accuracy", r"the column 'best_test_accuracy' would be there twice"),
    ],
)
def test_a_name_that_leads_nowhere_or_is_taken_is_refused(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    functions = dict.fromkeys(("train_loss", "seed", "best_test_accuracy"), lambda z, y: 0.0)
    monkeypatch.setitem(__import__("sys").modules, "somewhere", SimpleNamespace(**functions))
    with pytest.raises(ConfigError, match=message):
        build_metrics(load_config({"evaluation": {"metrics": ["macro_f1", name]}}))


def test_each_tested_round_has_the_figures_and_no_other(outputs: tuple[Tensor, Tensor]) -> None:
    shapes: list[Any] = []

    def accuracy_again(logits: Tensor, targets: Tensor) -> Tensor:
        shapes.append((tuple(logits.shape), logits.device.type, tuple(targets.shape), targets.dtype))
        return (logits.argmax(1) == targets).double().mean()

    plain = replace(tiny_experiment(fedavg(), rounds=3), evaluate_every=2)
    plain = replace(plain, evaluation_batch=7)
    metrics = (the(accuracy_again, "mine:again"), the(METRICS["macro_f1"], "macro_f1"))
    records = run_rounds(local_engine(replace(plain, metrics=metrics))).records
    assert [set(record.extra) for record in records] == [set(), {"again", "macro_f1"}, {"again", "macro_f1"}]
    for record in records[1:]:
        assert record.extra["again"] == pytest.approx(record.test_accuracy, abs=1e-12)
    tests, classes = len(plain.world.test_labels), plain.world.data.num_classes
    assert shapes == [((tests, classes), "cpu", (tests,), torch.int64)] * 2
    # The same model, to the bit.
    assert [r.test_loss for r in records] == [r.test_loss for r in run_rounds(local_engine(plain)).records]


def test_a_run_that_ends_later_forgets_the_test_that_it_would_not_have_made() -> None:
    experiment = replace(tiny_experiment(fedavg(), rounds=3), evaluate_every=2)
    metrics = (the(METRICS["macro_f1"], "macro_f1"),)
    state = run_rounds(local_engine(replace(experiment, metrics=metrics)))
    longer = replace(experiment, metrics=metrics, training=replace(experiment.training, rounds=9))
    assert "macro_f1" in state.records[-1].extra
    assert "macro_f1" not in local_engine(longer).as_planned(state).records[-1].extra


def test_a_model_that_computes_nan_is_not_measured(outputs: tuple[Tensor, Tensor]) -> None:
    own = the(fedsweep.metric(parts=("a", "b"))(lambda logits, targets: pytest.fail("called")))
    figures = measured([own, the(METRICS["macro_f1"], "macro_f1")], *outputs, when="now", diverged=True)
    assert [*figures] == ["own/a", "own/b", "macro_f1"] and all(map(math.isnan, figures.values()))


def viewed(metrics: Any, **columns: list[Any]) -> RunView:
    rounds = {"round": [1, 2, 3], **columns}
    return RunView(folder=Path("run"), config={"evaluation": {"metrics": metrics}}, result={}, columns=rounds)


def test_the_best_of_a_metric_goes_by_its_direction_and_is_never_nan() -> None:
    entries = [{"name": "mine:up", "mode": "max"}, {"name": "mine:down", "mode": "min"}]
    view = viewed(entries, up=[1.0, 3.0, math.nan], down=[2.0, math.nan, 5.0])
    assert (view.over("up", "best"), view.over("down", "best")) == (3.0, 2.0)
    assert view.figure("up") is None and math.isnan(view.last("up") or 0)
    assert view.figure("extra/down") == 5.0


def test_tables_take_the_best_by_the_direction() -> None:
    view = viewed([{"name": "mine:up", "mode": "max"}, {"name": "mine:down", "mode": "min"}], up=[1.0], down=[1.0])
    figures = ("up", "down", "test_accuracy", "test_loss")
    assert [is_less_better(figure, [view]) for figure in figures] == [False, True, False, True]


def test_a_foreign_folders_metrics_are_taken_only_where_they_make_sense() -> None:
    odd = [5, {"name": 3}, {"name": "a:<b>"}, {"name": "ok", "mode": [], "unit": 7, "chance": math.nan}]
    view = viewed(odd, **{"<b>": [1.0], "ok": [1.0], "ok/part": [1.0], "ok/<i>": [1.0], "okay": [1.0]})
    assert metrics_of([view]) == {"ok": Declaration(), "ok/part": Declaration()}
    for nonsense in (None, "x", {"a": 1}):
        assert viewed(nonsense).metrics == {}
