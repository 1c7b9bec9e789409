"""Decoders on the server: from latent vectors to inputs, trained on whatever inputs the server has.

Shape letters: B inputs, L latent width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep import ConfigError, Stream
from fedsweep.components import (
    Adam,
    Checked,
    Count,
    CountOrZero,
    ServerContext,
    SyncContext,
    layer_costs,
    training_flops,
)

from .distilling import batches
from .ensembles import server_inputs

Values = Mapping[str, Tensor]


def server_images(context: ServerContext | SyncContext, method: str) -> Tensor:
    """Return the proxy data's inputs, which are images.

    Raises:
        ConfigError: There are none.
    """
    inputs = server_inputs(context, method)
    if not isinstance(inputs, Tensor) or inputs.dim() != 4:
        raise ConfigError(f"{method} decodes images, but samples of the scenario are none; choose another method")
    return inputs


class _Autoencoder(nn.Module):
    """A variational autoencoder of two strided convolutions, and two that are laid out twice as large."""

    def __init__(self, shape: tuple[int, int, int], latent_width: int, width: int) -> None:
        super().__init__()
        channels, self._height, self._width = shape
        self._small = (width, math.ceil(self._height / 4), math.ceil(self._width / 4))
        size = math.prod(self._small)
        self.encoder = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(size, 2 * latent_width),
        )
        self.start = nn.Linear(latent_width, size)
        self.middle = nn.Conv2d(width, width, 3, padding=1)
        self.end = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the inputs [B, ...] as their latents' means give them back."""
        return self.decode(self.encode(inputs)[0])

    def encode(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the latents' means and the logs of their variances, each [B, L]."""
        both = self.encoder(inputs)
        width = both.shape[1] // 2
        return both[:, :width], both[:, width:]  # torch's lazy device would give chunks on the CPU

    def decode(self, latents: Tensor) -> Tensor:
        hidden = self.start(latents).relu().unflatten(1, self._small)
        hidden = self.middle(F.interpolate(hidden, scale_factor=2.0)).relu()
        images: Tensor = self.end(F.interpolate(hidden, scale_factor=2.0))
        # Sides were rounded up on the way down, so what comes back may be larger.
        return images[:, :, : self._height, : self._width]


@dataclass(frozen=True, kw_only=True)
class SmallDecoder(Checked):
    """The decoder half of a small convolutional variational autoencoder; its latents are standard normal.

    Attributes:
        latent_width: Of the decoder, at least 1.
        decoder_steps: Steps that train the decoder on the server's inputs, at least 0; 0: it stays random.
        width: Channels inside, at least 1.
        batch_size: Inputs of each.

    Source: Kingma, Welling (2014): Auto-encoding variational Bayes. ICLR.
    """

    latent_width: Count = 64
    decoder_steps: CountOrZero = 1000
    width: int = 32
    batch_size: int = 64

    def _module(self, like: Tensor, source: Stream) -> _Autoencoder:
        channels, height, width = (int(size) for size in like.shape[1:])
        # Layers draw what they start with from the global generator, which is as it was afterwards.
        with source.child("decoder").drawn_globally(bits=56):
            return _Autoencoder((channels, height, width), self.latent_width, self.width).to(like.dtype)

    def trained(self, inputs: Tensor, sync: SyncContext) -> Values:
        """Train on the server's inputs [S, ...] in Adam steps at 1e-3, and return the values; called once."""
        device = torch.device(sync.device)
        module = self._module(inputs, sync.stream).to(device)
        optimizer = Adam(module.parameters(), lr=1e-3, foreach=False)
        orders = batches(len(inputs), self.batch_size, sync.stream.child("decoder batches"), steps=self.decoder_steps)
        draws, layers = sync.stream.child("decoder noise").torch(), self._macs(inputs)
        for number, index in enumerate(orders, start=1):
            batch = inputs[index].to(device)
            mean, spread = module.encode(batch)
            noise = torch.randn(mean.shape, generator=draws, dtype=mean.dtype).to(device)
            decoded = module.decode(mean + (0.5 * spread).exp() * noise)
            error = (decoded - batch).square().flatten(1).sum(dim=1).mean()
            prior = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(dim=1).mean()
            optimizer.zero_grad()
            (error + prior).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            sync.count_flops(training_flops(sum(layers.values()), len(index)))
            if number % 100 == 0:
                sync.working(f"training the decoder: step {number} of {self.decoder_steps}, error {float(error):.4f}")
        return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}

    def latents(self, count: int, source: Stream) -> Tensor:
        """Return latent vectors [count, L] as they are valid."""
        return torch.randn(count, self.latent_width, generator=source.torch())

    def decode(self, values: Values, latents: Tensor, like: Tensor) -> Tensor:
        """Return inputs [B, ...] of latent vectors [B, L], shaped as those of ``like``."""
        module = self._module(like, Stream(("any",)))
        # Nothing of its start is left, so any stream will do.
        module.load_state_dict(dict(values))
        with torch.no_grad():
            return module.decode(latents.to(like.dtype))

    def decode_flops(self, like: Tensor) -> float:
        """Return the FLOPs of decoding one latent vector."""
        macs = sum(macs for name, macs in self._macs(like).items() if not name.startswith("encoder."))
        return training_flops(macs, 1, passes=1)

    def _macs(self, like: Tensor) -> dict[str, int]:
        """Return multiply-accumulates of an input's way there and back, by layer."""
        channels, height, width = (int(size) for size in like.shape[1:])
        costs = layer_costs(self._module(like, Stream(("any",))), (channels, height, width))
        return {name: macs for name, (macs, _) in costs.items()}
