"""Devices: their time for a round's work, their noise, and the fleets that are drawn or read."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsweep.catalog import bind_spec
from fedsweep.errors import ConfigError, DataError
from fedsweep.models.cost import training_flops
from fedsweep.world.device_profiles import FLEET_ROWS, PROFILE_NAMES
from fedsweep.world.devices import (
    DeviceFleet,
    DeviceProfile,
    client_time,
    fails,
    jittered,
)

LENET_MACS, LENET_VALUES = 651_720, 62_006
HALF_LENET_MACS, HALF_LENET_VALUES = 251_340, 15_888


def build_devices(spec: dict[str, object], num_clients: int, seed: int) -> DeviceFleet:
    fleet: DeviceFleet = bind_spec("scenario.devices", spec).build(num_clients=num_clients, run_seed=seed)
    return fleet


def device(**changes: float) -> DeviceProfile:
    figures = {
        "flops_per_s": 1000.0,
        "overhead_s": 2.0,
        "down_bits_per_s": 64.0,
        "up_bits_per_s": 32.0,
        "down_latency_s": 1.0,
        "up_latency_s": 3.0,
    }
    return DeviceProfile(**{**figures, **changes})


# One device


def test_time_of_one_device_in_closed_form() -> None:
    """1 + 640/64 = 11 down, 5 x 2 + 7000/1000 = 17 computing, 3 + 320/32 = 13 up: 41 seconds."""
    parts = client_time(device(), steps=5, flops=7000, bits_down=640, bits_up=320)
    assert (parts.download_s, parts.compute_s, parts.upload_s, parts.total_s) == (11.0, 17.0, 13.0, 41.0)


def test_free_and_instant_links_leave_the_computing_time() -> None:
    free = device(down_bits_per_s=math.inf, up_bits_per_s=math.inf, down_latency_s=0.0, up_latency_s=0.0)
    parts = client_time(free, steps=5, flops=7000, bits_down=640, bits_up=320)
    assert parts.total_s == parts.compute_s == 17.0


def test_message_that_is_not_sent_takes_no_time() -> None:
    parts = client_time(device(), steps=1, flops=0, bits_down=0, bits_up=0)
    assert parts.total_s == 2.0


def test_twice_the_throughput_halves_the_flop_part_only() -> None:
    work = {"steps": 5, "flops": 7000, "bits_down": 640, "bits_up": 320}
    assert client_time(device(flops_per_s=2000.0), **work).total_s == 41.0 - 3.5


def test_twice_the_rates_halve_the_transfer_parts_only() -> None:
    fast = device(down_bits_per_s=128.0, up_bits_per_s=64.0)
    assert client_time(fast, steps=5, flops=7000, bits_down=640, bits_up=320).total_s == 41.0 - 5.0 - 5.0


@pytest.mark.parametrize("key", ["steps", "flops", "bits_down", "bits_up"])
def test_time_grows_with_each_kind_of_work(key: str) -> None:
    work = {"steps": 5, "flops": 7000, "bits_down": 640, "bits_up": 320}
    times = [client_time(device(), **{**work, key: work[key] * k}).total_s for k in (1, 2, 3)]
    assert times[0] < times[1] < times[2]


def test_half_width_lenet_scales_flops_and_bytes_and_leaves_the_step_part() -> None:
    def parts(macs: int, values: int) -> tuple[float, float, float]:
        bits = 32 * values
        bare = device(down_latency_s=0.0, up_latency_s=0.0)
        flops = training_flops(macs, 5 * 500)
        time = client_time(bare, steps=250, flops=flops, bits_down=bits, bits_up=bits)
        return time.compute_s - 500.0, time.download_s, time.upload_s

    full, half = parts(LENET_MACS, LENET_VALUES), parts(HALF_LENET_MACS, HALF_LENET_VALUES)
    assert half[0] / full[0] == pytest.approx(HALF_LENET_MACS / LENET_MACS, rel=1e-12)
    assert half[1] / full[1] == half[2] / full[2] == pytest.approx(HALF_LENET_VALUES / LENET_VALUES, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"flops_per_s": 0.0}, "flops_per_s must be a number > 0"),
        ({"overhead_s": -1.0}, "overhead_s must be a number >= 0"),
        ({"up_bits_per_s": math.nan}, "up_bits_per_s must be a number > 0, but got nan"),
        ({"drop_probability": 1.5}, "drop_probability must be a number >= 0 and <= 1"),
        ({"down_latency_s": "1"}, "must be a number"),
    ],
)
def test_device_refuses_figures_outside_their_range(changes: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        device(**changes)


# Noise


def test_jitter_depends_on_seed_round_and_client_alone() -> None:
    noisy = device(jitter=0.4, compute_jitter=0.05)

    def seconds(*, steps: int = 5, seed: int = 0, round: int = 1, client: int = 0) -> float:
        today = jittered(noisy, seed=seed, round=round, client=client)
        return client_time(today, steps=steps, flops=7000, bits_down=640, bits_up=320).total_s

    first = seconds()
    seconds(round=7, client=3)
    assert seconds() == first
    assert len({first, seconds(seed=1), seconds(round=2), seconds(client=1), 41.0}) == 5
    today = jittered(noisy, seed=0, round=1, client=0)
    assert seconds(steps=9) - first == pytest.approx(4 * today.overhead_s)


def test_jittered_rates_have_their_mean_and_spread_and_a_floor() -> None:
    base = device(jitter=0.4, compute_jitter=0.05)
    days = [jittered(base, seed=3, round=r, client=1) for r in range(1, 1501)]
    down = np.array([day.down_bits_per_s / base.down_bits_per_s for day in days])
    up = np.array([day.up_bits_per_s / base.up_bits_per_s for day in days])
    compute = np.array([day.flops_per_s / base.flops_per_s for day in days])
    assert down.mean() == pytest.approx(1.0, abs=0.04)
    assert down.std() == pytest.approx(0.4, abs=0.03)
    assert compute.std() == pytest.approx(0.05, abs=0.004)
    assert down.min() == pytest.approx(0.1)
    assert abs(np.corrcoef(down, up)[0, 1]) < 0.1
    assert all(day.overhead_s * day.flops_per_s == pytest.approx(2000.0) for day in days[:20])


def test_failures_come_with_their_probability_and_do_not_depend_on_the_method() -> None:
    risky = device(drop_probability=0.1)
    lost = [fails(risky, seed=1, round=r, client=r % 7) for r in range(4000)]
    assert sum(lost) / 4000 == pytest.approx(0.1, abs=0.015)
    assert lost == [fails(risky, seed=1, round=r, client=r % 7) for r in range(4000)]
    assert not any(fails(device(), seed=1, round=r, client=0) for r in range(100))
    assert all(fails(device(drop_probability=1.0), seed=1, round=r, client=0) for r in range(100))


# Fleets


@pytest.mark.parametrize("profile", PROFILE_NAMES)
def test_same_seed_draws_the_same_fleet(profile: str) -> None:
    fleet = build_devices({"profile": profile}, 5, 11)
    assert fleet == build_devices({"profile": profile}, 5, 11)
    assert fleet.sha256 == build_devices({"profile": profile, "seed": 11}, 5, 99).sha256
    assert (fleet.sha256 == build_devices({"profile": profile}, 5, 12).sha256) == (profile == "homogeneous")


def test_client_keeps_its_device_when_clients_are_added() -> None:
    for profile in FLEET_ROWS:
        few, many = build_devices({"profile": profile}, 3, 0), build_devices({"profile": profile}, 30, 0)
        assert few.devices == many.devices[:3]


@pytest.mark.parametrize("profile", ["phone-slow", "phone-wifi"])
def test_lognormal_fleet_reproduces_medians_and_log_sds(profile: str) -> None:
    row = FLEET_ROWS[profile]
    fleet = build_devices({"profile": profile}, 10_000, 5).devices
    for name, rate in (("down_bits_per_s", row.down), ("up_bits_per_s", row.up)):
        drawn = np.array([getattr(one, name) for one in fleet])
        assert np.median(drawn) == pytest.approx(rate.typical, rel=0.03)
        assert np.log(drawn).std() == pytest.approx(rate.log_sd, rel=0.03)  # type: ignore[attr-defined]
    speeds = np.array([one.speed_factor for one in fleet])
    assert np.median(speeds) == pytest.approx(1.0, rel=0.03)
    assert np.log(speeds).std() == pytest.approx(0.500, rel=0.03)
    assert np.mean(speeds == 0.17) < 0.001
    assert np.mean(speeds == 2.43) == pytest.approx(0.044, abs=0.007)
    assert all(one.flops_per_s == 2e9 * one.speed_factor for one in fleet[:50])
    assert all(one.overhead_s == 0.02 / one.speed_factor for one in fleet[:50])


def test_lte_rates_are_uniform_in_their_ranges() -> None:
    fleet = build_devices({"profile": "phone-lte"}, 4000, 5).devices
    down, up = (np.array([getattr(one, name) for one in fleet]) for name in ("down_bits_per_s", "up_bits_per_s"))
    assert down.min() > 5e6 and down.max() < 12e6 and up.min() > 2e6 and up.max() < 5e6
    assert np.median(down) == pytest.approx(8.5e6, rel=0.03)
    assert up.std() == pytest.approx(3e6 / math.sqrt(12), rel=0.03)


def test_flash_tiers_have_their_shares_and_no_speed_factor() -> None:
    fleet = build_devices({"profile": "flash-tiers"}, 10_000, 5).devices
    share = {f: sum(one.flops_per_s == f for one in fleet) / 10_000 for f in (0.6e9, 1.7e9, 5.8e9)}
    assert share[0.6e9] == pytest.approx(0.532, abs=0.02)
    assert share[1.7e9] == pytest.approx(0.464, abs=0.02)
    assert share[5.8e9] == pytest.approx(0.004, abs=0.0025)
    assert sum(share.values()) == 1.0
    assert {one.speed_factor for one in fleet} == {1.0}


def test_homogeneous_fleet_has_the_medians_of_the_row_it_names() -> None:
    fleet = build_devices({"profile": "homogeneous", "of": "phone-lte"}, 4, 0).devices
    expected = DeviceProfile(
        flops_per_s=2e9,
        overhead_s=0.02,
        down_bits_per_s=8.5e6,
        up_bits_per_s=3.5e6,
        down_latency_s=0.05,
        up_latency_s=0.05,
    )
    assert fleet == (expected,) * 4
    assert build_devices({"profile": "homogeneous"}, 1, 0).devices[0].flops_per_s == 1e12
    tiers = build_devices({"profile": "homogeneous", "of": "flash-tiers"}, 1, 0)
    assert tiers.devices[0].flops_per_s == 0.6e9


def test_bandwidth_factor_changes_links_only() -> None:
    full, tenth = (build_devices({"bandwidth_factor": factor}, 3, 0).devices for factor in (1, 0.1))
    for a, b in zip(full, tenth, strict=True):
        assert b == replace(a, down_bits_per_s=a.down_bits_per_s * 0.1, up_bits_per_s=a.up_bits_per_s * 0.1)


def test_compute_sigma_spreads_the_same_draws_and_leaves_links() -> None:
    none, some = (build_devices({"compute_sigma": sigma}, 50, 0).devices for sigma in (0, 0.26))
    base = build_devices({}, 50, 0).devices
    assert {one.speed_factor for one in none} == {1.0}
    assert [one.down_bits_per_s for one in none] == [one.down_bits_per_s for one in base]
    for mild, wide in zip(some, base, strict=True):
        if 0.17 < wide.speed_factor < 2.43:
            assert math.log(wide.speed_factor) == pytest.approx(2 * math.log(mild.speed_factor))


def test_a_spread_of_any_size_stays_in_the_range() -> None:
    wide = build_devices({"compute_sigma": 1000}, 20, 0).devices
    assert max(d.flops_per_s for d in wide) / min(d.flops_per_s for d in wide) == pytest.approx(2.43 / 0.17)


def test_every_tenth_client_computes_more_slowly() -> None:
    base = build_devices({}, 40, 0).devices
    found = build_devices({"slow_share": 0.1, "slow_factor": 5}, 40, 0).devices
    for k, (before, after) in enumerate(zip(base, found, strict=True)):
        longer = 5 if k % 10 == 9 else 1
        assert after == replace(before, flops_per_s=before.flops_per_s / longer, overhead_s=before.overhead_s * longer)
    thirds = build_devices({"slow_share": 0.29, "slow_factor": 2}, 100, 0).devices
    assert sum(a != b for a, b in zip(thirds, build_devices({}, 100, 0).devices, strict=True)) == 29


def test_noise_keys_reach_every_device() -> None:
    fleet = build_devices({"drop_probability": 0.08, "jitter": 0.4, "compute_jitter": 0.05}, 3, 0)
    assert {(one.drop_probability, one.jitter, one.compute_jitter) for one in fleet.devices} == {(0.08, 0.4, 0.05)}


@pytest.mark.parametrize(
    ("profile", "mean", "median"), [("phone-slow", 24.9, 11.4), ("phone-wifi", 23.2, 10.3), ("edge-accel", 11.6, 5.3)]
)
def test_lenet_round_takes_the_expected_time(profile: str, mean: float, median: float) -> None:
    """LeNet on CIFAR-10, 500 samples per device, 5 epochs, batch 10: the longest of 10 devices, mean of 300 fleets."""
    fleet = build_devices({"profile": profile}, 3000, 2).devices
    steps, flops = 5 * 50, training_flops(LENET_MACS, 2500)
    bits = 32 * LENET_VALUES
    all_parts = [client_time(one, steps=steps, flops=flops, bits_down=bits, bits_up=bits) for one in fleet]
    times = np.array([parts.total_s for parts in all_parts]).reshape(300, 10)
    assert times.max(axis=1).mean() == pytest.approx(mean, rel=0.06)
    assert np.median(times) == pytest.approx(median, rel=0.04)


# Files


def test_fleet_file_reads_back_to_the_same_bits(tmp_path: Path) -> None:
    fleet = build_devices({"profile": "phone-slow"}, 6, 4)
    free = DeviceFleet(devices=(*fleet.devices, device(down_bits_per_s=math.inf)))
    free.save(tmp_path / "fleet.json")
    loaded = build_devices({"file": str(tmp_path / "fleet.json")}, 7, 0)
    assert loaded == free and loaded.sha256 == free.sha256
    assert "Infinity" not in (tmp_path / "fleet.json").read_text()
    slower = build_devices({"file": str(tmp_path / "fleet.json"), "bandwidth_factor": 0.5}, 7, 0)
    assert slower.devices[0].up_bits_per_s == fleet.devices[0].up_bits_per_s / 2


def test_changed_figure_in_a_fleet_file_is_noticed() -> None:
    document = json.loads(build_devices({}, 2, 0).to_json())
    document["devices"][1]["overhead_s"] = 0.5
    with pytest.raises(DataError, match="digest"):
        DeviceFleet.from_json(json.dumps(document))
    document["sha256"] = None
    assert DeviceFleet.from_json(json.dumps(document)).devices[1].overhead_s == 0.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "no JSON document"),
        ("[]", "format 'fedsweep-devices'"),
        ('{"format": "fedsweep-devices", "version": 2, "sha256": null, "devices": []}', "version 1"),
        ('{"format": "fedsweep-devices", "version": 1, "devices": []}', "sha256"),
        ('{"format": "fedsweep-devices", "version": 1, "sha256": null, "devices": []}', "one device per client"),
        ('{"format": "fedsweep-devices", "version": 1, "sha256": null, "devices": [{"speed": 1}]}', "device 0"),
    ],
)
def test_damaged_fleet_file_is_refused(text: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        DeviceFleet.from_json(text)


@pytest.mark.parametrize("figure", [-1, 10**400])  # the second has no float
def test_fleet_file_with_an_impossible_figure_names_the_device(figure: int) -> None:
    document = json.loads(build_devices({}, 2, 0).to_json())
    document["devices"][1]["flops_per_s"] = figure
    with pytest.raises(DataError, match=r"device 1.*flops_per_s must be a number > 0"):
        DeviceFleet.from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"profil": "phone-slow"}, "did you mean 'profile'"),
        ({"profile": "phone-slo"}, "did you mean 'phone-slow'"),
        ({"profile": "homogeneous", "of": "homogeneous"}, "unknown device profile"),
        ({"of": "phone-lte"}, "remove `of`"),
        ({"profile": "flash-tiers", "compute_sigma": 0.3}, "remove `compute_sigma`"),
        ({"compute_sigma": -1}, "scenario.devices.compute_sigma must be a number >= 0"),
        ({"bandwidth_factor": 0}, "scenario.devices.bandwidth_factor must be a number > 0"),
        ({"drop_probability": 2}, "drop_probability must be a number >= 0 and <= 1"),
        ({"slow_share": 1.5}, "scenario.devices.slow_share must be a number >= 0 and <= 1"),
        ({"slow_factor": 0.5}, "scenario.devices.slow_factor must be a number >= 1"),
        ({"seed": 1.5}, "seed must be an integer >= 0 or null, but got 1.5"),
        ({"file": "fleet.json", "profile": "phone-lte"}, "give the file or those keys"),
        ({"file": "/nowhere/fleet.json"}, "must name a readable file"),
    ],
)
def test_wrong_device_keys_are_refused(spec: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_devices(spec, 2, 0)


def test_null_keys_keep_their_defaults() -> None:
    assert build_devices({"profile": None, "file": None, "seed": None}, 2, 3) == build_devices({}, 2, 3)


def test_fleet_file_for_other_clients_is_refused(tmp_path: Path) -> None:
    build_devices({}, 3, 0).save(tmp_path / "fleet.json")
    with pytest.raises(ConfigError, match=r"has 3 and scenario\.clients=4"):
        build_devices({"file": str(tmp_path / "fleet.json")}, 4, 0)
