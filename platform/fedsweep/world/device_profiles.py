"""The built-in kinds of fleet: medians and spreads of speeds and link rates, from public measurements.

Source: AI-Benchmark list as shipped with FLASH (CPU speeds); FLASH (Yang et al., WWW 2021; cellular links, three
tiers); FLHetBench (Zhang et al., CVPR 2024; MobiPerf Wi-Fi). Latencies and the Wi-Fi uplink at half the downlink are
assumptions.
Reading: FLASH's link file is read as kilobit/s (phone-slow); read as kilobyte/s it would be close to phone-wifi.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fedsweep.streams import Stream

SPEED_SIGMA = 0.52  # sd of log CPU speed over 254 phones of the AI-Benchmark list


@dataclass(frozen=True, kw_only=True)
class LogNormalRate:
    """Link rates, bit/s: typical x exp(log_sd x z), z standard normal; ``typical`` is the median."""

    typical: float
    log_sd: float

    def draw(self, source: Stream, count: int) -> list[float]:
        """Return rates of the first ``count`` clients; a client's rate does not depend on ``count``."""
        return [self.typical * math.exp(self.log_sd * z) for z in source.numpy().standard_normal(count).tolist()]


@dataclass(frozen=True, kw_only=True)
class UniformRate:
    """Link rates, bit/s, uniform between ``low`` and ``high``."""

    low: float
    high: float

    @property
    def typical(self) -> float:
        """The median."""
        return (self.low + self.high) / 2

    def draw(self, source: Stream, count: int) -> list[float]:
        """Draw as :meth:`LogNormalRate.draw` does."""
        return [self.low + (self.high - self.low) * u for u in source.numpy().random(count).tolist()]


@dataclass(frozen=True, kw_only=True)
class FleetRow:
    """A kind of fleet.

    Attributes:
        tiers: (FLOP/s, share of the clients), slowest first; shares sum to 1.
        overhead_s: Seconds per local step at speed factor 1.
        down: Rates from the server.
        up: Rates to the server.
        latency_s: One way, both ways.
        speed_sigma: Sd of the log speed factor; None: every device of a tier is equally fast.
    """

    tiers: tuple[tuple[float, float], ...]
    overhead_s: float
    down: LogNormalRate | UniformRate
    up: LogNormalRate | UniformRate
    latency_s: float
    speed_sigma: float | None = SPEED_SIGMA

    def tier(self, u: float) -> float:
        """Return FLOP/s of the tier in which the share ``u`` in [0, 1] falls; 0.5 is the median device's."""
        reached = 0.0
        for flops_per_s, share in self.tiers:
            reached += share
            if u < reached:
                return flops_per_s
        return self.tiers[-1][0]


_FLASH_DOWN = LogNormalRate(typical=4.3e6, log_sd=0.47)
_FLASH_UP = LogNormalRate(typical=3.3e6, log_sd=0.68)
_WIFI_DOWN = LogNormalRate(typical=42e6, log_sd=0.26)
_WIFI_UP = LogNormalRate(typical=21e6, log_sd=0.26)  # half the downlink: an assumption, no source gives it
_LTE_DOWN, _LTE_UP = UniformRate(low=5e6, high=12e6), UniformRate(low=2e6, high=5e6)
_TIERS = ((0.6e9, 0.532), (1.7e9, 0.464), (5.8e9, 0.004))

FLEET_ROWS: Mapping[str, FleetRow] = {
    "phone-slow": FleetRow(tiers=((2e9, 1.0),), overhead_s=0.02, down=_FLASH_DOWN, up=_FLASH_UP, latency_s=0.05),
    "phone-lte": FleetRow(tiers=((2e9, 1.0),), overhead_s=0.02, down=_LTE_DOWN, up=_LTE_UP, latency_s=0.05),
    "phone-wifi": FleetRow(tiers=((2e9, 1.0),), overhead_s=0.02, down=_WIFI_DOWN, up=_WIFI_UP, latency_s=0.02),
    "edge-accel": FleetRow(tiers=((1e12, 1.0),), overhead_s=0.02, down=_WIFI_DOWN, up=_WIFI_UP, latency_s=0.02),
    "flash-tiers": FleetRow(
        tiers=_TIERS, overhead_s=0.0, down=_FLASH_DOWN, up=_FLASH_UP, latency_s=0.05, speed_sigma=None
    ),
}
PROFILE_NAMES = (*FLEET_ROWS, "homogeneous")
