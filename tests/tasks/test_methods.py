"""Every method that asks for no classes trains on every task, and none of the two knows of the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedsweep.catalog import built_in_card, method_names
from fedsweep.config.load import load_config
from fedsweep.driver.run import plan_run
from fedsweep.errors import ConfigError
from fedsweep.testing import local_engine, run_rounds

torch.set_num_threads(1)
# Model, and what is special about the scenario.
TASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "regression": ({"name": "mlp", "hidden_width": 16}, {"dataset": "diabetes"}),
    "next_token": (
        {"name": "transformer", "width": 16, "depth": 1, "heads": 2},
        {"dataset": "lines", "clients": 8, "partition": {"kind": "writer"}, "subset": {"groups": 8}},
    ),
    "segmentation": ({"name": "fcn", "width": 4}, {"dataset": "shapes"}),
    "multi_label": ({"name": "mlp", "hidden_width": 16}, {"dataset": "multi_digits"}),
    "generative": ({"name": "vae"}, {"dataset": "digits", "task": {"kind": "generative"}}),
    "self_supervised": ({"name": "masked_autoencoder"}, {"dataset": "digits", "task": {"kind": "self_supervised"}}),
}
# Needs that a network has or has not, whatever is learned; the MLP has all.
OF_NETWORKS = {"units", "features"}
METHODS = [name for name in method_names() if "classes" not in built_in_card(name).needs]
# One of each kind in the suite: memories, penalties, two speeds, the server's optimiser, normalised and robust means,
# weights by strata, work that outlasts its round, features, edges, masks, units.
SHOWN = {
    ("regression", "scaffold"),
    ("next_token", "dynamicfl"),
    ("segmentation", "fedyogi"),
    ("generative", "fednova"),
    ("self_supervised", "krum"),
    ("segmentation", "feddh"),
    ("next_token", "fedbuff"),
    ("multi_label", "moon"),
    ("generative", "hierfavg"),
    ("self_supervised", "feddst"),
    ("regression", "feddrop"),
    ("next_token", "feddyn"),
}
CASES = [
    (task, method) if (task, method) in SHOWN else pytest.param(task, method, marks=pytest.mark.exhaustive)
    for task in TASKS
    for method in METHODS
]


def config_of(task: str, method: str) -> dict[str, Any]:
    model, special = TASKS[task]
    card, scenario = built_in_card(method), {"clients": 6, "subset": {"train": 160, "test": 40}, **special}
    if "devices" in card.needs:
        scenario["devices"] = {"profile": "phone-lte"}
    if "tree" in card.needs:
        scenario["topology"] = {"kind": "tree", "edges": 2}
    if "validation" in card.needs:
        scenario["server_data"] = {"validation": 0.1}
    return {
        "method": {"name": method, **card.small},
        "model": model,
        "scenario": scenario,
        "training": {"rounds": 2, "cohort_size": 3, "local_steps": 2, "batch_size": 8},
        "runtime": {"backend": "local"},
        "tracking": {"uri": "none"},
    }


@pytest.mark.parametrize(("task", "method"), CASES)
def test_a_method_trains_on_a_task(task: str, method: str) -> None:
    lacking = OF_NETWORKS & {*built_in_card(method).needs} if TASKS[task][0]["name"] != "mlp" else set()
    if lacking:
        with pytest.raises(ConfigError, match="no unit groups" if "units" in lacking else "no features and head"):
            plan_run(load_config(config_of(task, method)))
        return
    experiment = plan_run(load_config(config_of(task, method))).experiment
    state = run_rounds(local_engine(experiment))
    assert torch.isfinite(state.vector).all() and not torch.equal(state.vector, experiment.initial_vector)
    measures = experiment.world.data.learned.measures
    for record in state.records:
        assert record.train_loss is not None and record.train_loss == record.train_loss
        assert all(record.extra[name] == record.extra[name] for name in measures)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ({"name": "feddh", "gradient": "explicit"}, "method.gradient=explicit takes gradients of the cross-entropy"),
        ({"name": "feddh", "estimate": "gradients"}, "method.estimate=gradients takes gradients of the cross-entropy"),
        ({"name": "dynamicfl", "group": "similarity"}, "method.group=similarity takes gradients of the cross-entropy"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["name"],
)
def test_what_asks_for_classes_is_refused_before_anything_is_trained(method: dict[str, Any], reason: str) -> None:
    """It ended in an error of torch, or went on without what it asked for."""
    config = {**config_of("generative", "feddh"), "method": method}
    with pytest.raises(ConfigError, match=reason):
        plan_run(load_config(config))


TWO_INPUTS = """
import numpy as np
import torch
from torch import nn
from fedsweep import Dataset, Samples


def data(*, root, download):
    draws = np.random.default_rng(3)

    def samples(count):
        inputs = {"age": draws.random((count, 2), dtype=np.float32), "words": draws.integers(0, 6, (count, 4))}
        return Samples(inputs=inputs, targets=draws.integers(0, 3, count))

    return Dataset(name="two", train=samples(120), test=samples(30), num_classes=3)


class Net(nn.Module):
    has_features, feature_width = True, 10

    def __init__(self):
        super().__init__()
        self.words, self.last = nn.Embedding(6, 2), nn.Linear(10, 3)

    def features(self, age, words):
        return torch.cat([age, self.words(words).flatten(1)], dim=1)

    def head(self, features):
        return self.last(features)

    def forward(self, age, words):
        return self.last(self.features(age, words))


def net(*, input_shape, num_classes):
    return Net()
"""
OF_INPUTS = ["fedensemble", "abavg", "feddf", "fedbe", "fedgen", "fedas", "augfl", "dpsgd", "local_only", "ifca"]


def with_two_inputs(method: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (folder / "two_inputs.py").write_text(TWO_INPUTS)
    monkeypatch.syspath_prepend(str(folder))
    data = {"validation": 0.1, "proxy": {"per_class": 5, "labelled": True}}
    scenario: dict[str, Any] = {"clients": 6, "dataset": "two_inputs:data", "server_data": data}
    if "graph" in built_in_card(method).needs:
        scenario["topology"] = {"kind": "ring"}
    return {**config_of("regression", method), "model": {"name": "two_inputs:net"}, "scenario": scenario}


@pytest.mark.parametrize("method", OF_INPUTS)
def test_a_method_that_looks_at_inputs_takes_several_by_name(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = run_rounds(local_engine(plan_run(load_config(with_two_inputs(method, tmp_path, monkeypatch))).experiment))
    assert state.round == 2 and bool(torch.isfinite(state.vector).all())


def test_words_have_no_averages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = local_engine(plan_run(load_config(with_two_inputs("fedmix", tmp_path, monkeypatch))).experiment)
    with pytest.raises(ConfigError, match="fedmix averages inputs, so these must be one tensor of floats"):
        engine.start()


@pytest.mark.parametrize("method", ["dynafed", "fedktl"])
def test_what_makes_images_is_refused_where_samples_are_none(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ended in the round that made the first ones."""
    with pytest.raises(ConfigError, match=f"{method} (makes|decodes) images"):
        plan_run(load_config(with_two_inputs(method, tmp_path, monkeypatch)))
