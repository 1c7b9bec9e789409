"""Figures for Ray's own metrics endpoint: round, accuracy, bytes, as ``ray_fedsweep_...``."""

from __future__ import annotations

from typing import Any

from fedsweep.records import RoundRecord


class RayMetrics:
    """Gauges of one run. No secrets go into tags: the endpoint needs no token.

    Args:
        run: Names the run in the tag ``run``.
    """

    def __init__(self, *, run: str) -> None:
        from ray.util.metrics import Gauge

        self._run = run
        self._bytes = 0
        self._gauges: dict[str, Any] = {
            name: Gauge(f"fedsweep_{name}", description=text, tag_keys=("run",))
            for name, text in (
                ("round", "last finished round"),
                ("test_accuracy", "accuracy of the global model, 0 to 1"),
                ("total_bytes", "bytes sent so far, both ways"),
            )
        }

    def record(self, record: RoundRecord) -> None:
        """Show a round."""
        self._bytes += record.bytes_up + record.bytes_down
        values = {"round": record.round, "test_accuracy": record.test_accuracy, "total_bytes": self._bytes}
        for name, value in values.items():
            if value is not None:
                self._gauges[name].set(value, tags={"run": self._run})
