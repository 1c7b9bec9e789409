"""What a forward pass and a training step cost, counted from the layers that run.

A multiply-accumulate (MAC) is one product and one sum; a convolution has Hout*Wout*Cout*Cin*k*k of them, a linear
layer in*out. Biases, activations and pooling count nothing. Only modules are seen: what a user's own network computes
with bare functions is not counted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

_OPERATIONS_PER_BATCH_NORM_OUTPUT = 4
_FORWARD_PASSES_PER_TRAINING_SAMPLE = 3
_FLOPS_PER_MAC = 2


def fwd_macs_per_sample(model: nn.Module, input_shape: tuple[int, int, int], *, count_batch_norm: bool = True) -> int:
    """Multiply-accumulates of one forward pass of one sample.

    The model, its buffers and all random generators stay as they are. Runs without computing anything where the
    model allows it (on torch's meta device), so it costs milliseconds; callers keep the result.

    Source: FedDHAD's column "MLPs", which is this figure in millions, with 4 operations per output of a batch norm.

    Args:
        model: The network, or a sub-model.
        input_shape: Channels, height and width of one sample.
        count_batch_norm: Whether each output of a batch norm counts as 4, as in the paper's column.
    """
    try:
        return _count(_outline(model, device="meta"), torch.zeros(1, *input_shape, device="meta"), count_batch_norm)
    except RuntimeError:
        # A user's network may look at values, which the meta device does not have.
        return _count(_outline(model, device="cpu"), torch.zeros(1, *input_shape), count_batch_norm)


def train_flops_per_sample(model: nn.Module, input_shape: tuple[int, int, int]) -> int:
    """Floating-point operations to train on one sample once: forward plus backward, which costs two forward passes.

    Batch norm is not counted.

    Args:
        model: The network, or a sub-model.
        input_shape: Channels, height and width of one sample.
    """
    macs = fwd_macs_per_sample(model, input_shape, count_batch_norm=False)
    return _FORWARD_PASSES_PER_TRAINING_SAMPLE * _FLOPS_PER_MAC * macs


def _outline(model: nn.Module, *, device: str) -> nn.Module:
    """A copy in evaluation mode and float32, on the meta device without the weights' memory."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_placed(parameter, device), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = _placed(buffer, device)
    return copy.deepcopy(model, memo).eval()


def _placed(tensor: Tensor, device: str) -> Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    if device == "meta":
        return torch.empty(tensor.shape, dtype=dtype, device=device)
    return tensor.detach().to(device=device, dtype=dtype, copy=True)


def _count(outline: nn.Module, inputs: Tensor, count_batch_norm: bool) -> int:
    macs = 0

    def counter(cost: Callable[[nn.Module, Tensor], int]) -> Callable[[nn.Module, object, Tensor], None]:
        def add(module: nn.Module, _: object, output: Tensor) -> None:
            nonlocal macs
            macs += cost(module, output)

        return add

    for module in outline.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            module.register_forward_hook(counter(_conv_macs))
        elif isinstance(module, nn.Linear):
            module.register_forward_hook(counter(_linear_macs))
        elif count_batch_norm and isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            module.register_forward_hook(counter(_batch_norm_operations))
    with torch.no_grad():
        outline(inputs)
    return macs


def _conv_macs(module: nn.Module, output: Tensor) -> int:
    assert isinstance(module.weight, Tensor)
    return output.numel() * module.weight[0].numel()


def _linear_macs(module: nn.Module, output: Tensor) -> int:
    assert isinstance(module, nn.Linear)
    return output.numel() * module.in_features


def _batch_norm_operations(module: nn.Module, output: Tensor) -> int:
    return _OPERATIONS_PER_BATCH_NORM_OUTPUT * output.numel()
