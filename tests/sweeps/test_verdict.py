from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_tables import write_clients

from fedsweep.bounded import parse_json
from fedsweep.commands.sweep import _tell
from fedsweep.config.load import load_config
from fedsweep.config.sweep import parse_constraint
from fedsweep.errors import ConfigError
from fedsweep.results.seed_statistics import estimate
from fedsweep.runs.run_folder import RunFolder
from fedsweep.sweeps.fairness import TrialWorld
from fedsweep.sweeps.front import CurveFront
from fedsweep.sweeps.prepared_trial import overlaid
from fedsweep.sweeps.space import Trial, check_combination, list_trials
from fedsweep.sweeps.summary import (
    SettingRow,
    Summary,
    TrialRow,
    _compare,
    _uncompared_notes,
    summarise,
    write_summary,
)
from fedsweep.sweeps.sweep_folder import SweepFolder
from fedsweep.sweeps.verdict import TrialCurve, front_verdict, read_trial_curve
from fedsweep.testing.worlds import tiny_record


def curve(setting: int, seed: int, *points: tuple[float, ...], num_bytes: float = 10.0) -> TrialCurve:
    return TrialCurve(setting=setting, seed=seed, points=points, num_bytes=num_bytes)


def test_the_volume_counts_every_round_and_grows_with_the_bytes_that_the_study_sends() -> None:
    # Bytes and minus accuracy: the box is [0, 10] x [-1, 0].
    trials = [curve(0, 0, (0, 0), (5, -0.5), (10, -0.6)), curve(1, 0, (5, -0.4), (10, -1.0))]
    verdict = front_verdict(trials)
    assert verdict is not None
    # After both: 0.5 of the accuracies for the dearer half of the budgets; the point at 10 bytes is on the edge.
    assert verdict.volume.mean == pytest.approx(0.25)
    assert verdict.settings == {0: 1, 1: 1}
    assert [bytes for bytes, _ in verdict.by_bytes] == pytest.approx(list(range(1, 21)))
    assert [volume.mean for _, volume in verdict.by_bytes] == pytest.approx([0.0] * 9 + [0.25] * 11)


def test_the_interval_is_over_seeds_and_settings_are_counted_by_seeds() -> None:
    trials = [curve(0, s, (0, 0), (5, -0.5 - 0.1 * s), (10, -1.0)) for s in range(3)]
    trials += [curve(1, s, (6, -0.4 - 0.18 * s)) for s in range(3)]
    verdict = front_verdict(trials)
    assert verdict is not None and verdict.volume.count == 3
    assert verdict.volume.low < verdict.volume.mean < verdict.volume.high
    assert verdict.settings == {0: 3, 1: 1}


@pytest.mark.parametrize("count", [2, 3])
def test_it_is_optunas_hypervolume(count: int) -> None:
    compute_hypervolume = pytest.importorskip("optuna._hypervolume").compute_hypervolume
    points = np.random.default_rng(count).random((60, count))
    verdict = front_verdict([curve(0, 0, *map(tuple, points.tolist()))])
    low, span = points.min(0), points.max(0) - points.min(0)
    assert verdict is not None
    assert verdict.volume.mean == pytest.approx(compute_hypervolume((points - low) / span, np.ones(count)), abs=1e-12)


def test_nothing_to_judge_is_no_verdict() -> None:
    assert front_verdict([]) is None
    assert front_verdict([curve(0, 0, (1.0, -0.5)), curve(1, 0)]) is None


def test_where_nothing_is_classified_a_round_is_tested_that_has_a_test_loss(tmp_path: Path) -> None:
    tested = {"test_accuracy": None, "test_loss": 0.5}
    records = [tiny_record(1, test_accuracy=None), tiny_record(2, extra={"rmse": 0.7}, **tested)]
    RunFolder(tmp_path).write_rounds(records)
    read = read_trial_curve(tmp_path, setting=0, seed=0, aims={"extra/rmse": "min", "round": "min"}, constraints=())
    assert read.points == ((0.7, 2.0),)


def test_constraints_are_read_with_their_units() -> None:
    limit = parse_constraint("total_bytes <= 2 MB")
    assert (limit.metric, limit.is_most, limit.limit) == ("total_bytes", True, 2e6)
    assert parse_constraint("extra/worst_10>=50%").limit == 0.5
    assert limit.holds(2e6) and not limit.holds(2e6 + 1) and not limit.holds(float("nan"))
    assert limit.excess(3e6) == 1e6


