"""The report: one self-contained page, whatever the folders hold."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from client_tables import write_clients
from tiny import with_totals

from fedsweep.errors import InputError, OutputError
from fedsweep.reports.contents import build_report
from fedsweep.reports.page import PLOTLY, plotly_script, write_report
from fedsweep.reports.sources import find_sources
from fedsweep.reports.sweep_table import read_verdict
from fedsweep.results.worlds import LayoutKeys
from fedsweep.runs.run_folder import RunFolder
from fedsweep.sweeps.space import Trial
from fedsweep.sweeps.sweep_folder import SweepFolder, SweepPlan
from fedsweep.testing import tiny_record

HOSTILE = "</script><img src=x onerror=alert(1)>'\"&{{7*7}}"
ROUND = tiny_record(
    test_loss=1.5,
    cohort=(0, 2),
    high_frequency=(2,),
    attendees=(0, 2),
    bytes_down=400,
    wall_time_s=1.0,
    eval_time_s=0.5,
)


class Page(HTMLParser):
    """What is on a page: its elements, its visible text, and the content of scripts and styles."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[str, dict[str, str | None], str]] = []
        self.texts: list[str] = []
        self._inside: tuple[str, dict[str, str | None]] | None = None
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside = tag, dict(attrs)
            self.raw.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside:
            tag, attrs, before = self.raw[-1]
            self.raw[-1] = (tag, attrs, before + data)
        else:
            self.texts.append(data)

    @property
    def text(self) -> str:
        """All visible text, with single spaces."""
        return re.sub(r"\s+", " ", " ".join(self.texts))

    @property
    def data(self) -> Any:
        """The figures that the script draws, by the chart's name."""
        (found,) = [text for tag, attrs, text in self.raw if attrs.get("id") == "data"]
        return json.loads(found)

    def drawn(self, chart: str) -> dict[str, dict[str, Any]]:
        """A chart's traces by label, as they stand before anybody chooses."""
        tree = self.data[chart]
        for options in tree["choices"].values():
            for key, values in options[0].get("data", {}).items():
                for trace, value in zip(tree["data"], values, strict=True):
                    trace[key] = value
        return {trace["meta"]["label"]: trace for trace in tree["data"]}

    @property
    def own_source(self) -> str:
        """The page without Plotly's script."""
        return self.source.replace(plotly_script(), "")


def write_run(
    path: Path,
    accuracies: Sequence[float | None] = (0.1, 0.5, 0.75),
    *,
    name: str = "run",
    seed: int = 0,
    lr: float = 0.1,
    status: str | None = "finished",
    rounds: dict[str, Any] | None = None,
    **result: Any,
) -> Path:
    folder = RunFolder.create(path, overwrite=False)
    folder.write_config(
        f"name: {json.dumps(name)}\nseed: {seed}\nscenario: {{clients: 3}}\nmethod: {{name: fedavg}}\n"
        f"training: {{optimizer: {{lr: {lr}}}}}\n"
    )
    write_clients(folder, [[2, 1], [0, 1], [1, 1]])
    if accuracies:
        folder.write_rounds(
            with_totals(
                replace(ROUND, round=r, test_accuracy=value, **rounds or {}) for r, value in enumerate(accuracies, 1)
            )
        )
    if status:
        folder.write_result({"status": status, "stopped_by": "rounds", **result})
    return path


def report(tmp_path: Path, *sources: Path, script: str = "beside") -> Page:
    # Beside: millions of characters less to parse.
    return Page(write_report(sources or [tmp_path / "runs"], tmp_path / "page.html", script=script).path)


