"""The fenced blocks of the documentation's pages."""

from __future__ import annotations

import re
from collections.abc import Sequence
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
