"""Pictures of tables: what they show, that they say what can't be shown, and that they come out alike each time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from client_tables import write_clients
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from fedsweep.errors import ConfigError
from fedsweep.figures.groups import COHORT, HIGH, counts_of, group_labels_of, has_group, membership_of
from fedsweep.figures.style import label_outer, legend_below, looks, panels, paper_style, share_axes
from fedsweep.papers.dynamicfl.group_figures import draw_group_labels, draw_membership
from fedsweep.reproduce.cells import Cell, cells_of
from fedsweep.reproduce.definition.table_file import TableFile
from fedsweep.reproduce.figures import scene
from fedsweep.reproduce.figures.scene import draw
from fedsweep.reproduce.given import read_runs, write_runs
from fedsweep.reproduce.measured.grid import measured
from fedsweep.results.view import RunView
from fedsweep.runs.run_folder import RunFolder
from fedsweep.world.replay import ScenarioTrace

COUNTS = np.array([[4, 0], [0, 4], [2, 2], [6, 2]])


def run_view(
    *, accuracy: Sequence[float | None], ratio: float = 0.5, folder: Path = Path("/nowhere"), seed: int = 0, **more: Any
) -> RunView:
    rounds = len(accuracy)
    columns: dict[str, Sequence[Any]] = {
        "round": list(range(1, rounds + 1)),
        "test_accuracy": accuracy,
        "comm_ratio": [ratio] * rounds,
        "bytes_up": [100] * rounds,
        "bytes_down": [100] * rounds,
        "total_bytes": [200 * (round + 1) for round in range(rounds)],
        "cohort": [[0, 1, 2]] * rounds,
        "attendees": [[0, 1, 2]] * rounds,
        "present": [None] * rounds,
        **more,
    }
    config = {"scenario": {"clients": 4}, "method": {"name": "fedavg"}, "seed": seed}
    return RunView(folder=folder, config=config, result={"status": "finished"}, columns=columns)


def table(*specs: Mapping[str, Any], **more: Any) -> TableFile:
    return TableFile.model_validate(
        {
            "name": "t",
            "base": {},
            "title": "t",
            "source": "s",
            "measures": [
                {"name": "accuracy", "label": "Accuracy", "of": "test_accuracy", "over": "best", "percent": True},
                {"name": "cost", "of": "comm_ratio", "over": "mean", "cost": True},
            ],
            "rows": [{"name": "A"}, {"name": "B"}, {"name": "C", "missing": "not there"}],
            "columns": [{"name": "K=1"}, {"name": "K=2"}],
            "seeds": [0, 1],
            "figures": [{"name": "picture", **spec} for spec in specs],
            **more,
        }
    )


def all_runs(asked: TableFile) -> dict[Cell, RunView | str]:
    """Accuracies 10 (row A) or 50 (row B), plus 20 in the second column and 2 for the second seed, all in percent."""
    found: dict[Cell, RunView | str] = {}
    for cell in cells_of(asked, "full"):
        base = 0.1 + 0.4 * (cell.row == "B") + 0.2 * (cell.column == "K=2") + 0.02 * cell.seed
        found[cell] = run_view(accuracy=[base / 2, None, base], ratio=0.1 * (1 + cell.seed), seed=cell.seed)
    return found


@pytest.fixture
def written() -> None:
    """Figures are written, which takes most of a test's time; without it they are drawn alone."""


@pytest.fixture
def drawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """The figures that are saved, with their settings as they were."""
    before = dict(matplotlib.rcParams)
    saved: list[Figure] = []
    save = scene.save_both

    def keep(figure: Figure, stem: Path) -> list[Path]:
        saved.append(figure)
        if "written" in request.fixturenames:
            return save(figure, stem)
        figure.draw_without_rendering()
        return [stem.with_suffix(suffix) for suffix in (".png", ".pdf")]

    monkeypatch.setattr(scene, "save_both", keep)
    yield saved
    assert dict(matplotlib.rcParams) == before


