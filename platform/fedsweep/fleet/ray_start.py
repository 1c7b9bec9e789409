"""Starting a Ray cluster of our own, also beside other work: in a thread, while the driver imports and plans.

It listens on 127.0.0.1 alone, keeps its token from other users, sends no usage statistics and ends with the process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from fedsweep.errors import ClusterLost, ResourceError
from fedsweep.fleet.ray_leftovers import mark_new_sessions, own_sessions, remove_session, tell_kept
from fedsweep.fleet.ray_watch import Attempt, StartWatch, last_word, unless_lost
from fedsweep.processes import job_settings, replaced, worker_variables

if TYPE_CHECKING:
    from fedsweep.config.execution import Runtime
    from fedsweep.config.schema import Config

# Of the memory, as Ray's own default.
_STORE_SHARE = 0.3
# How a node starts the autoscaler, what watches logs for the driver, and the server below a dashboard.
_NOT_NEEDED = ("start_monitor", "start_log_monitor", "start_api_server")
# What a raylet starts, and where it reads at which ports they are; Ray's own agents write so where they serve nothing.
_AGENTS = ("--dashboard_agent_command=", "--runtime_env_agent_command=")
_PORTS = (
    "METRICS_AGENT_PORT_NAME",
    "METRICS_EXPORT_PORT_NAME",
    "DASHBOARD_AGENT_LISTEN_PORT_NAME",
    "RUNTIME_ENV_AGENT_PORT_NAME",
)
_LISTENS_NOWHERE = -1
_LOGGER = logging.getLogger("fedsweep")


@dataclass(frozen=True, kw_only=True)
class ClusterNeeds:
    """What a run asks of a cluster.

    Attributes:
        actors: Client actors.
        cpus_per_client: Logical CPUs of each.
        gpus_per_client: Logical GPUs of each.
        cpus_per_server: Of the server actor.
        gpus_per_server: Of the server actor.
        store_bytes: Object store that an embedded cluster should have.
    """

    actors: int
    cpus_per_client: float = 1.0
    gpus_per_client: float = 0.0
    cpus_per_server: float = 0.0
    gpus_per_server: float = 0.0
    store_bytes: int = 2**30

    @property
    def bundles(self) -> list[tuple[str, float, float]]:
        """Name, CPUs and GPUs of each actor, the server's first."""
        clients = [(f"client actor {k}", self.cpus_per_client, self.gpus_per_client) for k in range(self.actors)]
        return [("server actor", self.cpus_per_server, self.gpus_per_server), *clients]


def num_gpus_here() -> int:
    """GPUs that torch sees in this process."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def room_here(runtime: Runtime) -> int:
    """Client actors that this machine's GPUs have room for where they need some, else its CPUs; at least 1."""
    if runtime.gpus_per_client:
        return max(1, int(num_gpus_here() / runtime.gpus_per_client))
    return max(1, int(len(os.sched_getaffinity(0)) / runtime.cpus_per_client))


