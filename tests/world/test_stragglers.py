"""Straggler policies, round times, the virtual clock and the time to a target."""

from __future__ import annotations

import pytest

from fedsweep.catalog import bind_spec
from fedsweep.errors import ConfigError
from fedsweep.world.stragglers import (
    ClientRun,
    Deadline,
    DropOut,
    OverSelect,
    PartialWork,
    StragglerPolicy,
    WaitForAll,
)


def runs(*durations: float, failed: tuple[int, ...] = ()) -> list[ClientRun]:
    return [ClientRun(client=k, duration_s=t, failed=k in failed) for k, t in enumerate(durations)]


def test_deadline_drops_the_late_and_never_lasts_longer() -> None:
    outcome = Deadline(deadline_s=5.0).close(runs(3.0, 6.0, 5.0), 3)
    assert (outcome.duration_s, outcome.survivors) == (5.0, (0, 2))
    assert Deadline(deadline_s=9.0).close(runs(3.0, 6.0, 5.0), 3).duration_s == 6.0


def test_deadline_is_extended_to_the_least_number_of_updates() -> None:
    outcome = Deadline(deadline_s=2.0, min_updates=2).close(runs(3.0, 6.0, 5.0), 3)
    assert (outcome.duration_s, outcome.survivors) == (5.0, (0, 2))
    lost = Deadline(deadline_s=2.0, min_updates=3).close(runs(3.0, 6.0, 5.0, failed=(1,)), 3)
    assert (lost.duration_s, lost.survivors) == (5.0, (0, 2))


def test_over_selection_lasts_as_long_as_the_kth_fastest() -> None:
    policy = OverSelect()
    assert [policy.num_selected(k) for k in (1, 3, 10, 100)] == [2, 4, 13, 130]
    outcome = policy.close(runs(7.0, 1.0, 5.0, 3.0), 3)
    assert (outcome.duration_s, outcome.survivors) == (5.0, (1, 2, 3))
    assert policy.close(runs(2.0, 2.0, 2.0), 2).survivors == (0, 1)
    assert policy.close(runs(7.0, 1.0, 5.0, 3.0, failed=(1, 3)), 3).duration_s == 7.0
    assert WaitForAll().num_selected(10) == 10


def test_failed_clients_do_not_survive_and_are_noticed_at_the_deadline() -> None:
    lost = runs(3.0, 9.0, 5.0, failed=(1,))
    assert DropOut().close(lost, 3).duration_s == 5.0
    assert DropOut().close(lost, 3).survivors == (0, 2)
    assert DropOut(deadline_s=7.0).close(lost, 3).duration_s == 7.0
    assert DropOut(deadline_s=4.0).close(lost, 3).survivors == (0,)
    assert WaitForAll().close(lost, 3) == DropOut().close(lost, 3)


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        (WaitForAll(), 9.0),
        (DropOut(), 9.0),
        (DropOut(deadline_s=7.0), 7.0),
        (Deadline(deadline_s=7.0), 7.0),
        (OverSelect(), 9.0),
        (PartialWork(deadline_s=7.0), 7.0),
    ],
)
def test_clock_advances_without_any_survivor(policy: StragglerPolicy, seconds: float) -> None:
    outcome = policy.close(runs(3.0, 9.0, failed=(0, 1)), 2)
    assert (outcome.duration_s, outcome.survivors) == (seconds, ())


def test_partial_work_stops_after_the_last_full_epoch_in_time() -> None:
    """Client 0: 2 s of messages and 5 epochs of 2 s; by 9 s it finishes 3 and is back at 8. Client 1 is in time.

    Client 2 needs 8 s for its first epoch and 2 s for messages, so it has nothing to send and the server waits.
    """
    late = ClientRun(client=0, duration_s=12.0, compute_s=10.0, epochs=5)
    quick = ClientRun(client=1, duration_s=4.0, compute_s=2.0, epochs=3)
    stuck = ClientRun(client=2, duration_s=10.0, compute_s=8.0, epochs=1)
    outcome = PartialWork(deadline_s=9.0).close([late, quick], 2)
    assert outcome.duration_s == pytest.approx(8.0)
    assert (outcome.survivors, outcome.epochs) == ((0, 1), (3, 3))
    outcome = PartialWork(deadline_s=9.0).close([late, quick, stuck], 3)
    assert (outcome.duration_s, outcome.survivors) == (9.0, (0, 1))


def test_policies_are_built_from_their_mappings() -> None:
    def policy(spec: dict[str, object]) -> StragglerPolicy:
        found: StragglerPolicy = bind_spec("scenario.devices.stragglers", spec).build()
        return found

    assert policy({"kind": "wait"}) == WaitForAll()
    assert policy({"kind": "deadline", "deadline_s": 3}) == Deadline(deadline_s=3)
    assert policy({"kind": "over_select", "over_selection": 1.5}).num_selected(4) == 6
    with pytest.raises(ConfigError, match="did you mean 'deadline'"):
        policy({"kind": "dedline"})
    with pytest.raises(ConfigError, match="deadline_s is missing"):
        policy({"kind": "partial"})
    with pytest.raises(ConfigError, match="has no parameter"):
        policy({"kind": "wait", "over_selection": 2})
    with pytest.raises(ConfigError, match="over_selection must be a number >= 1"):
        OverSelect(over_selection=0.5)
