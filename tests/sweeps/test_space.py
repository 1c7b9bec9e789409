from __future__ import annotations

from typing import Any

import pytest

from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError
from fedsweep.results.keys import short_names
from fedsweep.sweeps.prepared_trial import overlaid
from fedsweep.sweeps.space import check_combination, check_space, list_trials
from fedsweep.tracking.terminal.sweep_progress import PlainSweepProgress


def listed(space: dict[str, Any], **sweep: Any) -> list[dict[str, Any]]:
    return [dict(t.values) for t in list_trials(load_config({"sweep": {"space": space, **sweep}}))]


def test_grid_is_the_product_of_its_lists_in_their_order() -> None:
    found = listed({"method.mu": {"grid": [0.1, 1.0]}, "seed": {"grid": [0, 1]}})
    assert {(v["method.mu"], v["seed"]) for v in found} == {(0.1, 0), (0.1, 1), (1.0, 0), (1.0, 1)}
    assert len(found) == 4


def test_each_draw_goes_through_the_whole_grid() -> None:
    found = listed({"training.optimizer.lr": {"loguniform": [1e-3, 1.0]}, "seed": {"grid": [0, 1]}}, samples=3)
    rates = [v["training.optimizer.lr"] for v in found]
    assert len(found) == 6 and len(set(rates)) == 3
    assert all(1e-3 <= rate < 1.0 for rate in rates)


def test_draws_follow_from_the_seed_and_stay_in_their_range() -> None:
    space = {"training.batch_size": {"randint": [2, 5]}, "training.optimizer.lr": {"uniform": [0.1, 0.2]}}
    assert listed(space, samples=8) == listed(space, samples=8)
    assert {v["training.batch_size"] for v in listed(space, samples=40)} == {2, 3, 4}
    config = load_config({"seed": 1, "sweep": {"space": space, "samples": 8}})
    assert [dict(t.values) for t in list_trials(config)] != listed(space, samples=8)


def test_a_trial_drawn_twice_is_listed_once() -> None:
    assert len(listed({"training.batch_size": {"choice": [4, 8]}}, samples=50)) == 2


def test_a_key_comes_before_those_below_it() -> None:
    found = listed({"method.mu": {"grid": [0.5]}, "method": {"grid": [{"name": "fedprox"}]}})[0]
    assert list(found) == ["method", "method.mu"]
    config = load_config(overlaid({}, found))
    assert config.method == {"name": "fedprox", "mu": 0.5}


def test_folders_and_labels_tell_the_varied_values_and_are_stable() -> None:
    config = load_config(
        {"sweep": {"space": {"method": {"grid": [{"name": "fedprox", "mu": 0.1}]}, "seed": {"grid": [7]}}}}
    )
    [trial] = list_trials(config)
    assert trial.folder == "0001-FedProx_seed=7"
    assert trial.label == "FedProx"
    assert trial.seed == 7


def test_long_values_are_cut_and_told_apart() -> None:
    modules = [f"a_package_with_a_long_name.{'x' * 80}:{end}" for end in ("one", "two")]
    config = load_config({"sweep": {"space": {"method": {"grid": [{"name": name} for name in modules]}}}})
    folders = [trial.folder[5:] for trial in list_trials(config)]
    assert len(set(folders)) == 2 and max(map(len, folders)) <= 90


def test_short_names_take_more_of_a_key_where_ends_are_shared() -> None:
    keys = ["training.optimizer.lr", "method.lr", "seed"]
    assert short_names(keys) == {"training.optimizer.lr": "optimizer.lr", "method.lr": "method.lr", "seed": "seed"}


