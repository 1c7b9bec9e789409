"""Measure populations: ten million drawn clients under drift and presence, beside a thousand."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from fedsweep.bench.rounds import Player, plan_of, playing
from fedsweep.bench.setup import Figure, Request, SetUp, in_turns
from fedsweep.runs.facts import peak_memory_mb
from fedsweep.world.data.datasets import load_dataset

_MANY, _FEW = 10_000_000, 1_000
_START_S, _LEAST_RATIO = 10.0, 1 / 1.2
_ROUNDS = 10


def populations(request: Request) -> Sequence[Figure]:
    """Start with ten million clients, then play rounds of a hundred in turns with a thousand; CPU seconds."""
    dataset, rounds = load_dataset("digits", root=None, download=False), request.rounds or _ROUNDS
    began, before_mb = time.process_time(), peak_memory_mb()
    with playing(plan_of(_sections(_MANY), dataset)) as many:
        start_s = time.process_time() - began
        first_s = _cpu_seconds(many, 1)
        memory_mb = peak_memory_mb() - before_mb
        request.say(f"S1: {_MANY:,} clients start within {memory_mb:.0f} MB beyond the data, the first round included")
        with playing(plan_of(_sections(_FEW), dataset)) as few:
            beside = in_turns(
                lambda: _cpu_seconds(many, rounds),
                lambda: _cpu_seconds(few, rounds),
                request.repeats,
                what=f"{rounds} rounds of 100 of {_MANY:,} clients, drift and presence, CPU",
                against=f"of {_FEW:,}",
                asked=_LEAST_RATIO,
            )
    facts = (("memory_mb", memory_mb), ("first_round_s", first_s))
    start = Figure(what=f"{_MANY:,} clients: start, CPU", ours_s=(start_s,), limit_s=_START_S, facts=facts)
    return [start, beside]


def _sections(clients: int) -> Mapping[str, Any]:
    scenario = {
        "clients": clients,
        "partition": {"kind": "drawn", "samples": 20, "dirichlet_alpha": 0.3},
        "drift": {"kind": "cosine_rotation"},
        "availability": {"kind": "capability"},
    }
    training = {"cohort_size": 100, "local_steps": 1, "batch_size": 5}
    return {"scenario": scenario, "training": training, "runtime": {"backend": "local"}}


def _cpu_seconds(player: Player, rounds: int) -> float:
    began = time.process_time()
    player.play(rounds)
    return time.process_time() - began


S1 = SetUp(
    name="S1",
    summary="ten million clients that are drawn, under drift and presence: start, and a round beside a thousand's",
    measure=populations,
)
