"""Aggregation among client actors of one node through shared memory.

An actor call between two processes takes milliseconds, which would rule a round that synchronises at every local
step. Here each actor writes its clients' vectors to a mapped file, sums its share of the coordinates and reads the
result; the count of the sync point, through a pipe, says when. Each coordinate is summed by the same operations in the
same order wherever the cut lies, so the bits are those of a sum on the server.

The files lie in a private folder below ``/dev/shm`` that the fleet makes and removes.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedsweep.client.exchange import Exchange
from fedsweep.errors import WorkerLost
from fedsweep.fleet.fleet import Vectors
from fedsweep.trees import weighted_mean

_TOKEN = struct.Struct("<Q")


class SharedMemoryExchange(Exchange):
    """One member of a group of processes on one node that average through shared memory.

    Made in three steps, each finished by all members before the next: construction (makes and opens the reading ends
    of the member's pipes), :meth:`connect` (opens the writing ends), then :meth:`mean`.

    Args:
        folder: The group's private folder; ``slots`` and ``mean`` are made by :func:`make_group_files`.
        vectors: What is averaged.
        index: This member's number, from 0.
        size: Members.
        timeout_s: Longest wait for the others at one sync point.
    """

    def __init__(self, folder: Path, vectors: Vectors, *, index: int, size: int, timeout_s: float = 3600.0) -> None:
        self._folder, self._index, self._size, self._timeout_s = folder, index, size, timeout_s
        num_values = vectors.num_values
        self._slots = _mapped(folder / "slots", vectors.dtype).view(vectors.capacity, num_values)
        self._mean = _mapped(folder / "mean", vectors.dtype)
        bounds = np.linspace(0, num_values, size + 1).astype(int)
        self._share = slice(int(bounds[index]), int(bounds[index + 1]))
        self._counter = 0
        self._readers: dict[int, int] = {}
        self._writers: list[int] = []
        for peer in self._peers():
            path = self._pipe(peer, index)
            os.mkfifo(path, 0o600)
            # Not blocking: to open a pipe for reading would wait for its writer, who opens it only in the next step.
            self._readers[os.open(path, os.O_RDONLY | os.O_NONBLOCK)] = peer

    def _peers(self) -> list[int]:
        return [k for k in range(self._size) if k != self._index]

    def _pipe(self, sender: int, receiver: int) -> Path:
        return self._folder / f"pipe-{sender}-{receiver}"

    def connect(self) -> None:
        """Open the writing ends; every member's reading ends exist by now."""
        for peer in self._peers():
            self._writers.append(os.open(self._pipe(self._index, peer), os.O_WRONLY | os.O_NONBLOCK))
        self._poll = select.poll()
        for descriptor in self._readers:
            self._poll.register(descriptor, 0)

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
        if self._size > 1 and not self._readers:
            raise WorkerLost("this client actor has left its group")  # alone it would wait for nobody
        for slot, client in enumerate(attendees):
            if client in own:
                self._slots[slot].copy_(own[client])
        # Everybody's vectors lie in the slots; nobody may read them before.
        self._barrier()
        rows = [self._slots[slot, self._share] for slot in range(len(attendees))]
        weighted_mean(rows, weights, self._mean[self._share])
        # Everybody's share of the mean is written.
        self._barrier()
        # The next call's first barrier comes before anybody writes to the mean again.
        out.copy_(self._mean)

    def _barrier(self) -> None:
        self._counter += 1
        own_token = _TOKEN.pack(self._counter)
        try:
            for descriptor in self._writers:
                # Eight bytes go whole or not at all, and nobody is more than one barrier ahead: the pipe can't be full.
                os.write(descriptor, own_token)
        except BrokenPipeError as error:
            raise WorkerLost("another client actor is gone") from error
        deadline = time.monotonic() + self._timeout_s
        waiting = set(self._readers)
        for descriptor in waiting:
            self._poll.modify(descriptor, select.POLLIN)
        while waiting:
            events = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not events:
                raise WorkerLost(f"another client actor did not reach a sync point within {self._timeout_s:.0f} s")
            for descriptor, event in events:
                token = os.read(descriptor, _TOKEN.size) if event & select.POLLIN else b""
                if not token:
                    raise WorkerLost(f"client actor {self._readers[descriptor]} is gone")
                if _TOKEN.unpack(token)[0] != self._counter:
                    raise WorkerLost(f"client actor {self._readers[descriptor]} is at another sync point")
                # The token of one who is ahead waits for the next barrier; its end shows at this one.
                self._poll.modify(descriptor, 0)
                waiting.discard(descriptor)

    def close(self) -> None:
        """Close the pipes, whose end the other members see, and let go of the mapped files."""
        for descriptor in [*self._readers, *self._writers]:
            os.close(descriptor)
        self._readers, self._writers = {}, []
        # Removed files take their room as long as a member has them mapped: the next group might find none.
        self._slots = self._mean = torch.empty(0)


def _mapped(path: Path, dtype: torch.dtype) -> Tensor:
    """Map a file as one row of values; as bytes first, since numpy has no bfloat16."""
    return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="r+")).view(dtype)


def make_group_files(folder: Path, vectors: Vectors) -> None:
    """Make the mapped files of a group in its (existing, private) folder."""
    for name, rows in (("slots", vectors.capacity), ("mean", 1)):
        with open(folder / name, "xb") as file:
            # Room is taken now: where /dev/shm is full, a file of holes would end a process in the middle of a round.
            os.posix_fallocate(file.fileno(), 0, max(1, rows * vectors.num_values * vectors.dtype.itemsize))
        os.chmod(folder / name, 0o600)
