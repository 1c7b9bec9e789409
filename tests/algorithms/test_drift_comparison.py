"""The four systems under one drift and one presence: what they meet, what merges, and equal communication."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsweep.config.load import load_config
from fedsweep.engine.engine import Engine
from fedsweep.engine.forecast import forecast
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError
from fedsweep.experiment.build import build_experiment
from fedsweep.experiment.checks import check_experiment
from fedsweep.streams import stream
from fedsweep.testing import local_engine, run_rounds
from fedsweep.world.data.record import Dataset
from fedsweep.world.replay import ScenarioTrace

FEDSTG = {"name": "fedstg", "decide_on": "test", "patience": 1000}
FEDAD = {"name": "fedad", "base_rate": 0.3, "refresh": [2]}
DYNAFED = {
    "name": "dynafed",
    "snapshots": 4,
    "horizon_rounds": 2,
    "inner_steps": 2,
    "iterations": 2,
    "images_per_class": 2,
    "augment": False,
    "finetune_epochs": 1,
    "weights": "size",
}
DYNAMICFL = {"name": "dynamicfl", "high_interval": 2, "low_interval": 4, "sync_rule": "paper"}
METHODS: dict[str, Mapping[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "fedstg": FEDSTG,
    "dynamicfl": DYNAMICFL,
    "feddhad": {"merge": [{"name": "feddh"}, FEDAD]},
    "dynafed": DYNAFED,
}
ROUNDS = 8


def tiny_set() -> Dataset:
    """Four classes of noisy 4 x 4 pictures."""
    draws = stream(0, "tiny pictures").numpy()
    centres = draws.normal(size=(4, 1, 4, 4))
    labels = np.arange(240) % 4
    images = (centres[labels] + draws.normal(size=(240, 1, 4, 4)) * 0.5).astype(np.float32)
    return Dataset.images(
        name="tiny",
        train_images=images[:192],
        train_labels=labels[:192],
        test_images=images[192:],
        test_labels=labels[192:],
        num_classes=4,
        scale=1.0,
        mean=(0.0,),
        std=(1.0,),
    )


def engine_of(method: Mapping[str, Any], *settings: str, **scenario: Any) -> Engine:
    """Six clients, drift, presence that does not depend on training."""
    tree = {
        "scenario": {
            "clients": 6,
            "partition": {"kind": "iid"},
            "drift": {"kind": "cosine_rotation", "min_classes": 2, "max_classes": 3},
            "availability": {"kind": "capability", "perf": "none"},
            "budgets": {"kind": "fixed", "budget_fraction": 0.5},
            **scenario,
        },
        "method": dict(method),
        "training": {"rounds": ROUNDS, "cohort_fraction": 1.0, "local_steps": 4, "batch_size": 8},
    }
    experiment = build_experiment(load_config(tree, settings), tiny_set())
    check_experiment(experiment)
    return local_engine(experiment)


def played(method: Mapping[str, Any], *settings: str, **scenario: Any) -> tuple[Engine, RunState]:
    engine = engine_of(method, *settings, **scenario)
    return engine, run_rounds(engine)


@functools.cache
def own_run(name: str) -> tuple[Engine, RunState]:
    """A method's run in the world that is the same for all; several tests look at it."""
    return played(METHODS[name])


@functools.cache
def recorded_run() -> tuple[Engine, RunState]:
    """FedStg in its own world, in which presence follows the training accuracy."""
    return played(FEDSTG, availability={"kind": "capability"})


def trace_of(engine: Engine, state: RunState) -> ScenarioTrace:
    """What the run writes into scenario.json."""
    trace = ScenarioTrace(num_clients=6, num_classes=4)
    for row in state.records:
        trace = trace.with_round(row.present or (), engine.experiment.classes(row.round))
    return trace


# -- one world for all -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_every_system_runs_under_drift_and_meets_the_same_clients_and_classes(name: str) -> None:
    first, expected = own_run("fedavg")
    engine, state = own_run(name)
    assert trace_of(engine, state) == trace_of(first, expected)
    assert len({row.present for row in state.records}) > 1
    assert len(set(trace_of(engine, state).class_sets[0].values())) > 1
    assert torch.isfinite(state.vector).all()
    assert all(row.cohort == row.present for row in state.records)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "fedstg"])
