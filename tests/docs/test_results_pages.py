"""Pages of measured figures say what was run: the command, and the commit at which it ran."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs/results").glob("*.md"))
_COMMAND = re.compile(r"^\s*fedsweep \w+|`fedsweep \w+ ", re.MULTILINE)
_COMMIT = re.compile(r"\bcommit\s+`?[0-9a-f]{7,40}\b")
_SMALL = re.compile(r"fedsweep reproduce (dynamicfl|dynafed|feddhad|fedstg)/\S+ --scale small")
_SHARE = re.compile(r"\*\*Shares? of the paper's training\*\*.*?\d %", re.DOTALL)
_FIGURES = re.compile(r"^\|.*\d.*\|$", re.MULTILINE)


def unfounded(text: str) -> list[str]:
    """The headings of sections with a table of figures that name no command or no commit, nor does the page's start."""
    start, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    parts = [("the page's start", start)] + [(section.partition("\n")[0], section) for section in sections]
    found = []
    for heading, section in parts:
        founded = start + section
        if _FIGURES.search(section) and not (_COMMAND.search(founded) and _COMMIT.search(founded)):
            found.append(heading)
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "README.md"], ids=lambda page: page.stem)
def test_every_section_with_figures_names_command_and_commit(page: Path) -> None:
    assert unfounded(page.read_text()) == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if _SMALL.search(page.read_text())], ids=lambda page: page.stem
)
def test_a_page_of_a_papers_small_scale_says_above_all_what_share_of_the_training_it_has(page: Path) -> None:
    start = page.read_text().partition("\n## ")[0]
    assert _SHARE.search(start) and start.index("**Share") < 200, "the share stands below the title"


def test_every_page_is_listed() -> None:
    listed = (PAGES[0].parent / "README.md").read_text()
    assert [page.name for page in PAGES if page.name != "README.md" and f"]({page.name})" not in listed] == []


@pytest.mark.parametrize(
    ("text", "headings"),
    [
        ("# A\n\n`fedsweep run x`, at commit 1146ee6.\n\n## B\n\n| a | 0.5 |\n", []),
        ("# A\n\n## B\n\n`fedsweep run x`\n\n| a | 0.5 |\n", ["B"]),
        ("# A\n\n## B\n\nat commit 1146ee6\n\n| a | 0.5 |\n", ["B"]),
        ("# A\n\n| a | 0.5 |\n", ["the page's start"]),
        ("# A\n\n## B\n\n```sh\nfedsweep sweep x\n```\n\ncommit 1146ee6\n\n| a | 1 |\n\n## C\n\nwords\n", []),
    ],
)
def test_a_section_without_either_is_noticed(text: str, headings: list[str]) -> None:
    assert unfounded(text) == headings
