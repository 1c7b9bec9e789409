"""What a forward pass and a training step cost, counted from the layers that run.

A multiply-accumulate (MAC) is one product and one sum; a convolution has Hout*Wout*Cout*Cin*k*k of them, a linear
layer in*out per position, self-attention's two products 2*H*T*T*D beside its projections. Biases, activations and
pooling count nothing. Only modules are seen: what a user's own network computes with bare functions is not counted.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from fedsweep.models.attention import SelfAttention

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_OPERATIONS_PER_BATCH_NORM_OUTPUT = 4
PASSES_OF_A_STEP = 3
_FLOPS_PER_MAC = 2

# A value that travels is a single-precision number, whatever precision an experiment computes with.
BYTES_PER_VALUE = 4


def fwd_macs_per_sample(model: nn.Module, input_shape: tuple[int, int, int], *, count_batch_norm: bool = True) -> int:
    """Multiply-accumulates of one forward pass of one sample.

    The model, its buffers and all random generators stay as they are. Runs one sample through a copy on the CPU;
    callers keep the result.

    Source: FedDHAD's column "MLPs", which is this figure in millions, with 4 operations per output of a batch norm.

    Args:
        model: The network, or a sub-model.
        input_shape: Channels, height and width of one sample.
        count_batch_norm: Whether each output of a batch norm counts as 4, as in the paper's column.
    """
    return sum(macs + norm * count_batch_norm for macs, norm in layer_costs(model, input_shape).values())


def layer_costs(model: nn.Module, input_shape: tuple[int, int, int]) -> dict[str, tuple[int, int]]:
    """Return what each layer's share of a forward pass is, by the name of its weight.

    A layer that is cut along its input or output channels costs in proportion to what is left of its weight, so the
    costs of sub-models follow from these without a forward pass of each. Self-attention's products stand under the
    bias of its values, of which each head has its share.

    Args:
        model: The full network.
        input_shape: Channels, height and width of one sample.

    Returns:
        Weight -> (multiply-accumulates, operations of a batch norm: 4 per output).
    """
    costs: dict[str, tuple[int, int]] = {}

    def count(name: str, module: nn.Module, _: object, output: Tensor) -> None:
        macs, norm = costs.get(name, (0, 0))
        if isinstance(module, SelfAttention):
            macs += module.macs(output)
        elif isinstance(module, _NORMS):
            norm += _OPERATIONS_PER_BATCH_NORM_OUTPUT * output.numel()
        else:
            macs += output.numel() * cast(Tensor, module.weight)[0].numel()
        costs[name] = macs, norm

    outline = _outline(model)
    for path, module in outline.named_modules():
        if isinstance(module, (*_CONVOLUTIONS, nn.Linear, *_NORMS, SelfAttention)):
            weight = "value.bias" if isinstance(module, SelfAttention) else "weight"
            name = f"{path}.{weight}" if path else weight
            module.register_forward_hook(partial(count, name))
    # Not on the meta device: importing what it needs takes a second in every process, one sample milliseconds.
    with torch.no_grad():
        outline(torch.zeros(1, *input_shape))
    return costs


def training_flops(macs: int, samples: float, *, passes: float = PASSES_OF_A_STEP) -> int:
    """Floating-point operations of training.

    Args:
        macs: Multiply-accumulates of one sample's forward pass, without batch norm's.
        samples: Samples that go through a step, repeats included.
        passes: Forward passes that a sample costs: 3 for a step, since backward costs two; more with teachers.
    """
    # Whole numbers stay whole: a run's FLOPs may be more than a float holds to the digit.
    whole = int(passes) if float(passes).is_integer() else passes
    return round(_FLOPS_PER_MAC * macs * samples * whole)


def _outline(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode and float32, on the CPU."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_placed(parameter), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = _placed(buffer)
    return copy.deepcopy(model, memo).eval()


def _placed(tensor: Tensor) -> Tensor:
    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
    if tensor.device.type == "meta":
        return torch.zeros(tensor.shape, dtype=dtype)
    return tensor.detach().to(device="cpu", dtype=dtype, copy=True)
