"""A part of the full model: how it is cut from the full vector, and how it is put back.

A sub-model really is smaller: ``extract`` gives the vector that travels, ``embed`` puts a client's vector back to full
shape together with which coordinates it covers.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedsweep.errors import InvariantError
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
    """A part of the full model. Picklable; equal content gives an equal :meth:`key`.

    Class attributes:
        withholds: Of what the client trains, in full shape, it is sent what :meth:`embed` covers alone.
    """

    withholds: ClassVar[bool] = False

    @abstractmethod
    def key(self) -> str:
        """Return a short name of the content, for caching and for checkpoints."""

    def shape(self) -> str:
        """Return a key of the module for the part's values, whatever units it holds; by default the part's own key."""
        return self.key()

    @abstractmethod
    def layout(self, full: FlatLayout) -> FlatLayout:
        """Lay this part out in its own, smaller vector."""

    @abstractmethod
    def extract(self, vector: Tensor, full: FlatLayout) -> Tensor:
        """Cut the part's vector from the full one; a new tensor, or the full one itself where nothing is cut."""

    @abstractmethod
    def embed(self, vector: Tensor, full: FlatLayout) -> Covered:
        """Return the part put back to full shape."""

    def stays(self, vector: Tensor, full: FlatLayout) -> Covered:
        """Embed, as :meth:`embed` does, the values that stay on the client between its rounds, travelling or not.

        Args:
            vector: [V of the part].
            full: The full model's layout.
        """
        return self.embed(vector, full)

    @abstractmethod
    def build(self, model: nn.Module) -> nn.Module:
        """Return a module of the part's size, from the full template; the template itself where nothing is cut."""

    def message(self, full: FlatLayout, direction: Direction) -> Mapping[str, int]:
        """Return scalars of a message that carries the part, by kind; what travels may be less than what is trained.

        Args:
            full: The full model's layout.
            direction: Whether the part goes to the client or comes back.
        """
        part = self.layout(full)
        return {"params": part.num_params, "buffers": part.num_buffers, "optimizer": part.num_riders}

    def index_bytes(self) -> int:
        """Return bytes of masks or index lists that travel down with the part, as packed."""
        return 0

    def densities(self, full: FlatLayout) -> Mapping[str, float]:
        """Return the shares of tensors that cost something in a forward pass, where zeros cost nothing; else 1."""
        return {}

    @property
    def step_parts(self) -> Sequence[SubModel] | None:
        """Parts of this part's own model that the round's local steps train; the full model: all of it.

        None: every step trains all of it.
        """
        return None

    @property
    def scales_steps(self) -> bool:
        """Tell whether :meth:`step_scale` gives anything."""
        return False

    def step_scale(self, full: FlatLayout) -> Tensor | None:
        """Return the scale in which the client takes its steps [P of the part]; None: the server's.

        A step of SGD on ``values / scale`` is one on the values whose gradient is multiplied by ``scale ** 2``. So what
        travels and what is kept, momentum too, stays in the server's scale, and what no step moves comes back as it
        was sent.

        Args:
            full: The full model's layout.
        """
        return None

    def unscaled(self, move: Tensor, full: FlatLayout) -> Tensor:
        """Return a move [V of the part] as the gradients alone would have made it, without :meth:`step_scale`.

        Weight decay, which has no scale, is taken for a part of the gradient.

        Args:
            move: Made by steps of SGD.
            full: The full model's layout.
        """
        if (scale := self.step_scale(full)) is None:
            return move
        return torch.cat([move[: len(scale)] / scale.square(), move[len(scale) :]])

    def trained(self) -> Sequence[tuple[SubModel, float]]:
        """Return the parts of the full model that a sample trains, and how often each, in the round's mean."""
        return ((self, 1.0),)


class _InFullShape(SubModel):
    """A part of which the client has a module and a vector of the full model's size."""

    def layout(self, full: FlatLayout) -> FlatLayout:
        return full

    def extract(self, vector: Tensor, full: FlatLayout) -> Tensor:
        return vector

    def build(self, model: nn.Module) -> nn.Module:
        return model


@dataclass(frozen=True, kw_only=True)
class FullModel(_InFullShape):
    """The whole model."""

    def key(self) -> str:
        return "full"

    def embed(self, vector: Tensor, full: FlatLayout) -> Covered:
        return Covered(vector=vector, cover=None)


FULL_MODEL = FullModel()


