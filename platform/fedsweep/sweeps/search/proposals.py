"""Search, computed from what was tried: nothing but the trials themselves is remembered.

So a search that was killed goes on to the trials that it would have come to unbroken.
"""

from __future__ import annotations

import itertools
import logging
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.errors import ResourceError, first_line
from fedsweep.results.seed_statistics import mean
from fedsweep.results.texts import canonical
from fedsweep.runs.run_folder import BY_SCHEDULER, RunFolder
from fedsweep.streams import stream
from fedsweep.sweeps.search.rungs import TriedSetting, most_doubtful, told_means
from fedsweep.sweeps.space import SEED, SettingSpace, Trial, point_space, setting_space, setting_spaces
from fedsweep.sweeps.sweep_folder import STUDY_FILE
from fedsweep.sweeps.trial import TESTED, TuneReport, metric_values

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.config.sweep import SpaceEntry

_STUDY = "fedsweep"
# The parameter of Optuna's study that names the setting.
_SETTING = "setting"
# So many settings are tried before any gets a second seed, and from then on two for each further seed.
_FIRST_SETTINGS = 4
_SETTINGS_PER_SEED = 2
# So often a search may propose what it knows before it is taken to know no more.
_PROPOSALS = 20
_warn = logging.getLogger("fedsweep").warning


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A trial's end.

    Attributes:
        values: The sweep's metrics; None where it failed, or where one is no number.
        excess: How far each constraint is missed; at most 0 where it holds.
        is_whole: False where the scheduler ended it.
    """

    values: tuple[float, ...] | None
    excess: tuple[float, ...] = ()
    is_whole: bool = True

    @classmethod
    def of(cls, report: Mapping[str, Any], config: Config, *, is_whole: bool) -> Outcome:
        """Return the outcome of a trial with this last report."""
        sweep = config.sweep
        figures = metric_values(report, [*sweep.aims, *(limit.metric for limit in sweep.limits)])
        values = tuple(figures[name] for name in sweep.aims)
        excess = tuple(limit.excess(figures[limit.metric]) for limit in sweep.limits)
        is_sound = all(map(math.isfinite, (*values, *excess)))
        return cls(values=values if is_sound else None, excess=excess, is_whole=is_whole)


def read_outcome(folder: Path, config: Config) -> Outcome | None:
    """Read what the run of a sweep in a folder came to; None where it has not ended."""
    result = RunFolder(folder).result_if_any()
    if result.get("status") != "finished":
        return None
    names = (*config.sweep.aims, *(limit.metric for limit in config.sweep.limits))
    return Outcome.of(_reports(folder, names)[-1], config, is_whole=result["stopped_by"] != BY_SCHEDULER)


def read_curve(folder: Path, metrics: tuple[str, ...]) -> list[dict[str, float]]:
    """Read the metrics after each tested round of a run."""
    return [metric_values(report, metrics) for report in _reports(folder, metrics) if report[TESTED]]


def _reports(folder: Path, metrics: tuple[str, ...]) -> list[dict[str, Any]]:
    report = TuneReport(metrics=metrics, resource="round")
    return [report.add(record) for record in RunFolder(folder).read_rounds()]


class Proposals(ABC):
    """Proposes trials, one after the other, by what those before came to."""

    @abstractmethod
    def next_values(
        self,
        trials: Sequence[Trial],
        outcomes: Mapping[int, Outcome],
        has_room: Callable[[Mapping[str, Any]], bool] = lambda values: True,
    ) -> dict[str, Any] | None:
        """Return what the next trial sets, its seed included; None where none follows, or none as yet.

        Args:
            trials: All of before, in their order.
            outcomes: What trials came to, by their numbers; of those that are under way there is none.
            has_room: Checks that the budget has room for a trial of these values.
        """

    def write_study(self, folder: Path, trials: Sequence[Trial], outcomes: Mapping[int, Outcome]) -> None:
        """Write what trials came to into the sweep's folder, beside its plan; by default nothing."""

    def lower(self, trial: Trial, trials: Sequence[Trial]) -> Trial | None:
        """Return the trial whose run this one goes on with; None: it begins anew."""
        return None


