"""The pictures' style: sizes, colours, markers, panels, legends, names of axes; as they stand in a paper's column.

The colours are ones that colour-blind readers can tell apart; beyond seven lines the markers tell them apart.
Everything is drawn at the size at which it is printed.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.catalog import method_titles
from fedsweep.errors import InputError
from fedsweep.results.texts import bytes_text, is_accuracy
from fedsweep.runs.files import atomic_write, file_above

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SUFFIXES = (".png", ".pdf", ".svg")
# Source: Okabe and Ito 2008, without the yellow, which is too pale for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Where there are more lines than those. Source: Tol 2021, Kelly 1965; then hues that lie far apart.
_MORE_COLOURS = ("#332288", "#999933", "#882255", "#44AA99", "#661100", "#7F7F7F", "#AA4499", "#DDCC77", "#117733")
# Levels in an order, from dark to light: one such family, or several beside each other.
_LEVELS, _FAMILIES = "viridis", ("Blues_r", "Oranges_r", "Greens_r", "Purples_r", "Reds_r", "Greys_r")
_FEWEST_LEVELS = 3
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "h")
INK, GRID = "#333333", "#DDDDDD"
_UNDATED: dict[str, dict[str, Any]] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
# Inches; two panels fill the width of a text, one a column.
PANEL_WIDTH, PANEL_HEIGHT = 3.4, 2.3
TEXT_WIDTH = 2 * PANEL_WIDTH
_TITLE_HEIGHT, _LEGEND_LINE = 0.25, 0.19
_LEGEND_MARK, _CHARACTER = 0.45, 0.065
_DOTS_PER_INCH = 200
_ALIKE = 3.0
_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.labelsize": 8,
    "axes.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    "errorbar.capsize": 2.0,
    # Type 3 fonts, the default, are refused by many conferences.
    "pdf.fonttype": 42,
    # Or the names inside an SVG differ each time.
    "svg.hashsalt": "fedsweep",
    # A user's own matplotlibrc may have others: names are no TeX, widths are a column's, and row 0 is on top.
    "text.usetex": False,
    "savefig.bbox": "standard",
    "image.origin": "upper",
}
# Fonts with Chinese, Japanese or Korean characters, which matplotlib's own lacks; the first that is installed is used.
_EAST_ASIAN = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Droid Sans Fallback",
    "PingFang SC",
    "Microsoft YaHei",
    "SimHei",
)
_NAMES: Mapping[str, str] = {
    "round": "round",
    "total_bytes": "bytes sent, both ways",
    "sim_time_s": "simulated time (s)",
    "full_time_s": "simulated time, all included (s)",
    "energy_kwh": "energy (kWh)",
    "wall_time_s": "wall time (s)",
    "comm_ratio": "communication ratio",
    "comm_cost": "values sent",
    "kl_divergence": "KL divergence (nats)",
    "test_loss": "test loss",
    "train_loss": "training loss",
    "flops": "training FLOPs",
    "group_size": "clients in the group",
    "size": "clients in the group",
    "seconds": "time of a choice (s)",
}


@dataclass(frozen=True, kw_only=True)
class Look:
    """The look of a row, or a setting, in every picture.

    Attributes:
        colour: Of line, marker and bar.
        marker: Of points.
    """

    colour: str
    marker: str


def look_of(place: int) -> Look:
    """Return the look of the row or setting at a place in their order."""
    return Look(colour=COLOURS[place % len(COLOURS)], marker=MARKERS[place % len(MARKERS)])


def looks(names: Sequence[str], *, ordered: bool = False) -> dict[str, Look]:
    """Return a look for each name, by its place among all names, so that a picture of some looks like the others.

    No two have one colour. Levels go from dark to light: all names where they are ``ordered``, and names that differ
    in a number alone (``L=10``, ``L=15``, ``L=25``).
    """
    every = {name: Look(colour=_colour(place), marker=look_of(place).marker) for place, name in enumerate(names)}
    families = [list(names)] if ordered else _families(names)
    for family, scale in zip(families, [_LEVELS] if len(families) == 1 else _FAMILIES, strict=False):
        for name, colour in zip(family, _ramp(scale, len(family)), strict=True):
            every[name] = replace(every[name], colour=colour)
    return every


def _colour(place: int) -> str:
    """Return a colour of its own for each place."""
    from matplotlib.colors import hsv_to_rgb, to_hex

    some = (*COLOURS, *_MORE_COLOURS)
    golden = 0.61803398875  # hues at its multiples lie apart however many there are
    return some[place] if place < len(some) else to_hex(tuple(hsv_to_rgb((golden * place % 1, 0.75, 0.75))))


def _ramp(scale: str, count: int) -> list[str]:
    """Return colours from dark to light, none of which is too pale for a line."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    lightest = 0.88 if scale == _LEVELS else 0.6
    return [to_hex(colormaps[scale](lightest * place / max(1, count - 1))) for place in range(count)]