def picture(
    drawn: list[Figure], tmp_path: Path, *, runs: dict[Cell, RunView | str] | None = None, more: Any = None, **spec: Any
) -> Figure:
    asked = table(spec, **(more or {}))
    runs = all_runs(asked) if runs is None else runs
    paths = draw(asked.figures[0], measured(asked, runs, scale="full"), runs, path_stem=tmp_path / "picture")
    assert [path.name for path in paths] == ["picture.png", "picture.pdf"]
    return drawn[-1]


def points(axes: Axes) -> dict[str, list[list[float]]]:
    """The lines with a name, by it; those of error bars by their container's."""
    named = {str(line.get_label()): line for line in axes.lines}
    named |= {str(c.get_label()): c.lines[0] for c in axes.containers if not isinstance(c, BarContainer)}
    return {
        name: np.round(np.asarray(line.get_xydata(), dtype=float), 6).tolist()
        for name, line in named.items()
        if not name.startswith("_")
    }


def legend_texts(figure: Figure) -> list[str]:
    return [text.get_text() for legend in figure.legends for text in legend.get_texts()]


def test_a_scatter_has_a_point_per_row_and_a_panel_per_column(
    written: None, drawn: list[Figure], tmp_path: Path
) -> None:
    figure = picture(drawn, tmp_path, kind="scatter", x="comm_ratio", y="test_accuracy", log_x=True)
    left, right = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["K=1", "K=2"]
    assert points(left) == {"A": [[0.15, 11.0]], "B": [[0.15, 51.0]]}
    assert points(right) == {"A": [[0.15, 31.0]], "B": [[0.15, 71.0]]}
    assert left.get_xscale() == "log" and left.get_yscale() == "linear"
    assert (left.get_xlabel(), left.get_ylabel(), right.get_ylabel()) == (
        "communication ratio, log scale",
        "Accuracy (%)",
        "",
    )
    assert legend_texts(figure) == ["A", "B"]
    png, pdf = ((tmp_path / f"picture.{ending}").read_bytes() for ending in ("png", "pdf"))
    assert png.startswith(b"\x89PNG") and pdf.startswith(b"%PDF")


def test_a_scatters_groups_share_a_look_and_are_joined_by_a_line(drawn: list[Figure], tmp_path: Path) -> None:
    spec = {"kind": "scatter", "x": "comm_ratio", "y": "test_accuracy", "groups": {"both": ["A", "B", "C"]}}
    left, _ = picture(drawn, tmp_path, **spec).axes
    assert points(left) == {"both": [[0.15, 51.0]]}
    joined = [line.get_xydata() for line in left.lines if str(line.get_label()).startswith("_child")]
    assert any(np.allclose(line, [[0.15, 11.0], [0.15, 51.0]]) for line in joined)
    assert len({line.get_color() for line in left.lines}) == 1


def test_curves_give_each_group_a_panel_with_a_legend(drawn: list[Figure], tmp_path: Path) -> None:
    figure = picture(drawn, tmp_path, kind="curves", columns=["K=2"], groups={"one": ["A"], "two": ["B", "C"]})
    assert [axes.get_title() for axes in figure.axes] == ["K=2 one", "K=2 two"]
    assert [[*points(axes)] for axes in figure.axes] == [["A"], ["B"]]
    assert all(axes.get_legend() is not None for axes in figure.axes) and not figure.legends


def test_curves_of_a_metric_that_is_a_share_are_in_percent(drawn: list[Figure], tmp_path: Path) -> None:
    run = run_view(accuracy=[0.1, 0.2])
    run = replace(run, columns={**run.columns, "macro_f1": [0.25, 0.5]})
    run = replace(run, config={**run.config, "evaluation": {"metrics": [{"name": "macro_f1", "unit": "share"}]}})
    (axes,) = picture(drawn, tmp_path, kind="curves", y="macro_f1", runs=one_run(run, kind="curves")).axes
    assert [y for _, y in points(axes)["A"]] == [25, 50] and axes.get_ylabel() == "macro f1 (%)"


