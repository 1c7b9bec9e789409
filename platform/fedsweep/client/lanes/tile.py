"""A local step that several clients take at once: their vectors are the rows of one matrix.

Objective and terms are the loop's own, seen through ``torch.func.vmap``: each is written for one client and sees one
lane. Everything that differs from client to client is a batched tensor; what can't be one (a random stream, a step that
branches on values) raises in the first step, before anything is changed, and the clients are stepped one by one.

A tile always has the same number of lanes. Kernels choose their algorithm by the size of what they are given, so a
lane's bits may depend on how many lanes there are; they never depend on what the other lanes hold. Lanes without a
client repeat the first one.

Shape letters: K lanes, V values of a vector, P parameters, B batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedsweep.client.compute_device import compute_lazily_asked
from fedsweep.client.lanes.draws import LaneDraws, dropout_calls
from fedsweep.client.lanes.lane import TENSOR, Lane, LaneSteps
from fedsweep.client.lanes.optimizer import LaneOptimizer
from fedsweep.client.lanes.recording import Recording
from fedsweep.client.lanes.staging import StagedBatches
from fedsweep.client.messages import ClientSide
from fedsweep.client.steps import count_hits
from fedsweep.components.local import ClientFacts, LocalStep, LocalTerm, Memory
from fedsweep.streams import Stream
from fedsweep.trees import ParamTree, all_finite, all_of, each

# Rows begin at multiples of this many values: no kernel sees one lane at another alignment than the next.
_ALIGNED = 16


class _LaneView:
    """The attributes that an object has in a lane, as tensors; to ask for another is an error that says so."""

    def __init__(self, what: str, **attributes: Any) -> None:
        self.__dict__.update(attributes, _what=what)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{self._what} ({name}) is asked for, which clients in lanes can't have")


class _Caller(nn.Module):
    """Calls a function with a module whose values ``functional_call`` has swapped."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, ask: Callable[[nn.Module], Any]) -> Any:
        return ask(self.module)


