"""Budgets: who affords the high rate, how many the server admits, and what the limits amount to in values."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from fedsweep.catalog import bind_spec
from fedsweep.errors import ConfigError, DataError
from fedsweep.streams import stream
from fedsweep.world.budgets import Budget, BudgetPlan, TotalBudget

HIGH, LOW = 24_900.0, 100.0
STREAM = stream(0, "budgets")


def build_budget(spec: dict[str, object]) -> Budget:
    budget: Budget = bind_spec("scenario.budgets", spec).build()
    return budget


def plan(spec: dict[str, object], num_clients: int = 10) -> BudgetPlan:
    return build_budget(spec).assign(num_clients, STREAM)


def test_no_budget_limits_nobody() -> None:
    free = plan({"kind": "values"})
    assert free.eligible((1, 3), HIGH).tolist() == [True, True]
    assert free.max_high(7, cost_high=HIGH, cost_low=LOW) == 7
    assert np.isinf(free.client_budgets(HIGH, LOW)).all()
    free.check(None, LOW, cost_high=HIGH)


@pytest.mark.parametrize(("fraction", "chosen"), [(0.0, 0), (0.3, 30), (0.07, 7), (0.57, 57), (0.301, 31), (1.0, 100)])
def test_fixed_budget_lets_the_rounded_up_share_afford_the_high_rate(fraction: float, chosen: int) -> None:
    fixed = plan({"kind": "fixed", "budget_fraction": fraction}, 100)
    assert fixed.eligible(range(100), HIGH).sum() == chosen
    budgets = fixed.client_budgets(HIGH, LOW)
    assert (budgets == HIGH).sum() == chosen and (budgets == LOW).sum() == 100 - chosen
    assert fixed.max_high(10, cost_high=HIGH, cost_low=LOW) == 10


def test_fixed_budget_chooses_uniformly_from_its_stream_and_keeps_its_choice() -> None:
    budget = build_budget({"kind": "fixed", "budget_fraction": 0.3})
    counts = sum(
        budget.assign(10, stream(seed, "budgets")).eligible(range(10), HIGH).astype(int) for seed in range(1000)
    )
    assert counts == pytest.approx(300, abs=60)
    once, again = (budget.assign(10, STREAM).eligible(range(10), HIGH) for _ in range(2))
    assert once.tolist() == again.tolist()


def test_eligibility_follows_the_order_of_the_cohort() -> None:
    values = plan({"kind": "values", "clients": [10, 20, 30]}, 3)
    assert values.eligible((2, 0, 1), 20.0).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("fraction", "cohort", "admitted"), [(0.57, 100, 57), (0.3, 10, 3), (0.6, 10, 6), (0.9, 10, 9), (0.39, 10, 3)]
)
def test_dynamic_budget_admits_the_rounded_down_share(fraction: float, cohort: int, admitted: int) -> None:
    """0.57 x 100 is 56.999... in floating point and still admits 57."""
    dynamic = plan({"kind": "dynamic", "budget_fraction": fraction}, 100)
    assert dynamic.eligible(range(100), HIGH).all()
    assert (dynamic.client_budgets(HIGH, LOW) == HIGH).all()
    assert dynamic.max_high(cohort, cost_high=HIGH, cost_low=LOW) == admitted


def test_what_a_dynamic_plan_admits_costs_a_budget_in_values_that_admits_the_same() -> None:
    """kappa_g <= tau_g holds exactly where |z| <= H: the inequality runs over all active clients."""
    for fraction in (0.0, 0.3, 0.57, 0.9, 1.0):
        dynamic = plan({"kind": "dynamic", "budget_fraction": fraction})
        expected = dynamic.max_high(10, cost_high=HIGH, cost_low=LOW)
        given = plan({"kind": "values", "server": expected * HIGH + (10 - expected) * LOW})
        assert given.max_high(10, cost_high=HIGH, cost_low=LOW) == expected


def test_server_budget_in_values_is_not_exceeded_and_used_up() -> None:
    for server in (1000.0, 1000.0 + 3 * 24_800.0 - 1, 1000.0 + 3 * 24_800.0, 1e9):
        values = plan({"kind": "values", "server": server})
        high = values.max_high(10, cost_high=HIGH, cost_low=LOW)
        assert high * HIGH + (10 - high) * LOW <= server
        assert high == 10 or (high + 1) * HIGH + (9 - high) * LOW > server
    assert plan({"kind": "values", "server": 1000.0}).max_high(10, cost_high=LOW, cost_low=LOW) == 10


def test_server_budget_below_the_low_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"10 clients at the low rate, 1000 .* it is 900, 100 too few"):
        plan({"kind": "values", "server": 900}).max_high(10, cost_high=HIGH, cost_low=LOW)


def test_client_below_the_low_rate_is_named_with_what_it_lacks() -> None:
    values = plan({"kind": "values", "clients": [100, 60, 100, 20]}, 4)
    with pytest.raises(ConfigError, match=r"client 1 has 60, 40 too few \(1 more"):
        values.check(None, LOW, cost_high=HIGH)
    with pytest.raises(ConfigError, match=r"client 3 has 20, 80 too few;"):
        values.check((2, 3), LOW, cost_high=HIGH)
    values.check((0, 2), LOW, cost_high=HIGH)


@pytest.mark.parametrize("kind", ["fixed", "dynamic"])
def test_relative_budgets_always_cover_the_low_rate(kind: str) -> None:
    plan({"kind": kind, "budget_fraction": 0.0}).check(None, LOW, cost_high=HIGH)


def test_one_number_holds_for_all_clients() -> None:
    assert plan({"kind": "values", "clients": 7}, 3).client_budgets(HIGH, LOW).tolist() == [7.0] * 3
    assert plan({"kind": "values", "clients": [1, math.inf]}, 2).eligible((0, 1), HIGH).tolist() == [False, True]


@pytest.mark.parametrize(
    "text", ["5\n6\n7\n", "\ufeff5\n6\n7\n", "budget\n5\n6\n7\n", "client,budget_values\n2,7\n0,5\n1,6\n"]
)
def test_budgets_are_read_from_csv(tmp_path: Path, text: str) -> None:
    (tmp_path / "budgets.csv").write_text(text)
    values = plan({"kind": "values", "clients": str(tmp_path / "budgets.csv")}, 3)
    assert values.client_budgets(HIGH, LOW).tolist() == [5.0, 6.0, 7.0]


@pytest.mark.parametrize(
    "text", ["", "1,2,3\n", "5\nsix\n", "0,5\n0,6\n", "0,5\n2,6\n", "1\n2,3\n", "5\nnan\n", '"' + "1" * 200_000]
)
def test_damaged_csv_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "budgets.csv").write_text(text)
    with pytest.raises(DataError, match=r"budgets\.csv must"):
        build_budget({"kind": "values", "clients": str(tmp_path / "budgets.csv")})


def test_mixed_budget_is_the_weighted_mean_of_user_and_bandwidth() -> None:
    """Shares of the high cost: 0.5 x 0.9 + 0.5 x 1.1 = 1 affords it, 0.5 x 0.9 + 0.5 x 0.1 = 0.5 does not."""
    mixed = plan({"kind": "mixed", "user_share": 0.9, "bandwidth_share": [1.1, 0.1]}, 2)
    assert mixed.client_budgets(HIGH, LOW) == pytest.approx([HIGH, HIGH / 2])
    assert mixed.eligible((0, 1), HIGH).tolist() == [True, False]
    user_only = plan({"kind": "mixed", "user_share": [1.0, 0.2], "bandwidth_share": 0.0, "weight": 1}, 2)
    assert user_only.client_budgets(HIGH, LOW) == pytest.approx([HIGH, 0.2 * HIGH])
    assert user_only.max_high(2, cost_high=HIGH, cost_low=LOW) == 2
    poor = plan({"kind": "mixed", "user_share": 0.001, "bandwidth_share": 0.001}, 2)
    with pytest.raises(ConfigError, match=r"client 0 has 24\.9"):
        poor.check(None, LOW, cost_high=HIGH)


def test_plan_cannot_be_changed() -> None:
    budgets = plan({"kind": "values", "clients": 7}, 3).client_budgets(HIGH, LOW)
    with pytest.raises(ValueError, match="read-only"):
        budgets[0] = 1.0


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"kind": "fixd", "budget_fraction": 0.3}, "did you mean 'fixed'"),
        ({"kind": "fixed"}, "budget_fraction is missing"),
        ({"kind": "fixed", "budget_fraction": 1.5}, "budget_fraction must be a number >= 0 and <= 1"),
        ({"kind": "fixed", "budget_fraction": True}, "must be a number"),
        ({"kind": "dynamic", "budget_fraction": 0.3, "client": 1}, "unknown parameter"),
        ({"kind": "dynamic", "budget_fractio": 0.3}, "did you mean 'budget_fraction'"),
        ({"kind": "values", "clients": [1, -2]}, r"budgets\.clients\[1\]"),
        ({"kind": "values", "clients": {"a": 1}}, "must be text or a list, each a number or a number"),
        ({"kind": "values", "server": -1}, "server must be a number >= 0"),
        ({"kind": "values", "clients": "/nowhere/budgets.csv"}, "must name a readable file"),
        (
            {"kind": "mixed", "user_share": 1, "bandwidth_share": 1, "weight": 2},
            "weight must be a number >= 0 and <= 1",
        ),
    ],
)
def test_wrong_budget_keys_are_refused(spec: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_budget(spec)


def test_a_total_in_python_is_written_as_in_a_configuration() -> None:
    assert TotalBudget(total_bytes="2 GB") == TotalBudget(total_bytes=2_000_000_000)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="one with a unit: 50 MB, but got '2 gb'"):
        TotalBudget(total_bytes="2 gb")  # type: ignore[arg-type]


def test_budgets_for_other_clients_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"it has 2 and scenario\.clients=3"):
        plan({"kind": "values", "clients": [1, 2]}, 3)
