from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from fedsweep.config import Config, load_config, yaml12
from fedsweep.config.explain import all_keys
from fedsweep.config.schema import json_schema

DEFAULTS = """
name: my-experiment
seed: 0
scenario:
  dataset: digits
  root: null
  download: true
  transform: normalize
  image_size: null
  clients: 20
  partition: {kind: dirichlet, dirichlet_alpha: 0.3, min_samples: 5}
  feature_skew: null
  server_data: {validation: 0.0, proxy: null}
  drift: null
  availability: null
  budgets: null
  devices: null
model: {name: mlp}
method: {name: fedavg}
training:
  rounds: 20
  cohort_fraction: 0.5
  local_epochs: 1
  equal_steps: null
  batch_size: 10
  optimizer: {name: sgd, lr: 0.05}
  clip_norm: null
  optimizer_state: reset
  schedule: constant
  stop: {target_accuracy: null, total_bytes: null, sim_time_s: null, wall_time_s: null}
evaluation: {every: 1, batch_size: 1000, per_client: false, targets: [], metrics: []}
runtime:
  backend: auto
  executor: loop
  lanes: auto
  device: auto
  tf32: false
  client_actors: auto
  cpus_per_client: 1.0
  gpus_per_client: 0.0
  cpus_per_server: 0.0
  gpus_per_server: 0.0
  address: null
checkpoint: {every: 10, keep: 2}
tracking: {uri: null, experiment: fedsweep, also: []}
sweep:
  settings: []
  space: {}
  samples: 1
  metric: test_accuracy
  mode: max
  constraints: []
  scheduler: null
  resource: round
  search: null
  sampler: tpe
  points: []
  seeds: 5
  budget: null
  max_concurrent: auto
  together: 1
"""


def documented() -> dict[str, Any]:
    tree: dict[str, Any] = yaml12.parse(DEFAULTS, source="documentation")
    return tree


def test_defaults_are_the_documented_ones() -> None:
    expected = documented()
    expected["training"] |= {"cohort_size": None, "local_steps": None}
    expected["training"]["optimizer"] |= {"momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
    assert load_config({}).tree() == expected
    assert Config().tree() == expected


def test_documented_defaults_together_are_a_valid_configuration() -> None:
    assert load_config(documented()) == load_config({})


def test_each_key_has_a_description() -> None:
    def missing(model: type[BaseModel]) -> list[str]:
        return [f"{model.__name__}.{name}" for name, info in model.model_fields.items() if not info.description]

    schema = json_schema()
    undescribed = [
        f"{name}.{key}"
        for name, section in {**schema["$defs"], "Config": schema}.items()
        for key, below in section.get("properties", {}).items()
        if not {"description", "const", "$ref"} & below.keys()
    ]
    assert undescribed == []
    assert missing(Config) == []


def test_json_schema_is_json_and_admits_nothing_unknown() -> None:
    schema = json.loads(json.dumps(json_schema()))
    assert schema["additionalProperties"] is False
    assert schema["$defs"]["Training"]["properties"]["rounds"] == {
        "default": 20,
        "description": "Number of rounds.",
        "minimum": 1,
        "title": "Rounds",
        "type": "integer",
    }


def test_all_keys_lists_sections_and_what_is_below() -> None:
    assert {"seed", "training", "training.optimizer.lr", "scenario.server_data.proxy.per_class"} <= set(all_keys())


RICH: dict[str, Any] = {
    "name": "1e3",
    "scenario": {"partition": {"kind": "classes", "classes_per_client": 2}, "devices": {"profile": "phone-lte"}},
    "method": {"name": "x", "levels": ["a", "1"], "rate": 1e-5},
    "training": {
        "cohort_size": 3,
        "local_steps": {"range": [3, 5]},
        "schedule": {"kind": "cosine"},
        "optimizer": {"name": "adam"},
        "stop": {"total_bytes": 2e9},
    },
    "sweep": {"space": {"method.rate": {"loguniform": [1e-5, 1.0]}, "method": {"grid": [{"name": "a"}]}}},
}


@pytest.mark.parametrize("given", [{}, RICH], ids=["defaults", "rich"])
def test_yaml_of_the_resolved_configuration_gives_an_equal_one(given: dict[str, Any]) -> None:
    config = load_config(given)
    again = load_config(yaml12.parse(config.to_yaml(), source="config.yaml"))
    assert again == config
    assert again.to_yaml() == config.to_yaml()
    assert again.hash() == config.hash()


def test_flat_has_dotted_keys_and_scalars_only() -> None:
    flat = load_config(RICH).flat()
    assert flat["training.optimizer.name"] == "adam"
    assert flat["training.local_steps.range"] == "[3, 5]"
    assert flat["method.levels"] == '["a", "1"]'
    assert flat["sweep.space.method.grid.0.name"] == "a"
    assert flat["scenario.drift"] is None
    assert all(value is None or isinstance(value, str | int | float) for value in flat.values())
    assert load_config({}).flat()["sweep.space"] == "{}"


def test_flat_numbers_the_methods_that_are_merged() -> None:
    flat = load_config({"method": {"merge": [{"name": "feddh"}, {"name": "fedad", "base_rate": 0.3}]}}).flat()
    assert flat["method.merge.1.base_rate"] == 0.3


@pytest.mark.parametrize(
    "override",
    [
        "name=other",
        "runtime.backend=local",
        "runtime.client_actors=4",
        "tracking.uri=none",
        "checkpoint.every=1",
        "sweep.samples=9",
        "scenario.root=/data",
        "scenario.download=false",
    ],
)
def test_hash_ignores_what_does_not_affect_results(override: str) -> None:
    assert load_config({}, [override]).hash() == load_config({}).hash()


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "training.rounds=21",
        "method.mu=0.1",
        "scenario.partition={kind: iid}",
        "evaluation.every=2",
        "model.width=9",
    ],
)
def test_hash_sees_what_affects_results(override: str) -> None:
    assert load_config({}, [override]).hash() != load_config({}).hash()


def test_hash_does_not_depend_on_the_order_of_keys() -> None:
    one = load_config({"method": {"name": "x", "a": 1, "b": 2}})
    other = load_config({"method": {"b": 2, "a": 1, "name": "x"}})
    assert one.hash() == other.hash()
    assert len(one.hash()) == 64


def test_configuration_is_immutable_and_survives_pickle_and_copy() -> None:
    config = load_config(RICH)
    with pytest.raises(ValidationError, match="frozen"):
        config.seed = 3  # type: ignore[misc]
    for twin in (pickle.loads(pickle.dumps(config)), copy.deepcopy(config)):
        assert twin == config
        assert twin.given == config.given


def test_component_keeps_name_and_parameters_apart() -> None:
    partition = load_config({}).scenario.partition
    assert partition.kind == "dirichlet"
    assert partition.parameters == {"dirichlet_alpha": 0.3, "min_samples": 5}
