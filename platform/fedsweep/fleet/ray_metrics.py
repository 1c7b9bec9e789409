"""Figures for Ray's own metrics endpoint, as ``ray_fedsweep_...``: Prometheus reads them, Grafana draws them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedsweep.records import RoundRecord

# Ray puts "ray_" before the names.
GAUGES: Mapping[str, str] = {
    "fedsweep_round": "last finished round",
    "fedsweep_planned_rounds": "rounds that the run is planned for",
    "fedsweep_test_accuracy": "accuracy of the global model when it was last evaluated, 0 to 1",
    "fedsweep_total_bytes": "bytes sent so far, both ways",
    "fedsweep_client_actors": "client actors of the run; 0: its clients are in the process of the trial",
    "fedsweep_gpus": "GPUs that the run reserves, shares added up",
}
TAGS = ("run", "sweep", "method")


class RayMetrics:
    """Gauges of one run, in a process of Ray's. No secrets go into tags: the endpoint needs no token.

    Args:
        run: Names the run (its folder) in the tag ``run``.
        method: The method's name.
        sweep: The sweep's folder; empty for a run of its own.
        planned_rounds: Rounds that it is planned for.
        client_actors: How many it has.
        gpus: What it reserves of them.
    """

    def __init__(
        self,
        *,
        run: str,
        method: str,
        sweep: str = "",
        planned_rounds: int,
        client_actors: int,
        gpus: float,
    ) -> None:
        from ray.util.metrics import Gauge

        # Ray takes ASCII alone, and raises in an actor for anything else.
        texts = (text.encode("ascii", "backslashreplace").decode() for text in (run, sweep, method))
        self._tags = dict(zip(TAGS, texts, strict=True))
        self._gauges: dict[str, Any] = {
            name: Gauge(name, description=text, tag_keys=TAGS) for name, text in GAUGES.items()
        }
        self._set({"planned_rounds": planned_rounds, "client_actors": client_actors, "gpus": gpus})

    def record(self, record: RoundRecord) -> None:
        """Show a round, with what was sent up to it."""
        self.show(round=record.round, test_accuracy=record.test_accuracy, total_bytes=record.total_bytes)

    def show(self, *, round: int, test_accuracy: float | None, total_bytes: int | None) -> None:
        """Show how far the run is; what is not known stays as it was."""
        self._set({"round": round, "test_accuracy": test_accuracy, "total_bytes": total_bytes})

    def _set(self, values: Mapping[str, float | None]) -> None:
        for name, value in values.items():
            if value is not None and not math.isnan(value):
                self._gauges[f"fedsweep_{name}"].set(value, tags=self._tags)