def test_curves_are_means_over_seeds_with_a_band_of_a_deviation_each_way(drawn: list[Figure], tmp_path: Path) -> None:
    figure = picture(drawn, tmp_path, kind="curves", x="total_bytes", y="test_accuracy", columns=["K=2"])
    (axes,) = figure.axes
    assert points(axes) == {"A": [[200.0, 15.5], [600.0, 31.0]], "B": [[200.0, 35.5], [600.0, 71.0]]}
    bands = [np.asarray(band.get_paths()[0].vertices) for band in axes.collections]
    # 15 and 16 have the sample deviation 0.7071, 30 and 32 have 1.4142.
    ends = [(round(b[:, 1].min(), 3), round(b[:, 1].max(), 3)) for b in bands]
    assert ends == [(14.793, 32.414), (34.793, 72.414)]
    assert "band: mean ± sd over seeds" in legend_texts(figure)
    assert len(axes.get_xticks()) <= 7  # their texts are long
    assert axes.get_xlabel() == "bytes sent, both ways" and axes.get_ylabel() == "test accuracy (%)"


PRINTED = {"A": {"K=1": {"accuracy": 12.5}}, "B": {"K=2": {"accuracy": [70.0, 1.0]}}}


def test_bars_stand_by_row_in_groups_by_column_with_what_is_printed(drawn: list[Figure], tmp_path: Path) -> None:
    figure = picture(drawn, tmp_path, kind="bars", y="accuracy", more={"printed": PRINTED})
    (axes,) = figure.axes
    bars = [bar for c in axes.containers if isinstance(c, BarContainer) for bar in c.patches]
    assert [(round(b.get_x() + b.get_width() / 2, 6), round(b.get_height(), 6)) for b in bars] == [
        (-0.2, 11.0),
        (0.8, 31.0),
        (0.2, 51.0),
        (1.2, 71.0),
    ]
    printed = [line.get_xydata().tolist() for line in axes.lines if line.get_marker() == "D"]  # type: ignore[union-attr]
    assert np.allclose(printed, [[[-0.2, 12.5]], [[1.2, 70.0]]])
    assert [text.get_text() for text in axes.get_xticklabels()] == ["K=1", "K=2"]
    assert legend_texts(figure) == ["A", "B", "printed"]


def test_a_figure_that_is_no_measure_is_the_one_that_tables_show(drawn: list[Figure], tmp_path: Path) -> None:
    """The last accuracy, the mean ratio and the rounds' cost together: what compare, report and summary print."""
    cost = {"name": "cost", "of": "kl_divergence"}
    asked = table(measures=[cost])
    columns = {"comm_ratio": [0.1, 0.2, 0.6], "comm_cost": [1, 2, 3]}
    runs: dict[Cell, RunView | str] = {
        cell: run_view(accuracy=[0.5, 0.7, 0.4], seed=cell.seed, **columns) for cell in cells_of(asked, "full")
    }
    heights = {}
    for name in ("test_accuracy", "comm_ratio", "comm_cost", "best_test_accuracy"):
        (axes,) = picture(drawn, tmp_path, runs=runs, kind="bars", y=name, rows=["A"], more={"measures": [cost]}).axes
        heights[name] = {round(bar.get_height(), 6) for c in axes.containers for bar in getattr(c, "patches", ())}
    assert heights == {"test_accuracy": {40.0}, "comm_ratio": {0.3}, "comm_cost": {6.0}, "best_test_accuracy": {70.0}}


