"""Which trials a sweep has, the same for the same configuration, and what goes together in its section."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedsweep.catalog import build_metrics
from fedsweep.errors import ConfigError, unknown_name
from fedsweep.results.texts import method_label, value_text
from fedsweep.runs.tables.rounds import ROUND_COLUMNS
from fedsweep.streams import stream
from fedsweep.sweeps.front import SPENT

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.config.sweep import SpaceEntry

SEED = "seed"
# Where a trial stands in what Ray Tune calls its configuration.
TRIAL = "trial"
# Before the name of a figure of a method's own.
EXTRA = "extra"
_METRICS = (*(c.name for c in ROUND_COLUMNS if c.is_scalar and c.name != "timestamp_ms"), "best_test_accuracy")
_BETTER = {"max": "more", "min": "less"}
_LABEL_CHARACTERS = 90
_METHOD = "method"


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


def canonical(value: Any) -> str:
    """Return one text for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def make_trial(config: Config, number: int, values: Mapping[str, Any], *, setting: str | None = None) -> Trial:
    """Make a trial, called by what it varies; where that is the seed alone, by its method.

    Args:
        config: The sweep's.
        number: From 1.
        values: Dotted key -> value.
        setting: The name of its setting, where the sweep lists some.
    """
    label = _label(config, values, setting)
    parts = [label] if label else []
    if SEED in values:
        parts.append(f"seed={values[SEED]}")
    slug = re.sub(r"[^A-Za-z0-9._=,+-]+", "_", " ".join(parts))
    if len(slug) > _LABEL_CHARACTERS:
        digest = hashlib.blake2b(canonical(dict(values)).encode(), digest_size=4).hexdigest()
        slug = f"{slug[: _LABEL_CHARACTERS - 9]}-{digest}"
    return Trial(
        number=number, values=dict(values), label=label or method_label(config.method), folder=f"{number:04d}-{slug}"
    )


