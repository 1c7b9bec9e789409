"""SCAFFOLD: control variates take the drift of skewed clients out of every local step.

Source: Karimireddy et al. (2020): SCAFFOLD: stochastic controlled averaging for federated learning. ICML. Option II.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedsweep.components.local import LocalStep, LocalTerm, LocalWork, Memory
from fedsweep.components.refinement import Refinement
from fedsweep.components.weighting import BySamples, Uniform, When
from fedsweep.errors import ConfigError
from fedsweep.method import FederatedMethod
from fedsweep.records import ClientUpdate, Payload, ServerContext, State, SyncContext
from fedsweep.trees import ParamTree, weighted_mean

from .parts.server_steps import server_steps


@dataclass(frozen=True, kw_only=True)
class Correction(LocalTerm):
    """Adds ``c - c_k`` to each gradient; at a job's end ``c_k <- c_k - c + (x - y_k) / (steps * learning rate)``."""

    sends: ClassVar[bool] = True
    stateful: ClassVar[bool] = True
    name: str = "scaffold"

    def init(self, params: ParamTree) -> Memory:
        return {name: torch.zeros_like(value, device="cpu") for name, value in params.items()}

    def gradient(self, step: LocalStep) -> ParamTree:
        return {
            name: (step.broadcast[f"control/{name}"] - torch.as_tensor(step.memory[name])).to(value.device)
            for name, value in step.params.items()
        }

    def finish(self, memory: Memory, work: LocalWork) -> tuple[Memory, Payload]:
        divisor = work.steps * work.learning_rate
        if not divisor:
            return memory, {}
        changes = {
            name: ((work.anchor[name] - value) / divisor).cpu() - work.broadcast[f"control/{name}"]
            for name, value in work.params.items()
        }
        return {name: torch.as_tensor(memory[name]) + change for name, change in changes.items()}, changes


@dataclass(frozen=True, kw_only=True)
class MeanControl(Refinement):
    """Keeps and sends the server's variate ``c``, the mean of all N clients' variates.

    Attributes:
        by_size: Weighted by the clients' samples; otherwise all count alike.
    """

    when: ClassVar[When] = "always"
    by_size: bool

    def init(self, context: ServerContext) -> State:
        sizes = [float(p.num_samples) if self.by_size else 1.0 for p in context.profiles]
        control = {name: torch.zeros_like(value) for name, value in context.layout.params(context.vector).items()}
        return {"control": control, "shares": [size / sum(sizes) for size in sizes]}

    def broadcast(self, state: State, client: int) -> Payload:
        return {f"control/{name}": value for name, value in state["control"].items()}

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        told = [u for u in updates if u.extras]
        for update in told:
            if update.effective_steps != update.steps:
                raise ConfigError(
                    f"scaffold needs clients with plain SGD, but {update.steps} steps of client {update.client} count"
                    f" as {update.effective_steps:g}; set training.optimizer to {{name: sgd, momentum: 0}}"
                )
        control = {}
        for name, old in state["control"].items():
            rows = [old.reshape(-1), *(u.extras[f"scaffold/{name}"].reshape(-1) for u in told)]
            out = torch.empty_like(rows[0])
            weighted_mean(rows, [1.0, *(state["shares"][u.client] for u in told)], out)
            control[name] = out.view_as(old)
        return vector, {**state, "control": control}


def scaffold(
    *, server_learning_rate: float = 1.0, weighting: Literal["uniform", "size"] = "uniform"
) -> FederatedMethod:
    """SCAFFOLD with plain SGD on the clients: control variates correct their drift; twice FedAvg's traffic.

    Args:
        server_learning_rate: Multiplies the server's move towards the clients' mean, above 0.
        weighting: uniform: all clients count alike, the optimum is that of the mean of their losses; size: by samples,
            in the model and in the variates.
    """
    by_size = weighting == "size"
    return FederatedMethod(
        name="scaffold",
        source="Karimireddy et al. (2020), SCAFFOLD: stochastic controlled averaging for federated learning",
        terms=(Correction(),),
        weighting=BySamples() if by_size else Uniform(),
        server_update=server_steps(server_learning_rate=server_learning_rate),
        refinements=(MeanControl(by_size=by_size),),
    )
