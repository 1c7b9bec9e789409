"""Devices made ready: a GPU, and torch's lazy device, on which methods are tried without one.

The lazy device computes on the CPU and takes no CPU tensors.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor


def start_device(device: str, *, tf32: bool = False) -> None:
    """Have this process compute on a device as all of a run's processes do; on a CPU there is nothing to do.

    Args:
        device: ``"cpu"``, ``"cuda"`` or ``"lazy"``.
        tf32: Convolutions and products of float32 on a GPU read their factors rounded to ten bits.
    """
    if device == "cpu":
        return
    # cuDNN may otherwise choose algorithms by timing them, or ones that sum in no fixed order.
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    # Torch's own default is TF32 for convolutions, by which results are far from a CPU's.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    if device == "lazy":
        _start_lazy_device()


@functools.cache
def _start_lazy_device() -> None:
    """Make the lazy device known to torch in this process; once, torch refuses a second."""
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()  # type: ignore[no-untyped-call]
    # Its programs run once or twice each: what optimising them costs is never had back.
    torch._C._set_graph_executor_optimize(False)
    if hasattr(torch.library, "get_kernel"):  # without it, what multiplies a loss by a number may fail
        _type_numbers()


@functools.cache
def _type_numbers() -> torch.library.Library:
    """Have Python's numbers promoted as torch does elsewhere; the overrides end with the library that is returned.

    The device takes a number for a float64 tensor: a float32 without dimensions, times 0.5, would become a float64. So
    each override makes the number a tensor of the result's type first.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]

    def typed(kernel: Any, keys: Any, one: Any, other: Any, **more: Any) -> Any:
        counted = torch.result_type(one, other)
        pair = [value if isinstance(value, Tensor) else torch.tensor(value, dtype=counted) for value in (one, other)]
        return kernel.call_boxed(keys, *pair, **more)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name in ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor"):
            kernel = torch.library.get_kernel(f"aten::{name}", "Lazy")
            library.impl(name, functools.partial(typed, kernel), "Lazy", with_keyset=True)  # type: ignore[no-untyped-call]
    return library


def compute_lazily_asked() -> None:
    """Have torch's lazy device compute what it was asked for; else a whole round becomes one program to compile."""
    import torch._lazy

    torch._lazy.mark_step(wait=True)
