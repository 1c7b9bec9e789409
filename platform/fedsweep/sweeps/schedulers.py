"""Ray Tune's schedulers and searches, set up for federated runs."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray import tune
from ray.tune.schedulers import (
    ASHAScheduler,
    FIFOScheduler,
    MedianStoppingRule,
    PopulationBasedTraining,
    TrialScheduler,
)
from ray.tune.search import Searcher

from fedsweep.sweeps.budget.allowance import NOTHING, Allowance
from fedsweep.sweeps.budget.trial_costs import TrialCosts
from fedsweep.sweeps.front import CurveFront
from fedsweep.sweeps.prepared import WORLD
from fedsweep.sweeps.search.proposals import Outcome, Proposals, read_curve, read_outcome
from fedsweep.sweeps.space import TRIAL, Trial, setting_spaces
from fedsweep.sweeps.together.choice import likenesses, num_together
from fedsweep.sweeps.trial import OTHERS, REPLAYED, TESTED, metric_values
from fedsweep.sweeps.tune_callback import KeptHere

if TYPE_CHECKING:
    from fedsweep.config.sweep import SpaceEntry
    from fedsweep.sweeps.prepared import PreparedSweep
    from fedsweep.sweeps.prepared_trial import PreparedTrial
    from fedsweep.sweeps.trial import TrialSpec

RESOURCE = "resource"
# Successive halving by thirds: the first rung is at 1/27 of a whole trial.
_REDUCTION, _RUNGS = 3, 3
_MEDIAN_GRACE = 0.1
_PBT_INTERVALS = 10


def make_scheduler(prepared: PreparedSweep) -> TrialScheduler | None:
    """Make the scheduler that a sweep asks for."""
    config, full = prepared.config, prepared.full or 1.0
    # There is no part of a round; a trial of few virtual seconds has parts like any other.
    least = 1.0 if config.sweep.resource == "round" else 0.0
    kind = config.sweep.scheduler
    if kind == "front":
        return FrontScheduler(prepared)
    if kind == "asha":
        # The end of a trial is its own affair: stop_last_trials would cut those that spend more than was forecast.
        return _Halving(
            time_attr=RESOURCE,
            max_t=math.ceil(full),
            grace_period=max(least, full / _REDUCTION**_RUNGS),
            reduction_factor=_REDUCTION,
            stop_last_trials=False,
        )
    if kind == "median":
        return _MedianRule(time_attr=RESOURCE, grace_period=max(least, full * _MEDIAN_GRACE), min_samples_required=3)
    if kind == "pbt":
        entries = setting_spaces(config)[0].space
        # It draws values anew or moves them a little.
        space = {key: [*entry.values] if entry.kind == "choice" else _domain(entry) for key, entry in entries.items()}
        return PopulationBasedTraining(
            time_attr=RESOURCE,
            perturbation_interval=max(least, full / _PBT_INTERVALS),
            hyperparam_mutations={TRIAL: {"values": space}},
            custom_explore_fn=functools.partial(_kept_inside, entries),
            log_config=False,
        )
    return None


def _kept_inside(entries: Mapping[str, SpaceEntry], config: dict[str, Any]) -> dict[str, Any]:
    """Return a trial's moved values, each put back into what it is drawn from: Tune multiplies without bounds."""
    values = config[TRIAL]["values"]
    for key, entry in entries.items():
        if entry.kind != "choice":
            low, high = entry.values
            values[key] = min(max(values[key], low), high - 1 if entry.kind == "randint" else math.nextafter(high, low))
    return config


class _Comparing(TrialScheduler):
    """Lets one of Tune's schedulers compare rounds that have the figure, those of trials that had finished among them.

    Of a NaN its comparisons make the worst of a trial's figures, or nothing that ever ends one. And a trial that has
    finished is not ended, whatever its early rounds look like beside others.
    """

    _metric: str

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self._passed_over: set[str] = set()

    def _is_compared(self, trial: Any, result: dict[str, Any]) -> bool:
        figure = metric_values(result, (self._metric,))[self._metric]
        return trial.trial_id not in self._passed_over and not math.isnan(figure)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        if not self._is_compared(trial, result):
            return TrialScheduler.CONTINUE
        decision: str = super().on_trial_result(tune_controller, trial, result)
        if not result.get(REPLAYED):
            return decision
        self._passed_over |= {trial.trial_id} if decision == TrialScheduler.STOP else set()
        return TrialScheduler.CONTINUE

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        if self._is_compared(trial, result):
            super().on_trial_complete(tune_controller, trial, result)