def test_a_saved_scenario_gives_the_other_systems_its_presence_and_classes(name: str, tmp_path: Path) -> None:
    recorder, recorded = recorded_run()
    trace = trace_of(recorder, recorded)
    (tmp_path / "scenario.json").write_text(trace.to_json())
    replay = {"kind": "replay", "file": str(tmp_path / "scenario.json")}
    engine, state = played(METHODS[name], "seed=7", drift=replay, availability=replay)
    assert trace_of(engine, state) == trace
    assert [row.present for row in state.records] == [row.present for row in recorded.records]
    samples, *_ = engine.planner._presence(3, engine.experiment.classes(3), state)
    for client, classes in trace.class_sets[2].items():
        assert samples[client] == engine.experiment.world.profiles[client].label_counts[list(classes)].sum()


def test_fedstg_without_its_weights_and_schedule_is_fedavg_on_the_same_file_bit_for_bit(tmp_path: Path) -> None:
    recorder, recorded = recorded_run()
    (tmp_path / "scenario.json").write_text(trace_of(recorder, recorded).to_json())
    replay = {"kind": "replay", "file": str(tmp_path / "scenario.json")}
    bare = {"name": "fedstg", "weights": "size", "reduced_interval": 1}
    _, off = played(bare, drift=replay, availability=replay)
    _, plain = played(METHODS["fedavg"], drift=replay, availability=replay)
    _, own = played({**bare, "weights": "rarity"}, drift=replay, availability=replay)
    assert torch.equal(off.vector, plain.vector)
    assert [row.bytes_up for row in off.records] == [row.bytes_up for row in plain.records]
    assert not torch.equal(own.vector, plain.vector)


# -- equal communication ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_a_byte_limit_ends_each_system_before_the_round_that_would_pass_it(name: str) -> None:
    _, whole = own_run(name)
    limit = whole.total_bytes * 2 // 3
    _, state = played(METHODS[name], f"training.stop.total_bytes={limit}")
    sent = [row.total_bytes for row in whole.records]
    assert 0 < state.round < ROUNDS
    assert state.total_bytes == sent[state.round - 1] <= limit < sent[state.round]


def test_for_the_same_bytes_fedstg_plays_more_rounds_and_dynamicfl_fewer() -> None:
    limit = f"training.stop.total_bytes={own_run('fedavg')[1].total_bytes * 3 // 4}"
    rounds = {name: played(METHODS[name], limit)[1].round for name in ("fedavg", "fedstg", "dynamicfl")}
    assert rounds["dynamicfl"] < rounds["fedavg"] < rounds["fedstg"]


def test_skipped_aggregations_save_their_share_of_the_bytes_under_full_presence() -> None:
    """Rounds 1-4, 6 and 8 of 8 aggregate: 6/8 of the uploads, and downloads after each aggregation but the last."""
    _, skipping = played(FEDSTG, availability=None)
    _, plain = played(METHODS["fedavg"], availability=None)
    assert [row.sync_points for row in skipping.records] == [1, 1, 1, 1, 0, 1, 0, 1]
    assert sum(r.bytes_up for r in skipping.records) * 8 == sum(r.bytes_up for r in plain.records) * 6
    assert sum(r.bytes_down for r in skipping.records) * 8 == sum(r.bytes_down for r in plain.records) * 6
    assert forecast(engine_of(FEDSTG, availability=None).experiment).total_bytes == skipping.total_bytes


# -- what the label counts are ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dynamicfl", "feddhad"])
def test_label_counts_are_those_registered_once_whatever_the_drift(name: str) -> None:
    """Of all that a client holds, before the drift filters it."""
    drifting, still = engine_of(METHODS[name]), engine_of(METHODS[name], drift=None)
    counts = [np.stack([p.label_counts for p in e.experiment.world.profiles]) for e in (drifting, still)]
    assert np.array_equal(*counts)
    assert drifting.registration_bytes == still.registration_bytes > 0
    if name == "feddhad":
        states = [e.start().components["weighting"]["js"] for e in (drifting, still)]
        assert torch.equal(*states)


# -- merges ----------------------------------------------------------------------------------------------------------


