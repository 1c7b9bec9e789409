"""Maps of the clients' data and participation, small enough for a page.

Most charts are maps of cells. Where there are more clients or rounds than a page has room for, neighbours share a cell.
Many runs of a sweep have the same clients and the same cohorts, so each chart is kept once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from fedsweep.errors import InputError
from fedsweep.figures.groups import COHORT, GROUP_LOOKS, HIGH, counts_of, group_labels_of, has_group
from fedsweep.figures.scenario import PART_LOOKS, Part, class_shares_of, parts_of, shown_clients
from fedsweep.figures.style import INK
from fedsweep.reports.charts import PERCENT, Chart, drawn, ids, map_chart, span, tint
from fedsweep.results.view import RunView
from fedsweep.runs.run_folder import RunFolder
from fedsweep.tasks.kinds import stratum_of

if TYPE_CHECKING:
    from plotly.graph_objects import Scatter

_MOST_CLIENTS, _MOST_ROUNDS, _MOST_CLASSES = 160, 200, 256
_LARGEST_ID = 10_000_000
_MOST_DRIFT_CLASSES = 32
# Characters of all charts of clients on a page.
_BUDGET = 1_500_000
_HIGH = len(Part)  # beside the parts, a state of its own
_GROUP = "in the high-frequency group"
_STATES = [*PART_LOOKS.values(), (_GROUP, GROUP_LOOKS[HIGH][1])]
_FULL = PART_LOOKS[Part.AGGREGATED][1]
_SHADES = [(0.0, "#FFFFFF"), (1.0, _FULL)]
# Of a round's labels: half of the rounds lie within the thick bar, eight in ten within the thin one.
_THICK, _THIN = (25, 75), (10, 90)


@dataclass(kw_only=True)
class ClientMaps:
    """The charts of clients of a page, each once.

    Attributes:
        charts: The charts by name.
        views: The names of the charts that are shown for a run, by the run's index.
        notes: What a reader must know.
        size: Characters that they take.
    """

    charts: dict[str, Chart] = field(default_factory=dict)
    views: dict[int, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    size: int = 0
    _names: dict[str, str] = field(default_factory=dict)

    def add(self, chart: Chart) -> str:
        """Return the name of a chart, which is kept where it is new."""
        text = chart.title + json.dumps(chart.tree())
        if text not in self._names:
            self._names[text] = f"clients-{len(self.charts)}"
            self.charts[self._names[text]] = chart
            self.size += len(text)
        return self._names[text]


def client_maps(runs: Sequence[RunView], order: Sequence[int]) -> ClientMaps:
    """Make the charts of the runs' clients, as many as a page has room for; ``order``: most interesting first."""
    maps = ClientMaps()
    left_out = 0
    for index in order:
        if maps.size > _BUDGET:
            left_out += 1
            continue
        run, counts_NC, clients = runs[index], None, None  # no numbers of clients: they are everybody
        try:
            counts_NC = counts_of(run)
            if run.lists_participants_alone():
                clients = RunFolder(run.folder).read_clients().column("client").to_pylist()
        except InputError as error:
            maps.notes.append(str(error))
        charts = [] if counts_NC is None else [split_chart(counts_NC, stratum_of(run.config), clients)]
        if clients is None:
            charts += participation_charts(run, None if counts_NC is None else len(counts_NC))
        if counts_NC is not None and clients is None:
            try:
                more = (label_chart(run, counts_NC), class_chart(run, counts_NC.shape))
                charts += [chart for chart in more if chart is not None]
            except InputError as error:
                maps.notes.append(str(error))
        if charts:
            maps.views[index] = [maps.add(chart) for chart in charts]
    if left_out:
        maps.notes.append(f"{left_out} runs have no pictures of their clients here: the page would become too large")
    return maps


