"""Availability: participation probabilities, the draw, profiles and replays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsweep.catalog import bind_spec
from fedsweep.errors import ConfigError, InvariantError
from fedsweep.streams import Stream, stream
from fedsweep.world.availability import (
    AlwaysAvailable,
    Availability,
    CapabilityAvailability,
    capabilities,
)
from fedsweep.world.replay import ScenarioTrace

KINDS = capabilities(20)


def build_availability(spec: dict[str, object], *, num_rounds: int, num_clients: int = 20) -> Availability:
    found: Availability = bind_spec("scenario.availability", spec).build(num_rounds=num_rounds, num_clients=num_clients)
    return found


def capability(num_rounds: int = 100, **spec: object) -> CapabilityAvailability:
    built = build_availability({"kind": "capability", **spec}, num_rounds=num_rounds)
    assert isinstance(built, CapabilityAvailability)
    return built


def chances(
    availability: CapabilityAvailability, round: int, history: Mapping[int, tuple[float, ...]] | None = None
) -> list[float]:
    return [float(p) for p in availability.probability(round, capabilities=KINDS, history=history or {})]


def streams(seed: int, round: int) -> Callable[[int], Stream]:
    return lambda client: stream(seed, "availability", round, client)


def test_capabilities_follow_the_id_modulo_three() -> None:
    assert capabilities(5).tolist() == [1.0, 0.9, 0.8, 1.0, 0.9]
    assert np.bincount((KINDS * 10).round().astype(int))[8:].tolist() == [6, 7, 7]
    assert KINDS.mean() == pytest.approx(0.905)


def test_program_profile_has_the_published_values_in_round_one() -> None:
    """.8 x 1.10497 x 1 x .99 = .87514 fast; .8 x .88398 x .99 = .70011 slow."""
    fast, _, slow = chances(capability(profile="program"), 1)[:3]
    assert fast == pytest.approx(0.87514, abs=5e-6)
    assert slow == pytest.approx(0.70011, abs=5e-6)


def test_default_profile_multiplies_base_capability_performance_and_decay() -> None:
    """Round 50 of 100: decay .75; accuracies .1 .2 .3 .4, the last three: mean .3, perf 1.0; fresh clients: perf 1."""
    history = {1: (0.1, 0.2, 0.3, 0.4), 2: (0.5,)}
    fast, medium, slow = chances(capability(), 50, history)[:3]
    assert fast == pytest.approx(0.8 * 1.0 * 1.0 * 0.75)
    assert medium == pytest.approx(0.8 * 0.9 * 1.0 * 0.75)
    assert slow == pytest.approx(0.8 * 0.8 * 1.2 * 0.75)


def test_paper_profile_takes_the_plain_mean_and_one_before_training() -> None:
    fast, medium = chances(capability(profile="paper"), 100, {1: (0.9, 0.9)})[:2]
    assert fast == pytest.approx(0.8 * 0.5)
    assert medium == pytest.approx(0.8 * 0.9 * 0.9 * 0.5)
    assert chances(capability(profile="paper"), 100, {0: (0.2,)})[0] == 0.3


def test_shifted_performance_is_capped_and_the_product_clipped() -> None:
    rich = capability(ceiling=1.0, base=0.6)
    assert chances(rich, 100, {0: (1.0,)})[0] == pytest.approx(0.6 * 1.5 * 0.5)
    assert chances(capability(base=1.0), 1, {0: (0.9,)})[0] == 0.95
    assert chances(capability(base=0.1), 1)[0] == 0.3


@pytest.mark.parametrize("profile", ["default", "paper", "program"])
def test_probabilities_stay_between_floor_and_ceiling(profile: str) -> None:
    for number in (1, 10, 50, 100):
        for accuracy in (0.0, 0.3, 1.0):
            all_of_them = chances(capability(profile=profile), number, dict.fromkeys(range(20), (accuracy,)))
            assert 0.3 <= min(all_of_them) and max(all_of_them) <= 0.95


def test_decays_meet_where_the_sources_say() -> None:
    linear, halving = capability(), capability(decay="exponential")
    per_round = capability(profile="program")
    assert (linear.decay_factor(100), halving.decay_factor(100)) == (0.5, 0.5)
    gaps = [linear.decay_factor(r) - halving.decay_factor(r) for r in range(101)]
    assert max(gaps) == pytest.approx(0.043, abs=0.001) and min(gaps) >= 0
    assert [per_round.decay_factor(r) for r in (1, 50, 99)] == pytest.approx([0.99, 0.5, 0.5])


def test_participation_without_adaptation_is_the_base_for_all() -> None:
    assert chances(capability(adaptive=False, base=0.2), 70, {0: (0.9,)}) == [0.2] * 20


def test_presence_without_performance_depends_on_capability_and_round_alone() -> None:
    """Round 50 of 100: decay .75; whatever the accuracies: .8 x c_i x .75."""
    availability = capability(perf="none")
    history = dict.fromkeys(range(20), (0.1, 0.9))
    assert chances(availability, 50, history) == chances(availability, 50)
    assert chances(availability, 50)[:3] == pytest.approx([0.6, 0.54, 0.48])
    assert chances(availability, 50, history) != chances(capability(), 50, history)


def test_client_is_absent_exactly_when_its_number_is_above_its_probability() -> None:
    availability = capability()
    for number in (1, 40, 99):
        there = availability.draw(number, capabilities=KINDS, history={}, stream_for=streams(0, number))
        limits = chances(availability, number)
        numbers = [streams(0, number)(client).seed(64) / 2**64 for client in range(20)]
        assert there == tuple(client for client in range(20) if numbers[client] <= limits[client])
        assert 0 < len(there) < 20


def test_draws_come_with_their_probability_and_are_common_to_methods() -> None:
    availability = capability()
    counts = np.zeros(20)
    for seed in range(1000):
        there = availability.draw(1, capabilities=KINDS, history={}, stream_for=streams(seed, 1))
        counts[list(there)] += 1
    assert counts / 1000 == pytest.approx(chances(availability, 1), abs=0.06)
    # More willing clients with the same numbers: who was there before still is.
    few = capability(base=0.5).draw(3, capabilities=KINDS, history={}, stream_for=streams(1, 3))
    many = capability(base=0.9).draw(3, capabilities=KINDS, history={}, stream_for=streams(1, 3))
    assert set(few) < set(many)


@dataclass(frozen=True, kw_only=True)
class Own(Availability):
    answer: Any

    def probability(self, round: int, **_: Any) -> Any:
        return self.answer


@pytest.mark.parametrize("answer", [np.full(20, np.nan), np.ones(19), np.full(20, 1.5), np.full(20, -0.1), [1.0] * 20])
def test_chances_that_are_none_are_refused_with_their_place(answer: Any) -> None:
    with pytest.raises(InvariantError, match=r"Own\.probability .* from 0 to 1 .* \[20\], but returned .* in round 3"):
        Own(answer=answer).draw(3, capabilities=KINDS, history={}, stream_for=streams(0, 3))
    with pytest.raises(InvariantError, match=r"Own\.probability .* \[1\], but returned .* in round 3"):
        one = answer[:1] if len(answer) == 20 else answer
        Own(answer=one).is_there(3, client=2, capability=0.8, accuracies=(), stream=streams(0, 3)(2))


def test_everybody_is_there_without_an_availability() -> None:
    always = build_availability({"kind": "always"}, num_rounds=5)
    assert always == AlwaysAvailable()

    def refuse(client: int) -> Stream:
        raise AssertionError("no random number is needed")

    assert always.draw(1, capabilities=KINDS, history={}, stream_for=refuse) == tuple(range(20))


def test_explicit_parameters_beat_the_profile() -> None:
    mixed = capability(profile="program", perf="mean", decay="linear", normalise=False)
    assert mixed == capability(profile="paper")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"kind": "capabilty"}, "did you mean 'capability'"),
        ({"kind": "capability", "bas": 0.5}, "did you mean 'base'"),
        ({"kind": "capability", "num_rounds": 5}, "unknown parameter"),
        ({"kind": "capability", "profile": "programs"}, "did you mean 'program'"),
        ({"kind": "capability", "decay": "linea"}, "did you mean 'linear'"),
        ({"kind": "capability", "perf": "max"}, "perf: unknown value|perf must be"),
        ({"kind": "capability", "base": 1.2}, "base must be a number >= 0 and <= 1"),
        ({"kind": "capability", "floor": 0.9, "ceiling": 0.5}, "floor=0.9, ceiling=0.5"),
        ({"kind": "capability", "adaptive": "no"}, "true or false"),
        ({"kind": "replay", "file": "/nowhere/trace.json"}, "must name a readable file"),
    ],
)
def test_wrong_availability_keys_are_refused(spec: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_availability(spec, num_rounds=100)


def test_replayed_presence_is_the_recorded_one(tmp_path: Path) -> None:
    trace = ScenarioTrace(num_clients=20, num_classes=10).with_round((4, 2), {}).with_round((), {})
    (tmp_path / "trace.json").write_text(trace.to_json())
    spec = {"kind": "replay", "file": str(tmp_path / "trace.json")}
    replay = build_availability(spec, num_rounds=2, num_clients=20)
    drawn = [replay.draw(r, capabilities=KINDS, history={}, stream_for=streams(8, r)) for r in (1, 2)]
    assert drawn == [(2, 4), ()]
    with pytest.raises(ConfigError, match="as many clients as the scenario has, 3, but"):
        build_availability(spec, num_rounds=2, num_clients=3)
    with pytest.raises(ConfigError, match=r"training\.rounds=3"):
        build_availability(spec, num_rounds=3)
