"""Runs side by side: what a row says, and that the table fits."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny import with_totals

from fedsweep.errors import InputError
from fedsweep.figures.style import COLOURS, setting_looks
from fedsweep.reports import compare
from fedsweep.reports.compare import compared_runs, print_layout, print_runs, print_settings
from fedsweep.reports.setting_table import TableStyle, settings_as
from fedsweep.results.selection import figure_name
from fedsweep.results.settings import ReportRun, group_settings, remarks, shortly_called
from fedsweep.results.texts import bytes_text, numbered, seconds_text, without_shared_start
from fedsweep.results.view import RunView
from fedsweep.runs.run_folder import RunFolder
from fedsweep.testing import tiny_record

ROUND = tiny_record(bytes_up=1000, bytes_down=500, comm_ratio=None, wall_time_s=1.0, eval_time_s=0.5)


def write_run(
    path: Path,
    *rounds: dict[str, Any],
    name: str = "run",
    seed: int = 0,
    method: str = "{name: fedavg}",
    status: str | None = "finished",
    **result: Any,
) -> Path:
    folder = RunFolder.create(path, overwrite=False)
    folder.write_config(f"name: {name}\nseed: {seed}\nscenario: {{}}\nmethod: {method}\n")
    if rounds:
        folder.write_rounds(
            with_totals(replace(ROUND, round=number, **values) for number, values in enumerate(rounds, 1))
        )
    if status is not None:
        folder.write_result({"status": status, **result})
    return path


def table(runs: list[ReportRun], *, by_setting: bool = False, **options: Any) -> list[str]:
    console = Console(file=io.StringIO(), **options)
    (print_settings if by_setting else print_runs)(runs, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_world_is_called_as_it_is_also_in_headings(tmp_path: Path) -> None:
    for place, name in enumerate(("a[/]b", "a[red]b")):
        write_run(tmp_path / f"{place}", {"test_accuracy": 0.5})
        config = tmp_path / f"{place}" / "config.yaml"
        config.write_text(config.read_text().replace("scenario: {}", f"scenario: {{dataset: '{name}'}}"))
    console = Console(file=io.StringIO(), width=200)
    print_layout(compared_runs([tmp_path]), console, style=TableStyle(columns=["dataset"]))
    assert isinstance(console.file, io.StringIO)
    assert "dataset=a[/]b" in console.file.getvalue() and "dataset=a[red]b" in console.file.getvalue()


def test_what_all_runs_share_is_worked_out_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(compare, "shortly_called", lambda runs: asked.append(len(runs)) or shortly_called(runs))
    for place in range(3):
        write_run(tmp_path / f"{place}", {})
    assert len(table(compared_runs([tmp_path]))) == 4 and asked == [3]


def test_a_row_says_what_the_rounds_say(tmp_path: Path) -> None:
    rounds: tuple[dict[str, Any], ...] = (
        {"test_accuracy": 0.5, "comm_ratio": 0.25, "sim_time_s": 10.0},
        {"test_accuracy": 0.75, "comm_ratio": 0.75, "sim_time_s": 30.0},
        {"test_accuracy": 0.7, "bytes_up": 0},
        {},
    )
    (row,) = compared_runs([write_run(tmp_path / "a", *rounds, seed=3, status=None)])
    assert (row.label, row.method, row.view.seed, row.status, row.num_rounds) == ("run", "FedAvg", 3, "unfinished", 4)
    assert (row.view.figure("test_accuracy"), row.view.figure("best_test_accuracy")) == (0.7, 0.75)
    assert (row.view.figure("total_bytes"), row.view.figure("comm_ratio")) == (5000, 0.5)
    assert (row.view.figure("sim_time_s"), row.view.figure("wall_time_s"), row.folder) == (30.0, 6.0, tmp_path / "a")


def test_what_the_rounds_do_not_have_is_looked_for_in_the_result(tmp_path: Path) -> None:
    write_run(tmp_path / "a", {}, total_bytes=7, best_test_accuracy=0.9, test_accuracy=None)
    (row,) = compared_runs([tmp_path])
    assert (
        row.view.figure("total_bytes"),
        row.view.figure("best_test_accuracy"),
        row.view.figure("test_accuracy"),
    ) == (1500, 0.9, None)


def test_what_is_not_a_number_in_the_end_is_no_figure(tmp_path: Path) -> None:
    """The last loss before a run diverged would make it the best of all."""
    columns: dict[str, list[Any]] = {"round": [1, 2, 3], "train_loss": [1.0, math.inf, math.nan]}
    view = RunView(folder=tmp_path, config={}, result={}, columns=columns)
    assert view.figure("train_loss") is None and view.over("train_loss", "mean") is None
    assert view.over("train_loss", "first") == 1.0


def test_runs_without_a_round_have_a_row(tmp_path: Path) -> None:
    write_run(tmp_path / "a", status="failed")
    write_run(tmp_path / "b", status=None)
    first, second = compared_runs([tmp_path])
    assert (first.status, first.num_rounds, first.view.figure("test_accuracy"), first.view.figure("total_bytes")) == (
        "failed",
        0,
        None,
        None,
    )
    assert second.status == "unfinished"


def test_nan_is_never_the_best(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", {"test_accuracy": math.nan}, {"test_accuracy": 0.1}, status=None)
    assert compared_runs([path])[0].view.figure("best_test_accuracy") == 0.1


def test_a_run_whose_model_computes_nan_has_failed_whatever_it_says(tmp_path: Path) -> None:
    sound, lost = {"test_accuracy": 0.3, "test_loss": 1.0}, {"test_accuracy": 0.8, "test_loss": math.nan}
    write_run(tmp_path / "a", sound, lost, seed=0, best_test_accuracy=0.8, test_accuracy=0.8)
    write_run(tmp_path / "b", lost, sound, seed=1)
    first, second = compared_runs([tmp_path])
    assert (first.status, first.reason) == (
        "failed",
        "diverged: its last test_loss is nan, so its model counts as failed",
    )
    assert (first.view.figure("test_accuracy"), first.view.figure("best_test_accuracy")) == (None, 0.3)
    # What came back from it is sound, but a round of NaN is no best one.
    assert (second.status, second.view.figure("best_test_accuracy")) == ("finished", 0.3)
    (setting,) = group_settings([first, second])
    assert (setting.counted, setting.failed, setting.figure("test_accuracy")) == ((1,), 1, 0.3)
    assert table([first, second])[1].split()[-2:] == ["failed", "2"]


def test_no_cell_of_csv_is_a_formula(tmp_path: Path) -> None:
    names = ('=HYPERLINK("http://x")', "+1+1", "@SUM(A1)", "-2", "plain")
    for place, name in enumerate(names):
        write_run(tmp_path / str(place), {"test_accuracy": 0.5}, name=json.dumps(name))
    rows = list(csv.DictReader(io.StringIO(settings_as(compared_runs([tmp_path]), "csv"))))
    assert [row["setting"] for row in rows] == [f"'{name}" for name in names[:4]] + ["plain"]
    assert rows[0]["test_accuracy_mean"] == "0.5" and rows[0]["test_accuracy_sd"] == ""


def test_merged_methods_are_named_together(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", method="{merge: [{name: feddh}, {name: fedad}]}")
    assert compared_runs([path])[0].method == "FedDHAD"


def test_a_run_named_twice_has_one_row(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a")
    assert len(compared_runs([tmp_path, path])) == 1


def test_seconds_a_round_are_the_median_of_all_but_the_first(tmp_path: Path) -> None:
    columns = {"wall_time_s": [9.0, 0.1, 0.5, 0.2], "eval_time_s": [1.0, 0.1, 0.1, 0.1]}
    view = RunView(folder=tmp_path, config={}, result={}, columns=columns)
    assert view.figure("round_time_s") == pytest.approx(0.3)
    assert view.figure("wall_time_s") == pytest.approx(11.1)
    alone = RunView(folder=tmp_path, config={}, result={}, columns={name: cells[:1] for name, cells in columns.items()})
    assert alone.figure("round_time_s") is None


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_without_a_run_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "a")
    with pytest.raises(InputError, match=str(tmp_path / name)):
        compared_runs([tmp_path / "a", tmp_path / name])


@pytest.mark.parametrize("text", ["- 1\n", "a: [\n"])
def test_a_damaged_configuration_is_named(tmp_path: Path, text: str) -> None:
    (write_run(tmp_path / "a") / "config.yaml").write_text(text)
    with pytest.raises(InputError, match=str(tmp_path / "a" / "config.yaml")):
        compared_runs([tmp_path])


def test_labels_grow_only_as_far_as_runs_need_to_be_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "1", name="one")
    write_run(tmp_path / "2", name="two", seed=0)
    write_run(tmp_path / "3", name="two", seed=1)
    assert [row.label for row in compared_runs([tmp_path])] == ["one", "two", "two"]
    write_run(tmp_path / "4", name="two", seed=1)
    assert [row.label for row in compared_runs([tmp_path])] == ["one", "two", "3", "4"]


def test_the_table_is_aligned_and_cuts_nothing_without_a_terminal(tmp_path: Path) -> None:
    write_run(tmp_path / "a", {"test_accuracy": 0.12345, "comm_ratio": 0.5}, name="short")
    write_run(tmp_path / "b", {"test_accuracy": 1.0}, name="long-" * 30 + "end", seed=123456, status="killed")
    header, first, second = table(compared_runs([tmp_path]), width=40)
    assert header.split() == "run method acc best bytes ratio sim wall s/round seed status rounds".split()
    assert first.split() == "short FedAvg 12.35% 12.35% 1.5 kB 0.500 - 1.5s - 0 finished 1".split()
    assert second.startswith("long-" * 30 + "end ") and "…" not in second and second.endswith("1")
    assert "killed" in second
    place = header.index("acc") + len("acc")
    assert first[:place].endswith("12.35%") and second[:place].endswith("100.00%")
    assert "\x1b" not in header


def test_a_narrow_terminal_loses_the_last_columns_first(tmp_path: Path) -> None:
    write_run(tmp_path / "a", {"test_accuracy": 0.5}, name="n" * 50)
    lines = table(compared_runs([tmp_path]), width=40, force_terminal=True, no_color=True, color_system=None)
    assert lines[0].split()[:4] == ["run", "method", "acc", "best"] and "rounds" not in lines[0]
    assert max(map(len, lines)) <= 40
    assert sum(line.count("n") for line in lines[1:]) == 50 and "50.00%" in lines[1]


def test_settings_are_means_over_their_seeds(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.5, 0.7, 0.6)):
        write_run(tmp_path / str(seed), {"test_accuracy": accuracy}, name="three", seed=seed)
    write_run(tmp_path / "lost", name="lost", status="failed")
    header, first, second = table(compared_runs([tmp_path]), by_setting=True)
    assert header.split()[:5] == ["setting", "method", "acc", "sd", "95%"]
    assert first.split() == "three FedAvg 60.00% 10.00% 35.16% to 84.84% 60.00% 1.5 kB 0.000 - - 1.5s - 3 -".split()
    assert second.split() == "lost FedAvg - - - - - - - - - - 0 1".split()


def test_where_nothing_is_classified_deviation_and_order_are_of_the_first_figure(tmp_path: Path) -> None:
    task = "{task: {kind: regression, metrics: [{name: rmse, mode: min, unit: '', chance: null}]}}"
    for name, errors in (("far", (3.0, 5.0, 4.0)), ("near", (1.0, 1.0, 1.0))):
        for seed, error in enumerate(errors):
            values = {"test_accuracy": None, "extra": {"rmse": error}}
            run = write_run(tmp_path / f"{name}{seed}", values, name=name, seed=seed)
            (run / "config.yaml").write_text(
                f"name: {name}\nseed: {seed}\nscenario: {task}\nmethod: {{name: fedavg}}\n"
            )
    runs = compared_runs([tmp_path])
    header, far, near = table(runs, by_setting=True)
    assert header.split()[:7] == ["setting", "method", "acc", "sd", "95%", "best", "rmse"]
    assert far.split()[:9] == "far FedAvg - 1 1.516 to 6.484 - 4".split()
    assert near.split()[:9] == "near FedAvg - 0 1 to 1 - 1".split()
    assert figure_name("acc", runs, what="--sort") == figure_name("rmse", runs, what="--sort") == "rmse"


def test_wide_letters_keep_the_columns_aligned(tmp_path: Path) -> None:
    write_run(tmp_path / "a", {"test_accuracy": 0.5}, name="実験")
    write_run(tmp_path / "b", {"test_accuracy": 0.5}, name="abcd")
    _, wide, plain = table(compared_runs([tmp_path]))
    assert plain.index("FedAvg") == wide.index("FedAvg") + 2


def test_a_name_with_markup_or_control_characters_is_only_text(tmp_path: Path) -> None:
    write_run(tmp_path / "a", name='"[red]x\\e[2J"')
    assert "[red]x [2J" in table(compared_runs([tmp_path]), force_terminal=True, width=100, color_system=None)[1]


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1536, "1.54 kB"),
        (999_600, "1 MB"),
        (2.5e18, "2500 PB"),
        (None, "-"),
    ],
)
def test_bytes_for_people(count: float | None, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (99.9, "99.9s"),
        (150.0, "2.5m"),
        (7200.0, "2h"),
        (1e6, "11.6d"),
        (1e8, "1,157d"),
        (math.inf, "inf"),
        (None, "-"),
    ],
)
def test_seconds_for_people(seconds: float | None, text: str) -> None:
    assert seconds_text(seconds) == text


# -- settings as a paper prints them ---------------------------------------------------------------------------------


@pytest.fixture
def study(tmp_path: Path) -> Path:
    for method, accuracies in (("fedavg", (0.5, 0.6, 0.7)), ("fedprox", (0.8, 0.8, 0.8))):
        for seed, accuracy in enumerate(accuracies):
            folder = tmp_path / f"{method}-{seed}"
            write_run(
                folder,
                {"test_accuracy": accuracy},
                method=f"{{name: {method}}}",
                name=f"my study {method}",
                seed=seed,
            )
    return tmp_path


def test_markdown_has_means_with_deviation_and_interval(study: Path) -> None:
    lines = settings_as(compared_runs([study]), "md").splitlines()
    assert lines[0].startswith("| Setting | Accuracy (%) | Best (%) |")
    assert lines[2].startswith("| fedavg | 60.00 ± 10.00 [")
    assert lines[3].startswith("| fedprox | 80.00 ± 0.00 [80.00, 80.00] |")


def test_latex_is_escaped_and_the_best_is_bold(study: Path) -> None:
    text = settings_as(compared_runs([study]), "latex")
    assert "% bold: the best of its column" in text.splitlines()
    assert "bold" not in settings_as(compared_runs([study]), "md")  # nor is anything there
    assert r"\toprule" in text and r"Accuracy (\%)" in text
    assert r"fedprox & \textbf{80.00 $\pm$ 0.00} & 80.00 &" in text
    assert r"fedavg & 60.00 $\pm$ 10.00 & " in text
    with_interval = settings_as(compared_runs([study]), "latex", TableStyle(interval=True))
    assert r"fedprox & \textbf{80.00 $\pm$ 0.00 [80.00, 80.00]} &" in with_interval


def test_names_are_shown_character_for_character(tmp_path: Path) -> None:
    for seed, name in enumerate(("'50 % & a_b_c'", "'|[x](y) *z*'", "'[z]'")):
        write_run(tmp_path / str(seed), {"test_accuracy": 0.5}, method="{name: fedavg}", name=name, seed=0)
    runs = compared_runs([tmp_path])
    assert settings_as(runs, "md").splitlines()[2].startswith(r"| 50 % &amp; a\_b\_c | 50.00 |")
    assert settings_as(runs, "md").splitlines()[3].startswith(r"| \|[x]\(y) \*z\* | 50.00 |")
    assert "\n{}[z] & " in settings_as(runs, "latex")  # or it would be an argument of the row above
    assert r"50 \% \& a\_b\_c & \textbf{50.00} &" in settings_as(runs, "latex")


def test_csv_has_unrounded_figures_in_si_units(study: Path) -> None:
    first, second = csv.DictReader(io.StringIO(settings_as(compared_runs([study]), "csv")))
    assert (first["setting"], first["method"], first["seeds"]) == ("fedavg", "FedAvg", "3")
    assert float(first["test_accuracy_mean"]) == pytest.approx(0.6, abs=1e-15)
    assert float(first["test_accuracy_sd"]) == pytest.approx(0.1, abs=1e-15)
    assert float(second["test_accuracy_high"]) == pytest.approx(0.8, abs=1e-15)


def test_words_that_all_names_begin_with_are_left_out() -> None:
    assert without_shared_start(["a study FedAvg", "a study FedProx mu=1"]) == ["FedAvg", "FedProx mu=1"]
    assert without_shared_start(["a study", "a study two"]) == ["a study", "a study two"]  # or one would have no name
    assert without_shared_start(["alone", "alone"]) == ["alone", "alone"]
    assert without_shared_start(["first-run", "first-walk"]) == ["first-run", "first-walk"]


def test_numbered_names_are_no_names_of_others() -> None:
    assert numbered(["a", "b"]) == ["a", "b"] and numbered(["a", "a"]) == ["a (1)", "a (2)"]
    assert numbered(["a", "a", "a (1)"]) == ["a (1) (1)", "a (2)", "a (1)"]


def test_a_method_has_its_look_in_whatever_company() -> None:
    alone = setting_looks(["FedAvg"])[0]
    assert setting_looks(["DynamicFL", "FedProx", "FedAvg"])[2] == alone
    many = setting_looks(["FedAvg"] * 9 + ["mine:method", "FedProx"])
    assert many[0] == alone and len({(look.colour, look.marker) for look in many}) == 11
    assert {look.colour for look in many} == set(COLOURS)


@pytest.mark.parametrize("odd", ["pipe", "folder", "link"])
def test_a_result_that_is_no_file_is_passed_over_with_a_word(tmp_path: Path, odd: str) -> None:
    run = write_run(tmp_path / "run", {"test_accuracy": 0.5}, status=None)
    make: dict[str, Callable[[Path], object]] = {"pipe": os.mkfifo, "folder": Path.mkdir}
    place = run / "result.json"
    make.get(odd, lambda path: path.symlink_to(tmp_path / "nowhere"))(place)
    runs = compared_runs([run])
    told = f"{place} is no regular file, so it is passed over"
    assert remarks(runs, group_settings(runs), by_run=True) == [told]
    assert remarks(runs, group_settings(runs)) == ["figures of runs under way, since none has finished: run", told]


def test_notes_name_the_run_or_the_setting_and_the_seeds_that_have_them(tmp_path: Path) -> None:
    for seed, told in enumerate((["quiet"], ["quiet", "odd"])):
        accuracy = 0.5 if seed else math.nan  # of a run that counts as failed, too
        write_run(tmp_path / f"r{seed}", {"test_accuracy": accuracy}, name="a", seed=seed, remarks=told)
    runs = compared_runs([tmp_path])
    settings = group_settings(runs)
    assert remarks(runs, settings) == ["a: quiet", "a, seed 1: odd"]
    assert remarks(runs, settings, by_run=True) == ["a, seed 0: quiet", "a, seed 1: quiet", "a, seed 1: odd"]


@pytest.mark.parametrize(("second", "is_told"), [(0.5, False), (0.75, True)])
def test_a_run_that_is_in_no_mean_since_another_has_its_seed_is_named_where_they_differ(
    tmp_path: Path, second: float, is_told: bool
) -> None:
    for place, (seed, accuracy) in enumerate(((0, 0.5), (0, second), (1, 0.25))):
        write_run(tmp_path / f"r{place}", {"test_accuracy": accuracy}, name="a", seed=seed)
    runs = compared_runs([tmp_path])
    settings = group_settings(runs)
    assert settings[0].figure("test_accuracy") == 0.375
    note = (
        "a, seed 0: r1 is not counted, since r0 has the same seed, and they differ in their results; leave one of them"
    )
    assert (
        remarks(runs, settings) == ([f"{note} out"] if is_told else []) and remarks(runs, settings, by_run=True) == []
    )


def test_a_finished_run_whose_table_lacks_rounds_is_in_no_mean_and_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "r0", {"test_accuracy": 0.1}, name="a", rounds=3)
    write_run(tmp_path / "r1", *[{"test_accuracy": 0.5}] * 3, name="a", seed=1, rounds=3)
    write_run(tmp_path / "r2", name="a", seed=2, rounds=3)
    runs = compared_runs([tmp_path])
    settings = group_settings(runs)
    assert [run.status for run in runs] == ["failed", "finished", "failed"]
    assert settings[0].figure("test_accuracy") == 0.5 and settings[0].counted == (1,)
    places = {name: tmp_path / name / "rounds.parquet" for name in ("r0", "r2")}
    assert remarks(runs, settings) == [
        f"{places['r0']} has 1 of 3 rounds, so its copy is not whole",
        f"{places['r2']} has 0 of 3 rounds, so its copy is not whole",
    ]


def test_notes_are_one_printable_line_whatever_folders_are_called(tmp_path: Path) -> None:
    run = write_run(tmp_path / "x\n\\input{evil}\x1b[31m", {"test_accuracy": 0.5}, status=None)
    (run / "result.json").mkdir()
    table = settings_as(compared_runs([run]), "latex")
    assert "x \\input{evil} [31m/result.json is no regular file" in table and "\x1b" not in table


def test_a_key_that_is_not_there_is_as_null(tmp_path: Path) -> None:
    for seed, more in enumerate(("training: {clip_norm: null}\n", "training: {}\n", "")):
        run = write_run(tmp_path / f"r{seed}", {"test_accuracy": 0.5}, name="a", seed=seed)
        with open(run / "config.yaml", "a") as file:
            file.write(more)
    runs = compared_runs([tmp_path])
    assert [setting.runs for setting in group_settings(runs)] == [(0, 2), (1,)]
