from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_synthesis import distillation

from fedsweep.algorithms.dynafed.distillation import PROFILES, dynafed
from fedsweep.catalog import bind_spec, build_method
from fedsweep.components.aggregation import BySamples, Uniform
from fedsweep.config import load_config
from fedsweep.config.presets import list_presets
from fedsweep.reproduce.definition.table_file import has_table

_FOUND = [preset for preset in list_presets() if preset.name.startswith("dynafed/")]
PRESETS = [preset.name for preset in _FOUND if not has_table(preset.path)]


def test_profiles_are_the_columns_of_the_specification() -> None:
    default, program = distillation(dynafed()), distillation(dynafed(profile="program"))
    assert (default.snapshots, default.synthesis.horizon_rounds, default.synthesis.iterations) == (21, 5, 1000)
    assert (program.snapshots, program.synthesis.horizon_rounds, program.synthesis.iterations) == (25, 3, 3000)
    for component in (default, program):
        synthesis = component.synthesis
        assert (synthesis.inner_steps, component.images_per_class, synthesis.augment) == (20, 15, True)
        assert (synthesis.image_learning_rate, synthesis.label_learning_rate) == (0.05, 0.01)
        assert (synthesis.inner_rate, synthesis.inner_rate_learning_rate) == (0.04, 1e-5)
        assert (component.finetune_epochs, component.finetune_learning_rate) == (20, 1e-4)
        assert (synthesis.target, synthesis.last_start, synthesis.synthesis_batch) == ("drawn", 50, None)
        assert component.finetune_batch == 256
    assert dynafed().weighting == Uniform()
    assert dynafed(weights="size").weighting == BySamples()


def test_the_profile_called_paper_has_what_is_printed() -> None:
    default, paper = distillation(dynafed()), distillation(dynafed(profile="paper"))
    printed = {
        "label_learning_rate": 0.05,
        "inner_rate": 1e-5,
        "inner_rate_learning_rate": 0.0,
        "target": "between",
        "augment": False,
    }
    assert paper == replace(default, synthesis=replace(default.synthesis, **printed))


@pytest.mark.parametrize("name", sorted(PROFILES["paper"]))
def test_explicit_parameter_beats_its_profile(name: str) -> None:
    values = {"augment": False, "snapshots": 30, "horizon_rounds": 7, "inner_rate": 0.5, "target": "farthest"}
    value = values.get(name, 11 if isinstance(PROFILES["paper"][name], int) else 0.125)
    for profile in PROFILES:
        component = distillation(build_method({"name": "dynafed", "profile": profile, name: value}))
        owner = component if hasattr(component, name) else component.synthesis
        assert getattr(owner, name) == value
        default = distillation(dynafed(profile=profile))
        assert replace(default, **{name: value}) == component if owner is component else True


def test_configuration_knows_its_parameters() -> None:
    spec = bind_spec("method", {"name": "dynafed", "profile": "program", "weights": "size"}).spec()
    assert spec["profile"] == "program"
    assert spec["snapshots"] is None
    for name in ("horizon_rounds", "inner_steps", "iterations", "images_per_class", "augment", "finetune_epochs"):
        assert name in spec


def test_there_is_a_preset_per_profile_and_data_set() -> None:
    names = {"authors", "cifar100", "cinic10", "digits", "fashion_mnist", "paper", "skew"}
    assert {name.removeprefix("dynafed/") for name in PRESETS} >= names


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_set_up_of_the_paper(name: str) -> None:
    config = load_config(name)
    component = distillation(build_method(config.method))
    training = config.training
    assert config.scenario.partition.kind == "dirichlet_balanced"
    assert (training.optimizer.name, training.optimizer.lr, training.optimizer_state) == ("adam", 1e-3, "persist")
    if name == "dynafed/digits":
        return
    assert (config.scenario.clients, config.scenario.transform, config.model.name) == (80, "dynafed", "convnet3")
    assert (training.rounds, training.cohort_fraction, training.batch_size, training.local_epochs) == (200, 0.4, 32, 1)
    listed = {"dynafed/cifar100": (8, 1e-4), "dynafed/cinic10": (20, 2.5e-4)}
    found = (component.finetune_epochs, component.finetune_learning_rate)
    assert found == listed.get(name, (20, 1e-4))
    assert component.snapshots == (25 if name == "dynafed/authors" else 21)
