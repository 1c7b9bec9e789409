from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsweep
from fedsweep.catalog import resolve
from fedsweep.config.load import load_config
from fedsweep.driver.run import plan_run, run_plan
from fedsweep.engine.engine import Engine
from fedsweep.engine.forecast import forecast
from fedsweep.errors import ConfigError
from fedsweep.experiment.clients import ClientColumns, client_profiles
from fedsweep.experiment.experiment import Experiment
from fedsweep.experiment.unforeseen import why_unknown
from fedsweep.finished.growth import grow
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.reports.page import write_report
from fedsweep.runs.run_folder import RunFolder
from fedsweep.runs.tables.clients import clients_table
from fedsweep.streams import stream
from fedsweep.testing import local_engine, run_rounds
from fedsweep.world.availability import CapabilityAvailability
from fedsweep.world.drift import CosineRotation
from fedsweep.world.label_stats import label_counts
from fedsweep.world.partitions.base import check_parts
from fedsweep.world.partitions.drawn import DrawnClients
from fedsweep.world.population import Drawn, DrawnPresence, Split

MANY = 10**9
LABELS = np.repeat(np.arange(4), [10, 20, 30, 40])


def tree(**scenario: Any) -> dict[str, Any]:
    world = {"clients": MANY, "partition": {"kind": "drawn", "samples": 12, "dirichlet_alpha": 0.3}, **scenario}
    training = {"rounds": 3, "cohort_size": 4, "local_steps": 2}
    return {"name": "many", "scenario": world, "training": training, "tracking": {"uri": "none"}}


def experiment(**scenario: Any) -> Experiment:
    return plan_run(resolve(load_config(tree(**scenario)))).experiment


def test_a_client_follows_from_seed_and_id_alone_and_holds_what_was_asked_for() -> None:
    few, many = (
        DrawnClients(samples=7, dirichlet_alpha=0.5).split(LABELS, count, stream(1, "partition"), num_classes=4)
        for count in (5, MANY)
    )
    assert len(many) == MANY
    for client in range(5):
        assert (few[client] == many[client]).all() and len(few[client]) == 7
    assert (many[MANY - 1] == many[-1]).all() and 0 <= min(many[-1]) <= max(many[-1]) < len(LABELS)
    assert any((many[0] != many[client]).any() for client in range(1, 5))
    with pytest.raises(IndexError):
        many[MANY]


@pytest.mark.parametrize(("dirichlet_alpha", "spread"), [(None, 0.13), (4e4, 0.13), (0.01, 0.44)])
def test_class_shares_are_those_of_the_data_on_average_and_vary_with_the_concentration(
    dirichlet_alpha: float | None, spread: float
) -> None:
    partition = DrawnClients(samples=10, dirichlet_alpha=dirichlet_alpha)
    parts = partition.split(LABELS, 1500, stream(2, "partition"), num_classes=4)
    shares = np.stack([np.bincount(LABELS[parts[k]], minlength=4) / 10 for k in range(1500)])
    assert shares.mean(0) == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.03)
    # sqrt(p (1 - p) / 10), the mean of p = 0.1 .. 0.4, where all draw from the data's shares; sqrt(p (1 - p)) for one
    # class each.
    assert shares.std(0).mean() == pytest.approx(spread, abs=0.04)


def test_presence_is_drawn_uniformly_among_those_that_are_there() -> None:
    there = DrawnPresence(length=50, is_there=lambda client: client % 5 == 0)
    draws = [there.draw(3, stream(3, "selection", round).numpy()) for round in range(4000)]
    assert all(len(set(drawn)) == 3 and list(drawn) == sorted(drawn) for drawn in draws)
    counts = np.bincount(np.concatenate(draws), minlength=50)
    assert counts.nonzero()[0].tolist() == list(range(0, 50, 5))
    assert counts[::5] == pytest.approx(1200, abs=120)
    assert there.draw(20, stream(4, "selection").numpy()) == tuple(range(0, 50, 5))
    assert list(there) == list(range(0, 50, 5)) and 10 in there and 11 not in there and 55 not in there


def test_one_clients_presence_is_what_all_clients_presence_says() -> None:
    availability = CapabilityAvailability(num_rounds=10)
    capabilities = np.array([1.0, 0.9, 0.8] * 20)
    history = dict.fromkeys(range(0, 60, 2), (0.1, 0.4))
    there = availability.draw(
        4, capabilities=capabilities, history=history, stream_for=lambda k: stream(0, "availability", 4, k)
    )
    alone = [
        k
        for k in range(60)
        if availability.is_there(
            4,
            client=k,
            capability=capabilities[k],
            accuracies=history.get(k, ()),
            stream=stream(0, "availability", 4, k),
        )
    ]
    assert tuple(alone) == there and 0 < len(there) < 60


