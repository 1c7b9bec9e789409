"""Drift: class probabilities, class sets, their profiles, the frozen ablation and replays."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from fedsweep.catalog import bind_spec
from fedsweep.errors import ConfigError, DataError, InvariantError
from fedsweep.streams import Stream, stream
from fedsweep.world.drift import (
    CosineRotation,
    Drift,
    ReplayDrift,
    RoundClasses,
)
from fedsweep.world.replay import ScenarioTrace


def build_drift(spec: dict[str, object], **sizes: int) -> Drift:
    drift: Drift = bind_spec("scenario.drift", spec).build(
        **{"num_classes": 10, "num_rounds": 3, "num_clients": 4, **sizes}
    )
    return drift


def rotation(num_classes: int = 10, num_rounds: int = 100, **spec: object) -> CosineRotation:
    drift = build_drift({"kind": "cosine_rotation", **spec}, num_classes=num_classes, num_rounds=num_rounds)
    assert isinstance(drift, CosineRotation)
    return drift


def drift_stream(client: int, seed: int = 0) -> Stream:
    return stream(seed, "drift", 0, client)


def test_probabilities_at_phase_zero_have_the_published_values() -> None:
    """Rotation speed 2 in 100 rounds: the phase of client 0 is a full turn, so zero, at round 50."""
    expected = [0.3157, 0.2800, 0.1926, 0.0981, 0.0335, 0.0064, 0.0009, 0.0019, 0.0143, 0.0566]
    assert rotation().class_probabilities(0, 50) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("speed", [2, 2.5, 4])
def test_probabilities_are_positive_sum_to_one_and_have_their_period(speed: float) -> None:
    drift = rotation(rotation_speed=speed)
    period = round(100 / speed)
    for client, number in ((0, 1), (7, 33), (19, 60)):
        now = drift.class_probabilities(client, number)
        assert now.min() > 0 and now.sum() == pytest.approx(1.0, abs=1e-12)
        assert drift.class_probabilities(client, number + period) == pytest.approx(now, abs=1e-12)
        assert abs(drift.class_probabilities(client, number + period // 2) - now).max() > 0.01


def test_client_offset_shifts_the_phase() -> None:
    """Client i at R equals client 0 at R + offset_i T / (2 pi speed); an offset of pi/5 makes that 5 rounds."""
    drift = rotation(client_offset=math.pi / 5)
    for client in (1, 3, 8):
        shifted = drift.class_probabilities(0, 4 + 5 * client)
        assert drift.class_probabilities(client, 4) == pytest.approx(shifted, abs=1e-12)


def test_class_set_is_distinct_and_its_size_uniform_in_its_range() -> None:
    drift = rotation()
    sets = [drift.class_set(3, r, drift_stream(3)) for r in range(1, 601)]
    assert all(list(one) == sorted(set(one)) and 0 <= one[0] and one[-1] < 10 for one in sets)
    sizes = np.bincount([len(one) for one in sets])
    assert len(sizes) == 9 and sizes[:6].sum() == 0 and sizes[6:] == pytest.approx(200, abs=45)


def test_frequencies_of_classes_rank_as_their_probabilities() -> None:
    drift = rotation(min_classes=3, max_classes=3)
    counts = np.zeros(10)
    for seed in range(2500):
        counts[list(drift.class_set(0, 50, drift_stream(0, seed)))] += 1
    probabilities = drift.class_probabilities(0, 50)
    for above in range(10):
        for below in range(10):
            if probabilities[above] > 1.3 * probabilities[below] + 0.01:
                assert counts[above] > counts[below]


def test_drawing_is_sequential_without_replacement() -> None:
    """Two of three classes with p = (a, b, c): {0, 1} has the chance a b/(1-a) + b a/(1-b)."""
    drift = rotation(num_classes=3, min_classes=2, max_classes=2, class_shift=1.5)
    a, b, _ = drift.class_probabilities(0, 30).tolist()
    hits = sum(drift.class_set(0, 30, drift_stream(0, seed)) == (0, 1) for seed in range(3000))
    assert hits / 3000 == pytest.approx(a * b / (1 - a) + b * a / (1 - b), abs=0.03)


def test_single_draws_follow_the_probabilities() -> None:
    drift = rotation(min_classes=1, max_classes=1)
    counts = np.zeros(10)
    for seed in range(3000):
        counts[drift.class_set(0, 50, drift_stream(0, seed))[0]] += 1
    assert counts / 3000 == pytest.approx(drift.class_probabilities(0, 50), abs=0.03)


def test_same_stream_gives_the_same_sets_and_rounds_differ() -> None:
    drift = rotation()
    sets = [drift.class_set(2, r, drift_stream(2)) for r in range(1, 30)]
    assert sets == [drift.class_set(2, r, drift_stream(2)) for r in range(1, 30)]
    assert len(set(sets)) > 5


def test_a_rounds_classes_are_those_of_each_clients_own_stream() -> None:
    drift = rotation()
    found = RoundClasses(drift=drift, seed=3, num_clients=4, num_classes=10, round=7)
    assert found == {k: drift.class_set(k, 7, drift_stream(k, seed=3)) for k in range(4)}
    assert found != RoundClasses(drift=drift, seed=4, num_clients=4, num_classes=10, round=7)


@dataclass(frozen=True, kw_only=True)
class Fixed(Drift):
    classes: tuple[int, ...]

    def class_set(self, client: int, round: int, stream: Stream) -> tuple[int, ...]:
        return self.classes


@pytest.mark.parametrize("classes", [(3, 10), (-1,), (1, 1, 2), ()])
def test_what_are_no_classes_of_the_data_set_is_refused_with_its_place(classes: tuple[int, ...]) -> None:
    drawn = RoundClasses(drift=Fixed(classes=classes), seed=3, num_clients=4, num_classes=10, round=7)
    with pytest.raises(InvariantError, match=r"Fixed\.class_set .* 0 to 9, each once, but .* client 2 in round 7"):
        drawn[2]


def test_frozen_drift_keeps_the_drawn_set_of_round_one() -> None:
    frozen, turning = rotation(frozen=True), rotation()
    for client in range(5):
        sets = {frozen.class_set(client, r, drift_stream(client)) for r in (1, 2, 50, 100)}
        assert sets == {turning.class_set(client, 1, drift_stream(client))}
        assert frozen.class_probabilities(client, 77).tolist() == turning.class_probabilities(client, 1).tolist()


def test_all_classes_allowed_means_all_classes() -> None:
    drift = rotation(min_classes=10, max_classes=10)
    assert drift.class_set(0, 3, drift_stream(0)) == tuple(range(10))


def test_profiles_set_defaults_and_explicit_parameters_beat_them() -> None:
    def figures(drift: CosineRotation) -> tuple[float, float, float, int, int, str]:
        return (
            drift.rotation_speed,
            drift.class_shift,
            drift.client_offset,
            drift.min_classes,
            drift.max_classes,
            drift.pool,
        )

    assert figures(rotation()) == figures(rotation(profile="paper")) == (2.0, 0.5, 0.4, 6, 8, "partition")
    assert figures(rotation(profile="program")) == (0.15, 0.5, 0.4, 4, 6, "all")
    assert figures(rotation(profile="program", rotation_speed=3, max_classes=5, pool="partition")) == (
        3,
        0.5,
        0.4,
        4,
        5,
        "partition",
    )


@pytest.mark.parametrize(("num_classes", "paper", "program"), [(100, (60, 80), (40, 60)), (62, (37, 50), (25, 37))])
def test_other_class_counts_keep_the_fraction(
    num_classes: int, paper: tuple[int, int], program: tuple[int, int]
) -> None:
    for profile, expected in (("paper", paper), ("program", program)):
        drift = rotation(num_classes=num_classes, profile=profile)
        assert (drift.min_classes, drift.max_classes) == expected
    tiny = rotation(num_classes=1)
    assert (tiny.min_classes, tiny.max_classes) == (1, 1)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"kind": "cosine"}, "did you mean 'cosine_rotation'"),
        ({"kind": "cosine_rotation", "rotation_sped": 2}, "did you mean 'rotation_speed'"),
        ({"kind": "cosine_rotation", "num_classes": 3}, "unknown parameter"),
        ({"kind": "cosine_rotation", "profile": "papers"}, "did you mean 'paper'"),
        ({"kind": "cosine_rotation", "rotation_speed": -1}, "rotation_speed must be a number >= 0 or null"),
        ({"kind": "cosine_rotation", "min_classes": 0}, "min_classes must be an integer >= 1"),
        ({"kind": "cosine_rotation", "max_classes": 11}, "min_classes <= max_classes <= 10"),
        ({"kind": "cosine_rotation", "max_classes": 5}, "min_classes=6, max_classes=5"),
        ({"kind": "cosine_rotation", "pool": "none"}, "pool: unknown value|pool must be"),
        ({"kind": "cosine_rotation", "frozen": 1}, "true or false"),
        ({"kind": "replay"}, "file is missing"),
        ({"kind": "replay", "file": "/nowhere/trace.json"}, "must name a readable file"),
    ],
)
def test_wrong_drift_keys_are_refused(spec: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_drift(spec, num_classes=10, num_rounds=100)


# Replays


def recorded(drift: Drift, num_rounds: int = 3) -> ScenarioTrace:
    trace = ScenarioTrace(num_clients=4, num_classes=10)
    for number in range(1, num_rounds + 1):
        sets = {client: drift.class_set(client, number, drift_stream(client)) for client in range(4)}
        trace = trace.with_round((3, 0), sets)
    return trace


def test_replayed_drift_gives_the_recorded_sets(tmp_path: Path) -> None:
    drift = rotation()
    trace = recorded(drift)
    (tmp_path / "trace.json").write_text(trace.to_json())
    spec = {"kind": "replay", "file": str(tmp_path / "trace.json"), "pool": "all"}
    replay = build_drift(spec, num_classes=10, num_rounds=3, num_clients=4)
    assert isinstance(replay, ReplayDrift) and replay.trace == trace and replay.pool == "all"
    for number in (1, 2, 3):
        for client in range(4):
            expected = drift.class_set(client, number, drift_stream(client))
            assert replay.class_set(client, number, drift_stream(client, seed=9)) == expected


def test_a_replay_filters_what_the_recorded_run_did(tmp_path: Path) -> None:
    trace = replace(recorded(rotation()), pool="all")
    (tmp_path / "trace.json").write_text(trace.to_json())
    spec = {"kind": "replay", "file": str(tmp_path / "trace.json")}
    assert build_drift(spec, num_classes=10, num_rounds=3, num_clients=4).pool == "all"
    assert build_drift({**spec, "pool": "partition"}, num_classes=10, num_rounds=3, num_clients=4).pool == "partition"


def test_client_without_a_recorded_set_has_all_classes() -> None:
    trace = ScenarioTrace(num_clients=2, num_classes=3).with_round((0,), {1: (2, 0)})
    assert trace.classes_of(0, 1) == (0, 1, 2)
    assert trace.classes_of(1, 1) == (0, 2)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        ({"num_rounds": 4}, "training.rounds=4"),
        ({"num_classes": 9}, "as many classes"),
        ({"num_clients": 5}, "as many clients"),
    ],
)
def test_trace_of_another_scenario_is_refused(tmp_path: Path, run: dict[str, int], words: str) -> None:
    (tmp_path / "trace.json").write_text(recorded(rotation()).to_json())
    spec = {"kind": "replay", "file": str(tmp_path / "trace.json")}
    with pytest.raises(ConfigError, match=words):
        build_drift(spec, **run)


def test_a_wrong_round_of_a_trace_is_named_with_its_file_and_key(tmp_path: Path) -> None:
    document = json.loads(recorded(rotation()).to_json())
    document["rounds"][2]["present"] = [0, 99]
    (tmp_path / "trace.json").write_text(json.dumps(document))
    spec = {"kind": "replay", "file": str(tmp_path / "trace.json")}
    with pytest.raises(DataError, match=r"trace.json \(named by `scenario.drift.file`\), round 3, present must be an"):
        build_drift(spec, num_classes=10, num_rounds=3, num_clients=4)


HEAD = '{"format": "fedsweep-scenario", "version": 1, "num_clients": 2, "num_classes": 3, "pool": "all", "rounds": '


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no JSON document"),
        ('{"format": "other", "version": 1}', "format 'fedsweep-scenario'"),
        (HEAD + "3}", "must be a list"),
        (HEAD.replace("all", "some") + "[]}", "pool in the scenario file must be one of partition, all"),
        (HEAD + '[{"present": [0]}]}', "round 1 must have"),
        (HEAD + '[{"present": [2], "classes": {}}]}', "present must be an integer >= 0 and < 2"),
        (HEAD + '[{"present": [0, 0], "classes": {}}]}', "at most once"),
        (HEAD + '[{"present": 0, "classes": {}}]}', "must be a list"),
        (HEAD + '[{"present": [0], "classes": {"0": [3]}}]}', "classes of client 0"),
        (HEAD + '[{"present": [0], "classes": {"0": []}}]}', "must not be empty"),
        (HEAD + '[{"present": [0], "classes": {"2": [1]}}]}', "clients with classes must be an integer >= 0 and < 2"),
        (HEAD + '[{"present": [0], "classes": {"x": [1]}}]}', "by number"),
        (HEAD + '[{"present": [0.0], "classes": {}}]}', "must be an integer"),
    ],
)
def test_damaged_trace_is_refused(text: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        ScenarioTrace.from_json(text)
