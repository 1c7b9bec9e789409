"""Tables of groups: the methods' divergences by size, their order, limits on time, and what comes out."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedsweep.algorithms.dynamicfl.chooser import GroupProblem
from fedsweep.errors import ConfigError, ResourceError
from fedsweep.papers.dynamicfl import choices, choosing
from fedsweep.reproduce.cells import cells_of
from fedsweep.reproduce.definition.sections import Measure
from fedsweep.reproduce.definition.table_file import TableFile
from fedsweep.reproduce.measured.grid import Grid
from fedsweep.reproduce.measured.table_kind import table_kind
from fedsweep.world.label_stats import kl_divergence

HAS_GENETIC = importlib.util.find_spec("sko") is not None


def table(
    *rows: str,
    groups: dict[str, Any] | None = None,
    measures: Sequence[str] = ("kl_divergence", "seconds"),
    **more: Any,
) -> TableFile:
    return TableFile.model_validate(
        {
            "name": "t",
            "base": {"scenario": {"clients": 15, "partition": {"kind": "dirichlet", "dirichlet_alpha": 0.3}}},
            "title": "t",
            "source": "s",
            "kind": "groups",
            "measures": [{"name": name} for name in measures],
            "rows": [{"name": row} for row in rows or ("dynacomm", "exhaustive", "exact", "random")],
            "columns": [
                {"name": "Dir"},
                {"name": "K=2", "set": {"scenario.partition": {"kind": "classes", "classes_per_client": 2}}},
            ],
            "options": {"active": [7], "sizes": [1, 3, 7], "instances": 3, "orders": 2, **(groups or {})},
            "seeds": [0, 1],
            **more,
        }
    )


@pytest.fixture(autouse=True)
def _no_pictures_unless_asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are drawn all the same, but to write them takes most of a small table's time."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(choices, "save_both", lambda figure, stem: [])


def run(asked: TableFile, out: Path, *, scale: str = "full") -> Grid:
    cells = cells_of(asked, scale)
    return table_kind(asked).measure(asked, cells, scale=scale, folder=out, notify=lambda text: None)


def rows_of(out: Path) -> list[dict[str, str]]:
    with (out / "groups.csv").open() as file:
        return list(csv.DictReader(file))


def test_every_method_is_measured_on_the_same_cohorts_by_size(tmp_path: Path) -> None:
    grid = run(table(), tmp_path)
    rows = rows_of(tmp_path)
    assert len(rows) == 4 * 2 * 2 * 3 and {row["cohorts"] for row in rows} == {"3"}
    kl = {(r["row"], r["column"], r["seed"], r["size"]): float(r["kl_divergence"]) for r in rows}
    for (method, *place), value in kl.items():
        best = kl["exhaustive", *place]  # type: ignore[index]
        assert value >= best - 1e-12
        if method == "exact" or place[2] in ("1", "7"):
            # Of one client DynaComm tries all; seven of seven are the only choice.
            assert (method == "random" and place[2] == "1") or value == pytest.approx(best, abs=1e-12)
    cell = grid.cell("dynacomm", "K=2")
    assert cell is not None and not cell.problems and grid.scale == "full"
    by_seed = [np.mean([kl["dynacomm", "K=2", seed, size] for size in "137"]) for seed in "01"]
    assert cell.measured["kl_divergence"].mean == pytest.approx(np.mean(by_seed))
    assert cell.measured["kl_divergence"].count == 2
    seconds = cell.measured["seconds"].mean
    assert seconds is not None and 0 < seconds < 5


def test_divergences_are_from_the_whole_population() -> None:
    asked = table("exhaustive")
    cell = cells_of(asked, "full")[0]
    counts = choosing._label_counts(cell)
    (problem,) = choosing._cohorts(counts, active=7, cell=cell, instances=1)
    assert len(counts) == 15 and problem.counts_AC.shape == (7, 10)
    found = choosing._of_size(groups_kind_chooser("exhaustive"), [problem], 2, deadline=None)
    pairs = [problem.counts_AC[list(pair)].sum(axis=0) for pair in combinations(range(7), 2)]
    assert found is not None
    assert found[0][0] == pytest.approx(min(float(kl_divergence(p, counts.sum(axis=0))) for p in pairs))


def groups_kind_chooser(name: str) -> Any:
    from fedsweep.algorithms.dynamicfl.names import group_chooser

    return group_chooser(name)


def test_cohorts_follow_from_the_seed_alone(tmp_path: Path) -> None:
    kept = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        run(table("random", "dynacomm"), tmp_path / name)
        kept.append([(*row.values(),)[:-1] for row in rows_of(tmp_path / name)])
    assert kept[0] == kept[1]


class Stub:
    """A chooser that takes its time, by a clock of its own."""

    def __init__(self, clock: list[float], seconds: dict[int, float]) -> None:
        self.clock, self.seconds = clock, seconds

    def setup(self, stream: object) -> tuple[()]:
        return ()

    def choose(self, problem: GroupProblem, *, size: int) -> tuple[int, ...]:
        if self.seconds[size] < 0:
            raise ResourceError("it needs scikit-opt, which is not installed")
        self.clock[0] += self.seconds[size]
        return tuple(range(size))


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Seconds of the method ``exhaustive``, by size."""
    from fedsweep.algorithms.dynamicfl import names as group_registry

    clock, seconds = [0.0], dict.fromkeys((1, 3, 7), 0.001)
    make = group_registry.group_chooser

    def chooser(name: str, **options: object) -> Any:
        return Stub(clock, seconds) if name == "exhaustive" else make(name, **options)

    monkeypatch.setattr(group_registry, "group_chooser", chooser)
    monkeypatch.setattr(choosing.time, "perf_counter", lambda: clock[0])
    return seconds


