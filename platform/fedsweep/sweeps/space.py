"""Which trials a sweep has, the same for the same configuration, and what goes together in its section."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fedsweep.catalog import build_metrics, task_metrics
from fedsweep.config.sweep import SpaceEntry
from fedsweep.errors import ConfigError, unknown_name
from fedsweep.results.keys import short_names
from fedsweep.results.texts import canonical, method_label, told_apart, value_text
from fedsweep.runs.tables.rounds import ROUND_COLUMNS
from fedsweep.streams import stream
from fedsweep.sweeps.front import check_front

if TYPE_CHECKING:
    from fedsweep.config.schema import Config

SEED = "seed"
# Where a trial stands in what Ray Tune calls its configuration.
TRIAL = "trial"
# Before the name of a figure of a method's own.
EXTRA = "extra"
_METRICS = (*(c.name for c in ROUND_COLUMNS if c.is_scalar and c.name != "timestamp_ms"), "best_test_accuracy")
_BETTER = {"max": "more", "min": "less"}
_LABEL_CHARACTERS = 90
# The name of a point's setting, among its keys.
POINT_SETTING = "setting"
_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One point of the space.

    Attributes:
        number: From 1.
        values: What it varies: dotted key -> value.
        label: The values in words, for tables; without the seed.
        folder: The name of its run folder below the sweep's.
    """

    number: int
    values: Mapping[str, Any]
    label: str
    folder: str

    @property
    def seed(self) -> int | None:
        """Its seed, where the sweep varies it."""
        return self.values.get(SEED)

    @property
    def setting(self) -> str:
        """Its values beside the seed, as canonical JSON; equal for trials that differ in their seed alone."""
        return canonical({key: value for key, value in self.values.items() if key != SEED})


