import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsweep.errors import ResourceError
from fedsweep.world.data import torchvision_compat
from fedsweep.world.data.torchvision_compat import import_torchvision


def test_torchvision_and_its_data_sets_can_be_imported() -> None:
    torchvision = import_torchvision()
    assert torchvision is import_torchvision() is sys.modules["torchvision"]
    assert torchvision.datasets.CIFAR10.tgz_md5 == "c58f30108f718f92721af3b95e74349a"


def test_operators_do_not_load_from_a_folder_without_the_library(tmp_path: Path) -> None:
    assert not torchvision_compat._operators_load(tmp_path)


def test_operators_do_not_load_from_a_damaged_library(tmp_path: Path) -> None:
    (tmp_path / "_C.so").write_bytes(b"not a library")
    assert not torchvision_compat._operators_load(tmp_path)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """torchvision as if it had not been imported; the list collects the declarations made."""
    calls: list[str] = []
    import_torchvision()
    monkeypatch.delitem(sys.modules, "torchvision")
    monkeypatch.setattr(torchvision_compat, "_declare_operators", lambda: calls.append("declared"))
    return calls


@pytest.mark.parametrize(("loads", "declarations"), [(True, []), (False, ["declared"])])
def test_signatures_are_declared_only_where_the_operators_do_not_load(
    absent: list[str], monkeypatch: pytest.MonkeyPatch, loads: bool, declarations: list[str]
) -> None:
    imported = SimpleNamespace()
    monkeypatch.setattr(torchvision_compat, "_operators_load", lambda package: loads)
    monkeypatch.setattr(importlib, "import_module", lambda name: imported)
    assert import_torchvision() is imported
    assert absent == declarations


def test_a_missing_torchvision_says_how_to_get_it(absent: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ResourceError, match="pip install torchvision"):
        import_torchvision()


def test_a_torchvision_that_cannot_be_imported_is_named(absent: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ResourceError, match=r"torchvision::nms does not exist.*belongs to the installed torch"):
        import_torchvision()
