"""A second device where there is none: torch's lazy one, as fake tensors, and a watch over what a step asks of it.

Fake tensors have a shape, a type and a device and no values, so they refuse whatever would read one, and whatever mixes
devices. The lazy device stands for CUDA's: this torch was built without that, and its autograd takes no such tensors.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedsweep.client import shards
from fedsweep.client.compute_device import start_device
from fedsweep.client.lanes import tile
from fedsweep.client.local_round import LocalRound
from fedsweep.client.worker import Worker
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import make_worker
from fedsweep.testing import local_engine, run_rounds

DEVICE = "lazy"
_READS = {torch.ops.aten._local_scalar_dense, torch.ops.aten.item, torch.ops.aten.is_nonzero, torch.ops.aten.equal}
_SIZED_BY_VALUES = {torch.ops.aten.nonzero, torch.ops.aten.masked_select}


class HostTouched(AssertionError):
    """A step asked for what makes the host wait for the device, or can't be recorded."""


class Watch(TorchDispatchMode):
    """Refuses what a step on a device may not do.

    Args:
        recorded: Nothing on the host may take part either: no allocation, no copy to the device, no draw.
    """

    def __init__(self, *, recorded: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorded = recorded
        self.seen = 0
        self._constants: list[Tensor] = []  # made of Python's numbers within the step, so the same in each replay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.seen += 1
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        given = _devices([tensor for tensor in tensors if not any(tensor is constant for constant in self._constants)])
        if func.overloadpacket in _READS | _SIZED_BY_VALUES and DEVICE in given:
            raise HostTouched(f"{func} reads values of the device")
        out = func(*args, **kwargs)
        if not tensors and func.overloadpacket is torch.ops.aten._to_copy:
            self._constants.append(out)
            return out
        made = _devices(out)
        if DEVICE in given and "cpu" in made:
            raise HostTouched(f"{func} copies from the device to the host")
        if func.overloadpacket is torch.ops.aten.copy_ and _devices(args[0]) == {"cpu"} and DEVICE in _devices(args[1]):
            raise HostTouched(f"{func} copies from the device to the host")
        if self._recorded and "cpu" in made | given:
            raise HostTouched(f"{func} takes part on the host")
        if self._recorded and torch.Tag.nondeterministic_seeded in func.tags:
            raise HostTouched(f"{func} draws random numbers")
        return out


def _devices(tree: Any) -> set[str]:
    return {leaf.device.type for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)}


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Cycles of what is made meanwhile are never collected: as it frees fake tensors from there, torch crashes."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _moved(module: nn.Module, device: str) -> nn.Module:
    """As ``module.to``, which can't exchange real tensors for fake ones."""
    for part in module.modules():
        for tensors, made in ((part._parameters, nn.Parameter), (part._buffers, lambda tensor: tensor)):
            for name, old in tensors.items():
                if old is not None:
                    tensors[name] = made(torch.empty(old.shape, dtype=old.dtype, device=device))
    return module


@contextlib.contextmanager
def clients_begun(
    work: Experiment, *, clients: int = 2, steps: int = 2
) -> Iterator[tuple[Worker, Sequence[LocalRound]]]:
    """A worker on the fake device, a round begun: some clients have steps that are due."""
    engine = local_engine(work)
    state = run_rounds(engine, rounds=1)
    if not any(point.start for point in engine.planner.plan(state).points):
        state = engine.start()  # in an asynchronous run nobody may begin in the second round
    segment = engine.round_class(engine.planner.plan(state), state, engine.tools).opening(clients, steps=steps)
    memories = {t.client: state.memories[t.client] for t in segment.tasks if t.client in state.memories}
    start_device(DEVICE)
    with no_collection(), pytest.MonkeyPatch.context() as patched, FakeTensorMode(allow_non_fake_inputs=True) as fake:
        patched.setattr(nn.Module, "to", _moved)
        # Before the steps the host counts a client's labels, once, and there are no labels to count.
        patched.setattr(torch, "bincount", lambda labels, minlength: torch.zeros(minlength, dtype=torch.int64))
        for owner in (shards, tile):
            patched.setattr(owner, "compute_lazily_asked", lambda: None)
        worker = make_worker(replace(work, device=DEVICE))
        tasks = {task.client: task for task in segment.tasks}
        anchor = fake.from_tensor(state.vector)
        worker._start_jobs(segment, segment.points[0], tasks, anchor, segment.version, memories)
        locals = list(worker._rounds.values())
        for local in locals:
            local.model.bound().train()
        yield worker, locals
