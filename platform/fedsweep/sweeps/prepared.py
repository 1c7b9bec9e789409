"""A sweep that is ready to start, and its trials with their configurations."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError, InputError
from fedsweep.results.texts import canonical
from fedsweep.runs.files import TAKEN_OVER, check_no_link
from fedsweep.runs.folder_lock import sole_writer
from fedsweep.runs.run_folder import CONFIG, RunFolder
from fedsweep.runs.sources import Sources, is_of_samples
from fedsweep.sweeps.budget.allowance import Allowance
from fedsweep.sweeps.budget.study_clock import StudyClock
from fedsweep.sweeps.budget.trial_costs import TrialCosts, planned_costs, spent_in
from fedsweep.sweeps.fairness import world_of
from fedsweep.sweeps.prepared_trial import PreparedTrial, dataset_key, make_entry
from fedsweep.sweeps.resources import Share
from fedsweep.sweeps.search.halving import Halving
from fedsweep.sweeps.search.proposals import Outcome, Proposals, Search, read_outcome
from fedsweep.sweeps.space import SEED, lies_in, make_trial, setting_spaces
from fedsweep.sweeps.sweep_folder import SweepFolder, SweepPlan
from fedsweep.sweeps.trial import POPULATION, TrialSpec

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.config.sweep import SpaceEntry
    from fedsweep.world.data.datasets import Dataset

# What trials must share to be compared one by one, the seed included, in what a trial's process gets.
WORLD = "world"
# A trial whose costs were estimated may spend so much more than that.
_TOLERANCE = 1.01
# Tune takes some milliseconds for a report, as long as a small model's round.
_REPORT_EVERY_S = 0.5


@dataclass(kw_only=True)
class PreparedSweep:
    """A sweep that is ready to start.

    Attributes:
        config: Its configuration, as loaded.
        folder: Where it goes.
        plan: Its trials; of a search, those of before.
        entries: The same with configurations; a search adds to them.
        datasets: Data sets by :func:`~fedsweep.sweeps.prepared_trial.dataset_key`, loaded.
        notes: What a reader of the comparison must know.
        full: What a whole trial spends of the resource that a scheduler rations.
        uri: The tracking store, or None.
        samples: Entries by which the space was checked.
        extended: Of a sweep that gets more trials, what becomes of them, in a line.
        allow_changed_code: Keep runs of other sources, and let those that are unfinished go on.
    """

    config: Config
    folder: SweepFolder
    plan: SweepPlan
    entries: list[PreparedTrial]
    datasets: Mapping[str, Dataset]
    notes: Sequence[str]
    full: float
    uri: str | None
    samples: list[PreparedTrial] = field(default_factory=list)
    extended: str = ""
    allow_changed_code: bool = False

    @property
    def metrics(self) -> tuple[str, ...]:
        """The figures that are compared, the leading one first."""
        return tuple(self.config.sweep.aims)

    @property
    def reported(self) -> tuple[str, ...]:
        """The figures that trials report: what is compared, and what is constrained."""
        return tuple(dict.fromkeys((*self.metrics, *(limit.metric for limit in self.config.sweep.limits))))

    @property
    def sources(self) -> Sources:
        """The sources behind all trials that are known, but for their samples, which go with the data sets."""
        entries = self.entries or self.samples
        return {n: digest for entry in entries for n, digest in entry.sources.items() if not is_of_samples(n)}

    @property
    def unlike(self) -> list[PreparedTrial]:
        """A trial of each kind: those of one kind differ in numbers alone, so they read the same files."""
        return list({entry.texts: entry for entry in reversed(self.samples)}.values())

    @property
    def most(self) -> float:
        """Trials of the whole sweep, were it not for its budget; infinite for a search that only the budget ends."""
        sweep = self.config.sweep
        if sweep.rungs is not None:
            return Halving(self.config).most
        if not sweep.proposes:
            return len(self.plan.trials)
        is_open = sweep.budget is not None and "samples" not in sweep.model_fields_set
        return math.inf if is_open else sweep.samples + self._num_taken_over

    @functools.cached_property
    def _num_taken_over(self) -> int:
        return sum((self.folder.trial_path(entry.trial) / TAKEN_OVER).exists() for entry in self.entries)

    @property
    def total(self) -> int:
        """Trials of the whole sweep, as many as its budget has room for; of a search, about so many."""
        if self.allowance is None:
            return int(self.most)
        if not self.config.sweep.proposes:
            return len(self.allowance.affordable())
        most = min(self.most, self.allowance.estimated_count(self.samples))
        return max(len(self.entries), int(most) if math.isfinite(most) else 0)

    @functools.cached_property
    def allowance(self) -> Allowance | None:
        """Room in the study's budget, trial by trial; None without a budget."""
        budget = self.config.sweep.budget
        if budget is None:
            return None
        return Allowance(budget=budget, folder=self.folder, entries=self.entries, plan=self._plan_costs)

    def _plan_costs(self, entry: PreparedTrial) -> TrialCosts:
        assert self.config.sweep.budget is not None
        try:
            return planned_costs(entry.config, self.datasets[dataset_key(entry.config)], self.config.sweep.budget)
        except InputError as error:
            raise type(error)(f"trial {entry.trial.number} ({entry.trial.label}): {error}") from None

    def add(self, entry: PreparedTrial) -> None:
        """Add a trial to a search's."""
        self.entries.append(entry)
        self.plan = replace(self.plan, trials=(*self.plan.trials, entry.trial))

    def point_of(self, tree: Mapping[str, Any], key: str) -> PreparedTrial | None:
        """Return the trial of a search's space that has this configuration, as the next one; None: it has none.

        Args:
            tree: A resolved configuration.
            key: Its hash.
        """
        for part in setting_spaces(self.config):
            try:
                chosen = {name: _chosen(entry, name, tree) for name, entry in part.space.items()}
                values = {**part.values(chosen), SEED: tree[SEED]}
                trial = make_trial(self.config, len(self.entries) + 1, values, setting=part.name)
                entry = make_entry(self.config, trial, uri=self.uri)
            except (KeyError, TypeError, InputError):
                continue
            if entry.user_config.hash() == key:
                return entry.with_samples(self.datasets)
        return None

    def check_budget(self) -> None:
        """Refuse a budget that has no room for any trial.

        Raises:
            ConfigError: It has none, or a trial's costs can't be planned.
        """
        allowance = self.allowance
        if allowance is None or (self.entries and allowance.affordable()):
            return
        costs = [(allowance.plan(entry), entry.trial.label) for entry in self.entries or self.samples]
        if not any(cost.fits(allowance.budget) for cost, _ in costs):
            cost, label = min(costs, key=lambda pair: (pair[0].total_bytes, pair[0].sim_time_s))
            raise ConfigError(
                f"sweep.budget has no room for a single trial: {label} alone would spend"
                f" {cost.in_words(allowance.budget)}; raise the budget, or make trials smaller (training.rounds)"
            )

    def room(self, settled: Collection[int]) -> Callable[[Mapping[str, Any]], bool]:
        """Return the check whether a search's trial with certain values fits into the budget beside all others.

        Args:
            settled: Numbers of those whose end counts, in place of their plan.
        """
        allowance = self.allowance
        if allowance is None:
            return lambda values: True
        beside = allowance.committed(self.entries, settled)
        number = len(self.entries) + 1

        def has_room(values: Mapping[str, Any]) -> bool:
            entry = make_entry(self.config, make_trial(self.config, number, values), uri=self.uri)
            return allowance.has_room(allowance.plan(entry), beside)

        return has_room

    @property
    def spent(self) -> TrialCosts:
        """Costs of all trials so far, as their folders tell."""
        parts = [spent_in(self.folder.trial_path(entry.trial)) for entry in self.entries]
        return sum((part for part in parts if part is not None), TrialCosts())

    @property
    def left_out(self) -> list[PreparedTrial]:
        """Trials that the budget left without an end: not begun, or put away when its hours were over."""
        entries = [] if self.allowance is None else self.unfinished
        return [entry for entry in entries if RunFolder(self.folder.trial_path(entry.trial)).status != "failed"]

    @property
    def clock(self) -> StudyClock:
        """The study's time, from what its folder says of it."""
        budget = self.config.sweep.budget
        return StudyClock(self.folder.path, None if budget is None else budget.hours)

    @property
    def unfinished(self) -> list[PreparedTrial]:
        """Trials that have not run to their end."""
        return [entry for entry in self.entries if not self.folder.has_finished(entry.trial)]

    @property
    def replays(self) -> bool:
        """True where the scheduler goes by the rounds of trials that have finished before, too."""
        return self.config.sweep.scheduler in ("asha", "median")

    @property
    def before(self) -> list[PreparedTrial]:
        """Trials of before that a search's sweep begins with: those to be gone through again, then the unfinished."""
        return self.in_order if self.replays else self.unfinished

    @property
    def in_order(self) -> list[PreparedTrial]:
        """Trials that have finished come first: a scheduler then knows what it has to compare with."""
        return sorted(self.entries, key=lambda entry: not self.folder.has_finished(entry.trial))

    @property
    def is_done(self) -> bool:
        """True where nothing is left to run, in the budget: no trial, nor one that a search would still propose."""
        if not self.entries:
            return False
        if self.clock.is_over():
            return True
        left = self.unfinished
        if left and (self.allowance is None or len(self.allowance.affordable()) > len(self.entries) - len(left)):
            return False
        if not self.config.sweep.proposes or len(self.entries) >= self.most:
            return True
        trials = [entry.trial for entry in self.entries]
        settled = {entry.trial.number for entry in self.entries if entry not in left}
        return self.make_search().next_values(trials, self.outcomes(), self.room(settled)) is None

    def make_search(self) -> Proposals:
        """Make what proposes the sweep's trials."""
        return Search(self.config) if self.config.sweep.rungs is None else Halving(self.config)

    def outcomes(self) -> dict[int, Outcome]:
        """Return what the trials came to that have ended, by their numbers."""
        read = {e.trial.number: read_outcome(self.folder.trial_path(e.trial), self.config) for e in self.entries}
        return {number: outcome for number, outcome in read.items() if outcome is not None}

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the folder around whatever changes it, the trials' included.

        Raises:
            OutputError: Another process writes it, or it leads elsewhere by a link.
        """
        for entry in self.entries:
            check_no_link(self.folder.trial_path(entry.trial))
        with sole_writer(self.folder.path):
            yield

    def create_folder(self, *, overwrite: bool) -> None:
        """Begin the sweep's folder; see :meth:`SweepFolder.create`."""
        self.folder.create(self.plan, config_yaml=self.config.to_yaml(), overwrite=overwrite)
        # An earlier sweep's trials, which were there until now, spend nothing of this one's budget.
        self.__dict__.pop("allowance", None)

    def write_extension(self) -> None:
        """Make the folder's plan and configuration this sweep's."""
        with self.writing():
            self.rename_finished()
            self.folder.extend(self.plan, config_yaml=self.config.to_yaml())

    def rename_finished(self) -> None:
        """Give finished trials that were another sweep's, or had another label, their names: tables group by these."""
        for entry in self.entries:
            run, name = RunFolder(self.folder.trial_path(entry.trial)), entry.user_config.name
            if run.has_finished() and (config := load_config(run.path / CONFIG)).name != name:
                run.write_config(config.model_copy(update={"name": name}).to_yaml())

    def describe(self, entry: PreparedTrial) -> dict[str, Any]:
        """Return a trial as its process gets it."""
        spec = TrialSpec(
            folder=self.folder.trial_path(entry.trial),
            config_json=json.dumps(entry.config.tree()),
            metrics=self.reported,
            resource=self.config.sweep.resource,
            # Trials that exchange checkpoints have one name for them.
            config_hash=f"{POPULATION}{self.config.hash()}" if self.config.sweep.scheduler == "pbt" else None,
            allow_changed_code=self.allow_changed_code,
            most=self._most(entry),
            report_every_s=_REPORT_EVERY_S if self.config.sweep.scheduler is None else 0.0,
            replays=self.replays,
        )
        done = self.folder.has_finished(entry.trial)
        share = Share(actors=0) if done else entry.share  # one that has finished before only says so
        values = self._moved_values(entry) if spec.config_hash else dict(entry.trial.values)
        described = {"spec": spec, "share": share, "values": values}
        if self.config.sweep.scheduler == "front":
            described[WORLD] = canonical([asdict(world_of(entry.config)), entry.config.seed])
        return described

    def _most(self, entry: PreparedTrial) -> TrialCosts | None:
        """Return what a trial may spend at most, where its costs are no more than estimated: 1 % more than that."""
        if self.allowance is None or self.folder.has_finished(entry.trial):
            return None
        planned, limited = self.allowance.planned(entry), self.allowance.budget.costs
        # What the study does not limit, a trial may spend as much of as it takes.
        most_bytes = int(planned.total_bytes * _TOLERANCE) if "total_bytes" in limited else 0
        most_s = planned.sim_time_s * _TOLERANCE if "sim_time_s" in limited else 0.0
        return None if planned.is_exact else replace(planned, total_bytes=most_bytes, sim_time_s=most_s)

    def _moved_values(self, entry: PreparedTrial) -> dict[str, Any]:
        """Return the values that the trial had last, where a scheduler changes them on the way."""
        path = self.folder.trial_path(entry.trial) / CONFIG
        if not path.is_file():
            return dict(entry.trial.values)
        tree = load_config(path).tree()
        return {key: functools.reduce(operator.getitem, key.split("."), tree) for key in entry.trial.values}


def _chosen(entry: SpaceEntry, key: str, tree: Mapping[str, Any]) -> Any:
    """Return the value of a varied key that a resolved configuration has.

    Raises:
        KeyError: It has none that the entry stands for.
    """
    value = functools.reduce(operator.getitem, key.split("."), tree)
    if isinstance(value, Mapping) and entry.kind == "choice":
        # A resolved component has all its parameters, those that were left out, too.
        like = [one for one in entry.values if isinstance(one, Mapping) and one.items() <= value.items()]
        value = max(like, key=len, default=value)
    if not lies_in(entry, value):
        raise KeyError(key)
    return value