class Search(Proposals):
    """A search by Optuna whose memory is its list of trials.

    Args:
        config: The sweep's configuration.

    Raises:
        ResourceError: Optuna is not there.
    """

    def __init__(self, config: Config) -> None:
        check_optuna()
        self._config = config
        self._parts = {part.name: part for part in setting_spaces(config)}
        self._signs = tuple(1.0 if mode == "max" else -1.0 for mode in config.sweep.aims.values())
        self._has_warned = False

    def next_values(
        self,
        trials: Sequence[Trial],
        outcomes: Mapping[int, Outcome],
        has_room: Callable[[Mapping[str, Any]], bool] = lambda values: True,
    ) -> dict[str, Any] | None:
        """Return what the next trial sets, its seed included; None where nothing is left that could tell more."""
        tried = self._tried(trials, outcomes)
        seed = {SEED: self._config.seed}
        for number, point in enumerate(self._config.sweep.points):
            values = point_space(self._config, number).values(point)
            if canonical(values) not in tried and has_room(values | seed):
                return values | seed
        num_repeats = len(trials) - len(tried)
        repeated = self._repeated(tried, has_room)
        is_seed_due = num_repeats * _SETTINGS_PER_SEED < len(tried) - _FIRST_SETTINGS
        proposed = None
        if not (repeated and is_seed_due) and len(tried) < self._num_settings():
            proposed = self._propose(tried, number=len(trials), has_room=lambda values: has_room(values | seed))
        return repeated if proposed is None else proposed | seed

    def write_study(self, folder: Path, trials: Sequence[Trial], outcomes: Mapping[int, Outcome]) -> None:
        """Write what trials came to into the sweep's folder, where Optuna's dashboard reads it; each once.

        A log that can't be gone on with is written anew; nothing that happens to it ends a search.
        """
        path = folder / STUDY_FILE
        try:
            self._add_to_study(path, trials, outcomes)
        except Exception as error:  # a line was torn by a power cut or a full disk: JSON's, Optuna's, the system's
            rest = "it is written anew, from the trials' folders"
            try:
                path.unlink(missing_ok=True)
                self._add_to_study(path, trials, outcomes)
            except Exception:
                rest = "the search goes on, but Optuna's dashboard lacks trials"
            if not self._has_warned:
                _warn(f"{path} can't be gone on with ({first_line(error)}); {rest}")
            self._has_warned = True

    def _add_to_study(self, path: Path, trials: Sequence[Trial], outcomes: Mapping[int, Outcome]) -> None:
        import optuna
        from optuna.storages.journal import JournalFileBackend

        backend = JournalFileBackend(str(path))
        study = optuna.create_study(
            study_name=_STUDY,
            storage=optuna.storages.JournalStorage(backend),
            directions=self._directions,
            load_if_exists=True,
        )
        there = {trial.user_attrs.get("folder") for trial in study.get_trials(deepcopy=False)}
        for trial in trials:
            outcome = outcomes.get(trial.number)
            if outcome is not None and trial.folder not in there:
                failed, facts = outcome.values is None, {"folder": trial.folder, SEED: trial.seed}
                own = self._frozen(trial.values, outcome.values, failed=failed, excess=outcome.excess, **facts)
                study.add_trial(own)

    @property
    def _directions(self) -> list[Any]:
        return ["maximize" if sign > 0 else "minimize" for sign in self._signs]

    def _tried(self, trials: Sequence[Trial], outcomes: Mapping[int, Outcome]) -> dict[str, TriedSetting]:
        tried: dict[str, TriedSetting] = {}
        for trial in trials:
            own = {key: value for key, value in trial.values.items() if key != SEED}
            setting = tried.setdefault(trial.setting, TriedSetting(values=own))
            setting.seeds.append(self._config.seed if trial.seed is None else trial.seed)
            outcome = outcomes.get(trial.number)
            if outcome is None:
                continue
            setting.is_given_up |= outcome.values is None or not outcome.is_whole
            if outcome.values is not None:
                setting.excesses.append(outcome.excess)
                setting.results.append(tuple(s * v for s, v in zip(self._signs, outcome.values, strict=True)))
        return tried

    def _repeated(
        self, tried: Mapping[str, TriedSetting], has_room: Callable[[Mapping[str, Any]], bool]
    ) -> dict[str, Any] | None:
        """Return the most doubtful setting with one more seed; None where all is settled, or that does not fit."""
        doubtful = most_doubtful(list(tried.values()), most_seeds=self._config.sweep.seeds)
        if doubtful is None:
            return None
        # Those of a warm start may be any.
        unused = next(seed for seed in itertools.count(self._config.seed) if seed not in doubtful.seeds)
        repeated = {**doubtful.values, SEED: unused}
        return repeated if has_room(repeated) else None

    def _propose(
        self, tried: Mapping[str, TriedSetting], *, number: int, has_room: Callable[[dict[str, Any]], bool]
    ) -> dict[str, Any] | None:
        """Ask Optuna for a setting; None where it comes back to those that are known, or nothing is cheap enough.

        Of named settings each is tried once; then the sampler chooses the setting, too, from what they came to.
        """
        study = self._study(tried, number=number)
        seen = {setting_space(self._config, setting.values).name for setting in tried.values()}
        first = [name for name in self._parts if name is not None and name not in seen]
        for place in range(_PROPOSALS):
            if first:
                study.enqueue_trial({_SETTING: first[place % len(first)]})
            trial = study.ask()
            part = self._parts[None if None in self._parts else trial.suggest_categorical(_SETTING, [*self._parts])]
            values = part.values({key: self._suggest(trial, part, key) for key in part.space})
            if canonical(values) not in tried and has_room(values):
                return values
        return None

    def _study(self, tried: Mapping[str, TriedSetting], *, number: int) -> Any:
        """Make Optuna's study of what is known, with random numbers of this trial's own."""
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = self._sampler(number)
        study = optuna.create_study(sampler=sampler, directions=self._directions)
        for setting, means in zip(tried.values(), told_means(list(tried.values())), strict=True):
            values = None if means is None else tuple(s * m for s, m in zip(self._signs, means, strict=True))
            failed = values is None and setting.is_given_up
            excess = [mean(column) for column in zip(*setting.excesses, strict=True)]
            study.add_trial(self._frozen(setting.values, values, failed=failed, excess=excess))
        return study

    def _sampler(self, number: int) -> Any:
        from optuna import samplers

        kind, seed = self._config.sweep.sampler, stream(self._config.seed, "search").child(number).seed(32)
        if kind == "tpe":
            return samplers.TPESampler(seed=seed, constant_liar=True)
        return samplers.GPSampler(seed=seed) if kind == "gp" else samplers.RandomSampler(seed=seed)

    def _frozen(
        self,
        values: Mapping[str, Any],
        figures: Sequence[float] | None,
        *,
        failed: bool,
        excess: Sequence[float] = (),
        **facts: Any,
    ) -> Any:
        from optuna.distributions import CategoricalDistribution
        from optuna.trial import TrialState, create_trial

        part = setting_space(self._config, values)
        params = {
            _parameter(part, key): canonical(values[key]) if entry.kind == "choice" else values[key]
            for key, entry in part.space.items()
        }
        distributions = {_parameter(part, key): _distribution(entry) for key, entry in part.space.items()}
        if part.name is not None:
            params |= {_SETTING: part.name}
            distributions |= {_SETTING: CategoricalDistribution([*self._parts])}
        return create_trial(
            state=TrialState.FAIL if failed else TrialState.RUNNING if figures is None else TrialState.COMPLETE,
            params=params,
            distributions=distributions,
            values=None if figures is None else list(figures),
            user_attrs=facts,
            system_attrs={"constraints": list(excess)} if excess else {},
        )

    def _suggest(self, trial: Any, part: SettingSpace, key: str) -> Any:
        entry, name = part.space[key], _parameter(part, key)
        if entry.kind == "choice":
            texts = {canonical(value): value for value in entry.values}
            return texts[trial.suggest_categorical(name, list(texts))]
        low, high = entry.values
        if entry.kind == "randint":
            return trial.suggest_int(name, low, high - 1)
        # The Gaussian process proposes the upper end, too, which no setting may have.
        return min(trial.suggest_float(name, low, high, log=entry.kind == "loguniform"), math.nextafter(high, low))

    def _num_settings(self) -> float:
        """Count the points of the space; infinite where a key has a continuous range."""
        return math.fsum(part.num_points for part in self._parts.values())


def _parameter(part: SettingSpace, key: str) -> str:
    """Return a key's name in Optuna's study: each setting has parameters of its own."""
    return key if part.name is None else f"{part.name}: {key}"


def check_optuna() -> None:
    """Make sure that Optuna is there.

    Raises:
        ResourceError: It is not.
    """
    try:
        import optuna
    except ImportError as error:
        raise ResourceError(
            f"sweep.search=optuna needs an extra: pip install 'fedsweep[optuna]' ({error}); or use sweep.search=random"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def _distribution(entry: SpaceEntry) -> Any:
    from optuna import distributions

    if entry.kind == "choice":
        # Text, since a search's categories may be no mappings.
        return distributions.CategoricalDistribution(list(dict.fromkeys(canonical(value) for value in entry.values)))
    low, high = entry.values
    if entry.kind == "randint":
        return distributions.IntDistribution(int(low), int(high) - 1)
    return distributions.FloatDistribution(low, high, log=entry.kind == "loguniform")
