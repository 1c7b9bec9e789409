"""From a round as it went to its row of ``rounds.parquet``."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from fedsweep.client.messages import RoundTotals
from fedsweep.components.base import ComponentReport
from fedsweep.engine.clock import payload_s, server_s
from fedsweep.engine.cost import CostModel
from fedsweep.engine.ledger import ClientTotals
from fedsweep.engine.plan import RoundPlan, with_repeats
from fedsweep.engine.round import Round
from fedsweep.experiment.experiment import Experiment
from fedsweep.guard import ask
from fedsweep.models.cost import FLOPS_PER_MAC
from fedsweep.records import RoundRecord, State
from fedsweep.world.label_stats import kl_divergence, population


class RowMaker:
    """Makes the rows.

    Args:
        experiment: The experiment.
        costs: The sub-models' costs.
    """

    def __init__(self, experiment: Experiment, costs: CostModel) -> None:
        self._experiment, self._costs = experiment, costs
        # Of very many clients nobody counts who is there.
        self._counts_presence = experiment.world.availability is not None and not experiment.world.asks_singly
        self._carries_work = experiment.method.pacing.carries_work()

    def row(self, round: Round, *, wall_time_s: float) -> RoundRecord:
        """Return the row of a round that is not evaluated yet."""
        plan, ledger, context = round.plan, round.ledger, round.plan.context
        reports = self._reports(round.components)
        up, down, steps = ledger.total("up"), ledger.total("down"), sum(total.steps for total in round.totals.values())
        loss_sum = sum(total.loss_sum for total in round.totals.values())
        lost_steps = {k: work.steps for k, work in plan.lost.items() if work.steps}
        # How often the server's model changed since each attendee received its own; less 1: the aggregation that took
        # them in is no change that they missed.
        stale = tuple(round.version - 1 - u.anchor_version for u in round.updates) if self._carries_work else None
        server_flops = int(sum(round.server_flops))
        flops, done = self._work(plan, round.totals, lost_steps)
        trained = [*(k for k, total in round.totals.items() if total.steps), *lost_steps]
        return RoundRecord(
            round=context.round,
            timestamp_ms=int(time.time() * 1000),
            train_loss=loss_sum / steps if steps else None,
            lr=round.learning_rate,
            cohort=context.cohort,
            attendees=round.attendees,
            sync_points=round.sync_points,
            values_up=up,
            values_down=down,
            bytes_up=ledger.bytes("up"),
            bytes_down=ledger.bytes("down"),
            total_bytes=round.state.total_bytes + ledger.total_bytes,
            over_budget=None if self._experiment.world.budgets is None else self._over_budget(round),
            local_steps=steps + sum(lost_steps.values()),
            flops=flops + server_flops + round.state.setup_flops,
            fwd_macs_per_sample=self._macs(plan, trained),
            sim_time_s=plan.clock,
            full_time_s=None if plan.clock is None else self._full_time(round, plan.clock, server_flops),
            wall_time_s=wall_time_s,
            server_time_s=round.server_time_s,
            aggregation_weights=round.weights,
            staleness=stale,
            present=tuple(context.present) if self._counts_presence else None,
            extra={name: float(value) for report in reports for name, value in report.metrics.items()}
            | ({"mean_staleness": sum(stale) / len(stale)} if stale else {})
            | ({"server_flops": float(server_flops)} if server_flops else {})
            | dict(round.figures),
            traffic=ledger.traffic(done),
            **self.group_figures(plan, round.components, cost=up + down),
        )

    def group_figures(self, plan: RoundPlan, components: Mapping[str, State], *, cost: int) -> dict[str, Any]:
        """Return the columns that need no training.

        They tell of the high-frequency group, if any, and of kappa_g: the values that move, both ways (``cost``).
        """
        groups = (report.high_frequency for report in self._reports(components))
        high = next((group for group in groups if group is not None), None)
        if high is not None and not plan.context.cohort:
            high = ()  # nobody was there to be planned for: the state still has an earlier round's group
        ratio, divergence = self._comm_ratio(plan, cost), self._kl(high) if high else None
        return {"high_frequency": high, "kl_divergence": divergence, "comm_cost": cost, "comm_ratio": ratio}

    def _reports(self, components: Mapping[str, State]) -> list[ComponentReport]:
        reporting = self._experiment.method.having["report"]
        return [ask(component, "report", components[seam], when="after a round") for seam, component in reporting]

    def _kl(self, group: tuple[int, ...]) -> float:
        """Compute divergence of the group's labels from the population's, in nats."""
        counts = self._experiment.label_counts_NC[list(group)].sum(axis=0)
        return float(kl_divergence(counts / counts.sum(), self._population_C))

    @cached_property
    def _population_C(self) -> np.ndarray:
        return population(self._experiment.label_counts_NC)

    def _comm_ratio(self, plan: RoundPlan, cost: int) -> float | None:
        """Compute kappa_g over M x 2|W| x L, with M the cohort's size and L its mean number of steps."""
        work = plan.context.work
        if not work:
            return None
        mean_steps = sum(w.steps for w in work.values()) / len(work)
        # The paper's |W| is the model itself, without optimiser state that travels beside it.
        model_values = self._costs.layout.num_params + self._costs.layout.num_buffers
        return cost / (len(work) * 2 * model_values * mean_steps)

    def _over_budget(self, round: Round) -> int | None:
        """Count the cohort's clients that moved more than they can afford; None where nobody has a limit."""
        budgets, context = self._experiment.world.budgets, round.plan.context
        if budgets is None or not context.cohort:
            return None
        high, low = self._experiment.method.pacing.costs(context)
        limits = budgets.client_budgets(high, low)
        worth = round.ledger.worth_by_client()
        return sum(int(worth.get(k, 0.0) > limits[k]) for k in context.cohort)

    def _work(
        self, plan: RoundPlan, totals: Mapping[int, RoundTotals], lost_steps: Mapping[int, int]
    ) -> tuple[int, dict[int, ClientTotals]]:
        """Count FLOPs of all clients, and what each did: its work came back, was lost, or it sent earlier work."""
        did = {k: (total.steps, total.samples, total.probed) for k, total in totals.items()}
        did |= {k: (steps, plan.context.work[k].samples_in(steps), 0.0) for k, steps in lost_steps.items()}
        syncs: Counter[int] = Counter()
        for point, times in with_repeats(plan.points):
            for client in point.attend:
                syncs[client] += times
        flops, done = 0, {k: ClientTotals(syncs=times) for k, times in syncs.items()}
        for k, (steps, samples, probed) in did.items():
            own = self._costs.flops(plan.submodel(k), samples, work=plan.context.work.get(k), probed=probed)
            flops += own
            done[k] = ClientTotals(steps=steps, syncs=syncs[k], macs=own // FLOPS_PER_MAC)
        return flops, done

    def _full_time(self, round: Round, clock: float, server_flops: int) -> float:
        """Return the clock with what it leaves out, in this round and before it, in virtual seconds."""
        before, plan, earlier = round.state, round.plan, 0.0
        if not before.records:
            earlier = before.setup_s or 0.0
        elif (last := before.records[-1]).full_time_s is not None and last.sim_time_s is not None:
            earlier = last.full_time_s - last.sim_time_s
        payloads = payload_s(plan.points, plan.context, plan.timing_inputs, round.ledger, end=clock)
        return clock + earlier + payloads + server_s(server_flops)

    def _macs(self, plan: RoundPlan, trained: list[int]) -> float | None:
        if not trained:
            return None
        macs = [self._costs.forward_macs(plan.submodel(k)) for k in trained]
        return sum(macs) / len(macs)
