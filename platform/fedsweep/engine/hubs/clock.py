"""The virtual clock where models meet at other hubs than the server: each hub has a time of its own.

A hub has its model when the last one that it merges has arrived, and whoever starts from that model starts then; nobody
waits for other hubs. A device sends its trained model to all its hubs over its own link, which they share, and receives
over its own; where the topology brings links, each message takes its own. A device goes on when it has sent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fedsweep.engine.clock import Leg, TimingInputs, device_of, leg_time
from fedsweep.records import LocalJob, RoundContext, SyncPoint
from fedsweep.submodel import FULL_MODEL
from fedsweep.world.devices import client_time
from fedsweep.world.topology import SERVER, Graph, Merge, Tree


class HubClock:
    """Times the sync points of a round.

    Args:
        context: The round.
        inputs: Of its work.

    Attributes:
        times: Virtual seconds at which hubs got other models in the round.
        end: Virtual seconds at which the last one had.
    """

    def __init__(self, context: RoundContext, inputs: TimingInputs) -> None:
        self._context, self._inputs = context, inputs
        self._graph_link = context.topology.link if isinstance(context.topology, Graph) else None
        self._tree_link = context.topology.link if isinstance(context.topology, Tree) else None
        self.times: dict[int, float] = {}
        self.end = context.clock
        self._trained: dict[int, float] = {}  # when each client was through with its last job
        self._taken = dict.fromkeys(context.cohort, 0)

    def at(self, hub: int) -> float:
        """Return virtual seconds at which a hub had its present model; the server has it when the round begins."""
        first = self._context.clock if hub == SERVER else 0.0
        return self.times.get(hub, self._context.hub_times.get(hub, first))

    def pass_through(self, point: SyncPoint) -> None:
        """Go through a sync point."""
        for job in point.start:
            self._trained[job.client] = self._begun(job) + self._work_s(job)
        sent: Counter[int] = Counter()
        for merge in point.merges:
            sent.update(client for client in merge.clients if merge.travels and client != merge.hub)
        through = {client: self._trained[client] + self._upload_s(client, sent[client]) for client in point.attend}
        for merge in point.merges:
            if merge.travels:
                self.times[merge.hub] = self._merged_at(merge, through)
                self.end = max(self.end, self.times[merge.hub])

    def _begun(self, job: LocalJob) -> float:
        return max(self.at(job.model), job.not_before, self._trained.get(job.client, 0.0))

    def _work_s(self, job: LocalJob) -> float:
        before = self._taken[job.client]
        self._taken[job.client] = before + job.steps
        is_sent = not job.resume and job.model != job.client
        leg = Leg(
            client=job.client,
            steps=job.steps,
            after=before,
            down=() if is_sent else None,
            up=False,
            probes=self._inputs.probed(job.client, self._context.work[job.client].num_samples, last=True),
        )
        return leg_time(leg, self._context, self._inputs).total_s

    def _merged_at(self, merge: Merge, through: Mapping[int, float]) -> float:
        # A client asks for models of other hubs when it has trained.
        asked_at = self._trained.get(merge.hub, 0.0)
        moments = [max(self.at(hub), asked_at) + self._hop_s(hub, merge.hub) for hub in merge.hubs]
        received = sum(8 * self._bytes(hub) for hub in merge.hubs if hub >= 0 and self._graph_link is None)
        for client in merge.clients:
            # Whoever merges its own model has sent it first.
            is_own = client == merge.hub
            if self._graph_link is None or is_own:
                moments.append(through[client])
                received += 0 if is_own else 8 * self._bytes(client)
            else:
                link = self._graph_link
                moments.append(self._trained[client] + link.latency_s + 8 * self._bytes(client) / link.bits_per_s)
        last = max(moments)
        if merge.hub < 0 or not received:
            return last
        device = device_of(merge.hub, self._context, self._inputs)
        return last + client_time(device, steps=0, flops=0, bits_down=received, bits_up=0).download_s

    def _hop_s(self, hub: int, other: int) -> float:
        """Return seconds of the model of a hub until it is at another: of a client's upload, or of a joint link."""
        if hub >= 0:
            link = self._graph_link
            return self._upload_s(hub, 1) if link is None else link.latency_s + 8 * self._bytes(hub) / link.bits_per_s
        if self._tree_link is None or SERVER not in (hub, other):
            return 0.0
        return self._tree_link.latency_s + 8 * self._bytes(SERVER) / self._tree_link.bits_per_s

    def _upload_s(self, client: int, messages: int) -> float:
        if self._graph_link is not None or not messages:
            return 0.0
        bits = 8 * messages * self._bytes(client)
        device = device_of(client, self._context, self._inputs)
        return client_time(device, steps=0, flops=0, bits_down=0, bits_up=bits).upload_s

    def _bytes(self, sender: int) -> int:
        submodel = self._context.submodels.get(sender, FULL_MODEL)
        return self._inputs.costs.num_bytes(submodel, "up") + submodel.index_bytes()


def round_end(
    points: tuple[SyncPoint, ...], context: RoundContext, inputs: TimingInputs
) -> tuple[float, dict[int, float]]:
    """Return the clock at the round's end, and at which time each hub but the server has its model.

    The round ends when the last hub has its own; with the next one each goes on at its own time.
    """
    clock = HubClock(context, inputs)
    for point in points:
        clock.pass_through(point)
    times = {**context.hub_times, **clock.times}
    return clock.end, {hub: time for hub, time in sorted(times.items()) if hub != SERVER}
