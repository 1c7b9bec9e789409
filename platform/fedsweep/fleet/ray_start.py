"""Start a Ray cluster of our own, also beside other work: in a thread, while the driver imports and plans.

It listens on 127.0.0.1 alone, keeps its token from other users, sends no usage statistics and ends with the process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.requirements import Requirement

from fedsweep.errors import ResourceError, first_line
from fedsweep.fleet.ray_internals import loopback_only
from fedsweep.fleet.ray_leftovers import log_kept, mark_new_sessions, own_sessions, remove_session
from fedsweep.fleet.ray_quick_start import quick_settings
from fedsweep.fleet.ray_watch import RayCall, VitalProcesses, exit_notice, shut_down
from fedsweep.processes import memory_here

if TYPE_CHECKING:
    from fedsweep.config.execution import Runtime
    from fedsweep.config.schema import Config

# Of the memory, as Ray's own default.
_STORE_SHARE = 0.3
_LOOPBACK = "127.0.0.1"
_LOGGER = logging.getLogger("fedsweep")


@dataclass(frozen=True, kw_only=True)
class ClusterNeeds:
    """The resources that a run asks of a cluster.

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
        """Return name, CPUs and GPUs of each actor, the server's first."""
        clients = [(f"client actor {k}", self.cpus_per_client, self.gpus_per_client) for k in range(self.actors)]
        return [("server actor", self.cpus_per_server, self.gpus_per_server), *clients]


def num_gpus_here() -> int:
    """Count the GPUs that torch sees in this process."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def room_here(runtime: Runtime) -> int:
    """Count the client actors that this machine has room for: on its GPUs where they need some, else its CPUs.

    On GPUs that is beside the server's share; CPUs are only counted.
    """
    if runtime.gpus_per_client:
        # The slack keeps 1 GPU / (1 / 93) at 93.
        return max(1, int((num_gpus_here() - runtime.gpus_per_server) / runtime.gpus_per_client + 1e-9))
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
        self._vital, self._older_sessions = VitalProcesses.yet_to_come(), own_sessions()
        self.is_taken = False
        self._mask: int | None = os.umask(0o077)
        start = functools.partial(_start_ray, needs, num_cpus=self._num_cpus, dashboard=dashboard, is_early=is_early)
        self._starting = RayCall(start, self._lost, starts_processes=True)

    def fits(self, needs: ClusterNeeds) -> bool:
        """Return whether it is large enough."""
        cpus = sum(cpu for _, cpu, _ in needs.bundles)
        gpus = needs.gpus_per_client or needs.gpus_per_server
        return cpus <= self._num_cpus and not gpus and needs.store_bytes <= self._needs.store_bytes

    def _lost(self) -> str | None:
        self.mark_sessions()  # so that doctor knows them, too, if this process is killed
        return self._vital.lost()

    def mark_sessions(self) -> set[Path]:
        """Mark its session folder as ours, and return it as soon as it is there."""
        return mark_new_sessions(self._older_sessions)

    def wait(self) -> None:
        """Wait until it is there.

        Raises:
            ResourceError: It could not be started.
        """
        try:
            context = self._starting.result()
        except BaseException as error:  # Ray raises the bare class where a process of its own dies while it starts
            self._give_up(keeps_logs=isinstance(error, Exception))
            if not isinstance(error, Exception):
                raise  # Ctrl-C, maybe in a notebook, where the next run must not find this cluster
            raise ResourceError(
                f"no Ray cluster could be started here ({first_line(error)}); on a machine that other work keeps busy"
                " it may have waited too long: try again"
            ) from error
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
            shut_down(self._vital.lost)
            for session in self.mark_sessions():
                remove_session(session)

    def _give_up(self, *, keeps_logs: bool) -> None:
        shut_down(self._vital.lost)
        self._vital.kill_all_started()
        for session in self.mark_sessions():
            (log_kept if keeps_logs else remove_session)(session)

    def _put_mask_back(self) -> None:
        if self._mask is not None:
            os.umask(self._mask)
            self._mask = None


def early_needs(config: Config) -> ClusterNeeds | None:
    """Foresee from a configuration alone what a run needs of a cluster of our own; None where that does not say enough.

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
        store_bytes=int(_STORE_SHARE * memory_here()),
    )


@contextlib.contextmanager
def early_cluster(needs: ClusterNeeds | None, folder: Path | None = None) -> Iterator[ClusterStart | None]:
    """Start a cluster beside other work; end it afterwards unless :func:`ray_cluster` took it and ended it.

    Args:
        needs: What it must hold; None: there is none to start. Nor is there where this process has a cluster already.
        folder: The run's, for a notice where Ray ends this process: it may do so as soon as it starts.
    """
    here = sys.modules.get("ray")
    if needs is None or (here is not None and here.is_initialized()):
        yield None
        return
    with exit_notice(folder):
        begun = ClusterStart(needs, is_early=True)
        try:
            yield begun
        finally:
            if not begun.is_taken:
                begun.end()


def _start_ray(needs: ClusterNeeds, *, num_cpus: int, dashboard: bool, is_early: bool) -> Any:
    import ray

    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else needs.store_bytes
    init: Any = ray.init
    with loopback_only(), quick_settings(dashboard=dashboard) as settings:
        context = init(
            address="local",
            num_cpus=num_cpus,
            num_gpus=0 if is_early else num_gpus_here(),
            include_dashboard=dashboard,
            dashboard_host=_LOOPBACK,
            namespace="fedsweep",
            object_store_memory=max(100 * 2**20, min(needs.store_bytes, int(free * 0.8), memory_here() // 2)),
            log_to_driver=False,
            logging_level="ERROR",
            **settings,
        )
    if context.address_info["node_ip_address"] != _LOOPBACK:
        raise RuntimeError(
            f"Ray {ray.__version__} listens on more than {_LOOPBACK}, since it was imported before fedsweep could tell"
            " it; start Python with RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0"
        )
    return context


def set_environment(*, joining: bool) -> None:
    """Set what Ray reads from the environment when it is imported and, unless a cluster is joined, when it starts."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not joining:
        # Despite its name: without it every process of a local cluster listens on all interfaces.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        # In advance Ray starts as many workers as there are CPUs, not as many as the run has actors.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")


def _check_dashboard() -> None:
    if (error := _lacks_for_dashboard()) is not None:
        raise ResourceError(f"the Ray dashboard needs an extra: pip install 'fedsweep[dashboard]' ({error})") from error


def _lacks_for_dashboard() -> metadata.PackageNotFoundError | None:
    """Return what is not installed of Ray's extra ``default``; None: all of it is."""
    for line in metadata.requires("ray") or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is not None and marker.evaluate({"extra": "default"}) and not marker.evaluate({"extra": ""}):
            try:
                metadata.version(requirement.name)
            except metadata.PackageNotFoundError as error:
                return error
    return None
