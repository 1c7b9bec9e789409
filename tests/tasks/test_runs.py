"""Runs on data that are no labelled pictures, as a user has them; a task of one's own is one file."""

from __future__ import annotations

import importlib
import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray_pool import Pool, play

from fedsweep import Declaration
from fedsweep.api import load_model, run
from fedsweep.catalog import built_in_card, method_names, task_metrics
from fedsweep.config.load import load_config
from fedsweep.driver.run import plan_run
from fedsweep.engine.per_client import spread
from fedsweep.errors import ConfigError, DataError, FedsweepError, InputError
from fedsweep.experiment.build_world import build_task, build_world, strata_of
from fedsweep.experiment.checks import check_experiment
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.reports.contents import build_report
from fedsweep.reports.page import write_report
from fedsweep.reports.sources import find_sources
from fedsweep.testing import local_engine, run_rounds, tiny_record
from fedsweep.tracking.terminal.run_progress import Standing
from fedsweep.trees import layout_of, model_vector
from fedsweep.world.data.record import Dataset, Samples

torch.set_num_threads(1)
SMALL: dict[str, Any] = {
    "training": {"rounds": 2, "cohort_size": 3, "local_steps": 3, "batch_size": 8},
    "runtime": {"backend": "local"},
    "tracking": {"uri": "none"},
}
WORLDS: dict[str, dict[str, Any]] = {
    "diabetes": {"model": {"name": "mlp", "hidden_width": 16}},
    "lines": {
        "model": {"name": "transformer", "width": 16, "depth": 1, "heads": 2},
        "scenario": {"partition": {"kind": "writer"}, "clients": 40},
    },
    "shapes": {"model": {"name": "fcn", "width": 4}},
    "multi_digits": {"model": {"name": "mlp", "hidden_width": 16}},
    "generative": {"model": {"name": "vae"}, "scenario": {"dataset": "digits", "task": {"kind": "generative"}}},
    "self_supervised": {
        "model": {"name": "masked_autoencoder"},
        "scenario": {"dataset": "digits", "task": {"kind": "self_supervised"}},
    },
}
FIGURES = {
    "diabetes": ("rmse", "mae", "r2"),
    "lines": ("perplexity", "token_accuracy"),
    "shapes": ("mean_iou", "pixel_accuracy"),
    "multi_digits": ("micro_f1", "label_f1", "exact_match"),
    "generative": ("reconstruction", "divergence"),
    "self_supervised": ("masked_mse", "masked_r2"),
}


def world(name: str, **more: Any) -> dict[str, Any]:
    scenario = {"clients": 6, "dataset": name, **WORLDS[name].get("scenario", {}), **more.pop("scenario", {})}
    return {**SMALL, "name": name, **WORLDS[name], "scenario": scenario, **more}


@pytest.mark.parametrize("name", WORLDS)
def test_a_task_is_run_measured_and_its_model_loaded(name: str, tmp_path: Path) -> None:
    result = run(world(name), out=tmp_path / "run")
    rows = result.to_pandas()
    assert rows["test_accuracy"].isna().all()
    for figure in FIGURES[name]:
        assert np.isfinite(rows[figure]).all(), figure
    kept = load_config(tmp_path / "run" / "config.yaml")
    assert kept == result.config and kept.hash() == result.config.hash()
    model = load_model(tmp_path / "run")
    again = plan_run(kept).experiment
    engine = local_engine(again)
    assert torch.equal(model_vector(model, layout_of(model)), run_rounds(engine).vector)


@pytest.mark.parametrize("name", WORLDS)
def test_clients_in_lanes_are_the_loop(name: str) -> None:
    alone, together = (
        run_rounds(
            local_engine(plan_run(load_config(world(name, runtime={"backend": "local", "executor": how}))).experiment)
        )
        for how in ("loop", "lanes")
    )
    torch.testing.assert_close(alone.vector, together.vector, atol=1e-5, rtol=1e-4)


