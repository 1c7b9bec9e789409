"""What a run's sources are: nothing that can change a result is left out, and what changed is named."""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

import fedsweep
from fedsweep.errors import ConfigError, ResourceError
from fedsweep.runs import sources
from fedsweep.runs.sources import (
    NO_PART,
    _folders,
    changes,
    check_same,
    misfit,
    own_sources,
    shared_sources,
    sources_of,
)

ROOT = Path(__file__).resolve().parents[2]
TREE = {"name": "lab.other:x", "method": {"merge": [{"name": "lab.methods:shrink"}, {"name": "fedavg"}]}}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's package whose method imports from all around."""
    files = {
        "lab/__init__.py": "",
        "lab/methods.py": "import numpy, beside\nfrom .parts import noise\n\ndef shrink():\n    import lab.late\n",
        "lab/parts/__init__.py": "",
        "lab/parts/noise.py": "from ..deep import DEPTH\nfrom fedsweep import trees",
        "lab/deep.py": "DEPTH = 1",
        "lab/late.py": "",
        "lab/other.py": "",
        "beside.py": "",
        "unrelated.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("fedsweep.runs.sources._first_seen", {})
    before = {*sys.modules}
    yield tmp_path
    for name in {*sys.modules} - before:
        del sys.modules[name]


COUNTED = {
    *("lab/__init__.py", "lab/methods.py", "lab/parts/__init__.py", "lab/parts/noise.py", "lab/deep.py", "lab/late.py"),
    "beside.py",
}


def users(tree: object = TREE) -> dict[str, str]:
    return {name: digest for name, digest in sources_of(tree).items() if name not in own_sources()}  # type: ignore[arg-type]


@pytest.mark.parametrize("is_imported", [False, True])
def test_a_plugin_counts_with_all_that_it_imports_and_nothing_else(lab: Path, is_imported: bool) -> None:
    if is_imported:
        importlib.import_module("lab.methods")
    assert {*users()} == COUNTED
    assert ("lab.parts" in sys.modules) == is_imported  # to look imports nothing


@pytest.mark.parametrize("name", sorted(COUNTED))
def test_a_change_in_any_of_them_is_seen_and_named(lab: Path, name: str) -> None:
    before = sources_of(TREE)
    (lab / name).write_text((lab / name).read_text() + "\n# changed")
    assert changes(before, sources_of(TREE)) == f"changed since: {name}"


def test_what_no_plugin_imports_is_not_looked_at(lab: Path) -> None:
    before = sources_of(TREE)
    for name in ("unrelated.py", "lab/other.py"):  # the run's name names no module
        (lab / name).write_text("x = 2")
    assert sources_of(TREE) == before


def test_what_is_imported_by_a_computed_name_counts_with_all_beside_it(lab: Path) -> None:
    (lab / "lab/methods.py").write_text("import importlib\nshrink = importlib.import_module('lab.' + 'other')")
    before = sources_of(TREE)
    (lab / "lab/parts/noise.py").write_text("")
    (lab / "lab/other.py").write_text("x = 2")
    assert changes(before, sources_of(TREE)) == "changed since: lab/other.py, lab/parts/noise.py"


def test_a_process_does_not_go_on_with_what_a_module_was_before(lab: Path) -> None:
    module = importlib.import_module("lab.methods")
    before = sources_of(TREE)
    (lab / "lab/methods.py").write_text("def shrink(): ...\n")
    with pytest.raises(ConfigError, match=r"methods\.py was changed after this process had imported it"):
        sources_of(TREE)
    importlib.reload(module)
    assert sources_of(TREE) != before


def test_a_name_that_is_no_module_or_a_library_is_no_source_of_the_users(lab: Path) -> None:
    assert users({"a": ["no.such:thing", "C:data", "http://host:80/x"], "b": "fedsweep.engine.engine:Engine"}) == {}
    # An installed package counts with the file that is named; versions are compared beside it.
    assert {*users({"model": "torchvision.models.resnet:resnet18"})} == {"torchvision/models/resnet.py"}


def test_fedsweeps_own_sources_are_all_but_what_takes_no_part_in_a_run(tmp_path: Path) -> None:
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    above = layers[: layers.index("fedsweep.driver : fedsweep.results")]
    assert {name.strip().removeprefix("fedsweep.") for line in above for name in line.split(":")} <= NO_PART
    assert NO_PART - {"__main__"} <= {name.strip().removeprefix("fedsweep.") for x in above for name in x.split(":")}
    copy = tmp_path / "fedsweep"
    shutil.copytree(fedsweep.__path__[0], copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = dict(_folders(copy, "fedsweep"))
    assert before == {k: v for k, v in own_sources().items() if not k.startswith("fedsweep/algorithms")}
    assert "fedsweep/algorithms" in own_sources() and "fedsweep/algorithms/parts" in own_sources()
    for place, seen in (("engine/round.py", "fedsweep/engine"), ("trees.py", "fedsweep"), ("cli.py", None)):
        (copy / place).write_text((copy / place).read_text() + "#")
        now = dict(_folders(copy, "fedsweep"))
        assert changes(before, now) == ("" if seen is None else f"changed since: {seen}")
        before = now


def test_a_result_fits_only_the_same_sources_and_libraries() -> None:
    versions = {"torch": "2", "numpy": "2", "torchvision": None, "ray": "1"}
    result = {"sources": {"a.py": "1"}, "sources_changed": [], "versions": versions}
    assert misfit(result, {"a.py": "1"}, {**versions, "ray": "2"}) == ""
    assert misfit(result, {"a.py": "2", "b.py": "1"}, versions) == "changed since: a.py, b.py"
    assert misfit(result, {"a.py": "1"}, {**versions, "torch": "3"}) == "torch was 2 and is 3"
    assert misfit({**result, "sources_changed": ["x"]}, {"a.py": "1"}, versions) == "its sources changed on the way"
    for damaged in ({}, [], None, 3):
        assert "does not say" in misfit({**result, "sources": damaged}, {"a.py": "1"}, versions)
    many = {f"{number}.py": "1" for number in range(9)}
    assert changes({"fedsweep": "1", **many}, {"fedsweep": "2"}).endswith("3.py and 6 more")


def test_an_actor_of_other_sources_is_refused_by_what_differs(lab: Path) -> None:
    driver = shared_sources(TREE)
    check_same(driver, TREE)
    (lab / "lab" / "deep.py").write_text("DEPTH = 2")
    with pytest.raises(ResourceError, match=r"other sources than this run's: lab/deep\.py; install the same"):
        check_same(driver, TREE)
    (lab / "lab" / "deep.py").write_text("DEPTH = 1")
    with pytest.raises(ResourceError, match=r"sources than this run's: fedsweep/engine; "):
        check_same({**driver, "fedsweep/engine": "0"}, TREE)


def test_what_was_typed_in_is_no_source_that_another_process_could_have(lab: Path) -> None:
    typed = {**TREE, "model": {"name": "__main__:net"}}
    assert shared_sources(typed) == shared_sources(TREE)


def test_a_name_that_several_installed_things_have_stands_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method and a data set, say: which one a key means, only its kind tells, and a set's order is no answer."""
    points = [EntryPoint("thing", f"lab_{kind}:make", f"fedsweep.{kind}") for kind in ("worlds", "methods")]
    points += [EntryPoint("x", "y:z", "other")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda: EntryPoints(points))
    sources._entry_points.cache_clear()
    try:
        assert sorted(sources._modules_named({"method": {"name": "thing"}})) == ["lab_methods", "lab_worlds"]
        assert sorted(sources._modules_named(["x", "own.module:make"])) == ["own.module"]
    finally:
        sources._entry_points.cache_clear()