def _families(names: Sequence[str]) -> list[list[str]]:
    """Group names that differ in a number alone, by that number."""
    families: dict[str, dict[float, str]] = {}
    for name in names:
        numbers = re.findall(r"\d*\.?\d+", name)
        if len(numbers) == 1:
            families.setdefault(name.replace(numbers[0], "#"), {})[float(numbers[0])] = name
    return [[family[n] for n in sorted(family)] for family in families.values() if len(family) >= _FEWEST_LEVELS]


def setting_looks(methods: Sequence[str]) -> list[Look]:
    """Return a look for each setting: its method's own where that can be had, so that it is the same in all pictures.

    No two looks are alike, and no two colours as long as there are enough.
    """
    titled = list(method_titles())
    places: dict[int, int] = {}
    for number, method in enumerate(methods):
        own = titled.index(method) if method in titled else -1
        if own >= 0 and own % len(COLOURS) not in {place % len(COLOURS) for place in places.values()}:
            places[number] = own
    taken = {*places.values()}
    for number in range(len(methods)):
        if number not in places:
            free = (place for place in count() if place not in taken)
            colours = {place % len(COLOURS) for place in taken}
            places[number] = next(p for p in free if p % len(COLOURS) not in colours or len(colours) == len(COLOURS))
            taken.add(places[number])
    return [look_of(places[number]) for number in range(len(methods))]


def escape_dollars(text: str) -> str:
    """Escape the dollars of text that may be anybody's: what stands between two matplotlib reads as TeX."""
    return text.replace("$", r"\$")


def line_handle(label: str, look: Look, **more: Any) -> Any:
    """Make the legend's handle of a line of this look, or with ``linestyle="none"`` of a point."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **{"color": look.colour, "marker": look.marker, "label": escape_dollars(label), **more})


def band_handles(every: Iterable[Axes]) -> list[Any]:
    """Make the legend's handle of the curves' bands; empty where no panel has any."""
    has_bands = any(axes.collections for axes in every)
    return patch_handles([("band: mean ± sd over seeds", GRID)]) if has_bands else []


def patch_handles(colours: Iterable[tuple[str, str]]) -> list[Any]:
    """Make a legend's handles of areas, from the label and the colour of each."""
    from matplotlib.patches import Patch

    return [Patch(facecolor=colour, edgecolor=INK, linewidth=0.4, label=label) for label, colour in colours]


def axis_name(quantity: str, *, is_percent: bool = False) -> str:
    """Return an axis's name for this figure, with its unit; accuracies are in percent always."""
    unit = " (%)" if is_percent or is_accuracy(quantity) else ""
    return _NAMES.get(quantity, quantity.replace("_", " ") + unit)


@contextmanager
def paper_style() -> Iterator[None]:
    """Small type and thin lines for what is drawn inside; matplotlib's settings are as before afterwards."""
    import matplotlib
    from matplotlib.font_manager import get_font_names

    installed = {*get_font_names()}
    beside = next(([name] for name in _EAST_ASIAN if name in installed), [])
    with matplotlib.rc_context():
        matplotlib.rcParams.update(_STYLE | {"font.family": ["sans-serif", *beside]})
        yield


