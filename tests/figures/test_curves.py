"""Pictures: what is drawn, that every setting can be told apart, and which files come out."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from client_tables import write_clients
from matplotlib.figure import Figure
from tiny import with_totals

from fedsweep.errors import InputError, InvariantError
from fedsweep.figures import curves as plots
from fedsweep.figures import partition as partition_picture
from fedsweep.figures.curves import plot_accuracy_against_bytes, plot_learning_curves
from fedsweep.figures.of_run import plot_run
from fedsweep.figures.partition import plot_partition
from fedsweep.figures.scenario import plot_classes
from fedsweep.figures.style import COLOURS
from fedsweep.records import RoundRecord
from fedsweep.runs.run_folder import RunFolder

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved, in their order."""
    saved: list[Figure] = []
    save = plots.save_figure

    def keep(figure: Figure, target: Path) -> None:
        saved.append(figure)
        save(figure, target)

    for module in (plots, partition_picture):
        monkeypatch.setattr(module, "save_figure", keep)
    return saved


def write_run(path: Path, *, name: str, seed: int = 0, rounds: int = 4, status: str | None = "finished") -> Path:
    values: dict[str, Any] = dict.fromkeys(RoundRecord.__dataclass_fields__, 1)
    lists: dict[str, Any] = {
        "present": None,
        "cohort": (0,),
        "high_frequency": (0,),
        "attendees": (0,),
        "aggregation_weights": (1.0,),
        "extra": {},
        **dict.fromkeys(
            (
                *("best_accuracy", "full_time_s", "staleness", "traffic"),
                *("class_accuracies", "client_scores", "personal_accuracies"),
            )
        ),
    }
    blank = RoundRecord(**{**values, **lists, "bytes_up": 60, "bytes_down": 40})
    folder = RunFolder.create(path, overwrite=False)
    folder.write_config(f"name: {name}\nseed: {seed}\nscenario: {{}}\nmethod: {{name: fedavg}}\n")
    write_clients(folder, [[2, 1], [0, 1]])
    if rounds:
        rows = [
            replace(blank, round=r, test_accuracy=r / 10 if r % 2 else None, test_loss=None)
            for r in range(1, rounds + 1)
        ]
        folder.write_rounds(with_totals(rows))
    if status:
        folder.write_result({"status": status})
    return path


def legend_texts(figure: Figure) -> list[str]:
    return [text.get_text().replace("\n", " ") for legend in figure.legends for text in legend.get_texts()]


def test_accuracy_is_drawn_against_all_bytes_so_far(tmp_path: Path, figures: list[Figure]) -> None:
    write_run(tmp_path / "a", name="a")
    plot_accuracy_against_bytes([tmp_path], tmp_path / "plot.png")
    (axes,) = figures[0].axes
    (line,) = axes.lines
    assert np.allclose(np.asarray(line.get_xydata()), [[100.0, 10.0], [300.0, 30.0]])
    assert axes.get_xscale() == "log" and not axes.collections
    ticks = [label.get_text() for label in axes.get_xticklabels(which="both")]
    assert {text for text in ticks if text} >= {"100 B", "200 B"} and not any("10^" in text for text in ticks)
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)


def test_every_setting_has_a_look_of_its_own_and_a_band_over_its_seeds(tmp_path: Path, figures: list[Figure]) -> None:
    for name, seed in (("a", 0), ("a", 1), ("b", 0), ("c", 0)):
        write_run(tmp_path / f"{name}{seed}", name=name, seed=seed, status=None if name == "c" else "finished")
    plot_accuracy_against_bytes([tmp_path], tmp_path / "plot.png")
    (axes,) = figures[0].axes
    assert legend_texts(figures[0]) == ["a, FedAvg", "b, FedAvg", "c, FedAvg, unfinished", "band: mean ± sd over seeds"]
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 3
    assert len(axes.lines) == 3 and len(axes.collections) == 1


def test_a_setting_looks_alike_in_both_panels_whatever_came_before_it(tmp_path: Path, figures: list[Figure]) -> None:
    write_run(tmp_path / "0", name="nothing-yet", rounds=0, status=None)
    write_run(tmp_path / "1", name="b")
    plot_learning_curves([tmp_path], tmp_path / "plot.png")
    left, right = figures[0].axes
    assert [line.get_color() for line in left.lines] == [line.get_color() for line in right.lines] == [COLOURS[1]]
    assert right.get_ylabel() == "training loss"  # no test loss in these runs


def test_many_settings_are_told_apart_by_markers_too_and_the_picture_stays_as_wide_as_a_column(
    tmp_path: Path, figures: list[Figure]
) -> None:
    for number in range(10):
        write_run(tmp_path / f"{number:02}", name=f"fedavg-with-a-name-that-takes-more-than-one-line-{number}")
    plot_accuracy_against_bytes([tmp_path], tmp_path / "plot.pdf")
    (axes,) = figures[0].axes
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 10
    (legend,) = figures[0].legends
    box = legend.get_window_extent()
    assert len(legend.get_texts()) == 10
    assert box.y1 <= axes.get_window_extent().y0 and box.x0 >= 0 and box.x1 <= figures[0].bbox.x1
    assert figures[0].get_size_inches()[0] == pytest.approx(3.4)
    assert b"/Type3" not in (tmp_path / "plot.pdf").read_bytes()


