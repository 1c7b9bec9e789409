"""The picture of a study: a panel for each world, a colour for each row."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib import rc_context, rcParams
from matplotlib.figure import Figure
from tiny import with_totals

from fedsweep.errors import InputError
from fedsweep.figures import study as pictures
from fedsweep.figures.study import plot_runs
from fedsweep.figures.style import legend_below, line_handle, look_of, panels, paper_style, setting_looks
from fedsweep.reports.compare import compared_runs
from fedsweep.results.curves import figure_titles
from fedsweep.results.settings import ReportRun
from fedsweep.results.worlds import LayoutKeys
from fedsweep.runs.run_folder import RunFolder
from fedsweep.testing import tiny_record

WORST = "client_accuracy_worst10"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved, in their order."""
    saved: list[Figure] = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, target: saved.append(figure))
    return saved


@pytest.fixture
def runs(tmp_path: Path) -> list[ReportRun]:
    """Two methods at two skews and with two seeds, whose last accuracy is their number in percent."""
    trials = [(m, a, s) for m in ("fedavg", "scaffold") for a in (0.1, 1.0) for s in (0, 1)]
    for place, (method, alpha, seed) in enumerate(trials):
        folder = RunFolder.create(tmp_path / str(place), overwrite=False)
        folder.write_config(
            f"name: s {method} dirichlet_alpha={alpha:g}\nseed: {seed}\nmethod: {{name: {method}}}\n"
            f"scenario: {{partition: {{dirichlet_alpha: {alpha}}}}}\n"
        )
        record = tiny_record(bytes_up=50, bytes_down=50, flops=7, test_loss=2.0)
        folder.write_rounds(with_totals(replace(record, round=r, test_accuracy=place / 100 * (r == 2)) for r in (1, 2)))
        folder.write_result({"status": "finished"})
    return compared_runs([tmp_path])


def test_worlds_have_panels_and_rows_their_methods_looks(runs: list[ReportRun], figures: list[Figure]) -> None:
    plot_runs(runs, "a.png")
    axes = figures[0].axes
    assert [panel.get_title() for panel in axes] == ["dirichlet_alpha=0.1", "dirichlet_alpha=1"]
    colours = [look.colour for look in setting_looks(["FedAvg", "SCAFFOLD"])]
    assert [[line.get_color() for line in panel.lines] for panel in axes] == [colours, colours]
    # Two seeds of each: 0 and 1, 4 and 5 percent.
    assert [np.asarray(line.get_ydata())[-1] for line in axes[0].lines] == pytest.approx([0.5, 4.5])
    assert axes[0].get_ylim() == axes[1].get_ylim() and axes[0].get_xscale() == "log"
    assert figures[0].get_size_inches()[0] == pytest.approx(6.8)
    assert [text.get_text() for text in figures[0].legends[0].get_texts()][:2] == ["fedavg", "scaffold"]


@pytest.mark.parametrize(("x", "last"), [("rounds", 2), ("flops", 14), ("bytes", 200)])
def test_curves_go_over_what_is_asked_for(runs: list[ReportRun], figures: list[Figure], x: str, last: float) -> None:
    plot_runs(runs, "a.png", x=x, y="loss")
    assert np.asarray(figures[0].axes[0].lines[0].get_xydata())[-1].tolist() == [last, 2.0]


def test_each_of_several_figures_has_a_line_of_panels_with_its_own_axis(
    runs: list[ReportRun], figures: list[Figure]
) -> None:
    plot_runs(runs, "a.png", x="rounds", y=["acc", "loss"])
    first, second, third, fourth = figures[0].axes
    assert [axes.get_title() for axes in figures[0].axes] == ["dirichlet_alpha=0.1", "dirichlet_alpha=1", "", ""]
    assert [np.asarray(axes.lines[1].get_ydata())[-1] for axes in (second, fourth)] == pytest.approx([6.5, 2.0])
    assert first.get_ylim() == second.get_ylim() != third.get_ylim() == fourth.get_ylim()
    assert [bool(axes.get_ylabel()) for axes in figures[0].axes] == [True, False, True, False]


def test_several_figures_of_one_world_stand_side_by_side(runs: list[ReportRun], figures: list[Figure]) -> None:
    plot_runs(runs, "a.png", x="dirichlet_alpha", y=["best", "loss"])
    one, other = figures[0].axes
    assert one.get_ylabel() != other.get_ylabel() and other.get_ylabel()
    assert {len(axes.containers) for axes in (one, other)} == {2}
    assert one.get_position().y0 == other.get_position().y0


