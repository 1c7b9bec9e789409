"""From a round as it went to its row of ``rounds.parquet``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedsweep.client.messages import RoundTotals
from fedsweep.components.base import ComponentReport
from fedsweep.engine.cost import CostModel
from fedsweep.engine.plan import RoundPlan
from fedsweep.engine.round import Round
from fedsweep.experiment.experiment import Experiment
from fedsweep.guard import wrong
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
        self._counts_NC = np.stack([p.label_counts for p in experiment.world.profiles])
        self._population_C = population(self._counts_NC)

    def row(self, round: Round, *, wall_time_s: float) -> RoundRecord:
        """The row of a round that is not evaluated yet."""
        plan, ledger, context = round.plan, round.ledger, round.plan.context
        reports = self._reports(round.components)
        up, down = ledger.total("up"), ledger.total("down")
        steps = sum(total.steps for total in round.totals.values())
        loss_sum = sum(total.loss_sum for total in round.totals.values())
        lost_steps = {k: work.steps for k, work in plan.lost.items() if work.steps}
        stale, spent = self._staleness(round), int(sum(round.spent))
        taken = {k: total.steps for k, total in round.totals.items()} | lost_steps
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
            over_budget=self._over_budget(round),
            local_steps=steps + sum(lost_steps.values()),
            flops=self._flops(plan, round.totals, lost_steps) + spent,
            fwd_macs_per_sample=self._macs(plan, trained),
            sim_time_s=plan.clock,
            wall_time_s=wall_time_s,
            server_time_s=round.server_time_s,
            aggregation_weights=round.weights,
            staleness=stale,
            present=None if self._experiment.world.availability is None else context.present,
            extra=_further(reports, stale, spent),
            traffic=ledger.traffic(taken),
            **self.group_figures(plan, round.components, cost=up + down),
        )

    def group_figures(self, plan: RoundPlan, components: Mapping[str, State], *, cost: int) -> dict[str, Any]:
        """The columns that need no training.

        They tell of the high-frequency group, if any, and of kappa_g: the values that move, both ways (``cost``).
        """
        known = (report.high_frequency for report in self._reports(components))
        high = next((group for group in known if group is not None), None)
        if high is not None and not plan.context.cohort:
            high = ()  # nobody was there to be planned for: the state still has an earlier round's group
        ratio = self._comm_ratio(plan, cost)
        return {"high_frequency": high, "kl_divergence": self._kl(high), "comm_cost": cost, "comm_ratio": ratio}

    def _staleness(self, round: Round) -> tuple[int, ...] | None:
        """How often the server's model changed since each attendee received its own."""
        if not self._experiment.method.pacing.carries_work():
            return None
        # Less 1: the aggregation that took them in is no change that they missed.
        return tuple(round.version - 1 - u.anchor_version for u in round.updates)

    def _reports(self, components: Mapping[str, State]) -> list[ComponentReport]:
        reports = []
        for seam, component in self._experiment.method.server_components():
            report = component.report(components[seam])
            if not isinstance(report, ComponentReport):
                raise wrong(component, "report", must="a ComponentReport", given=report, when="after a round")
            for name, value in report.metrics.items():
                found: object = value
                if not isinstance(found, int | float | np.number):
                    must = f"numbers as metrics ({name!r})"
                    raise wrong(component, "report", must=must, given=value, when="after a round")
            reports.append(report)
        return reports

    def _kl(self, group: tuple[int, ...] | None) -> float | None:
        """Divergence of the group's labels from the population's, in nats (DynamicFL, section 4)."""
        if not group:
            return None
        counts = self._counts_NC[list(group)].sum(axis=0)
        return float(kl_divergence(counts / counts.sum(), self._population_C))

    def _comm_ratio(self, plan: RoundPlan, cost: int) -> float | None:
        """kappa_g over A x 2|W| x L, with L the cohort's mean number of steps (DynamicFL, section 7)."""
        work = plan.context.work
        if not work:
            return None
        mean_steps = sum(w.steps for w in work.values()) / len(work)
        # The paper's |W| is the model itself, without optimiser state that travels beside it.
        model_values = self._costs.layout.num_params + self._costs.layout.num_buffers
        return cost / (len(work) * 2 * model_values * mean_steps)

    def _over_budget(self, round: Round) -> int | None:
        budgets, context = self._experiment.world.budgets, round.plan.context
        if budgets is None or not context.cohort:
            return None
        high, low = self._experiment.method.pacing.costs(context)
        limits = budgets.client_budgets(high, low)
        return sum(int(round.ledger.client_values(k) > limits[k]) for k in context.cohort)

    def _flops(self, plan: RoundPlan, totals: Mapping[int, RoundTotals], lost_steps: Mapping[int, int]) -> int:
        works = plan.context.work
        did = {
            k: self._costs.flops(plan.submodel(k), total.samples, work=works.get(k), probed=total.probed)
            for k, total in totals.items()
        }
        lost = {k: works[k].samples_in(steps) for k, steps in lost_steps.items()}
        did |= {k: self._costs.flops(plan.submodel(k), samples, work=works[k]) for k, samples in lost.items()}
        return sum(did.values())

    def _macs(self, plan: RoundPlan, trained: list[int]) -> float | None:
        if not trained:
            return None
        macs = [self._costs.forward_macs(plan.submodel(k)) for k in trained]
        return sum(macs) / len(macs)


def _further(reports: Sequence[ComponentReport], stale: Sequence[int] | None, spent: int) -> dict[str, float]:
    """Figures that not every run has."""
    figures = {name: float(value) for report in reports for name, value in report.metrics.items()}
    figures |= {"mean_staleness": sum(stale) / len(stale)} if stale else {}
    return figures | ({"server_flops": float(spent)} if spent else {})
