"""The simulated fleet: how fast each client computes and sends, so that every method gets a reproducible training time.

Time is computed, never measured: a client's round takes its messages' time on its links plus its arithmetic on its
processor. A fleet is drawn once from a seed (or read from a file), and all methods of a comparison share it. Jitter and
failures are counter based: they depend on (seed, round, client) alone, so two methods that choose the same client in
the same round meet the same noise, and one more method shifts nothing.

What happens when many clients make up a round (stragglers, failures, the clock) is in ``fedsweep.world.stragglers``.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from fedsweep.errors import ConfigError, DataError, unknown_name
from fedsweep.parameters.ranges import (
    AtLeastOne,
    Checked,
    CountOrZero,
    NotNegative,
    Positive,
    PositiveOrInfinite,
    Share,
)
from fedsweep.parameters.signature import checked
from fedsweep.streams import Stream, stream
from fedsweep.world.device_profiles import FLEET_ROWS, PROFILE_NAMES, FleetRow
from fedsweep.world.spec_checks import parse_document, read_text

SPEED_RANGE = (0.17, 2.43)  # slowest and fastest of 254 phones, relative to the median (AI-Benchmark)
JITTER_FLOOR = 0.1  # a rate never falls below a tenth of its mean
FLEET_FORMAT = "fedsweep-devices"
_USUAL_PROFILE = "edge-accel"


@dataclass(frozen=True, kw_only=True)
class DeviceProfile(Checked):
    """One client's device and its links.

    Attributes:
        flops_per_s: Effective training throughput, FLOP/s with 2 FLOPs per multiply-accumulate, > 0.
        overhead_s: Fixed seconds per local step (framework, kernel launch, data), >= 0.
        down_bits_per_s: Link rate from the server, bit/s (not bytes), > 0, may be infinite.
        up_bits_per_s: Link rate to the server, bit/s, > 0, may be infinite.
        down_latency_s: One-way seconds of a message from the server, >= 0.
        up_latency_s: One-way seconds of a message to the server, >= 0.
        drop_probability: Chance to vanish during a round, 0..1.
        jitter: Coefficient of variation of both link rates from round to round, >= 0 (0.4 for mobile links).
        compute_jitter: The same for computing, 0.01 to 0.06 on phones.
        speed_factor: The factor that drew this device's speed, 1 for the median device; information only, it is
            already in ``flops_per_s`` and ``overhead_s``.

    Raises:
        ConfigError: A figure is outside its range.

    Source: FLASH (Yang et al., WWW 2021) for jitter; Bonawitz et al. 2019 for failures (6 to 10 % a round).
    """

    section: ClassVar[str] = "device"
    flops_per_s: PositiveOrInfinite
    overhead_s: NotNegative
    down_bits_per_s: PositiveOrInfinite
    up_bits_per_s: PositiveOrInfinite
    down_latency_s: NotNegative
    up_latency_s: NotNegative
    drop_probability: Share = 0.0
    jitter: NotNegative = 0.0
    compute_jitter: NotNegative = 0.0
    speed_factor: Positive = 1.0


@dataclass(frozen=True, kw_only=True)
class DeviceFleet:
    """The devices of all clients, in the order of their ids.

    Attributes:
        devices: One profile per client.
    """

    devices: tuple[DeviceProfile, ...]

    def __len__(self) -> int:
        return len(self.devices)

    @cached_property
    def sha256(self) -> str:
        """Hex digest of all figures: equal for equal fleets, on any machine."""
        text = json.dumps(_records(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> str:
        """Return the fleet as a JSON document that :meth:`from_json` reads back to the same bits."""
        document = {"format": FLEET_FORMAT, "version": 1, "sha256": self.sha256, "devices": _records(self)}
        return json.dumps(document, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "the device file") -> DeviceFleet:
        """Return the fleet of a JSON document.

        Args:
            text: What :meth:`to_json` gave. A document written by hand has null as its ``sha256``.
            source: Where the text comes from, for messages.

        Raises:
            DataError: The document is damaged, a figure is outside its range, or the digest does not fit.
        """
        document = parse_document(text, source=source, format=FLEET_FORMAT, keys=("sha256", "devices"))
        records = document["devices"]
        if not isinstance(records, list) or not records:
            raise DataError(f"{source} must list one device per client under `devices`; write it anew")
        fleet = cls(devices=tuple(_device(record, f"{source}, device {k}") for k, record in enumerate(records)))
        if document["sha256"] not in (None, fleet.sha256):
            raise DataError(
                f"the sha256 in {source} must be the digest of its devices, but it is {document['sha256']!r} and they "
                f"have {fleet.sha256!r}; restore the file, or set sha256 to null if you changed it on purpose"
            )
        return fleet

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fleet as a JSON file, in one step: a reader sees the old one or the new one, never a part."""
        target = Path(path)
        draft = target.with_name(f".{target.name}.{os.getpid()}.part")
        draft.write_text(self.to_json(), encoding="utf-8")
        draft.replace(target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DeviceFleet:
        """Read a fleet that :meth:`save` wrote.

        Raises:
            ConfigError: There is no such file.
            DataError: Its content is wrong, see :meth:`from_json`.
        """
        return cls.from_json(read_text("scenario.devices.file", path), source=str(path))


@dataclass(frozen=True, kw_only=True)
class ClientTime:
    """The three parts of a client's time in seconds; their sum is :attr:`total_s`.

    Attributes:
        download_s: Latency and transfer from the server.
        compute_s: Local training.
        upload_s: Latency and transfer to the server.
    """

    download_s: float
    compute_s: float
    upload_s: float

    @property
    def total_s(self) -> float:
        """T_k."""
        return self.download_s + self.compute_s + self.upload_s


@checked("scenario.devices")
def build_devices(
    *,
    num_clients: int,
    run_seed: int,
    profile: str | None = None,
    of: str | None = None,
    seed: CountOrZero | None = None,
    compute_sigma: NotNegative | None = None,
    file: str | None = None,
    bandwidth_factor: Positive = 1.0,
    drop_probability: Share | None = None,
    jitter: NotNegative | None = None,
    compute_jitter: NotNegative | None = None,
    slow_share: Share = 0.0,
    slow_factor: AtLeastOne = 10.0,
) -> DeviceFleet:
    """The simulated fleet, one device per client; a client's does not depend on how many clients there are.

    Args:
        num_clients: Clients in the federation.
        run_seed: The run's seed.
        profile: phone-slow, phone-lte, phone-wifi, edge-accel, flash-tiers or homogeneous; null: edge-accel.
        of: With homogeneous alone: the profile whose medians all devices have; null: edge-accel.
        seed: What draws the devices; null: the run's seed.
        compute_sigma: Standard deviation of the log speed factor; null: the profile's (0.52 for the CPU profiles).
        file: Drawn devices as a JSON file, instead of all of the above.
        bandwidth_factor: Multiplies both links' rates, > 0.
        drop_probability: Chance to vanish during a round, 0..1; null: the file's, 0 without one.
        jitter: Coefficient of variation of both links' rates from round to round; null: the file's, 0 without one.
        compute_jitter: The same for computing; null: likewise.
        slow_share: Share of the clients, 0..1, that compute more slowly still; at 0.1 every tenth, 9, 19, 29 and so on.
        slow_factor: How many times as long these compute, >= 1.

    Raises:
        ConfigError: A value is wrong, keys exclude each other, or the file is for another number of clients.
        DataError: The file is damaged.

    Source: AI-Benchmark list (CPU speeds), FLASH (Yang et al., WWW 2021; links, tiers), FLHetBench (CVPR 2024; Wi-Fi).
    Reading: FLASH's link file is read as kilobit/s (phone-slow); read as kilobyte/s it is close to phone-wifi.
    """
    drawn = {"profile": profile, "of": of, "seed": seed, "compute_sigma": compute_sigma}
    drawn = {key: value for key, value in drawn.items() if value is not None}
    if file is None:
        fleet = _drawn_fleet(drawn, num_clients, run_seed)
    elif drawn:
        raise ConfigError(
            f"`scenario.devices.file` holds drawn devices, but {sorted(drawn)} would draw others; give the file or"
            " those keys"
        )
    else:
        fleet = _fleet_of_file(file, num_clients)
    overrides = {"drop_probability": drop_probability, "jitter": jitter, "compute_jitter": compute_jitter}
    noise = {key: value for key, value in overrides.items() if value is not None}
    if bandwidth_factor != 1.0 or noise:
        fleet = DeviceFleet(devices=tuple(_changed(device, bandwidth_factor, noise) for device in fleet.devices))
    return fleet if slow_share == 0.0 else _with_slow_ones(fleet, slow_share, slow_factor)


def from_profile(parameters: Mapping[str, Any], *, run_seed: int) -> dict[str, object]:
    """Return the profile's values for null parameters of :func:`build_devices`; none with a file, which has its own.

    Args:
        parameters: The parameters.
        run_seed: The run's seed.
    """
    if parameters["file"] is not None:
        return {}
    name = parameters["profile"] or _USUAL_PROFILE
    noise = {"drop_probability": 0.0, "jitter": 0.0, "compute_jitter": 0.0}
    if name == "homogeneous":
        return {"profile": name, "of": _USUAL_PROFILE, **noise}
    sigma = FLEET_ROWS[name].speed_sigma
    return {"profile": name, "seed": run_seed, **({} if sigma is None else {"compute_sigma": sigma}), **noise}


def client_time(device: DeviceProfile, *, steps: int, flops: float, bits_down: float, bits_up: float) -> ClientTime:
    """Return the expected time of a client's work, without jitter: what methods plan with.

    T_k = lat_dn + D_k / b_dn + C_k + lat_up + U_k / b_up,  C_k = steps x overhead + FLOPs / F.

    Args:
        device: Who works.
        steps: Local steps, >= 0.
        flops: Training FLOPs of all steps together, >= 0; of the network actually trained.
        bits_down: Bits received, >= 0.
        bits_up: Bits sent, >= 0.

    Reading: a message that is not sent (no bits) has no latency, so a job that goes on from local parameters pays
    none; the sources give the formula for rounds with both messages only.
    """
    return ClientTime(
        download_s=_message_s(bits_down, device.down_bits_per_s, device.down_latency_s),
        compute_s=steps * device.overhead_s + flops / device.flops_per_s,
        upload_s=_message_s(bits_up, device.up_bits_per_s, device.up_latency_s),
    )


def jittered(device: DeviceProfile, *, seed: int, round: int, client: int) -> DeviceProfile:
    """Return the device as it is in one round: each rate times max(0.1, Normal(1, cv)).

    Computing jitter scales the time of a local step as a whole, its overhead included. Latencies stay.

    Args:
        device: The client's device.
        seed: The run's seed.
        round: From 1.
        client: The client's id.
    """
    if device.jitter == 0.0 and device.compute_jitter == 0.0:
        return device
    noise = stream(seed, "jitter", round, client)
    compute = _rate_factor(noise.child("compute"), device.compute_jitter)
    return replace(
        device,
        flops_per_s=device.flops_per_s * compute,
        overhead_s=device.overhead_s / compute,
        down_bits_per_s=device.down_bits_per_s * _rate_factor(noise.child("down"), device.jitter),
        up_bits_per_s=device.up_bits_per_s * _rate_factor(noise.child("up"), device.jitter),
    )


def fails(device: DeviceProfile, *, seed: int, round: int, client: int) -> bool:
    """Return whether the client vanishes in this round; the same answer for every method.

    Args:
        device: The client's device; its ``drop_probability`` decides.
        seed: The run's seed.
        round: From 1.
        client: The client's id.
    """
    return stream(seed, "failure", round, client).seed(64) < device.drop_probability * 2.0**64


def _drawn_fleet(parameters: Mapping[str, Any], num_clients: int, seed: int) -> DeviceFleet:
    name, of = parameters.get("profile", _USUAL_PROFILE), parameters.get("of", _USUAL_PROFILE)
    for profile, choices in ((name, PROFILE_NAMES), (of, FLEET_ROWS)):
        if profile not in choices:
            raise ConfigError(unknown_name("device profile", profile, choices))
    if "of" in parameters and name != "homogeneous":
        raise ConfigError(f"`of` goes with profile homogeneous, but got profile={name!r}; remove `of`")
    alike = name == "homogeneous"
    row = FLEET_ROWS[of if alike else name]
    if "compute_sigma" in parameters and (alike or row.speed_sigma is None):
        raise ConfigError(
            f"`compute_sigma` needs a profile with a speed factor, but got profile={name!r}; remove `compute_sigma`"
        )
    sigma = parameters.get("compute_sigma", row.speed_sigma or 0.0)
    source = stream(parameters.get("seed", seed), "devices")
    if alike:
        typical = _device_of(row, speed=1.0, share=0.5, down=row.down.typical, up=row.up.typical)
        return DeviceFleet(devices=(typical,) * num_clients)
    # A stream for each figure: a sweep of one of them leaves the others as they are.
    speeds = [_speed(sigma * z) for z in source.child("speed").numpy().standard_normal(num_clients).tolist()]
    shares = source.child("tier").numpy().random(num_clients).tolist()
    downs, ups = row.down.draw(source.child("down"), num_clients), row.up.draw(source.child("up"), num_clients)
    figures = zip(speeds, shares, downs, ups, strict=True)
    return DeviceFleet(
        devices=tuple(_device_of(row, speed=speed, share=u, down=down, up=up) for speed, u, down, up in figures)
    )


def _device_of(row: FleetRow, *, speed: float, share: float, down: float, up: float) -> DeviceProfile:
    return DeviceProfile(
        flops_per_s=row.tier(share) * speed,
        overhead_s=row.overhead_s / speed,
        down_bits_per_s=down,
        up_bits_per_s=up,
        down_latency_s=row.latency_s,
        up_latency_s=row.latency_s,
        speed_factor=speed,
    )


def _fleet_of_file(path: str, num_clients: int) -> DeviceFleet:
    fleet = DeviceFleet.load(path)
    if len(fleet) != num_clients:
        raise ConfigError(
            f"`scenario.devices.file` must have one device per client, but {path} has {len(fleet)} and "
            f"scenario.clients={num_clients}; change one of the two"
        )
    return fleet


def _changed(device: DeviceProfile, factor: float, noise: Mapping[str, object]) -> DeviceProfile:
    down, up = device.down_bits_per_s * factor, device.up_bits_per_s * factor
    return replace(device, down_bits_per_s=down, up_bits_per_s=up, **noise)  # type: ignore[arg-type]


def _with_slow_ones(fleet: DeviceFleet, share: float, longer: float) -> DeviceFleet:
    def slowed(device: DeviceProfile) -> DeviceProfile:
        return replace(device, flops_per_s=device.flops_per_s / longer, overhead_s=device.overhead_s * longer)

    # Spread by count, not drawn: the share is met exactly, and a client's device is the same in a larger federation.
    # The slack: a product that is meant to be whole may come out a hair below.
    reached = [math.floor(k * share + 1e-9) for k in range(len(fleet) + 1)]
    chosen = zip(fleet.devices, reached, reached[1:], strict=False)
    return DeviceFleet(devices=tuple(slowed(device) if after > before else device for device, before, after in chosen))


def _speed(log_factor: float) -> float:
    # Cut off above the range already: exp of some hundreds is no number.
    return min(max(math.exp(min(log_factor, 1.0)), SPEED_RANGE[0]), SPEED_RANGE[1])


def _message_s(bits: float, bits_per_s: float, latency_s: float) -> float:
    return latency_s + bits / bits_per_s if bits > 0 else 0.0


def _rate_factor(noise: Stream, variation: float) -> float:
    return max(JITTER_FLOOR, 1.0 + variation * float(noise.numpy().standard_normal())) if variation > 0 else 1.0


def _records(fleet: DeviceFleet) -> list[dict[str, float | str]]:
    # JSON has no infinity, so an infinitely fast link is the string "inf".
    return [
        {name: "inf" if math.isinf(value) else float(value) for name, value in asdict(device).items()}
        for device in fleet.devices
    ]


def _device(record: object, source: str) -> DeviceProfile:
    names = {field.name for field in fields(DeviceProfile)}
    if not isinstance(record, dict) or set(record) != names:
        raise DataError(f"{source} must have exactly the figures {sorted(names)}; write the file anew")
    try:
        return DeviceProfile(**{name: math.inf if value == "inf" else value for name, value in record.items()})
    except ConfigError as error:
        raise DataError(f"{source}: {error}") from error
