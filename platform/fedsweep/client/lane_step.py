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

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fedsweep.client.flat_module import ModuleSlot
from fedsweep.client.lane_draws import LaneDraws, drawn_shapes
from fedsweep.client.lane_optimizer import LaneOptimizer
from fedsweep.client.messages import ClientSide
from fedsweep.client.optimizer import ClientOptimizer
from fedsweep.components.local import ClientFacts, LocalStep, LocalTerm, Memory
from fedsweep.records import Payload
from fedsweep.streams import Stream
from fedsweep.trees import ParamTree

# Rows begin at multiples of this many values: no kernel sees one lane at another alignment than the next.
_ALIGNED = 16
# What F.cross_entropy leaves out of its mean.
_NO_TARGET = -100
# Stands for a tensor in a tree of what is no tensor.
_TENSOR = "<tensor>"


@dataclass(frozen=True, kw_only=True)
class Lane:
    """What a client brings to a joint step.

    Attributes:
        facts: What it knows of itself.
        slot: A module of that size.
        vector: Its values [V]; changed.
        optimizer: Its optimiser; the state is changed.
        anchor: The model that it last received [V]; None where nobody asks for it.
        memories: What its terms remember.
        broadcast: What came with the model.
        learning_rate: The round's.
        first: Number within the round of the first step that is due.
        sizes: Samples of each step that is due.
        batch: Inputs and targets of a step, by its number within the round.
        seed: Of the network's own draws, likewise.
    """

    facts: ClientFacts
    slot: ModuleSlot
    vector: Tensor
    optimizer: ClientOptimizer
    anchor: Tensor | None
    memories: Mapping[str, Memory]
    broadcast: Payload
    learning_rate: float
    first: int
    sizes: Sequence[int]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    seed: Callable[[int], int]

    @property
    def batch_size(self) -> int:
        """B: samples of a full batch."""
        assert self.facts.work is not None
        return self.facts.work.batch_size

    @property
    def is_padded(self) -> bool:
        """Whether some batch that is due is smaller than the others."""
        return any(size != self.batch_size for size in self.sizes)

    def given(self) -> tuple[list[Tensor], Any]:
        """The tensors among its memories and what came with the model, and a tree of the rest that they fit into."""
        leaves, spec = pytree.tree_flatten((dict(self.memories), dict(self.broadcast)))
        leaves = [torch.from_numpy(np.array(leaf)) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return tensors, (spec, tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves))

    def key(self) -> Hashable:
        """Equal for clients that can be stepped together."""
        tensors, (spec, others) = self.given()
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors)
        return self.facts.submodel.shape(), self.batch_size, self.anchor is None, str(spec), repr(others), shapes


@dataclass(frozen=True, kw_only=True)
class Taken:
    """The steps that a client has taken in a lane.

    Attributes:
        losses: One per step.
        hits: Samples that each step's forward pass classified rightly.
    """

    losses: Sequence[float]
    hits: Sequence[int]


class _Seen:
    """Some attributes, as tensors; whoever asks for another learns that lanes have no such thing."""

    def __init__(self, what: str, **attributes: Any) -> None:
        self.__dict__.update(attributes, _what=what)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{self._what} ({name}) is asked for, which clients in lanes can't have")


