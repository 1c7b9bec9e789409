"""One trial, round by round, in whichever process Ray Tune gave it: a run like any other, in a run folder.

Nothing here depends on Tune, so that a trial can be played in a test. Whatever ends it, its folder says how, and the
next process goes on from the folder's newest valid checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fedsweep.config.load import load_config
from fedsweep.driver.plan import Plan
from fedsweep.driver.run import Session, open_session, plan_run, run_info
from fedsweep.driver.session import Step
from fedsweep.errors import ClientJobError, ComponentError, ConfigError, InputError, InvariantError
from fedsweep.guard import reason_of
from fedsweep.records import RoundRecord
from fedsweep.results.view import over_rounds
from fedsweep.runs.files import check_no_link
from fedsweep.runs.folder_lock import sole_writer
from fedsweep.runs.run_folder import BY_SCHEDULER, RunFolder
from fedsweep.runs.source_log import begin_log, forget_other_rounds
from fedsweep.runs.sources import Sources, changes
from fedsweep.runs.tables.rounds import scalar_figures
from fedsweep.sweeps.budget.trial_costs import TrialCosts
from fedsweep.sweeps.prepared_trial import dataset_key
from fedsweep.sweeps.space import EXTRA
from fedsweep.tracking.loggers.registry import further_loggers

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.driver.observers import Observer
    from fedsweep.world.data.datasets import Dataset

# Left in a trial's folder by the driver when the scheduler ends the trial, before the trial's process hears of it.
ENDED_BY_SCHEDULER = ".ended-by-scheduler"
# They come again at each try, with the same seed.
FATAL = (InputError, ClientJobError, ComponentError, InvariantError)
# That the round was tested: elsewhere metrics stand with the values that they had before.
TESTED = "tested"
TOTAL_FLOPS = "total_flops"
# Beside what is compared: Tune keeps some kilobytes for each figure of each trial, so it is not told all of a round.
_SHOWN = ("test_accuracy", "test_loss", "train_loss", "sim_time_s")
# Tune says that a trial is done also where it ended it itself; this says that the trial came to its own end.
FINISHED = "finished"
# A round of a trial that had finished before.
REPLAYED = "replayed"
# What the user should know of a round: that a client actor was replaced, say.
MESSAGES = "messages"
# In a trial as Tune has it: those that are played in the same process.
OTHERS = "others"
# How the name begins that trials have for checkpoints which they exchange, with values that change on the way.
POPULATION = "pbt-"
# The process that played the trial before may be about to end, where its driver was killed.
_PATIENCE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class TrialSpec:
    """A trial as a process gets it to play.

    Attributes:
        folder: The run folder, absolute.
        config_json: The trial's resolved configuration, as text: Tune copies, flattens and keeps all that is no text.
        metrics: What the sweep compares; reported in each round, NaN as long as it is unknown.
        resource: What a scheduler rations.
        config_hash: Names checkpoints instead of the configuration's own hash, so that trials may exchange them.
        allow_changed_code: Go on from checkpoints of other sources.
        most: What it may spend of the study's budget, where that has no more room for it; None, and 0 of one of its
            limits: as much as it takes.
        report_every_s: Rounds that end within so many seconds are reported as one, where nothing is decided by rounds.
        replays: Where it has finished before it reports all of its rounds, with which a scheduler compares others'.
    """

    folder: Path
    config_json: str
    metrics: tuple[str, ...]
    resource: str = "round"
    config_hash: str | None = None
    allow_changed_code: bool = False
    most: TrialCosts | None = None
    report_every_s: float = 0.0
    replays: bool = False

    def load_config(self) -> Config:
        """Load the trial's configuration."""
        return load_config(json.loads(self.config_json))


SessionFactory = Callable[[Plan, Path], contextlib.AbstractContextManager[Session]]
DatasetLookup = Callable[["Config"], "Dataset | None"]


def plan_trials(trees: Mapping[str, Any], datasets: Mapping[str, Any]) -> list[str]:
    """Plan trials, given by their names, in a process of any node, as they will be; say which can't be.

    Args:
        trees: Their configurations, as plain mappings.
        datasets: As a trial's process has them.
    """
    import ray

    lacks = []
    for name, tree in trees.items():
        try:
            config = load_config(tree)
            reference = datasets.get(dataset_key(config))
            plan_run(config, None if reference is None else ray.get(reference))
        except InputError as error:
            lacks.append(f"{name}: {error}")
    return lacks