@dataclass(frozen=True, kw_only=True)
class PartOfModel(_InFullShape):
    """The whole model, of which only some tensors travel: the others belong to the client.

    The client has a module and a vector of full size. In what does not travel it finds the server's values, which stay
    the initial ones since no client covers them; whoever wants the client to go on with its own puts them there at a
    job's start (``LocalTerm.prepare``).

    Attributes:
        names: Of the params and float buffers that travel.
    """

    withholds: ClassVar[bool] = True
    names: frozenset[str]

    def key(self) -> str:
        return f"part {hashlib.blake2b(repr(sorted(self.names)).encode(), digest_size=16).hexdigest()}"

    def embed(self, vector: Tensor, full: FlatLayout) -> Covered:
        """Return the vector, of which what travels is covered.

        Raises:
            InvariantError: The model has no tensor of such a name.
        """
        cover = torch.zeros(full.num_values, dtype=torch.bool)
        own = full.model(cover)
        unknown = sorted(self.names - own.keys())
        if unknown:
            raise InvariantError(f"the model has no params or float buffers called {', '.join(unknown)}")
        for name in self.names:
            own[name].fill_(True)
        return Covered(vector=vector, cover=_with_riders(cover, full))

    def stays(self, vector: Tensor, full: FlatLayout) -> Covered:
        return Covered(vector=vector, cover=None)

    def message(self, full: FlatLayout, direction: Direction) -> Mapping[str, int]:
        return _sizes(self, full)


@dataclass(frozen=True, kw_only=True, eq=False)
class ElementMask(_InFullShape):
    """The whole model with only some of its params alive: the others are zero, and do not travel.

    The client has a module and a vector of full size; whoever wants the others to stay zero while it trains sets them
    to zero after each step.

    Attributes:
        mask: Which params are alive (bool [P]).
        fresh: The client does not know the mask: it travels down with the model, a bit for each param that it decides.
        num_maskable: How many of the params it decides; None: all.
        saves_work: Layers cost what their alive weights do, as kernels for sparse weights would have it; otherwise they
            cost what they do without a mask.
    """

    mask: Tensor
    fresh: bool = True
    num_maskable: int | None = None
    saves_work: bool = False

    def key(self) -> str:
        packed = np.packbits(self.mask.cpu().numpy())
        return f"mask {self.saves_work} {hashlib.blake2b(packed.tobytes(), digest_size=16).hexdigest()}"

    def shape(self) -> str:
        return FULL_MODEL.key()

    def extract(self, vector: Tensor, full: FlatLayout) -> Tensor:
        mask = self.mask.to(vector.device)
        part = vector.clone()
        part[: full.num_params].mul_(mask)
        for view in _riders(part, full):
            if view.shape == mask.shape:
                view.mul_(mask)
        return part

    def embed(self, vector: Tensor, full: FlatLayout) -> Covered:
        cover = torch.ones(full.num_values, dtype=torch.bool)
        cover[: full.num_params] = self.mask
        return Covered(vector=vector, cover=_with_riders(cover, full))

    def message(self, full: FlatLayout, direction: Direction) -> Mapping[str, int]:
        return _sizes(self, full)

    def densities(self, full: FlatLayout) -> Mapping[str, float]:
        if not self.saves_work:
            return {}
        return {name: float(alive.double().mean()) for name, alive in full.params(self.mask).items()}

    def index_bytes(self) -> int:
        return -(-(self.mask.numel() if self.num_maskable is None else self.num_maskable) // 8) if self.fresh else 0


def _riders(vector: Tensor, full: FlatLayout) -> list[Tensor]:
    """Return optimiser state that moves with the model, a value per param or one: views into a vector [V]."""
    model = full.model(vector)
    return [view for name, view in full.views(vector).items() if name not in model]


def _with_riders(cover: Tensor, full: FlatLayout) -> Tensor:
    """Return a cover in which optimiser state that moves with the model is covered as its params are."""
    of_params = cover[: full.num_params]
    for view in _riders(cover, full):  # one value is a count, which goes with any param
        view.copy_(of_params if view.shape == of_params.shape else of_params.any())
    return cover


def _sizes(part: SubModel, full: FlatLayout) -> Mapping[str, int]:
    """Return scalars by kind of what a part in the full model's shape covers."""
    cover = part.embed(torch.empty(full.num_values, dtype=torch.bool), full).cover
    assert cover is not None
    kinds = torch.split(cover, [full.num_params, full.num_buffers, full.num_riders])
    return {kind: int(size.sum()) for kind, size in zip(("params", "buffers", "optimizer"), kinds, strict=True)}