class _Halving(_Comparing, ASHAScheduler):
    pass


class _MedianRule(_Comparing, MedianStoppingRule):
    pass


class FrontScheduler(FIFOScheduler):
    """Ends a trial that the front of its world and seed dominates along its curve; see :class:`CurveFront`.

    Seeds have other splits, on some of which all do better: one front for all would leave of the hardest nothing.

    Args:
        prepared: The sweep; its finished trials are on the front from the beginning.
    """

    def __init__(self, prepared: PreparedSweep) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reported, self._sweep = prepared.reported, prepared.config.sweep
        self._fronts: dict[str, CurveFront] = {}
        for entry in prepared.in_order:
            if prepared.folder.has_finished(entry.trial):
                world = prepared.describe(entry)[WORLD]
                for figures in read_curve(prepared.folder.trial_path(entry.trial), self._reported):
                    self._front(world).is_dominated(entry.trial.folder, figures)

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        own = trial.config[TRIAL]
        if not result.get(TESTED):
            return TrialScheduler.CONTINUE
        figures = metric_values(result, self._reported)
        is_dominated = self._front(own[WORLD]).is_dominated(own["spec"].folder.name, figures)
        return TrialScheduler.STOP if is_dominated else TrialScheduler.CONTINUE

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        self.on_trial_result(tune_controller, trial, result)

    def _front(self, world: str) -> CurveFront:
        if world not in self._fronts:
            self._fronts[world] = CurveFront(self._sweep.aims, self._sweep.limits)
        return self._fronts[world]


def _domain(entry: SpaceEntry) -> Any:
    makers: dict[str, Any] = {"uniform": tune.uniform, "loguniform": tune.loguniform, "randint": tune.randint}
    return makers[entry.kind](*entry.values)


class Feed(KeptHere, Searcher):
    """Gives Tune one trial after the other: a grid of them it would copy whole for each."""

    def set_search_properties(self, metric: str | None, mode: str | None, config: Any, **spec: Any) -> bool:
        """Leave the metric to the scheduler."""
        return True

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Do nothing: what comes next goes by ends."""

    def save(self, checkpoint_path: str) -> None:
        """Do nothing: the trials are in the sweep's plan, and Tune's own state is never read back."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing; see :meth:`save`."""


