"""Hooks of the documentation's site (mkdocs.yml): what is no page under docs/, and what Markdown's readers differ in.

Adds the README, CONTRIBUTING, the changelog, the examples, and a page for each method made from its card.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

from fedsweep.algorithms.registry import METHODS
from fedsweep.commands.listing.method_description import method_facts

ROOT = Path(__file__).resolve().parents[1]
# What they are called on the site, where a README would take the first page's place.
_PAGES = {"README.md": "first-steps.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
_EXAMPLES = "examples"


def on_files(files: Files, config: Any) -> Files:
    """Add what lies elsewhere, and the methods' pages."""
    for name, page in _PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    for example in sorted((ROOT / _EXAMPLES).iterdir()):
        if example.is_file():
            files.append(File.generated(config, f"{_EXAMPLES}/{example.name}", abs_src_path=str(example)))
    hidden = InclusionLevel.NOT_IN_NAV  # forty names in the menu would push out the rest: methods.md has the links
    for name in METHODS:
        files.append(File.generated(config, f"methods/{name}.md", content=method_page(name), inclusion=hidden))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Give code blocks their file's name, bring links in line with the site, and list the methods' pages."""
    markdown = re.sub(r"^(\s*```\w+) file=(\S+)", r'\1 title="\2"', markdown, flags=re.MULTILINE)
    if page.file.src_uri in _PAGES.values():
        # They lie one folder higher than the others.
        markdown = markdown.replace("](docs/", "](")
    if page.file.src_uri.count("/") == 0:
        markdown = re.sub(r"\]\((?:\.\./)?README\.md", f"]({_PAGES['README.md']}", markdown)
        markdown = re.sub(r"\]\(\.\./(?=[A-Z]+\.md|examples/)", "](", markdown)
    # Files of the repository that are no part of the site.
    markdown = re.sub(r"\[([^\]]*)\]\((?:LICENSE|CITATION\.cff|tune_configs[^)]*|tests[^)]*)\)", r"\1", markdown)
    if page.file.src_uri == "methods.md":
        links = ", ".join(f"[{name}](methods/{name}.md)" for name in METHODS)
        title, _, rest = markdown.partition("\n")
        markdown = f"{title}\n\nA page for each: {links}.\n{rest}"
    return markdown


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Show the names that docstrings refer to without Sphinx's role before them."""
    return re.sub(r":(?:func|class|meth|mod|data|attr):(<code>)~?", r"\1", html)


def method_page(name: str) -> str:
    """Write a method's page from its card and its builder."""
    facts = asdict(method_facts(name))
    lines = [f"# {name}", "", facts["summary"], "", f"*{facts['source']}*", ""]
    lines += ["```yaml", f"method: {{name: {name}}}", "```", "", "## Parameters", ""]
    if facts["parameters"]:
        lines += ["| name | type | default | |", "|---|---|---|---|"]
        for row in facts["parameters"]:
            cells = [f"`{row['name']}`", row["type"], f"`{row['default']}`", row["doc"]]
            lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    else:
        lines.append("None.")
    lists = {
        "What it changes in FedAvg": [f"**{seam}**: {text}" for seam, text in facts["changes"].items()],
        "What it sends beside the model": facts["sends"],
        "What it needs": facts["needs"],
        "Readings, and differences from the paper": facts["differs"],
        "In which limits it is another method": facts["limits"],
        "What it can't be merged with": [f"{', '.join(names)}: {why}" for why, names in facts["refuses"].items()],
    }
    for title, entries in lists.items():
        if entries:
            lines += ["", f"## {title}", "", *(f"- {entry}" for entry in entries)]
    return "\n".join([*lines, "", "All methods beside each other: [methods](../methods.md).", ""])
