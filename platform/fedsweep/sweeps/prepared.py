"""A sweep that is ready to start, and its trials with their configurations."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fedsweep.config.load import load_config
from fedsweep.runs.files import check_no_link
from fedsweep.runs.folder_lock import sole_writer
from fedsweep.runs.run_folder import CONFIG
from fedsweep.runs.sources import Sources
from fedsweep.sweeps.fairness import world_of
from fedsweep.sweeps.resources import Share
from fedsweep.sweeps.search.proposals import Outcome, Search, read_outcome
from fedsweep.sweeps.space import Trial, canonical
from fedsweep.sweeps.sweep_folder import SweepFolder, SweepPlan
from fedsweep.sweeps.trial import TrialSpec

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.world.data.datasets import Dataset

# What trials must share to be compared one by one, the seed included, in what a trial's process gets.
WORLD = "world"


@dataclass(frozen=True, kw_only=True)
class PreparedTrial:
    """A trial with its configuration.

    Attributes:
        trial: Which one.
        user_config: Its resolved configuration, as the user gave it.
        config: The same for the trial's process, which is on the cluster already.
        share: What it reserves.
        sources: Hashes of the sources that its results follow from.
    """

    trial: Trial
    user_config: Config
    config: Config
    share: Share
    sources: Sources


@dataclass(kw_only=True)
class PreparedSweep:
    """A sweep that is ready to start.

    Attributes:
        config: Its configuration, as loaded.
        folder: Where it goes.
        plan: Its trials; of a search, those of before.
        entries: The same with configurations; a search adds to them.
        datasets: Data sets by :func:`dataset_key`, loaded.
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
        """The sources behind all trials that are known."""
        return {name: digest for entry in self.entries or self.samples for name, digest in entry.sources.items()}

    @property
    def total(self) -> int:
        """Trials of the whole sweep."""
        return self.config.sweep.samples if self.config.sweep.search == "optuna" else len(self.plan.trials)

    @property
    def unfinished(self) -> list[PreparedTrial]:
        """Trials that have not run to their end."""
        return [entry for entry in self.entries if not self.folder.has_finished(entry.trial)]

    @property
    def in_order(self) -> list[PreparedTrial]:
        """Trials that have finished come first: a scheduler then knows what it has to compare with."""
        return sorted(self.entries, key=lambda entry: not self.folder.has_finished(entry.trial))

    @property
    def is_done(self) -> bool:
        """True where nothing is left to run: no trial, nor one that a search would still propose."""
        if not self.entries or self.unfinished:
            return False
        return len(self.entries) >= self.total or self._has_settled

    @property
    def _has_settled(self) -> bool:
        trials = [entry.trial for entry in self.entries]
        is_search = self.config.sweep.search == "optuna"
        return is_search and Search(self.config).next_values(trials, self.outcomes()) is None

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

    def write_extension(self) -> None:
        """Make the folder's plan and configuration this sweep's."""
        with self.writing():
            self.folder.extend(self.plan, config_yaml=self.config.to_yaml())

    def describe(self, entry: PreparedTrial) -> dict[str, Any]:
        """Return a trial as its process gets it."""
        spec = TrialSpec(
            folder=self.folder.trial_path(entry.trial),
            config_tree=entry.config.tree(),
            metrics=self.reported,
            resource=self.config.sweep.resource,
            # Trials that exchange checkpoints have one name for them.
            config_hash=f"pbt-{self.config.hash()}" if self.config.sweep.scheduler == "pbt" else None,
            allow_changed_code=self.allow_changed_code,
        )
        done = self.folder.has_finished(entry.trial)
        share = Share(actors=0) if done else entry.share  # one that has finished before only says so
        values = self._moved_values(entry) if spec.config_hash else dict(entry.trial.values)
        world = canonical([asdict(world_of(entry.config)), entry.config.seed])
        return {"spec": vars(spec).copy(), "share": asdict(share), "values": values, WORLD: world}

    def _moved_values(self, entry: PreparedTrial) -> dict[str, Any]:
        """Return the values that the trial had last, where a scheduler changes them on the way."""
        path = self.folder.trial_path(entry.trial) / CONFIG
        if not path.is_file():
            return dict(entry.trial.values)
        tree = load_config(path).tree()
        return {key: functools.reduce(operator.getitem, key.split("."), tree) for key in entry.trial.values}
