"""Clients on Ray actors.

Actors are slots and clients are state: a cohort is laid on the actors anew in each round, and what a client
remembers follows it as an object reference. A lost actor is replaced; the engine then begins the round anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import exceptions as ray_errors
from torch import Tensor

from fedsweep.client.messages import Handle, Question, Segment, SegmentReply, Stepping
from fedsweep.errors import ClientJobError, FedsweepError, MemoryLost, ResourceError, RunError, WorkerLost
from fedsweep.fleet.fleet import ExchangeInUse, Fleet, Vectors, merged_answers
from fedsweep.fleet.ray_client_actor import REMOTE_CLIENT_ACTOR
from fedsweep.fleet.ray_exchange import ActorGroup, ExchangeKind
from fedsweep.fleet.ray_wire import received_answer, sent_segment
from fedsweep.records import Payload, State
from fedsweep.trees import to_arrays, to_tensors

# Waiting is cut into pieces of so many seconds: between two of them, actors that have not answered are pinged.
_POLL_S = 5.0
# Longest wait for the actors to be there.
_START_S = 120.0
_SLOW = f"client actors did not set up their exchange within {_START_S:.0f} s"
# An actor's death, by whatever class Ray tells it: that of one which it ended for want of memory is no RayActorError.
_DIED = (ray_errors.RayActorError, ray_errors.WorkerCrashedError, ray_errors.OutOfMemoryError)
# So often may actors that start be replaced before the run fails.
_MOST_STARTS = 5


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """Settings by which client actors are made.

    Attributes:
        num_actors: How many.
        name: Begins their names.
        vectors: What they aggregate among themselves.
        options: Ray options of each.
        placed: Further ones for an actor's number.
        begun: The first actors, where they are starting already.
        hang_timeout_s: An actor that does not answer for this long is taken for lost.
        exchange: How they aggregate; see :class:`ActorGroup`.
        check: Each actor calls it when it has started; what it raises is the run's error.
    """

    num_actors: int
    name: str
    vectors: Vectors
    options: Mapping[str, Any]
    placed: Callable[[int], Mapping[str, Any]] = lambda index: {}
    begun: Sequence[Any] = ()
    hang_timeout_s: float = 60.0
    exchange: ExchangeKind = "auto"
    check: Callable[[], None] = lambda: None


class RayFleet(Fleet):
    """Clients on Ray actors.

    Args:
        experiment: A reference to the experiment in the object store.
        settings: How the actors are made.
        warn: Called with a sentence when something falls back.
    """

    def __init__(self, experiment: Any, settings: FleetSettings, warn: Callable[[str], None]) -> None:
        self._experiment, self._settings, self._warn = experiment, settings, warn
        self._num_actors, self._hang_timeout_s = settings.num_actors, settings.hang_timeout_s
        self._group = ActorGroup(settings.vectors, kind=settings.exchange, timeout_s=_START_S, warn=warn)
        self._births = 0
        self._closed = False
        self._nodes: dict[int, str] = {}
        self._actors: dict[int, Any] = {}
        self._starting: dict[int, Any] = {}
        self._pings: dict[int, tuple[Any, float]] = {}
        self._grow(range(self._num_actors), settings.begun)

    # -- life ----------------------------------------------------------------------------------------------------

    def _grow(self, indices: Sequence[int], begun: Sequence[Any] = ()) -> None:
        for index in indices:
            started = begun[index] if begun else None
            self._actors[index] = started or start_client(self._experiment, self._settings, index, births=self._births)
            self._starting[index] = self._actors[index].where.remote(self._settings.check)
        self._births += 1

    def ready(self) -> None:
        """Wait until every actor has started.

        Raises:
            ResourceError: An actor can't start, or does not within the time.
            RunError: Likewise, for one that takes a lost one's place.
        """
        for _ in range(_MOST_STARTS):
            if not self._starting:
                return
            dead = self._see_started()
            if not dead:
                try:
                    self._form_group()
                    return
                except (*_DIED, ray_errors.GetTimeoutError):
                    dead = self._find_dead()
                if not dead:
                    self._group.fall_back(_SLOW)
                    return
            if self._closed:
                raise RunError("the run was ended")
            self._warn(f"client actors {dead} died while they started, and are replaced")
            self._grow(dead)
        raise RunError(f"client actors died in {_MOST_STARTS} starts running; Ray's logs may say why")

    def _see_started(self) -> list[int]:
        """Wait for actors that start; return those that died meanwhile."""
        where, self._starting = self._starting, {}
        _, late = ray.wait(list(where.values()), num_returns=len(where), timeout=_START_S)
        if late:
            missing = [k for k, ref in where.items() if ref in late]
            raise self._kind_of_start_error(
                f"client actors {missing} did not start within {_START_S:.0f} s; the cluster has"
                f" {ray.available_resources()} free"
            )
        dead = []
        for index, ref in where.items():
            try:
                self._nodes[index] = ray.get(ref)
            except ray_errors.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, Exception) else error) from None
            except _DIED as error:
                if getattr(error, "actor_init_failed", False):  # its own code failed, and would again
                    reason = str(error).strip().splitlines()[-1]
                    raise self._kind_of_start_error(f"a client actor could not start: {reason}") from error
                dead.append(index)
        return dead

    @property
    def _kind_of_start_error(self) -> type[FedsweepError]:
        """Return the error's class: at first the request is wrong; later a node is gone, and a retry may find room."""
        return ResourceError if self._births == 1 else RunError

    def _form_group(self) -> None:
        numbers = sorted(self._actors)
        self._group.form([self._actors[k] for k in numbers], [self._nodes[k] for k in numbers])

    def repair(self) -> None:
        if self._closed:
            raise RunError("the run was ended")
        dead = self._find_dead()
        try:
            # Where all are alive, it was the exchange that broke: its members have left it, and get another.
            self._grow(dead) if dead else self._form_group()
        except _DIED:
            self._group.drop()  # one more has died, as the next call to it will tell
        except ray_errors.GetTimeoutError:
            self._group.fall_back(_SLOW)

    def _find_dead(self) -> list[int]:
        pings = {k: actor.ping.options(concurrency_group="control").remote() for k, actor in self._actors.items()}
        # For all at once: several that hang, on a node that is gone say, cost the time of one.
        ray.wait(list(pings.values()), num_returns=len(pings), timeout=self._hang_timeout_s)
        dead = []
        for index, ref in pings.items():
            try:
                ray.get(ref, timeout=0)
            except (ray_errors.RayError, TimeoutError):
                # One that hangs is not gone yet, and holds the resources that its successor needs.
                ray.kill(self._actors[index])
                dead.append(index)
        return dead

    def close(self) -> None:
        self._closed = True
        for actor in self._actors.values():
            ray.kill(actor)
        self._group.drop()

    # -- work ----------------------------------------------------------------------------------------------------

    @property
    def num_workers(self) -> int:
        return self._num_actors

    @property
    def folds(self) -> bool:
        self.ready()
        return self._group.in_use.name != "server"

    @property
    def exchange(self) -> ExchangeInUse:
        return self._group.in_use

    def play(self, segment: Segment, anchor: Tensor, memories: Mapping[int, Handle]) -> SegmentReply:
        self.ready()
        # Put once, read by all actors of a node from its shared memory.
        segment_ref, anchor_ref = ray.put(sent_segment(segment)), ray.put(to_arrays(anchor))
        calls: dict[int, list[Any]] = {}
        keepers: dict[int, list[int]] = {}
        # In a folded segment every actor sums its share of the coordinates, also one without clients.
        busy = sorted(set(segment.workers.values())) if not self._folded(segment) else range(self._num_actors)
        for index in busy:
            mine = sorted(k for k, w in segment.workers.items() if w == index)
            remembering = [k for k in mine if k in memories]
            keepers[index] = mine if segment.closes and segment.remembers else []
            # A memory is a result of its own: it stays where it is until another actor, or a checkpoint, asks for it.
            call = self._actors[index].run.options(num_returns=1 + len(keepers[index]))
            refs = call.remote(
                segment_ref, anchor_ref, remembering, keepers[index], *[memories[k] for k in remembering]
            )
            calls[index] = refs if keepers[index] else [refs]
        answers: dict[int, SegmentReply] = {}

        def receive(index: int, sent: SegmentReply) -> None:
            references = zip(keepers[index], calls[index][1:], strict=True)
            answers[index] = received_answer(sent, {k: ref for k, ref in references if k in sent.totals})

        heads = {index: refs[0] for index, refs in calls.items()}
        self._wait(heads, together=self._folded(segment), receive=receive)
        return merged_answers([answers[index] for index in calls])

    @staticmethod
    def _folded(segment: Segment) -> bool:
        return len(segment.points) > 1

    def _wait(
        self,
        heads: Mapping[int, Any],
        *,
        together: bool = False,
        receive: Callable[[int, Any], None] = lambda index, answer: None,
    ) -> None:
        """Wait for all calls; a failed client's error comes before the losses that it caused.

        Args:
            heads: A call for each actor.
            together: They wait for each other: where one is lost, the others get no further.
            receive: Takes each actor's answer as it comes, so that it is copied while others work.
        """
        pending = dict(heads)
        lost: dict[int, str] = {}
        failed: list[Exception] = []
        alone_since, in_vain = 0.0, list[int]()
        while pending:
            done, _ = ray.wait(list(pending.values()), num_returns=1, timeout=_POLL_S, fetch_local=False)
            for index in [k for k, ref in pending.items() if ref in done]:
                self._outcome(index, pending.pop(index), lost, failed, receive)
            gone = [] if done else self._hanging(pending)
            if together and (lost or failed):
                # A machine that is gone closes no connection, and a call whose memory is gone never begins: those who
                # wait for it may not notice.
                alone_since = alone_since or time.monotonic()
                if time.monotonic() - alone_since > self._hang_timeout_s:
                    in_vain = gone = list(pending)
            for index in gone:
                ray.kill(self._actors[index])
                lost[index] = f"client actor {index} does not answer"
                pending.pop(index)
        # A ping that nobody waited for any more says nothing of the next wait.
        self._pings.clear()
        # An actor's death may be why a memory could not be had: the round is tried again before a checkpoint is.
        if failed and not (lost.keys() - set(in_vain) and all(isinstance(error, MemoryLost) for error in failed)):
            raise min(failed, key=_blame)
        if lost:
            raise WorkerLost(", ".join(lost[k] for k in sorted(lost)))

    def _outcome(
        self,
        index: int,
        ref: Any,
        lost: dict[int, str],
        failed: list[Exception],
        receive: Callable[[int, Any], None],
    ) -> None:
        try:
            receive(index, ray.get(ref))
        except WorkerLost as error:
            lost.setdefault(index, str(error))
        except _DIED as error:
            lost[index] = f"client actor {index} died ({type(error).__name__})"
        except ray_errors.NodeDiedError as error:
            lost[index] = f"client actor {index}'s node died ({type(error).__name__})"
        except ray_errors.ObjectLostError as error:
            failed.append(MemoryLost(f"what clients of actor {index} remember is lost ({type(error).__name__})"))
        except ray_errors.RayTaskError as error:
            failed.append(error.cause if isinstance(error.cause, Exception) else error)

    def _hanging(self, pending: Mapping[int, Any]) -> list[int]:
        """List actors whose ping has not come back for too long; send new pings to the others."""
        late = []
        for index in pending:
            ref, since = self._pings.get(index, (None, 0.0))
            if ref is not None and not ray.wait([ref], timeout=0)[0]:
                if time.monotonic() - since > self._hang_timeout_s:
                    late.append(index)
                continue
            self._pings[index] = (
                self._actors[index].ping.options(concurrency_group="control").remote(),
                time.monotonic(),
            )
        return late

    def prove(self, segment: Segment, anchor: Tensor, memories: Mapping[int, Handle]) -> Stepping:
        self.ready()
        call, answers = self._actors[0].prove, list[Stepping]()
        ref = call.remote(ray.put(sent_segment(segment)), ray.put(to_arrays(anchor)), [*memories], *memories.values())
        self._wait({0: ref}, receive=lambda _, stepping: answers.append(stepping))
        return answers[0]

    def measure(self, question: Question, vector: Tensor, memories: Mapping[int, Handle]) -> Mapping[int, Payload]:
        self.ready()
        vector_ref, refs = ray.put(to_arrays(vector)), {}
        for index, actor in self._actors.items():
            share = question.clients[index :: self._num_actors]
            remembering = [client for client in share if client in memories]
            remembered = [memories[client] for client in remembering]
            part = question.of(share)
            sent = replace(part, models=to_arrays(part.models), broadcast=to_arrays(part.broadcast))
            refs[index] = actor.measure.remote(sent, vector_ref, remembering, *remembered)
        merged: dict[int, Payload] = {}
        self._wait(refs, receive=lambda index, answers: merged.update(to_tensors(answers)))
        return dict(sorted(merged.items()))

    def fetch(self, handle: Handle) -> State:
        """Return the memory behind a handle, from whatever node it lies on.

        Raises:
            MemoryLost: It was on a node that is gone.
        """
        try:
            return ray.get(handle)
        except ray_errors.ObjectLostError as error:
            raise MemoryLost(f"what a client remembers is lost ({type(error).__name__})") from error

    def keep(self, memory: State) -> Handle:
        return ray.put(memory)


def start_client(experiment: Any, settings: FleetSettings, index: int, *, births: int = 0) -> Any:
    """Start a client actor; it is not waited for.

    Args:
        experiment: A reference to the experiment in the object store.
        settings: How it is made.
        index: Its number, from 0.
        births: How often actors were made before; it is in the name, since Ray knows a dead actor's for a while.
    """
    name = f"{settings.name}-client-{index}" + (f"-{births}" if births else "")
    options = {**settings.options, **settings.placed(index)}
    # Ray may not restart it: a fresh process has neither a place in the exchange nor the round's work so far.
    remote = REMOTE_CLIENT_ACTOR.options(name=name, max_restarts=0, max_task_retries=0, **options)
    return remote.remote(experiment, index, float(options.get("num_gpus", 0.0)))


def _blame(error: Exception) -> tuple[int, int, int]:
    """Return a sort key: the earliest failure comes first, whatever order the actors reported in."""
    if isinstance(error, ClientJobError):
        return (0, error.step, error.client)
    return (1, 0, 0)