class ActiveTrial:
    """A trial in this process.

    Args:
        spec: The trial.
        find_dataset: Gives the data set of a configuration where it is loaded already.
        make_session: Opens a session; by default on the backend that the configuration names.
        sources: The sources of the sweep's driver, with which those of this process are compared.
    """

    def __init__(
        self,
        spec: TrialSpec,
        find_dataset: DatasetLookup = lambda config: None,
        make_session: SessionFactory = open_session,
        sources: Sources = MappingProxyType({}),
    ) -> None:
        self._sources = sources
        self._spec, self._find_dataset, self._make_session = spec, find_dataset, make_session
        self._folder = RunFolder(spec.folder)
        self._report = TuneReport(metrics=spec.metrics, resource=spec.resource)
        self._stack = contextlib.ExitStack()
        self._session: Session | None = None
        self._loggers: list[Observer] = []
        self._config: Config | None = None
        self._is_over = False
        self._is_ours = False
        self._past: deque[RoundRecord] | None = None

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._spec.folder

    @property
    def config(self) -> Config | None:
        """The resolved configuration; None as long as nothing was played here."""
        return self._config

    def last_report(self) -> dict[str, Any]:
        """Return the newest report once more."""
        return {**self._report.figures(), "done": False, FINISHED: False}

    def step(self) -> dict[str, Any]:
        """Play a round, or several short ones, and return what is reported of the last; ``done`` with the trial's last.

        Raises:
            FedsweepError: The trial failed; its folder says so.
        """
        if self._session is None and self._folder.status == "finished":
            return self._last_words()
        until, report, messages = time.monotonic() + self._spec.report_every_s, {"done": False}, list[str]()
        try:
            session = self._session or self._open()
            while not report["done"]:
                step = session.step()
                messages += step.messages
                if step.record is None and step.stopped_by is None:
                    continue
                report = self._reported(step)
                if time.monotonic() >= until:
                    break
        except Exception as error:
            self._end("failed", reason_of(error))
            raise
        return {**report, **({MESSAGES: messages} if messages else {})}

    def save(self) -> None:
        """Write a checkpoint of the last finished round."""
        if self._session is not None:
            self._session.save()

    def end_early(self) -> None:
        """End the trial from outside: by the scheduler, which makes it finished, or to go on another day."""
        if self._session is None or self._is_over:
            return
        mark = self._spec.folder / ENDED_BY_SCHEDULER
        if mark.exists():
            self._end("finished", "the sweep's scheduler ended it", stopped_by=BY_SCHEDULER)
            mark.unlink()
        else:
            self._session.save()
            self._end("killed", "interrupted")

    # -- beginning and end -----------------------------------------------------------------------------------------

    def _open(self) -> Session:
        check_no_link(self._spec.folder)
        self._stack.enter_context(sole_writer(self._spec.folder, patience_s=_PATIENCE_S))
        self._is_ours = True
        # Of a process that died before it heard of it: an interruption would now be taken for the scheduler's end.
        (self._spec.folder / ENDED_BY_SCHEDULER).unlink(missing_ok=True)
        config = self._spec.load_config()
        plan = plan_run(config, self._find_dataset(config), config_hash=self._spec.config_hash)
        if self._spec.most is not None:
            plan = _limited(plan, self._spec.most)
        self._config = plan.config
        resume = (self._spec.folder / "config.yaml").is_file()
        self._check_node(plan)
        forget_other_rounds(self._spec.folder, plan.sources, config_hash=plan.experiment.config_hash)
        begin_log(self._spec.folder, plan.sources, resume=resume, allow_changed=self._spec.allow_changed_code)
        self._folder.write_config(plan.to_yaml())
        self._session = self._stack.enter_context(self._make_session(plan, self._spec.folder))
        opened = self._session.open(resume=resume)
        if opened.records:
            # The file may be older than the checkpoint, and those who follow the trial read what came before here.
            self._folder.write_rounds(opened.records)
            for record in opened.records:
                self._report.add(record)
        # The driver tells MLflow of all trials; what lies in a trial's folder is written where the trial is played.
        self._loggers = further_loggers(config, self._spec.folder)
        info = run_info(plan, self._spec.folder, opened, resume=resume)
        info = replace(info, tags={**info.tags, "fedsweep.sweep": self._spec.folder.parent.name})
        for logger in self._loggers:
            logger.started(info)
        return self._session

    def _check_node(self, plan: Plan) -> None:
        """Refuse to play a trial by other code than the sweep was begun with: its result would be told of that."""
        shared = [name for name in plan.sources if name in self._sources]
        here, there = ({name: sources[name] for name in shared} for sources in (plan.sources, self._sources))
        if shared and (differing := changes(there, here)):
            raise ConfigError(
                f"the code on {platform.node()}, where this trial is played, is not that with which the sweep was begun"
                f" ({differing}); have the same on all nodes and leave it alone while the sweep goes on"
            )

    def _reported(self, step: Step) -> dict[str, Any]:
        figures = self._report.figures() if step.record is None else self._report.add(step.record)
        for logger in self._loggers:
            if step.record is not None:
                logger.round_done(step.record)
            if step.checkpointed and step.record is not None:
                logger.checkpointed(step.record.round)
        if step.stopped_by is not None:
            self._end("finished", None)
        return {**figures, "done": step.stopped_by is not None, FINISHED: step.stopped_by is not None}

    def _end(self, status: str, reason: str | None, stopped_by: str | None = None) -> None:
        """Write how it ended and end the fleet; what made a trial fail matters more than that this fails too."""
        self._is_over = True
        with self._stack, contextlib.suppress(*([Exception] if status == "failed" else [])):
            if self._session is not None:
                result = self._session.finish(status, reason, stopped_by)
                for logger in self._loggers:
                    logger.finished(status, result)
            elif self._is_ours:
                self._write_early_failure(reason)

    def _write_early_failure(self, reason: str | None) -> None:
        if not (self._spec.folder / "config.yaml").is_file():
            self._folder.write_config(self._spec.load_config().to_yaml())
        rounds = len(self._folder.read_rounds()) if self._folder.has_rounds() else 0
        self._folder.write_result({"status": "failed", "reason": reason, "rounds": rounds})

    def _last_words(self) -> dict[str, Any]:
        """Report a trial that has finished before: its last round, for the sweep's table, or one after the other."""
        self._past = deque(self._folder.read_rounds()) if self._past is None else self._past
        figures = self._report.figures()
        while self._past:
            figures = self._report.add(self._past.popleft())
            if self._spec.replays:
                break
        self._is_over = not self._past
        mark = {REPLAYED: True} if self._spec.replays else {}
        return {**figures, **mark, "done": self._is_over, FINISHED: self._is_over}