class Tile:
    """K lanes of one shape, and the step that takes them all.

    Args:
        side: The experiment's client side.
        pattern: Any of the lanes.
        width: K.
        records: A step is recorded once and then replayed.
    """

    def __init__(self, side: ClientSide, pattern: Lane, width: int, *, records: bool = False) -> None:
        self._side, self._width, self._layout, self._records = side, width, pattern.slot.layout, records
        layout, self._device = self._layout, pattern.vector.device
        aligned = -(-layout.num_values // _ALIGNED) * _ALIGNED
        self._rows = self._zeros(aligned)[:, : layout.num_values]
        self._gradients = self._zeros(aligned)[:, : layout.num_params]
        self._optimizer = LaneOptimizer(side.optimizer, self._rows, self._gradients, layout=layout)
        self._anchors = None if pattern.anchor is None else torch.zeros_like(self._rows)
        self._params, self._grads, self._buffers = self._bound()
        tensors, (self._spec, self._others) = pattern.companions
        self._companions = [self._zeros(*t.shape, dtype=t.dtype) for t in tensors]
        (inputs, targets), size = pattern.batches(pattern.first, 1), pattern.batch_size
        self._inputs = each(lambda values: self._zeros(size, *values.shape[1:], dtype=values.dtype), inputs)
        self._targets = self._zeros(size, *targets.shape[1:], dtype=targets.dtype)
        self._facts = {
            name: self._zeros(*value.shape, dtype=value.dtype) for name, value in pattern.fact_tensors.items()
        }
        self._active = torch.ones(width, dtype=torch.bool, device=self._device)
        self._caller = _Caller(pattern.slot.module)
        self._eval_copy = pattern.slot.eval_copy if any(term.has_own("loss") for term in side.terms) else None
        if self._eval_copy is not None:
            self._eval_copy()  # made now: in a lane the module has no values that could be copied
        # Of a full batch, which the first one need not be; on a copy, since batch norm's statistics move in it.
        full = each(lambda values: values[:1].expand(size, *values.shape[1:]).contiguous(), inputs)
        calls = dropout_calls(pattern.slot.module, layout.model(pattern.vector.clone()), full)
        self._draws = LaneDraws(calls, size, self._zeros)
        self._recorded: dict[bool, Recording] = {}
        self._lanes: list[Lane] = []
        batch = [*all_of(self._inputs), self._targets]
        self._staged = StagedBatches(batch, self._draws, self._facts["position"], self._active, layout)

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(self._width, *shape, dtype=dtype or self._layout.dtype, device=self._device)

    def _bound(self) -> tuple[ParamTree, ParamTree, ParamTree]:
        """Return by name [K, ...]: params, which are views of the rows; their gradients; and buffers."""
        params, gradients, buffers = self._tree(self._rows), self._tree(self._gradients), {}
        for name in [name for name in params if name not in gradients]:
            # Of their own: batch norm changes its statistics in place, and vmap does so in a copy of what is not dense.
            buffers[name] = params.pop(name).clone()
        return {name: value.detach().requires_grad_() for name, value in params.items()}, gradients, buffers

    def _tree(self, rows: Tensor) -> ParamTree:
        """Return the tensors by name [K, ...] as views into rows [K, V], or [K, P] of params alone; without riders."""
        layout = self._layout
        end = min(rows.shape[1], layout.num_params + layout.num_buffers)
        shapes = zip(layout.places().items(), layout.shapes, strict=True)
        return {name: rows[:, at].view(len(rows), *shape) for (name, at), shape in shapes if at.stop <= end}

    def run(self, lanes: Sequence[Lane]) -> list[LaneSteps]:
        """Take the steps that are due of up to K clients; where one can't be had, no client has been changed."""
        self._load(lanes)
        steps = [self._step_at(tick) for tick in range(max(len(lane.sizes) for lane in lanes))]
        for name, buffer in self._buffers.items():
            self._tree(self._rows)[name].copy_(buffer)
        # Read once: on a GPU each reading would wait for all that was asked of it before.
        losses, hits = (torch.stack(column, dim=1).tolist() for column in zip(*steps, strict=True))
        sums = self._rows.sum(dim=1).tolist()  # a sum may overflow: then each value is looked at
        _copy([(place, value) for value, place in self._pairs(lanes)])
        self._lanes = []  # they hold their clients' memory, of which a GPU has little
        return [
            LaneSteps(
                losses=losses[k][: len(lane.sizes)],
                hits=hits[k][: len(lane.sizes)],
                is_finite=math.isfinite(sums[k]) or all_finite(self._rows[k]),
            )
            for k, lane in enumerate(lanes)
        ]

    def _step_at(self, tick: int) -> tuple[Tensor, Tensor]:
        idle = self._next_batch(tick)
        if self._device.type == "lazy":
            compute_lazily_asked()
        return self._replayed(idle=idle) if self._records else self._taken(idle=idle)

    def _next_batch(self, tick: int) -> bool:
        return self._staged.put(tick, self._lanes, num_clients=self._num_clients)

    def peak_memory(self, lane: Lane) -> int:
        """Return bytes of the GPU that a step takes at most, all that the process holds beside it included."""
        self._load([lane])
        idle = self._next_batch(0)
        # Not of laying out batches, which takes the more the fewer lanes there are: each has more steps at once.
        torch.cuda.reset_peak_memory_stats()
        self._taken(idle=idle)
        return torch.cuda.max_memory_allocated()

    # -- clients in and out --------------------------------------------------------------------------------------

    def _load(self, lanes: Sequence[Lane]) -> None:
        """Take up to K clients; the first one stands in for those that are missing."""
        self._lanes, self._num_clients = [*lanes, *[lanes[0]] * (self._width - len(lanes))], len(lanes)
        pairs = self._pairs(self._lanes)
        for k, lane in enumerate(self._lanes):
            if self._anchors is not None and lane.anchor is not None:
                pairs.append((self._anchors[k], lane.anchor))
            pairs += zip((rows[k] for rows in self._companions), lane.companions[0], strict=True)
        _copy(pairs)
        for name, buffer in self._buffers.items():
            buffer.copy_(self._tree(self._rows)[name])
        self._caller.train()
        if not self._staged.begin(self._lanes):
            self._take_facts()

    def _take_facts(self) -> None:
        """Take what stays as it is from one sync point of a round to the next."""
        rates = torch.tensor([lane.learning_rate for lane in self._lanes], dtype=self._rows.dtype)
        self._optimizer.rate.copy_(rates.unsqueeze(1))
        for name, rows in self._facts.items():
            rows.copy_(torch.stack([lane.fact_tensors[name] for lane in self._lanes]))

    def _pairs(self, lanes: Sequence[Lane]) -> list[tuple[Tensor, Tensor]]:
        """Pair each lane's values and optimiser state with its client's own."""
        own = [(self._rows[k], lane.vector) for k, lane in enumerate(lanes)]
        return own + self._optimizer.pairs([lane.optimizer.live() for lane in lanes])

    # -- a step --------------------------------------------------------------------------------------------------

    def _taken(self, *, idle: bool) -> tuple[Tensor, Tensor]:
        """Take one step of all lanes; where some are idle, they have no batch and stay as they are.

        Returns:
            The losses at its start [K], and how many samples were classified rightly [K]; 0 where nobody asks.
        """
        values = self._state()
        before = [value.clone() for value in values] if idle else []
        losses, hits = self._losses()
        # No lane sees another, so of the sum's gradient each lane's rows are those of its own loss.
        gradients = torch.autograd.grad(losses.sum(), list(self._params.values()), allow_unused=True)
        with torch.no_grad():
            for place, gradient in zip(self._grads.values(), gradients, strict=True):
                place.zero_() if gradient is None else place.copy_(gradient)
            self._add_terms()
            self._optimizer.step()
            for value, old in zip(values, before, strict=idle):
                active = self._active.view(-1, *[1] * (value.dim() - 1))
                value.copy_(torch.where(active, value, old))
        return losses.detach(), hits

    def _state(self) -> list[Tensor]:
        """Return all that a step changes, lane by lane."""
        return [self._rows, *self._buffers.values(), *self._optimizer.slots.values()]

    def _replayed(self, *, idle: bool) -> tuple[Tensor, Tensor]:
        """Return the same as one launch: the step's kernels are recorded once and then played again.

        Raises:
            NotRecorded: The step can't be recorded, or its recording gives other values.
        """
        if idle not in self._recorded:
            self._recorded[idle] = Recording(partial(self._taken, idle=idle), self._state())
        losses, hits = self._recorded[idle].replayed()
        return losses, hits

    def _losses(self) -> tuple[Tensor, Tensor]:
        def lane(params: ParamTree, buffers: ParamTree, noise: list[Tensor], seen: dict[str, Any]) -> Any:
            def ask(module: nn.Module) -> tuple[Tensor, Tensor]:
                with self._draws.replaying(noise):
                    return self._loss(self._step(seen, module, params))

            values = {f"module.{name}": value for name, value in (params | buffers).items()}
            return torch.func.functional_call(self._caller, values, (ask,), strict=False)

        seen = self._seen() | {"inputs": self._inputs, "targets": self._targets}
        losses, hits = torch.func.vmap(lane)(self._params, self._buffers, self._draws.noise, seen)
        return losses, hits

    def _loss(self, step: LocalStep) -> tuple[Tensor, Tensor]:
        loss = self._side.objective.loss(step)
        for term in self._remembering(step):
            extra = term.loss(step)
            if extra is not None:
                loss = loss + extra
        return loss, count_hits(step) if self._side.track_accuracy else loss.new_zeros(())

    def _add_terms(self) -> None:
        """Add what the terms add to the gradients. They see the parameters, not the batch."""
        if not any(term.has_own("gradient") for term in self._side.terms):
            return

        def lane(params: ParamTree, seen: dict[str, Any]) -> list[ParamTree]:
            step = self._step(seen, self._caller.module, params)
            return [term.gradient(step) or {} for term in self._remembering(step)]

        params = {name: value.detach() for name, value in self._params.items()}
        for tree in torch.func.vmap(lane)(params, self._seen()):
            for name, value in tree.items():
                self._grads[name].add_(value)

    def _seen(self) -> dict[str, Any]:
        """Collect what differs between lanes beside their values, as vmap takes it."""
        anchors = {} if self._anchors is None else self._tree(self._anchors)
        rates = self._optimizer.rate.squeeze(1)
        return {"anchor": anchors, "companions": self._companions, "facts": self._facts, "rate": rates}

    def _step(self, seen: dict[str, Any], module: nn.Module, params: ParamTree) -> LocalStep:
        """Return the step as one lane's objective and terms see it; what they can't see has no attributes."""
        rest = iter(seen["companions"])
        leaves = [next(rest) if other is TENSOR else other for other in self._others]
        memories, broadcast = pytree.tree_unflatten(leaves, self._spec)
        step = LocalStep(
            inputs=seen.get("inputs"),  # type: ignore[arg-type]
            targets=seen.get("targets"),  # type: ignore[arg-type]
            model=module,
            params=params,
            anchor=seen["anchor"],
            memory=memories,
            broadcast=broadcast,
            stream=cast(Stream, _LaneView("a stream of random numbers")),
            position=seen["facts"]["position"],
            learning_rate=cast(float, seen["rate"]),
            task=self._side.task,
            client=cast(ClientFacts, _LaneView("what the client knows of itself", **seen["facts"])),
            _eval_copy=self._eval_copy,
        )
        return step

    def _remembering(self, step: LocalStep) -> Iterator[LocalTerm]:
        """Yield the terms, each with its memory in the step."""
        memories = cast("dict[str, Memory]", step.memory)
        for term in self._side.terms:
            step.memory = memories[term.name]
            yield term
        step.memory = cast(Memory, memories)


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first: on a GPU in one launch for each type of values.

    What comes from another device is fetched before: where that fails, nothing has been changed.
    """
    values = [value.to(place.device) for place, value in pairs]
    for kind in {(value.device, value.dtype) for value in values}:
        at = [k for k, value in enumerate(values) if (value.device, value.dtype) == kind]
        torch._foreach_copy_([pairs[k][0] for k in at], [values[k] for k in at])
