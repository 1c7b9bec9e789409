"""What goes together in the section ``sweep``: metrics, schedulers, resources."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsweep.errors import ConfigError, unknown_name
from fedsweep.runs.tables.rounds import ROUND_COLUMNS
from fedsweep.sweeps.space import list_trials
from fedsweep.sweeps.trial import EXTRA

if TYPE_CHECKING:
    from fedsweep.config.schema import Config

_METRICS = (*(c.name for c in ROUND_COLUMNS if c.is_scalar and c.name != "timestamp_ms"), "best_test_accuracy")


def check_combination(config: Config) -> None:
    """Refuse a metric that no run has, or a scheduler that does not go with the metric, the resource or the space.

    Raises:
        ConfigError: There is no metric of that name; the message gives the nearest. Or the scheduler does not go.
    """
    sweep = config.sweep
    for name in (sweep.metric,) if isinstance(sweep.metric, str) else sweep.metric:
        if name not in _METRICS and not name.startswith(f"{EXTRA}/"):
            raise ConfigError(
                f"sweep.metric: {unknown_name('metric', name, _METRICS)}; a method's own figures are {EXTRA}/NAME"
            )
    if isinstance(sweep.metric, list) and sweep.scheduler is not None:
        raise ConfigError(
            f"sweep.scheduler={sweep.scheduler} goes by one metric, but sweep.metric lists {len(sweep.metric)}; leave"
            " one"
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
    for key, entry in config.sweep.space.items():
        changes_shape = key.split(".")[0] not in ("training", "method") or key in ("method", "training")
        if changes_shape or entry.kind == "grid":
            found = "a grid" if entry.kind == "grid" else "something else"
            raise ConfigError(
                "sweep.scheduler=pbt changes values while trials run, so it goes with drawn parameters below training"
                f" and method, but sweep.space.{key} is {found}; use choice, uniform, loguniform or randint"
            )
    if len(list_trials(config)) < 2:
        raise ConfigError(f"sweep.scheduler=pbt needs several trials, but sweep.samples={config.sweep.samples}")
