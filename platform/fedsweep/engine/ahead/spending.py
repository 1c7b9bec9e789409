"""Spend a run's budget of bytes or virtual seconds: choose each round's settings by what it will cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any

from fedsweep.components.codec import Codec
from fedsweep.components.spending import COHORT, Offer, Outlook, Spent
from fedsweep.engine.ahead.card_traffic import CardTraffic
from fedsweep.engine.cost import CostModel
from fedsweep.engine.plan import Planner, RoundPlan
from fedsweep.engine.state import Decision, RunState
from fedsweep.experiment.experiment import Experiment, Option
from fedsweep.guard import ask

# So many rounds before the end are chosen for the budget to come out even.
_LAST = 6
_MOST_SENTENCES = 6
_MUCH_LEFT = 0.01


@dataclass(frozen=True, kw_only=True)
class OptionPlanner:
    """A way of playing rounds: one combination of the configuration's ``planner.choices``.

    Attributes:
        option: The experiment with these values.
        costs: Its messages'.
        planner: Plans its rounds.
        card_traffic: Its bytes beside the models.
    """

    option: Option
    costs: CostModel
    planner: Planner
    card_traffic: CardTraffic

    def sent(self, plan: RoundPlan, seen: set[int]) -> int:
        """Return bytes that a round will send, those beside the models as cards say; ``seen``: took part before."""
        return plan.num_bytes + math.ceil(sum(self.card_traffic.in_round(plan, set(seen))))

    def as_if_always(self, state: RunState) -> RunState:
        """Return a run's state as if this option's codec had made all of the server's messages."""
        return replace(state, made=((state.version, self.costs.own_down),) if state.made else ())


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A round that is chosen.

    Attributes:
        number: Of the option.
        plan: The round.
        num_bytes: That it is planned to send, beside the models as methods' cards say.
        decision: For the run's record.
        traffic: The option's bytes beside the models.
    """

    number: int
    plan: RoundPlan
    num_bytes: int
    decision: Decision
    traffic: CardTraffic


class BudgetSpender:
    """Spends a run's budget.

    Args:
        experiment: With options, and a limit of bytes or virtual seconds.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment

    @cached_property
    def options(self) -> tuple[OptionPlanner, ...]:
        """The ways of playing a round, as the experiment has them."""
        options, downs = [], list[Codec]()
        for option in self._experiment.options:
            if (down := option.experiment.communication.down) not in downs:
                downs.append(down)
        for option in self._experiment.options:
            costs = CostModel(option.experiment, downs)
            planner, traffic = Planner(option.experiment, costs), CardTraffic(option.experiment, costs)
            options.append(OptionPlanner(option=option, costs=costs, planner=planner, card_traffic=traffic))
        return tuple(options)

    def next(self, state: RunState) -> Chosen | str:
        """Return the next round; where none is within the budget, the limit that the option of fewest bytes passes."""
        stop, seen = self._experiment.training.stop, state.taken_part
        plans = [option.planner.plan(state) for option in self.options]
        sent = [option.sent(plan, seen) for option, plan in zip(self.options, plans, strict=True)]
        passed = [stop.passed_by(state.total_bytes + size, plan.clock) for size, plan in zip(sent, plans, strict=True)]
        if all(passed):
            return str(passed[sent.index(min(sent))])
        fits = [limit is None for limit in passed]
        in_bytes = stop.total_bytes is not None
        spent = state.total_bytes if in_bytes else state.clock or 0.0
        left = ((stop.total_bytes if in_bytes else stop.sim_time_s) or 0) - spent
        costs = sent if in_bytes else [(plan.clock or 0.0) - spent for plan in plans]
        debts = [0.0] * len(costs)
        if len(self.options[0].costs.downs) > 1:
            # Who missed rounds downloads their messages, too: what a codec makes of this round's, later ones pay.
            alike = [option.planner.plan(option.as_if_always(state)) for option in self.options]
            lasting = (
                option.sent(plan, seen) if in_bytes else (plan.clock or 0.0) - spent
                for option, plan in zip(self.options, alike, strict=True)
            )
            debts = [each - cost for each, cost in zip(lasting, costs, strict=True)]
        outlook = Outlook(
            offers=tuple(
                Offer(values=option.option.values, cost=cost if fit else math.inf, debt=debt)
                for option, cost, debt, fit in zip(self.options, costs, debts, fits, strict=True)
            ),
            left=left,
            rounds_left=self._experiment.training.rounds - state.round,
            past=self._past(state, in_bytes=in_bytes),
            unit="bytes" if in_bytes else "s",
        )
        chooser = self._experiment.spending
        assert chooser is not None
        number, reason = ask(chooser, "choose", outlook, when=f"in round {state.round + 1}")
        number, reason = adjusted_choice(number, reason, outlook)
        decision = Decision(
            round=state.round + 1, choice=number, cost=float(costs[number]), left=float(left), reason=reason
        )
        traffic = self.options[number].card_traffic
        return Chosen(number=number, plan=plans[number], num_bytes=sent[number], decision=decision, traffic=traffic)

    def _past(self, state: RunState, *, in_bytes: bool) -> tuple[Spent, ...]:
        rounds, before = [], 0.0
        for decision, record in zip(state.decisions, state.records, strict=False):
            clock = record.sim_time_s or 0.0
            cost = record.bytes_up + record.bytes_down if in_bytes else clock - before
            rounds.append(Spent(offer=decision.choice, cost=cost, loss=record.train_loss))
            before = clock
        return tuple(rounds)


