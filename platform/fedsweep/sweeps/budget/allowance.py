"""Which trials a study's budget has room for."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedsweep.config.sweep import StudyBudget
from fedsweep.sweeps.budget.trial_costs import TrialCosts, spent_in
from fedsweep.sweeps.prepared_trial import PreparedTrial
from fedsweep.sweeps.sweep_folder import SweepFolder

NOTHING = TrialCosts()


@dataclass(kw_only=True)
class Allowance:
    """Keeps what the trials of a study will spend and have spent, and tells whether one more fits.

    Attributes:
        budget: The study's.
        folder: The sweep's.
        entries: The sweep's trials; a search adds to them.
        plan: Gives what a trial will spend.
    """

    budget: StudyBudget
    folder: SweepFolder
    entries: Sequence[PreparedTrial]
    plan: Callable[[PreparedTrial], TrialCosts]
    _planned: dict[str, TrialCosts] = field(default_factory=dict)
    _spent: dict[str, TrialCosts] = field(default_factory=dict)
    _before: dict[str, TrialCosts] = field(default_factory=dict)

    def planned(self, entry: PreparedTrial) -> TrialCosts:
        """Return what a trial will spend.

        Raises:
            InputError: It can't be planned.
        """
        name = entry.trial.folder
        if name not in self._planned:
            self._planned[name] = self.plan(entry)
        return self._planned[name]

    def note(self, entry: PreparedTrial, spent: TrialCosts) -> None:
        """Note what a trial has spent that has ended."""
        self._spent[entry.trial.folder] = spent

    def in_the_end(self, entry: PreparedTrial, *, settled: bool) -> TrialCosts:
        """Return what a trial will have spent in the end: where it is settled, what it has."""
        if not settled:
            return self.planned(entry)
        name = entry.trial.folder
        if name not in self._spent:
            spent = spent_in(self.folder.trial_path(entry.trial))
            self._spent[name] = self.planned(entry) if spent is None else spent
        return self._spent[name]

    def _spent_before(self, entry: PreparedTrial) -> TrialCosts:
        """Return what a trial that is not under way has spent: it may have failed, or been put away."""
        name = entry.trial.folder
        if name in self._spent:
            return self._spent[name]
        if name not in self._before:
            self._before[name] = spent_in(self.folder.trial_path(entry.trial)) or NOTHING
        return self._before[name]

    def committed(self, begun: Sequence[PreparedTrial], settled: Collection[int]) -> TrialCosts:
        """Add up what trials will have spent in the end, where those of the ``settled`` numbers have ended.

        Of trials that have not begun it is what they spent before the sweep was resumed.
        """
        parts = [self.in_the_end(entry, settled=entry.trial.number in settled) for entry in begun]
        numbers = {entry.trial.number for entry in begun}
        before = [self._spent_before(entry) for entry in self.entries if entry.trial.number not in numbers]
        return sum([*parts, *before], NOTHING)

    def has_room(self, more: TrialCosts, committed: TrialCosts) -> bool:
        """Check that a trial fits beside what is committed."""
        return (committed + more).fits(self.budget)

    def can_begin(self, entry: PreparedTrial, committed: TrialCosts) -> bool:
        """Check that one of the trials fits beside what is committed, where what it has spent already is."""
        return self.has_room(self._rest(entry), committed)

    def _rest(self, entry: PreparedTrial) -> TrialCosts:
        """Return what a trial will spend beyond what it has."""
        planned, before = self.planned(entry), self._spent_before(entry)
        return replace(
            planned,
            total_bytes=planned.total_bytes - before.total_bytes,
            sim_time_s=planned.sim_time_s - before.sim_time_s,
            trials=planned.trials - before.trials,
        )

    def affordable(self) -> list[PreparedTrial]:
        """Return the trials that fit if each costs what is planned, those that have finished first.

        One that doesn't fit is passed over for smaller ones after it.
        """
        done = [entry for entry in self.entries if self.folder.has_finished(entry.trial)]
        begun, spent = [*done], self.committed(done, {entry.trial.number for entry in done})
        for entry in self.entries:
            if entry not in done and self.can_begin(entry, spent):
                begun.append(entry)
                spent += self._rest(entry)
        return begun

    def estimated_count(self, samples: Sequence[PreparedTrial]) -> float:
        """Estimate how many trials there is room for, by the mean costs of some; infinite without a limit on these."""
        costs = [self.plan(sample) for sample in samples]
        limits: Mapping[str, float] = self.budget.costs
        means = {name: math.fsum(getattr(cost, name) for cost in costs) / max(1, len(costs)) for name in limits}
        return min((limits[name] / mean for name, mean in means.items() if mean), default=math.inf)
