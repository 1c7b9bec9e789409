"""A client's optimiser over its parameters as one vector, and the state that may outlive its round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fedsweep.client.modules import ClientModel
from fedsweep.components.optimizers import SGD, Adam
from fedsweep.errors import ConfigError
from fedsweep.trees import FlatLayout, to_arrays, to_tensors


def optimizer_riders(settings: OptimizerSettings, num_params: int) -> list[tuple[str, tuple[int, ...]]]:
    """Name and shape of the optimiser state that moves with the model; empty unless ``keep`` is ``"average"``."""
    if settings.keep != "average":
        return []
    return [(f"optimizer.{name}", (num_params,) if whole else (1,)) for name, whole in state_slots(settings)]


def state_slots(settings: OptimizerSettings) -> list[tuple[str, bool]]:
    """Return the optimiser's state tensors: name, and whether it has one value per parameter."""
    if settings.name == "adam":
        return [("exp_avg", True), ("exp_avg_sq", True), ("step", False)]
    return [("momentum_buffer", True)] if settings.momentum else []


class ClientOptimizer:
    """The optimiser of one client in one round.

    Args:
        settings: Which, and what becomes of its state.
        model: The client's; its params are stepped as one vector. State that is averaged lies in its vector.
        learning_rate: The round's.
        memory: An earlier round's :meth:`arrays`, in the full model's size; None: a fresh start.

    Attributes:
        momentum_weight: The momentum buffer after as many gradients of 1: 1 + m + m^2 + ..., a summand for each step.
        step_scales: By name the scales that the sub-model's steps have, see ``SubModel.step_scale``; empty: none.
    """

    def __init__(
        self,
        settings: OptimizerSettings,
        model: ClientModel,
        *,
        learning_rate: float,
        memory: Mapping[str, Any] | None,
    ) -> None:
        self._settings, self._model, self._flat, self._memory = settings, model, model.flat, dict(memory or {})
        self._learning_rate = learning_rate
        self.momentum_weight = 0.0
        scale = model.submodel.step_scale(model.full)
        self._scale = None if scale is None else scale.to(model.vector.device)
        self.step_scales = {} if self._scale is None else model.layout.params(self._scale)

    @cached_property
    def as_torch(self) -> torch.optim.Optimizer:
        """Torch's own, made when it is first wanted: bare steps do without."""
        optimizer = _make_optimizer(self._flat, self._settings, self._learning_rate)
        if self._settings.groups:
            optimizer.rates, optimizer.decays = self._settings.by_parameter(self._model.layout, self._flat.device)
        state = {name: self._start(name, whole=whole) for name, whole in state_slots(self._settings)}
        if state:
            optimizer.state[self._flat] = state
        return optimizer

    def _start(self, name: str, *, whole: bool) -> Tensor:
        if self._settings.keep == "average":
            # A view, also of the one count: the optimiser writes to it in place, and so into the vector that travels.
            rider = self._model.riders[f"optimizer.{name}"]
            return rider if whole else rider[0]
        if not whole:  # Adam's step count stays on the CPU
            return torch.tensor(self._memory.get(name, 0.0), dtype=torch.float32)
        value = torch.zeros_like(self._flat.detach())
        if name in self._memory:
            # The sub-model's share of what has one value per parameter of the full model.
            full = self._model.full
            padded = full.padded(to_tensors(self._memory[name]))
            value.copy_(self._model.submodel.extract(padded, full)[: len(value)])
        return value

    def _grown(self, name: str) -> Tensor:
        """Return a state tensor in the full model's size: the sub-model's share; the rest as it was, or zero."""
        part, model = self.as_torch.state[self._flat][name].detach().cpu(), self._model
        covered, params = model.submodel.stays(model.layout.padded(part), model.full), slice(model.full.num_params)
        whole = covered.vector[params].clone()
        if covered.cover is not None:
            old = to_tensors(self._memory[name]) if name in self._memory else torch.zeros_like(whole)
            whole = torch.where(covered.cover[params], whole, old)
        return whole

    def scale_and_clip(self) -> None:
        """Make the gradient ready for a step; a clipped one has its norm in the scale that the client steps in."""
        assert self._flat.grad is not None
        if self._scale is not None:
            self._flat.grad.mul_(self._scale)
        if self._settings.clip_norm is not None:
            # Scaled before, into the client's scale, in which the norm counts, and after, for the way back.
            nn.utils.clip_grad_norm_([self._flat], self._settings.clip_norm)
        if self._scale is not None:
            self._flat.grad.mul_(self._scale)

    def arrays(self) -> dict[str, Any]:
        """Return the state as arrays of the full model's size, for the client's memory."""
        state = self.live()
        return {
            name: to_arrays(self._grown(name) if whole else state[name].cpu().clone())
            for name, whole in state_slots(self._settings)
        }

    def live(self) -> dict[str, Tensor]:
        """Return the state tensors by name, live."""
        slots = state_slots(self._settings)
        return {name: self.as_torch.state[self._flat][name] for name, _ in slots}

    def moved_without_gradient(self, *, plain: bool) -> list[Tensor]:
        """List what a step may change also where the gradient is 0, live: params and state with a value for each [P].

        Args:
            plain: The step is one of this optimiser and nothing more; SGD without momentum and decay then changes none.
        """
        if plain and self._settings.needs_gradient:
            return []
        state = self.live()
        return [self._flat.detach(), *(state[name] for name, whole in state_slots(self._settings) if whole)]

    def advance_effective_steps(self, steps: int) -> float:
        """Carry :attr:`momentum_weight` on by so many steps; return the sum of their gradients' weights in the move.

        NaN where there is no such number.

        Source: Wang et al. (2020), FedNova, section 4: the optimiser's recursion on unit gradients.
        """
        settings = self._settings
        if settings.name != "sgd":
            return math.nan
        total = 0.0
        for _ in range(steps):
            self.momentum_weight = settings.momentum * self.momentum_weight + 1.0
            total += 1.0 + settings.momentum * self.momentum_weight if settings.nesterov else self.momentum_weight
        return total


