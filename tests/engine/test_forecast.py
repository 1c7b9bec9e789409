"""Methods that turn into something simpler say so: before the run and after it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from fedsweep.config.load import load_config
from fedsweep.engine.forecast import forecast, notes_after, notes_before
from fedsweep.experiment.build import build_experiment
from fedsweep.experiment.experiment import StopLimits
from fedsweep.testing import local_engine, run_rounds

NEVER = "no inner synchronisation in any round"
ALONE = "one client at most in the group"
TWO_SPEED = {"name": "dynamicfl", "group": "random", "low_interval": "g"}


def said(method: dict[str, Any], *, rounds: int = 3, steps: int = 5) -> tuple[str, str]:
    """What is said before, and what after a run on digits."""
    training = {"rounds": rounds, "cohort_size": 3, "local_steps": steps}
    experiment = build_experiment(load_config({"scenario": {"clients": 4}, "training": training, "method": method}))
    after = notes_after(experiment, run_rounds(local_engine(experiment)))
    return "; ".join(forecast(experiment).remarks), "; ".join(after)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"high_interval": "b", "group_size": 2}, NEVER),  # the step before the last is left out
        ({"high_interval": "a", "group_size": 1}, ALONE),
        ({"high_interval": "a", "group_size": 2}, ""),
    ],
)
def test_dynamicfl_that_is_fedavg(more: dict[str, Any], words: str) -> None:
    for text in said({**TWO_SPEED, **more}):
        assert text.startswith(f"dynamicfl: {words}") if words else not text


def test_fedad_with_its_defaults_says_that_a_short_run_cuts_nothing() -> None:
    before, after = said({"name": "fedad"}, steps=1)
    assert "check_every=10, patience=3 the first refresh is in round 51" in before and "but the run has 3" in before
    assert after.startswith("fedad: there was no refresh: clients train the whole model, as in FedAvg")


def test_fedad_says_when_its_rate_is_none() -> None:
    assert said({"name": "fedad", "base_rate": 0.0}, steps=1) == (
        "fedad: base_rate=0: clients train the whole model, as in FedAvg",
        "fedad: base_rate=0: clients train the whole model, as in FedAvg; set method.base_rate=0.05, say",
    )


@pytest.mark.parametrize(("proxy", "told"), [("{dataset: digits, samples: 9}", True), ("{per_class: 2}", False)])
def test_proxy_data_that_clients_hold_too_are_remarked(proxy: str, told: bool) -> None:
    experiment = build_experiment(load_config({}, [f"scenario.server_data.proxy={proxy}", "training.rounds=1"]))
    for remarks in (forecast(experiment).remarks, notes_after(experiment, local_engine(experiment).start())):
        assert any("proxy: its samples are of digits, so clients hold them, too" in text for text in remarks) is told


def test_what_works_and_what_is_meant_so_is_not_remarked() -> None:
    assert said({"name": "fedad", "base_rate": 0.3, "refresh": [1]}, steps=1) == ("", "")
    assert said({"name": "fedavg"}, steps=1) == ("", "")
    late, _ = said({"name": "fedad", "base_rate": 0.3, "refresh": [3]}, steps=1)
    assert "the first refresh is in round 3" in late


@pytest.mark.parametrize("executor", ["loop", "lanes"])
def test_that_a_gpu_steps_clients_one_by_one_is_told(executor: str) -> None:
    here = build_experiment(load_config({"runtime": {"executor": executor}}, ["training.rounds=1"]))
    state = local_engine(here).start()
    for experiment, told in ((here, False), (replace(here, device="cuda"), executor == "loop")):
        for remarks in (notes_before(experiment, []), notes_after(experiment, state)):
            assert any("one by one on the GPU; auto steps many at once" in text for text in remarks) is told


@pytest.mark.parametrize("codecs", [{}, {"up": {"name": "int8"}, "down": {"name": "topk"}}])
def test_the_forecast_has_what_travels_beside_models_also_to_clients_that_vanish(codecs: dict[str, Any]) -> None:
    scenario = {"clients": 4, "devices": {"profile": "phone-slow", "drop_probability": 0.4}}
    training = {"rounds": 4, "cohort_size": 3, "local_steps": 2}
    tree = {"scenario": scenario, "training": training, "method": {"name": "scaffold"}, "communication": codecs}
    experiment = build_experiment(load_config(tree))
    state, expected = run_rounds(local_engine(experiment)), forecast(experiment)
    assert any(len(record.attendees) < len(record.cohort) for record in state.records)
    assert expected.total_bytes == state.total_bytes
    assert expected.comm_ratio == pytest.approx(sum(r.comm_ratio or 0.0 for r in state.records) / 4, abs=1e-12)


def test_under_drift_cards_count_the_classes_of_the_round() -> None:
    method = {"name": "fedktl", "decoder_steps": 1, "server_epochs": 1, "latent_width": 4}
    drift = {"drift": {"kind": "cosine_rotation"}, "partition": {"kind": "dirichlet", "dirichlet_alpha": 0.5}}
    scenario = {"scenario": {"clients": 4, "server_data": {"proxy": {"per_class": 2}}, **drift}}
    expected, counted = costs(method, **scenario)
    assert expected == pytest.approx(counted, rel=1e-12)


@pytest.mark.parametrize(
    ("method", "codecs"),
    [
        ({"name": "scaffold"}, {}),
        ({"name": "scaffold"}, {"up": {"name": "topk", "error_feedback": True}}),
        ({"name": "feddh", "gradient": "explicit"}, {}),
        ({"name": "ifca"}, {}),
        ({"name": "fedas"}, {}),
    ],
    ids=str,
)
def test_an_upload_that_had_begun_counts_with_what_goes_beside_the_model(
    method: dict[str, Any], codecs: dict[str, Any]
) -> None:
    """Over a slow link whoever is late is at its upload."""
    devices = {"profile": "phone-slow", "bandwidth_factor": 0.005, "stragglers": {"kind": "over_select"}}
    training = {"rounds": 3, "cohort_size": 4, "local_steps": 1, "batch_size": 8}
    tree = {"scenario": {"clients": 8, "devices": devices}, "training": training, "method": method}
    experiment = build_experiment(load_config({**tree, "communication": codecs}))
    state, sending = run_rounds(local_engine(experiment)), 0
    assert forecast(experiment).total_bytes == state.total_bytes
    for traffic, attendees in ((record.traffic, record.attendees) for record in state.records):
        assert traffic is not None
        sent = Counter[int]()
        for client, size in zip(
            traffic.clients[traffic.up].tolist(), traffic.num_bytes[traffic.up].tolist(), strict=True
        ):
            sent[client] += size
        sending += len(sent.keys() - set(attendees))
        assert len(set(sent.values())) == 1
    assert sending


def costs(method: dict[str, Any], **sections: Any) -> tuple[list[float], list[float]]:
    """Bytes and communication ratio of a run: forecast, and as they were."""
    training = {"rounds": 3, "cohort_size": 3, "local_steps": 2}
    tree = {"scenario": {"clients": 4}, "training": training, "method": method, **sections}
    experiment = build_experiment(load_config(tree))
    state, expected = run_rounds(local_engine(experiment)), forecast(experiment)
    ratio = sum(record.comm_ratio or 0.0 for record in state.records) / 3
    return [expected.total_bytes, expected.comm_ratio], [state.total_bytes, ratio]


@pytest.mark.parametrize("codec", [None, {"name": "topk"}])
def test_gradients_that_clients_measure_are_forecast_as_no_codec_encodes_them(codec: dict[str, Any] | None) -> None:
    expected, counted = costs({"name": "feddh", "gradient": "explicit"}, communication={"up": codec})
    assert expected == pytest.approx(counted, rel=1e-12)


def test_masks_that_clients_send_are_no_values_in_the_forecast_ratio() -> None:
    (_, expected), (_, counted) = costs({"name": "feddst", "every": 1, "until": 3})
    assert expected == pytest.approx(counted, rel=1e-12)


@pytest.mark.parametrize(
    ("method", "told"),
    [("fedavg", True), ("scaffold", True), ("fedad", False), ("afd", False), ("feddst", False), ("prunefl", False)],
)
def test_a_forecast_is_exact_where_training_has_no_say_in_the_plans(method: str, told: bool) -> None:
    config = load_config({}, [f"method={{name: {method}}}", "training.rounds=2", "training.local_steps=2"])
    assert forecast(build_experiment(config)).exact is told


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ({"merge": [{"name": "dynamicfl", "high_interval": 1}, {"name": "scaffold"}]}, False),
        ({"name": "dynamicfl", "high_interval": 1}, True),
        ({"name": "dynamicfl", "group": "similarity"}, False),  # who is asked first, and then the most
    ],
)
def test_a_forecast_is_an_estimate_where_cards_count_for_one_aggregation_or_clients_are_asked_first(
    method: dict[str, Any], told: bool
) -> None:
    config = load_config({"method": method}, ["training.rounds=2", "training.local_steps=4"])
    assert forecast(build_experiment(config)).exact is told


@pytest.mark.parametrize(
    ("method", "codec", "told"), [("scaffold", "int8", True), ("ifca", "int8", False), ("ifca", "none", True)]
)
def test_a_forecast_is_an_estimate_where_training_says_what_a_codec_sends(method: str, codec: str, told: bool) -> None:
    sections = {"communication": {"down": {"name": codec}}}
    (expected, _), (counted, _) = costs({"name": method}, **sections)
    config = load_config(sections, [f"method.name={method}", "training.rounds=2"])
    assert (expected == counted, forecast(build_experiment(config)).exact) == (told, told)


@pytest.mark.parametrize("limit", ["sim_time_s", "total_bytes"])
@pytest.mark.parametrize("within", [5, 7.5])
def test_a_limit_beyond_the_planned_rounds_ends_the_forecast_too(limit: str, within: float) -> None:
    """Four of twenty rounds are planned, all of which cost the same; the run ends where the forecast says."""
    scenario = {"clients": 3, "devices": {"profile": "homogeneous", "of": "phone-slow"}}
    training = {"rounds": 20, "cohort_size": 3, "local_steps": 1}
    free = build_experiment(load_config({"scenario": scenario, "training": training}))
    one = forecast(replace(free, training=replace(free.training, rounds=1)))
    assert one.sim_time_s is not None
    before = one.registration_bytes
    most = within * one.sim_time_s if limit == "sim_time_s" else before + int(within * (one.total_bytes - before))
    limited = replace(free, training=replace(free.training, stop=StopLimits(**{limit: most})))  # type: ignore[arg-type]
    expected, state = forecast(limited, most_planned=4), run_rounds(local_engine(limited))
    assert expected.rounds == len(state.records) == int(within) and not expected.exact
    assert expected.total_bytes == state.total_bytes and expected.sim_time_s == pytest.approx(state.clock)
    assert expected.local_steps == sum(record.local_steps for record in state.records)
    assert forecast(limited).exact and forecast(limited).rounds == int(within)
