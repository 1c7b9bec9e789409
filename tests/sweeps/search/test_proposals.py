from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsweep.config.load import load_config
from fedsweep.sweeps.search.proposals import Outcome, Search
from fedsweep.sweeps.space import Trial, check_space, make_trial

pytest.importorskip("optuna")
RATE = "training.optimizer.lr"
TWO = {RATE: {"choice": [0.01, 0.1]}}
Measure = Callable[[Trial], Outcome]


def noisy(trial: Trial) -> Outcome:
    """The best rate is 0.1; the noise of a seed is a sixth of the difference to 0.01."""
    noise = float(np.random.default_rng([trial.seed or 0, int(1e9 * trial.values[RATE])]).normal())
    return Outcome(values=(-abs(np.log10(trial.values[RATE]) + 1) + noise / 6,))


def play(
    space: dict[str, Any],
    measure: Measure = noisy,
    *,
    count: int,
    at_once: int = 1,
    begun: list[Trial] | None = None,
    **sweep: Any,
) -> list[Trial]:
    """Run a search to its end, each trial chosen from what those up to ``at_once`` before it came to."""
    config = load_config({"sweep": {"space": space, "search": "optuna", "samples": count, **sweep}})
    search, trials = Search(config), [*(begun or [])]
    while len(trials) < count:
        visible = trials[: max(0, len(trials) + 1 - at_once)]
        values = search.next_values(trials, {trial.number: measure(trial) for trial in visible})
        if values is None:
            break
        trials.append(make_trial(config, len(trials) + 1, values))
    return trials


def test_a_search_over_two_settings_trains_each_seed_once() -> None:
    trials = play(TWO, count=8)
    assert sorted((trial.values[RATE], trial.seed) for trial in trials) == [
        (rate, seed) for rate in (0.01, 0.1) for seed in range(4)
    ]


def test_a_search_ends_where_all_is_settled_or_all_seeds_have_run() -> None:
    assert len(play(TWO, count=100)) == 8
    assert len(play(TWO, lambda trial: Outcome(values=(0.5 + 0.01 * (trial.seed or 0),)), count=100, seeds=3)) == 6
    assert len(play(TWO, count=100, seeds=1)) == 2


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_killed_search_ends_with_the_unbroken_ones_trials(at_once: int) -> None:
    space = {RATE: {"loguniform": [1e-3, 1.0]}}
    unbroken = play(space, count=24, at_once=at_once)
    for at in (1, 7, 18):
        assert play(space, count=24, at_once=at_once, begun=unbroken[:at]) == unbroken


def test_no_trial_is_there_twice_and_a_third_of_them_are_seeds_of_what_may_be_best() -> None:
    trials = play({RATE: {"loguniform": [1e-3, 1.0]}}, count=36)
    assert len({(trial.setting, trial.seed) for trial in trials}) == 36
    seeds: dict[float, int] = {}
    for trial in trials:
        seeds[trial.values[RATE]] = seeds.get(trial.values[RATE], 0) + 1
    assert 9 <= sum(count - 1 for count in seeds.values()) <= 12
    repeated = [rate for rate, count in seeds.items() if count > 2]
    assert repeated and all(0.04 < rate < 0.25 for rate in repeated)


def test_several_at_once_do_not_repeat_what_is_under_way() -> None:
    space = {RATE: {"choice": [0.01, 0.03, 0.1, 0.3]}, "training.batch_size": {"randint": [4, 6]}}
    trials = play(space, count=30, at_once=4)
    assert len({(trial.setting, trial.seed) for trial in trials}) == len(trials)
    assert len({trial.setting for trial in trials}) == 8


def test_a_setting_that_failed_gets_no_further_seed() -> None:
    def measure(trial: Trial) -> Outcome:
        return Outcome(values=None) if trial.values[RATE] == 0.1 else noisy(trial)

    trials = play(TWO, measure, count=20)
    assert [trial.seed for trial in trials if trial.values[RATE] == 0.1] == [0]
    assert [trial.seed for trial in trials if trial.values[RATE] == 0.01] == [0, 1, 2, 3, 4]


def test_two_metrics_are_searched_for_together() -> None:
    def measure(trial: Trial) -> Outcome:
        return Outcome(values=(noisy(trial).values[0], float(trial.values["training.batch_size"])))  # type: ignore[index]

    space = {RATE: {"loguniform": [1e-3, 1.0]}, "training.batch_size": {"choice": [4, 8, 16]}}
    more = {"metric": ["test_accuracy", "total_bytes"], "mode": ["max", "min"]}
    assert len({(t.setting, t.seed) for t in play(space, measure, count=20, **more)}) == 20