def adjusted_choice(wanted: int, reason: str, outlook: Outlook) -> tuple[int, str]:
    """Return the offer that is taken, and why.

    It is what was wanted, unless the rounds left could then not spend what is left, or the end is near: the last rounds
    share what is left evenly, and the last two are the pair that leaves the least.
    """
    costs, left = [offer.cost for offer in outlook.offers], outlook.left
    within = [number for number, cost in enumerate(costs) if cost <= left]
    most = max(within, key=costs.__getitem__)
    if costs[wanted] > left:
        return most, "the most that is left for"
    rounds = min(math.ceil(left / costs[wanted]), outlook.rounds_left) if costs[wanted] > 0 else outlook.rounds_left
    if rounds > _LAST or (rounds == outlook.rounds_left and rounds * costs[wanted] < left and rounds > 1):
        # This round has to spend so much for the rounds after it, at the most each, to be able to spend the rest.
        least = left - (outlook.rounds_left - 1) * costs[most]
        if costs[wanted] >= least:
            return wanted, reason
        enough = [number for number in within if costs[number] >= least]
        return min(enough, key=costs.__getitem__, default=most), "or the rounds left could not spend the budget"
    # A round more than the cheapest one allows would be one that nothing is left for.
    while rounds > 1 and left / rounds < min(costs):
        rounds -= 1
    if rounds == 1:
        return most, "the last round"
    if rounds == 2:
        return _first_of_pair(costs, left, within), "the last two rounds leave the least"
    share = [number for number in within if costs[number] <= left / rounds]
    return max(share, key=costs.__getitem__), f"{rounds} rounds share what is left"


def _first_of_pair(costs: Sequence[float], left: float, within: Sequence[int]) -> int:
    """Return the cheaper of the two offers that together leave the least."""
    pairs = [
        (costs[first] + costs[second], -abs(costs[first] - costs[second]), first)
        for first in within
        for second in within
        if costs[first] <= costs[second] and costs[first] + costs[second] <= left
    ]
    return max(pairs)[2] if pairs else max(within, key=costs.__getitem__)


def decisions_tree(experiment: Experiment, state: RunState) -> list[dict[str, Any]]:
    """Return a run's decisions as plain mappings, each with what its round was set to."""
    return [
        {**asdict(decision), "set": dict(experiment.options[decision.choice].values)} for decision in state.decisions
    ]


def decisions_in_words(experiment: Experiment, state: RunState) -> list[str]:
    """Return sentences on how a budget was spent: one for each stretch of rounds with the same settings but cohorts."""
    sentences = []
    for values, stretch in groupby(state.decisions, key=lambda d: _besides_cohort(experiment, d)):
        decisions = list(stretch)
        first, last = decisions[0], decisions[-1]
        span = f"round {first.round}" if first is last else f"rounds {first.round} to {last.round}"
        sentences.append(f"budget: {span} {values or 'with cohorts as there was left for'}, since {first.reason}")
    if len(sentences) > _MOST_SENTENCES:
        sentences[_MOST_SENTENCES:] = [f"budget: {len(sentences) - _MOST_SENTENCES} more changes, see plan.json"]
    stop = experiment.training.stop
    if state.decisions and stop.total_bytes is not None and state.round == experiment.training.rounds:
        left = 1 - state.total_bytes / stop.total_bytes
        if left > _MUCH_LEFT:
            sentences.append(
                f"budget: {100 * left:.1f} % are left after all rounds; allow more rounds or costlier choices"
            )
    return sentences


def _besides_cohort(experiment: Experiment, decision: Decision) -> str:
    values = experiment.options[decision.choice].values.items()
    return ", ".join(f"{key}={value}" for key, value in values if key != COHORT)
