"""What it took to reach a test accuracy."""

from __future__ import annotations

from dataclasses import replace

from tiny import with_totals

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.records import RoundRecord
from fedsweep.runs.targets import TargetWatch, targets_reached
from fedsweep.testing import local_engine, run_rounds, tiny_experiment


def record(round: int, accuracy: float | None, *, seconds: float | None = None) -> RoundRecord:
    made = run_rounds(local_engine(tiny_experiment(fedavg(), rounds=1))).records[0]
    spent = {"bytes_up": 10 * round, "bytes_down": 5, "flops": 100}
    return replace(made, round=round, test_accuracy=accuracy, sim_time_s=seconds, **spent)


def test_the_first_crossing_counts_with_all_that_was_spent_up_to_it() -> None:
    """Bytes 15, 25 and 35 by round; the best round and the later fall do not matter."""
    accuracies = [0.4, None, 0.5, 0.9, 0.2]
    records = with_totals(record(r, a, seconds=2.0 * r) for r, a in enumerate(accuracies, start=1))
    assert targets_reached(records, [0.5, 0.95]) == {
        "0.5": {"round": 3, "sim_time_s": 6.0, "total_bytes": 15 + 25 + 35, "flops": 300},
        "0.95": None,
    }


def test_without_devices_there_is_no_time() -> None:
    found = targets_reached([record(1, 0.6)], [0.6])["0.6"]
    assert found is not None and found["sim_time_s"] is None and found["round"] == 1


def test_a_watch_tells_each_target_once() -> None:
    watch = TargetWatch([0.3, 0.6])
    assert list(watch.see(record(1, 0.35))) == [0.3]
    assert watch.see(record(2, 0.4)) == {}
    assert list(watch.see(record(3, 0.7))) == [0.6]
    assert {target: crossing and crossing.round for target, crossing in watch.reached.items()} == {0.3: 1, 0.6: 3}