def test_what_is_made_travels_without_what_it_has_made() -> None:
    squares = Drawn(length=9, build=abs)
    assert squares[3] == 3 and squares[-1] == 8 and squares[2:4] == [2, 3]
    assert pickle.loads(pickle.dumps(squares))[4] == 4


def test_a_billion_clients_under_drift_and_presence_are_played_and_their_tables_have_those_who_took_part(
    tmp_path: Path,
) -> None:
    scenario = {"drift": {"kind": "cosine_rotation"}, "availability": {"kind": "capability"}}
    result = fedsweep.run(tree(**scenario), out=tmp_path / "r")
    folder = RunFolder(tmp_path / "r")
    rounds = folder.read_rounds()
    chosen = sorted({client for record in rounds for client in record.cohort})
    assert len(chosen) == 12 and max(chosen) > 10**6
    assert folder.read_clients().column("client").to_pylist() == chosen
    assert set(folder.read_clients().column("num_samples").to_pylist()) == {12}
    traffic = folder.client_table("traffic.parquet")
    assert traffic is not None and sorted(set(traffic.column("client").to_pylist())) == chosen
    assert not (tmp_path / "r" / "scenario.json").exists()
    again = fedsweep.run(tree(**scenario), out=tmp_path / "again")
    assert again.summary["model_sha256"] == result.summary["model_sha256"]


def test_a_run_that_goes_on_is_the_unbroken_one(tmp_path: Path) -> None:
    whole = fedsweep.run(tree(), out=tmp_path / "whole")
    fedsweep.run(tree(), overrides=["training.rounds=2"], out=tmp_path / "part")
    run_plan(plan_run(grow(tmp_path / "part", rounds=3)), tmp_path / "part", resume=True)
    assert RunFolder(tmp_path / "part").read_result()["model_sha256"] == whole.summary["model_sha256"]


def test_the_plan_asks_nobody_who_is_not_chosen() -> None:
    world = experiment(drift={"kind": "cosine_rotation"}).world
    assert world.is_drawn and len(world.profiles) == len(world.indices) == MANY
    profile = world.profiles[123_456_789]
    assert profile.num_samples == 12 and profile.label_counts.sum() == 12 and profile.capability == 1.0


def small(method: str, **settings: Any) -> dict[str, Any]:
    world = {"dataset": "digits", "clients": 40, "partition": {"kind": "drawn", "samples": 6, "dirichlet_alpha": 0.5}}
    training = {"rounds": 3, "cohort_size": 4, "local_steps": 1, "batch_size": 4, **settings}
    model = {"name": "mlp", "hidden_width": 4}
    return {**tree(), "scenario": world, "model": model, "method": {"name": method}, "training": training}


def test_what_is_sent_of_all_clients_is_foreseen_of_all_clients() -> None:
    plan = plan_run(resolve(load_config(small("fedmix")))).experiment
    expected = forecast(plan)
    assert expected.exact and expected.total_bytes == run_rounds(local_engine(plan)).total_bytes


def test_a_run_in_which_nobody_takes_part_has_tables_without_rows(tmp_path: Path) -> None:
    result = fedsweep.run(small("fedavg", stop={"total_bytes": 100}), out=tmp_path / "r")
    assert result.summary["stopped_by"] == "total_bytes" and not RunFolder(tmp_path / "r").read_rounds()
    assert RunFolder(tmp_path / "r").read_clients().num_rows == 0
    write_report([str(tmp_path / "r")], tmp_path / "report.html", uri=None)


def test_an_evaluation_asks_no_client(tmp_path: Path) -> None:
    result = fedsweep.run({**tree(), "model": {"name": "mlp", "hidden_width": 4}}, out=tmp_path / "r")
    again = fedsweep.evaluate(tmp_path / "r")
    assert not len(again.client_accuracies) and again.test_accuracy == result.summary["test_accuracy"]


def test_class_shares_of_samples_without_classes_are_refused() -> None:
    partition = {"kind": "drawn", "dirichlet_alpha": 0.1}
    lines = {"scenario": {"dataset": "lines", "clients": 9, "partition": partition}, "model": {"name": "transformer"}}
    with pytest.raises(ConfigError, match=r"dirichlet_alpha draws each client's shares of the classes, but the sampl"):
        plan_run(resolve(load_config({**tree(), **lines})))


@pytest.mark.parametrize(("perf", "told"), [("none", False), ("shifted", True)])
def test_whether_costs_can_be_told_asks_nobody(perf: str, told: bool) -> None:
    reason = why_unknown(experiment(availability={"kind": "capability", "perf": perf}))
    assert (reason is not None and "clients' accuracies" in reason) is told