def _label(config: Config, values: Mapping[str, Any], setting: str | None) -> str:
    """Return the user's name for the trial's setting, then what the space varies, without the seed."""
    names = short_names(space_keys(config))
    parts = [] if setting is None else [setting]
    for key in names:
        value = values[key]
        if key == _METHOD and isinstance(value, Mapping):
            others = config.sweep.space[key].values if config.sweep.space[key].kind in ("grid", "choice") else ()
            parts.append(method_label(value, among=[other for other in others if isinstance(other, Mapping)]))
        elif key != SEED:
            parts.append(f"{names[key]}={value_text(value)}")
    return " ".join(parts)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each dotted key; more of it where several keys share that."""
    names = {}
    for key in keys:
        parts = key.split(".")
        others = [other.split(".") for other in keys if other != key]
        size = next(n for n in range(1, len(parts) + 1) if n == len(parts) or all(o[-n:] != parts[-n:] for o in others))
        names[key] = ".".join(parts[-size:])
    return names


def space_keys(config: Config) -> list[str]:
    """Return the varied keys; a key comes before those below it, whose values are laid over its own."""
    return sorted(config.sweep.space, key=lambda key: key.count("."))


def is_listed(config: Config) -> bool:
    """Check that the trials are known beforehand; otherwise a search proposes or a scheduler changes them."""
    return config.sweep.search != "optuna" and config.sweep.scheduler != "pbt"


def check_space(config: Config) -> None:
    """Refuse spaces that say something else than what is probably meant.

    Raises:
        ConfigError: The space is empty, repeats the same trial, or does not go with the search.
    """
    sweep = config.sweep
    if not sweep.space and not sweep.settings:
        raise ConfigError("sweep.space is empty; name what varies, e.g. {seed: {grid: [0, 1, 2]}}, or sweep.settings")
    kinds = {key: entry.kind for key, entry in sweep.space.items()}
    if sweep.search == "optuna" and (gridded := [key for key, kind in kinds.items() if kind == "grid"]):
        raise ConfigError(
            f"sweep.search=optuna draws values, so it goes with no grid, but sweep.space.{gridded[0]} is one; make it a"
            " choice, or leave sweep.search out"
        )
    if sweep.search == "optuna" and SEED in kinds:
        raise ConfigError(
            "sweep.search=optuna gives settings seeds itself, as many as a doubt asks for, so it goes with no"
            " sweep.space.seed; leave it out and set sweep.seeds, the most of a setting"
        )
    if sweep.samples > 1 and set(kinds.values()) <= {"grid"}:
        raise ConfigError(
            f"sweep.samples={sweep.samples} would run each trial of the grid {sweep.samples} times with the same"
            " result; vary the seed instead: {seed: {grid: [0, 1, 2]}}"
        )
    _check_points(config)
    for key, entry in sweep.space.items():
        texts = [canonical(value) for value in entry.values]
        if entry.kind == "grid" and len(set(texts)) < len(texts):
            twice = next(text for text in texts if texts.count(text) > 1)
            raise ConfigError(f"sweep.space.{key}: grid has {twice} more than once")
    _check_settings(config)


def _check_points(config: Config) -> None:
    """Refuse points to begin with that a search could not come to."""
    sweep = config.sweep
    if (sweep.points or sweep.sampler != "tpe") and sweep.search != "optuna":
        key = "points" if sweep.points else "sampler"
        raise ConfigError(f"sweep.{key} is read by a search alone; set sweep.search=optuna, or leave it out")
    for number, point in enumerate(sweep.points):
        if set(point) != set(sweep.space):
            differing = sorted(set(point) ^ set(sweep.space))
            raise ConfigError(
                f"sweep.points[{number}] must give each key of sweep.space, and no other; see {differing}"
            )
        for key, value in point.items():
            if not _lies_in(sweep.space[key], value):
                raise ConfigError(f"sweep.points[{number}]: {key}={value!r} does not lie in sweep.space.{key}")


def _lies_in(entry: SpaceEntry, value: Any) -> bool:
    if entry.kind in ("choice", "grid"):
        return canonical(value) in map(canonical, entry.values)
    low, high = entry.values
    is_number = isinstance(value, int if entry.kind == "randint" else int | float) and not isinstance(value, bool)
    return is_number and low <= value < high


def _check_settings(config: Config) -> None:
    """Refuse a list of settings without a list of trials, or beside keys that vary the same."""
    sweep = config.sweep
    if sweep.settings and not is_listed(config):
        what = "sweep.search=optuna" if sweep.search == "optuna" else f"sweep.scheduler={sweep.scheduler}"
        raise ConfigError(f"{what} chooses values itself, so it goes with no sweep.settings; leave one of them out")
    for setting in sweep.settings:
        for key in setting.set:
            if twice := [varied for varied in sweep.space if f"{key}.".startswith(f"{varied}.")]:
                raise ConfigError(
                    f"sweep.settings {setting.name!r} sets {key}, but sweep.space.{twice[0]} would overwrite that;"
                    " leave one of them out"
                )


def check_combination(config: Config) -> None:
    """Refuse a metric that no run has, or a scheduler that does not go with the metric, the resource or the space.

    Raises:
        ConfigError: There is no metric of that name; the message gives the nearest. Or the scheduler does not go.
    """
    sweep = config.sweep
    names, modes = [*sweep.aims], [*sweep.aims.values()]
    tested = {f"{EXTRA}/{column}": metric for metric in build_metrics(config) for column in metric.columns}
    for name, mode in zip(names, modes, strict=True):
        if name not in _METRICS and not name.startswith(f"{EXTRA}/"):
            unknown = unknown_name("metric", name, [*_METRICS, *tested])
            raise ConfigError(f"sweep.metric: {unknown}; a method's own figures are {EXTRA}/NAME")
        if name in tested and mode != (better := tested[name].declaration.mode):
            raise ConfigError(
                f"sweep.mode is {mode} for {name}, but of the metric {tested[name].name!r} {_BETTER[better]} is better;"
                f" set sweep.mode={better}, or another mode in evaluation.metrics"
            )
    for limit in sweep.limits:
        if limit.metric not in _METRICS and not limit.metric.startswith(f"{EXTRA}/"):
            raise ConfigError(f"sweep.constraints: {unknown_name('metric', limit.metric, [*_METRICS, *tested])}")
    if sweep.scheduler == "front":
        _check_front(names, modes)
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


def _check_front(names: Sequence[str], modes: Sequence[str]) -> None:
    spent = [name for name, mode in zip(names, modes, strict=True) if name in SPENT and mode == "min"]
    if len(names) not in (2, 3) or not spent or len(spent) == len(names):
        raise ConfigError(
            "sweep.scheduler=front compares what runs reach for what they spent, so sweep.metric needs two or three"
            f" figures, of which some but not all are {', '.join(SPENT)} with mode min, but is {', '.join(names)} with"
            f" {', '.join(modes)}; e.g. sweep.metric=[test_accuracy, total_bytes] and sweep.mode=[max, min]"
        )


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
        raise ConfigError(f"sweep.scheduler=pbt needs several trials, but sweep.samples={config.sweep.samples}")


def list_trials(config: Config) -> list[Trial]:
    """List the trials of a space without search, in order: each setting with ``samples`` draws, each with the grid.

    Draws are keyed by the configuration's seed, so that the list is the same in every process, and the same for each
    setting. A trial that chance draws twice is listed once.
    """
    space, keys = config.sweep.space, space_keys(config)
    gridded = [key for key in keys if space[key].kind == "grid"]
    drawn = [key for key in keys if space[key].kind != "grid"]
    named: list[tuple[str | None, Mapping[str, Any]]] = [(s.name, s.set) for s in config.sweep.settings]
    points: dict[str, tuple[dict[str, Any], str | None]] = {}
    for name, fixed in named or [(None, {})]:
        ahead = {key: fixed[key] for key in sorted(fixed, key=lambda key: key.count("."))}
        for sample in range(config.sweep.samples):
            draws = {key: draw(config, key, sample=sample) for key in drawn}
            for cell in itertools.product(*(space[key].values for key in gridded)):
                chosen = draws | dict(zip(gridded, cell, strict=True))
                values = ahead | {key: chosen[key] for key in keys}
                points.setdefault(canonical(values), (values, name))
    return [make_trial(config, n, values, setting=name) for n, (values, name) in enumerate(points.values(), start=1)]


def draw(config: Config, key: str, *, sample: int) -> Any:
    """Draw one value of a varied key that is no grid; ``sample``: the draw, from 0. Each key has its own draws."""
    entry = config.sweep.space[key]
    generator = stream(config.seed, "sweep").child(key, sample).numpy()
    if entry.kind == "choice":
        return entry.values[int(generator.integers(len(entry.values)))]
    low, high = entry.values
    if entry.randint is not None:
        return int(generator.integers(*entry.randint))
    if entry.kind == "uniform":
        return float(generator.uniform(low, high))
    return float(math.exp(generator.uniform(math.log(low), math.log(high))))


def walk(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of nested mappings."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from walk(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