@pytest.mark.parametrize(
    ("measure", "name"),
    [
        ({"percent": True}, "test accuracy (%)"),
        ({}, "test_accuracy"),
        ({"percent": True, "per": 10}, "test_accuracy (%)"),
        ({"share_of": "comm_ratio"}, "test_accuracy"),
        ({"of": "total_bytes", "per": 1e6}, "test_accuracy"),
    ],
)
def test_an_axis_has_a_figures_own_name_only_in_its_own_unit(
    drawn: list[Figure], tmp_path: Path, measure: dict[str, Any], name: str
) -> None:
    more = {"measures": [{"name": "test_accuracy", **measure}]}
    (axes,) = picture(drawn, tmp_path, kind="bars", y="test_accuracy", columns=["K=1"], more=more).axes
    assert axes.get_ylabel() == name


def test_bars_may_show_several_measures_of_a_row(drawn: list[Figure], tmp_path: Path) -> None:
    figure = picture(drawn, tmp_path, kind="bars", rows=["B"], measures=["accuracy", "cost"])
    (axes,) = figure.axes
    bars = [bar for c in axes.containers if isinstance(c, BarContainer) for bar in c.patches]
    assert [round(bar.get_height(), 6) for bar in bars] == [51.0, 71.0, 0.15, 0.15]
    assert legend_texts(figure) == ["Accuracy (%)", "cost"]


def test_bars_of_a_single_column_are_named_below(drawn: list[Figure], tmp_path: Path) -> None:
    (axes,) = picture(drawn, tmp_path, kind="bars", y="cost", columns=["K=1"]).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["A", "B"]
    assert axes.get_ylabel() == "communication ratio"
    assert not drawn[-1].legends


def test_lines_go_over_the_columns_x(drawn: list[Figure], tmp_path: Path) -> None:
    columns = [{"name": "K=1", "x": 10}, {"name": "K=2", "x": 2}]
    more = {"columns": columns, "printed": PRINTED}
    figure = picture(drawn, tmp_path, kind="lines", x="classes", y="accuracy", more=more)
    (axes,) = figure.axes
    assert points(axes) == {"A": [[2.0, 31.0], [10.0, 11.0]], "B": [[2.0, 71.0], [10.0, 51.0]]}
    assert axes.get_xlabel() == "classes"
    marks = [line for line in axes.lines if line.get_label() == "_printed"]
    assert [line.get_xydata().tolist() for line in marks] == [[[10.0, 12.5]], [[2.0, 70.0]]]  # type: ignore[union-attr]


def test_lines_without_x_stand_over_the_columns_names(drawn: list[Figure], tmp_path: Path) -> None:
    (axes,) = picture(drawn, tmp_path, kind="lines", y="accuracy").axes
    assert points(axes)["A"] == [[0.0, 11.0], [1.0, 31.0]]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["K=1", "K=2"]
    with pytest.raises(ConfigError, match="'K=2' has no x"):
        more = {"columns": [{"name": "K=1", "x": 1}, {"name": "K=2"}]}
        picture(drawn, tmp_path, kind="lines", y="accuracy", more=more)


def group_run(folder: Path = Path("/nowhere")) -> RunView:
    """Two rounds: client 2 is high-frequency, then 0 and 3."""
    groups = {"cohort": [[0, 1, 2], [0, 3]], "high_frequency": [[2], [0, 3]], "attendees": [[0, 1, 2], [0, 3]]}
    return run_view(accuracy=[0.1, 0.2], folder=folder, **groups)


def with_clients(folder: Path) -> Path:
    write_clients(RunFolder.create(folder, overwrite=False), COUNTS)
    return folder


def one_run(run: RunView, **spec: Any) -> dict[Cell, RunView | str]:
    cells = cells_of(table(spec), "full")
    return {cell: run if (cell.row, cell.column, cell.seed) == ("A", "K=1", 0) else "not run" for cell in cells}


def test_membership_shows_cohort_and_group_by_round(drawn: list[Figure], tmp_path: Path) -> None:
    figure = picture(drawn, tmp_path, kind="membership", runs=one_run(group_run(), kind="membership"))
    (axes,) = figure.axes
    cells = np.asarray(axes.images[0].get_array())
    assert cells.tolist() == [[1, 2], [1, 0], [2, 0], [0, 2]]
    assert axes.images[0].get_extent() == [0.5, 2.5, 3.5, -0.5]
    assert legend_texts(figure) == ["low-frequency", "high-frequency"]


