"""Worlds and rows of a study: what is compared stands in rows, what it is compared under in columns.

A *world* is what settings must share to be compared: scenario and model, and keys of the training that were varied
beside the methods. Where none differ, a study has one world. All else that differs makes the rows: methods, their
parameters, their learning rates.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedsweep.errors import ConfigError
from fedsweep.results.config_table import ConfigTable, config_table, is_aside, short_keys
from fedsweep.results.keys import has_part, keys_below, listed, resolved
from fedsweep.results.settings import ReportRun, Setting, group_settings
from fedsweep.results.texts import clean, numbered, some_of, value_text

_WORLD, _TRAINING = ("scenario", "model"), ("training",)
# Rates are tuned method by method, so they never make a world by themselves.
_TUNED = ("training.optimizer",)
_BUDGETS = ("scenario.budgets",)
_METHOD = ("method",)
_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class LayoutKeys:
    """Short names of keys that a reader chose, ``method`` or ``mu``.

    Attributes:
        rows: That make rows; None: all that differs beside the columns.
        columns: That make columns; None: what makes worlds or, where rows were chosen, all that differs beside these.
    """

    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None


@dataclass(frozen=True, kw_only=True)
class World:
    """Settings that can be compared with each other.

    Attributes:
        label: In what it differs from the other worlds, ``dirichlet_alpha=0.1``; empty for the only one.
        words: The same in parts, one for each key.
        cells: Row -> the setting's place, in the order of the rows.
    """

    label: str
    words: tuple[str, ...]
    cells: Mapping[int, int]

    @property
    def settings(self) -> list[int]:
        """Places of its settings, in the order of the rows."""
        return list(self.cells.values())


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Settings in rows and worlds.

    Attributes:
        rows: What the rows are called; no two alike.
        row_of: The row of each setting.
        worlds: The columns, in the order of their first settings; a setting may be in several, see :func:`lay_out`.
        row_keys: The keys in which rows differ.
        column_keys: The keys in which worlds differ.
    """

    rows: tuple[str, ...]
    row_of: tuple[int, ...]
    worlds: tuple[World, ...]
    row_keys: tuple[str, ...]
    column_keys: tuple[str, ...]

    def places_of(self, row: int) -> list[int]:
        """Return the places of a row's settings, ascending."""
        return [place for place, other in enumerate(self.row_of) if other == row]


@dataclass(frozen=True, kw_only=True)
class Study:
    """Runs, grouped and laid out.

    Attributes:
        runs: All of them.
        settings: Those that differ in their seed alone.
        layout: Their rows and worlds.
    """

    runs: Sequence[ReportRun]
    settings: Sequence[Setting]
    layout: Layout

    @property
    def methods(self) -> list[str]:
        """The method of each row, as its paper calls it; of several, that of the first setting."""
        firsts = [self.layout.places_of(row)[0] for row in range(len(self.layout.rows))]
        return [self.runs[self.settings[place].runs[0]].method for place in firsts]


def study_of(
    runs: Sequence[ReportRun], *, rows: Sequence[str] | None = None, columns: Sequence[str] | None = None
) -> Study:
    """Group runs into settings and lay these out, see :func:`lay_out`."""
    settings = group_settings(runs)
    return Study(runs=runs, settings=settings, layout=lay_out(runs, settings, rows=rows, columns=columns))


