"""The clients' optimiser on K lanes at once: torch's formulas, row by row.

Shape letters: K lanes, P parameters, V values of a client's vector.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedsweep.client.optimizer import OptimizerSettings, state_slots
from fedsweep.trees import FlatLayout


class LaneOptimizer:
    """One optimiser for the rows of a matrix, with a state per row.

    Args:
        settings: Which, and what becomes of its state.
        rows_KV: The lanes' vectors; with ``keep="average"`` the state lies in them.
        gradients_KP: Where backward passes leave the gradients.
        layout: How a vector lies.

    Attributes:
        slots: The state by name: [K, P], or [K, 1] for one number per lane.
        rate: Each lane's learning rate [K, 1], on the device.
    """

    def __init__(
        self, settings: OptimizerSettings, rows_KV: Tensor, gradients_KP: Tensor, *, layout: FlatLayout
    ) -> None:
        self._settings, self._params, self._gradients = settings, rows_KV[:, : layout.num_params], gradients_KP
        # A tensor, since what a GPU has recorded of a step keeps numbers as they were then.
        self.rate = rows_KV.new_zeros(len(rows_KV), 1)
        self.slots: dict[str, Tensor] = {}
        riders = layout.places()
        for name, whole in state_slots(settings):
            if settings.keep == "average":
                self.slots[name] = rows_KV[:, riders[f"optimizer.{name}"]]
            elif whole:
                self.slots[name] = torch.zeros_like(gradients_KP)
            else:  # a count, as torch has it: in bfloat16 it would end at 256
                self.slots[name] = gradients_KP.new_zeros(len(rows_KV), 1, dtype=torch.float32)

    def pairs(self, states: Sequence[Mapping[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Pair each lane's state, a view, with its client's own; none where these lie in the clients' vectors."""
        if self._settings.keep == "average":
            return []
        lanes = enumerate(states)
        return [
            (slot[k].view(state[name].shape), state[name]) for k, state in lanes for name, slot in self.slots.items()
        ]

    def step(self) -> None:
        """Clip each lane's gradient, and move each lane as torch's optimiser would."""
        settings = self._settings
        if settings.clip_norm is not None:
            norms_K1 = torch.linalg.vector_norm(self._gradients, dim=1, keepdim=True)
            # The 1e-6 is in torch's own clipping, which the loop goes through.
            self._gradients.mul_((settings.clip_norm / (norms_K1 + 1e-6)).clamp_(max=1.0))
        if settings.weight_decay:
            self._gradients.add_(self._params, alpha=settings.weight_decay)
        if settings.name == "adam":
            self._adam()
            return
        move_KP = self._gradients
        if settings.momentum:
            buffer_KP = self.slots["momentum_buffer"].mul_(settings.momentum).add_(move_KP)
            move_KP = move_KP.add_(buffer_KP, alpha=settings.momentum) if settings.nesterov else buffer_KP
        self._params.addcmul_(move_KP, self.rate, value=-1)

    def _adam(self) -> None:
        first, second = self._settings.betas
        mean_KP, square_KP, steps_K1 = (self.slots[name] for name in ("exp_avg", "exp_avg_sq", "step"))
        steps_K1.add_(1)
        mean_KP.lerp_(self._gradients, 1 - first)
        square_KP.mul_(second).addcmul_(self._gradients, self._gradients, value=1 - second)
        # In float64, as the loop has them as Python numbers: 1 - beta^t of a float32 is off where t is small.
        taken_K1 = steps_K1.double()
        size_K1 = (self.rate.double() / (1 - first**taken_K1)).to(mean_KP.dtype)
        root_K1 = (1 - second**taken_K1).sqrt().to(mean_KP.dtype)
        self._params.sub_(mean_KP / (square_KP.sqrt() / root_K1).add_(self._settings.eps) * size_K1)