@pytest.mark.parametrize(
    ("scenario", "named"),
    [
        ({"devices": {}}, "scenario.devices"),
        ({"budgets": {"kind": "fixed", "budget_fraction": 0.3}}, "scenario.budgets"),
        ({"drift": {"kind": "cosine_rotation", "pool": "all"}}, "scenario.drift of the pool all"),
        ({"availability": {"kind": "capability", "normalise": True}}, "scenario.availability with normalise"),
    ],
)
def test_what_asks_everybody_is_refused_by_name(scenario: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=f"kind drawn makes clients when they take part, but {named} asks all"):
        experiment(**scenario)


def test_more_clients_than_tables_can_number_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"scenario\.clients must be an integer >= 1 and <= 2e\+09, but got 5000"):
        load_config({"scenario": {"clients": 5_000_000_000}})


def test_a_partitions_empty_list_is_a_client_without_samples() -> None:
    parts: Any = [[4, 1], [], [0, 2, 3]]
    check_parts(parts, num_samples=5, num_clients=3)
    assert Split.of(parts).flat.dtype == np.int64 and Split.of(parts)[1].tolist() == []


def test_split_data_are_columns_that_read_as_clients_arrays_and_profiles() -> None:
    parts = [np.array([4, 1]), np.array([], dtype=np.int64), np.array([0, 2, 3])]
    split = Split.of(parts)
    assert [part.tolist() for part in split] == [[4, 1], [], [0, 2, 3]] and split[-1].tolist() == [0, 2, 3]
    assert split.sizes.tolist() == [2, 0, 3] and [part.tolist() for part in split[::-1]] == [[0, 2, 3], [], [4, 1]]
    labels = np.array([0, 1, 1, 2, 0])
    profiles = client_profiles(labels, 3, split, None)
    assert [(p.client, p.num_samples, p.label_counts.tolist(), p.capability) for p in profiles] == [
        (0, 2, [1, 1, 0], 1.0),
        (1, 0, [0, 0, 0], 0.9),
        (2, 3, [1, 1, 1], 0.8),
    ]
    listed = ClientColumns.of(tuple(profiles))
    assert clients_table(profiles).equals(clients_table(tuple(profiles)))
    assert np.array_equal(listed.label_counts_NC, label_counts(labels, parts, 3))
    with pytest.raises(IndexError):
        split[3]


@pytest.mark.parametrize("clients", [1000, 1200])
def test_of_more_than_a_thousand_clients_a_round_asks_as_many_as_its_cohort_takes(
    tmp_path: Path, clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    plain = CosineRotation.class_set

    def counted(self: CosineRotation, client: int, round: int, stream: Any) -> tuple[int, ...]:
        asked.append(client)
        return plain(self, client, round, stream)

    monkeypatch.setattr(CosineRotation, "class_set", counted)
    changes = {"drift": {"kind": "cosine_rotation"}, "availability": {"kind": "capability"}}
    fedsweep.run(tree(clients=clients, partition={"kind": "iid"}, **changes), out=tmp_path / "r")
    rounds, num_asked = RunFolder(tmp_path / "r").read_rounds(), len(set(asked))
    assert [len(record.cohort) for record in rounds] == [4, 4, 4]
    lists_all = clients == 1000
    assert (num_asked > 600) if lists_all else (12 <= num_asked < 100)
    assert [record.present is not None for record in rounds] == [lists_all] * 3
    assert (tmp_path / "r" / "scenario.json").exists() == lists_all
    assert len(RunFolder(tmp_path / "r").read_clients()) == clients


def test_who_is_asked_is_there_and_has_data_as_a_list_of_all_would_say(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"drift": {"kind": "cosine_rotation"}, "availability": {"kind": "capability"}}
    split = experiment(clients=1200, partition={"kind": "iid"}, **changes)
    engine = Engine(split, LocalFleet(split))
    asked = engine.planner.with_cohort(engine.start())
    monkeypatch.setattr("fedsweep.experiment.clients._MOST_LISTED", 2000)
    other = Engine(split, LocalFleet(split))
    listed = other.planner.with_cohort(other.start())
    assert isinstance(asked.available, DrawnPresence) and isinstance(listed.available, tuple)
    assert set(asked.cohort) <= set(listed.available) and len(asked.cohort) == 4
    assert tuple(asked.available) == listed.available and 0 < len(listed.available) < 1200


def test_where_clients_are_compared_all_are_listed() -> None:
    availability = {"kind": "capability", "normalise": True}
    assert not experiment(clients=1200, partition={"kind": "iid"}, availability=availability).world.asks_singly
    assert experiment(clients=1200, partition={"kind": "iid"}, availability={"kind": "capability"}).world.asks_singly
    assert not experiment(clients=1200, partition={"kind": "iid"}).world.asks_singly
