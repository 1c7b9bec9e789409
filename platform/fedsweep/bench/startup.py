"""Measure startup: from the command to the first round and to the end, of three rounds on digits."""

from __future__ import annotations

import resource
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedsweep.bench.rounds import whole_command
from fedsweep.bench.setup import Figure, Request, SetUp
from fedsweep.driver.phases import TIMING

_ROUNDS = 3


# A kind of run, and within how many seconds it should be ready and end, on two cores that are free.
_CASES: Mapping[str, tuple[Mapping[str, Any], float, float]] = {
    "in one process": ({"backend": "local"}, 2.0, 4.0),
    "on two client actors": ({"backend": "ray", "client_actors": 2}, 6.0, 9.0),
}


def startup(request: Request) -> Sequence[Figure]:
    """Run the whole command, MLflow and pictures included, each time in an empty folder; say where the time goes."""
    return [figure for what in _CASES for figure in _figures(what, request)]


def _figures(what: str, request: Request) -> list[Figure]:
    runtime, ready_s, end_s = _CASES[what]
    rounds = request.rounds or _ROUNDS
    _play(runtime, rounds)  # after this one the files lie in the system's memory
    runs = [_play(runtime, rounds) for _ in range(request.repeats)]
    ready, ended = tuple(run["ready_s"] for run in runs), tuple(run["seconds"] for run in runs)
    facts: list[tuple[str, Any]] = []
    for part in ("before", "after"):
        split = {name: statistics.median(run[part].get(name, 0.0) for run in runs) for name in runs[0][part]}
        facts.append((part, split))
        longest = sorted(split.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in longest if seconds >= 0.005)
        request.say(f"startup: {what}, seconds {part} the rounds: {parts}")
    facts.append(("cpu_s", statistics.median(run["cpu_s"] for run in runs)))
    request.say(f"startup: {what}, CPU seconds: {facts[-1][1]:.2f}")
    named = f"{what}, {rounds} rounds on digits"
    return [
        Figure(what=f"{named}: ready", ours_s=ready, limit_s=ready_s, facts=tuple(facts)),
        Figure(what=f"{named}: ended", ours_s=ended, limit_s=end_s),
    ]


def _play(runtime: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """Return the run's own split, the seconds of the whole command, and the CPU seconds of all that it waited for."""
    before = _cpu_seconds()
    seconds, result = whole_command({"name": "startup", "training": {"rounds": rounds}, "runtime": runtime})
    return {**result[TIMING], "seconds": seconds, "cpu_s": _cpu_seconds() - before}


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


STARTUP = SetUp(
    name="startup",
    summary="from the command to the first round, and to the end: three rounds on digits, MLflow and pictures included",
    measure=startup,
)
