"""Costs of a forward pass and a training step, counted from the layers that run.

A multiply-accumulate (MAC) is one product and one sum; a convolution has Hout*Wout*Cout*Cin*k*k of them, a linear
layer in*out per position, a recurrent layer each of its weights per position, self-attention's two products 2*H*T*T*D
beside its projections. Products that a network writes out itself count by torch's own formulas. Biases, activations,
look-ups and pooling count nothing. What has no formula is named, so that nobody takes its zero for a figure.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from fedsweep.models.attention import SelfAttention
from fedsweep.trees import copied_with

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_PER_OUTPUT = (*_CONVOLUTIONS, nn.Linear, nn.Bilinear)
_KNOWN = (*_PER_OUTPUT, *_NORMS, nn.RNNBase, SelfAttention)
# Of what no layer's weight stands for.
WRITTEN_OUT = ""
# Operations with products inside for which neither torch nor this module has a formula.
_UNKNOWN = re.compile(r"fft|linalg|cdist|trilinear|lstm|gru|rnn|attention|deform|unique_dim|cholesky|solve|svd|eig")
_OPERATIONS_PER_BATCH_NORM_OUTPUT = 4
PASSES_OF_A_STEP = 3
FLOPS_PER_MAC = 2

# A value that travels is a single-precision number, whatever precision an experiment computes with.
BYTES_PER_VALUE = 4


def fwd_macs_per_sample(model: nn.Module, input_shape: tuple[int, ...], *, count_batch_norm: bool = True) -> int:
    """Count the multiply-accumulates of one forward pass of one sample.

    The model, its buffers and all random generators stay as they are. Runs one sample through a copy on the CPU;
    callers keep the result.

    Source: FedDHAD's column "MLPs", which is this figure in millions, with 4 operations per output of a batch norm.

    Args:
        model: The network, or a sub-model.
        input_shape: Channels, height and width of one sample.
        count_batch_norm: Whether each output of a batch norm counts as 4, as in the paper's column.
    """
    return sum(macs + norm * count_batch_norm for macs, norm in layer_costs(model, input_shape).values())


def layer_costs(model: nn.Module, input_shape: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Return each layer's share of a forward pass, by the name of its weight.

    A layer that is cut along its input or output channels costs in proportion to what is left of its weight, so the
    costs of sub-models follow from these without a forward pass of each. Self-attention's products stand under the
    bias of its values, of which each head has its share; products outside of layers under :data:`WRITTEN_OUT`.

    Args:
        model: The full network.
        input_shape: Channels, height and width of one sample.

    Returns:
        Weight -> (multiply-accumulates, operations of a batch norm: 4 per output).
    """
    return counted(model, input_shape).layers


class Counted(NamedTuple):
    """A forward pass of one sample.

    Attributes:
        layers: As :func:`layer_costs` returns them.
        unknown: Operations that have no formula and count nothing, by torch's names for them, in alphabetical order.
        spared: Multiply-accumulates of a step that frozen layers do without: as many as a forward pass for the
            gradient of their weights, and again for that of their inputs where nothing before them is trained.
    """

    layers: dict[str, tuple[int, int]]
    unknown: tuple[str, ...]
    spared: int = 0


def counted(model: nn.Module, input_shape: tuple[int, ...]) -> Counted:
    """Count a forward pass; arguments as of :func:`layer_costs`."""
    types = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    try:
        return _counted(_outline(model, types), input_shape)
    except Exception as error:
        if types <= {torch.float32}:
            raise
        first = error
    try:  # it may cast its inputs to a type of its own
        return _counted(_outline(model, ()), input_shape)
    except Exception:
        raise first from None