def test_runs_are_in_the_tables_without_any_script(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", name="first", seed=7)
    write_run(tmp_path / "runs" / "b", (0.2, 0.6), name="second", lr=0.5)
    page = report(tmp_path)
    for text in ("first", "second", "75.00 %", "60.00 %", "3 kB", "2 kB", "training.optimizer.lr", "0.500", "4.5s"):
        assert text in page.text
    assert "2 runs" in page.text and "status failed" not in page.source.partition("</style>")[2]


def test_the_page_needs_nothing_beside_itself_and_runs_its_own_script_alone(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a")
    page = report(tmp_path, script="inside")
    assert page.source.startswith("<!doctype html>")
    for tag, attrs in page.elements:
        assert tag not in ("iframe", "object", "embed", "form", "base") and not any(key[:2] == "on" for key in attrs)
        assert "src" not in attrs and "style" not in attrs
        assert (attrs.get("href") or "#").startswith(("#", "data:,"))
    assert not re.findall(r"https?://", page.own_source)
    (policy,) = [a["content"] for _, a in page.elements if a.get("http-equiv") == "Content-Security-Policy"]
    scripts = [text for tag, attrs, text in page.raw if tag == "script" and "type" not in attrs]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    assert policy is not None and set(policy.split("; ")) == {
        "default-src 'none'",
        f"script-src 'sha256-{hashes[1]}' 'sha256-{hashes[0]}'",
        "style-src 'unsafe-inline'",  # Plotly sets styles as it draws
        "img-src data: blob:",
        "base-uri 'none'",
        "form-action 'none'",
    }
    assert scripts[0] == plotly_script() and page.source.count(plotly_script()) == 1


def test_the_script_that_draws_can_stand_once_beside_all_pages(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a")
    written = [write_report([tmp_path / "runs"], tmp_path / f"{name}.html", script="beside") for name in "ab"]
    page = Page(written[0].path)
    assert written[0].size_bytes < 100_000
    assert (tmp_path / PLOTLY).read_text(encoding="utf-8") == plotly_script()
    assert [attrs["src"] for tag, attrs in page.elements if "src" in attrs] == [PLOTLY]
    assert re.search(r"script-src 'sha256-[^']+' 'self' file:;", page.source)


def test_a_foreign_file_where_the_script_would_stand_is_not_replaced(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    (tmp_path / PLOTLY).write_text("mine")
    with pytest.raises(InputError, match="holds something else than Plotly"):
        write_report([run], tmp_path / "page.html", script="beside")
    assert (tmp_path / PLOTLY).read_text() == "mine" and not (tmp_path / "page.html").exists()
    with pytest.raises(InputError, match="must be inside or beside"):
        write_report([run], tmp_path / "page.html", script="above")


def test_text_of_others_is_only_text(tmp_path: Path) -> None:
    path = write_run(
        tmp_path / "runs" / "a&b", name=HOSTILE, status="failed", reason=f"{HOSTILE}\x1b", git_commit=HOSTILE
    )
    with open(path / "config.yaml", "a") as file:
        file.write(f"model: {{{json.dumps(HOSTILE)}: {json.dumps(HOSTILE)}}}\n")
    write_run(tmp_path / "runs" / "c", name="other")
    page = report(tmp_path)
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert [attrs.get("type") for tag, attrs, _ in page.raw if tag == "script"] == ["application/json", None, None]
    assert HOSTILE in page.text and "{{7*7}}" in page.source
    assert page.source.count("</script>") == 3
    assert f"{HOSTILE} (failed)" in page.drawn("curves-1")  # its model makes a world of its own


def test_labels_have_no_tags_entities_or_templates_that_plotly_would_read(tmp_path: Path) -> None:
    hostile = "<b>x</b> %{meta.label} &lt; <a href='javascript:alert(1)'>y</a>"
    for seed in (0, 1):
        write_run(tmp_path / "runs" / f"a{seed}", name=hostile, seed=seed)
    path = write_run(tmp_path / "runs" / "c", name="other")
    (path / "config.yaml").write_text((path / "config.yaml").read_text().replace("fedavg", json.dumps(hostile)[1:-1]))
    data = report(tmp_path).data

    def texts(tree: Any) -> Iterator[str]:
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            if isinstance(value, dict | list):
                yield from () if key == "meta" else texts(value)
            elif isinstance(value, str) and key != "hovertemplate" and "label" not in str(key):
                yield value

    shown = [text for chart in data.values() for text in texts({k: chart[k] for k in ("data", "layout")})]
    assert any("&lt;b&gt;x" in text for text in shown)
    for text in shown:
        assert "<" not in text.replace("<br>", "") and "%{m" not in text
        assert not re.search(r"&(?!amp;|lt;|gt;|#37;)", text)
    # What hovering shows of names comes from the traces, never from a template with a name in it.
    templates = [t["hovertemplate"] for chart in data.values() for t in chart["data"] if "hovertemplate" in t]
    assert templates and not any("x</b>" in text or "meta" in text for text in templates)


def test_seeds_are_one_setting_with_mean_and_deviation(tmp_path: Path) -> None:
    for seed, last in enumerate((0.5, 0.7, 0.6)):
        write_run(tmp_path / "runs" / f"a{seed}", (0.1, last), name="a", seed=seed)
    write_run(tmp_path / "runs" / "a3", (0.1,), name="a", seed=3, status="failed", reason="client 1 diverged")
    write_run(tmp_path / "runs" / "b", (0.2, 0.4), name="b", lr=0.2)
    page = report(tmp_path)
    assert "5 runs of 2 settings" in page.text and "client 1 diverged" in page.text
    assert "60.00 %" in page.text and "10.00" in page.text  # the sample deviation of 50, 70 and 60
    curves = page.drawn("curves")
    mean = curves["a, mean of 3 seeds"]
    assert mean["y"] == [0.1, 0.6] and mean["customdata"] == [[0.1, 0.1], [0.5, 0.7]]
    assert curves["a, mean - sd"]["y"] == [0.1, 0.5] and curves["a, mean + sd"]["y"] == [0.1, 0.7]
    assert [curves[f"a, seed {seed}"]["y"][-1] for seed in (0, 1)] == [0.5, 0.7]
    assert curves["b"]["meta"]["kind"] == "both" and "a, seed 3 (failed)" in curves
    point = page.drawn("front")["a"]
    # Student's t: 4.3027 deviations over the root of three.
    assert point["y"] == [0.6] and point["error_y"]["array"][0] == pytest.approx(0.24841, abs=1e-5)
    assert "35.16 to 84.84" in page.text


def test_the_same_seed_twice_counts_once(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", (0.5,), name="a")
    write_run(tmp_path / "runs" / "b", (0.7,), name="a")
    (setting,) = build_report(find_sources([str(tmp_path / "runs")], uri=None)).settings
    assert setting.runs == (0, 1) and setting.counted == (0,)


def test_a_setting_has_its_colour_from_its_place_in_the_study_not_from_its_rank(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "1", (0.2,), name="first")
    write_run(tmp_path / "runs" / "2", (0.8,), name="second", lr=2)
    before = report(tmp_path).drawn("curves")
    write_run(tmp_path / "runs" / "3", (0.9,), name="third", lr=3)
    after = report(tmp_path).drawn("curves")
    assert list(before) == ["second", "first"] and list(after) == ["third", "second", "first"]
    for name, colour, symbol in (("first", "#0072B2", "circle"), ("second", "#D55E00", "square")):
        for curves in (before, after):
            assert (curves[name]["line"]["color"], curves[name]["marker"]["symbol"]) == (colour, symbol)
    assert re.search(r"\.c0072B2 \{ color: #0072B2; \}", report(tmp_path).source)


def test_settings_with_the_same_models_are_named(tmp_path: Path) -> None:
    for name, sha in (("a", "aa"), ("b", "aa"), ("c", "cc")):
        write_run(tmp_path / "runs" / name, name=name, lr={"a": 1, "b": 2, "c": 3}[name], model_sha256=sha)
    assert "the same models, bit for bit: a and b" in report(tmp_path).text


def test_what_varies_has_an_axis_each_beside_what_came_of_it(tmp_path: Path) -> None:
    for place, lr in enumerate((0.1, 1.0, 0.01)):
        write_run(tmp_path / "runs" / str(place), (0.1 * (place + 1),), name=f"lr {lr}", lr=lr)
    tree = report(tmp_path).data["parallel"]
    assert tree["layout"]["xaxis"]["ticktext"] == ["lr", "bytes", "test accuracy"]
    lines = {trace["meta"]["label"]: trace["y"] for trace in tree["data"]}
    assert lines == {"0.1": [0.5, 0.5, 0.0], "1.0": [1.0, 0.5, 0.5], "0.01": [0.0, 0.5, 1.0]}
    assert [note["text"] for note in tree["layout"]["annotations"]][:3] == ["0.01", "0.1", "1.0"]
    assert "parallel" not in report(tmp_path, tmp_path / "runs" / "0").data


def add_targets(path: Path, text: str) -> None:
    with open(path / "config.yaml", "a") as file:
        file.write(f"evaluation: {{targets: {text}}}\n")


def row_texts(page: Page, label: str) -> list[list[str]]:
    """The cells' texts of a table of the page."""
    _, _, rest = page.source.partition(f'aria-label="{label}"')
    body = rest.partition("<tbody>")[2].partition("</tbody>")[0]
    rows = body.replace("<wbr>", "").split("</tr>")[:-1]
    return [re.findall(r"</span>([^<]+)</th>|<td[^>]*>([^<]*)</td>", row) for row in rows]


def test_targets_show_what_was_spent_until_they_were_first_reached(tmp_path: Path) -> None:
    timed = {"sim_time_s": 4.0, "flops": 2_000_000}
    add_targets(write_run(tmp_path / "runs" / "a", (0.1, 0.6, 0.4), name="a", rounds=timed), "[0.9, 0.5]")
    write_run(tmp_path / "runs" / "b", (0.1, 0.6), name="b", lr=0.2)
    page = report(tmp_path)
    assert [["".join(cell) for cell in row] for row in row_texts(page, "Table of targets")] == [
        ["a", "50 %", "2", "4s", "2 kB", "4e+06"],
        ["a", "90 %", "never", "-", "-", "-"],
    ]


def test_targets_of_several_seeds_are_means_over_those_that_reached_them(tmp_path: Path) -> None:
    for seed, accuracies in enumerate([(0.5, 0.5), (0.1, 0.5), (0.1, 0.1)]):
        add_targets(write_run(tmp_path / "runs" / f"a{seed}", accuracies, name="a", seed=seed), "[0.5]")
    rows = row_texts(report(tmp_path), "Table of targets")
    assert [["".join(cell) for cell in row][:4] for row in rows] == [["a", "50 %", "2 of 3", "1.5"]]


@pytest.mark.parametrize("targets", ["[]", "soon", "[.nan, 7, {}, '0.5', true]"])
def test_without_usable_targets_there_is_no_table_of_them(tmp_path: Path, targets: str) -> None:
    add_targets(write_run(tmp_path / "runs" / "a"), targets)
    assert "target accuracy" not in report(tmp_path).text


def test_the_front_leaves_out_what_is_beaten_and_what_failed(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "cheap", (0.4,), name="cheap", lr=1)
    write_run(tmp_path / "runs" / "dear", (0.1, 0.8), name="dear", lr=2)
    write_run(tmp_path / "runs" / "worse", (0.1, 0.3), name="worse", lr=3)
    write_run(tmp_path / "runs" / "wrong", (0.9,), name="wrong", lr=4, status="failed")
    page = report(tmp_path)
    front = page.drawn("front")
    assert (front["Pareto front"]["x"], front["Pareto front"]["y"]) == ([1000, 2000], [0.4, 0.8])
    assert "wrong (failed)" not in front and {"cheap", "dear", "worse"} < set(front)
    symbols = {name: front[name]["marker"]["symbol"].endswith("-open") for name in ("cheap", "dear", "worse")}
    assert symbols == {"cheap": False, "dear": False, "worse": True}
    assert [row[0][0] for row in row_texts(page, "Table of the Pareto front")] == ["cheap", "dear"]


def test_ends_that_sent_the_same_stand_on_an_axis_from_zero_in_bytes(tmp_path: Path) -> None:
    for name, accuracy in (("a", 0.4), ("b", 0.6)):
        write_run(tmp_path / "runs" / name, (accuracy,), name=name, lr=accuracy)
    axis = report(tmp_path).data["front"]["layout"]["xaxis"]
    assert (axis["ticksuffix"], axis["rangemode"]) == ("B", "tozero")


def test_what_is_not_finite_is_left_out_of_the_figures(tmp_path: Path) -> None:
    infinite = {"test_loss": None, "validation_accuracy": float("inf"), "sim_time_s": float("nan")}
    write_run(tmp_path / "runs" / "a", (0.5, float("nan")), rounds=infinite, best_test_accuracy="much", versions=[1])
    page = report(tmp_path)
    choices = page.data["curves"]["choices"]
    assert [option["label"] for option in choices["figure"]] == ["test accuracy"]
    assert [option["label"] for option in choices["against"]] == ["round", "bytes"]
    assert page.drawn("curves")["run (failed)"]["y"] == [0.5]
    assert "Infinity" not in page.source.partition('id="data"')[2].partition("</script>")[0]


def test_a_model_that_computes_no_numbers_is_a_failure_and_never_the_best(tmp_path: Path) -> None:
    """Scores that are NaN are class 0's, an accuracy of chance: here the highest of all."""
    lost = {"test_loss": float("nan")}
    write_run(tmp_path / "runs" / "a", (0.1, 0.9), name="a", lr=1, rounds=lost, best_test_accuracy=0.9)
    write_run(tmp_path / "runs" / "b", (0.1, 0.3), name="b", lr=2)
    page = report(tmp_path)
    assert "1 failed" in page.text and "diverged: its last test_loss is nan" in page.text and "90.00 %" not in page.text
    assert list(page.drawn("curves")) == ["b"] and [r[0][0] for r in row_texts(page, "Table of the Pareto front")] == [
        "b"
    ]


def test_runs_with_the_same_clients_share_their_charts(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", name="a")
    write_run(tmp_path / "runs" / "b", name="b", lr=0.3)
    page = report(tmp_path)
    shown = [attrs["data-charts"] for tag, attrs in page.elements if tag == "option" and "data-charts" in attrs]
    assert len(shown) == 2 and shown[0] == shown[1]
    assert [name for name in page.data if name.startswith("clients-")] == str(shown[0]).split()


def test_a_run_without_a_round_has_its_row(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", (), status="failed", reason="no memory")
    page = report(tmp_path)
    assert "1 failed" in page.text and "no memory" in page.text and "Nothing was evaluated yet." in page.text


@pytest.mark.parametrize(
    ("name", "content"),
    [("config.yaml", "- 1\n"), ("rounds.parquet", "none"), ("result.json", "{}"), ("config.yaml", "a: &a [*a]\n")],
)
def test_an_unreadable_run_is_named_beside_the_others(tmp_path: Path, name: str, content: str) -> None:
    write_run(tmp_path / "runs" / "a", name="good")
    path = write_run(tmp_path / "runs" / "b")
    (path / name).write_text(content)
    page = report(tmp_path)
    assert "1 unreadable" in page.text and str(path) in page.text and "good" in page.text
    with pytest.raises(InputError, match=str(path)):
        report(tmp_path, path)


def test_damaged_clients_are_noted_and_the_run_is_shown(tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs" / "a", name="good")
    (path / "clients.parquet").write_text("nothing")
    page = report(tmp_path)
    assert f"{path / 'clients.parquet'}: not a readable parquet file" in page.text and "75.00 %" in page.text


def test_a_table_without_runs_of_its_own_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "measured.json").write_text("{}")
    with pytest.raises(OutputError, match=r"a table without runs of its own here: see .*table\.html"):
        find_sources([str(tmp_path)], uri=None)


def test_trials_of_a_sweep_that_never_began_are_noted(tmp_path: Path) -> None:
    trials = tuple(Trial(number=n, values={"x": n}, label=f"x={n}", folder=f"{n}-x") for n in (1, 2, 3))
    sweep = SweepFolder(tmp_path / "runs")
    sweep.create(SweepPlan(config_tree={}, trials=trials), config_yaml="name: s\n", overwrite=False)
    write_run(tmp_path / "runs" / "1-x")
    page = report(tmp_path)
    assert f"2 of 3 trials of {tmp_path / 'runs'} are not in this report: 2-x, 3-x" in page.text
    assert f"fedsweep sweep {tmp_path / 'runs' / 'config.yaml'}" in page.text


def verdict(*, p_value: float | None, is_real: bool) -> dict[str, Any]:
    return {
        "first": HOSTILE,
        "second": "b",
        "pairs": 3,
        "mean": 0.25,
        "low": 0.2,
        "high": 0.3,
        "p_value": p_value,
        "is_real": is_real,
    }


@pytest.mark.parametrize(
    ("differences", "words"),
    [
        ([verdict(p_value=0.4, is_real=False)] * 6, "0 of 6 differences in test_accuracy are more than chance"),
        ([verdict(p_value=0.01, is_real=True)], f"{HOSTILE} is better than b by 0.2500 [0.2000, 0.3000], 3 seeds"),
        ([verdict(p_value=None, is_real=False)], "no setting can be told from another: that takes at least three"),
        ([{"first": 1}], "summary.json: not a readable summary"),
        ("much", "summary.json: not a readable summary"),
    ],
)
def test_the_sweeps_verdict_stands_above_its_settings(tmp_path: Path, differences: Any, words: str) -> None:
    trials = tuple(Trial(number=n, values={"seed": n}, label="x", folder=f"{n}") for n in (1, 2))
    sweep = SweepFolder(tmp_path / "runs")
    sweep.create(SweepPlan(config_tree={}, trials=trials), config_yaml="name: s\n", overwrite=False)
    for seed in (1, 2):
        write_run(tmp_path / "runs" / str(seed), seed=seed)
    sweep.write_summary({"metrics": {"test_accuracy": "max"}, "settings": [{}, {}], "differences": differences})
    page = report(tmp_path)
    assert words in page.text and not [tag for tag, _ in page.elements if tag == "img"]


def test_a_summary_that_is_older_than_the_trials_is_no_verdict(tmp_path: Path) -> None:
    """The third trial is that of an extension; then of what a budget had no room for."""
    trials = tuple(Trial(number=n, values={"seed": n}, label="x", folder=f"{n}") for n in (1, 2, 3))
    sweep = SweepFolder(tmp_path / "runs")
    sweep.create(SweepPlan(config_tree={}, trials=trials[:2]), config_yaml="name: s\n", overwrite=False)
    for seed in (1, 2):
        write_run(sweep.path / str(seed), seed=seed, status="finished" if seed == 1 else "killed")
    known = [{"folder": "1", "status": "finished"}, {"folder": "2", "status": "killed"}]
    told = {"metrics": {"test_accuracy": "max"}, "settings": [{}, {}], "trials": known}
    sweep.write_summary({**told, "differences": [verdict(p_value=0.4, is_real=False)]})

    def says() -> str:
        (line,) = read_verdict(sweep.path)
        return line.split(":")[0]

    held, old = "0 of 1 differences in test_accuracy are more than chance (paired seeds, 95%)", "no verdict yet"
    assert says() == held
    sweep.write_plan(SweepPlan(config_tree={}, trials=trials))
    assert says() == old and "the sweep writes it anew at its end" in report(tmp_path).text
    sweep.write_plan(SweepPlan(config_tree={}, trials=trials[1:]))
    assert says() == old
    sweep.write_plan(SweepPlan(config_tree={"sweep": {"budget": {"trials": 2}}}, trials=trials))
    assert says() == held
    write_run(sweep.path / "3", status=None)
    assert says() == held
    RunFolder(sweep.path / "3").write_result({"status": "finished"})
    assert says() == old
    sweep.write_plan(SweepPlan(config_tree={}, trials=trials[:2]))
    assert says() == held
    RunFolder(sweep.path / "2").write_result({"status": "finished"})
    assert says() == old


def test_other_worlds_are_noted(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", name="a")
    path = write_run(tmp_path / "runs" / "b", name="b")
    (path / "config.yaml").write_text((path / "config.yaml").read_text().replace("clients: 3", "clients: 4"))
    assert "runs differ in scenario.clients: these are different worlds" in report(tmp_path).text


def test_provenance_has_versions_commit_and_a_command_that_can_be_pasted(tmp_path: Path) -> None:
    facts: dict[str, Any] = {
        "git_commit": "abcdef0123456789",
        "config_hash": "1234567890abcdef",
        "model_sha256": "fedcba9876543210",
    }
    for name, torch in (("a b", "2.6"), ("c", "2.7")):
        write_run(
            tmp_path / "runs" / name, name=name, versions={"python": "3.11", "torch": torch, "ray": None}, **facts
        )
    page = report(tmp_path)
    assert "the same in all runs: python 3.11." in page.text.replace("\xa0", " ")
    assert "torch 2.6" in page.text and "torch 2.7" in page.text and "ray" not in page.text
    assert f"fedsweep run '{tmp_path}/runs/a b/config.yaml'" in page.text
    assert {attrs.get("title") for _, attrs in page.elements} >= set(facts.values())


def test_a_file_that_is_no_report_is_not_replaced(tmp_path: Path) -> None:
    run, target = write_run(tmp_path / "a"), tmp_path / "page.html"
    target.write_text("<p>mine</p>")
    with pytest.raises(InputError, match="holds something else than a report"):
        write_report([run], target)
    assert target.read_text() == "<p>mine</p>"
    write_report([run], target, overwrite=True)
    before = target.read_text()
    write_report([run], target)  # its own earlier page is
    assert target.read_text()[:500] == before[:500]


@pytest.mark.parametrize(
    ("name", "words"),
    [("page.txt", "must end in .html"), ("folder.html", "is a folder"), ("file/a/page.html", "file is no folder")],
)
def test_a_wrong_target_is_refused_before_anything_is_read(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=words):
        write_report([tmp_path / "missing"], tmp_path / name)


def test_a_source_that_is_neither_folder_nor_experiment_is_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"nowhere: there is no such folder"):
        write_report(["nowhere"], tmp_path / "page.html")
    with pytest.raises(InputError, match="neither a run's folder nor one with runs below it"):
        write_report([tmp_path / "empty"], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def write_sweep(folder: Path, *, settings: int, seeds: int, rounds: int) -> None:
    accuracies = [1 - 0.95 ** (r * 0.7) + 0.001 * (r * 7919 % 13) for r in range(rounds)]
    for setting in range(settings):
        for seed in range(seeds):
            scaled = [value * (1 - setting / settings / 2) * (1 - seed / 100) for value in accuracies]
            path = folder / f"{setting:03d}-seed={seed}"
            write_run(path, scaled, name=f"sweep lr=0.{setting:03d}", seed=seed, lr=float(f"0.{setting + 1:03d}"))


@pytest.mark.slow
def test_the_report_of_two_hundred_trials_is_small_and_quickly_made(tmp_path: Path) -> None:
    write_sweep(tmp_path / "sweep", settings=40, seeds=5, rounds=300)
    began = time.perf_counter()
    written = write_report([tmp_path / "sweep"], tmp_path / "page.html")
    assert written.num_runs == 200 and written.size_bytes - len(plotly_script()) < 2.5e6
    assert time.perf_counter() - began < 60


def dumped(page: Path, *, profile: Path) -> str:
    """The page's tree after its script ran in a browser."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    options += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command = ["chromium", *options, f"--user-data-dir={profile}", "--window-size=1280,900"]
    command += ["--virtual-time-budget=20000", "--dump-dom", f"file://{page}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")
def test_a_browser_draws_the_page_and_takes_names_for_text(tmp_path: Path) -> None:
    write_sweep(tmp_path / "sweep", settings=8, seeds=5, rounds=40)
    write_run(tmp_path / "runs" / "hostile", name=HOSTILE, lr=9)
    for name, method in (("bold", "<b>bold</b>"), ("link", "<a href='x'>l</a>")):
        path = write_run(tmp_path / "runs" / name, name=name)
        (path / "config.yaml").write_text((path / "config.yaml").read_text().replace("fedavg", json.dumps(method)))
    write_report([tmp_path / "sweep", tmp_path / "runs"], tmp_path / "page.html")
    page = dumped(tmp_path / "page.html", profile=tmp_path / "profile")
    assert re.search(r'data-ready-ms="\d+"', page), "the page's script did not get to its end"
    for chart in ("curves", "front", "parallel", "clients-0", "clients-1"):
        assert "main-svg" in page.partition(f'id="{chart}"')[2].partition("</figure>")[0]
    lines = page.partition('id="parallel"')[2].partition("</figure>")[0]
    assert "&lt;b&gt;bold&lt;/b&gt;" in lines and "<b>" not in lines and "<a " not in lines
    assert "NaN" not in page.partition("</main>")[0] and "<img" not in page.replace("\\u003c", "<!")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium on this machine")
def test_a_browser_loads_the_script_that_stands_beside(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a")
    write_report([tmp_path / "runs"], tmp_path / "page.html", script="beside")
    page = dumped(tmp_path / "page.html", profile=tmp_path / "profile")
    assert re.search(r'data-ready-ms="\d+"', page) and "main-svg" in page


def test_a_means_interval_is_that_of_the_round_at_which_it_ends(tmp_path: Path) -> None:
    """Seeds of two and three rounds: the mean ends at the second, where they have 0.6, 0.7 and 0.65, not at 0.9."""
    for seed, accuracies in enumerate(((0.5, 0.6, 0.9), (0.5, 0.7), (0.5, 0.65))):
        write_run(tmp_path / "runs" / f"a{seed}", accuracies, name="a", seed=seed)
    point = report(tmp_path).drawn("front")["a"]
    assert point["y"] == [0.65] and "52.58 to 77.42 %, 3 seeds" in point["text"]


def test_ends_that_are_equal_are_on_the_front_together(tmp_path: Path) -> None:
    for lr, name in enumerate("ab"):
        write_run(tmp_path / "runs" / name, (0.5,), name=name, lr=lr)
    front = report(tmp_path).drawn("front")
    assert not any(front[name]["marker"]["symbol"].endswith("-open") for name in "ab")


def test_points_on_the_front_by_what_may_be_chance_are_hollow(tmp_path: Path) -> None:
    ends = {"cheap": (0.10, 0.12, 0.11), "sure": (0.40, 0.44, 0.42), "unsure": (0.41, 0.45, 0.43), "worse": (0.2,) * 3}
    for place, (name, accuracies) in enumerate(ends.items(), 1):
        for seed, accuracy in enumerate(accuracies):
            sent = {"bytes_up": 500 * place, "bytes_down": 500 * place}
            write_run(tmp_path / "runs" / f"{name}{seed}", (accuracy,), name=name, lr=place, seed=seed, rounds=sent)
    front = report(tmp_path).drawn("front")
    symbols = {name: front[name]["marker"]["symbol"].endswith("-open") for name in ends}
    assert symbols == {"cheap": False, "sure": False, "unsure": True, "worse": True}


def test_settings_without_budgets_are_in_the_world_of_those_that_have_some(tmp_path: Path) -> None:
    def with_budgets(name: str, text: str, lr: float) -> None:
        path = write_run(tmp_path / "runs" / name, name=name, lr=lr) / "config.yaml"
        path.write_text(path.read_text().replace("{clients: 3}", f"{{clients: 3, budgets: {text}}}"))

    with_budgets("none", "null", 0.1)
    with_budgets("some", "{kind: fixed, budget_fraction: 0.3}", 0.2)
    assert "different worlds" not in report(tmp_path).text
    with_budgets("most", "{kind: fixed, budget_fraction: 0.6}", 0.3)
    assert "budget_fraction" in report(tmp_path).text and "different worlds" in report(tmp_path).text


def write_worlds(folder: Path) -> None:
    """Two methods in two worlds: the one is the best in the first, the other in the second."""
    for method, clients, accuracies in (
        ("fedavg", 3, (0.1, 0.3)),
        ("fedavg", 4, (0.6, 0.5)),
        ("scaffold", 3, (0.2, 0.4)),
        ("scaffold", 4, (0.1, 0.2)),
    ):
        for seed in (0, 1):
            name = f"study {method} clients={clients}"
            path = write_run(folder / f"{method}{clients}{seed}", accuracies, name=name, seed=seed) / "config.yaml"
            text = path.read_text().replace("clients: 3", f"clients: {clients}").replace("fedavg}", f"{method}}}")
            path.write_text(text)


def test_each_world_has_a_column_a_panel_a_best_and_a_front_of_its_own(tmp_path: Path) -> None:
    write_worlds(tmp_path / "runs")
    page = report(tmp_path)
    assert "these are different worlds" in page.text
    table = page.source.partition('aria-label="Table of worlds"')[2].partition("</table>")[0]
    assert re.findall(r"<strong>([^<]+)</strong>", table) == ["40.00 ± 0.00", "50.00 ± 0.00"]
    assert "50.00 ± 0.00" in table and "20.00 ± 0.00" in table and "clients=3" in table and "clients=4" in table
    panels = {name: page.drawn(name) for name in page.data if name.startswith(("curves", "front"))}
    assert list(panels) == ["curves-1", "curves-2", "front-1", "front-2"]
    colours = [
        {name.split()[0]: trace["line"]["color"] for name, trace in panels[panel].items() if "mean of" in name}
        for panel in ("curves-1", "curves-2")
    ]
    assert colours[0] == colours[1] and len({*colours[0].values()}) == 2
    # FedAvg's first round is the best of its world: its front is that round, not where it ended.
    assert [["".join(cell) for cell in row] for row in row_texts(page, "Table of the Pareto front clients=4")] == [
        ["fedavg", "1", "60.00 %", "1 kB"]
    ]
    assert [row[0][0] for row in row_texts(page, "Table of the Pareto front clients=3")] == ["scaffold"]
    assert panels["front-2"]["Pareto front"]["y"] == [0.6]
    ranges = [page.data[name]["choices"]["figure"][0]["layout"]["yaxis.range"] for name in ("curves-1", "curves-2")]
    assert ranges[0] == ranges[1]
    chips = [attrs["data-setting"] for tag, attrs in page.elements if tag == "button" and "aria-pressed" in attrs]
    assert chips == ["0", "1"]
    # Panels share their choices.
    choices = [attrs["data-chart"] for tag, attrs in page.elements if tag == "select" and "data-choice" in attrs]
    assert choices.count("curves") == 4 and not any("-" in name for name in choices if "clients" not in str(name))


def test_worlds_of_a_page_can_be_chosen(tmp_path: Path) -> None:
    write_worlds(tmp_path / "runs")
    keys = LayoutKeys(columns=["method"])
    page = Page(write_report([tmp_path / "runs"], tmp_path / "page.html", script="beside", keys=keys).path)
    heads = page.source.partition('aria-label="Table of worlds"')[2].partition("</thead>")[0]
    assert "method=fedavg" in heads and "method=scaffold" in heads and "different worlds" not in page.text


def test_the_front_and_its_volume_count_every_tested_round(tmp_path: Path) -> None:
    """Bytes 1, 2, 3 kB: the best of budgets below 1 kB is nothing, then 0.4 for 1 kB, then 0.8 for 1 kB.

    By its end alone, the front would be a point at the dearest budget, which covers nothing.
    """
    write_run(tmp_path / "runs" / "a", (0.4, 0.8, 0.6), name="a")
    page = report(tmp_path)
    assert [["".join(cell) for cell in row] for row in row_texts(page, "Table of the Pareto front")] == [
        ["a", "1 to 2", "80.00 %", "2 kB"]
    ]
    assert "Its hypervolume is 0.400" in page.text and "The ends of runs alone have 0.000" in page.text
    front = page.drawn("front")
    assert front["Pareto front"]["y"] == [0.4, 0.8] and front["a"]["marker"]["symbol"].endswith("-open")
