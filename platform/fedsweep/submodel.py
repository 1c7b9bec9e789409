"""A part of the full model: how it is cut from the full vector, and how it is put back.

A sub-model really is smaller: ``extract`` gives the vector that travels, ``embed`` puts a client's vector back to full
shape together with which coordinates it covers.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedsweep.trees import FlatLayout

Direction = Literal["up", "down"]


@dataclass(frozen=True, kw_only=True)
class Covered:
    """A client's model in full shape.

    Attributes:
        vector: [V]; what is not covered is arbitrary.
        cover: Which coordinates the client holds (bool [V]), or None for all.
    """

    vector: Tensor
    cover: Tensor | None


class SubModel(ABC):
    """A part of the full model. Picklable; equal content gives an equal :meth:`key`."""

    @abstractmethod
    def key(self) -> str:
        """A short name of the content, for caching and for checkpoints."""

    def shape(self) -> str:
        """Equal for parts whose values go into one module, whatever units they hold; by default for equal ones."""
        return self.key()

    @abstractmethod
    def layout(self, full: FlatLayout) -> FlatLayout:
        """How this part lies in its own, smaller vector."""

    @abstractmethod
    def extract(self, vector: Tensor, full: FlatLayout) -> Tensor:
        """The part's vector, cut from the full one; a new tensor, or the full one itself where nothing is cut."""

    @abstractmethod
    def embed(self, vector: Tensor, full: FlatLayout) -> Covered:
        """The part put back to full shape."""

    @abstractmethod
    def build(self, model: nn.Module) -> nn.Module:
        """A module of the part's size, from the full template; the template itself where nothing is cut."""

    def message(self, full: FlatLayout, direction: Direction) -> Mapping[str, int]:
        """Scalars of a message that carries the part, by kind; what travels may be less than what is trained.

        Args:
            full: The full model's layout.
            direction: Whether the part goes to the client or comes back.
        """
        part = self.layout(full)
        return {"params": part.num_params, "buffers": part.num_buffers, "optimizer": part.num_riders}

    def index_bytes(self) -> int:
        """Bytes of masks or index lists that travel down with the part, as packed."""
        return 0

    def at_step(self, position: int) -> SubModel:
        """What a local step trains of this part, as a part of the part's own model; the full model: all of it.

        Args:
            position: The step's number within the round, from 0.
        """
        return FULL_MODEL

    def trained(self) -> Sequence[tuple[SubModel, float]]:
        """What a sample goes through in training: parts of the full model, and how often each, in the round's mean."""
        return ((self, 1.0),)


@dataclass(frozen=True, kw_only=True)
class FullModel(SubModel):
    """The whole model."""

    def key(self) -> str:
        return "full"

    def layout(self, full: FlatLayout) -> FlatLayout:
        return full

    def extract(self, vector: Tensor, full: FlatLayout) -> Tensor:
        return vector

    def embed(self, vector: Tensor, full: FlatLayout) -> Covered:
        return Covered(vector=vector, cover=None)

    def build(self, model: nn.Module) -> nn.Module:
        return model


FULL_MODEL = FullModel()


@dataclass(frozen=True, kw_only=True, eq=False)
class ElementMask(SubModel):
    """The whole model with only some of its params alive: the others are zero, and do not travel.

    The client has a module and a vector of full size; whoever wants the others to stay zero while it trains sets them
    to zero after each step.

    Attributes:
        mask: Which params are alive (bool [P]).
        fresh: The client does not know the mask: it travels down with the model, a bit for each param.
    """

    mask: Tensor
    fresh: bool = True

    def key(self) -> str:
        packed = np.packbits(self.mask.cpu().numpy())
        return f"mask {hashlib.blake2b(packed.tobytes(), digest_size=16).hexdigest()}"

    def shape(self) -> str:
        return FULL_MODEL.key()

    def layout(self, full: FlatLayout) -> FlatLayout:
        return full

    def extract(self, vector: Tensor, full: FlatLayout) -> Tensor:
        part = vector.clone()
        part[: full.num_params].mul_(self.mask)
        return part

    def embed(self, vector: Tensor, full: FlatLayout) -> Covered:
        cover = torch.ones(full.num_values, dtype=torch.bool)
        cover[: full.num_params] = self.mask
        return Covered(vector=vector, cover=cover)

    def build(self, model: nn.Module) -> nn.Module:
        return model

    def message(self, full: FlatLayout, direction: Direction) -> Mapping[str, int]:
        return {**super().message(full, direction), "params": int(self.mask.sum())}

    def index_bytes(self) -> int:
        return -(-self.mask.numel() // 8) if self.fresh else 0
