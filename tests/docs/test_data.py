"""docs/data.md: its example runs, and its tables say what the loaders do."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

import fedsweep
from fedsweep.cli import main
from fedsweep.world.data import torchvision_sets
from fedsweep.world.data.datasets import DATASETS

PAGE = "docs/data.md"
SMALL = ["runtime.backend=local", "tracking.uri=none"]


def test_the_pages_world_is_learned(folder: Path) -> None:
    result = fedsweep.run("stripes.yaml", overrides=SMALL, out=folder / "run")
    assert result.summary["test_accuracy"] > 0.8
    assert result.config.model.parameters == {"channels": 6}


def test_the_pages_commands_run(pages: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = [word for pair in SMALL for word in ("--set", pair)]
    words = [shlex.split(command) for command in pages.commands(PAGE)]
    assert [line[:2] for line in words] == [["fedsweep", "partition"], ["fedsweep", "run"]]
    for line in words:
        assert main([*line[1:], *extra]) == 0, capsys.readouterr().err
    assert "stripes, my_world:Rotating" in capsys.readouterr().out


def test_a_partition_that_uses_a_sample_twice_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = folder / "my_world.py"
    module.write_text(module.read_text().replace("owners == client)", "owners <= client)"))
    assert main(["run", "stripes.yaml", "--set", "runtime.backend=local", "--set", "tracking.uri=none"]) == 2
    assert "must not use a sample twice" in capsys.readouterr().err


def test_every_built_in_data_set_is_in_the_table(pages: Any) -> None:
    named = re.findall(r"^\| `(\w+)` \|", (pages.root / PAGE).read_text(), flags=re.MULTILINE)
    assert sorted(named) == sorted(DATASETS)


def test_the_checksums_are_the_loaders(pages: Any) -> None:
    found = dict(re.findall(r"^\| `(\S+)` \| `([0-9a-f]{32})` \|", (pages.root / PAGE).read_text(), flags=re.MULTILINE))
    names = ("mnist", "fashion_mnist", "cifar10", "cifar100", "svhn")
    assert found == {file.path: file.md5 for name in names for file in torchvision_sets.official_files(name)}