class ClusterStart:
    """A cluster of our own that starts from now on.

    Its CPUs are only for counting, so more client actors than cores can be asked for; they then share the cores.
    Until :meth:`take` or :meth:`end`, new files of this process are its user's alone: Ray writes its token so.

    Args:
        needs: What it must hold.
        dashboard: Start Ray's dashboard on 127.0.0.1.
        is_early: It starts beside other work; it then has no GPU, and does not wait for torch to look for any.
    """

    def __init__(self, needs: ClusterNeeds, *, dashboard: bool = False, is_early: bool = False) -> None:
        if dashboard:
            _check_dashboard()
        set_environment(joining=False)
        self._dashboard, self._needs = dashboard, needs
        self._num_cpus = max(os.cpu_count() or 1, int(-(-sum(cpu for _, cpu, _ in needs.bundles) // 1)))
        self._watch, self._sessions = StartWatch(), own_sessions()
        self.is_taken = False
        self._mask: int | None = os.umask(0o077)
        start = functools.partial(_begin, needs, num_cpus=self._num_cpus, dashboard=dashboard, is_early=is_early)
        self._attempt = Attempt(start, self._lost, starts_processes=True)

    def holds(self, needs: ClusterNeeds) -> bool:
        """Whether it is large enough."""
        cpus = sum(cpu for _, cpu, _ in needs.bundles)
        gpus = needs.gpus_per_client or needs.gpus_per_server
        return cpus <= self._num_cpus and not gpus and needs.store_bytes <= self._needs.store_bytes

    def _lost(self) -> str | None:
        mark_new_sessions(self._sessions)  # so that doctor knows them, too, if this process is killed
        return self._watch.lost()

    def wait(self) -> None:
        """Wait until it is there.

        Raises:
            ResourceError: It could not be started.
        """
        try:
            context = self._attempt.result()
        except Exception as error:  # Ray raises the bare class where a process of its own dies while it starts
            self._give_up()
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ResourceError(f"no Ray cluster could be started here ({said}); try again") from error
        finally:
            self._put_mask_back()
        if self._dashboard:
            _LOGGER.info("Ray dashboard: http://%s (it asks for the token: ray get-auth-token)", context.dashboard_url)

    def take(self) -> None:
        """Wait until it is there; whoever takes it ends it. Raises as :meth:`wait`."""
        self.is_taken = True
        self.wait()

    def end(self) -> None:
        """End it, where nobody took it."""
        self.is_taken = True
        with contextlib.suppress(ResourceError):
            self.wait()
            import ray

            with contextlib.suppress(ClusterLost):
                unless_lost(ray.shutdown)
            for session in mark_new_sessions(self._sessions):
                remove_session(session)

    def _give_up(self) -> None:
        import ray

        with contextlib.suppress(ClusterLost):
            unless_lost(ray.shutdown, self._watch.lost)
        self._watch.end()
        for session in mark_new_sessions(self._sessions):
            tell_kept(session)

    def _put_mask_back(self) -> None:
        if self._mask is not None:
            os.umask(self._mask)
            self._mask = None


def early_needs(config: Config) -> ClusterNeeds | None:
    """What a run will need of a cluster of our own, from its configuration alone; None where that does not say enough.

    It says enough where Ray is asked for, by ``runtime.backend`` or by several client actors, and no GPU. The object
    store may grow to the share of the memory that Ray itself would take; it takes no more than is put there.
    """
    runtime = config.runtime
    several = isinstance(runtime.client_actors, int) and runtime.client_actors > 1
    wanted = runtime.backend == "ray" or (runtime.backend == "auto" and several)
    if not wanted or runtime.address is not None or runtime.gpus_per_client or runtime.gpus_per_server:
        return None
    return ClusterNeeds(
        actors=runtime.client_actors if isinstance(runtime.client_actors, int) else room_here(runtime),
        cpus_per_client=runtime.cpus_per_client,
        cpus_per_server=runtime.cpus_per_server,
        store_bytes=int(_STORE_SHARE * psutil.virtual_memory().total),
    )


@contextlib.contextmanager
def early_cluster(needs: ClusterNeeds | None, folder: Path | None = None) -> Iterator[ClusterStart | None]:
    """A cluster that starts beside other work; ended afterwards unless :func:`ray_cluster` took it and ended it.

    Args:
        needs: What it must hold; None: there is none to start. Nor is there where this process has a cluster already.
        folder: The run's, for a last word where Ray ends this process: it may do so as soon as it starts.
    """
    here = sys.modules.get("ray")
    if needs is None or (here is not None and here.is_initialized()):
        yield None
        return
    with last_word(folder):
        begun = ClusterStart(needs, is_early=True)
        try:
            yield begun
        finally:
            if not begun.is_taken:
                begun.end()


def _begin(needs: ClusterNeeds, *, num_cpus: int, dashboard: bool, is_early: bool) -> Any:
    import ray

    variables = {**worker_variables(), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else needs.store_bytes
    skipped = () if dashboard else _NOT_NEEDED
    with _starting_node(variables, skipped=skipped, agents=_needs_agents(dashboard=dashboard)):
        init: Any = ray.init
        return init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=0 if is_early else num_gpus_here(),
            include_dashboard=dashboard,
            dashboard_host="127.0.0.1",
            namespace="fedsweep",
            object_store_memory=max(100 * 2**20, min(needs.store_bytes, int(free * 0.8))),
            log_to_driver=False,
            logging_level="ERROR",
            **job_settings(),
        )


@contextlib.contextmanager
def _starting_node(variables: Mapping[str, str], *, skipped: Sequence[str], agents: bool) -> Iterator[None]:
    """Ray starts a node on 127.0.0.1 whose workers have variables, without what we ask nothing of.

    Each of what is skipped is a Python process of its own, and ``ray.init`` waits for three of them.

    Args:
        variables: Of the raylet's environment.
        skipped: Methods of Ray's node.
        agents: Whether the raylet has Ray's agents.

    Raises:
        RuntimeError: This Ray starts its raylet in another way, so workers would have none of the variables.
    """
    import ray
    from ray._private import ray_constants, services
    from ray._private.node import Node

    usual, was_told = services.start_ray_process, False

    def start(command: list[str], process_type: str, *args: Any, **settings: Any) -> Any:
        nonlocal was_told
        if process_type == ray_constants.PROCESS_TYPE_RAYLET:
            was_told = True
            settings["env_updates"] = {**(settings.get("env_updates") or {}), **variables}
            command = command if agents else _without_agents(command)
        return usual(command, process_type, *args, **settings)

    def skip(node: Any, **settings: Any) -> None:
        """Nothing."""

    # Ray reads the variable that keeps a cluster on 127.0.0.1 when it is first imported, maybe before us.
    with (
        replaced(ray_constants, ENABLE_RAY_CLUSTER=False),
        replaced(services, start_ray_process=start),
        replaced(Node, **dict.fromkeys(skipped, skip)),
    ):
        yield
    if not was_told:
        raise RuntimeError(f"Ray {ray.__version__} starts in a way that fedsweep does not know")


def _needs_agents(*, dashboard: bool) -> bool:
    """Whether Ray's agents of a node serve anything: its dashboard and its metrics, which are an extra.

    The other agent makes runtime environments, of which we ask for none (:mod:`fedsweep.processes`).
    """
    from ray import _raylet

    # An older Ray reads no files.
    return dashboard or _lacks_for_dashboard() is None or not hasattr(_raylet, "persist_port")


def _without_agents(command: Sequence[str]) -> list[str]:
    """A raylet's command with processes that only wait in place of its agents, which are said to listen nowhere.

    A raylet has none without agents: it ends with them, and finds their ports in files, or ends after half a minute.
    """
    from fedsweep.fleet import ray_idle_agent

    _raylet: Any = importlib.import_module("ray._raylet")
    flags = dict(word.removeprefix("--").split("=", 1) for word in command if "=" in word)
    for name in _PORTS:
        _raylet.persist_port(flags["session_dir"], flags["node_id"], getattr(_raylet, name), _LISTENS_NOWHERE)
    waits = subprocess.list2cmdline([sys.executable, "-I", "-S", str(ray_idle_agent.__file__)])
    return [f"{word.split('=', 1)[0]}={waits}" if word.startswith(_AGENTS) else word for word in command]


def set_environment(*, joining: bool) -> None:
    """What Ray reads from the environment when it is imported and, unless a cluster is joined, when it starts."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not joining:
        # Despite its name: without it every process of a local cluster listens on all interfaces.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        # In advance Ray starts as many workers as there are CPUs, not as many as the run has actors.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")


def _check_dashboard() -> None:
    if (error := _lacks_for_dashboard()) is not None:
        raise ResourceError(f"the Ray dashboard needs an extra: pip install 'fedsweep[dashboard]' ({error})") from error


def _lacks_for_dashboard() -> ImportError | None:
    """What is not installed of the extra; None: all of it is."""
    try:
        importlib.import_module("ray.dashboard.optional_deps")
    except ImportError as error:
        return error
    return None
