"""Networks that make their inputs again: for the tasks without targets.

Shape letters: B samples, D values of a sample, W hidden units, Z numbers of a code.
"""

from __future__ import annotations

from math import prod
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep.errors import ConfigError
from fedsweep.models.network import InputShape, Network
from fedsweep.parameters.ranges import Count, InnerShare


class _Autoencoder(Network):
    """Two stacks of linear layers with ReLU between them."""

    has_features = False

    def __init__(self, *, input_shape: InputShape, num_classes: int) -> None:
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        self.num_values = prod(self.input_shape)


@final
class Vae(_Autoencoder):
    """A variational autoencoder: D values to W hidden units to a code's mean and variance, and the same way back.

    Gives the task ``generative`` [B, D + 2 Z]. In training the code is drawn, otherwise it is its mean.

    Source: Kingma and Welling (2014), Auto-encoding variational Bayes, section 3 and appendix C.2.

    Args:
        input_shape: Of one sample.
        num_classes: D + 2 Z.
        hidden_width: W, at least 1.
    """

    def __init__(self, *, input_shape: InputShape, num_classes: int, hidden_width: Count = 64) -> None:
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        latent, odd = divmod(num_classes - self.num_values, 2)
        if latent < 1 or odd:
            raise ConfigError(
                f"model 'vae' makes {self.num_values} values and two for each of a code's numbers, but the task asks"
                f" for {num_classes} outputs; set scenario.task to {{kind: generative, latent: 8}}"
            )
        self.encoder = nn.Sequential(nn.Linear(self.num_values, hidden_width), nn.ReLU())
        self.code = nn.Linear(hidden_width, 2 * latent)
        self.decoder = nn.Sequential(
            nn.Linear(latent, hidden_width), nn.ReLU(), nn.Linear(hidden_width, self.num_values)
        )

    @property
    def feature_width(self) -> int:
        return self.code.out_features

    def features(self, inputs: Tensor) -> Tensor:
        """Return the code's means and logarithms of variances [B, 2 Z]."""
        code: Tensor = self.code(self.encoder(inputs.flatten(1)))
        return code

    def head(self, features: Tensor) -> Tensor:
        mean, log_variance = features.chunk(2, dim=1)
        drawn = mean + (log_variance / 2).exp() * torch.randn_like(mean) if self.training else mean
        return torch.cat([self.decoder(drawn), features], dim=1)


@final
class MaskedAutoencoder(_Autoencoder):
    """An autoencoder that does not see a share of its inputs: D values, those hidden as 0, to W hidden units and back.

    Gives the task ``self_supervised`` [B, 2, D]: the values, and as 1 which of them were hidden. In training these are
    drawn for each sample, otherwise they are always the same.

    Source: Vincent et al. (2008), section 2.3; that hidden values alone are asked for: He et al. (2022).

    Args:
        input_shape: Of one sample.
        num_classes: D.
        hidden_width: W, at least 1.
        hidden_share: Of the values, above 0 and below 1.
    """

    def __init__(
        self, *, input_shape: InputShape, num_classes: int, hidden_width: Count = 64, hidden_share: InnerShare = 0.5
    ) -> None:
        super().__init__(input_shape=input_shape, num_classes=num_classes)
        self.hidden_share = hidden_share
        self.encoder = nn.Sequential(nn.Linear(self.num_values, hidden_width), nn.ReLU())
        self.decoder = nn.Linear(hidden_width, self.num_values)

    @property
    def feature_width(self) -> int:
        return self.decoder.in_features + self.num_values

    def features(self, inputs: Tensor) -> Tensor:
        """Return hidden units, and which values they were not made of [B, W + D]."""
        values = inputs.flatten(1)
        hidden = self._hidden(values)
        return torch.cat([self.encoder(values * (1 - hidden)), hidden], dim=1)

    def _hidden(self, values: Tensor) -> Tensor:
        if self.training:
            # By dropout, which clients that are stepped together draw as each would alone.
            return (F.dropout(torch.ones_like(values), self.hidden_share) == 0).to(values.dtype)
        # Multiples of the golden ratio fall evenly on 0..1.
        places = torch.arange(self.num_values, device=values.device, dtype=torch.float64) * 0.6180339887498949 % 1
        return (places < self.hidden_share).to(values.dtype).expand_as(values)

    def head(self, features: Tensor) -> Tensor:
        units, hidden = torch.split(features, [self.decoder.in_features, self.num_values], dim=1)
        return torch.stack([self.decoder(units), hidden], dim=1)
