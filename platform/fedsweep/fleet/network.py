"""Aggregation among client actors of several nodes over torch.distributed.

Each actor is sent its range of coordinates of every attendee's vector, sums it as one process would, and the ranges are
gathered. Where the vectors are so small that latency is what counts, each actor is sent all of them and sums alone.
Each coordinate is summed by the same operations in the same order wherever the cut lies, so the bits are those of a sum
on the server.

Sockets listen on the address of the actor's node alone. What comes through them is numbers, never objects; but nobody
is asked who they are, so the network between the nodes must be trusted as Ray's is.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedsweep.client.exchange import Exchange
from fedsweep.errors import ResourceError, WorkerLost, first_line
from fedsweep.fleet.fleet import Vectors
from fedsweep.trees import weighted_mean

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore, Work

# Torch's stubs know its process groups in part.
Group = Any


@dataclass(frozen=True, kw_only=True)
class Membership:
    """One member's place in a group.

    Attributes:
        index: Its number, from 0.
        size: Members.
        vectors: What is averaged; where every member has a GPU to itself, they go from GPU to GPU.
        host: Address of the member's node, on which it listens.
        connect_timeout_s: Longest wait for the others when the group is made.
        timeout_s: Longest wait for the others at one sync point.
        alone_bytes: Vectors that together have at most so many bytes are summed by every member by itself.
    """

    index: int
    size: int
    vectors: Vectors
    host: str
    connect_timeout_s: float
    timeout_s: float = 3600.0
    alone_bytes: int = 2**20


def open_store(host: str, *, timeout_s: float) -> TCPStore:
    """Open the store at which members tell each other where they listen, on a free port of this address alone.

    Args:
        host: Address of this node.
        timeout_s: Longest wait for what a member has to tell.

    Raises:
        ResourceError: There is no such address here.
    """
    from torch._C._distributed_c10d import TCPStore

    with _reaching(f"{host} can't be listened on"):
        # By itself the store would listen on every address of the machine.
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port, limit = listener.getsockname()[1], timedelta(seconds=timeout_s)
        return TCPStore(
            host, port, None, True, timeout=limit, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def find_store(host: str, port: int, *, timeout_s: float) -> TCPStore:
    """Connect to the store that another member opened.

    Args:
        host: Address of that member's node.
        port: The store's.
        timeout_s: Longest wait for it.

    Raises:
        ResourceError: It can't be reached.
    """
    from torch._C._distributed_c10d import TCPStore

    with _reaching(f"nothing answers at {host} port {port}"):
        # Torch would go on trying where a connection is refused, and say so on the terminal.
        with socket.create_connection((host, port), timeout=timeout_s):
            pass
        return TCPStore(host, port, None, False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


class NetworkExchange(Exchange):
    """One member of a group of processes that average over the network.

    Args:
        store: Where the members find each other; a new one for each group.
        member: This member's place.

    Raises:
        ResourceError: Not all members reach each other.
    """

    def __init__(self, store: TCPStore, member: Membership) -> None:
        self._member, self.on_device = member, member.vectors.own_gpu
        self._device = torch.device("cuda" if member.vectors.own_gpu else "cpu")
        self._timeout = timedelta(seconds=member.timeout_s)
        # The last ranges may be short or empty; they are filled up so that all are equally long.
        self._width = -(-member.vectors.num_values // member.size)
        self._whole, self._share = self._new(member.size * self._width), self._new(self._width)
        self._buffers: dict[str, Tensor] = {}
        with _reaching("client actors do not reach each other"):
            self._group: Group = _process_group(store, member)
            # For nothing but the connections: whom nobody reaches is found out now, not at the first sync point.
            self._gather(timedelta(seconds=member.connect_timeout_s))

    def _new(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=self._member.vectors.dtype, device=self._device)

    def mean(
        self,
        own: Mapping[int, Tensor],
        attendees: Sequence[int],
        weights: Sequence[float],
        out: Tensor,
        *,
        workers: Mapping[int, int],
    ) -> None:
        """Average the attendees' vectors; each actor sums its range of coordinates.

        Raises:
            WorkerLost: Another member died or does not answer.
        """
        member = self._member
        alone = len(attendees) * member.vectors.num_values * out.element_size() <= member.alone_bytes
        homes = [[k for k in attendees if workers.get(k, 0) == index] for index in range(member.size)]
        ranges = [slice(k * self._width, (k + 1) * self._width) for k in range(member.size)]
        if alone:
            ranges = [slice(0, member.vectors.num_values)] * member.size
        received = self._scatter([own[k] for k in homes[member.index]], [len(home) for home in homes], ranges)
        rows = dict(zip((k for home in homes for k in home), received, strict=True))
        # Received member by member, summed client by client: the sum's order is every exchange's, whoever lies where.
        weighted_mean([rows[k] for k in attendees], weights, out if alone else self._share)
        if not alone:
            self._gather(self._timeout)
            out.copy_(self._whole[: member.vectors.num_values])

    def _scatter(self, vectors: Sequence[Tensor], counts: Sequence[int], ranges: Sequence[slice]) -> list[Tensor]:
        """Send each member its range of these vectors; returns this member's range of all members' vectors.

        Args:
            vectors: [V] each.
            counts: How many each member has.
            ranges: The members', equally long; those beyond the vectors' end are filled up.
        """
        from torch._C._distributed_c10d import AllToAllOptions

        size, width = self._member.size, ranges[0].stop
        sent, got = self._buffer("sent", size * len(vectors) * width), self._buffer("got", sum(counts) * width)
        parts = sent.view(size, len(vectors), width)
        for row, vector in enumerate(vectors):
            for index, own_range in enumerate(ranges):
                part = vector[own_range]
                parts[index, row, : len(part)].copy_(part)
        options = AllToAllOptions()
        options.timeout = self._timeout
        here, there = [len(vectors) * width] * size, [count * width for count in counts]
        self._collective(lambda group: group.alltoall_base(got, sent, there, here, options))
        return list(got.view(sum(counts), width))

    def _gather(self, timeout: timedelta) -> None:
        from torch._C._distributed_c10d import AllgatherOptions

        options = AllgatherOptions()
        options.timeout = timeout
        self._collective(lambda group: group._allgather_base(self._whole, self._share, options))

    def _buffer(self, name: str, size: int) -> Tensor:
        """Return a buffer that is reused from sync point to sync point."""
        if name not in self._buffers or len(self._buffers[name]) < size:
            self._buffers[name] = self._new(size)
        return self._buffers[name][:size]

    def _collective(self, begin: Callable[[Group], Work]) -> None:
        """Take part in an operation of all members, and wait for it."""
        if self._group is None:
            raise WorkerLost("this client actor has left its group")
        try:
            begin(self._group).wait()
        except RuntimeError as error:
            raise WorkerLost(f"another client actor is gone ({_reason(error)})") from error

    def close(self) -> None:
        """Leave; the other members see the end of the connection."""
        if self._member.vectors.own_gpu and self._group is not None:
            self._group.abort()  # which by itself would wait for what is under way on the GPU
        self._group = None


def _process_group(store: TCPStore, member: Membership) -> Group:
    """Make a group that is not torch's default one, which can be made once in a process and belongs to the user."""
    if member.vectors.own_gpu:
        from torch._C._distributed_c10d import ProcessGroupNCCL

        # Otherwise a lost member ends the process, or shows in whatever is next done on the GPU.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        on_gpus = ProcessGroupNCCL.Options()
        on_gpus._timeout = timedelta(seconds=member.timeout_s)
        return ProcessGroupNCCL(store, member.index, member.size, on_gpus)
    from torch.distributed import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=member.host)]
    options._timeout = timedelta(seconds=member.connect_timeout_s)
    return gloo(store, member.index, member.size, options)


@contextlib.contextmanager
def _reaching(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError, ValueError) as error:
        raise ResourceError(f"{what} ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    """Return what torch's networking reports, without the place in its sources."""
    line = first_line(error)
    return line.partition("] ")[2] if line.startswith("[") and ".cc:" in line else line