def _counted(outline: nn.Module, input_shape: tuple[int, ...]) -> Counted:
    """Count a forward pass of a copy, which is given hooks."""
    costs: dict[str, tuple[int, int]] = {}
    products = _Products()
    has_base = not all(parameter.requires_grad for parameter in outline.parameters())
    spared = 0

    def add(name: str, macs: int, norm: int = 0) -> None:
        before = costs.get(name, (0, 0))
        costs[name] = before[0] + macs, before[1] + norm

    def count(prefix: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        nonlocal spared
        products.depth -= 1
        own = [*module.parameters(recurse=False)]
        before = sum(macs for macs, _ in costs.values())
        if isinstance(module, SelfAttention):
            add(f"{prefix}value.bias", module.macs(output))
        elif isinstance(module, _NORMS):
            add(f"{prefix}weight", 0, _OPERATIONS_PER_BATCH_NORM_OUTPUT * output.numel())
        elif isinstance(module, nn.RNNBase):
            values = inputs[0].data  # of packed sequences, too
            for name, weight in module.named_parameters(recurse=False):
                if name.startswith("weight_"):
                    add(f"{prefix}{name}", values.numel() // values.shape[-1] * weight.numel())
        else:
            add(f"{prefix}weight", output.numel() * cast(Tensor, module.weight)[0].numel())
        if has_base and own and not any(parameter.requires_grad for parameter in own):
            reached = any(isinstance(value, Tensor) and value.requires_grad for value in inputs)
            spared += (sum(macs for macs, _ in costs.values()) - before) * (1 if reached else 2)

    def enter(module: nn.Module, inputs: object) -> None:
        products.depth += 1

    for path, module in outline.named_modules():
        if isinstance(module, _KNOWN):
            module.register_forward_pre_hook(enter)
            module.register_forward_hook(partial(count, f"{path}." if path else ""))
    # Not on the meta device: importing what it needs takes a second in every process, one sample milliseconds.
    # With gradients noted where something is frozen: which layers they go through shows what a step spares.
    with torch.set_grad_enabled(has_base), _layer_by_layer(), products:
        example: Callable[[int], Any] | None = getattr(outline, "example", None)
        outline(torch.zeros(1, *input_shape) if example is None else example(1))
    if products.macs:
        add(WRITTEN_OUT, products.macs)
    return Counted(layers=costs, unknown=tuple(sorted(products.unknown)), spared=spared)


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the products of operations outside of the layers that are counted as such.

    Attributes:
        macs: Multiply-accumulates so far.
        depth: Layers that are being computed; none of their operations counts here.
        unknown: Names of operations without a formula.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.macs, self.depth = 0, 0
        self.unknown: set[str] = set()

    def count(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Compute an operation, and count its products."""
        output = func(*args, **(kwargs or {}))
        if self.depth:
            return output
        packet = getattr(func, "_overloadpacket", func)
        name = str(packet).removeprefix("aten.")
        if packet in flop_registry:
            self.macs += flop_registry[packet](*args, **(kwargs or {}), out_val=output) // FLOPS_PER_MAC
        elif name in _FORMULAS:
            self.macs += _FORMULAS[name](*args)
        elif getattr(func, "namespace", "") != "aten" or _UNKNOWN.search(name):
            self.unknown.add(name)
        return output


# Not in the class's body: torch would wrap it, and import its compiler, a second's work, when it is first called.
_Products.__torch_dispatch__ = _Products.count  # type: ignore[assignment,method-assign]


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object) -> int:
    """Return scores of queries [..., T, D] and keys [..., S, D], and the weighted sums of values [..., S, E]."""
    return prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


# For what torch has no formula, by aten's names.
_FORMULAS: Mapping[str, Callable[..., int]] = {
    "mv": lambda matrix, vector: int(matrix.numel()),
    "addmv": lambda bias, matrix, vector, *_: int(matrix.numel()),
    "dot": lambda vector, other: int(vector.numel()),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_attention_math": _attention,
}


@contextlib.contextmanager
def _layer_by_layer() -> Iterator[None]:
    """Switch off torch's one operation for a whole layer of attention, of which nothing inside would be seen."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def training_flops(macs: int, samples: float, *, passes: float = PASSES_OF_A_STEP) -> int:
    """Count the floating-point operations of training.

    Args:
        macs: Multiply-accumulates of one sample's forward pass, without batch norm's.
        samples: Samples that go through a step, repeats included.
        passes: Forward passes that a sample costs: 3 for a step, since backward costs two; more with teachers.
    """
    # Whole numbers stay whole: a run's FLOPs may be more than a float holds to the digit.
    whole = int(passes) if float(passes).is_integer() else passes
    return round(FLOPS_PER_MAC * macs * samples * whole)


def _outline(model: nn.Module, types: Collection[torch.dtype]) -> nn.Module:
    """Return a copy in evaluation mode on the CPU, with values of these types in float32."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        # Not copied where they lie well already: a pass changes buffers alone.
        memo[id(parameter)] = nn.Parameter(_placed(parameter, types), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _placed(buffer, types).clone()
    return copied_with(model, memo).eval()


def _placed(tensor: Tensor, types: Collection[torch.dtype]) -> Tensor:
    dtype = torch.float32 if tensor.dtype in types else tensor.dtype
    if tensor.device.type == "meta":
        return torch.zeros(tensor.shape, dtype=dtype)
    return tensor.detach().to(device="cpu", dtype=dtype)
