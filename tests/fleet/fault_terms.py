"""A term for fault tests: its process ends, stops or fails at a given place, once."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch

from fedsweep.components.local import LocalStep, LocalTerm
from fedsweep.method import FederatedMethod, merge


@dataclass(frozen=True, kw_only=True)
class FaultAt(LocalTerm):
    """Ends its process at a client and position, unless the marker exists already."""

    client: int
    round: int
    position: int
    marker: str
    how: str = "kill"
    name: str = "fault"

    def loss(self, step: LocalStep) -> torch.Tensor | None:
        _, _, round, client, position = step.stream.key
        here = (client, round, position) == (self.client, self.round, self.position)
        if here and self.how == "nan":
            return step.logits.sum() * float("nan")
        if here and not Path(self.marker).exists():
            Path(self.marker).touch()
            os.kill(os.getpid(), signal.SIGSTOP if self.how == "stop" else signal.SIGKILL)
        return None


def with_fault(method: FederatedMethod, **where: object) -> FederatedMethod:
    return merge(method, FederatedMethod(name="fault", source="", terms=(FaultAt(**where),)))  # type: ignore[arg-type]
