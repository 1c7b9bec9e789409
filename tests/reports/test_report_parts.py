"""What a report is put together from: curves, configurations, maps of clients."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsweep.errors import OutputError
from fedsweep.reports import client_maps as report_clients
from fedsweep.reports.client_maps import (
    class_map,
    client_maps,
    interesting_first,
    pack,
    participation,
    split_tree,
)
from fedsweep.results.config_table import config_table, flat_config, setting_key
from fedsweep.results.curves import Curve, curve_json, finite, mean_curve, short, thinned
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
    assert mean.low["test_accuracy"] == (0.2, None, 0.5)
    assert mean.high["test_accuracy"] == (0.4, None, 0.9)
    assert mean.sim_time_s == (None, None, None)


def test_a_single_seed_has_no_band() -> None:
    assert mean_curve([curve([0.1])]).low == {}


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
    tree = curve_json(sparse, points=8)
    assert tree["round"][-1] == 100 and 98 in tree["round"]
    assert tree["figures"]["test_accuracy"][tree["round"].index(98)] == 0.5


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


def test_a_split_holds_each_sample_once_however_many_clients_there_are() -> None:
    small = split_tree(np.array([[2, 0], [0, 3]]))
    assert small["cells"] == [2, 0, 0, 3] and (small["per_client"], small["per_class"]) == (1, 1)
    assert "2 clients with 2 to 3 samples (mean 2.5) of 1 to 1 of 2 classes" in small["facts"]
    large = split_tree(np.ones((1001, 300), dtype=int))
    assert large["per_client"] == 7 and large["per_class"] == 2
    assert len(large["cells"]) == 143 * 150 and sum(large["cells"]) == 1001 * 300


def test_participation_is_a_map_of_clients_by_rounds() -> None:
    run = view(round=[1, 2, 3], cohort=[[0, 2], [2], [1]], high_frequency=[[2], None, []])
    part = participation(run, 3)
    assert part is not None
    assert (part["rounds"], part["clients"], part["per_round"], part["per_client"]) == (3, 3, 1, 1)
    assert unpacked(part["cohort"]) == [9, 0, 0, 0, 0, 9, 9, 9, 0]
    assert unpacked(part["high"]) == [0, 0, 0, 0, 0, 0, 9, 0, 0]
    assert part["has_high"] is True


def test_many_clients_and_rounds_share_cells() -> None:
    rounds = 1000
    run = view(round=list(range(1, rounds + 1)), cohort=[[0]] * rounds, high_frequency=[None] * rounds)
    part = participation(run, 320)
    assert part is not None and (part["per_client"], part["per_round"]) == (2, 5)
    # Of the first cell's two clients one was there in all of its rounds: a half of nine levels, rounded up.
    assert unpacked(part["cohort"]) == [5] * 200 + [0] * (159 * 200)
    assert len(part["cohort"]) < 2000 and part["has_high"] is False


def test_clients_that_cannot_be_are_passed_over() -> None:
    run = view(round=[1], cohort=[[-1, 1, 10**18]], high_frequency=[None])
    part = participation(run, None)
    assert part is not None and part["clients"] == 2 and unpacked(part["cohort"]) == [0, 9]
    assert participation(view(round=[1], cohort=[[10**18]], high_frequency=[None]), None) is None
    assert participation(view(), 5) is None


def test_packing_can_be_undone() -> None:
    levels = np.array([[0, 9, 0, 0], [3, 0, 0, 0]])
    assert pack(levels) == "a9b3c"
    assert unpacked(pack(np.zeros((7, 9), dtype=int))) == [0] * 63


def test_the_best_of_each_setting_comes_first() -> None:
    accuracies = {0: 0.1, 1: 0.9, 2: None, 3: 0.5}
    assert interesting_first(accuracies, [[0, 1], [2, 3]]) == [1, 3, 0, 2]


def unpacked(text: str) -> list[int]:
    levels: list[int] = []
    for character in text:
        levels += [int(character)] if character.isdigit() else [0] * (ord(character) - ord("a") + 1)
    return levels


def test_maps_beyond_what_a_page_has_room_for_are_left_out_and_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The first two runs' maps are "b9" with "c" and "9b9" with "d" (columns of clients): seven characters.
    monkeypatch.setattr(report_clients, "_BUDGET", 5)
    runs = [
        RunView(
            folder=tmp_path, config={}, result={}, columns={"round": [1], "cohort": [cohort], "high_frequency": [None]}
        )
        for cohort in ([0, 3], [1], [2])
    ]
    maps = client_maps(runs, [2, 0, 1])
    assert list(maps.views) == [2, 0] and maps.layers == ["b9", "c", "9b9", "d"]
    assert maps.notes == ["1 runs have no pictures of their clients here: the page would become too large"]


def test_presence_and_aggregation_have_maps_of_their_own_where_they_tell_more() -> None:
    rounds: dict[str, Any] = {"round": [1, 2], "cohort": [[0], [1]], "high_frequency": [None, None]}
    same = participation(view(**rounds, attendees=[[0], [1]], present=[None, None]), 3)
    assert same is not None and not {"present", "attended", "aggregated"} & same.keys()
    more = participation(view(**rounds, attendees=[[], [0, 1]], present=[[0, 2], [1]]), 3)
    assert more is not None and more["aggregated"] == 1
    assert unpacked(more["present"]) == [9, 0, 0, 9, 9, 0]
    assert unpacked(more["attended"]) == [0, 9, 0, 9, 0, 0]


def drifting(folder: Path, *, num_classes: int = 2, rounds: int = 2) -> RunView:
    """Two clients; the first has class 0 in odd rounds and class 1 in even ones."""
    RunFolder.create(folder, overwrite=False).write_config("scenario: {}\nmethod: {}\n")
    RunFolder(folder).write_clients(num_samples=[num_classes] * 2, label_counts=[[1] * num_classes] * 2)
    trace = ScenarioTrace(num_clients=2, num_classes=num_classes)
    for number in range(rounds):
        trace = trace.with_round([0, 1], {0: [number % 2]})
    trace.save(folder / "scenario.json")
    return RunView(folder=folder, config={}, result={}, columns={})


def test_a_map_of_classes_has_a_band_for_each_client(tmp_path: Path) -> None:
    found = class_map(drifting(tmp_path), (2, 2))
    assert found is not None and (found["clients"], found["of"], found["most"]) == ([0, 1], 2, 1.0)
    # Nine levels of a share of 1; the second client has both classes, a half each. Each band ends with an empty row.
    assert found["cells"].tolist() == [[[9, 0], [0, 9], [0, 0]], [[5, 5], [5, 5], [0, 0]]]


def test_many_classes_and_rounds_share_cells_of_the_map(tmp_path: Path) -> None:
    found = class_map(drifting(tmp_path, num_classes=100, rounds=450), (2, 100))
    assert found is not None and (found["per_class"], found["per_round"]) == (4, 3)
    assert found["cells"].shape == (2, 26, 150)
    assert found["cells"][0, 0].min() == found["cells"][0, 0].max() == 9
    assert not found["cells"][0, 1:].any() and not found["cells"][:, -1].any()


def test_runs_under_drift_have_their_classes_in_the_report_and_damaged_files_a_note(tmp_path: Path) -> None:
    runs = [drifting(tmp_path / "good"), drifting(tmp_path / "bad")]
    (tmp_path / "bad" / "scenario.json").write_text("[]")
    maps = client_maps(runs, [0, 1])
    assert unpacked(maps.layers[maps.views[0]["drift"]["cells"]]) == [9, 0, 0, 9, 0, 0, 5, 5, 5, 5, 0, 0]
    assert "drift" not in maps.views[1] and "split" in maps.views[1]
    assert len(maps.notes) == 1 and "scenario.json" in maps.notes[0]
