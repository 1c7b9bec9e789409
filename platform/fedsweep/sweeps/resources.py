"""A trial's share of the cluster: a bundle for its server, and one per client actor.

A small trial runs its clients in its own process, so that a core trains one trial without messages. It reserves a
single bundle; nested actors come only where they are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fedsweep.errors import ResourceError
from fedsweep.fleet.ray_cluster import ClusterNeeds, check_fits

if TYPE_CHECKING:
    from fedsweep.config.schema import Config

# A bundle must hold something; where a server reserves no CPU it holds this much memory.
_TOKEN_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Share:
    """One trial's reservation.

    Attributes:
        actors: Client actors; 0: the clients run in the trial's process.
        cpus_per_client: CPUs of each actor; of the process where there is none.
        gpus_per_client: Share of a GPU, likewise.
        cpus_per_server: CPUs of the trial's process itself.
        gpus_per_server: Its share of a GPU.
    """

    actors: int
    cpus_per_client: float = 1.0
    gpus_per_client: float = 0.0
    cpus_per_server: float = 0.0
    gpus_per_server: float = 0.0

    @classmethod
    def of(cls, config: Config) -> Share:
        """Return the share of a trial with this configuration.

        With ``backend: auto`` its clients run in its own process unless several actors are asked for; with
        ``backend: ray`` there is at least one.
        """
        runtime = config.runtime
        actors = runtime.client_actors if isinstance(runtime.client_actors, int) else 1
        in_process = runtime.backend == "local" or (runtime.backend == "auto" and actors == 1)
        return cls(
            actors=0 if in_process else actors,
            cpus_per_client=runtime.cpus_per_client,
            gpus_per_client=runtime.gpus_per_client,
            cpus_per_server=runtime.cpus_per_server,
            gpus_per_server=runtime.gpus_per_server,
        )

    @property
    def bundles(self) -> list[dict[str, float]]:
        """The placement group's bundles, the server's first."""
        if not self.actors:
            one = {"CPU": self.cpus_per_client + self.cpus_per_server}
            gpus = self.gpus_per_client + self.gpus_per_server
            return [one | ({"GPU": gpus} if gpus else {})]
        server = _bundle(self.cpus_per_server, self.gpus_per_server)
        return [server or {"memory": _TOKEN_BYTES}] + [
            _bundle(self.cpus_per_client, self.gpus_per_client)
        ] * self.actors

    @property
    def needs(self) -> ClusterNeeds:
        """The same for the check against nodes."""
        if self.actors:
            return ClusterNeeds(**asdict(self))
        cpus, gpus = self.bundles[0]["CPU"], self.bundles[0].get("GPU", 0.0)
        return ClusterNeeds(actors=1, cpus_per_client=cpus, gpus_per_client=gpus)


def check_shares(nodes: Sequence[dict[str, Any]], shares: Sequence[Share]) -> None:
    """Make sure that each trial finds room in an empty cluster: one that does not would wait for ever.

    Args:
        nodes: What ``ray.nodes()`` gave.
        shares: Of all trials.

    Raises:
        ResourceError: A trial is larger than the cluster; names what it asks for and what the largest node has.
    """
    totals = [dict(node["Resources"]) for node in nodes if node["Alive"]]
    for share in dict.fromkeys(shares):
        gpus = share.bundles[0].get("GPU", 0.0)
        if not share.actors and gpus > 1 and gpus != int(gpus):
            raise ResourceError(
                f"runtime.gpus_per_client + runtime.gpus_per_server of a trial in one process must be 1/k or a whole"
                f" number, but is {gpus:g}; set runtime.backend=ray to give clients and server GPUs of their own"
            )
        check_fits(totals, share.needs)


def largest(shares: Sequence[Share]) -> Share:
    """Return the share that reserves most: a cluster that is started for a sweep holds at least this."""
    return max(shares, key=lambda share: sum(bundle.get("CPU", 0.0) for bundle in share.bundles))


def room_for(nodes: Sequence[dict[str, Any]], share: Share) -> int:
    """Count the trials of this share that an empty cluster can play at a time, at least one."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    wanted = {kind: sum(bundle.get(kind, 0.0) for bundle in share.bundles) for kind in ("CPU", "GPU")}
    fits = [int(sum(node.get(kind, 0.0) for node in alive) / amount) for kind, amount in wanted.items() if amount]
    return max(1, min(fits, default=1))


def _bundle(cpus: float, gpus: float) -> dict[str, float]:
    return {name: amount for name, amount in (("CPU", cpus), ("GPU", gpus)) if amount}
