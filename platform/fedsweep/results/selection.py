"""Runs chosen and ordered by what a reader asks for: figures and keys of the configuration, by short names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fedsweep.errors import ConfigError, unknown_name
from fedsweep.results.config_table import config_table, short_keys
from fedsweep.results.keys import listed, resolved
from fedsweep.results.settings import ReportRun, Setting, shortly_called
from fedsweep.results.texts import clean, is_accuracy, some_of
from fedsweep.results.view import ENERGY, SPENT, RunView, metrics_of

# What columns of tables are called.
FIGURE_NAMES: Mapping[str, str] = {
    "acc": "test_accuracy",
    "accuracy": "test_accuracy",
    "best": "best_test_accuracy",
    "loss": "test_loss",
    "bytes": "total_bytes",
    "ratio": "comm_ratio",
    "sim": "sim_time_s",
    "sim_time": "sim_time_s",
    "energy": ENERGY,
    "wall": "wall_time_s",
    "wall_time": "wall_time_s",
    "s/round": "round_time_s",
    "rounds": "round",
}
_ACCURACIES = ("acc", "accuracy")
_MANY_SHOWN = 8


def figure_name(name: str, runs: Sequence[ReportRun], *, what: str) -> str:
    """Return the figure of runs that a name stands for: a column, or what tables call it.

    Raises:
        ConfigError: No run has it.
    """
    wanted = FIGURE_NAMES.get(name, name)
    if name in _ACCURACIES and (leading := leading_figure(run.view for run in runs)) != "test_accuracy":
        wanted = leading  # where nothing is classified the task's first figure stands for the accuracy
    columns = {
        column
        for run in runs
        for column, cells in run.view.columns.items()
        if any(isinstance(cell, int | float) for cell in cells)
    }
    names = columns | {*FIGURE_NAMES.values()}
    if wanted in SPENT and wanted not in columns:
        raise ConfigError(f"{what} {name}: only a replay knows it; add --set prices.kwh=0.3, say, and devices")
    if wanted not in names:
        raise ConfigError(f"{what}: {unknown_name('figure', name, {*FIGURE_NAMES, *columns})}")
    return wanted


def leading_figure(views: Iterable[RunView]) -> str:
    """Return what runs are compared by: their test accuracy, or where none has one the first of their metrics."""
    runs = list(views)
    is_classified = any(run.last("test_accuracy") is not None for run in runs)
    return "test_accuracy" if is_classified else next(iter(metrics_of(runs)), "test_accuracy")


def figure_in(views: Iterable[RunView], name: str, figure: str) -> str:
    """Return what a name that stands for a figure of all runs is of some: the accuracy's is what these go by."""
    return leading_figure(views) if name in _ACCURACIES else figure


def is_less_better(figure: str, views: Iterable[RunView]) -> bool:
    """Tell whether a figure of runs is the better the smaller it is: losses, what is spent, metrics that say so."""
    metrics = metrics_of(views, by_client=True)
    if figure in metrics:
        return metrics[figure].mode == "min"
    return not is_accuracy(figure)


def only_those(runs: Sequence[ReportRun], conditions: Sequence[str]) -> list[ReportRun]:
    """Return the runs that satisfy all conditions, in their order.

    Args:
        runs: All runs.
        conditions: ``KEY=VALUE`` or ``KEY=VALUE,VALUE``; a key of the configuration by its short name, or ``method``,
            ``seed``, ``status``, ``name``.

    Raises:
        ConfigError: One is written otherwise, there is no such key, or no run satisfies them.
    """
    # As tables call them, too.
    labels = {id(run): short.label for run, short in zip(runs, shortly_called(runs), strict=True)}
    for condition in listed(conditions):
        name, sign, text = str(condition).partition("=")
        if not sign or not name:
            raise ConfigError(f"--only takes KEY=VALUE or KEY=VALUE,VALUE, but got {condition!r}")
        values = [
            [*_values(run, name, runs, what="--only"), *([labels[id(run)]] if name == "name" else [])] for run in runs
        ]
        # A name may have commas itself.
        wanted = {_canonical(value) for value in (text, *text.split(","))}
        chosen = [run for run, own in zip(runs, values, strict=True) if wanted & {_canonical(value) for value in own}]
        if not chosen:
            seen = dict.fromkeys(value for own in values for value in own[:1])
            named = [*filter(None, seen), *(["not there"] if "" in seen else [])]
            raise ConfigError(f"--only {condition}: no run is left; {name} is {some_of(named, _MANY_SHOWN)}")
        runs = chosen
    return list(runs)


def _values(run: ReportRun, name: str, runs: Sequence[ReportRun], *, what: str) -> list[str]:
    """List a run's value under a name, in the ways in which it may be written."""
    own = {
        "method": [run.method, clean(run.view.method)],
        "seed": [str(run.view.seed)],
        "status": [run.status],
        "name": [run.label, clean(run.view.name)],
    }
    if name in own:
        return own[name]
    keys = list(dict.fromkeys(key for other in runs for key in other.flat))
    differing = short_keys(config_table([other.flat for other in runs]).differing).values()
    figures = FIGURE_NAMES if what == "--sort" else ()
    return [run.flat.get(key, "") for key in resolved(name, keys, what=what, candidates={*figures, *own, *differing})]


def _canonical(text: str) -> str | float:
    try:
        return float(text)
    except ValueError:
        return text.casefold()


def order_of(members: Sequence[Setting | ReportRun], runs: Sequence[ReportRun], name: str) -> list[int]:
    """Return places of runs or settings in the order that a name asks for.

    By a figure settings of which no run has finished, or that have it of some seeds alone, come behind the others, and
    who has no such figure comes last. By accuracy, what learns something else goes by its task's first figure.

    Args:
        members: Runs, or settings of these.
        runs: All runs.
        name: A figure, the best first; or a key, ascending; with a minus in front the other way round.

    Raises:
        ConfigError: There is no such figure or key.
    """
    plain = name.removeprefix("-")
    firsts = [member if isinstance(member, ReportRun) else runs[member.runs[0]] for member in members]
    try:
        figure = figure_name(plain, runs, what="--sort")
    except ConfigError:
        if FIGURE_NAMES.get(plain, plain) in SPENT:
            raise
        keys = [_sort_key(run, plain, runs) for run in firsts]
        return sorted(range(len(members)), key=lambda place: keys[place], reverse=name != plain)
    own = [figure_in([m.view] if isinstance(m, ReportRun) else m.views, plain, figure) for m in members]
    names, views = list(dict.fromkeys(own)), [run.view for run in runs]
    signs = {each: 1 if is_less_better(each, views) == (name == plain) else -1 for each in names}
    ranks = []
    for member, each in zip(members, own, strict=True):
        value = member.view.figure(each) if isinstance(member, ReportRun) else member.figure(each)
        is_behind = isinstance(member, Setting) and not member.is_compared(each)
        ranks.append((value is None, is_behind, names.index(each), signs[each] * (value or 0.0)))
    return sorted(range(len(members)), key=ranks.__getitem__)


def _sort_key(run: ReportRun, name: str, runs: Sequence[ReportRun]) -> list[tuple[bool, str | float]]:
    """Return the values of a run under a name; numbers before words, each among its like."""
    values = map(_canonical, _values(run, name, runs, what="--sort"))
    return [(isinstance(value, str), value) for value in values]