def panels(
    titles: Sequence[str],
    *,
    title: str = "",
    height: float = PANEL_HEIGHT,
    width: float = PANEL_WIDTH,
    across: int | None = None,
) -> tuple[Figure, list[Axes]]:
    """Make a figure with a panel for each title, side by side; a single panel has none.

    Args:
        titles: Of the panels, at least one.
        title: Of the figure.
        height: Of a panel, in inches.
        width: Likewise.
        across: Panels in a line; None: up to three, of four two.
    """
    count = len(titles)
    across = across or (count if count < 3 else 2 if count == 4 else 3)
    down = -(-count // across)
    figure = figure_of(width=across * width, height=down * height + (_TITLE_HEIGHT if title else 0.0))
    grid = figure.subplots(down, across, squeeze=False)
    every = [axes for row in grid for axes in row]
    for axes in every[count:]:
        axes.remove()
    for axes, text in zip(every[:count], titles, strict=True):
        if count > 1 or (text and not title):
            axes.set_title(escape_dollars(text))
    if title:
        figure.suptitle(escape_dollars(title), fontsize=9)
    return figure, every[:count]


def legend_below(figure: Figure, handles: Sequence[Any]) -> None:
    """Put a legend below all panels, for which the figure grows, so that it covers nothing.

    Args:
        figure: The figure.
        handles: Artists with labels, which are broken where they are longer than a line; fewer than two need no legend.
    """
    if len(handles) < 2:
        return
    width, height = figure.get_size_inches()
    room = int((width - _LEGEND_MARK) / _CHARACTER)
    labels = [textwrap.wrap(str(handle.get_label()), room) for handle in handles]
    entry = _LEGEND_MARK + _CHARACTER * max(len(line) for lines in labels for line in lines)
    across = max(1, min(len(handles), int(width / entry)))
    # The legend is filled column by column, so a row is as high as the highest of every so many.
    down = -(-len(handles) // across)
    lines = sum(max(len(label) for label in labels[row::down]) for row in range(down))
    figure.set_size_inches(width, height + _LEGEND_LINE * lines)
    texts = ["\n".join(lines) for lines in labels]
    figure.legend(list(handles), texts, loc="outside lower center", ncols=across, frameon=False)


def scale_axes(axes: Axes, *, log_x: bool, log_y: bool) -> None:
    """Logarithmic axes of a panel with its data, as far as asked for and something positive is drawn."""
    if log_x and math.isfinite(axes.dataLim.minposx):
        axes.set_xscale("log", nonpositive="mask")  # rounds before anything was sent have no place there
    if log_y and math.isfinite(axes.dataLim.minposy):
        axes.set_yscale("log")


def name_axes(axes: Axes, *, x: str, y: str) -> None:
    """Name the axes of a panel with its data and scales, and set ticks that suit them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    for write, name, scale in ((axes.set_xlabel, x, axes.get_xscale()), (axes.set_ylabel, y, axes.get_yscale())):
        write(escape_dollars(f"{name}, log scale" if name and scale == "log" and "log" not in name else name))
    for axis, name, scale in ((axes.xaxis, x, axes.get_xscale()), (axes.yaxis, y, axes.get_yscale())):
        if name == _NAMES["total_bytes"]:
            axis.set_major_formatter(FuncFormatter(lambda count, _: bytes_text(count)))
            axis.set_minor_formatter(NullFormatter())
            low, high = axis.get_view_interval()
            few = (1.0, 2.0, 5.0) if high < 100 * low else (1.0,)
            axis.set_major_locator(MaxNLocator(4) if scale == "linear" else LogLocator(subs=few))
        if name in (_NAMES["round"], _NAMES["size"]) and scale == "linear":
            axis.set_major_locator(MaxNLocator(6, integer=True))


def share_axes(every: Sequence[Axes]) -> None:
    """Give panels with the same quantity on an axis the same range there, so that they can be compared.

    Across, only where the ranges are of one size: what takes a thousand times as long would leave nothing to see.
    """
    for kind in ("x", "y"):
        named: dict[tuple[str, str], list[Axes]] = {}
        for axes in every:
            if axes.has_data():
                named.setdefault((getattr(axes, f"get_{kind}label")(), getattr(axes, f"get_{kind}scale")()), []).append(
                    axes
                )
        for (_, scale), panels in named.items():
            ranges = [getattr(axes, f"get_{kind}lim")() for axes in panels]
            ends = (min(low for low, _ in ranges), max(high for _, high in ranges))
            sizes = [math.log(high / low) if scale == "log" else high - low for low, high in ranges]
            if kind == "y" or max(sizes) <= _ALIKE * min(sizes):
                for axes in panels:
                    getattr(axes, f"set_{kind}lim")(*ends)


def add_setting(figure: Figure, text: str) -> None:
    """Write above a finished figure, which grows for it, under what it was measured."""
    width, height = figure.get_size_inches()
    lines = textwrap.wrap(text, int(width / _CHARACTER))
    figure.set_size_inches(width, height + _LEGEND_LINE * len(lines))
    above = figure.get_suptitle()
    figure.suptitle("\n".join([above] * bool(above) + lines), fontsize=7, color=INK)


def label_outer(figure: Figure) -> None:
    """Leave the y axis' name to the first panel of each line whose panels have the same."""
    lines: dict[int, list[Axes]] = {}
    for axes in figure.axes:
        if (spec := axes.get_subplotspec()) is not None:
            lines.setdefault(spec.rowspan.start, []).append(axes)
    for first, *others in lines.values():
        if all(axes.get_ylabel() == first.get_ylabel() for axes in others):
            for axes in others:
                axes.set_ylabel("")


def save_both(figure: Figure, path_stem: Path) -> list[Path]:
    """Write a figure as PNG and as PDF, whose endings the stem lacks; the same figures give the same bytes.

    Raises:
        InputError: They can't be written.
    """
    targets = [path_stem.with_name(path_stem.name + suffix) for suffix in (".png", ".pdf")]
    for target in targets:
        save_figure(figure, target)
    return targets


def checked_path(path: str | Path) -> Path:
    """Return a picture's path; an InputError where its ending is none of :data:`SUFFIXES`, or it lies below a file."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES:
        raise InputError(f"{target}: a picture's name must end in one of {', '.join(SUFFIXES)}")
    if (above := file_above(target)) is not None:
        raise InputError(f"{target}: cannot be written: {above} is no folder")
    return target


def figure_of(*, width: float, height: float) -> Figure:
    """Make an empty figure of so many inches, outside matplotlib's global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, layout="constrained")


def tidy(axes: Axes) -> None:
    """Set a frame on two sides alone, and a grid behind lines."""
    axes.spines[["top", "right"]].set_visible(False)
    if axes.lines:
        axes.grid(color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)


def save_figure(figure: Figure, target: Path) -> None:
    """Write a figure in the format that the file's suffix says, and make the folder above it.

    Raises:
        InputError: It can't be written.
    """
    for axes in figure.axes:
        tidy(axes)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Without the time of day, the same figures are the same file.
        drawn = io.BytesIO()
        figure.savefig(drawn, format=target.suffix[1:].lower(), metadata=_UNDATED.get(target.suffix.lower()))
        atomic_write(target, drawn.getvalue())
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {(error.strerror or str(error)).lower()}") from error
