"""Images with their channels side by side in memory, where a CPU's convolutions are faster for it.

torch's images lie channel by channel. Its CPU kernels read them pixel by pixel, and otherwise turn them round before
and after each layer. The values are the same; sums may be taken in another order, so last bits differ.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Measured (docs/speed.md): up to here every network gained, ResNet-18 and VGG-11 with 512 lost.
_MOST_CHANNELS = 256


def gains_by_pixels_last(network: nn.Module) -> bool:
    """Whether a network's steps are faster for it on a CPU.

    It follows from the network alone and from no timing: the same run has the same bits wherever it is.
    """
    convolutions = [module for module in network.modules() if isinstance(module, nn.Conv2d)]
    return (
        bool(convolutions)
        and all(max(c.in_channels, c.out_channels) <= _MOST_CHANNELS and c.groups == 1 for c in convolutions)
        and not any(_is_instance_norm(module) for module in network.modules())
    )


def _is_instance_norm(module: nn.Module) -> bool:
    """It reads its maps channel by channel, and takes back what convolutions gain."""
    in_groups = isinstance(module, nn.GroupNorm) and 1 < module.num_groups == module.num_channels
    return in_groups or isinstance(module, nn.InstanceNorm2d)


def pixels_last(inputs: Tensor) -> Tensor:
    """Images [B, C, H, W] with the same values and their channels innermost in memory.

    They stay as they are on a GPU, in float64, which has no such kernels, and under ``torch.func``'s transforms, which
    do not know of it.
    """
    is_here = inputs.device.type == "cpu" and inputs.dtype == torch.float32 and inputs.dim() == 4
    if not is_here or torch._C._functorch.peek_interpreter_stack() is not None:
        return inputs
    return inputs.contiguous(memory_format=torch.channels_last)