def test_group_labels_are_the_groups_shares_beside_the_populations(drawn: list[Figure], tmp_path: Path) -> None:
    folder = with_clients(tmp_path / "run")
    runs = one_run(group_run(folder), kind="group_labels")
    figure = picture(drawn, tmp_path, kind="group_labels", runs=runs)
    (axes,) = figure.axes
    low, high = (np.asarray(line.get_ydata()).tolist() for line in axes.lines)
    assert low == [0.5, 0.5]  # of the first round alone: in the second all of the cohort is in the group
    assert np.allclose(high, [(0.5 + 10 / 12) / 2, (0.5 + 2 / 12) / 2])
    (population,) = [c for c in axes.collections if isinstance(c, LineCollection)][:1]
    heights = [float(segment[0][1]) for segment in population.get_segments()]
    assert np.allclose(heights, [12 / 20, 8 / 20])


def test_groups_of_a_run_are_arrays() -> None:
    run = group_run()
    assert has_group(run) and not has_group(run_view(accuracy=[0.1]))
    cells = membership_of(run)
    assert (cells == HIGH).sum() == 3 and (cells == COHORT).sum() == 2
    found = group_labels_of(run, COUNTS)
    assert found is not None and found.high_RC.shape == (2, 2) and found.low_RC.shape == (1, 2)
    assert group_labels_of(run_view(accuracy=[0.1]), COUNTS) is None
    assert counts_of(run) is None
    with pytest.raises(Exception, match="round 2 names client 3, but there are 3"):
        membership_of(run, num_clients=3)


def test_classes_and_participation_are_read_from_the_runs_folder(drawn: list[Figure], tmp_path: Path) -> None:
    folder = with_clients(tmp_path / "run")
    trace = ScenarioTrace(num_clients=4, num_classes=2)
    for classes in ({0: [0]}, {0: [1], 3: [0]}):
        trace = trace.with_round([0, 1, 2, 3], classes)
    RunFolder(folder).write_scenario(trace.to_json())
    run = group_run(folder)
    (axes, *_) = picture(drawn, tmp_path, kind="classes", runs=one_run(run, kind="classes")).axes
    rows = np.ma.filled(np.ma.asarray(axes.images[0].get_array()), -1.0)
    assert rows[0].tolist() == [1.0, 0.0]  # client 0 has class 0, then class 1, of which it has no sample
    assert rows[9].tolist() == [0.75, 1.0]  # client 3: six of eight, then class 0 alone
    (axes, *_) = picture(drawn, tmp_path, kind="participation", runs=one_run(run, kind="participation")).axes
    assert np.asarray(axes.images[0].get_array())[:, 1].tolist() == [3, 1, 1, 3]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"kind": "scatter", "y": "accuracy"}, "scatter needs `x`"),
        ({"kind": "curves", "x": "lr"}, "x of curves must be one of round"),
        ({"kind": "curves", "y": "kl_divergence"}, "no run has the column kl_divergence"),
        ({"kind": "membership"}, "no run that it shows has a high-frequency group"),
        ({"kind": "classes"}, "drift"),
        ({"kind": "bars", "y": "accuracy", "rows": ["C"]}, "none of the runs that it shows has rounds, or they failed"),
    ],
)
def test_what_cannot_be_drawn_is_said(drawn: list[Figure], tmp_path: Path, spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        picture(drawn, tmp_path, **spec)
    assert not drawn and not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("kind", ["participation", "membership", "classes"])
def test_runs_of_a_file_have_no_picture_of_clients(drawn: list[Figure], tmp_path: Path, kind: str) -> None:
    run = group_run()
    (kept,) = read_runs(write_runs({"a" * 64: run}, tmp_path / "kept")).values()
    runs = one_run(replace(kept, config=run.config), kind=kind)
    with pytest.raises(ConfigError, match="given by --from, which has no lists and files of runs"):
        picture(drawn, tmp_path, kind=kind, runs=runs)
    assert not drawn


def test_curves_of_a_column_without_finished_runs_are_refused(drawn: list[Figure], tmp_path: Path) -> None:
    every = all_runs(table({"kind": "curves"}))
    first = {cell: runs for cell, runs in every.items() if cell.column == "K=1"}
    with pytest.raises(ConfigError, match="none of the runs that it shows has rounds, or they failed"):
        picture(drawn, tmp_path, runs=first, kind="curves", columns=["K=2"])


def test_too_many_panels_are_refused(drawn: list[Figure], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene, "_MOST_PANELS", 3)
    with pytest.raises(ConfigError, match="room for 3 runs, but there are 4"):
        picture(drawn, tmp_path, kind="participation")


SPECS = [
    {"kind": "scatter", "x": "comm_ratio", "y": "accuracy"},
    {"kind": "curves", "y": "test_accuracy"},
    {"kind": "bars", "y": "accuracy"},
    {"kind": "lines", "y": "accuracy"},
    {"kind": "participation"},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec, marks=() if spec["kind"] == "curves" else pytest.mark.exhaustive, id=spec["kind"])
        for spec in SPECS
    ],
)
def test_a_picture_comes_out_alike_each_time(
    written: None, drawn: list[Figure], tmp_path: Path, spec: dict[str, Any]
) -> None:
    files = []
    for place in ("first", "second"):
        picture(drawn, tmp_path / place, **spec)
        files.append({path.suffix: path.read_bytes() for path in (tmp_path / place).iterdir()})
    assert files[0] == files[1] and set(files[0]) == {".png", ".pdf"}


