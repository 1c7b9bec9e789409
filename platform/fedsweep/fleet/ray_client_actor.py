"""A client actor: a worker in a Ray process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from fedsweep.client.messages import Question, Segment, Stepping
from fedsweep.errors import ResourceError, RunError
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import Vectors, make_worker
from fedsweep.fleet.network import Membership, NetworkExchange, find_store, open_store
from fedsweep.fleet.ray_wire import received_segment, sent_answer, sent_memory
from fedsweep.fleet.shared_memory import SharedMemoryExchange
from fedsweep.guard import guarded
from fedsweep.records import State
from fedsweep.trees import to_arrays, to_tensors


class ClientActor:
    """A Ray actor that holds clients for a round.

    Args:
        experiment: The experiment; its data are views into the node's shared memory.
        index: The actor's number, from 0.
        gpus: Its share of a GPU.
    """

    def __init__(self, experiment: Experiment, index: int, gpus: float) -> None:
        # How many threads torch has shows in the bits of its sums; in one process there is one, too.
        torch.set_num_threads(1)
        self._index = index
        self._exchange: SharedMemoryExchange | NetworkExchange | None = None
        self._store: Any = None
        if experiment.device == "cuda":
            _claim_gpu(gpus)
        self._worker = make_worker(experiment, index)

    def __repr__(self) -> str:
        return f"ClientActor[{self._index}]"

    def where(self, check: Callable[[], None]) -> str:
        """Return the node's id, once a check has passed here."""
        check()
        return str(ray.get_runtime_context().get_node_id())

    def ping(self) -> None:
        """Answer while the actor works; runs beside the work."""

    def prepare_exchange(self, folder: Path, size: int, vectors: Vectors) -> None:
        """Take the first step of :class:`SharedMemoryExchange`."""
        self._close_exchange()
        self._exchange = SharedMemoryExchange(folder, vectors, index=self._index, size=size)

    def connect_exchange(self) -> None:
        """Take the second step."""
        if not isinstance(self._exchange, SharedMemoryExchange):
            raise RunError("an exchange is connected after it was prepared")
        self._exchange.connect()
        self._worker.use_exchange(self._exchange)

    def open_store(self, host: str, timeout_s: float) -> int:
        """Take the first step of :class:`NetworkExchange`, for the actor of number 0; returns the store's port."""
        self._close_exchange()
        self._store = open_store(host, timeout_s=timeout_s)
        return int(self._store.port)

    def join_network(self, member: Membership, store: tuple[str, int]) -> None:
        """Take the second step, all actors at the same time; the store is at a host's port."""
        if member.index:
            self._close_exchange()
            self._store = find_store(*store, timeout_s=member.connect_timeout_s)
        self._exchange = NetworkExchange(self._store, member)
        self._worker.use_exchange(self._exchange)

    def _close_exchange(self) -> None:
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = self._store = None

    def run(
        self, sent: Segment, anchor: np.ndarray, clients: Sequence[int], keepers: Sequence[int], *memories: State
    ) -> Any:
        """Go through a segment; each memory is a result of its own, so that it can stay where it is.

        Args:
            sent: What to do.
            anchor: The server's model.
            clients: Whose memories follow.
            keepers: Whose memories are asked for.
            memories: What those clients remember.
        """
        remembered = dict(zip(clients, memories, strict=True))
        try:
            # Here, since an error travels without its traceback.
            with guarded(when=f"in round {sent.round}"):
                answer = self._worker.run(received_segment(sent), to_tensors(anchor), remembered)
        except BaseException:
            # The others wait for this actor at the next sync point: let them see that it will not come.
            self._close_exchange()
            raise
        memories_out = [sent_memory(answer.memories.get(client)) for client in keepers]
        return (sent_answer(answer), *memories_out) if keepers else sent_answer(answer)  # as many as Ray was told of

    def prove(self, sent: Segment, anchor: np.ndarray, clients: Sequence[int], *memories: State) -> Stepping:
        """Choose how clients are stepped; as :meth:`run`."""
        remembered = dict(zip(clients, memories, strict=True))
        with guarded(when=f"in round {sent.round}"):
            return self._worker.prove(received_segment(sent), to_tensors(anchor), remembered)

    def measure(
        self, question: Question, vector: np.ndarray, clients: Sequence[int], *memories: State
    ) -> dict[int, dict[str, np.ndarray]]:
        """Ask clients; model and memories are given as to :meth:`run`."""
        question = replace(question, models=to_tensors(question.models), broadcast=to_tensors(question.broadcast))
        answers = self._worker.measure(question, to_tensors(vector), dict(zip(clients, memories, strict=True)))
        return to_arrays(answers)  # type: ignore[no-any-return]


def _claim_gpu(gpus: float) -> None:
    ids = ray.get_gpu_ids()
    if not ids or not torch.cuda.is_available():
        raise ResourceError("runtime.device=cuda, but this client actor was given no GPU; set runtime.gpus_per_client")
    if gpus < 1:
        # Ray counts shares of a GPU, but holds nobody to them.
        torch.cuda.set_per_process_memory_fraction(gpus, 0)


REMOTE_CLIENT_ACTOR: Any = ray.remote(concurrency_groups={"control": 1})(ClientActor)  # type: ignore[call-overload]