@pytest.mark.parametrize("text", ["total_bytes < 2", "total_bytes <= 2 Mib", "<= 2", "total_bytes <= two", "a <= -1"])
def test_what_is_no_constraint_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"NAME <= NUMBER or NAME >= NUMBER, e.g. total_bytes <= 2 MB"):
        load_config({"sweep": {"space": {"seed": {"grid": [0]}}, "constraints": [text]}})


def test_a_constraint_on_an_unknown_figure_is_refused() -> None:
    sweep: dict[str, Any] = {"space": {"seed": {"grid": [0]}}, "constraints": ["total_byte <= 2 MB"]}
    with pytest.raises(ConfigError, match=r"sweep.constraints: .*total_bytes"):
        check_combination(load_config({"sweep": sweep}))


@pytest.mark.parametrize(
    ("constraint", "unit"),
    [
        ("test_accuracy >= 90 MB", "MB"),
        ("total_bytes <= 50 %", "%"),
        ("sim_time_s <= 2 kB", "kB"),
        ("comm_ratio <= 2 s", "s"),
        ("round <= 5 %", "%"),
        *((text, None) for text in ("test_accuracy >= 50 %", "best_test_accuracy >= 0.5", "comm_ratio <= 50%")),
        *((text, None) for text in ("bytes_up <= 2 MB", "total_bytes <= 2e6", "sim_time_s <= 5 s", "flops <= 1e9")),
        *((text, None) for text in ("extra/worst <= 50 %", "extra/memory <= 2 GB", "extra/delay<=5s")),
    ],
)
def test_a_constraint_in_a_unit_that_its_figure_does_not_have_is_refused(constraint: str, unit: str | None) -> None:
    config = load_config({"sweep": {"space": {"seed": {"grid": [0]}}, "constraints": [constraint]}})
    if unit is None:
        check_combination(config)
        return
    with pytest.raises(ConfigError, match=rf"sweep.constraints: {constraint.split()[0]} is not in {unit}; write anoth"):
        check_combination(config)


def summarised(folder: SweepFolder, accuracies: dict[tuple[str, int], float], **sweep: Any) -> Summary:
    """Summarise trials of these methods and seeds: FedSGD's sent 600 bytes, others 1200 in three virtual seconds."""
    methods = list(dict.fromkeys(name for name, _ in accuracies))
    space = {"method": {"grid": [{"name": name} for name in methods]}, "seed": {"grid": [0, 1, 2]}}
    config = load_config({"sweep": {"space": space, **sweep}})
    trials = [trial for trial in list_trials(config) if (trial.values["method"]["name"], trial.seed) in accuracies]
    for trial in trials:
        run = RunFolder.create(folder.trial_path(trial), overwrite=False)
        run.write_config(load_config(overlaid({}, trial.values)).to_yaml())
        write_clients(run, [[2, 1], [0, 1]])
        name, seed = trial.values["method"]["name"], trial.values["seed"]
        cost = {"bytes_up": 0} if name == "fedsgd" else {"sim_time_s": 3.0}
        run.write_rounds([tiny_record(1, test_accuracy=accuracies[name, seed], **cost)])
        run.write_result({"status": "finished"})
    return summarise(folder, trials, [TrialWorld(shared="w", budgets=None)] * len(trials), config=config)


def test_settings_that_miss_a_constraint_come_last_and_are_never_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = SweepFolder(tmp_path / "some")
    accuracies = {("fedavg", 0): 0.9, ("fedsgd", 0): 0.5, ("fedsgd", 1): 0.7}
    summary = summarised(folder, accuracies, constraints=["total_bytes <= 1 kB", "test_accuracy >= 60 %"])
    assert [(s.label, s.misses) for s in summary.settings] == [("FedSGD", ()), ("FedAvg", ("total_bytes <= 1 kB",))]
    assert summary.headline["best_setting/test_accuracy"] == pytest.approx(0.6)
    write_summary(folder, summary)
    written = parse_json((folder.path / "summary.json").read_bytes())
    assert [setting["misses"] for setting in written["settings"]] == [[], ["total_bytes <= 1 kB"]]
    assert _tell(summary, folder, quiet=False) == 0
    said = capsys.readouterr().out
    assert "FedAvg (misses total_bytes <= 1 kB)" in said and "best test_accuracy: 0.6 (FedSGD)" in said


