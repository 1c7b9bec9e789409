"""Adapters: what is trained of a network whose base is frozen.

The base is a constant of the model: it is built or read once in each process, travels nowhere and is charged to
nobody. What is trained is all that methods, codecs, ledgers and checkpoints see.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsweep.errors import ConfigError, unknown_name
from fedsweep.models.network import Network
from fedsweep.parameters.ranges import Checked, Count, Positive


@dataclass(frozen=True, kw_only=True)
class Adapter(Checked, ABC):
    """A way to train little of a network.

    Layers are named by their path or by its end: ``query`` is each layer whose path ends in ``.query``.

    Attributes:
        train: Layers that are trained whole.
        base: A finished run's folder or a .safetensors file: values of the frozen network; null: drawn from the seed.
        base_sha256: That file's SHA-256; a run's config.yaml has it.
    """

    section: ClassVar[str] = "model.adapter"

    train: tuple[str, ...] = ()
    base: str | None = None
    base_sha256: str | None = None

    def attach(self, network: Network) -> None:
        """Freeze a network but for what is trained, and add what the adapter has of its own.

        Args:
            network: Changed in place; new values are drawn from torch's global generator.

        Raises:
            ConfigError: A layer that is named is not there, or nothing is left to be trained.
        """
        network.requires_grad_(False)
        self.add_to(network)
        for path in matching(network, self.train, key="model.adapter.train"):
            network.get_submodule(path).requires_grad_(True)
        if not any(parameter.requires_grad for parameter in network.parameters()):
            raise ConfigError("model.adapter: nothing would be trained; name layers in train")
        # None: a part with fewer units would need a part of the adapter, too.
        network.unit_groups = tuple  # type: ignore[method-assign]
        network.hold_still()

    @abstractmethod
    def add_to(self, network: Network) -> None:
        """Add what is trained beside the network's own layers."""


@dataclass(frozen=True, kw_only=True)
class Part(Adapter):
    """Trains some of the network's own layers, as they are: with ``train: [classifier]`` it is a linear probe."""

    def add_to(self, network: Network) -> None:
        """Add nothing."""


@dataclass(frozen=True, kw_only=True)
class Lora(Adapter):
    """Adds to linear layers a product of two thin matrices: ``y = W x + b + scaling * U D x``.

    ``D`` [rank, in] is drawn as torch draws linear layers, ``U`` [out, rank] is zero, so that training begins at the
    base.

    Source: Hu et al. (2022), LoRA, section 4.1; ``scaling`` is the paper's alpha / r.

    Attributes:
        rank: Width of the matrices; the paper's r.
        scaling: Weight of the product.
        targets: Linear layers that get one; null: all of them but those that are trained whole.
    """

    rank: Count = 8
    scaling: Positive = 1.0
    targets: tuple[str, ...] | None = None

    def add_to(self, network: Network) -> None:
        """Add the matrices."""
        linear = [path for path, layer in network.named_modules() if type(layer) is nn.Linear]
        named = matching(network, self.train, key="model.adapter.train")
        # A layer that is named is trained with all that is in it.
        whole = {path for path in linear for above in named if f"{path}.".startswith(f"{above}.")}
        if self.targets is None:
            chosen = [path for path in linear if path not in whole]
        else:
            chosen = matching(network, self.targets, key="model.adapter.targets", among=linear)
        if both := sorted({*chosen} & whole):
            raise ConfigError(f"model.adapter: {both[0]!r} is in targets and in train; name it in one of them")
        if not chosen:
            raise ConfigError("model.adapter: the network has no linear layer for lora; use {kind: part, train: [...]}")
        for path in chosen:
            above, _, name = path.rpartition(".")
            layer = network.get_submodule(path)
            setattr(network.get_submodule(above), name, LoraLinear(layer, rank=self.rank, scaling=self.scaling))
        for layer in network.modules():
            if isinstance(layer, nn.TransformerEncoderLayer):
                # Its shortcut in evaluation reads the linear layers' weights and leaves out what is added to them.
                layer.activation_relu_or_gelu = 0


class LoraLinear(nn.Linear):
    """A linear layer with an addition of low rank; its weight and bias keep their names.

    Args:
        layer: The linear layer whose weight and bias it takes over.
        rank: Width of the addition.
        scaling: Weight of the addition.
    """

    def __init__(self, layer: nn.Module, *, rank: int, scaling: float) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = layer.weight, layer.bias  # type: ignore[assignment]
        self.out_features, self.in_features = self.weight.shape
        self.scaling = scaling
        # Of the layers' own type, unless that is one that nothing is trained in.
        dtype = self.weight.dtype if self.weight.dtype in (torch.float32, torch.float64) else torch.float32
        self.down = nn.Linear(self.in_features, rank, bias=False, dtype=dtype)
        self.up = nn.Linear(rank, self.out_features, bias=False, dtype=dtype)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return outputs [..., out] of inputs [..., in]."""
        added: Tensor = self.up(self.down(inputs.to(self.down.weight.dtype)))
        return super().forward(inputs) + (self.scaling * added).to(inputs.dtype)


def matching(network: nn.Module, names: Iterable[str], *, key: str, among: Iterable[str] | None = None) -> list[str]:
    """Return paths of layers that names mean, each once, in the network's order.

    Args:
        network: Whose layers.
        names: A path, or its end after a dot.
        key: Where they were given, for messages.
        among: Paths that may be meant; None: all that have parameters.

    Raises:
        ConfigError: A name means none of them.
    """
    if among is None:
        among = [path for path, layer in network.named_modules() if path and any(True for _ in layer.parameters())]
    paths, meant = list(among), set()
    for name in names:
        alike = [path for path in paths if path == name or path.endswith(f".{name}")]
        if not alike:
            raise ConfigError(f"{key}: {unknown_name('layer', name, paths)}")
        meant.update(alike)
    return [path for path in paths if path in meant]


ADAPTERS: Mapping[str, type[Adapter]] = {"lora": Lora, "part": Part}