def test_a_search_looks_where_the_constraints_hold() -> None:
    def later_rates(*limits: float) -> list[float]:
        def measure(trial: Trial) -> Outcome:
            rate = trial.values[RATE]
            return Outcome(values=(rate,), excess=tuple(rate - limit for limit in limits))

        trials = play({RATE: {"loguniform": [1e-3, 1.0]}}, measure, count=40, seeds=1)
        return [trial.values[RATE] for trial in trials][15:]

    assert np.median(later_rates(0.02)) < 0.04 < 0.3 < np.median(later_rates())


def test_a_seed_that_fails_beside_one_that_did_not_goes_with_constraints() -> None:
    def measure(trial: Trial) -> Outcome:
        failed = trial.seed == 1
        return Outcome(values=None) if failed else Outcome(values=noisy(trial).values, excess=(-1.0,))

    trials = play({RATE: {"loguniform": [1e-3, 1.0]}}, measure, count=12)
    assert len(trials) == 12 and {trial.seed for trial in trials} == {0, 1}


def test_the_upper_end_of_a_range_is_in_no_setting() -> None:
    def measure(trial: Trial) -> Outcome:
        return Outcome(values=(trial.values[RATE],))

    trials = play({RATE: {"uniform": [0.0, 0.5]}}, measure, count=16, sampler="gp", seeds=1)
    assert 0.4999 < max(trial.values[RATE] for trial in trials) < 0.5


def test_where_a_further_seed_is_too_dear_a_cheaper_setting_is_tried() -> None:
    config = load_config({"sweep": {"space": {RATE: {"loguniform": [1e-3, 1.0]}}, "search": "optuna", "samples": 9}})
    begun = [make_trial(config, k, {RATE: 1 - 0.05 * k, "seed": 0}) for k in range(1, 7)]
    outcomes = {trial.number: noisy(trial) for trial in begun}
    search = Search(config)
    values = search.next_values(begun, outcomes, lambda values: values[RATE] < 0.5)
    assert values is not None and values[RATE] < 0.5
    assert search.next_values(begun, outcomes, lambda values: False) is None


def test_a_search_over_named_settings_alone_gives_seeds_to_those_in_doubt() -> None:
    settings = [{"name": name, "set": {RATE: rate}} for name, rate in (("slow", 0.01), ("fast", 0.1))]
    check_space(load_config({"sweep": {"settings": settings, "search": "optuna", "samples": 20}}))
    trials = play({}, count=20, settings=settings)
    assert sorted((trial.label, trial.seed) for trial in trials) == [
        (name, seed) for name in ("fast", "slow") for seed in range(4)
    ]


def journalled(folder: Path) -> list[Any]:
    """The trials of Optuna's journal."""
    import optuna

    backend = optuna.storages.journal.JournalFileBackend(str(folder / "optuna.log"))
    trials: list[Any] = optuna.load_study(study_name="fedsweep", storage=optuna.storages.JournalStorage(backend)).trials
    return trials


def test_optunas_journal_has_each_trial_once(tmp_path: Path) -> None:
    trials = play(TWO, count=4)
    outcomes = {trial.number: noisy(trial) for trial in trials} | {4: Outcome(values=None)}
    config = load_config({"sweep": {"space": TWO, "search": "optuna", "samples": 4}})
    Search(config).write_study(tmp_path, trials[:2], outcomes)
    Search(config).write_study(tmp_path, trials, outcomes)
    there = journalled(tmp_path)
    assert [trial.user_attrs["seed"] for trial in there] == [0, 0, 1, 1]
    assert [trial.state.name for trial in there] == ["COMPLETE"] * 3 + ["FAIL"]
    assert [trial.values for trial in there[:3]] == [list(outcomes[k].values or ()) for k in (1, 2, 3)]