@pytest.mark.parametrize("order", [[1, 3, 7], [7, 3, 1]])
def test_larger_sizes_are_left_out_after_a_choice_that_took_too_long(
    order: list[int], stub: dict[int, float], tmp_path: Path
) -> None:
    stub[3] = 2.5
    grid = run(table("dynacomm", "exhaustive", groups={"seconds": 2, "sizes": order}), tmp_path)
    sizes = {(row["row"], row["size"]) for row in rows_of(tmp_path)}
    assert ("exhaustive", "3") in sizes and ("exhaustive", "7") not in sizes and ("dynacomm", "7") in sizes
    assert "exhaustive, Dir, 7 active: over time after size 3 (a choice took 2.5 s, of 2 s)" in grid.notes
    # The cells of both methods are over the sizes that both came to.
    for row in ("dynacomm", "exhaustive"):
        own = [float(r["kl_divergence"]) for r in rows_of(tmp_path) if r["row"] == row and r["column"] == "Dir"]
        own = own if row == "exhaustive" else [own[0], own[1], own[3], own[4]]
        cell = grid.cell(row, "Dir")
        assert cell is not None and cell.measured["kl_divergence"].mean == pytest.approx(np.mean(own))


def test_a_small_scale_stops_after_its_time_and_says_how_much_it_looked_at(
    stub: dict[int, float], tmp_path: Path
) -> None:
    stub[3] = 5.0
    asked = table("dynacomm", "exhaustive", groups={"instances": 20}, scales={"smoke": {"seeds": [0]}})
    grid = run(asked, tmp_path, scale="smoke")
    assert {row["cohorts"] for row in rows_of(tmp_path)} == {"1"}
    assert "1 cohort at this scale in place of 20" in grid.notes
    stub[3] = 40.0
    grid = run(asked, tmp_path, scale="smoke")
    assert any("over time from size 7 on (20 s for all sizes at this scale)" in note for note in grid.notes)


def test_a_method_that_is_not_installed_says_so_and_the_others_are_measured(
    stub: dict[int, float], tmp_path: Path
) -> None:
    stub[1] = -1
    grid = run(table("dynacomm", "exhaustive"), tmp_path)
    absent, there = grid.cell("exhaustive", "Dir"), grid.cell("dynacomm", "Dir")
    assert absent is not None and absent.measured["kl_divergence"].count == 0
    assert there is not None and there.measured["kl_divergence"].count == 2
    assert "exhaustive, Dir, 7 active: it needs scikit-opt, which is not installed" in grid.notes