def test_ends_go_over_a_key_with_numbers(runs: list[ReportRun], figures: list[Figure]) -> None:
    plot_runs(runs, "a.png", x="dirichlet_alpha")
    (axes,) = figures[0].axes
    lines = [np.asarray(container.lines[0].get_xydata()).tolist() for container in axes.containers]  # type: ignore[attr-defined]
    assert lines == [[[0.1, 0.5], [1.0, 2.5]], [[0.1, 4.5], [1.0, 6.5]]]
    assert axes.get_xlabel() == "dirichlet_alpha"


def test_columns_can_be_chosen(runs: list[ReportRun], figures: list[Figure]) -> None:
    plot_runs(runs, "a.png", keys=LayoutKeys(columns=["method"]), called=str.upper)
    assert [panel.get_title() for panel in figures[0].axes] == ["METHOD=FEDAVG", "METHOD=SCAFFOLD"]


def test_an_accuracy_is_in_percent_with_its_unit_whoever_it_is_of(runs: list[ReportRun], figures: list[Figure]) -> None:
    worst = [replace(run, view=replace(run.view, columns={**run.view.columns, WORST: (0.25, 0.5)})) for run in runs]
    plot_runs(worst, "a.png", x="rounds", y=WORST)
    axes = figures[0].axes[0]
    assert np.asarray(axes.lines[0].get_ydata()).tolist() == [25, 50]
    assert axes.get_ylabel() == "client accuracy worst10 (%)"
    assert figure_titles({})[WORST].is_share


@pytest.mark.parametrize("x", ["rounds", "dirichlet_alpha"])
def test_a_metric_that_is_a_share_is_in_percent(runs: list[ReportRun], figures: list[Figure], x: str) -> None:
    config = {"evaluation": {"metrics": [{"name": "macro_f1", "unit": "share"}, {"name": "brier_score"}]}}
    columns = {"macro_f1": (0.25, 0.5), "brier_score": (0.25, 0.5)}
    views = [replace(r.view, config=r.view.config | config, columns={**r.view.columns, **columns}) for r in runs]
    plot_runs([replace(run, view=view) for run, view in zip(runs, views, strict=True)], "a.png", x=x, y=[*columns])
    share, score = figures[0].axes[0], figures[0].axes[-1 if x == "dirichlet_alpha" else 2]
    assert [axes.get_ylabel() for axes in (share, score)] == ["macro f1 (%)", "brier score"]
    assert [np.asarray(axes.lines[0].get_ydata())[-1] for axes in (share, score)] == [50, 0.5]


def test_names_are_written_letter_by_letter() -> None:
    """Between two dollars matplotlib reads TeX: of an amount it makes italics, of half a formula an error."""
    names = ["$5 or $6", r"$\frac{x$"]
    figure, _ = panels(names, title=names[0])
    legend_below(figure, [line_handle(name, look_of(0)) for name in names])
    file = io.StringIO()
    with rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg")
    assert [file.getvalue().count(f">{name}<") for name in names] == [3, 2]


def test_what_has_no_curve_is_refused(runs: list[ReportRun]) -> None:
    with pytest.raises(InputError, match="is no figure of a round"):
        plot_runs(runs, "a.png", y="best")
    with pytest.raises(InputError, match="or a key whose values are numbers"):
        plot_runs(runs, "a.png", x="method")


def test_where_nothing_is_classified_the_tasks_first_figure_is_drawn(tmp_path: Path, figures: list[Figure]) -> None:
    folder = RunFolder.create(tmp_path / "run", overwrite=False)
    folder.write_config("name: lines\nscenario: {task: {kind: next_token, metrics: [{name: perplexity, mode: min}]}}\n")
    folder.write_rounds([tiny_record(extra={"perplexity": 16.5})])
    plot_runs(compared_runs([tmp_path]), "a.png")
    (axes,) = figures[0].axes
    assert axes.get_ylabel() == "perplexity" and [list(line.get_ydata()) for line in axes.lines] == [[16.5]]
    with pytest.raises(InputError, match=r"--y best: no run has it .perplexity is what they have"):
        plot_runs(compared_runs([tmp_path]), "a.png", x="seed", y="best")


@pytest.mark.parametrize(("installed", "families"), [([], []), (["SimHei", "Noto Sans CJK SC"], ["Noto Sans CJK SC"])])
def test_names_in_chinese_have_a_font_that_is_installed(
    installed: list[str], families: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("matplotlib.font_manager.get_font_names", lambda: ["DejaVu Sans", *installed])
    with paper_style():
        assert rcParams["font.family"] == ["sans-serif", *families]
