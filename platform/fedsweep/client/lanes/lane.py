"""Records between a client and the lanes that it is stepped in."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fedsweep.client.modules import BoundModule
from fedsweep.client.optimizer import ClientOptimizer
from fedsweep.components.local import ClientFacts, Memory
from fedsweep.records import Payload
from fedsweep.trees import Inputs

# Stands for a tensor in a tree of what is no tensor.
TENSOR = "<tensor>"


@dataclass(frozen=True, kw_only=True, eq=False)
class Lane:
    """A client's part in a joint step; equal to itself alone.

    Attributes:
        facts: What it knows of itself; one object in all its parts of a round.
        slot: The module of its sub-model's size.
        vector: Its values [V]; changed.
        optimizer: Its optimiser; the state is changed.
        anchor: The model that it last received [V]; None where nobody asks for it.
        memories: What its terms remember.
        broadcast: What came with the model.
        learning_rate: The round's.
        first: Number within the round of the first step that is due.
        sizes: Samples of each step that is due.
        all_sizes: The same of any steps of the round, by the number of the first within it and how many they are.
        batches: Inputs and targets of some steps, one after another [sum of B, ...], by the number of the first within
            the round and how many they are.
        seed: Of the network's own draws, likewise.
    """

    facts: ClientFacts
    slot: BoundModule
    vector: Tensor
    optimizer: ClientOptimizer
    anchor: Tensor | None
    memories: Mapping[str, Memory]
    broadcast: Payload
    learning_rate: float
    first: int
    sizes: Sequence[int]
    all_sizes: Callable[[int, int], Sequence[int]]
    batches: Callable[[int, int], tuple[Inputs, Tensor]]
    seed: Callable[[int], int]

    @property
    def batch_size(self) -> int:
        """B: samples of a full batch."""
        assert self.facts.work is not None
        return self.facts.work.batch_size

    def sizes_from(self, tick: int, steps: int) -> Sequence[int]:
        """Return samples of up to so many steps from the tick-th due on, those behind the next sync point included.

        Of these only full batches, as far as they follow one another: a smaller one may have to be stepped alone.
        """
        due = self.sizes[tick : tick + steps]
        if len(due) == steps:
            return due
        coming = self.all_sizes(self.first + tick + len(due), steps - len(due))
        return [*due, *takewhile(lambda size: size == self.batch_size, coming)]

    @property
    def is_padded(self) -> bool:
        """Tell whether some batch that is due is smaller than the others."""
        return any(size != self.batch_size for size in self.sizes)

    @cached_property
    def companions(self) -> tuple[list[Tensor], Any]:
        """The tensors among memories and broadcast, and their tree: its pytree spec, and its other leaves."""
        leaves, spec = pytree.tree_flatten((dict(self.memories), dict(self.broadcast)))
        leaves = [torch.tensor(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        return tensors, (spec, tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves))

    @cached_property
    def fact_tensors(self) -> dict[str, Tensor]:
        """The client's facts, and the number of its first step due, as tensors by name."""
        facts = self.facts
        values: dict[str, Tensor] = {
            "client": torch.tensor(facts.client),
            "round": torch.tensor(facts.round),
            "num_samples": torch.tensor(facts.num_samples),
            "label_counts": facts.label_counts,
            "position": torch.tensor(self.first),
        }
        if facts.told_share is not None:
            values["share"] = torch.tensor(facts.told_share, dtype=self.vector.dtype)
        return values

    def key(self) -> Hashable:
        """Return a key that is equal for clients that can be stepped together."""
        tensors, (spec, others) = self.companions
        shapes = tuple((tuple(t.shape), t.dtype) for t in tensors)
        return self.facts.submodel.shape(), self.batch_size, self.anchor is None, str(spec), repr(others), shapes


@dataclass(frozen=True, kw_only=True)
class LaneSteps:
    """The steps that a client has taken in a lane.

    Attributes:
        losses: One per step.
        hits: Samples that each step's forward pass classified rightly.
        is_finite: No value of its vector is infinite or NaN after them.
    """

    losses: Sequence[float]
    hits: Sequence[int]
    is_finite: bool
