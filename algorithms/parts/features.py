"""Inputs of a network's head: the networks that tell them, and a generator of them from noise and a label.

Source: Zhu, Hong, Zhou (2021): Data-free knowledge distillation for heterogeneous federated learning. ICML, and the
authors' program.

Shape letters: B samples, C classes, D features, E noise, H hidden neurons, M heads.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep import ConfigError, Network, Stream
from fedsweep.components import head_names, layer_costs, training_flops


def network_with_features(model: nn.Module, *, method: str, use: str) -> Network:
    """Return the model as one that has features and a head.

    Args:
        model: The full model.
        method: For the message.
        use: What the method does with what the head reads: ``"generates"``.

    Raises:
        ConfigError: It does not say where they are.
    """
    if not getattr(model, "has_features", False):
        raise ConfigError(
            f"{method} {use} what a model's head reads, but model {type(model).__name__} has no features and head;"
            " use a built-in model or give yours the methods features and head, of which its forward must consist"
        )
    return cast(Network, model)


def new_generator(noise: int, hidden: int, features: int, num_classes: int, *, stream: Stream) -> dict[str, Tensor]:
    """Return parameters and statistics of an untrained generator: linear to H, batch norm, ReLU, linear to D."""
    draws = stream.torch()

    def uniform(fan_in: int, *shape: int) -> Tensor:
        """Draw weights as torch starts a linear layer."""
        return torch.empty(*shape).uniform_(-1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in), generator=draws)

    inputs = noise + num_classes
    return {
        "hidden_weight": uniform(inputs, hidden, inputs),
        "hidden_bias": uniform(inputs, hidden),
        "norm_weight": torch.ones(hidden),
        "norm_bias": torch.zeros(hidden),
        "feature_weight": uniform(hidden, features, hidden),
        "feature_bias": uniform(hidden, features),
        "mean": torch.zeros(hidden),
        "variance": torch.ones(hidden),
    }


def generated(values: Mapping[str, Tensor], noise_BE: Tensor, labels_B: Tensor, *, training: bool) -> Tensor:
    """Return features [B, D] for noise and labels.

    Args:
        values: See :func:`new_generator`; the statistics are updated in place where ``training``.
        noise_BE: Uniform in 0..1.
        labels_B: Classes.
        training: Batch norm uses the batch's statistics.
    """
    num_classes = values["hidden_weight"].shape[1] - noise_BE.shape[1]
    joined = torch.cat([noise_BE, F.one_hot(labels_B, num_classes).to(noise_BE)], dim=1)
    hidden = F.batch_norm(
        F.linear(joined, values["hidden_weight"], values["hidden_bias"]),
        values["mean"],
        values["variance"],
        values["norm_weight"],
        values["norm_bias"],
        training=training,
    )
    return F.linear(hidden.relu(), values["feature_weight"], values["feature_bias"])


def drawn(size: int, labels_C: Tensor, noise: int, *, stream: Stream, like: Tensor) -> tuple[Tensor, Tensor]:
    """Draw noise [size, noise] and labels [size], uniform over the classes that are allowed.

    Args:
        size: B.
        labels_C: Which classes are allowed (bool).
        noise: E.
        stream: Where the numbers come from.
        like: Whose type and device the noise has.
    """
    generator = stream.torch()
    # On the CPU: a GPU's generator would give other numbers from the same seed.
    noise_BE = torch.rand(size, noise, generator=generator, dtype=like.dtype)
    allowed = torch.nonzero(labels_C.cpu())[:, 0]
    labels = allowed[torch.randint(len(allowed), (size,), generator=generator)]
    return noise_BE.to(like.device), labels.to(like.device)


def step_flops(values: Mapping[str, Tensor], model: nn.Module, num_heads: int) -> float:
    """Return a generator step's FLOPs for a sample: 3 passes through itself, 2 through each head, which stays fixed.

    Args:
        values: See :func:`new_generator`.
        model: A network that the heads belong to.
        num_heads: M.
    """
    own = values["hidden_weight"].numel() + values["feature_weight"].numel()
    layers = layer_costs(model, cast(Network, model).input_shape)
    head = sum(macs for name, (macs, _) in layers.items() if name in head_names(model))
    return training_flops(own, 1) + training_flops(head, num_heads, passes=2)


def diversity(noise_BE: Tensor, features_BD: Tensor) -> Tensor:
    """Return ``exp(-mean_ij(mean_d |z_i - z_j| * mean_e (e_i - e_j)^2))``: 1 for equal features, less the wider."""
    apart = (features_BD[:, None] - features_BD).abs().mean(dim=2)
    noise = (noise_BE[:, None] - noise_BE).square().mean(dim=2)
    return torch.exp(-(apart * noise).mean())