class _Grouped(torch.optim.Optimizer):
    """Steps parts of its one parameter otherwise than the rest.

    Attributes:
        rates: By parameter [P], multiples of the learning rate; None: it holds for all.
        decays: By parameter [P], in place of torch's one weight decay.
    """

    plain_step: Callable[..., Any]
    rates: Tensor | None = None
    decays: Tensor | None = None

    def step(self, closure: Any = None) -> Any:
        """As torch's."""
        with torch.no_grad():
            if self.rates is None or self.decays is None:
                return self.plain_step(closure)
            return self._step_by_group(closure, self.rates, self.decays)

    def _step_by_group(self, closure: Any, rates: Tensor, decays: Tensor) -> Any:
        (flat,) = self.param_groups[0]["params"]
        before, gradient = flat.detach().clone(), flat.grad
        # Put back afterwards: terms look at the gradient that the loss had.
        flat.grad = torch.addcmul(gradient, before, decays)
        loss = self.plain_step(closure)
        flat.grad = gradient
        # What SGD and Adam move by is proportional to the rate; where that is 0, the values keep their bits.
        flat.sub_(before).mul_(rates).add_(before)
        return loss


class _Sgd(_Grouped, SGD):
    pass


class _Adam(_Grouped, Adam):
    pass


def _make_optimizer(flat: nn.Parameter, settings: OptimizerSettings, learning_rate: float) -> _Grouped:
    decay = 0.0 if settings.groups else settings.weight_decay
    if settings.name == "adam":
        return _Adam([flat], lr=learning_rate, betas=settings.betas, eps=settings.eps, weight_decay=decay)
    return _Sgd(
        [flat],
        lr=learning_rate,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=decay,
        foreach=False,
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerGroup:
    """Parameters that are stepped otherwise than the rest.

    Attributes:
        match: A parameter's name, a layer's path, or the end of either after a dot; ``*`` and ``?`` stand for others.
        rate: Multiple of the learning rate, >= 0.
        weight_decay: In place of the optimiser's; None: that one.
    """

    match: str
    rate: float = 1.0
    weight_decay: float | None = None

    def has(self, name: str) -> bool:
        """Tell whether a parameter is in the group."""
        return fnmatchcase(f".{name}.", f"*.{self.match}.*")


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The clients' optimiser.

    Attributes:
        name: ``"sgd"`` or ``"adam"``.
        momentum: SGD's, 0..1.
        nesterov: SGD with Nesterov's momentum.
        weight_decay: Coupled (added to the gradient, after clipping).
        clip_norm: Greatest 2-norm of the gradient; None: no clipping.
        betas: Adam's.
        eps: Adam's.
        keep: ``"reset"``, ``"persist"`` or ``"average"``: what becomes of its state at the next participation.
        groups: A parameter goes by the first that has it.
    """

    name: str = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    clip_norm: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    keep: str = "reset"
    groups: tuple[OptimizerGroup, ...] = ()

    def by_parameter(self, layout: FlatLayout, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return multiples of the rate, and weight decays, of the params [P] of a layout."""
        rates = torch.ones(layout.num_params, dtype=layout.dtype)
        decays = torch.full_like(rates, self.weight_decay)
        for (name, rate), decay in zip(layout.params(rates).items(), layout.params(decays).values(), strict=True):
            group = next((group for group in self.groups if group.has(name)), None)
            if group is not None:
                rate.fill_(group.rate)
                decay.fill_(self.weight_decay if group.weight_decay is None else group.weight_decay)
        return rates.to(device), decays.to(device)

    def check(self, layout: FlatLayout) -> None:
        """Refuse groups that have no parameter, and a count of steps that has no room in the model's type.

        Raises:
            ConfigError: One of them is there; the message about a group lists the names.
        """
        if self.name == "adam" and self.keep == "average" and layout.dtype.itemsize < 4:
            # It would stay at 256 in bfloat16, and all steps be corrected for the start as the 256th is.
            raise ConfigError(
                "training.optimizer_state: average moves Adam's count of steps with the model, whose type"
                f" ({str(layout.dtype).removeprefix('torch.')}) has too few digits to go on counting; set it to persist"
                " or reset, or train the model in float32"
            )
        names = list(layout.params(torch.zeros(layout.num_params)))
        for group in self.groups:
            if not any(group.has(name) for name in names):
                raise ConfigError(
                    f"training.optimizer.groups: no trained parameter matches {group.match!r}; there are"
                    f" {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
                )

    @property
    def needs_gradient(self) -> bool:
        """Tell whether a step moves values by their gradients alone: where these are 0, values stay as they are."""
        if any(group.weight_decay for group in self.groups):
            return False
        return self.name == "sgd" and not self.momentum and not self.weight_decay

    @property
    def is_bare(self) -> bool:
        """Tell whether a step is the gradient times the rate, and nothing more."""
        return self.needs_gradient and self.clip_norm is None and not self.groups
