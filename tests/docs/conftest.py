"""The fenced blocks of the documentation's pages."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, kw_only=True)
class Block:
    language: str
    file: str | None
    text: str


class Pages:
    """The documentation of a clone."""

    root = Path(__file__).resolve().parents[2]

    def all(self) -> Sequence[Path]:
        top = (self.root / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))
        return (*top, *sorted((self.root / "docs").glob("*.md")))

    def blocks(self, name: str) -> list[Block]:
        text = (self.root / name).read_text()
        found = re.findall(r"^```(\w*)(?: file=(\S+))?\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
        return [Block(language=language, file=file or None, text=text) for language, file, text in found]

    def commands(self, name: str) -> list[str]:
        """The shell commands of a page, continued lines joined, comments left out."""
        texts = [block.text.replace("\\\n", " ") for block in self.blocks(name) if block.language == "sh"]
        lines = [re.sub(r"\s{2,}#.*", "", line).strip() for text in texts for line in text.splitlines()]
        return [line for line in lines if line and not line.startswith("#")]

    def write_files(self, name: str, folder: Path) -> None:
        """Every block that names a file, into a folder; blocks of one file follow each other in it."""
        for block in self.blocks(name):
            if block.file is not None:
                path = folder / block.file
                before = f"{path.read_text()}\n\n" if path.exists() else ""
                path.write_text(before + block.text)


@pytest.fixture(scope="session")
def pages() -> Pages:
    return Pages()


@pytest.fixture
def folder(
    request: pytest.FixtureRequest, pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A working folder with the files of the page that the test's module names as ``PAGE``; its modules go with it."""
    pages.write_files(request.module.PAGE, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)
