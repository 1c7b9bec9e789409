"""docs/adding-a-method.md: its blocks are written to files and run as a reader would."""

from __future__ import annotations

import importlib
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedsweep
from fedsweep.catalog import build_method
from fedsweep.cli import main
from fedsweep.components import (
    FULL_MODEL,
    ClientUpdate,
    Codec,
    Evaluation,
    LocalSolver,
    LocalTerm,
    Objective,
    Pacing,
    Refinement,
    Selection,
    ServerUpdate,
    SubModelPolicy,
    SyncContext,
    Weighting,
    layout_of,
)

PAGE = "docs/adding-a-method.md"
SMALL = ["runtime.backend=local", "tracking.uri=none", "training.rounds=2"]


@pytest.fixture
def folder(pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    pages.write_files(PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("my_methods", "test_my_methods", "my_uploads", "test_my_uploads"):
        sys.modules.pop(name, None)


def own_tests(module: Any) -> dict[str, Callable[[], None]]:
    return {name: value for name, value in vars(module).items() if name.startswith("test_")}


@pytest.mark.slow
@pytest.mark.parametrize(("module", "number"), [("test_my_methods", 5), ("test_my_uploads", 6)])
def test_the_pages_own_tests_pass(folder: Path, module: str, number: int) -> None:
    found = own_tests(importlib.import_module(module))
    assert len(found) == number
    for test in found.values():
        test()


def test_the_pages_own_tests_can_fail(folder: Path) -> None:
    module = folder / "my_methods.py"
    module.write_text(module.read_text().replace("vector[params] -= ", "vector[params] += "))
    found = own_tests(importlib.import_module("test_my_methods"))
    with pytest.raises(AssertionError):
        found["test_second_round_goes_on_in_the_first_rounds_direction"]()


@pytest.mark.parametrize(
    ("right", "wrong", "test"),
    [
        (
            "/ counts.sum(), state",
            "/ counts.sum() * 0 + 1 / len(updates), state",
            "test_progress_is_remembered_sent_and_w",
        ),
        ("return self.remembers", "return False", "test_what_was_left_out_is_remembered"),
        ("torch.int32", "torch.int16", "test_it_is_metered_as_it_is_sent"),
    ],
)
def test_the_other_tests_can_fail_too(folder: Path, right: str, wrong: str, test: str) -> None:
    module = folder / "my_uploads.py"
    assert right in module.read_text()
    module.write_text(module.read_text().replace(right, wrong))
    found = own_tests(importlib.import_module("test_my_uploads"))
    with pytest.raises((AssertionError, KeyError)):
        next(own for name, own in found.items() if name.startswith(test))()


@pytest.mark.parametrize("name", ["fedavgm", "both", "compressed"])
def test_the_pages_configurations_run(folder: Path, name: str) -> None:
    result = fedsweep.run(folder / f"{name}.yaml", overrides=SMALL, out=folder / "run")
    assert result.summary["status"] == "finished"
    assert result.rounds.num_rows == 2


def test_the_pages_commands_run(pages: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = [word for pair in SMALL for word in ("--set", pair)]
    words = [shlex.split(command) for command in pages.commands(PAGE)]
    assert [line[:2] for line in words] == [["fedsweep", "run"]] * 2
    for line in words:
        assert main([*line[1:], *extra]) == 0, capsys.readouterr().err
    assert "momentum: 0.8" in capsys.readouterr().out


def test_the_update_is_the_papers(folder: Path) -> None:
    """w - v with v = momentum * v + (w - mean), for w = 1, v = 4, mean = 3, momentum = 0.5: v = 0 and w = 1."""
    method = build_method({"name": "my_methods:fedavgm", "momentum": 0.5})
    model = torch.nn.Linear(1, 1, bias=False)
    layout = layout_of(model)
    update = ClientUpdate(
        client=0,
        vector=torch.tensor([3.0]),
        layout=layout,
        submodel=FULL_MODEL,
        anchor_version=0,
        num_samples=1,
        steps=1,
        effective_steps=1.0,
        learning_rate=0.1,
    )
    sync = SyncContext(
        round=1,
        index=0,
        ends_round=True,
        vector=torch.tensor([1.0]),
        layout=layout,
        anchors={},
        learning_rate=0.1,
        cohort=(0,),
        model=model,
        stream=fedsweep.Stream(("test",)),
        checkpoint=lambda tree: None,
    )
    state = {"velocity": torch.tensor([4.0])}
    vector, state = method.server_update.apply(state, [update], torch.tensor([1.0], dtype=torch.float64), sync)
    assert vector.tolist() == [1.0]
    assert state["velocity"].tolist() == [0.0]


def test_the_table_of_seams_names_every_required_method(pages: Any) -> None:
    text = (pages.root / PAGE).read_text()
    bases = (
        Objective,
        LocalTerm,
        LocalSolver,
        Selection,
        SubModelPolicy,
        Pacing,
        Weighting,
        ServerUpdate,
        Refinement,
        Evaluation,
        Codec,
    )
    for base in bases:
        row = next(line for line in text.splitlines() if f"| `{base.__name__}`" in line)
        required = sorted(base.__abstractmethods__)
        assert len(required) <= (2 if base is Codec else 1)
        assert row.split("|")[3].strip().startswith(f"`{required[-1]}(" if required else "none")


def test_the_blocks_are_formatted_like_the_sources(folder: Path) -> None:
    ruff = Path(sys.executable).with_name("ruff")
    if not ruff.is_file():
        pytest.skip("ruff is not installed beside this Python")
    config = Path(__file__).resolve().parents[2] / "pyproject.toml"
    for check in (["format", "--check", "."], ["check", "--no-cache", "my_methods.py", "my_uploads.py"]):
        done = subprocess.run([ruff, *check, "--config", config], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
