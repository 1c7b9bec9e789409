"""The golden problem: ``a_k / 2 (w - b_k)^2`` with a = (1, 4), b = (0, 10), from w = 1, whole gradients, in float64.

The optimum of the plain mean is 8, that of the mean weighted (1/4, 3/4) is 9.230769.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsweep.components.local import LocalStep, Objective
from fedsweep.engine.state import RunState
from fedsweep.method import FederatedMethod
from fedsweep.testing import local_engine, tiny_experiment


class Point(nn.Module):
    """One parameter, w, from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0]))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.w * torch.ones(len(inputs), 2, dtype=self.w.dtype)


@dataclass(frozen=True, kw_only=True)
class Quadratic(Objective):
    """``a / 2 (w - b)^2``; a sample's two features are a and b."""

    def loss(self, step: LocalStep) -> Tensor:
        a, b = step.inputs.flatten(1).unbind(1)
        assert isinstance(step.model, Point)
        loss: Tensor = (0.5 * a * (step.model.w - b) ** 2).mean()
        return loss


Problem = tuple[Sequence[float], Sequence[float]]
Golden = Callable[..., list[RunState]]


@pytest.fixture
def golden() -> Golden:
    """``golden(method, rounds=..., steps=(5, 5), ...)``: the run's states from the start on."""

    def run(
        method: FederatedMethod,
        *,
        rounds: int,
        steps: tuple[int, ...] = (5, 5),
        problem: Problem = ((1.0, 4.0), (0.0, 10.0)),
        cohort_size: int | None = None,
        **options: object,
    ) -> list[RunState]:
        """One pass in batches of 1 over n_k equal samples: n_k is the number of steps."""
        curvatures, centres = problem
        rows = [(a, b) for a, b, n in zip(curvatures, centres, steps, strict=True) for _ in range(n)]
        method = replace(method, objective=Quadratic())
        engine = local_engine(
            tiny_experiment(
                method,
                num_clients=len(steps),
                cohort_size=cohort_size or len(steps),
                rounds=rounds,
                batch_size=1,
                build=Point,
                double=True,
                images=np.array(rows).reshape(len(rows), 1, 1, 2),
                labels=np.zeros(len(rows), dtype=np.int64),
                sizes=steps,
                **options,  # type: ignore[arg-type]
            )
        )
        states = [engine.start()]
        for _ in range(rounds):
            states.append(engine.advance(states[-1])[0])
        return states

    return run
