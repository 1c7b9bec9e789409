"""Run the server as a Ray actor: it holds the engine, makes the client actors, writes the run folder."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fedsweep.driver.observers import Observer
from fedsweep.driver.session import Opened, RunSession, SessionSettings, Step
from fedsweep.errors import ClusterLost, FedsweepError, RunError
from fedsweep.experiment.experiment import Experiment
from fedsweep.fleet.fleet import Vectors
from fedsweep.fleet.ray_fleet import FleetSettings, RayFleet, start_client
from fedsweep.fleet.ray_metrics import RayMetrics
from fedsweep.fleet.ray_watch import lost_process, shut_down, watched_call
from fedsweep.runs.folder_lock import write_along
from fedsweep.runs.sources import Sources, check_same, shared_sources

if TYPE_CHECKING:
    from fedsweep.driver.plan import Plan

# So often is a server actor that is at work asked what there is to tell, in seconds.
_LISTEN_EVERY_S = 0.5
# What it is asked beside its work, it answers within so many seconds, or not at all.
_ANSWER_S = 300.0


def fleet_settings(plan: Plan, placed: Callable[[int], Mapping[str, Any]] = lambda index: {}) -> FleetSettings:
    """Return the settings by which a run's client actors are made.

    Args:
        plan: The run.
        placed: Further Ray options for each actor's number.
    """
    runtime = plan.config.runtime
    return FleetSettings(
        num_actors=plan.num_actors,
        name=f"{plan.config.name}-{uuid.uuid4().hex[:6]}",
        vectors=Vectors.of(plan.experiment, own_gpu=runtime.gpus_per_client >= 1),
        options={"num_cpus": runtime.cpus_per_client, "num_gpus": runtime.gpus_per_client},
        placed=placed,
        check=_source_check(plan),
    )


def _source_check(plan: Plan) -> Callable[[], None]:
    """Return the check that actors are of the driver's sources; on its node, only where others began the cluster."""
    here = None if plan.config.runtime.address is not None else ray.get_runtime_context().get_node_id()
    tree = plan.config.tree()
    return functools.partial(_check_sources, shared_sources(tree), tree, here)


def _check_sources(driver: Sources, tree: Mapping[str, Any], beside_driver: str | None) -> None:
    if ray.get_runtime_context().get_node_id() != beside_driver:
        check_same(driver, tree)


class ServerActor(RunSession):
    """A :class:`RunSession` behind actor calls, which shows its rounds on Ray's metrics endpoint.

    Args:
        experiment: The experiment; a view into the node's shared memory.
        reference: The same as an object reference (in a list, so that Ray does not resolve it), for the clients.
        fleet: How client actors are made.
        settings: Where the session writes.
    """

    def __init__(
        self, experiment: Experiment, reference: list[Any], fleet: FleetSettings, settings: SessionSettings
    ) -> None:
        torch.set_num_threads(1)
        os.umask(settings.umask)  # workers of an embedded cluster inherit the one that keeps its token private
        write_along(settings.folder)
        own = ray.get_runtime_context().get_assigned_resources().get("GPU", 0.0)
        self._metrics = RayMetrics(
            run=settings.folder.name,
            method=experiment.method.name,
            planned_rounds=experiment.training.rounds,
            client_actors=fleet.num_actors,
            gpus=own + fleet.num_actors * float(fleet.options.get("num_gpus", 0.0)),
        )
        super().__init__(experiment, functools.partial(RayFleet, reference[0], fleet), settings)

    def __repr__(self) -> str:
        return "ServerActor"

    def open(self, *, resume: bool) -> Opened:
        opened = super().open(resume=resume)
        for record in opened.records:
            self._metrics.record(record)
        return opened

    def step(self) -> Step:
        step = super().step()
        if step.record is not None:
            self._metrics.record(step.record)
        return step


@contextlib.contextmanager
def ray_trouble(folder: Path) -> Iterator[None]:
    """Turn what Ray raises in the driver into the failure of a run in this folder that can be resumed."""
    try:
        yield
    except ClusterLost as error:
        raise RunError(f"{error}, so the run can't go on by itself; {_way_on(folder)}") from error
    except ray.exceptions.RayError as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise RunError(f"Ray failed ({type(error).__name__}: {reason}); {_way_on(folder)}") from error


def _way_on(folder: Path) -> str:
    return f"go on with fedsweep run --resume {shlex.quote(str(folder))}"