@pytest.mark.skipif(not HAS_GENETIC, reason="scikit-opt is not installed")
def test_the_genetic_algorithm_is_a_row_like_any_other(tmp_path: Path) -> None:
    asked = table("genetic", "exhaustive", groups={"sizes": [2], "instances": 1, "orders": 1}, seeds=[0])
    run(asked, tmp_path)
    kl = {(r["row"], r["column"]): float(r["kl_divergence"]) for r in rows_of(tmp_path)}
    assert all(kl["genetic", column] >= kl["exhaustive", column] - 1e-12 for column in ("Dir", "K=2"))


@pytest.mark.slow
def test_pictures_have_a_panel_per_column_and_a_line_per_method(
    pictures: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    save = choices.save_both

    def keep(figure: Figure, stem: Path) -> list[Path]:
        drawn.append(figure)
        return save(figure, stem)

    monkeypatch.setattr(choices, "save_both", keep)
    run(table("dynacomm", "random", groups={"active": [7, 9]}), tmp_path)
    names = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert names == ["kl-by-size.pdf", "kl-by-size.png", "seconds-by-size.pdf", "seconds-by-size.png"]
    titles = ["Dir, 7 active", "Dir, 9 active", "K=2, 7 active", "K=2, 9 active"]
    assert [axes.get_title() for axes in drawn[0].axes] == titles
    (line,) = [line for line in drawn[0].axes[3].lines if line.get_label() == "random"]
    rows = [r for r in rows_of(tmp_path) if (r["row"], r["column"], r["active"]) == ("random", "K=2", "9")]
    by_size = {size: np.mean([float(r["kl_divergence"]) for r in rows if r["size"] == size]) for size in "137"}
    assert np.allclose(np.asarray(line.get_xydata()), [[float(size), kl] for size, kl in by_size.items()])
    assert drawn[1].axes[0].get_yscale() == "log" and drawn[0].axes[0].get_yscale() == "linear"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"groups": {"sizes": [8]}}, "options.sizes must not exceed options.active, but has 8 of 7"),
        ({"groups": {"active": 16, "sizes": [1]}}, "options.active=16 clients can't be drawn from scenario.clients=15"),
        ({"groups": {"instances": 0}}, "table.options.instances"),
        ({"groups": {"cohorts": 3}}, "table.options.cohorts"),
        ({"groups": {"methods": {"dynacomm": "dynacom"}}}, "'dynacom'.*dynacomm"),
        ({"groups": {"methods": {"dynacomm": "similarity"}}}, "needs what clients measure on a model"),
        ({"measures": ["comm_ratio"]}, "measure of groups"),
        ({"figures": [{"name": "f", "kind": "bars", "y": "seconds"}]}, "kind lines with x: size"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_written(more: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        run(table("dynacomm", **more), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_measure_may_be_of_one_size_and_of_cohorts_of_one_number_of_clients(tmp_path: Path) -> None:
    measures = [
        {"name": "all", "of": "kl_divergence"},
        {"name": "few", "of": "kl_divergence", "where": {"size": 3, "active": 9}},
    ]
    asked = table("dynacomm", groups={"active": [7, 9]}).model_copy(
        update={"measures": [Measure.model_validate(given) for given in measures]}
    )
    grid = run(asked, tmp_path)
    rows = [r for r in rows_of(tmp_path) if (r["column"], r["size"], r["active"]) == ("Dir", "3", "9")]
    cell = grid.cell("dynacomm", "Dir")
    assert cell is not None and len(rows) == 2
    assert cell.measured["few"].mean == pytest.approx(np.mean([float(row["kl_divergence"]) for row in rows]))
    assert cell.measured["all"].mean != cell.measured["few"].mean
    wrong = asked.model_copy(update={"measures": [Measure(name="kl", of="kl_divergence", where={"size": 4})]})
    with pytest.raises(ConfigError, match="measure kl: where: size=4 is none of 1, 3, 7"):
        run(wrong, tmp_path)


@pytest.mark.skipif(not HAS_GENETIC, reason="scikit-opt is an extra")
def test_the_genetic_search_takes_the_tables_mutation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsweep.algorithms.dynamicfl.search import GeneticGroup

    seen = set()
    monkeypatch.setattr(GeneticGroup, "choose", lambda self, problem, size: (seen.add(self.mutation), (0,))[1])
    run(table("genetic", groups={"mutation": 0.01}), tmp_path)
    run(table("genetic"), tmp_path)
    assert seen == {0.01, 0.001}