def split_chart(counts_NC: np.ndarray, stratum: str = "class", clients: Sequence[int] | None = None) -> Chart:
    """Return samples per client and class as a map.

    Args:
        counts_NC: Samples per client and class [N, C], N and C at least 1.
        stratum: What classes are called here.
        clients: The clients' numbers [N]; None: 0 to N - 1.
    """
    (num_clients, num_classes), kinds = counts_NC.shape, "classes" if stratum == "class" else "strata"
    per_client, per_class = -(-num_clients // _MOST_CLIENTS), -(-num_classes // _MOST_CLASSES)
    cells_CN = _summed(_summed(counts_NC, per_client).T, per_class)
    sizes_N, kinds_N = counts_NC.sum(axis=1), (counts_NC > 0).sum(axis=1)
    # The square root: clients with few samples stay visible beside those with many.
    stops = [(share * share, tint(_FULL, share)) for share in np.linspace(0, 1, 9).tolist()]
    return map_chart(
        cells_CN.tolist(),
        _heat(stops, max(1, int(cells_CN.max())), f"client %{{x}}, {stratum} %{{y}}<br>%{{z}} samples"),
        title="What clients hold",
        describe=f"How samples of each {stratum} fall to clients",
        x=ids("client", num_clients, per_client) | ({} if clients is None else {"ids": [*clients[::per_client]]}),
        y=ids(stratum, num_classes, per_class),
        hint=(
            f"{num_clients} clients with {sizes_N.min()} to {sizes_N.max()} samples (mean {sizes_N.mean():.1f}) of"
            f" {kinds_N.min()} to {kinds_N.max()} of {num_classes} {kinds} (mean {kinds_N.mean():.1f})."
            " The stronger the colour, the more samples."
        ),
    )


def participation_charts(run: RunView, num_clients: int | None) -> list[Chart]:
    """Map participation by round: what each client did; where cells are shared, a map of shares for each thing.

    Args:
        run: A run.
        num_clients: How many clients there are; None: as many as were seen.

    Returns:
        None at all where no round was played. Clients that cannot be are passed over.
    """
    cohorts, groups = list(run.column("cohort")), list(run.column("high_frequency"))
    present, attendees = list(run.column("present")), list(run.column("attendees"))
    largest = max((c for cohort in cohorts for c in cohort or () if 0 <= c < _LARGEST_ID), default=None)
    if largest is None:
        return []
    count = num_clients or largest + 1
    per_client, per_round = -(-count // _MOST_CLIENTS), -(-len(cohorts) // _MOST_ROUNDS)
    # The last cells may have fewer clients, or rounds, than the others.
    sizes = [np.diff([*range(0, n, step), n]) for n, step in ((count, per_client), (len(cohorts), per_round))]

    def shares(members: Sequence[Sequence[int] | None]) -> np.ndarray:
        sums = np.zeros([*map(len, sizes)])
        for place, clients in enumerate(members):
            cells = [client // per_client for client in clients or () if 0 <= client < count]
            np.add.at(sums[:, place // per_round], cells, 1)
        return np.minimum(1, sums / np.outer(*sizes))

    layers, hint = {"in the cohort": shares(cohorts)}, ""
    if any(there is not None for there in present):
        layers["there"] = shares(present)
    if attendees and any(list(a or ()) != list(b or ()) for a, b in zip(attendees, cohorts, strict=True)):
        layers["aggregated"] = shares(attendees)
        hint = f"{sum(map(bool, attendees))} of {len(cohorts)} rounds aggregated."
    if any(groups):
        layers[_GROUP] = shares(groups)
    axes: dict[str, Any] = {
        "x": ids("round", len(cohorts), per_round, first=run.column("round")[0]),
        "y": ids("client", count, per_client),
    }
    if per_client == per_round == 1:
        parts_NR = parts_of(cohorts, attendees or cohorts, present, num_clients=count)
        return [_state_chart(parts_NR, layers.get(_GROUP), axes=axes, hint=hint)]
    return [
        map_chart(
            np.rint(100 * cells).astype(int).tolist(),
            _heat(_SHADES, 100, "client %{y}, round %{x}<br>%{z} % of the cell"),
            title=f"Who was {name}",
            describe=f"Which clients were {name} in which rounds",
            hint=f"{hint} The stronger the colour, the more of the cell's clients and rounds.".strip(),
            **axes,
        )
        for name, cells in layers.items()
    ]


def _state_chart(states_NR: np.ndarray, high_NR: np.ndarray | None, *, axes: Mapping[str, Any], hint: str) -> Chart:
    if high_NR is not None:
        states_NR = np.where(high_NR > 0, _HIGH, states_NR)
    steps = [(end / len(_STATES), colour) for state, (_, colour) in enumerate(_STATES) for end in (state, state + 1)]
    return map_chart(
        states_NR.tolist(),
        _heat(steps, len(_STATES) - 0.5, "client %{y}, round %{x}<br>%{text}") | {"zmin": -0.5},
        words=[text for text, _ in _STATES],
        title="Who took part",
        describe="Which clients took part in which rounds",
        key=[(text, colour) for state, (text, colour) in enumerate(_STATES) if (states_NR == state).any()],
        hint=hint,
        **axes,
    )


def class_chart(run: RunView, shape: tuple[int, ...]) -> Chart | None:
    """Which classes clients had by round, under drift: a band for each client, in it a row for each class.

    Args:
        run: A run.
        shape: N and C, as its table of clients has them.

    Returns:
        None where the run has no drift.

    Raises:
        InputError: A file of the run is damaged, or two of them contradict each other.
    """
    num_clients, num_classes = shape
    per_class = -(-num_classes // _MOST_DRIFT_CLASSES)
    shown = shown_clients(num_clients, -(-num_classes // per_class))
    shares_NRC = class_shares_of(run, clients=shown)
    if shares_NRC is None or not shares_NRC.size:
        return None
    num_rounds = shares_NRC.shape[1]
    per_round = -(-num_rounds // _MOST_ROUNDS)
    cells = np.add.reduceat(shares_NRC, np.arange(0, num_classes, per_class), axis=2)
    starts = np.arange(0, num_rounds, per_round)
    cells = np.add.reduceat(cells, starts, axis=1) / np.diff([*starts, num_rounds])[None, :, None]
    percents = np.rint(100 * cells.transpose(0, 2, 1)).astype(int)
    # An empty row, with a name of its own, ends each band.
    z = [row for band in percents.tolist() for row in (*band, [None] * len(starts))]
    classes = [span(place, per_class, num_classes) for place in range(cells.shape[2])]
    labels = [
        label
        for number, client in enumerate(shown, 1)
        for label in (*(f"client {client}, class {name}" for name in classes), " " * number)
    ]
    middles = range(cells.shape[2] // 2, len(labels), cells.shape[2] + 1)
    some = f"{len(shown)} of {num_clients} clients. " if len(shown) < num_clients else ""
    return map_chart(
        z,
        _heat(_SHADES, max(1, int(percents.max())), "%{y}, round %{x}<br>%{z} % of its samples"),
        title="Which classes clients had",
        describe="Which classes clients have in which rounds",
        x=ids("round", num_rounds, per_round, first=1),
        y={"title": {"text": "client"}, "ids": labels, "tickvals": list(middles), "ticktext": list(map(str, shown))},
        hint=(
            f"{some}A band is a client, a row in it a class, class 0 on top. The stronger the colour, the larger the"
            f" class's share of the client's samples in the round, up to {int(percents.max())} %."
        ),
    )


def label_chart(run: RunView, counts_NC: np.ndarray) -> Chart | None:
    """Chart class shares of the high- and the low-frequency group over the rounds, against the population's.

    Args:
        run: A run.
        counts_NC: Samples per client and class [N, C].

    Returns:
        None where there is no high-frequency group, or more classes than a page has room for.

    Raises:
        OutputError: A row names a client that there is not.
    """
    import plotly.graph_objects as go

    num_classes = counts_NC.shape[1]
    labels = group_labels_of(run, counts_NC) if num_classes <= _MOST_CLASSES and has_group(run) else None
    if labels is None:
        return None
    traces = [
        go.Scatter(
            name="population",
            mode="markers",
            x=list(range(num_classes)),
            y=_short(labels.population_C),
            marker={"symbol": "line-ew", "size": 22, "line": {"width": 2, "color": INK}},
            meta={"label": "population"},
        )
    ]
    for level, shares_RC, shift in ((COHORT, labels.low_RC, -0.15), (HIGH, labels.high_RC, 0.15)):
        if len(shares_RC):
            traces += _group_traces(level, shares_RC, shift=shift)
    return Chart(
        title="What labels the high-frequency group holds",
        describe="Class shares of the high- and the low-frequency group over the rounds, against the population's",
        **drawn(
            traces,
            x={"title": {"text": "class"}, "showgrid": False, "range": [-0.6, num_classes - 0.4]},
            y={"title": {"text": "share of the group"}, "rangemode": "tozero", **PERCENT},
            height=300,
            hovermode="closest",
        ),
        key=[("population", INK), *((f"{GROUP_LOOKS[g][0]} group", GROUP_LOOKS[g][1]) for g in (COHORT, HIGH))],
        hint=(
            f"Over {len(labels.high_RC)} rounds: the dot is the mean, the thick line holds half of the rounds, the thin"
            " one eight in ten."
        ),
    )


def _group_traces(level: int, shares_RC: np.ndarray, *, shift: float) -> Iterator[Scatter]:
    import plotly.graph_objects as go

    text, colour = GROUP_LOOKS[level]
    mean_C = shares_RC.mean(axis=0)
    for (low, high), thickness in ((_THIN, 1.5), (_THICK, 4)):
        ends_2C = np.percentile(shares_RC, (low, high), axis=0)
        yield go.Scatter(
            name=f"{text} group",
            mode="markers",
            x=[round(place + shift, 2) for place in range(len(mean_C))],
            y=_short(mean_C),
            marker={"color": colour, "size": 7, "line": {"width": 1, "color": "#FFFFFF"}},
            error_y={
                "array": _short(ends_2C[1] - mean_C),
                "arrayminus": _short(mean_C - ends_2C[0]),
                "color": colour,
                "thickness": thickness,
                "width": 0,
            },
            meta={"label": f"{text} group, {low} to {high} % of the rounds"},
        )


def _short(values: np.ndarray) -> list[float]:
    rounded: list[float] = np.round(values, 4).tolist()
    return rounded


def _heat(colours: Sequence[tuple[float, str]], most: float, say: str) -> dict[str, Any]:
    """Return options of Plotly's heatmap: colours from the number 0 to ``most``, and the words of a cell."""
    return {"colorscale": colours, "zmax": most, "hovertemplate": f"{say}<extra></extra>"}


def _summed(cells: np.ndarray, step: int) -> np.ndarray:
    """Return sums of ``step`` neighbouring rows."""
    return np.add.reduceat(cells, np.arange(0, len(cells), step), axis=0)


def interesting_first(accuracies: Mapping[int, float | None], settings: Sequence[Sequence[int]]) -> list[int]:
    """Return indices of runs: the best of each setting first, then the second best of each, and so on."""

    def rank(index: int) -> float:
        value = accuracies[index]
        return 1.0 if value is None else -value

    ranked = [sorted(members, key=rank) for members in settings]
    longest = max(map(len, ranked), default=0)
    return [members[place] for place in range(longest) for members in ranked if place < len(members)]
