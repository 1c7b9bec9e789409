"""What a report is put together from: curves, configurations, maps of clients."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_tables import write_clients

from fedsweep.errors import OutputError
from fedsweep.reports import client_maps as maps_module
from fedsweep.reports.charts import Chart, plain, wrapped
from fedsweep.reports.client_maps import (
    class_chart,
    client_maps,
    interesting_first,
    label_chart,
    participation_charts,
    split_chart,
)
from fedsweep.results.config_table import config_table, flat_config, setting_key
from fedsweep.results.curves import Curve, finite, mean_curve, short, thinned
from fedsweep.results.pareto import overlap
from fedsweep.results.seed_statistics import Estimate
from fedsweep.results.texts import clean
from fedsweep.results.view import RunView
from fedsweep.runs.run_folder import RunFolder
from fedsweep.world.replay import ScenarioTrace


def curve(accuracies: list[float | None], *, scale: float = 1.0, rounds: list[int] | None = None) -> Curve:
    numbers = rounds or list(range(1, len(accuracies) + 1))
    return Curve(
        rounds=tuple(numbers),
        total_bytes=tuple(100.0 * scale * number for number in numbers),
        sim_time_s=(None,) * len(numbers),
        figures={"test_accuracy": tuple(accuracies)},
    )


def view(**columns: list[Any]) -> RunView:
    return RunView(folder=Path("run"), config={}, result={}, columns=columns)


def test_a_mean_over_seeds_has_the_rounds_that_all_seeds_have() -> None:
    mean = mean_curve([curve([0.2, 0.4, 0.9]), curve([0.4, None, 0.5, 0.6], scale=3.0)])
    assert mean.rounds == (1, 2, 3)
    assert mean.total_bytes == (200.0, 400.0, 600.0)
    assert mean.figures["test_accuracy"] == pytest.approx((0.3, None, 0.7))
    # The sample deviations of 0.2, 0.4 and of 0.9, 0.5 are 0.1414 and 0.2828.
    assert mean.low["test_accuracy"] == pytest.approx((0.1585786, None, 0.4171573))
    assert mean.high["test_accuracy"] == pytest.approx((0.4414214, None, 0.9828427))
    assert mean.sim_time_s == (None, None, None)


def test_a_single_seed_has_no_band() -> None:
    assert mean_curve([curve([0.1])]).low == {}


def test_a_mean_has_no_figure_of_which_no_round_is_known_of_all_seeds() -> None:
    tested_at = [[3, 6], [4]]
    seeds = [
        Curve(
            rounds=tuple(range(1, last + 1)),
            total_bytes=(1.0,) * last,
            sim_time_s=(None,) * last,
            figures={
                "test_accuracy": tuple(0.5 if number in tested else None for number in range(1, last + 1)),
                "train_loss": (1e300,) * (last - 1) + (2e160 * last,),
            },
        )
        for tested in tested_at
        for last in [tested[-1]]
    ]
    mean = mean_curve(seeds)
    assert list(mean.figures) == ["train_loss"] and thinned(mean, points=4)
    assert mean.low["train_loss"] == (1e300,) * 3 + (None,), "its deviation is infinite"


def test_thinning_keeps_both_ends_and_every_peak_and_dip() -> None:
    values: list[float | None] = [0.5] * 1000
    values[333], values[700] = 0.99, 0.01
    places = thinned(curve(values), points=40)
    assert len(places) <= 42 and places == sorted(set(places))
    assert {0, 333, 700, 999} <= set(places)


def test_a_short_curve_is_kept_as_it_is_but_for_rounds_without_a_figure() -> None:
    assert thinned(curve([None, 0.1, None, 0.2]), points=10) == [1, 3]
    assert thinned(curve([None]), points=10) == []


def test_a_thinned_curve_ends_with_the_last_evaluation() -> None:
    sparse = Curve(
        rounds=tuple(range(1, 101)),
        total_bytes=tuple(map(float, range(100))),
        sim_time_s=(1.0,) * 100,
        figures={
            "test_accuracy": tuple(0.5 if place in (0, 97) else None for place in range(100)),
            "train_loss": (1.0,) * 100,
        },
    )
    places = thinned(sparse, points=8)
    assert places[-1] == 99 and 97 in places


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1, 1.0), (0.5, 0.5), (math.nan, None), (math.inf, None), (10**400, None), (True, None), ("1", None)],
)
def test_only_finite_numbers_are_figures(value: Any, expected: float | None) -> None:
    assert finite(value) == expected


@pytest.mark.parametrize(("value", "text"), [(123456.7, "123460"), (0.1234567, "0.12346"), (2.0, "2"), (None, "None")])
def test_numbers_on_the_page_have_five_digits(value: float | None, text: str) -> None:
    assert str(short(value)) == text


def test_seed_name_and_machine_make_no_other_setting() -> None:
    one = flat_config({"name": "a", "seed": 0, "runtime": {"backend": "ray"}, "training": {"rounds": 3}})
    two = flat_config({"name": "b", "seed": 1, "runtime": {"backend": "local"}, "training": {"rounds": 3}})
    assert setting_key(one) == setting_key(two)
    assert setting_key(one) != setting_key(flat_config({"training": {"rounds": 4}}))
    assert setting_key(flat_config({"runtime": {"executor": "vmap"}})) != setting_key(flat_config({}))


def test_configurations_side_by_side_show_what_differs_alone() -> None:
    first = flat_config({"method": {"name": "fedavg"}, "training": {"rounds": 3, "stop": None}})
    second = flat_config({"method": {"name": "fedprox", "mu": 0.1}, "training": {"rounds": 3, "stop": None}})
    table = config_table([first, second])
    assert table.differing == ("method.name", "method.mu")
    assert table.cells == (("fedavg", ""), ("fedprox", "0.1"))
    assert table.common == (("training.rounds", "3"), ("training.stop", "null"))


def test_a_configuration_without_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    bomb: Any = "lol"
    for _ in range(20):
        bomb = [bomb] * 10
    for config in ({"name": endless}, {"name": bomb}):
        with pytest.raises(OutputError, match="too deeply nested"):
            flat_config(config)


def test_text_on_the_page_is_one_printable_line() -> None:
    assert clean("a\nb\x1b[31m\u202e") == "a b [31m "
    assert len(clean("x" * 1000)) == 200


def cells(chart: Chart) -> list[list[Any]]:
    """The numbers of a map, row by row."""
    (trace,) = chart.data
    return [list(row) for row in trace["z"]]


def words(chart: Chart) -> list[list[str]]:
    """What a map of states says of each cell."""
    (trace,) = chart.data
    return [[trace["meta"]["words"][state] for state in row] for row in trace["z"]]


def test_labels_are_shown_letter_by_letter() -> None:
    assert plain("<b>&amp;%{x}%") == "&lt;b&gt;&amp;amp;&#37;{x}%"
    long = "dynamicfl,high_interval=a,low_interval=g,group=random"
    assert wrapped(long) == "dynamicfl,high_interval=a,<br>low_interval=g,group=random"
    assert wrapped("x" * 70) == f"{'x' * 34}<br>{'x' * 34}<br>xx" and wrapped("") == ""


def test_a_split_holds_each_sample_once_however_many_clients_there_are() -> None:
    called = json.dumps(split_chart(np.array([[2, 0, 1], [0, 3, 0]]), "quantile").tree())
    assert "quantile" in called and "class" not in called
    small = split_chart(np.array([[2, 0, 1], [0, 3, 0]]))
    assert cells(small) == [[2, 0], [0, 3], [1, 0]]  # a row for each class
    assert "2 clients with 3 to 3 samples (mean 3.0) of 1 to 2 of 3 classes" in small.hint
    large = split_chart(np.ones((1001, 300), dtype=int))
    assert np.array(cells(large)).shape == (150, 143) and np.sum(cells(large)) == 1001 * 300
    assert list(large.data[0]["x"])[:3] == [0, 7, 14] and "7 to a cell" in large.layout["xaxis"]["title"]["text"]


def test_a_map_made_by_hand_is_what_plotly_itself_would_make_of_it() -> None:
    import plotly.graph_objects as go

    tree = json.loads(json.dumps(split_chart(np.array([[2, 0, 1], [0, 3, 0]])).tree()))
    figure = go.Figure(data=tree["data"], layout=tree["layout"])  # refuses settings that it does not know
    whole = json.loads(figure.to_json())
    del whole["layout"]["template"]
    assert whole == {"data": tree["data"], "layout": tree["layout"]}


def test_participation_is_a_map_of_clients_by_rounds() -> None:
    run = view(round=[1, 2, 3], cohort=[[0, 2], [2], [1]], high_frequency=[[2], None, []])
    (chart,) = participation_charts(run, 3)
    idle, cohort, high = "there, did not train", "trained and aggregated", "in the high-frequency group"
    assert words(chart) == [[cohort, idle, idle], [idle, idle, cohort], [high, cohort, idle]]
    assert list(chart.data[0]["x"]) == [1, 2, 3] and [text for text, _ in chart.key] == [idle, cohort, high]
    colours = dict(chart.data[0]["colorscale"])
    assert {colour for _, colour in chart.key} <= set(colours.values())


def test_many_clients_and_rounds_share_cells() -> None:
    rounds = 1000
    run = view(round=list(range(1, rounds + 1)), cohort=[[0]] * rounds, high_frequency=[None] * rounds)
    (chart,) = participation_charts(run, 320)
    # Of the first cell's two clients one was there in all of its rounds: a half.
    assert cells(chart) == [[50] * 200] + [[0] * 200] * 159
    assert list(chart.data[0]["x"])[:2] == [1, 6] and chart.title == "Who was in the cohort"


def test_clients_that_cannot_be_are_passed_over() -> None:
    (chart,) = participation_charts(view(round=[1], cohort=[[-1, 1, 10**18]], high_frequency=[None]), None)
    assert words(chart) == [["there, did not train"], ["trained and aggregated"]]
    assert participation_charts(view(round=[1], cohort=[[10**18]], high_frequency=[None]), None) == []
    assert participation_charts(view(), 5) == []


def test_participants_are_not_everybody_also_where_they_are_the_first_clients(tmp_path: Path) -> None:
    write_clients(RunFolder.create(tmp_path / "run", overwrite=False), [[2, 1], [0, 1]])
    for clients, alone in ((2, False), (500, True)):
        run = RunView(folder=tmp_path / "run", config={"scenario": {"clients": clients}}, result={}, columns={})
        assert run.lists_participants_alone() is alone


def test_a_last_cell_of_fewer_clients_is_as_full_as_its_clients_are() -> None:
    (chart,) = participation_charts(view(round=[1], cohort=[list(range(161))], high_frequency=[None]), 161)
    assert cells(chart) == [[100]] * 81


def test_the_best_of_each_setting_comes_first() -> None:
    accuracies = {0: 0.1, 1: 0.9, 2: None, 3: 0.5}
    assert interesting_first(accuracies, [[0, 1], [2, 3]]) == [1, 3, 0, 2]


def test_charts_beyond_what_a_page_has_room_for_are_left_out_and_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [
        RunView(
            folder=tmp_path, config={}, result={}, columns={"round": [1], "cohort": [cohort], "high_frequency": [None]}
        )
        for cohort in ([0, 3], [1], [2])
    ]
    monkeypatch.setattr(maps_module, "_BUDGET", 1.5 * client_maps(runs[:1], [0]).size)
    maps = client_maps(runs, [2, 0, 1])
    assert list(maps.views) == [2, 0] and len(maps.charts) == 2
    assert maps.notes == ["1 runs have no pictures of their clients here: the page would become too large"]


def test_presence_and_aggregation_are_told_apart_where_they_differ() -> None:
    rounds: dict[str, Any] = {"round": [1, 2], "cohort": [[0], [1]], "high_frequency": [None, None]}
    (same,) = participation_charts(view(**rounds, attendees=[[0], [1]], present=[None, None]), 3)
    assert {text for text, _ in same.key} == {"there, did not train", "trained and aggregated"} and same.hint == ""
    (more,) = participation_charts(view(**rounds, attendees=[[], [0, 1]], present=[[0, 2], [1]]), 3)
    assert more.hint == "1 of 2 rounds aggregated."
    assert words(more) == [
        ["trained, not aggregated", "absent, earlier work aggregated"],
        ["absent", "trained and aggregated"],
        ["there, did not train", "absent"],
    ]


def drifting(folder: Path, *, num_classes: int = 2, rounds: int = 2) -> RunView:
    """Two clients; the first has class 0 in odd rounds and class 1 in even ones."""
    RunFolder.create(folder, overwrite=False).write_config("scenario: {}\nmethod: {}\n")
    write_clients(RunFolder(folder), [[1] * num_classes] * 2)
    trace = ScenarioTrace(num_clients=2, num_classes=num_classes)
    for number in range(rounds):
        trace = trace.with_round([0, 1], {0: [number % 2]})
    (folder / "scenario.json").write_text(trace.to_json())
    return RunView(folder=folder, config={}, result={}, columns={})


def test_a_map_of_classes_has_a_band_for_each_client(tmp_path: Path) -> None:
    found = class_chart(drifting(tmp_path), (2, 2))
    assert found is not None
    # The second client has both classes, a half each. Each band ends with an empty row.
    assert cells(found) == [[100, 0], [0, 100], [None, None], [50, 50], [50, 50], [None, None]]
    assert found.data[0]["y"][:2] == ["client 0, class 0", "client 0, class 1"]
    assert list(found.layout["yaxis"]["ticktext"]) == ["0", "1"] and "up to 100 %" in found.hint


def test_many_classes_and_rounds_share_cells_of_the_map(tmp_path: Path) -> None:
    found = class_chart(drifting(tmp_path, num_classes=100, rounds=450), (2, 100))
    assert found is not None and found.data[0]["y"][0] == "client 0, class 0 to 3"
    assert len(cells(found)) == 2 * 26 and {len(row) for row in cells(found)} == {150}
    assert set(cells(found)[0]) == {100} and set(cells(found)[1]) == {0}


def test_runs_under_drift_have_their_classes_in_the_report_and_damaged_files_a_note(tmp_path: Path) -> None:
    runs = [drifting(tmp_path / "good"), drifting(tmp_path / "bad")]
    (tmp_path / "bad" / "scenario.json").write_text("[]")
    maps = client_maps(runs, [0, 1])
    titles = {index: [maps.charts[name].title for name in names] for index, names in maps.views.items()}
    assert titles == {0: ["What clients hold", "Which classes clients had"], 1: ["What clients hold"]}
    assert len(maps.notes) == 1 and "scenario.json" in maps.notes[0]


COUNTS = np.array([[4, 0], [0, 4], [2, 2], [6, 2]])


def grouped(folder: Path = Path("/nowhere"), **columns: Any) -> RunView:
    whole = {"round": [1, 2], "cohort": [[0, 1, 2], [0, 3]], "high_frequency": [[2], [0, 3]], **columns}
    return RunView(folder=folder, config={}, result={}, columns=whole)


def test_the_groups_shares_of_labels_are_summed_up_over_rounds() -> None:
    found = label_chart(grouped(), COUNTS)
    assert found is not None and found.hint.startswith("Over 2 rounds")
    population, low, _, thin, thick = found.data
    assert list(population["y"]) == [0.6, 0.4] and list(low["y"]) == [0.5, 0.5]
    assert low["error_y"]["array"] == [0, 0]
    assert list(thin["y"]) == [0.6667, 0.3333]  # of 1/2 and 10/12, 1/2 and 2/12
    assert [round(y + up, 4) for y, up in zip(thin["y"], thin["error_y"]["array"], strict=True)] == [0.8, 0.4666]
    assert [round(y - down, 4) for y, down in zip(thin["y"], thin["error_y"]["arrayminus"], strict=True)] == [
        0.5334,
        0.2,
    ]
    assert thick["error_y"]["array"][0] < thin["error_y"]["array"][0]


def test_runs_without_a_group_or_with_too_many_classes_have_no_chart_of_labels() -> None:
    assert label_chart(grouped(high_frequency=[None, None]), COUNTS) is None
    assert label_chart(grouped(high_frequency=[[], []]), COUNTS) is None
    many = np.ones((4, maps_module._MOST_CLASSES + 1), dtype=np.int64)
    assert label_chart(grouped(), many) is None
    assert label_chart(grouped(), many[:, :-1]) is not None


def test_the_page_has_the_groups_labels_beside_the_maps(tmp_path: Path) -> None:
    for name in ("with", "damaged"):
        write_clients(RunFolder.create(tmp_path / name, overwrite=False), COUNTS)
    damaged = grouped(tmp_path / "damaged", high_frequency=[[2], [9]], cohort=[[0, 1, 2], [0, 9]])
    maps = client_maps([grouped(tmp_path / "with"), damaged, grouped(high_frequency=[None, None])], [0, 1, 2])
    titles = [[maps.charts[name].title for name in maps.views[index]] for index in range(3)]
    assert [title for title in titles if "What labels the high-frequency group holds" in title] == titles[:1]
    assert len(maps.notes) == 1 and "round 2 names client 9" in maps.notes[0]
    assert maps.size == sum(len(chart.title + json.dumps(chart.tree())) for chart in maps.charts.values())


def test_a_step_along_the_front_that_may_be_chance_is_told() -> None:
    def estimate(low: float, high: float) -> Estimate:
        return Estimate(count=3, mean=(low + high) / 2, sd=0.1, low=low, high=high)

    clear = [estimate(0.3, 0.4), estimate(0.1, 0.2)]
    assert not overlap(*clear) and not overlap(*reversed(clear))
    assert overlap(clear[0], estimate(0.35, 0.5)) and overlap(estimate(0.35, 0.5), clear[0])
    assert not overlap(estimate(math.nan, math.nan), estimate(0.3, 0.4))