class ListedTrials(Feed):
    """Begins listed trials, those first that have finished, as long as the study's budget has room for them.

    A trial ends with what it really spent: where a scheduler ended it early, there is room for another.

    Args:
        prepared: The sweep.
        at_once: How many processes play trials.
    """

    def __init__(self, prepared: PreparedSweep, at_once: int = 1) -> None:
        super().__init__()
        self._prepared, self._allowance, self._at_once = prepared, prepared.allowance, at_once
        self._waiting = prepared.in_order
        self._done = {e.trial.number for e in self._waiting if prepared.folder.has_finished(e.trial)}
        self._alike = likenesses(
            prepared.config, [entry for entry in self._waiting if entry.trial.number not in self._done]
        )
        self._num_alike = Counter(self._alike.values())
        self._begun: list[PreparedTrial] = []
        self._settled: set[int] = set()
        self._own: dict[str, PreparedTrial] = {}

    def suggest(self, trial_id: str) -> Any:
        """Return the next trial that fits; None as long as the end of another one may make room."""
        allowance = self._allowance
        beside = NOTHING if allowance is None else allowance.committed(self._begun, self._settled)
        for entry in self._waiting:
            done = entry.trial.number in self._done
            if done or allowance is None or allowance.can_begin(entry, beside):
                self._waiting.remove(entry)
                self._begun.append(entry)
                self._settled |= {entry.trial.number} if done else set()
                self._own[trial_id] = entry
                others = [] if done else self._others(entry)
                return {TRIAL: self._prepared.describe(entry) | ({OTHERS: others} if others else {})}
        is_quiet = self._settled.issuperset(entry.trial.number for entry in self._begun)
        return Searcher.FINISHED if is_quiet or not self._waiting else None

    def _others(self, entry: PreparedTrial) -> list[TrialSpec]:
        """Return the trials that begin with one, in its process; those of its setting first, with as many steps."""
        kind = self._alike.get(entry.trial.number)
        if kind is None:
            return []
        alike = [other for other in self._waiting if self._alike.get(other.trial.number) == kind]
        alike.sort(key=lambda other: other.trial.setting != entry.trial.setting)
        most = num_together(self._prepared.config, entry, alike=self._num_alike[kind], at_once=self._at_once)
        others = alike[: most - 1]
        self._waiting = [other for other in self._waiting if other not in others]
        return [self._prepared.describe(other)["spec"] for other in others]

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Take note of what a trial spent."""
        entry = self._own[trial_id]
        if entry.trial.number not in self._settled:
            self._settled.add(entry.trial.number)
            _note_spending(self._allowance, entry, None if error else result)


def _note_spending(allowance: Allowance | None, entry: PreparedTrial, report: Mapping[str, Any] | None) -> None:
    """Note what a trial spent by its last report, since its folder may lag behind; without one its folder tells."""
    if allowance is not None and report is not None and "total_bytes" in report:
        clock = report.get("sim_time_s") or 0.0
        allowance.note(entry, TrialCosts(total_bytes=int(report["total_bytes"]), sim_time_s=float(clock), trials=1))


class ProposedTrials(Feed):
    """Gives a search's proposals the form of trials; first come trials of before that are to go on.

    Before these come those that had finished, where the scheduler goes by their rounds. Trial k is chosen from what
    the trials up to k - ``at_once`` came to, whichever others have ended by then: so a search ends with the same trials
    whoever was faster, and after a kill.

    Args:
        search: The search.
        prepared: Its sweep; proposed trials are added to it.
        make: Makes a trial of values, notes it down, and gives it.
        at_once: How many trials there is room for.
    """

    def __init__(
        self,
        search: Proposals,
        prepared: PreparedSweep,
        make: Callable[[Mapping[str, Any]], PreparedTrial],
        at_once: int,
    ) -> None:
        super().__init__()
        self._search, self._prepared, self._make, self._at_once = search, prepared, make, at_once
        self._outcomes = prepared.outcomes()
        left, allowance = prepared.unfinished, prepared.allowance
        affordable = prepared.entries if allowance is None else allowance.affordable()
        self._leftover = [entry for entry in prepared.before if entry in affordable]
        self._ended = {e.trial.number for e in prepared.entries if e not in left or e not in affordable}
        self._own: dict[str, PreparedTrial] = {}
        self._write_study()

    def suggest(self, trial_id: str) -> Any:
        """Return the next trial; None as long as those are under way that it depends on."""
        if self._leftover:
            return self._begin(trial_id, self._leftover.pop(0))
        trials = [entry.trial for entry in self._prepared.entries]
        visible = [trial.number for trial in trials[: max(0, len(trials) + 1 - self._at_once)]]
        if len(trials) >= self._prepared.most:
            return Searcher.FINISHED
        if not self._ended.issuperset(visible):
            return None
        values = self._next_values(trials, visible)
        is_quiet = len(self._ended) == len(trials)
        if values is None and is_quiet:
            # What was under way may have raised a doubt, or spent less than was planned.
            values = self._next_values(trials, [trial.number for trial in trials])
        if values is not None:
            return self._begin(trial_id, self._make(values))
        return Searcher.FINISHED if is_quiet else None

    def _next_values(self, trials: Sequence[Trial], visible: Sequence[int]) -> dict[str, Any] | None:
        seen = {number: self._outcomes[number] for number in visible if number in self._outcomes}
        return self._search.next_values(trials, seen, self._prepared.room(visible))

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Take note of each end."""
        trial, config = self._own[trial_id].trial, self._prepared.config
        if trial.number in self._ended:
            return  # it had finished before
        _note_spending(self._prepared.allowance, self._own[trial_id], None if error else result)
        # One that the scheduler ends writes its result only after this; one whose process is lost may have finished.
        otherwise = Outcome(values=None) if error else Outcome.of(result or {}, config, is_whole=False)
        self._outcomes[trial.number] = read_outcome(self._prepared.folder.trial_path(trial), config) or otherwise
        self._ended.add(trial.number)
        self._write_study()

    def _begin(self, trial_id: str, entry: PreparedTrial) -> dict[str, Any]:
        self._own[trial_id] = entry
        return {TRIAL: self._prepared.describe(entry)}

    def _write_study(self) -> None:
        trials = [entry.trial for entry in self._prepared.entries]
        self._search.write_study(self._prepared.folder.path, trials, self._outcomes)