@pytest.mark.parametrize("cut", ["the end of a line", "half of a line", "zeros", "all but a piece"])
def test_a_torn_journal_is_written_anew_with_one_warning(
    cut: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trials, path = play(TWO, count=4), tmp_path / "optuna.log"
    outcomes = {trial.number: noisy(trial) for trial in trials}
    config = load_config({"sweep": {"space": TWO, "search": "optuna", "samples": 4}})
    Search(config).write_study(tmp_path, trials[:2], outcomes)
    whole = path.read_bytes()
    torn = {"the end of a line": whole[:-1], "half of a line": whole[:-150], "zeros": whole[:-20] + bytes(20)}
    path.write_bytes(torn.get(cut, whole[:5]))
    search = Search(config)
    for count in (2, 3, 4):
        search.write_study(tmp_path, trials[:count], outcomes)
    assert [trial.user_attrs["folder"] for trial in journalled(tmp_path)] == [trial.folder for trial in trials]
    (record,) = caplog.records
    assert f"{path} can't be gone on with (" in record.message and "written anew" in record.message


def test_a_journal_that_cannot_be_written_costs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "optuna.log").mkdir()
    trials, config = play(TWO, count=2), load_config({"sweep": {"space": TWO, "search": "optuna", "samples": 4}})
    search = Search(config)
    for count in (1, 2):
        search.write_study(tmp_path, trials[:count], {trial.number: noisy(trial) for trial in trials})
    (record,) = caplog.records
    assert "the search goes on, but Optuna's dashboard lacks trials" in record.message


def test_points_come_first_and_the_search_knows_what_they_came_to() -> None:
    space = {RATE: {"loguniform": [1e-3, 1.0]}}
    trials = play(space, count=6, seeds=1, points=[{RATE: 0.5}, {RATE: 0.02}])
    assert [(trial.values[RATE], trial.seed) for trial in trials[:2]] == [(0.5, 0), (0.02, 0)]
    assert len({trial.setting for trial in trials}) == 6


@pytest.mark.parametrize("sampler", ["tpe", "gp", "random"])
def test_each_sampler_proposes_new_settings_and_goes_on_as_unbroken(sampler: str) -> None:
    space = {RATE: {"loguniform": [1e-3, 1.0]}, "training.batch_size": {"randint": [4, 40]}}
    unbroken = play(space, count=14, seeds=1, sampler=sampler)
    assert len({trial.setting for trial in unbroken}) == 14
    assert play(space, count=14, seeds=1, sampler=sampler, begun=unbroken[:12]) == unbroken


MU = "method.mu"
THREE = [
    {"name": "plain", "set": {"method": {"name": "fedavg"}}},
    {"name": "near", "set": {"method": {"name": "fedprox"}}, "space": {MU: {"loguniform": [1e-3, 1.0]}}},
    {"name": "far", "set": {"method": {"name": "fedprox"}}, "space": {MU: {"uniform": [10.0, 20.0]}}},
]


def by_setting(trial: Trial) -> Outcome:
    """The best is ``near`` with mu 0.1."""
    mu = trial.values.get(MU, 5.0)
    return Outcome(values=(-abs(float(np.log10(mu)) + 1),))


def test_a_search_goes_through_settings_each_with_a_space_of_its_own_and_stays_with_the_best() -> None:
    trials = play({RATE: {"choice": [0.01, 0.1]}}, by_setting, count=60, settings=THREE, seeds=1)
    assert [trial.label.split()[0] for trial in trials[:3]] == ["plain", "near", "far"]
    names = [trial.label.split()[0] for trial in trials]
    assert names.count("plain") <= 2 and names.count("near") > 2 * names.count("far")
    for trial, name in zip(trials, names, strict=True):
        assert (MU in trial.values) == (name != "plain") and RATE in trial.values
        assert trial.values["method"]["name"] == ("fedavg" if name == "plain" else "fedprox")


@pytest.mark.parametrize("sampler", ["tpe", "gp", "random"])
def test_a_killed_search_over_settings_ends_with_the_unbroken_ones_trials(sampler: str) -> None:
    given = {"settings": THREE, "sampler": sampler, "points": [{"setting": "near", MU: 0.5}]}
    unbroken = play({}, by_setting, count=14, at_once=2, **given)
    assert unbroken[0].values == {"method": {"name": "fedprox"}, MU: 0.5, "seed": 0}
    assert play({}, by_setting, count=14, at_once=2, begun=unbroken[:6], **given) == unbroken


def test_further_seeds_of_a_warm_start_are_those_that_it_lacks() -> None:
    config = load_config({"sweep": {"space": TWO, "search": "optuna", "samples": 9}})
    begun = [make_trial(config, k + 1, {RATE: 0.01, "seed": seed}) for k, seed in enumerate((1, 7))]
    begun.append(make_trial(config, 3, {RATE: 0.1, "seed": 0}))
    trials = play(TWO, lambda trial: Outcome(values=(0.01 * (trial.seed or 0),)), count=7, begun=begun)
    assert {trial.seed for trial in trials if trial.values[RATE] == 0.01} > {0, 1, 7}
    assert len({(trial.setting, trial.seed) for trial in trials}) == len(trials)