SEARCH = {"space": {"training.batch_size": {"choice": [4, 8]}}, "search": "optuna"}


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ({"space": {}}, "sweep.space is empty"),
        ({"space": {"seed": {"grid": [0, 1]}}, "samples": 2}, "vary the seed instead"),
        ({"space": {"seed": {"grid": [0, 0]}}}, "0 more than once"),
        ({"space": {"seed": {"grid": [0, 1]}}, "search": "optuna"}, "goes with no grid"),
    ],
)
def test_spaces_that_mean_something_else_are_refused(sweep: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_space(load_config({"sweep": sweep}))


def test_a_population_whose_draws_are_all_the_same_is_refused() -> None:
    sweep = {"space": {"training.optimizer.lr": {"choice": [0.1]}}, "samples": 6, "scheduler": "pbt"}
    with pytest.raises(ConfigError, match="needs trials that differ: raise"):
        check_combination(load_config({"sweep": sweep}))


def test_a_metric_is_listed_once_and_rungs_go_from_little_to_much() -> None:
    twice = {"metric": ["test_accuracy", "test_accuracy"], "mode": ["max", "min"]}
    with pytest.raises(ConfigError, match="metric lists test_accuracy more than once; leave it out"):
        load_config({"sweep": {"space": {"seed": {"grid": [0]}}, **twice}})
    with pytest.raises(ConfigError, match=r"rungs go from little to much, but are \[5, 2\]; write \[2, 5\]"):
        load_config({"sweep": {"space": {"training.rounds": {"rungs": [5, 2]}}}})
    load_config({"sweep": {"space": {"model": {"rungs": [{"name": "mlp"}, {"name": "cnn"}]}}}})


def test_merged_methods_are_named_by_their_parts() -> None:
    both = {"merge": [{"name": "feddh", "floor": 0.02}, {"name": "fedad", "base_rate": 0.1}]}
    config = load_config({"sweep": {"space": {"method": {"grid": [both]}}}})
    assert list_trials(config)[0].label == "FedDHAD"


def test_methods_are_called_as_in_their_papers_and_by_what_tells_them_apart() -> None:
    grid = [
        {"name": "fedavg"},
        {"name": "fedprox"},
        {"name": "fedprox", "mu": 1.0},
        {"name": "dynamicfl", "high_interval": "b", "group_size": 1},
        {"name": "dynamicfl", "high_interval": "b", "group_size": 3},
        {"merge": [{"name": "fedad"}, {"name": "feddh"}]},
        {"merge": [{"name": "moon"}, {"name": "fedad"}]},
    ]
    space = {"method": {"grid": grid}, "training.optimizer.lr": {"grid": [0.1]}}
    found = [trial.label for trial in list_trials(load_config({"sweep": {"space": space}}))]
    methods = ["FedAvg", "FedProx", "FedProx mu=1", "DynamicFL group_size=1", "DynamicFL group_size=3", "FedDHAD"]
    assert found == [f"{method} lr=0.1" for method in (*methods, "MOON+FedAD")]


def test_listed_values_that_are_alike_to_four_digits_have_labels_of_their_own() -> None:
    methods = [{"name": "fedprox", "mu": 0.1}, {"name": "fedprox", "mu": 0.100001}, {"name": "fedavg"}]
    space = {"method": {"grid": methods}, "training.optimizer.lr": {"grid": [0.05, 0.050001, 0.123456]}}
    labels = [trial.label for trial in list_trials(load_config({"sweep": {"space": space}}))]
    assert len(set(labels)) == 9
    assert labels[-3:] == ["FedAvg lr=0.05", "FedAvg lr=0.050001", "FedAvg lr=0.1235"]
    assert labels[3] == '{"mu": 0.100001, "name": "fedprox"} lr=0.05'


NAMED = [
    {"name": "no proximal term", "set": {"method": {"name": "fedavg"}}},
    {"name": "ours", "set": {"method.mu": 1.0, "method": {"name": "fedprox"}, "training.rounds": 7}},
]


def test_named_settings_go_through_the_space_and_keep_their_names() -> None:
    space = {"training.optimizer.lr": {"grid": [0.1, 0.2]}, "seed": {"grid": [0, 1]}}
    trials = list_trials(load_config({"sweep": {"settings": NAMED, "space": space}}))
    assert {(t.label, t.seed) for t in trials} == {
        (f"{name} lr={rate}", seed) for name in ("no proximal term", "ours") for rate in (0.1, 0.2) for seed in (0, 1)
    }
    assert len({t.setting for t in trials}) == 4
    assert trials[4].folder == "0005-ours_lr=0.1_seed=0"
    resolved = load_config(overlaid({}, trials[4].values))
    assert (resolved.method, resolved.training.rounds, resolved.seed) == ({"name": "fedprox", "mu": 1.0}, 7, 0)


def test_settings_alone_are_a_sweep() -> None:
    config = load_config({"sweep": {"settings": NAMED}})
    check_space(config)
    assert [t.label for t in list_trials(config)] == ["no proximal term", "ours"]


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ({"settings": [NAMED[0], NAMED[0]]}, "several are named 'no proximal term'"),
        ({"settings": [NAMED[0], {**NAMED[0], "name": "again"}]}, "several set"),
        ({"settings": [{"name": "a\nb", "set": {}}]}, "must be one line"),
        ({"settings": [{"name": "a", "set": {"training.round": 1}}]}, "did you mean 'training.rounds'"),
        ({"settings": [{"name": "a", "set": {"sweep.samples": 1}}]}, "can't vary its own section"),
        ({"settings": NAMED, "space": {"method": {"grid": [{"name": "moon"}]}}}, "would overwrite that"),
        ({"space": {"seed": {"grid": [0]}}, "points": [{"seed": 0}]}, "read by a search alone"),
        ({**SEARCH, "points": [{"seed": 0}]}, "must give each key of sweep.space"),
        ({**SEARCH, "points": [{"training.batch_size": 9}]}, "does not lie in sweep.space.training.batch_size"),
        ({**SEARCH, "space": {"seed": {"choice": [0, 1]}}}, "goes with no sweep.space.seed"),
        ({"settings": NAMED, "scheduler": "pbt"}, "scheduler=pbt chooses values itself"),
        ({"settings": NAMED, "samples": 2}, "vary the seed instead"),
    ],
)
def test_settings_that_can_not_be_meant_are_refused(sweep: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_space(load_config({"sweep": sweep}))


def test_trial_values_are_laid_over_what_was_given() -> None:
    config = load_config({"method": {"name": "x", "mu": 1}, "training": {"rounds": 3}})
    values = {"method": {"name": "y"}, "training.cohort_size": 4, "training.optimizer.lr": 0.5}
    trial = load_config(overlaid(config.given, values))
    assert trial.method == {"name": "y"}
    assert (trial.training.rounds, trial.training.cohort_size, trial.training.cohort_fraction) == (3, 4, None)
    assert trial.training.optimizer.lr == 0.5
    assert config.training.cohort_size is None
    with pytest.raises(ConfigError, match=r"training\.rounds"):
        load_config(overlaid(config.given, {"training.rounds": 0}))


def test_two_keys_with_the_same_range_are_drawn_apart() -> None:
    space = {key: {"uniform": [0.1, 0.9]} for key in ("training.cohort_fraction", "training.optimizer.momentum")}
    for values in listed(space, samples=5):
        assert values["training.cohort_fraction"] != values["training.optimizer.momentum"]


def test_a_sweep_by_a_metric_of_the_test_names_it_and_its_direction() -> None:
    evaluation = {"metrics": ["macro_f1", "brier_score"]}
    for metric, mode in (("extra/macro_f1", "max"), ("extra/brier_score", "min"), ("extra/a_methods_own", "min")):
        check_combination(load_config({"evaluation": evaluation, "sweep": {"metric": metric, "mode": mode}}))
    for metric, message in (
        ("macro_f1", "did you mean 'extra/macro_f1'"),
        ("extra/brier_score", "sweep.mode is max .* 'brier_score' less is better; set sweep.mode=min"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_combination(load_config({"evaluation": evaluation, "sweep": {"metric": metric}}))


@pytest.mark.parametrize(
    ("metric", "figures"), [("extra/recall/low", {"extra": {"recall/low": 0.25}}), ("test_loss", {"test_loss": 0.25})]
)
def test_progress_shows_the_metric_wherever_ray_tune_has_it(
    metric: str, figures: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = PlainSweepProgress(metric)
    progress.round_done("one", {"round": 1, **figures})
    progress.ended("one", "finished", None)
    assert f"one: finished, 1 rounds, {metric} 0.25" in capsys.readouterr().out


def test_a_setting_has_keys_of_its_own_beside_the_common_ones() -> None:
    settings = [
        {"name": "plain", "set": {"method": {"name": "fedavg"}}},
        {"name": "prox", "set": {"method": {"name": "fedprox"}}, "space": {"method.mu": {"grid": [0.1, 1.0]}}},
        {"name": "slow", "space": {"training.optimizer.lr": {"grid": [0.001]}}},
    ]
    space = {"training.optimizer.lr": {"grid": [0.01, 0.1]}, "seed": {"grid": [0, 1]}}
    config = load_config({"sweep": {"space": space, "settings": settings}})
    check_space(config)
    labels = [trial.label for trial in list_trials(config) if trial.seed == 0]
    assert labels == [
        "plain lr=0.01",
        "plain lr=0.1",
        "prox mu=0.1 lr=0.01",
        "prox mu=0.1 lr=0.1",
        "prox mu=1 lr=0.01",
        "prox mu=1 lr=0.1",
        "slow lr=0.001",
    ]


RATE = "training.optimizer.lr"


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [
        ({"space": {RATE: {"grid": [0.05, 0.1]}}}, {"space": {RATE: {"choice": [0.1, 0.2]}}}, "lr=0.1"),
        ({"space": {RATE: {"grid": [0.05, 0.1]}}}, {"set": {RATE: 0.1}}, "lr=0.1"),
        ({"space": {RATE: {"uniform": [0.1, 0.5]}}}, {"set": {RATE: 0.2}}, "lr=0.2"),
        ({"space": {RATE: {"choice": [0.01, 0.2]}}}, {"space": {RATE: {"loguniform": [0.1, 0.5]}}}, "lr=0.2"),
        ({"space": {RATE: {"uniform": [0.1, 0.5]}}}, {"space": {RATE: {"loguniform": [0.3, 0.9]}}}, r"lr=0.3\.\.0.5"),
        ({"set": {RATE: 0.1}, "space": {"seed": {"grid": [0]}}}, {"set": {RATE: 0.1, "seed": 1}}, "lr=0.1"),
        ({}, {"set": {"seed": 1}}, "the same"),
        ({"space": {RATE: {"grid": [0.05, 0.1]}}}, {"space": {RATE: {"grid": [0.2]}}}, None),
        ({"space": {RATE: {"uniform": [0.1, 0.5]}}}, {"space": {RATE: {"uniform": [0.5, 0.9]}}}, None),
        ({"space": {RATE: {"uniform": [0.1, 0.5]}}}, {"set": {RATE: 0.5}}, None),
        ({"set": {RATE: 0.1}}, {"set": {RATE: 0.1, "training.rounds": 3}}, None),
        ({"set": {RATE: 0.1, "training.rounds": 2}}, {"set": {RATE: 0.1, "training.rounds": 3}}, None),
    ],
)
def test_settings_that_may_have_the_same_trial_are_refused(
    first: dict[str, Any], second: dict[str, Any], common: str | None
) -> None:
    for one, other in ((first, second), (second, first)):
        config = load_config({"sweep": {"settings": [{"name": "a", **one}, {"name": "b", **other}]}})
        if common is None:
            check_space(config)
            continue
        with pytest.raises(ConfigError, match=rf"'a' and 'b' both try .*{common}, but a trial belongs to one setting"):
            check_space(config)


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (
            {
                "settings": [
                    {"name": "a", "set": {"method.mu": 1.0}, "space": {"method": {"grid": [{"name": "fedprox"}]}}}
                ]
            },
            r"'a' sets method.mu, but its own space.method would overwrite",
        ),
        (
            {"search": "optuna", "settings": [{"name": "a", "space": {"method.mu": {"grid": [1.0]}}}]},
            r"goes with no grid, but sweep.settings 'a': space.method.mu is one",
        ),
        ({"search": "optuna", "settings": [{"name": "a", "set": {"seed": 1}}]}, "gives settings seeds itself"),
        (
            {
                "search": "optuna",
                "settings": [{"name": "left"}, {"name": "right", "set": {"method.mu": 1.0}}],
                "points": [{"setting": "rigth"}],
            },
            r"points\[0\] must name its setting, .*did you mean 'right'",
        ),
    ],
)
def test_settings_that_say_something_else_than_is_meant_are_refused(sweep: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_space(load_config({"sweep": sweep}))