def _limited(plan: Plan, most: TrialCosts) -> Plan:
    """Lower the run's limits to what it may spend; its configuration stays, so others may go on with it."""
    training = plan.experiment.training
    limits: dict[str, Any] = {}
    for name in ("total_bytes", "sim_time_s"):
        both = (getattr(most, name) or None, getattr(training.stop, name))
        limits[name] = min((limit for limit in both if limit is not None), default=None)
    stop = replace(training.stop, **limits)
    return replace(plan, experiment=replace(plan.experiment, training=replace(training, stop=stop)))


def metric_values(report: Mapping[str, Any], metrics: Sequence[str]) -> dict[str, float]:
    """Return the metrics' values by name in a report, as it is or as Tune hands it on; NaN where there is none."""
    own = {f"{EXTRA}/{name}": value for name, value in report.get(EXTRA, {}).items()}
    # A run's FLOPs are all that it has spent, as its bytes and seconds.
    figures = {**report, **own, "flops": report.get(TOTAL_FLOPS)}
    return {metric: math.nan if (value := figures.get(metric)) is None else float(value) for metric in metrics}


class TuneReport:
    """Turns rounds into what Ray Tune is told.

    Args:
        metrics: What must be there in each report.
        resource: What a scheduler rations: ``round``, or a figure that is summed over the rounds.
    """

    def __init__(self, *, metrics: tuple[str, ...], resource: str) -> None:
        self._metrics, self._resource = metrics, resource
        self._last: dict[str, Any] = {"round": 0, "total_bytes": 0, EXTRA: {}}
        self._known: dict[str, float] = {}
        self._over_rounds: dict[str, tuple[float, int]] = {}
        self._flops = 0
        self._clock = 0.0

    def add(self, record: RoundRecord) -> dict[str, Any]:
        """Count a round and report it."""
        figures = {name: value for name, value in scalar_figures(record).items() if name not in record.extra}
        figures["wall_time_s"] = record.wall_time_s + record.eval_time_s
        figures |= self._so_far(figures)
        self._flops += record.flops
        self._clock = record.sim_time_s if record.sim_time_s is not None else self._clock
        self._known |= figures | {f"{EXTRA}/{name}": value for name, value in record.extra.items()}
        self._last = {
            **{name: value for name, value in figures.items() if name in _SHOWN or name in self._metrics},
            "round": record.round,
            "total_bytes": record.total_bytes,
            TOTAL_FLOPS: self._flops,
            TESTED: record.test_loss is not None,
            "best_test_accuracy": math.nan if record.best_accuracy is None else record.best_accuracy,
            EXTRA: {name: x for name, x in record.extra.items() if f"{EXTRA}/{name}" in self._metrics},
        }
        return self.figures()

    def _so_far(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that tables sum over the rounds, or take the mean of: likewise, of the rounds so far."""
        values = {}
        for name in figures.keys() & {*self._metrics}:
            how = "sum" if name == "wall_time_s" else over_rounds(name)
            if how in ("sum", "mean"):
                total, count = self._over_rounds.get(name, (0.0, 0))
                self._over_rounds[name] = total, count = total + figures[name], count + 1
                values[name] = total / count if how == "mean" else total
        return values

    def figures(self) -> dict[str, Any]:
        """Return the last round's report.

        A metric that was not measured in this round stands with its last value, or NaN: Tune ends a whole sweep where
        one is missing, and a scheduler can do nothing with a gap.
        """
        spent = {"round": self._last["round"], "total_bytes": self._last["total_bytes"]}
        spent |= {"flops": self._flops, "sim_time_s": self._clock}
        report = {"best_test_accuracy": math.nan, "resource": spent[self._resource], **self._last}
        own = dict(self._last[EXTRA])
        for metric in self._metrics:
            name = metric.removeprefix(f"{EXTRA}/")
            place = report if name == metric else own
            if name not in place:
                place[name] = self._known.get(metric, math.nan)
        return {**report, EXTRA: own}