class RemoteSession:
    """A :class:`RunSession` in a server actor, with the session's own methods.

    Args:
        plan: The run; its experiment is put into the object store once, for the server and all clients.
        settings: Where the session writes.
    """

    def __init__(self, plan: Plan, settings: SessionSettings) -> None:
        # The server stays on this node, where the run folder is.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        runtime, fleet = plan.config.runtime, fleet_settings(plan)
        # Kept: what its owner no longer names goes, and an actor that is begun anew reads it once more.
        reference = self._reference = ray.put(plan.experiment)
        if not runtime.cpus_per_server and not runtime.gpus_per_server:
            # Beside their start the server's own then goes on; they are the server's to end. Where the server reserves
            # something they wait for it, so that they can't take it away.
            begun = [start_client(reference, fleet, index) for index in range(fleet.num_actors)]
            fleet = replace(fleet, begun=begun)
        remote: Any = ray.remote(concurrency_groups={"control": 1})(ServerActor)  # type: ignore[call-overload]
        self._actor = remote.options(
            name=f"{fleet.name}-server",
            # Ray may not restart it: a fresh one knows nothing of the run, which goes on from its checkpoint instead.
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=here,
            num_cpus=runtime.cpus_per_server,
            num_gpus=runtime.gpus_per_server,
        ).remote(reference, [reference], fleet, settings)
        self._observers: Sequence[Observer] | None = None
        self._folder = settings.folder
        self._is_lost = False

    def listen(self, observers: Sequence[Observer]) -> None:
        self._observers = observers

    def open(self, *, resume: bool) -> Opened:
        return self._call("open", resume=resume)  # type: ignore[no-any-return]

    def step(self) -> Step:
        return self._call("step")  # type: ignore[no-any-return]

    def save(self) -> int:
        return self._ask("save")  # type: ignore[no-any-return]

    def finish(self, status: str, reason: str | None = None, stopped_by: str | None = None) -> dict[str, Any]:
        return self._ask("finish", status, reason, stopped_by)  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the server and its clients."""
        if self._is_lost:
            return
        with contextlib.suppress(ClusterLost):
            watched_call(self._end_actor)

    def _end_actor(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            ray.get(self._actor.close.options(concurrency_group="control").remote(), timeout=30)
        ray.kill(self._actor)

    def _call(self, method: str, **arguments: Any) -> Any:
        done = getattr(self._actor, method).remote(**arguments)
        return self._answer(done, self._hear_until)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """Call the actor beside the work that is under way."""
        self._check_cluster()
        done = getattr(self._actor, method).options(concurrency_group="control").remote(*arguments)
        return self._answer(done, self._wait_for)

    def _answer(self, done: Any, wait: Callable[[Any], None]) -> Any:
        try:
            wait(done)
            return ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            cause = error.__cause__
            if isinstance(cause, FedsweepError):
                raise cause from None
            # Of one that raised at its start the last line is what it raised, the others are where.
            line = str(error).strip().splitlines()[-1 if getattr(error, "actor_init_failed", False) else 0]
            reason = f"{type(error).__name__}: {line}"
            raise RunError(f"the server actor died ({reason}); {_way_on(self._folder)}") from error

    def _check_cluster(self) -> None:
        """End the connection to a cluster that has lost a process it can't do without, before Ray ends the driver.

        Raises:
            RunError: It has.
        """
        lost = "its connection" if self._is_lost else lost_process()
        if lost is None:
            return
        if not self._is_lost:
            self._is_lost = True
            shut_down()
        raise RunError(f"Ray lost {lost}, so the run can't go on by itself; {_way_on(self._folder)}")

    def _wait_for(self, done: Any) -> None:
        deadline = time.monotonic() + _ANSWER_S
        while not ray.wait([done], timeout=_LISTEN_EVERY_S)[0]:
            self._check_cluster()
            if time.monotonic() > deadline:
                raise RunError(f"the server actor does not answer; {_way_on(self._folder)}")

    def _hear_until(self, done: Any) -> None:
        """Pass on the server's news until a call is done; what is wrong with the server, that call tells."""
        request: Any = None
        while not ray.wait([done], timeout=_LISTEN_EVERY_S)[0]:
            self._check_cluster()
            if self._observers is None:
                continue
            request = request or self._actor.messages.options(concurrency_group="control").remote()
            if ray.wait([request], timeout=_LISTEN_EVERY_S)[0]:
                self._hear(request)
                request = None
        self._check_cluster()
        if request is not None:
            self._hear(request)

    def _hear(self, request: Any) -> None:
        with contextlib.suppress(ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            messages = ray.get(request, timeout=30)
            if self._observers is not None:
                messages.pass_to(self._observers)
