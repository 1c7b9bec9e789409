"""What a node lacks is told by name; the nodes themselves are asked in tests/sweeps/test_nodes.py."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions

from fedsweep.driver.ray_nodes import _lacks, _question, refuse_nodes
from fedsweep.errors import ResourceError
from fedsweep.runs.facts import run_facts
from fedsweep.runs.sources import shared_sources

TREE = {"method": {"name": "fedavg"}}


def told(tree: dict[str, Any] | None = None, mark: str | None = None) -> dict[str, Any]:
    return _question()(tree or TREE, mark)


def lacks(answer: Any) -> list[str]:
    return _lacks(answer, run_facts()["versions"], shared_sources(TREE))


def test_the_drivers_own_process_lacks_nothing() -> None:
    assert lacks(told()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda a: a["versions"].update(torch="2.4.0+cu124"), "torch is 2.4.0+cu124, but"),
        (lambda a: a["versions"].update(numpy=None), "numpy is not installed, but"),
        (lambda a: a["versions"].update(python="3.9.1"), "python is 3.9.1, but"),
        (lambda a: a["sources"].update({"fedsweep/engine": "0"}), "other sources than here (fedsweep/engine)"),
        (lambda a: a.update(error="ImportError: no torch"), "fedsweep does not begin (ImportError: no torch)"),
        (lambda a: a.update(folder="it can't write in /runs (Read-only file system)"), "it can't write in /runs"),
    ],
)
def test_what_differs_is_said(change: Callable[[dict[str, Any]], object], said: str) -> None:
    answer = told()
    change(answer)
    (sentence,) = lacks(answer)
    assert sentence.startswith(said)


def test_a_patch_of_python_and_the_build_of_torch_may_differ() -> None:
    answer = told()
    major, minor, _ = platform.python_version_tuple()
    answer["versions"]["python"] = f"{major}.{minor}.99"
    answer["versions"]["torch"] = answer["versions"]["torch"].partition("+")[0] + "+cu130"
    assert lacks(answer) == []


def test_a_process_that_can_not_begin_and_one_that_is_silent_are_told() -> None:
    assert "it needs fedsweep" in lacks(ray.exceptions.WorkerCrashedError())[0]
    assert lacks(ray.exceptions.GetTimeoutError()) == ["no answer within 120 s"]
    assert lacks(ValueError("a\nb")) == ["a"]


def test_a_module_that_a_node_does_not_see_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lone_method_here.py").write_text("mine = 1\n")
    tree = {"method": {"name": "lone_method_here:mine"}}
    there = told(tree)
    monkeypatch.syspath_prepend(str(tmp_path))
    (sentence,) = _lacks(there, run_facts()["versions"], shared_sources(tree))
    assert sentence == "other sources than here (lone_method_here.py)"


def test_a_folder_that_is_seen_and_not_to_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mark := tmp_path / ".mark").touch()
    assert "folder" not in told(mark=str(mark)) and "folder" not in told(mark=str(tmp_path / "unseen"))
    assert os.listdir(tmp_path) == [".mark"]
    monkeypatch.setattr("platform.node", lambda: "no/such/folder")
    assert told(mark=str(mark))["folder"] == f"it can't write in {tmp_path} (No such file or directory)"


def test_of_many_nodes_four_are_named() -> None:
    refuse_nodes({"a": [], "b": []})
    with pytest.raises(
        ResourceError, match=r"6 of the cluster's 7 nodes can't take part: n0: x, y; n1: x.*; and 2 more"
    ):
        refuse_nodes({"ok": [], **{f"n{k}": ["x", "y"] for k in range(6)}})