def test_rows_keep_their_look_in_a_picture_of_some(drawn: list[Figure], tmp_path: Path) -> None:
    colours = []
    for rows in (["A", "B"], ["B"]):
        (axes,) = picture(drawn, tmp_path, kind="curves", rows=rows, columns=["K=1"]).axes
        colours.append(next(line.get_color() for line in axes.lines if line.get_label() == "B"))
    assert colours[0] == colours[1]
    many = looks([str(k) for k in range(14)])
    assert len({(look.colour, look.marker) for look in many.values()}) == 14


def test_legends_cover_no_panel() -> None:
    with paper_style():
        figure, every = panels(["a", "b", "c"], title="t")
        for axes in every:
            axes.set_ylabel("y")
            for name in range(8):
                axes.plot([0, 1], [name, name], label=f"a long name of a row {name}")
        legend_below(figure, every[0].lines)
        label_outer(figure)
        figure.draw_without_rendering()
        (legend,) = figure.legends
        box = legend.get_window_extent()
        assert box.y1 <= min(axes.get_tightbbox().y0 for axes in every)  # type: ignore[union-attr]
        assert 0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0
        assert [axes.get_ylabel() for axes in every] == ["y", "", ""]


def test_drawing_on_given_axes_needs_no_table() -> None:
    figure, (left, right) = panels(["a", "b"])
    draw_membership(left, membership_of(group_run()), first_round=5)
    found = group_labels_of(group_run(), COUNTS)
    assert found is not None
    draw_group_labels(right, found)
    assert left.images[0].get_extent() == [4.5, 6.5, 3.5, -0.5]
    assert len(right.lines) == 2
    figure.draw_without_rendering()


def title_of(figure: Figure) -> str:
    return " ".join(figure.get_suptitle().split())


