"""Drift and participation of a run as arrays, from the files that a real run leaves, and their pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_tables import write_clients
from matplotlib.figure import Figure

import fedsweep
from fedsweep.commands.partition import partition
from fedsweep.errors import DataError, OutputError
from fedsweep.figures import scenario as pictures_scenario
from fedsweep.figures.of_run import plot_run
from fedsweep.figures.scenario import (
    Part,
    class_shares,
    class_shares_of,
    draw_classes,
    draw_participation,
    participation_of,
    plot_scenario,
    shown_clients,
)
from fedsweep.results.view import RunView, load_run
from fedsweep.runs.run_folder import RunFolder
from fedsweep.world.replay import ScenarioTrace

CONFIG: dict[str, Any] = {
    "scenario": {
        "clients": 6,
        "partition": {"kind": "iid"},
        "drift": {"kind": "cosine_rotation"},
        "availability": {"kind": "capability", "base": 0.6},
    },
    "method": {"name": "fedstg", "decide_on": "test", "patience": 1000},
    "training": {"rounds": 8, "cohort_fraction": 1.0, "local_steps": 1},
    "runtime": {"backend": "local"},
    "tracking": {"uri": "none"},
}


@pytest.fixture(scope="module")
def run_folder(pictures: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "drifting"
    fedsweep.run(CONFIG, out=folder)
    return folder


def by_hand(**columns: Any) -> RunView:
    lists = {"cohort": [], "attendees": [], "present": [], "bytes_up": [], "bytes_down": [], "round": []}
    return RunView(folder=Path("nowhere"), config={}, result={}, columns={**lists, **columns})


# -- participation ---------------------------------------------------------------------------------------------------


def test_a_clients_part_in_a_round_is_told_from_presence_cohort_and_attendees() -> None:
    run = by_hand(
        round=[1, 2, 3],
        present=[[0, 1, 2], [0, 2], []],
        cohort=[[0, 1], [0, 2], []],
        attendees=[[0, 1], [], [0, 2]],
        bytes_up=[2, 0, 2],
        bytes_down=[2, 1, 0],
    )
    found = participation_of(run)
    assert found is not None
    there, trained, aggregated, delivered = Part.THERE, Part.TRAINED, Part.AGGREGATED, Part.DELIVERED
    assert found.parts_NR.tolist() == [
        [aggregated, trained, delivered],
        [aggregated, Part.ABSENT, Part.ABSENT],
        [there, trained, delivered],
    ]
    assert found.aggregated_R.tolist() == [True, False, True]
    assert found.bytes_R.tolist() == [4, 1, 2]
    assert (found.num_aggregated, found.num_saved) == (2, 1)


def test_without_availability_everybody_is_there() -> None:
    columns = {"round": [1], "present": [None], "cohort": [[1]], "attendees": [[1]], "bytes_up": [1], "bytes_down": [1]}
    found = participation_of(by_hand(**columns))
    assert found is not None and found.parts_NR.tolist() == [[Part.THERE], [Part.AGGREGATED]]


def test_a_run_without_rounds_has_no_participation() -> None:
    assert participation_of(by_hand()) is None


def test_participation_of_a_run_is_what_its_rounds_say(run_folder: Path) -> None:
    run = load_run(run_folder)
    found = participation_of(run)
    assert found is not None and found.parts_NR.shape == (6, 8)
    assert found.num_aggregated == sum(count > 0 for count in run.column("sync_points"))
    assert found.num_saved == 2
    for place, (present, cohort) in enumerate(zip(run.column("present"), run.column("cohort"), strict=True)):
        parts = found.parts_NR[:, place]
        absent = set(range(6)) - set(present)
        assert set(np.flatnonzero((parts == Part.ABSENT) | (parts == Part.DELIVERED)).tolist()) == absent
        assert set(np.flatnonzero((parts == Part.TRAINED) | (parts == Part.AGGREGATED)).tolist()) == set(cohort)
    assert found.bytes_R.sum() == run.result["total_bytes"] - run.result["registration_bytes"]


# -- classes ---------------------------------------------------------------------------------------------------------


def test_class_shares_are_those_of_the_samples_that_the_drift_leaves() -> None:
    counts = np.array([[2, 2, 4], [1, 0, 1]])
    shares = class_shares(counts, [{0: (0, 2), 1: (0, 1, 2)}, {0: (1,)}, {1: (1,)}])
    assert shares[0].tolist() == pytest.approx(np.array([[1 / 3, 0, 2 / 3], [0, 1, 0], [0.25, 0.25, 0.5]]))
    assert shares[1].tolist() == [[0.5, 0.0, 0.5], [0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]
    assert counts.tolist() == [[2, 2, 4], [1, 0, 1]]


def test_class_shares_of_a_run_follow_its_scenario_file(run_folder: Path) -> None:
    shares = class_shares_of(load_run(run_folder))
    assert shares is not None and shares.shape == (6, 8, 10)
    trace = ScenarioTrace.from_json((run_folder / "scenario.json").read_text())
    for number in range(1, 9):
        for client in range(6):
            row = shares[client, number - 1]
            assert row.sum() == pytest.approx(1.0)
            assert tuple(np.flatnonzero(row).tolist()) == trace.classes_of(client, number)


def test_runs_without_drift_have_no_class_shares(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, overwrite=False).write_config("scenario: {}\nmethod: {}\n")
    assert class_shares_of(load_run(tmp_path)) is None
    (tmp_path / "scenario.json").write_text(
        ScenarioTrace(num_clients=2, num_classes=2).with_round([0, 1], {}).to_json()
    )
    assert class_shares_of(load_run(tmp_path)) is None


def test_files_that_contradict_each_other_are_an_error(run_folder: Path, tmp_path: Path) -> None:
    RunFolder.create(tmp_path, overwrite=False).write_config("scenario: {}\nmethod: {}\n")
    write_clients(RunFolder(tmp_path), [[1, 0], [0, 1]])
    (tmp_path / "scenario.json").write_text((run_folder / "scenario.json").read_text())
    with pytest.raises(OutputError, match=r"6 clients and 10 classes, but clients.parquet has \[2, 2\]"):
        class_shares_of(load_run(tmp_path))
    (tmp_path / "scenario.json").write_text("{")
    with pytest.raises(DataError, match="JSON"):
        class_shares_of(load_run(tmp_path))


@pytest.mark.parametrize("content", [b"\xff{}", b'{"version": ' + b"1" * 5000 + b"}"], ids=["no text", "long number"])
def test_a_scenario_file_that_cannot_be_parsed_is_an_error_that_names_it(content: bytes, tmp_path: Path) -> None:
    RunFolder.create(tmp_path, overwrite=False).write_config("scenario: {}\nmethod: {}\n")
    (tmp_path / "scenario.json").write_bytes(content)
    with pytest.raises(DataError, match=r"scenario\.json"):
        class_shares_of(load_run(tmp_path))


# -- pictures --------------------------------------------------------------------------------------------------------


def test_a_run_under_drift_leaves_both_pictures_in_its_folder(run_folder: Path) -> None:
    names = {path.name for path in (run_folder / "pictures").iterdir()}
    assert names >= {"classes.png", "participation.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (run_folder / "pictures").iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_a_run_in_a_world_that_stays_as_it_is_leaves_its_curves_and_its_split_alone(tmp_path: Path) -> None:
    scenario = {**CONFIG["scenario"], "drift": None, "availability": None}
    training = {**CONFIG["training"], "rounds": 1}
    fedsweep.run({**CONFIG, "scenario": scenario, "training": training}, out=tmp_path / "run")
    assert plot_scenario(tmp_path / "run", tmp_path) == []
    names = {path.name for path in (tmp_path / "run" / "pictures").iterdir()}
    assert names == {"learning_curves.png", "accuracy_against_bytes.png", "partition.png"}


def test_pictures_show_every_cell(run_folder: Path) -> None:
    run = load_run(run_folder)
    participation, shares = participation_of(run), class_shares_of(run)
    assert participation is not None and shares is not None
    left, right = Figure().subplots(1, 2)
    draw_participation(left, participation)
    draw_classes(right, shares)
    assert np.asarray(left.images[0].get_array()).tolist() == participation.parts_NR.tolist()
    cells = np.ma.filled(right.images[0].get_array(), np.nan).reshape(6, 11, 8)
    assert np.array_equal(cells[:, :10], shares.transpose(0, 2, 1))
    assert np.isnan(cells[:, 10]).all()


@pytest.mark.filterwarnings("error:constrained_layout not applied")
@pytest.mark.parametrize("aggregated", [True, False])
def test_panels_have_room_also_where_all_rounds_are_alike(aggregated: bool, run_folder: Path, tmp_path: Path) -> None:
    participation = participation_of(load_run(run_folder))
    assert participation is not None
    alike = replace(participation, aggregated_R=np.full(8, aggregated))
    pictures_scenario._plot_participation(alike, tmp_path / "alike.png")


def test_with_many_clients_some_are_shown_evenly_spread() -> None:
    assert shown_clients(20, 10) == list(range(20))
    some = shown_clients(1000, 100)
    assert some == [0, 500, 999]
    axes = Figure().subplots()
    draw_classes(axes, np.full((200, 3, 10), 0.1), legend=False)
    assert "of 200" in axes.get_ylabel()


@pytest.mark.slow
def test_plot_run_draws_the_scenario_too(run_folder: Path, tmp_path: Path) -> None:
    names = [path.name for path in plot_run(run_folder, tmp_path)]
    assert names[-2:] == [pictures_scenario.CLASSES_PICTURE, pictures_scenario.PARTICIPATION_PICTURE]


def test_partition_draws_the_drift_before_anything_is_run(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "drift.yaml"
    config.write_text(json.dumps(CONFIG))
    drawn: list[np.ndarray] = []
    monkeypatch.setattr(pictures_scenario, "plot_classes", lambda shares, path: drawn.append(shares))
    partition(str(config), None, tmp_path / "split.png")
    assert np.array_equal(drawn[0], class_shares_of(load_run(run_folder)))
    assert str(tmp_path / "split-by-round.png") in capsys.readouterr().out
    partition(str(config), ["scenario.drift=null"], tmp_path / "split.png")
    assert len(drawn) == 1
