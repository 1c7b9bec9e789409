"""examples/fedavg_by_hand.py plays rounds with public parts alone and ends with the engine's bits."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "fedavg_by_hand.py"


@pytest.fixture(autouse=True)
def threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_it_ends_with_the_engines_bits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    left = runpy.run_path(str(SCRIPT))
    # The script compares, too; here that it compares what it says.
    assert torch.equal(left["server"], left["engine"]) and not torch.equal(left["engine"], left["locals_"][0])
    by_hand, by_the_engine = re.findall(r"by (?:hand|the engine) ([0-9a-f]{12})", capsys.readouterr().out)
    assert by_hand == by_the_engine


def test_it_is_short_and_imports_nothing_but_public_doors() -> None:
    source = SCRIPT.read_text()
    assert len(source.splitlines()) <= 60
    assert set(re.findall(r"^(?:from|import) (fedsweep[\w.]*)", source, re.M)) == {"fedsweep", "fedsweep.components"}
