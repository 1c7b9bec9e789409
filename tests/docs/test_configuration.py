"""docs/configuration.md says what the schema says."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fedsweep.algorithms.registry import METHODS
from fedsweep.config.explain import all_keys

PAGE = "docs/configuration.md"


@pytest.fixture(scope="module")
def script(pages: Any) -> Any:
    spec = importlib.util.spec_from_file_location("make_config_docs", pages.root / "scripts" / "make_config_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OUT_OF_DATE = "out of date; run: python scripts/make_config_docs.py"


def test_the_page_is_up_to_date(pages: Any, script: Any) -> None:
    assert (pages.root / PAGE).read_text() == script.page(), OUT_OF_DATE


def test_the_page_of_methods_says_what_the_cards_say(pages: Any, script: Any) -> None:
    text = (pages.root / "docs/methods.md").read_text()
    assert text == script.methods_page(), OUT_OF_DATE
    for name in METHODS:
        assert f"| [`{name}`](#{name})<br>" in text and f"\n## {name}\n" in text


def test_the_readme_names_every_method_once(pages: Any) -> None:
    _, _, section = (pages.root / "README.md").read_text().partition("\n## Methods\n")
    table = "\n".join(line for line in section.partition("\n## ")[0].splitlines() if line.startswith("|"))
    assert sorted(re.findall(r"`(\w+)`", table)) == sorted(METHODS)


def test_every_key_of_the_schema_is_on_the_page(pages: Any, script: Any) -> None:
    page = script.page()
    sections = {key.rsplit(".", 1)[0] for key in all_keys() if "." in key}
    missing = [key for key in all_keys() if key not in sections and f"| `{key}` |" not in page]
    # A range and the bare kind of a component are shown where their key is.
    assert [key for key in missing if key.rsplit(".", 1)[1] not in ("range", "kind", "name")] == []


def test_the_check_fails_where_a_file_differs(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "PAGE", tmp_path / "configuration.md")
    monkeypatch.setattr(script, "METHODS_PAGE", tmp_path / "methods.md")
    monkeypatch.setattr(sys, "argv", ["make_config_docs.py", "--check"])
    assert script.main() == 1
    assert "out of date: configuration.md, methods.md;" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["make_config_docs.py"])
    assert script.main() == 0
    monkeypatch.setattr(sys, "argv", ["make_config_docs.py", "--check"])
    assert script.main() == 0
