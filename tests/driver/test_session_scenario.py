"""``scenario.json``, a run's presence and drift, for other runs to replay; and what clients afford in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.catalog import bind_spec
from fedsweep.driver.session import RunSession, SessionSettings
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.runs.run_folder import RunFolder
from fedsweep.streams import stream
from fedsweep.testing import tiny_experiment
from fedsweep.world.availability import CapabilityAvailability
from fedsweep.world.budgets import FixedBudget
from fedsweep.world.drift import CosineRotation
from fedsweep.world.replay import ScenarioTrace

DRIFT = CosineRotation(num_classes=4, num_rounds=6, min_classes=2, max_classes=3)
AVAILABILITY = CapabilityAvailability(num_rounds=6, base=0.7)


def experiment(**world: Any) -> Experiment:
    return tiny_experiment(fedavg(), cohort_size=6, rounds=6, sizes=[16] * 6, **world)


def session(one: Experiment, folder: Path) -> RunSession:
    settings = SessionSettings(folder=folder, checkpoint_every=2, checkpoint_keep=1, facts={})
    return RunSession(one, lambda warn: LocalFleet(one), settings)


def finish(opened: RunSession) -> str:
    while opened.step().stopped_by is None:
        pass
    return str(opened.finish("finished")["model_sha256"])


def run(one: Experiment, folder: Path) -> str:
    folder.mkdir()
    opened = session(one, folder)
    opened.open(resume=False)
    return finish(opened)


def run_in_halves(one: Experiment, folder: Path) -> None:
    folder.mkdir()
    broken = session(one, folder)
    broken.open(resume=False)
    for _ in range(3):
        broken.step()
    again = session(one, folder)
    assert again.open(resume=True).records[-1].round == 2
    finish(again)


def test_a_run_writes_the_scenario_that_it_met(tmp_path: Path) -> None:
    run(experiment(drift=replace(DRIFT, pool="all"), availability=AVAILABILITY), tmp_path / "run")
    trace = ScenarioTrace.from_json((tmp_path / "run" / "scenario.json").read_text())
    assert (trace.num_rounds, trace.num_clients, trace.num_classes, trace.pool) == (6, 6, 4, "all")
    assert len(set(trace.present)) > 1
    assert all(2 <= len(classes) <= 3 for sets in trace.class_sets for classes in sets.values())


def test_replaying_the_file_gives_the_same_model(tmp_path: Path) -> None:
    first = run(experiment(drift=DRIFT, availability=AVAILABILITY), tmp_path / "first")
    file = str(tmp_path / "first" / "scenario.json")
    sizes = {"num_classes": 4, "num_rounds": 6, "num_clients": 6}
    drift = bind_spec("scenario.drift", {"kind": "replay", "file": file}).build(**sizes)
    availability = bind_spec("scenario.availability", {"kind": "replay", "file": file}).build(**sizes)
    assert run(experiment(drift=drift, availability=availability), tmp_path / "second") == first
    assert (tmp_path / "second" / "scenario.json").read_bytes() == Path(file).read_bytes()


def test_drift_or_availability_alone_is_recorded_with_the_other_left_open(tmp_path: Path) -> None:
    run(experiment(drift=DRIFT), tmp_path / "drift")
    run(experiment(availability=AVAILABILITY), tmp_path / "availability")
    drift = ScenarioTrace.from_json((tmp_path / "drift" / "scenario.json").read_text())
    assert drift.present == (tuple(range(6)),) * 6
    presence = ScenarioTrace.from_json((tmp_path / "availability" / "scenario.json").read_text())
    assert presence.class_sets == ({},) * 6
    assert presence.classes_of(3, 1) == (0, 1, 2, 3)


def test_a_world_that_stays_as_it_is_leaves_no_file(tmp_path: Path) -> None:
    run(experiment(), tmp_path / "run")
    assert not (tmp_path / "run" / "scenario.json").exists()


def test_a_resumed_run_writes_the_rounds_before_it_as_well(tmp_path: Path) -> None:
    one = experiment(drift=DRIFT, availability=AVAILABILITY)
    run(one, tmp_path / "whole")
    folder = tmp_path / "halves"
    run_in_halves(one, folder)
    assert (folder / "scenario.json").read_bytes() == (tmp_path / "whole" / "scenario.json").read_bytes()


def test_a_resumed_run_has_the_budgets_of_the_first_cohort_which_in_passes_of_the_data_are_those_of_its_steps(
    tmp_path: Path,
) -> None:
    budgets = FixedBudget(budget_fraction=0.5).assign(6, stream(0, "budgets"))
    sizes = [4, 8, 12, 16, 20, 24]
    one = tiny_experiment(fedavg(), cohort_size=1, rounds=6, sizes=sizes, budgets=budgets)
    run(one, tmp_path / "whole")
    run_in_halves(one, tmp_path / "halves")
    whole, halves = (RunFolder(tmp_path / name).read_clients().to_pydict() for name in ("whole", "halves"))
    assert whole == halves and len(set(whole["budget_values"])) == 2