def test_where_no_setting_keeps_the_constraints_none_is_the_best(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ["total_bytes <= 1 kB", "sim_time_s <= 5 s"]
    summary = summarised(SweepFolder(tmp_path), {("fedavg", 0): 0.9, ("fedsgd", 0): 0.5}, constraints=limits)
    # A figure that a setting does not have is a limit missed.
    assert [s.misses for s in summary.settings] == [("total_bytes <= 1 kB",), ("sim_time_s <= 5 s",)]
    assert summary.settings[0].figures["sim_time_s"].mean == 3.0
    assert "best_setting/test_accuracy" not in summary.headline
    _tell(summary, SweepFolder(tmp_path), quiet=True)
    assert "2 of 2 trials finished, but no setting keeps all of sweep.constraints;" in capsys.readouterr().out


def settings_of(worlds: Sequence[str]) -> list[SettingRow]:
    figures = {"test_accuracy": estimate([0.5])}
    how: dict[str, Any] = {"values": {}, "seeds": (0, 1, 2), "failed": 0, "cut_short": 0, "figures": figures}
    return [SettingRow(label=str(k), world=TrialWorld(shared=w, budgets=None), **how) for k, w in enumerate(worlds)]


def test_differences_are_corrected_for_those_of_all_worlds() -> None:
    # Gaps 1, 1.2 and 0.8: t = 1 / (0.2 / sqrt(3)) = 8.66 with two degrees of freedom, p = 0.0131.
    by_seed = [{0: 1.0, 1: 1.2, 2: 0.8}, dict.fromkeys(range(3), 0.0)]
    (alone,) = _compare(settings_of("aa"), by_seed)
    assert alone.p_value == pytest.approx(0.0131, abs=1e-4) and alone.is_real
    among = _compare(settings_of("aabbccdd"), by_seed * 4)
    assert [(d.first, d.second) for d in among] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert {round(d.p_value / alone.p_value, 6) for d in among} == {4.0} and not any(d.is_real for d in among)


def test_that_only_the_best_settings_are_compared_is_said() -> None:
    assert len(_compare(settings_of("a" * 45), [{0: float(k)} for k in range(45)])) == 40 * 39 / 2
    assert _uncompared_notes(settings_of("a" * 45)) == ["differences are between the best 40 of 45 settings"]
    assert _uncompared_notes(settings_of("a" * 40 + "b" * 41)) == [
        "differences are between the best 40 of 41 settings of world 2 of 2"
    ]
    assert _uncompared_notes(settings_of("a" * 40)) == []


def test_a_run_that_has_spent_more_than_a_constraint_allows_is_over() -> None:
    front = CurveFront({"test_accuracy": "max", "total_bytes": "min"}, [parse_constraint("total_bytes <= 2")])
    assert not front.is_dominated("a", {"test_accuracy": 0.1, "total_bytes": 2})
    assert front.is_dominated("a", {"test_accuracy": 0.9, "total_bytes": 3})


def test_a_method_without_budgets_is_judged_with_those_that_plan_with_them() -> None:
    def row(label: str, shared: str, budgets: str | None) -> SettingRow:
        world = TrialWorld(shared=shared, budgets=budgets)
        figures = {"test_accuracy": estimate([0.5, 0.6])}
        return SettingRow(label=label, world=world, values={}, seeds=(0, 1), failed=0, cut_short=0, figures=figures)

    def summary(*settings: SettingRow) -> Summary:
        metrics = {"metrics": ("test_accuracy",), "modes": ("max",)}
        world = TrialWorld(shared="a", budgets=None)
        trial = Trial(number=1, values={}, label="FedAvg", folder="0001")
        done = TrialRow(
            trial=trial, world=world, status="finished", stopped_by=None, reason=None, rounds=1, figures={}, seed=0
        )
        return Summary(**metrics, trials=(done,), settings=settings, differences=(), notes=())  # type: ignore[arg-type]

    together = summary(row("FedAvg", "a", None), row("DynamicFL", "a", "half"))
    assert together.groups == [[0, 1]]
    assert together.headline["best_setting/test_accuracy"] == pytest.approx(0.55)
    apart = summary(row("FedAvg", "a", None), row("FedAvg", "b", None))
    assert apart.groups == [[0], [1]] and "best_setting/test_accuracy" not in apart.headline