def test_a_run_without_rounds_is_named_all_the_same(tmp_path: Path, figures: list[Figure]) -> None:
    write_run(tmp_path / "a", name="fedavg", rounds=0, status="failed")
    plot_accuracy_against_bytes([tmp_path], tmp_path / "plot.png")
    assert figures[0].get_suptitle() == "fedavg, failed"
    assert [text.get_text() for text in figures[0].axes[0].texts] == ["nothing measured yet"]


def test_a_picture_changes_none_of_matplotlibs_settings(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    plot_partition(np.ones((2, 2)), tmp_path / "plot.svg")
    first = (tmp_path / "plot.svg").read_bytes()
    plot_partition(np.ones((2, 2)), tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_bytes() == first
    assert dict(matplotlib.rcParams) == before


def test_pictures_are_the_same_whatever_a_users_matplotlibrc_has(tmp_path: Path) -> None:
    shares = np.eye(3)[:, :, None]  # three clients, each with its class in a round of its own
    plot_classes(shares, tmp_path / "plain.svg")
    with matplotlib.rc_context({"text.usetex": True, "savefig.bbox": "tight", "image.origin": "lower"}):
        plot_classes(shares, tmp_path / "own.svg")
    assert (tmp_path / "own.svg").read_bytes() == (tmp_path / "plain.svg").read_bytes()


@pytest.mark.parametrize(("suffix", "start"), [(".png", PNG), (".pdf", b"%PDF"), (".SVG", b"<?xml")])
def test_the_suffix_names_the_format(tmp_path: Path, suffix: str, start: bytes) -> None:
    path = tmp_path / "new" / f"plot{suffix}"
    plot_partition(np.ones((2, 2)), path)
    assert path.read_bytes().startswith(start)


def test_a_picture_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"plot\.gif: a picture's name must end in one of \.png, \.pdf, \.svg"):
        plot_partition(np.ones((2, 2)), tmp_path / "plot.gif")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"plot\.png: cannot be written: .*file is no folder"):
        plot_partition(np.ones((2, 2)), tmp_path / "file" / "plot.png")


def test_bubbles_have_areas_like_counts(tmp_path: Path, figures: list[Figure]) -> None:
    plot_partition(np.array([[4, 0], [1, 2]]), tmp_path / "plot.png")
    top, main = figures[0].axes
    assert [bar.get_height() for bar in top.patches] == [4, 3]  # type: ignore[attr-defined]
    bubbles = main.collections[0]
    assert np.asarray(bubbles.get_offsets()).tolist() == [[0, 0], [1, 0], [1, 1]]
    sizes = bubbles.get_sizes()  # type: ignore[attr-defined]
    assert (sizes / sizes[1]).tolist() == [4, 1, 2]


@pytest.mark.parametrize("shape", [(1, 1), (60, 30), (61, 10), (1000, 10), (10, 100)])
def test_partitions_of_any_size_are_drawn_whole(tmp_path: Path, figures: list[Figure], shape: tuple[int, int]) -> None:
    counts = np.arange(shape[0] * shape[1]).reshape(shape)
    plot_partition(counts, tmp_path / "plot.png")
    main = figures[0].axes[1]
    assert main.get_xlim()[1] > shape[0] - 1 and main.get_ylim()[0] > shape[1] - 1
    if main.images:
        assert np.ma.filled(np.ma.asarray(main.images[0].get_array()), 0).tolist() == counts.T.tolist()
    else:
        assert len(np.asarray(main.collections[0].get_offsets())) == np.count_nonzero(counts)


@pytest.mark.parametrize("counts", [[1, 2], [[-1]], []])
def test_what_is_no_table_of_counts_is_refused(tmp_path: Path, counts: list[Any]) -> None:
    with pytest.raises(InvariantError, match="counts must be a table"):
        plot_partition(counts, tmp_path / "plot.png")


def test_a_run_has_three_pictures(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    drawn = plot_run(write_run(tmp_path / "a", name="a"), tmp_path / "out")
    assert [path.name for path in drawn] == ["learning_curves.png", "accuracy_against_bytes.png", "partition.png"]
    assert all(path.read_bytes().startswith(PNG) for path in drawn)
    drawn = plot_run(write_run(tmp_path / "b", name="b", rounds=0), tmp_path / "out")
    assert [path.name for path in drawn] == ["partition.png"]


@pytest.mark.slow
def test_reports_import_without_matplotlib() -> None:
    code = "import sys, fedsweep.figures.curves, fedsweep.reports.compare; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
