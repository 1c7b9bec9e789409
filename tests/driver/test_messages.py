"""What a run says is heard while it works, and changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsweep.config.load import load_config
from fedsweep.driver.messages import MessageQueue, Messages
from fedsweep.driver.observers import Observer
from fedsweep.driver.run import plan_run, run_plan
from fedsweep.records import RoundRecord


class Diary(Observer):
    """Keeps everything in the order in which it came."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def round_done(self, record: RoundRecord) -> None:
        self.entries.append(f"round {record.round}")

    def message(self, text: str) -> None:
        self.entries.append(f"! {text}")

    def progress(self, text: str) -> None:
        self.entries.append(text)


def test_everything_is_given_out_once_and_of_lines_the_newest() -> None:
    queue = MessageQueue()
    queue.message("first")
    queue.progress("1 of 9")
    queue.message("second")
    queue.progress("2 of 9")
    assert queue.take() == Messages(sentences=("first", "second"), progress="2 of 9")
    assert queue.take() == Messages()


def test_a_listener_hears_what_was_said_before_and_then_at_once() -> None:
    queue = MessageQueue()
    queue.message("before")
    diary = Diary()
    queue.listen([diary])
    queue.progress("1 of 9")
    queue.message("after")
    assert diary.entries == ["! before", "1 of 9", "! after"]
    assert queue.take() == Messages()


def test_no_sentence_is_lost_where_one_thread_speaks_and_another_takes() -> None:
    queue, taken = MessageQueue(), []

    def speak() -> None:
        for number in range(5000):
            queue.message(str(number))

    speaker = threading.Thread(target=speak)
    speaker.start()
    while speaker.is_alive():
        taken.extend(queue.take().sentences)
    taken.extend(queue.take().sentences)
    assert taken == [str(number) for number in range(5000)]


def played(folder: Path, *, iterations: int = 4, **runtime: Any) -> tuple[list[str], str]:
    """A run with a synthesis after round 3 of 4."""
    method = {"name": "dynafed", "snapshots": 4, "horizon_rounds": 2, "iterations": iterations, "images_per_class": 3}
    tree = {
        "name": "told",
        "scenario": {"clients": 4},
        "method": {**method, "inner_steps": 4, "inner_rate": 0.5, "augment": False},
        "training": {"rounds": 4, "cohort_size": 2, "batch_size": 50},
        "runtime": runtime,
        "tracking": {"uri": "none"},
    }
    diary = Diary()
    result = run_plan(plan_run(load_config(tree)), folder, observers=[diary])
    return diary.entries, result["model_sha256"]


def between(entries: list[str], first: str, last: str) -> list[str]:
    return entries[entries.index(first) + 1 : entries.index(last)]


def lines(entries: list[str], holds: Callable[[str], bool]) -> list[str]:
    return [entry for entry in entries if holds(entry)]


def test_a_round_is_heard_of_while_it_is_played(tmp_path: Path) -> None:
    entries, _ = played(tmp_path / "run", backend="local")
    told = between(entries, "round 2", "round 3")
    assert [entry.partition(",")[0] for entry in told] == [
        text
        for number in range(1, 5)
        for text in (f"! synthesis: iteration {number} of 4", f"synthesis: iteration {number} of 4")
    ]
    assert all("left" in entry and "objective" in entry for entry in told if not entry.startswith("!"))
    assert lines(entries, lambda entry: not entry.startswith("round")) == told


@pytest.mark.ray
@pytest.mark.usefixtures("shared_ray")
def test_a_server_actor_is_heard_of_while_it_works_and_comes_to_the_same_bits(tmp_path: Path) -> None:
    entries, sha256 = played(tmp_path / "ray", iterations=120, backend="ray", client_actors=2)
    told = between(entries, "round 2", "round 3")
    sentences = lines(told, lambda entry: entry.startswith("!"))
    assert [text.partition(",")[0] for text in sentences] == [
        f"! synthesis: iteration {number} of 120" for number in range(12, 121, 12)
    ]
    # Not only with the round's end: lines come between the sentences.
    assert lines(told[: told.index(sentences[-1])], lambda entry: not entry.startswith("!"))
    assert played(tmp_path / "local", iterations=120, backend="local")[1] == sha256
