from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., tuple[int, str, str]]


def test_report_writes_the_page_and_says_where(finished: Path, fedsweep: Command) -> None:
    code, out, err = fedsweep("report", finished.parent, "--out", "pages/page.html")
    page = Path("pages/page.html").absolute()
    assert (code, err) == (0, "")
    assert out.startswith(f"report: {page} (1 run, ") and len(out.splitlines()) == 1
    assert page.read_text().startswith("<!doctype html>") and "tiny" in page.read_text()


def test_out_is_needed(finished: Path, fedsweep: Command) -> None:
    code, _, err = fedsweep("report", finished)
    assert code == 2 and "--out" in err


def test_a_source_that_is_not_there_is_one_line_and_writes_nothing(fedsweep: Command) -> None:
    code, out, err = fedsweep("report", "nothing-here", "--out", "page.html")
    assert (code, out) == (2, "") and len(err.splitlines()) == 1
    assert err.startswith("error: nothing-here: there is no such folder, and there is no MLflow store at")
    assert not Path("page.html").exists() and not list(Path().rglob("mlflow.db"))


def test_other_files_are_replaced_only_when_asked(finished: Path, fedsweep: Command) -> None:
    Path("page.html").write_text("mine")
    assert fedsweep("report", finished, "--out", "page.html")[0] == 2
    assert Path("page.html").read_text() == "mine"
    assert fedsweep("report", finished, "--out", "page.html", "--overwrite")[0] == 0


@pytest.mark.slow
def test_an_experiment_is_found_by_its_name_in_the_local_store(config: Path, fedsweep: Command) -> None:
    options = ["--set", "tracking.uri=null", "--set", "tracking.experiment=my study", "--quiet"]
    for name in ("one", "two"):
        assert fedsweep("run", config, "--set", f"name={name}", *options, "--out", f"runs/{name}")[0] == 0
    code, out, err = fedsweep("report", "my study", "--out", "page.html")
    assert code == 0 and "(2 runs, " in out and err == "note: the same models, bit for bit: one and two\n"
    assert f"{Path('runs/two').absolute()}/config.yaml" in Path("page.html").read_text()

    code, _, err = fedsweep("report", "my studi", "--out", "page.html")
    assert code == 2 and "did you mean 'my study'?" in err

    shutil.rmtree("runs/one")
    code, out, err = fedsweep("report", "my study", "--out", "page.html")
    assert code == 0 and "(1 run, " in out
    assert "of the experiment 'my study', 1 of 2 run folders are not on this machine" in err
    shutil.rmtree("runs/two")
    code, _, err = fedsweep("report", "my study", "--out", "page.html")
    assert code == 2 and "has no run whose folder is on this machine" in err


def test_figures_stand_in_the_page_as_json(finished: Path, fedsweep: Command) -> None:
    fedsweep("report", finished, "--out", "page.html")
    _, _, rest = Path("page.html").read_text().partition('<script type="application/json" id="data">')
    curves = json.loads(rest.partition("</script>")[0])["curves"]
    rounds = curves["choices"]["against"][0]
    assert rounds["label"] == "round" and rounds["data"]["x"] == [[1, 2]]
    assert [trace["meta"]["label"] for trace in curves["data"]] == ["tiny"]


def test_the_script_that_draws_can_stand_beside_the_page(finished: Path, fedsweep: Command) -> None:
    code, out, _ = fedsweep("report", finished, "--out", "pages/page.html", "--script", "beside")
    assert code == 0 and "page.html" in out
    assert Path("pages/plotly.min.js").stat().st_size > 1e6 > Path("pages/page.html").stat().st_size
    code, _, err = fedsweep("report", finished, "--out", "page.html", "--script", "elsewhere")
    assert code == 2 and "must be inside or beside" in err