@pytest.mark.ray
@pytest.mark.parametrize(
    "name",
    [name if name == "lines" else pytest.param(name, marks=pytest.mark.exhaustive) for name in [*WORLDS, "waves"]],
)
def test_actors_give_the_bits_of_one_process(
    pool: Pool, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_waves.py").write_text(UNLABELLED)
    monkeypatch.syspath_prepend(tmp_path)
    experiment = plan_run(load_config(unlabelled("generative", "vae") if name == "waves" else world(name))).experiment
    here = run_rounds(local_engine(experiment))
    for actors in (1, 2, 3):
        found, _ = play(pool, experiment, actors)
        assert torch.equal(found.vector, here.vector)
        assert [r.extra for r in found.records] == [r.extra for r in here.records]


OWN = '''
import torch
from torch import nn
import numpy as np
from fedsweep import Dataset, Samples, Task, Declaration


class Counts(Task):
    """How many of something: Poisson regression."""

    measures = {"deviance": Declaration(mode="min")}

    @property
    def outputs(self):
        return (1,)

    def loss(self, outputs, targets):
        return nn.functional.poisson_nll_loss(outputs[:, 0], targets.float())

    def tally(self, outputs, targets):
        rate, seen = outputs[:, 0].double().exp(), targets.double()
        off = 2 * (torch.xlogy(seen, seen / rate) - seen + rate)
        return {"loss": (rate - seen * rate.log()).sum(), "count": torch.tensor(len(seen)), "deviance": off.sum()}

    def scores(self, tally):
        return {"deviance": float(tally["deviance"]) / int(tally["count"])}


def data(*, root, download):
    draws = np.random.default_rng(3)

    def samples(count):
        age, kind = draws.random(count, dtype=np.float32), draws.integers(0, 3, (count, 2))
        targets = draws.poisson(np.exp(age + kind[:, 0]))
        return Samples(inputs={"age": age[:, None], "kinds": kind}, targets=targets, groups=draws.integers(0, 6, count))

    return Dataset(name="counts", train=samples(240), test=samples(60))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(3, 4), nn.Linear(9, 1)

    def forward(self, age, kinds):
        return self.last(torch.cat([age, self.words(kinds).flatten(1)], dim=1))


def model(*, input_shape, num_classes):
    assert input_shape == {"age": (1,), "kinds": (2,)} and num_classes == 1
    return TwoInputs()
'''


def test_a_task_of_ones_own_with_two_inputs_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_counts.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    scenario = {"dataset": "own_counts:data", "task": {"kind": "own_counts:Counts"}, "clients": 6}
    config = {
        **SMALL,
        "scenario": {**scenario, "partition": {"kind": "writer"}},
        "model": {"name": "own_counts:model"},
        "training": {**SMALL["training"], "rounds": 8},
    }
    result = run(config, out=tmp_path / "run")
    deviances = result.to_pandas()["deviance"]
    assert deviances.iloc[-1] < 0.7 * deviances.iloc[0]
    assert result.config.tree()["scenario"]["task"]["metrics"] == [
        {"name": "deviance", "mode": "min", "unit": "", "chance": None}
    ]
    lanes = local_engine(
        plan_run(load_config({**config, "runtime": {"backend": "local", "executor": "lanes"}})).experiment
    )
    alone, together = (run_rounds(e).vector for e in (local_engine(plan_run(load_config(config)).experiment), lanes))
    torch.testing.assert_close(alone, together, atol=1e-5, rtol=1e-4)
    assert isinstance(lanes.fleet, LocalFleet) and lanes.fleet._worker._lanes and not lanes.fleet._worker._lanes._notes
    model = load_model(tmp_path / "run")
    assert model({"age": torch.zeros(2, 1), "kinds": torch.zeros(2, 2, dtype=torch.int64)}).shape == (2, 1)
    for method in ("fedprox", "scaffold", "dynamicfl"):
        rounds = run({**config, "method": {"name": method}}).to_pandas()
        assert np.isfinite(rounds["deviance"]).all()


TWO_INPUTS = """
import numpy as np
import torch
from torch import nn

from fedsweep import Dataset, Samples, unit_group


def data(*, root, download):
    draws = np.random.default_rng(3)

    def samples(count):
        age, kinds = draws.random((count, 1), dtype=np.float32), draws.integers(0, 3, (count, 2))
        return Samples(inputs={"age": age, "kinds": kinds}, targets=kinds[:, 0])

    return Dataset(name="kinds", num_classes=3, train=samples(120), test=samples(30))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.first, self.active, self.last = nn.Embedding(3, 4), nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 3)

    def forward(self, age, kinds):
        return self.last(self.active(self.first(torch.cat([age, self.words(kinds).flatten(1)], dim=1))))

    def unit_groups(self):
        layers = {"layers": ["first"], "norms": [], "consumers": ["last"], "modules": ["active"]}
        return (unit_group(self, name="first", **layers),)


def model(*, input_shape, num_classes):
    return Net()
"""


UNUSED = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(64, 6), nn.Linear(6, 10), nn.Linear(2, 2)

    def features(self, images):
        return self.first(images.flatten(1)).relu()

    def head(self, features):
        return self.last(features)

    def forward(self, images):
        return self.head(self.features(images))


def model(*, input_shape, num_classes):
    return Net()
"""


# Each in a module of its own, with what its scenario needs.
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "own_kinds": (TWO_INPUTS, {"dataset": "own_kinds:data"}),
    "own_unused": (UNUSED, {}),
}


@pytest.mark.parametrize(
    ("method", "name"),
    [
        *itertools.product(
            (
                {"name": "feddh", "gradient": "explicit"},
                {"name": "feddh", "estimate": "gradients"},
                {"name": "dynamicfl", "group": "similarity"},
                {"name": "prunefl"},
            ),
            NETWORKS,
        ),
        ({"name": "feddh", "gradient": "proxy"}, "own_kinds"),
        ({"name": "fedad", "base_rate": "hessian", "refresh": [1]}, "own_kinds"),
        ({"name": "augfl", "teacher_steps": 2}, "own_unused"),
        ({"name": "fedas"}, "own_unused"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_methods_that_take_gradients_of_their_own_take_several_inputs_and_layers_that_nothing_reads(
    method: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, data = NETWORKS[name]
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    proxy = {"per_class": 4, "labelled": True}
    scenario = {"clients": 4, "partition": {"kind": "iid"}, "server_data": {"proxy": proxy}, **data}
    rounds = run({**SMALL, "scenario": scenario, "model": {"name": f"{name}:model"}, "method": method}).to_pandas()
    assert np.isfinite(rounds["train_loss"]).all()


IID = {"share": 1, "kind": "iid"}
SKEW = {"kind": "dirichlet", "dirichlet_alpha": 0.5}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scenario": {"dataset": "lines"}}, "partition dirichlet goes by classes, but data set 'lines' has none"),
        ({"scenario": {"dataset": "lines", "partition": {"kind": "iid"}}}, "model 'mlp' can't take inputs .* of int64"),
        ({"scenario": {"dataset": "diabetes", "transform": "dynamicfl"}}, "transform dynamicfl is for pictures"),
        ({"scenario": {"dataset": "diabetes", "image_size": 8}}, "resizes pictures, but data set 'diabetes' has none"),
        (
            {"scenario": {"dataset": "diabetes"}, "evaluation": {"metrics": ["macro_f1"]}},
            r"metrics: macro_f1 goes by classes, but the task is Regression, .* \(rmse, mae, r2\)",
        ),
        ({"scenario": {"dataset": "diabetes"}, "model": {"name": "cnn"}}, "needs pictures .* but a sample is"),
        ({"scenario": {"dataset": "diabetes"}, "model": {"name": "resnet18"}}, "'resnet18' needs pictures .* but a"),
        ({"model": {"name": "fcn"}}, r"'fcn' must give logits \[2, 10\] for two samples, but gave \[2, 10, 8, 8\]"),
        (
            {"model": {"name": "masked_autoencoder"}},
            r"must give logits \[2, 10\] for two samples, but gave \[2, 2, 64\]",
        ),
        ({"scenario": {"task": {"kind": "regression"}}}, "data set 'digits': train targets must be floats"),
        (
            {"scenario": {"dataset": "lines", "task": {"kind": "generative"}}},
            "'lines': train inputs must be pictures or",
        ),
        (
            {"scenario": {"task": {"kind": "self_supervised"}}, "model": {"name": "vae"}},
            "'vae' makes 64 values and two .* but the task asks for 64 outputs",
        ),
        ({"scenario": {"task": {"kind": "regresion"}}}, "did you mean 'regression'"),
        (
            {"scenario": {"dataset": "diabetes", "feature_skew": {"kind": "noise", "level": 0.1}}},
            "feature_skew changes pictures",
        ),
        (
            {"scenario": {"dataset": "diabetes"}, "evaluation": {"per_client": True}},
            "per_client goes by classes, which task Regression has not",
        ),
        (
            {"scenario": {"dataset": "diabetes"}, "training": {"stop": {"target_accuracy": 0.5}}},
            "target_accuracy is never reached, since task Regression classifies nothing",
        ),
        (
            {"scenario": {"dataset": "diabetes"}, "evaluation": {"targets": [0.5]}},
            "evaluation.targets are accuracies, but task Regression classifies nothing",
        ),
        (
            {"scenario": {"dataset": "lines", "partition": {"kind": "mixture", "of": [IID, {"share": 1, **SKEW}]}}},
            "partition dirichlet goes by classes, but data set 'lines' has none",
        ),
        (
            {"scenario": {"dataset": "shapes", "transform": "fedstg"}},
            "transform fedstg moves pictures' pixels, but data set 'shapes' has a target for each",
        ),
        (
            {"scenario": {"dataset": "shapes", "feature_skew": {"kind": "rotation"}}},
            "feature_skew rotation moves pictures' pixels, but data set 'shapes' has a target for each",
        ),
        (
            {"scenario": {"dataset": "shapes", "image_size": 8}, "model": {"name": "fcn"}},
            r"image_size resizes pictures to \[8, 8\], but data set 'shapes' has targets \[16, 16\], one for each",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_experiment(plan_run(load_config({**SMALL, **changes})).experiment)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in method_names() if "classes" in built_in_card(name).needs])
def test_methods_that_need_classes_are_refused_by_name(name: str) -> None:
    scenario = {
        "clients": 6,
        "dataset": "diabetes",
        "server_data": {"validation": 0.1, "proxy": {"per_class": 2}},
    }
    if "graph" in built_in_card(name).needs:
        scenario["topology"] = {"kind": "ring"}
    if "devices" in built_in_card(name).needs:
        scenario["devices"] = {"profile": "phone-lte"}
    config = {**SMALL, "scenario": scenario, "method": {"name": name}}
    title = built_in_card(name).title
    with pytest.raises(ConfigError, match=f"method {re.escape(title)} needs classes, but the task is Regression"):
        check_experiment(plan_run(load_config(config)).experiment)


def test_a_data_set_says_what_is_wrong_with_it() -> None:
    inputs = np.zeros((4, 3), np.float32)
    with pytest.raises(DataError, match=r"targets must be one per sample \(4\)"):
        Samples(inputs=inputs, targets=np.zeros(3))
    with pytest.raises(DataError, match="inputs by name must be equally many"):
        Samples(inputs={"a": inputs, "b": inputs[:2]}, targets=np.zeros(4))
    for value in (np.nan, np.inf, -np.inf, 1e39):
        values = inputs.astype(np.float64)
        values[1, 2] = value
        with pytest.raises(DataError, match="must be finite in float32"):
            Samples(inputs=values, targets=np.zeros(4))
    assert Samples(inputs=inputs.astype(np.float16), targets=np.full(4, -3e38)).inputs.dtype == np.float16
    samples = Samples(inputs=inputs, targets=np.zeros(4, np.float32))
    with pytest.raises(DataError, match="training and test inputs must have one shape and type"):
        Dataset(name="x", train=samples, test=Samples(inputs=inputs[:, :2], targets=np.zeros(4, np.float32)))


FAULTY = """
import numpy as np
import torch
from fedsweep import Dataset, Declaration, Samples, Task


class Error(Task):
    measures = {"error": Declaration(mode="min")}
    outputs = (1,)

    def loss(self, outputs, targets):
        return (outputs[:, 0] - targets).square().mean()

    def tally(self, outputs, targets):
        return {"loss": (outputs[:, 0] - targets).square().double().sum(), "count": torch.tensor(len(targets))}

    def scores(self, tally):
        return {"error": tally["loss"] / tally["count"]}


def data(*, root, download):
    draws = np.random.default_rng(3)
    samples = Samples(inputs=draws.random((40, 3)), targets=draws.random(40))
    return Dataset(name="error", train=samples, test=samples)
"""


@pytest.mark.parametrize(
    ("hook", "answer", "message"),
    [
        ("tally", lambda *_: None, r"must return a mapping with the sums loss and count, .* returned NoneType None in"),
        ("tally", lambda *_: {"loss": 1.0}, "must return a mapping with the sums loss and count"),
        ("tally", lambda *_: {"loss": 1.0, "count": 0}, "must return a count above 0 over the whole test"),
        ("has_classes", True, r"must return with has_classes also confusion \[C, C\], samples by true class and"),
        ("scores", lambda *_: None, r"must return a mapping with a number for each of its measures \(error\)"),
        ("scores", lambda *_: {"error": "low"}, "must return a mapping with a number for each"),
        ("scores", lambda *_: {"error": 1.0, "round": 2}, "must return a mapping with a number for each"),
        ("strata", lambda *_: [0] * 40, "'error': the task's strata must be integers, one per sample, of shape"),
        ("strata", lambda *_: np.full(40, 0.5), "'error': the task's strata must be integers"),
        (
            "strata",
            lambda *_: np.full(40, 10**9),
            "'error': strata must be numbered from 0 on, below 100,000, but one is",
        ),
        ("measures", {"error": "min"}, "task own_error:Error: its measures must be a Declaration for each"),
        (
            "measures",
            {"50% off": Declaration()},
            "own_error:Error: the measure '50% off' must be a word of at most",
        ),
        (
            "measures",
            {"round": Declaration()},
            "task: the column 'round' would be there twice; give the measure",
        ),
        ("outputs", (np.int64(0),), r"task Error: outputs must be a tuple of sizes"),
        ("outputs", 7, r"task Error: outputs must be a tuple of sizes, such as \(1,\), not 7"),
        (
            "tally",
            lambda _, outputs, targets: {"loss": torch.zeros(len(targets)), "count": torch.tensor(len(targets))},
            r"must return sums of one shape whatever the batch, .* loss of \(25,\) and \(15,\)",
        ),
    ],
)
def test_what_a_task_of_ones_own_should_not_have_said_is_told_in_one_line(
    hook: str, answer: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_error.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    scenario = {"dataset": "own_error:data", "task": {"kind": "own_error:Error"}, "clients": 3}
    config = {**SMALL, "scenario": {**scenario, "partition": {"kind": "iid"}}, "evaluation": {"batch_size": 25}}
    result = run(config, out=tmp_path / "run")  # figures may be tensors without a dimension
    assert result.to_pandas()["error"].iloc[-1] == pytest.approx(result.to_pandas()["test_loss"].iloc[-1])
    monkeypatch.setattr("own_error.Error.outputs", (np.int64(1),))  # as shapes of NumPy's are
    assert run(config).rounds["error"].to_pylist() == result.rounds["error"].to_pylist()
    monkeypatch.setattr(f"own_error.Error.{hook}", answer)
    with pytest.raises(FedsweepError, match=message) as caught:
        run(config)
    assert "\n" not in str(caught.value)


def test_a_task_that_changes_what_it_is_given_changes_no_later_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_changing.py").write_text(FAULTY)
    monkeypatch.syspath_prepend(tmp_path)
    scenario = {"dataset": "own_changing:data", "task": {"kind": "own_changing:Error"}, "clients": 3}
    config = {**SMALL, "scenario": {**scenario, "partition": {"kind": "iid"}}, "training": {"rounds": 3}}
    config["evaluation"] = {"metrics": ["own_changing:largest"]}
    module = importlib.import_module("own_changing")
    module.largest = lambda outputs, targets: outputs.max() + targets.max()
    before, tally = run(config).to_pandas(), module.Error.tally

    def changing(self: Any, outputs: torch.Tensor, targets: torch.Tensor) -> Any:
        sums = tally(self, outputs, targets)
        outputs.zero_(), targets.add_(1)
        return sums

    monkeypatch.setattr(module.Error, "tally", changing)
    columns = ["error", "test_loss", "largest"]
    assert run(config).to_pandas()[columns].equals(before[columns])


REBUILT = """
import numpy as np
import torch
from fedsweep import Dataset, Declaration, Samples, Task


class Rebuild(Task):
    measures = {"off": Declaration(mode="min")}
    of_inputs = True
    outputs = (3,)

    def loss(self, outputs, inputs):
        return ((outputs - inputs["x"]).square() * inputs["mask"]).mean()

    def tally(self, outputs, inputs):
        off = ((outputs - inputs["x"]).square() * inputs["mask"]).double().sum()
        return {"loss": off, "count": torch.tensor(len(outputs))}

    def scores(self, tally):
        return {"off": tally["loss"] / tally["count"]}


class Net(torch.nn.Linear):
    def forward(self, x, mask):
        return super().forward(x * mask)


def data(*, root, download):
    draws = np.random.default_rng(3)
    inputs = {"x": draws.random((40, 3), dtype=np.float32), "mask": draws.random((40, 3)).round().astype(np.float32)}
    samples = Samples(inputs=inputs, targets=np.zeros(40, np.int64), groups=np.arange(40) % 3)
    return Dataset(name="rebuilt", train=samples, test=samples)


def model(*, input_shape, num_classes):
    return Net(3, 3)
"""


def test_what_is_learned_of_samples_of_two_inputs_are_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rebuilt.py").write_text(REBUILT)
    monkeypatch.syspath_prepend(tmp_path)
    scenario = {"dataset": "own_rebuilt:data", "task": {"kind": "own_rebuilt:Rebuild"}, "clients": 3}
    config = {
        **SMALL,
        "scenario": {**scenario, "partition": {"kind": "writer"}},
        "model": {"name": "own_rebuilt:model"},
        "evaluation": {"batch_size": 17, "per_client": True},
    }
    table = run(config).to_pandas()
    assert table["off"].iloc[-1] == pytest.approx(table["test_loss"].iloc[-1]) and table["off"].iloc[-1] > 0
    assert table["client_off"].iloc[-1] == pytest.approx(table["off"].iloc[-1], rel=0.1)  # 14, 13 and 13 samples


def test_a_function_says_what_its_task_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is built, so that tables, limits and sweeps know it; the figures were in none of them."""
    (tmp_path / "own_made.py").write_text(f"{FAULTY}\n\ndef made(*, num_classes, target_shape):\n    return Error()\n")
    monkeypatch.syspath_prepend(tmp_path)
    scenario = {"dataset": "own_made:data", "task": {"kind": "own_made:made"}, "clients": 3}
    with pytest.raises(ConfigError, match=r"own_made:made: a function does not say .* name the task's class, or give"):
        run({**SMALL, "scenario": scenario})
    module = importlib.import_module("own_made")
    module.made.measures = module.Error.measures
    assert [entry["name"] for entry in task_metrics(load_config({**SMALL, "scenario": scenario}))] == ["error"]


def test_numbers_in_the_order_of_another_machine_are_numbers() -> None:
    inputs, targets = np.arange(12, dtype=">f4").reshape(4, 3), np.arange(4, dtype=">u2")
    samples = Samples(inputs=inputs, targets=targets.astype(">f8"))
    assert samples.inputs.dtype.isnative and samples.targets.dtype.isnative
    assert samples.inputs.tolist() == inputs.tolist() and samples.targets.tolist() == [0, 1, 2, 3]


def test_a_large_figure_of_clients_ends_no_run() -> None:
    huge, apart = spread("x", np.array([1e308, 1e308, -5.0])), spread("x", np.array([math.inf, -math.inf, 1.0]))
    assert math.isnan(huge["x"]) and huge["x_worst10"] == -5.0
    assert math.isnan(apart["x"]) and (apart["x_worst10"], apart["x_best10"]) == (-math.inf, math.inf)


@pytest.mark.parametrize("kind", ["bool", "uint64"])
def test_classes_are_integers_of_any_type_and_no_truths(kind: str) -> None:
    samples = Samples(inputs=np.eye(6, 2, dtype=np.float32), targets=(np.arange(6) % 2).astype(kind))
    dataset, config = Dataset(name="two", train=samples, test=samples, num_classes=2), load_config({})
    if kind == "bool":
        with pytest.raises(DataError, match=r"are bool of shape .* so they are no classes; give classes as integers"):
            build_task(config, dataset)
    else:
        assert strata_of(dataset, build_task(config, dataset)).dtype == np.int64


@pytest.mark.parametrize(
    ("kind", "tasks"), [("int64", r"multi_label\} or \{kind: next_token"), ("float32", "regression")]
)
def test_targets_of_several_values_are_told_the_tasks_that_learn_them(kind: str, tasks: str) -> None:
    samples = Samples(inputs=np.eye(6, 2, dtype=np.float32), targets=np.eye(6, 3).astype(kind))
    with pytest.raises(
        DataError, match=rf"of shape \[3\] .* name the task, e\.g\. scenario\.task: \{{kind: {tasks}\}}"
    ):
        build_task(load_config({}), Dataset(name="lists", train=samples, test=samples))


def test_strata_of_classified_samples_are_what_the_split_alone_goes_by() -> None:
    draws = np.random.default_rng(3)
    sites, labels = draws.integers(0, 2, 90), draws.integers(0, 3, 90)
    rows = draws.random((90, 4), dtype=np.float32)
    samples = Samples(inputs=rows, targets=labels, strata=sites)
    dataset = Dataset(name="sites", train=samples, test=samples, num_classes=3)
    partition = {"kind": "classes", "classes_per_client": 1}
    server_data = {"validation": 0.1, "proxy": {"per_class": 2}}
    config = load_config({"scenario": {"clients": 4, "partition": partition, "server_data": server_data}})
    world = build_world(config, dataset)
    assert all(len({*sites[own].tolist()}) == 1 for own in world.indices)
    assert world.data.num_classes == 3 and np.array_equal(world.data.stratum_of, labels)
    for profile, own in zip(world.profiles, world.indices, strict=True):
        assert profile.label_counts.tolist() == np.bincount(labels[own], minlength=3).tolist()
    assert world.proxy is not None and world.proxy[1] is not None
    assert np.bincount(world.proxy[1]).tolist() == [2, 2, 2]
    many = Samples(inputs=rows, targets=labels + 200_000)
    with pytest.raises(DataError, match="'sites': classes must be numbered from 0 on, below 100,000, but one is 200,"):
        build_world(config, Dataset(name="sites", train=many, test=many, num_classes=200_003))


UNLABELLED = """
import numpy as np
from fedsweep import Dataset, Samples


def data(*, root, download):
    draws = np.random.default_rng(4)
    waves = np.sin(draws.random((120, 1)) * 6 + np.arange(10)).astype(np.float32)
    return Dataset(name="waves", train=Samples(inputs=waves[:90]), test=Samples(inputs=waves[90:]))
"""


def unlabelled(task: str, model: str, **more: Any) -> dict[str, Any]:
    scenario = {"dataset": "own_waves:data", "clients": 3, "partition": {"kind": "iid"}, "task": {"kind": task, **more}}
    return {**SMALL, "scenario": scenario, "model": {"name": model}}


def test_data_without_targets_are_learned_by_the_tasks_that_need_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_waves.py").write_text(UNLABELLED)
    monkeypatch.syspath_prepend(tmp_path)
    training = {**SMALL["training"], "rounds": 15, "optimizer": {"name": "adam", "lr": 0.02}}
    for task, model in (("generative", "vae"), ("self_supervised", "masked_autoencoder"), ("generative", "mlp")):
        config = unlabelled(task, model, **({"latent": 0} if model == "mlp" else {}))
        figures = run({**config, "training": training}).to_pandas()[FIGURES[task][0]]
        assert figures.iloc[-1] < 0.8 * figures.iloc[0]
    scenario = {**config["scenario"], "task": None}
    with pytest.raises(DataError, match="'waves' has no targets; name a task that needs none"):
        run({**SMALL, "scenario": scenario})
    with pytest.raises(DataError, match="'waves' has no targets, which task regression learns"):
        run({**SMALL, "scenario": {**scenario, "task": {"kind": "regression"}}})
    with pytest.raises(ConfigError, match="partition classes goes by classes, but data set 'waves' has none"):
        run({**config, "scenario": {**config["scenario"], "partition": {"kind": "classes"}}})
    with pytest.raises(ConfigError, match=r"method DynaFed.* needs classes, but the task is Generative"):
        run({**config, "method": {"name": "dynafed"}})


def test_a_run_ends_where_a_figure_is_reached_whichever_way_is_better() -> None:
    training = {**SMALL["training"], "rounds": 30, "optimizer": {"name": "sgd", "lr": 0.05}}
    for metric, value in (("rmse", 0.75), ("r2", 0.2)):
        result = run(world("diabetes", training={**training, "stop": {"target": {"metric": metric, "value": value}}}))
        rows = result.to_pandas()[metric]
        reached = rows <= value if metric == "rmse" else rows >= value
        assert len(rows) < 30 and reached.tolist() == [False] * (len(rows) - 1) + [True]
        assert result.summary["stopped_by"] == "target"
        assert list(result.summary["test_figures"]) == ["rmse", "mae", "r2"]
    with pytest.raises(ConfigError, match=r"no figure 'rmsee' \(known: rmse, mae, r2\)"):
        run(world("diabetes", training={**training, "stop": {"target": {"metric": "rmsee", "value": 1.0}}}))
    assert "target" not in load_config(SMALL).tree()["training"]["stop"]


def test_a_report_ranks_settings_by_the_leading_figure_and_spreads_it_over_seeds(tmp_path: Path) -> None:
    for rate in (1e-4, 0.05):
        for seed in (0, 1, 2):
            training = {**SMALL["training"], "optimizer": {"name": "sgd", "lr": rate}}
            config = {**world("diabetes", seed=seed, training=training), "name": f"lr {rate}"}
            run(config, out=tmp_path / f"{rate} {seed}")
    report = build_report(find_sources([str(tmp_path)], uri=None))
    good, bad = report.settings
    assert report.leading == "rmse" and good.label == "0.05"
    first, second = (setting.over_seeds(report.leading) for setting in (good, bad))
    assert [(first.count, first.mean), (second.count, second.mean)] == [
        (3, good.figure("rmse")),
        (3, bad.figure("rmse")),
    ]
    assert first.mean < second.mean and math.isfinite(first.low)
    page = write_report([tmp_path], tmp_path / "page.html", script="beside").path.read_text()
    low, high = (f"{end:.4g}" for end in (first.low, first.high))
    assert f"{low} to {high}" in page and "over seeds, of rmse" in page


def test_lines_of_progress_show_the_leading_figure() -> None:
    standing = Standing("x", 9, leading=("rmse", "min"))
    rows = [standing.add(tiny_record(n, extra={"rmse": rmse})) for n, rmse in ((1, 2.0), (2, 1.0), (3, 3.0))]
    assert [row["accuracy"] for row in rows] == ["2.0000", "1.0000", "3.0000"]
    assert (standing.figure, standing.best) == ("rmse", 1.0)