def test_fedstg_with_dynafed_keeps_a_snapshot_of_each_aggregation_and_fine_tunes_each_later_one() -> None:
    """Snapshots: the initial model and the aggregates of rounds 1, 2, 3; rounds 4, 6, 8 are fine-tuned."""
    merged = {"merge": [FEDSTG, DYNAFED]}
    engine = engine_of(merged, availability=None)
    state, lengths, learned = engine.start(), [], []
    while engine.finished_by(state) is None:
        before = state
        state = run_rounds(engine, state, rounds=1)
        kept = state.components["refinement0"]
        lengths.append(len(kept["snapshots"]))
        learned.append(kept["learned_in"])
        assert torch.equal(state.vector, before.vector) is (not state.records[-1].sync_points)
    assert lengths[:3] == [2, 3, 0] and learned == [None, None, 3, 3, 3, 3, 3, 3]
    assert [row.sync_points for row in state.records] == [1, 1, 1, 1, 0, 1, 0, 1]


def test_fedstg_with_fedprox_runs_under_drift_and_differs_from_either() -> None:
    merged = played({"merge": [FEDSTG, {"name": "fedprox", "mu": 0.5}]})[1]
    for alone in (FEDSTG, {"name": "fedprox", "mu": 0.5}):
        assert not torch.equal(merged.vector, played(alone)[1].vector)
    assert [r.bytes_up for r in merged.records] == [r.bytes_up for r in own_run("fedstg")[1].records]


def test_fedstgs_schedule_goes_with_feddhs_weights() -> None:
    schedule = {**FEDSTG, "weights": "size"}
    skewed = {"kind": "dirichlet", "dirichlet_alpha": 0.3, "min_samples": 5}
    merged = played({"merge": [schedule, {"name": "feddh"}]}, partition=skewed)[1]
    assert merged.components["weighting"]["v"].shape == (6,)
    assert 0 in [row.sync_points for row in merged.records]
    for row in merged.records:
        assert not row.attendees or sum(row.aggregation_weights) == pytest.approx(1.0)
    assert not torch.equal(merged.vector, played(schedule, partition=skewed)[1].vector)


def test_fedstgs_discarding_schedule_goes_with_fedads_sub_models() -> None:
    merged = played({"merge": [{**FEDSTG, "unaggregated": "discard"}, FEDAD]}, availability=None)[1]
    assert [row.sync_points for row in merged.records] == [1, 1, 1, 1, 0, 1, 0, 1]
    assert merged.records[-1].values_up < merged.records[0].values_up


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (
            [FEDSTG, {"name": "feddh"}],
            r"fedstg and feddh can't be merged: both have their own weighting \(SamplesSpeedRarity and"
            r" NonIIDDegree\); leave one of them out",
        ),
        ([FEDSTG, {**DYNAFED, "weights": "uniform"}], r"both have their own weighting .*SamplesSpeedRarity and U"),
        ([FEDSTG, DYNAMICFL], r"fedstg and dynamicfl can't be merged: both have their own pacing"),
        ([FEDSTG, FEDAD], r"over several rounds, which does not go with sub-models"),
    ],
)
def test_components_that_clash_are_named(methods: list[Mapping[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_of({"merge": methods})


# -- presets ---------------------------------------------------------------------------------------------------------


def test_the_presets_of_the_comparison_differ_in_the_method_alone() -> None:
    flat = {name: load_config(f"drift/{name}").flat() for name in METHODS}
    for name, keys in flat.items():
        others = {key: value for key, value in keys.items() if key != "name" and not key.startswith("method")}
        assert others == {k: v for k, v in flat["fedavg"].items() if k != "name" and not k.startswith("method")}, name
    assert flat["fedavg"]["training.stop.total_bytes"] > 0


def test_the_comparisons_table_has_the_presets_methods() -> None:
    from fedsweep.reproduce.cells import cells_of
    from fedsweep.reproduce.definition.table_file import read_table

    cells = cells_of(read_table("drift/table1"), "small", columns="IID pools")
    assert [cell.row.lower() for cell in cells] == list(METHODS)
    for cell in cells:
        preset, own = load_config(f"drift/{cell.row.lower()}"), cell.config
        assert own.method == preset.method, cell.row
        assert (own.scenario, own.model, own.training) == (preset.scenario, preset.model, preset.training)