class _Asking(nn.Module):
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
    """

    def __init__(self, side: ClientSide, pattern: Lane, width: int) -> None:
        self._side, self._width, self._layout = side, width, pattern.slot.layout
        layout, self._device = self._layout, pattern.vector.device
        aligned = -(-layout.num_values // _ALIGNED) * _ALIGNED
        self._rows = self._zeros(aligned)[:, : layout.num_values]
        self._gradients = self._zeros(aligned)[:, : layout.num_params]
        self._optimizer = LaneOptimizer(side.optimizer, self._rows, self._gradients, layout=layout)
        self._anchors = None if pattern.anchor is None else torch.zeros_like(self._rows)
        self._params, self._grads, self._buffers = self._bound()
        tensors, (self._spec, self._others) = pattern.given()
        self._given = [self._zeros(*t.shape, dtype=t.dtype) for t in tensors]
        inputs, _ = pattern.batch(pattern.first)
        self._inputs = self._zeros(pattern.batch_size, *inputs.shape[1:], dtype=inputs.dtype)
        self._targets = self._zeros(pattern.batch_size, dtype=torch.int64)
        self._positions = self._zeros(dtype=torch.int64)
        self._active = torch.ones(width, dtype=torch.bool, device=self._device)
        self._asking = _Asking(pattern.slot.module)
        self._twin = pattern.slot.twin if any(has_own(term, "loss") for term in side.terms) else None
        if self._twin is not None:
            self._twin()  # made now: in a lane the module has no values that could be copied
        full = inputs[:1].expand(pattern.batch_size, *inputs.shape[1:])
        shapes = drawn_shapes(pattern.slot.module, layout.model(pattern.vector.clone()), full)
        self._draws = LaneDraws(shapes, self._zeros)

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(self._width, *shape, dtype=dtype or self._layout.dtype, device=self._device)

    def _bound(self) -> tuple[ParamTree, ParamTree, ParamTree]:
        """By name [K, ...]: params, which are views of the rows; their gradients; and buffers."""
        params, gradients, buffers = self._tree(self._rows), self._tree(self._gradients), {}
        for name in [name for name in params if name not in gradients]:
            # Of their own: batch norm changes its statistics in place, and vmap does so in a copy of what is not dense.
            buffers[name] = params.pop(name).clone()
        return {name: value.detach().requires_grad_() for name, value in params.items()}, gradients, buffers

    def _tree(self, rows: Tensor) -> ParamTree:
        """The tensors by name [K, ...] as views into rows [K, V], or [K, P] of params alone; riders are left out."""
        layout = self._layout
        end = min(rows.shape[1], layout.num_params + layout.num_buffers)
        shapes = zip(layout.places().items(), layout.shapes, strict=True)
        return {name: rows[:, at].view(len(rows), *shape) for (name, at), shape in shapes if at.stop <= end}

    def run(self, lanes: Sequence[Lane]) -> tuple[list[list[float]], list[list[int]]]:
        """Take the steps that are due; where one can't be had, no client has been changed.

        Args:
            lanes: Up to K clients.

        Returns:
            For each lane the losses of its steps, and how many samples of each were classified rightly. Of a client
            with fewer steps than another only as many as it took mean something.
        """
        self._load(lanes)
        steps = [self._step_at(tick) for tick in range(max(len(lane.sizes) for lane in lanes))]
        # Read once: on a GPU each reading would wait for all that was asked of it before.
        losses, hits = (torch.stack(column, dim=1).tolist() for column in zip(*steps, strict=True))
        self._store()
        return losses, hits

    def _step_at(self, tick: int) -> tuple[Tensor, Tensor]:
        return self._taken(idle=self._next_batch(tick))

    # -- clients in and out --------------------------------------------------------------------------------------

    def _load(self, lanes: Sequence[Lane]) -> None:
        """Take up to K clients; the first one stands in for those that are missing."""
        self._lanes = [*lanes, *[lanes[0]] * (self._width - len(lanes))]
        for k, lane in enumerate(self._lanes):
            self._rows[k].copy_(lane.vector)
            self._optimizer.load(k, lane.optimizer.live())
            if self._anchors is not None and lane.anchor is not None:
                self._anchors[k].copy_(lane.anchor)
            for held, tensor in zip(self._given, lane.given()[0], strict=True):
                held[k].copy_(tensor)
        for name, buffer in self._buffers.items():
            buffer.copy_(self._tree(self._rows)[name])
        self._asking.train()
        first, facts = lanes[0], [lane.facts for lane in self._lanes]
        self._optimizer.rate.fill_(first.learning_rate)
        self._learning_rate, self._round = first.learning_rate, first.facts.round
        self._facts = {
            "client": torch.tensor([fact.client for fact in facts], device=self._device),
            "num_samples": torch.tensor([fact.num_samples for fact in facts], device=self._device),
            "label_counts": torch.stack([fact.label_counts for fact in facts]).to(self._device),
        }
        if facts[0].told_share is not None:
            shares = [fact.told_share for fact in facts]
            self._facts["share"] = torch.tensor(shares, dtype=self._layout.dtype, device=self._device)

    def _store(self) -> None:
        """Give the clients their values and optimiser state back."""
        for name, buffer in self._buffers.items():
            self._tree(self._rows)[name].copy_(buffer)
        for k, lane in reversed([*enumerate(self._lanes)]):  # the first one last: its stand-ins have the same
            lane.vector.copy_(self._rows[k])
            self._optimizer.store(k, lane.optimizer.live())

    def _next_batch(self, tick: int) -> bool:
        """Lay out the batches of the step ``tick``, counted from the first that is due; says whether some have none."""
        has_one = [tick < len(lane.sizes) for lane in self._lanes]
        for k, lane in enumerate(self._lanes):
            if not has_one[k]:
                continue  # it goes on with its last batch, to no effect
            position, size = lane.first + tick, lane.sizes[tick]
            inputs, targets = lane.batch(position)
            self._inputs[k, :size].copy_(inputs)
            self._targets[k, :size].copy_(targets)
            if size < lane.batch_size:
                self._inputs[k, size:] = inputs[0]
                self._targets[k, size:] = _NO_TARGET
            self._draws.draw(k, lane.seed(position), size)
        self._positions.copy_(torch.tensor([lane.first + tick for lane in self._lanes]))
        self._active.copy_(torch.tensor(has_one))
        return not all(has_one)

    # -- a step --------------------------------------------------------------------------------------------------

    def _taken(self, *, idle: bool) -> tuple[Tensor, Tensor]:
        """One step of all lanes.

        Args:
            idle: Some lanes have no batch and stay as they are.

        Returns:
            The losses at its start [K], and how many samples were classified rightly [K]; 0 where nobody asks.
        """
        values = [self._rows, *self._buffers.values(), *self._optimizer.slots.values()]
        before = [value.clone() for value in values] if idle else []
        losses, hits = self._losses()
        found = torch.autograd.grad(losses.sum(), list(self._params.values()), allow_unused=True)
        with torch.no_grad():
            for place, gradient in zip(self._grads.values(), found, strict=True):
                place.zero_() if gradient is None else place.copy_(gradient)
            self._add_terms()
            self._optimizer.step()
            for value, old in zip(values, before, strict=idle):
                active = self._active.view(-1, *[1] * (value.dim() - 1))
                value.copy_(torch.where(active, value, old))
        return losses.detach(), hits

    def _losses(self) -> tuple[Tensor, Tensor]:
        def lane(params: ParamTree, buffers: ParamTree, noise: list[Tensor], seen: dict[str, Any]) -> Any:
            def ask(module: nn.Module) -> tuple[Tensor, Tensor]:
                with self._draws.given(noise):
                    return self._loss(self._step(seen, module, params))

            values = {f"module.{name}": value for name, value in (params | buffers).items()}
            return torch.func.functional_call(self._asking, values, (ask,), strict=False)

        seen = self._seen() | {"inputs": self._inputs, "targets": self._targets}
        losses, hits = torch.func.vmap(lane)(self._params, self._buffers, self._draws.noise, seen)
        return losses, hits

    def _loss(self, step: LocalStep) -> tuple[Tensor, Tensor]:
        loss = self._side.objective.loss(step)
        for term in self._remembering(step):
            extra = term.loss(step)
            if extra is not None:
                loss = loss + extra
        hits = loss.new_zeros(())
        if self._side.track_accuracy:
            hits = (step.logits.detach().argmax(1) == step.targets).sum()
        return loss, hits

    def _add_terms(self) -> None:
        """Add what the terms add to the gradients. They see the parameters, not the batch."""
        if not any(has_own(term, "gradient") for term in self._side.terms):
            return

        def lane(params: ParamTree, seen: dict[str, Any]) -> list[ParamTree]:
            step = self._step(seen, self._asking.module, params)
            return [term.gradient(step) or {} for term in self._remembering(step)]

        params = {name: value.detach() for name, value in self._params.items()}
        for tree in torch.func.vmap(lane)(params, self._seen()):
            for name, value in tree.items():
                self._grads[name].add_(value)

    def _seen(self) -> dict[str, Any]:
        """What differs between lanes beside their values, as vmap takes it."""
        anchors = {} if self._anchors is None else self._tree(self._anchors)
        return {"anchor": anchors, "given": self._given, "position": self._positions, "facts": self._facts}

    def _step(self, seen: dict[str, Any], module: nn.Module, params: ParamTree) -> LocalStep:
        """The step as one lane's objective and terms see it; what they can't see has no attributes."""
        rest = iter(seen["given"])
        leaves = [next(rest) if other is _TENSOR else other for other in self._others]
        memories, broadcast = pytree.tree_unflatten(leaves, self._spec)
        step = LocalStep(
            inputs=seen.get("inputs"),  # type: ignore[arg-type]
            targets=seen.get("targets"),  # type: ignore[arg-type]
            model=module,
            params=params,
            anchor=seen["anchor"],
            memory=memories,
            broadcast=broadcast,
            stream=cast(Stream, _Seen("a stream of random numbers")),
            position=seen["position"],
            learning_rate=self._learning_rate,
            client=cast(ClientFacts, _Seen("what the client knows of itself", round=self._round, **seen["facts"])),
            _twin=self._twin,
        )
        return step

    def _remembering(self, step: LocalStep) -> Iterator[LocalTerm]:
        """The terms, each with its memory in the step."""
        memories = cast("dict[str, Memory]", step.memory)
        for term in self._side.terms:
            step.memory = memories[term.name]
            yield term
        step.memory = cast(Memory, memories)


def has_own(term: LocalTerm, hook: str) -> bool:
    """Whether a term does something there."""
    return getattr(type(term), hook) is not getattr(LocalTerm, hook)