@dataclass(frozen=True, kw_only=True)
class SettingSpace:
    """A part of a study's space: one named setting's, or all of it where none is named.

    Attributes:
        name: The setting's.
        fixed: Values that all its trials have: dotted key -> value. A key comes before those below it.
        space: Values that it goes through, likewise.
    """

    name: str | None
    fixed: Mapping[str, Any]
    space: Mapping[str, SpaceEntry]

    @property
    def num_points(self) -> float:
        """Number of its trials' settings; infinite where a key has a continuous range."""
        return math.prod(_num_values(entry) for entry in self.space.values())

    def values(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Return a trial's values: the fixed ones, and those chosen for the varied keys."""
        return {**self.fixed, **{key: chosen[key] for key in self.space}}

    def has(self, values: Mapping[str, Any]) -> bool:
        """Check that a trial's values may be this setting's."""
        own = {key: value for key, value in values.items() if key != SEED or key in self.space}
        fixed = {key: value for key, value in own.items() if key not in self.space}
        return (
            own.keys() >= self.space.keys()
            and canonical(fixed) == canonical(dict(self.fixed))
            and all(lies_in(entry, own[key]) for key, entry in self.space.items())
        )


def setting_spaces(config: Config) -> list[SettingSpace]:
    """Return the parts of a study's space, one for each named setting."""
    sweep = config.sweep
    if not sweep.settings:
        return [SettingSpace(name=None, fixed={}, space=_in_order(sweep.space))]
    return [
        SettingSpace(name=one.name, fixed=_in_order(one.set), space=_in_order({**sweep.space, **one.space}))
        for one in sweep.settings
    ]


def _in_order(values: Mapping[str, _Value]) -> dict[str, _Value]:
    """Put a key before those below it, whose values are laid over its own."""
    return {key: values[key] for key in sorted(values, key=lambda key: key.count("."))}


def setting_space(config: Config, values: Mapping[str, Any]) -> SettingSpace:
    """Return the part of a study's space that a trial with these values is of."""
    parts = setting_spaces(config)
    return next((part for part in parts if part.has(values)), parts[0])


def make_trial(config: Config, number: int, values: Mapping[str, Any], *, setting: str | None = None) -> Trial:
    """Make a trial, called by what it varies; where that is the seed alone, by its method.

    Args:
        config: The sweep's.
        number: From 1.
        values: Dotted key -> value.
        setting: The name of its setting, where the sweep lists some; by default as its values say.
    """
    label = _label(config, values, setting)
    parts = [label, f"seed={values[SEED]}" if SEED in values else ""]
    folder = trial_folder(number, " ".join(filter(None, parts)), whole=canonical(dict(values)))
    return Trial(number=number, values=dict(values), label=label or method_label(config.method), folder=folder)


def trial_folder(number: int, text: str, *, whole: str) -> str:
    """Return the name of a trial's folder; one of a text that is too long has a digest of the ``whole``."""
    slug = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", text)
    if len(slug) > _LABEL_CHARACTERS:
        digest = hashlib.blake2b(whole.encode(), digest_size=4).hexdigest()
        slug = f"{slug[: _LABEL_CHARACTERS - 9]}-{digest}"
    return f"{number:04d}-{slug}"


def _label(config: Config, values: Mapping[str, Any], setting: str | None) -> str:
    """Return the user's name for the trial's setting, then what the space varies, without the seed."""
    own = setting_space(config, values)
    own = next((part for part in setting_spaces(config) if part.name == setting), own)
    names = short_names([*own.space])
    parts = [] if own.name is None else [own.name]
    for key in names:
        value, among = values[key], own.space[key].values if own.space[key].is_list else ()
        if key == "method" and isinstance(value, Mapping):
            methods = [other for other in among if isinstance(other, Mapping)]
            parts.append(told_apart(value, partial(method_label, among=methods), among=methods))
        elif key != SEED:
            parts.append(f"{names[key]}={told_apart(value, value_text, among=among)}")
    return " ".join(parts)


def is_listed(config: Config) -> bool:
    """Check that the trials are known beforehand; otherwise a search proposes or a scheduler changes them."""
    return not config.sweep.proposes and config.sweep.scheduler != "pbt"


def check_space(config: Config) -> None:
    """Refuse spaces that say something else than what is probably meant.

    Raises:
        ConfigError: The space is empty, repeats the same trial, or does not go with the search.
    """
    sweep = config.sweep
    if not sweep.space and not sweep.settings:
        raise ConfigError("sweep.space is empty; name what varies, e.g. {seed: {grid: [0, 1, 2]}}, or sweep.settings")
    entries = {f"sweep.space.{key}": entry for key, entry in sweep.space.items()}
    for setting in sweep.settings:
        entries |= {f"sweep.settings {setting.name!r}: space.{key}": entry for key, entry in setting.space.items()}
    kinds = {place: entry.kind for place, entry in entries.items()}
    if sweep.search == "optuna" and (gridded := [place for place, kind in kinds.items() if kind == "grid"]):
        raise ConfigError(
            f"sweep.search=optuna draws values, so it goes with no grid, but {gridded[0]} is one; make it a choice, or"
            " leave sweep.search out"
        )
    if sweep.search == "optuna" and any(SEED in {**part.fixed, **part.space} for part in setting_spaces(config)):
        raise ConfigError(
            "sweep.search=optuna gives settings seeds itself, as many as a doubt asks for, so it goes with no"
            " sweep.space.seed; leave it out and set sweep.seeds, the most of a setting"
        )
    if sweep.samples > 1 and sweep.search != "optuna" and set(kinds.values()) <= {"grid", "rungs"}:
        raise ConfigError(
            f"sweep.samples={sweep.samples} would run each trial of the grid {sweep.samples} times with the same"
            " result; vary the seed instead: {seed: {grid: [0, 1, 2]}}"
        )
    _check_points(config)
    for place, entry in entries.items():
        texts = [canonical(value) for value in entry.values]
        if entry.kind in ("grid", "rungs") and len(set(texts)) < len(texts):
            twice = next(text for text in texts if texts.count(text) > 1)
            raise ConfigError(f"{place}: {entry.kind} has {twice} more than once")
    _check_settings(config)


def _check_points(config: Config) -> None:
    """Refuse points to begin with that a search could not come to."""
    sweep = config.sweep
    if (sweep.points or sweep.sampler != "tpe") and sweep.search != "optuna":
        key = "points" if sweep.points else "sampler"
        raise ConfigError(f"sweep.{key} is read by a search alone; set sweep.search=optuna, or leave it out")
    for number, point in enumerate(sweep.points):
        space = point_space(config, number).space
        keys = set(point) - ({POINT_SETTING} if sweep.settings else set())
        if keys != set(space):
            differing = sorted(keys ^ set(space))
            raise ConfigError(
                f"sweep.points[{number}] must give each key of sweep.space, and no other; see {differing}"
            )
        for key in keys:
            if not lies_in(space[key], point[key]):
                raise ConfigError(f"sweep.points[{number}]: {key}={point[key]!r} does not lie in sweep.space.{key}")


def point_space(config: Config, number: int) -> SettingSpace:
    """Return the part of the space that a point to begin with names, from 0.

    Raises:
        ConfigError: There are named settings, and it names none of them.
    """
    parts, name = setting_spaces(config), config.sweep.points[number].get(POINT_SETTING)
    if parts[0].name is None:
        return parts[0]
    if named := [part for part in parts if part.name == name]:
        return named[0]
    unknown = unknown_name("setting", str(name), [str(part.name) for part in parts])
    raise ConfigError(f"sweep.points[{number}] must name its setting, as {{{POINT_SETTING}: NAME, ...}}: {unknown}")


def lies_in(entry: SpaceEntry, value: Any) -> bool:
    """Check that a value is one of those that an entry stands for."""
    if entry.is_list:
        return canonical(value) in map(canonical, entry.values)
    low, high = entry.values
    is_number = isinstance(value, int if entry.kind == "randint" else int | float) and not isinstance(value, bool)
    return is_number and low <= value < high


def _check_settings(config: Config) -> None:
    """Refuse a list of settings whose values a scheduler changes, that overlap, or beside keys that vary the same."""
    sweep = config.sweep
    if sweep.settings and sweep.scheduler == "pbt":
        raise ConfigError(
            "sweep.scheduler=pbt chooses values itself, so it goes with no sweep.settings; leave one of them out"
        )
    for part, setting in zip(setting_spaces(config), sweep.settings, strict=False):
        for key in part.fixed:
            if twice := [varied for varied in part.space if f"{key}.".startswith(f"{varied}.")]:
                place = "its own space" if twice[0] in setting.space else "sweep.space"
                raise ConfigError(
                    f"sweep.settings {setting.name!r} sets {key}, but {place}.{twice[0]} would overwrite that;"
                    " leave one of them out"
                )
    # Those that differ in what no setting varies are not looked at: there may be thousands.
    alike: dict[str, list[SettingSpace]] = {}
    parts = setting_spaces(config)
    varied = {SEED}.union(*(part.space for part in parts))
    for part in parts:
        own = {key: value for key, value in part.fixed.items() if key not in varied}
        alike.setdefault(canonical(own), []).append(part)
    for first, second in itertools.chain.from_iterable(itertools.combinations(each, 2) for each in alike.values()):
        if (common := _in_common(first, second)) is not None:
            raise ConfigError(
                f"sweep.settings {first.name!r} and {second.name!r} both try {common}, but a trial belongs to one"
                " setting, whatever its seed; give one of them other values, or make them one setting"
            )


def _in_common(first: SettingSpace, second: SettingSpace) -> str | None:
    """Return in words what trials of both settings may have, the seed apart; None where a key tells them apart."""
    one, other = (
        {key: SpaceEntry(choice=[value]) for key, value in part.fixed.items()} | dict(part.space)
        for part in (first, second)
    )
    keys = [key for key in one if key != SEED]
    meeting = [_meeting(one[key], other[key]) for key in keys if key in other]
    if {*keys} != {*other} - {SEED} or None in meeting:
        return None
    return ", ".join(f"{key}={text}" for key, text in zip(keys, meeting, strict=True)) or "the same"


def _meeting(one: SpaceEntry, other: SpaceEntry) -> str | None:
    """Return in words a value, or a range of them, that both entries stand for; None where there is none."""
    if other.is_list:
        one, other = other, one
    if one.is_list:
        return next((value_text(value) for value in one.values if lies_in(other, value)), None)
    low, high = max(one.values[0], other.values[0]), min(one.values[1], other.values[1])
    return f"{low}..{high}" if low < high else None


def check_combination(config: Config) -> None:
    """Refuse a metric that no run has, or a scheduler that does not go with the metric, the resource or the space.

    Raises:
        ConfigError: There is no metric of that name; the message gives the nearest. Or the scheduler does not go.
    """
    sweep = config.sweep
    tested = {f"{EXTRA}/{column}": metric for metric in build_metrics(config) for column in metric.columns}
    own = [f"{EXTRA}/{entry['name']}" for entry in task_metrics(config) if entry["name"] != "accuracy"]
    all_metrics = [*_METRICS, *tested, *own]
    for name, mode in sweep.aims.items():
        if name not in _METRICS and not name.startswith(f"{EXTRA}/"):
            unknown = unknown_name("metric", name, all_metrics)
            raise ConfigError(f"sweep.metric: {unknown}; a task's and a method's own figures are {EXTRA}/NAME")
        if name in tested and mode != (better := tested[name].declaration.mode):
            raise ConfigError(
                f"sweep.mode is {mode} for {name}, but of the metric {tested[name].name!r} {_BETTER[better]} is better;"
                f" set sweep.mode={better}, or another mode in evaluation.metrics"
            )
    for limit in sweep.limits:
        if limit.metric not in _METRICS and not limit.metric.startswith(f"{EXTRA}/"):
            raise ConfigError(f"sweep.constraints: {unknown_name('metric', limit.metric, all_metrics)}")
        if not limit.has_a_fitting_unit:
            raise ConfigError(f"sweep.constraints: {limit.metric} is not in {limit.unit}; write another unit, or none")
    if sweep.scheduler == "front":
        check_front(sweep.aims)
    elif isinstance(sweep.metric, list) and sweep.scheduler is not None:
        raise ConfigError(
            f"sweep.scheduler={sweep.scheduler} goes by one metric, but sweep.metric lists {len(sweep.metric)}; leave"
            " one, or set sweep.scheduler=front"
        )
    if sweep.scheduler is not None and sweep.resource == "sim_time_s" and config.scenario.devices is None:
        raise ConfigError(
            "sweep.resource=sim_time_s rations virtual seconds, but without scenario.devices there are none; set a"
            " fleet of devices or another resource"
        )
    if sweep.scheduler == "pbt":
        _check_pbt(config)


def _check_pbt(config: Config) -> None:
    if config.sweep.search == "optuna":
        raise ConfigError("sweep.scheduler=pbt proposes values itself, so it goes with no sweep.search; leave one out")
    if config.sweep.budget is not None:
        raise ConfigError(
            "sweep.scheduler=pbt plays all its trials side by side, so it goes with no sweep.budget; choose"
            " sweep.samples and training.rounds instead"
        )
    for key, entry in config.sweep.space.items():
        changes_shape = key.split(".")[0] not in ("training", "method") or key in ("method", "training")
        if changes_shape or entry.kind == "grid":
            kind = "a grid" if entry.kind == "grid" else "something else"
            raise ConfigError(
                "sweep.scheduler=pbt changes values while trials run, so it goes with drawn parameters below training"
                f" and method, but sweep.space.{key} is {kind}; use choice, uniform, loguniform or randint"
            )
    if len(list_trials(config)) < 2:
        raise ConfigError("sweep.scheduler=pbt needs trials that differ: raise sweep.samples, or widen sweep.space")


def list_trials(config: Config) -> list[Trial]:
    """List the trials of a space without search, in order: each setting with ``samples`` draws, each with the grid.

    Draws are keyed by the configuration's seed, so that the list is the same in every process, and the same for each
    setting. A trial that chance draws twice is listed once.
    """
    points: dict[str, tuple[dict[str, Any], str | None]] = {}
    for part in setting_spaces(config):
        gridded = [key for key, entry in part.space.items() if entry.kind == "grid"]
        for sample in range(config.sweep.samples):
            draws = draw_values(config, part, sample=sample)
            for cell in itertools.product(*(part.space[key].values for key in gridded)):
                values = part.values(draws | dict(zip(gridded, cell, strict=True)))
                points.setdefault(canonical(values), (values, part.name))
    return [make_trial(config, n, values, setting=name) for n, (values, name) in enumerate(points.values(), start=1)]


def draw_values(config: Config, part: SettingSpace, *, sample: int) -> dict[str, Any]:
    """Draw a value of each varied key that is no grid; ``sample``: the draw, from 0. Each key has its own draws."""
    drawn = [key for key, entry in part.space.items() if entry.kind != "grid"]
    return {key: _draw(config.seed, part.space[key], key, sample=sample) for key in drawn}


def _draw(seed: int, entry: SpaceEntry, key: str, *, sample: int) -> Any:
    generator = stream(seed, "sweep").child(key, sample).numpy()
    if entry.rungs is not None:
        return entry.rungs[0]
    if entry.kind == "choice":
        return entry.values[int(generator.integers(len(entry.values)))]
    low, high = entry.values
    if entry.randint is not None:
        return int(generator.integers(*entry.randint))
    if entry.kind == "uniform":
        return float(generator.uniform(low, high))
    return float(math.exp(generator.uniform(math.log(low), math.log(high))))


def _num_values(entry: SpaceEntry) -> float:
    if entry.is_list:
        return len({canonical(value) for value in entry.values})
    return entry.values[1] - entry.values[0] if entry.kind == "randint" else math.inf