def lay_out(
    runs: Sequence[ReportRun],
    settings: Sequence[Setting],
    *,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> Layout:
    """Put settings into rows and worlds.

    Who has no budgets stands in the world of each budget, unless the columns were chosen.

    Args:
        runs: All runs.
        settings: All settings.
        rows: Short names of keys, e.g. ``method`` or ``mu``; None: all that differs beside the columns.
        columns: Likewise; None: what makes worlds or, where rows are given, all that differs beside these.

    Raises:
        ConfigError: No run has such a key, it makes no settings, is in both, or two settings would stand in one cell.
    """
    flats = [runs[setting.runs[0]].flat for setting in settings]
    table = config_table(flats)
    across = _chosen(columns, table, flats, what="--columns")
    down = _chosen(rows, table, flats, what="--rows")
    if both := [key for key in across or () if key in (down or ())]:
        raise ConfigError(f"{some_of(both, _SHOWN)}: is in the rows and in the columns; leave it out of one of them")
    if across is None:
        across = world_keys(flats, table) if down is None else [key for key in table.differing if key not in down]
    if down is None:
        down = [key for key in table.differing if key not in across]
    if rows is None and not across:
        names, row_of = [setting.label for setting in settings], list(range(len(settings)))
    else:
        names, row_of = _rows(runs, settings, flats, down, across, by_keys=rows is not None)
    hosts, places = _columns(flats, across, may_join=columns is None)
    _check_cells(flats, row_of, places, table=table, placed=[*down, *across])
    names, row_of = _apart(settings, names, row_of, places)
    words = _words(flats, hosts, across)
    joined = [", ".join(some) for some in words]
    worlds = [
        World(
            label=label,
            words=tuple(some) if label in joined else (label,),
            cells=dict(sorted((row_of[p], p) for p in members)),
        )
        for label, some, members in zip(numbered(joined), words, places, strict=True)
    ]
    return Layout(
        rows=tuple(names), row_of=tuple(row_of), worlds=tuple(worlds), row_keys=tuple(down), column_keys=tuple(across)
    )


def world_keys(flats: Sequence[Mapping[str, str]], table: ConfigTable) -> list[str]:
    """Return the keys that make worlds, of those that differ between settings.

    Scenario and model do; budgets only where there are several. A key of ``training`` does where each of its values was
    run with several methods: otherwise it belongs to the method, as FedSGD's one local step or a tuned rate.
    """
    keys = keys_below(_WORLD, table.differing)
    if len({_values(flat, keys_below(_BUDGETS, keys)) for flat in flats if _has_budgets(flat)}) < 2:
        keys = [key for key in keys if not keys_below(_BUDGETS, [key])]
    methods = [_values(flat, keys_below(_METHOD, table.differing)) for flat in flats]
    for key in keys_below(_TRAINING, table.differing):
        pairs = {(flat.get(key, ""), method) for flat, method in zip(flats, methods, strict=True)}
        counts = Counter(value for value, _ in pairs)
        if not keys_below(_TUNED, [key]) and min(counts.values()) > 1:
            keys.append(key)
    return keys


def _chosen(
    names: Sequence[str] | None, table: ConfigTable, flats: Sequence[Mapping[str, str]], *, what: str
) -> list[str] | None:
    """Return the differing keys that short names stand for; what is the same in all makes no difference."""
    if names is None:
        return None
    keys = list(dict.fromkeys(key for flat in flats for key in flat))
    nearest = short_keys(table.telling).values()
    wanted = {name: resolved(name, keys, what=what, candidates={"method", *nearest}) for name in listed(names)}
    for name, of in wanted.items():
        if all(map(is_aside, of)):
            raise ConfigError(
                f"{what} {name}: seeds, names and what changes no result make neither rows nor columns; compare"
                f" chooses them by --only {name}=VALUE"
            )
    return [key for key in dict.fromkeys(key for of in wanted.values() for key in of) if key in table.differing]


def _columns(
    flats: Sequence[Mapping[str, str]], keys: Sequence[str], *, may_join: bool
) -> tuple[list[int], list[list[int]]]:
    """Return each world's first setting, and all of them, also those that join it since they have no budgets."""
    budgets = keys_below(_BUDGETS, keys)
    others = [key for key in keys if key not in budgets]
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
    for place, flat in enumerate(flats):
        groups.setdefault((_values(flat, others), _values(flat, budgets)), []).append(place)
    with_budgets = {key[0] for key, members in groups.items() if _has_budgets(flats[members[0]])}
    guests = {
        key
        for key, members in groups.items()
        if may_join and budgets and key[0] in with_budgets and not _has_budgets(flats[members[0]])
    }
    joining: dict[tuple[str, ...], list[int]] = {}  # one world's guests may be several: some have null, some no key
    for world, own in guests:
        joining.setdefault(world, []).extend(groups[world, own])
    hosts = {key: members for key, members in groups.items() if key not in guests}
    return [members[0] for members in hosts.values()], [
        sorted([*members, *joining.get(key[0], [])]) for key, members in hosts.items()
    ]


def _rows(
    runs: Sequence[ReportRun],
    settings: Sequence[Setting],
    flats: Sequence[Mapping[str, str]],
    keys: Sequence[str],
    across: Sequence[str],
    *,
    by_keys: bool,
) -> tuple[list[str], list[int]]:
    """Name the rows, and place each setting in one."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for place, flat in enumerate(flats):
        groups.setdefault(_values(flat, keys), []).append(place)
    row_of = [0] * len(flats)
    for row, members in enumerate(groups.values()):
        for place in members:
            row_of[place] = row
    own = [{_without(settings[place].label, across) for place in members} for members in groups.values()]
    names = [label for labels in own for label in labels]
    if not by_keys and all(names) and len(names) == len(own) == len({*names}):
        return names, row_of
    firsts = [members[0] for members in groups.values()]
    has_method = bool(keys_below(_METHOD, keys)) or not keys
    titles = [runs[settings[place].runs[0]].method if has_method else "" for place in firsts]
    words = _words([flats[place] for place in firsts], range(len(firsts)), keys, beside=titles if has_method else None)
    return [" ".join([title, *some]).strip() or "all" for title, some in zip(titles, words, strict=True)], row_of


def _words(
    flats: Sequence[Mapping[str, str]],
    places: Iterable[int],
    keys: Sequence[str],
    *,
    beside: Sequence[str] | None = None,
) -> list[list[str]]:
    """``key=value`` for those of the keys that tell some configurations apart, in which each has a value.

    Args:
        flats: All configurations.
        places: Of those to be told apart.
        keys: Which keys may be named.
        beside: The title of each; keys are then compared among equals, and titles need no name of their method.
    """
    chosen = [flats[place] for place in places]
    titles = beside if beside is not None else [""] * len(chosen)
    named = [key for key in keys if beside is None or not key.startswith("method") or not key.endswith("name")]
    telling = config_table([{key: flat[key] for key in named if key in flat} for flat in chosen]).telling
    short = short_keys(telling)
    shown = {key: _values_shown({flat[key] for flat in chosen if key in flat}) for key in telling}
    values = {title: [flat for flat, other in zip(chosen, titles, strict=True) if other == title] for title in titles}
    return [
        [
            f"{short[key]}={shown[key][flat[key]]}"
            for key in telling
            if key in flat and len({other.get(key) for other in values[title]}) > 1
        ]
        for flat, title in zip(chosen, titles, strict=True)
    ]


def _apart(
    settings: Sequence[Setting], names: Sequence[str], row_of: Sequence[int], places: Sequence[Sequence[int]]
) -> tuple[list[str], list[int]]:
    """Return rows of their own for settings of one configuration and several names, which would share a cell."""
    cells = Counter((row_of[place], column) for column, members in enumerate(places) for place in members)
    crowded = {row for (row, _), count in cells.items() if count > 1}
    labels = [settings[p].label if row in crowded else names[row] for p, row in enumerate(row_of)]
    rows = list(dict.fromkeys(zip(row_of, labels, strict=True)))
    return numbered([label for _, label in rows]), [rows.index(pair) for pair in zip(row_of, labels, strict=True)]


def _check_cells(
    flats: Sequence[Mapping[str, str]],
    row_of: Sequence[int],
    places: Sequence[Sequence[int]],
    *,
    table: ConfigTable,
    placed: Sequence[str],
) -> None:
    for members in places:
        first: dict[int, int] = {}
        for place in members:
            other = first.setdefault(row_of[place], place)
            odd = [key for key in table.differing if flats[place].get(key) != flats[other].get(key)]
            if left := [key for key in odd if key not in placed]:
                raise ConfigError(
                    f"several settings would stand in one cell: they also differ in {some_of(left, _SHOWN)};"
                    f" name it in --rows or --columns, or choose by --only {short_keys(left)[left[0]]}=VALUE"
                )


def _without(label: str, keys: Sequence[str]) -> str:
    """Return a setting's label without the words that say what makes its world."""
    words = label.split(" ")
    return " ".join(
        word for word in words if "=" not in word or not any(has_part(key, word.partition("=")[0]) for key in keys)
    )


def _has_budgets(flat: Mapping[str, str]) -> bool:
    return any(flat[key] != "null" for key in keys_below(_BUDGETS, flat))


def _values(flat: Mapping[str, str], keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(flat.get(key, "") for key in keys)


def _values_shown(texts: Collection[str]) -> dict[str, str]:
    """Return values of a flat configuration as they are shown, numbers in few digits unless two were then alike."""
    shown = {text: _value(text) for text in texts}
    return shown if len({*shown.values()}) == len(shown) else {text: text for text in texts}


def _value(text: str) -> str:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # the folder may be anybody's
        return text
    return clean(value_text(value) if isinstance(value, int | float) else text)
