"""The site's menu, without building it: every page is there once, and nothing is fetched from elsewhere.

Links are test_pages.py's matter; ``make docs`` builds the site, and takes a link that leads nowhere for an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

# What scripts/docs_site.py adds to docs/.
ADDED = {"first-steps.md", "CONTRIBUTING.md", "CHANGELOG.md"}


class Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, which names a function of Python."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, name, node: name)


@pytest.fixture
def site(pages: Any) -> dict[str, Any]:
    read = yaml.load((pages.root / "mkdocs.yml").read_text(), Loader)  # a safe one
    assert isinstance(read, dict)
    return read


def named(nav: Any) -> Iterator[str]:
    for entry in nav:
        page = next(iter(entry.values())) if isinstance(entry, dict) else entry
        yield from [page] if isinstance(page, str) else named(page)


def test_every_page_is_in_the_menu_once(pages: Any, site: dict[str, Any]) -> None:
    menu = sorted(named(site["nav"]))
    there = {str(page.relative_to(pages.root / "docs")) for page in (pages.root / "docs").rglob("*.md")}
    assert menu == sorted(there | ADDED)


def test_the_menu_begins_with_what_people_come_for(site: dict[str, Any]) -> None:
    home, *sections = site["nav"]
    assert home == "index.md"
    assert [next(iter(section)) for section in sections] == ["Tutorials", "How do I ...", "Reference", "Explanation"]


def test_nothing_is_fetched_from_elsewhere(site: dict[str, Any]) -> None:
    assert site["theme"]["font"] is False and "offline" in site["plugins"] and "search" in site["plugins"]
    assert not {"extra_css", "extra_javascript"} & site.keys()


def test_a_link_that_leads_nowhere_is_an_error(pages: Any, site: dict[str, Any]) -> None:
    assert site["validation"]["links"]["not_found"] == site["validation"]["links"]["anchors"] == "warn"
    assert "mkdocs build --strict" in (pages.root / "Makefile").read_text()


def test_the_first_page_has_a_picture_and_two_commands(pages: Any) -> None:
    text = (pages.root / "docs/index.md").read_text()
    assert re.findall(r"!\[[^\]]+\]\((\S+)\)", text) == ["images/sweep-report.png"]
    block = re.findall(r"^```text\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert [[line.split()[:2] for line in lines.splitlines()] for lines in block] == [
        [["fedsweep", "run"], ["fedsweep", "report"]]
    ]


def test_questions_begin_as_people_ask_them(pages: Any) -> None:
    titles = re.findall(r"^## (.*)$", (pages.root / "docs/how-to.md").read_text(), flags=re.MULTILINE)
    assert len(titles) >= 12
    assert all(title.startswith("... ") and title.endswith("?") for title in titles)


def test_the_reference_names_modules_that_are_there(pages: Any) -> None:
    named = re.findall(r"^::: fedsweep\.([\w.]+)$", (pages.root / "docs/api.md").read_text(), flags=re.MULTILINE)
    assert len(named) > 10
    for name in named:
        assert (pages.root / "platform/fedsweep" / f"{name.replace('.', '/')}.py").exists(), name