def test_a_picture_of_another_setting_says_which_and_shows_nothing_printed(drawn: list[Figure], tmp_path: Path) -> None:
    printed = {"A": {"K=1": {"accuracy": 40.0}}}
    more = {"printed": printed, "scales": {"smoke": {"set": {"training.rounds": 2}}}}
    asked = table({"kind": "bars", "y": "accuracy"}, **more)
    for scale, marks in (("full", 1), ("smoke", 0)):
        runs: dict[Cell, RunView | str] = {cell: run_view(accuracy=[0.3]) for cell in cells_of(asked, scale)}
        draw(asked.figures[0], measured(asked, runs, scale=scale), runs, path_stem=tmp_path / scale)
        assert [len(drawn[-1].axes[0].lines), legend_texts(drawn[-1])[-1] == "printed"] == [marks, bool(marks)]
    assert title_of(drawn[0]) == "" and "scale smoke: " in title_of(drawn[1])
    assert "not the paper's setting" in title_of(drawn[1]) and "seed 0" in title_of(drawn[1])


def test_the_setting_has_data_network_rounds_and_seeds_of_what_was_run() -> None:
    runs = [run_view(accuracy=[0.1], seed=seed) for seed in (0, 1)]
    for run, rounds in zip(runs, (3, 8), strict=True):
        run.config.update(  # type: ignore[attr-defined]
            scenario={"dataset": "digits"}, model={"name": "mlp"}, training={"rounds": rounds}
        )
    said = scene.setting_of_runs(runs, scale="smoke", is_papers=False)
    assert said == "scale smoke: digits; mlp; 3 to 8 rounds; seeds 0, 1; not the setting of scale full"


def test_panels_are_called_by_what_was_run(drawn: list[Figure], tmp_path: Path) -> None:
    columns = [{"name": "CIFAR-100 CNN", "set": {"model": {"name": "cnn"}}}, {"name": "K=2"}]
    more = {"base": {"scenario": {"dataset": "cifar100"}}, "columns": columns}
    scales = {"smoke": {"set": {"scenario.dataset": "digits", "model": {"name": "mlp"}}}}
    asked = table({"kind": "scatter", "x": "cost", "y": "accuracy"}, **more, scales=scales)
    asked.rows[0].labels["smoke"] = "a few"
    runs: dict[Cell, RunView | str] = {cell: run_view(accuracy=[0.3]) for cell in cells_of(asked, "smoke")}
    draw(asked.figures[0], measured(asked, runs, scale="smoke"), runs, path_stem=tmp_path / "smoke")
    assert [axes.get_title() for axes in drawn[-1].axes] == ["CIFAR-100 CNN (here digits, mlp)", "K=2"]
    assert legend_texts(drawn[-1]) == ["a few", "B"]


def test_no_two_of_many_lines_have_one_colour_and_levels_go_from_dark_to_light() -> None:
    assert len({look.colour for look in looks([f"method {chr(65 + k)}" for k in range(60)]).values()}) == 60
    shares = looks(["1.0", "0.5", "0.1", "FedAvg"])

    def brightness(name: str, among: Mapping[str, Any] = shares) -> float:
        return sum(weight * c for weight, c in zip((0.3, 0.59, 0.11), to_rgb(among[name].colour), strict=True))

    assert brightness("0.1") < brightness("0.5") < brightness("1.0") and shares["FedAvg"] == looks([*"abcd"])["d"]
    letters = looks([*"abcd"], ordered=True)
    assert sorted("dbca", key=lambda name: brightness(name, letters)) == [*"abcd"]
    pairs = looks([f"{level}-g {share}" for level in "ab" for share in (0.3, 0.6, 0.9)])
    assert len({look.colour for look in pairs.values()}) == 6


def test_panels_with_the_same_quantity_have_the_same_range(drawn: list[Figure], tmp_path: Path) -> None:
    left, right = picture(drawn, tmp_path, kind="curves").axes
    assert left.get_ylim() == right.get_ylim() and left.get_xlim() == right.get_xlim()
    _, (short, long) = panels(["a", "b"])
    short.plot([0, 1], [1, 5])
    long.plot([0, 900], [2, 9])
    share_axes([short, long])
    assert short.get_ylim() == long.get_ylim() and short.get_xlim()[1] < 2 < long.get_xlim()[1]
