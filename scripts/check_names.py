"""Names say what a thing is, and docstrings begin with a verb.

No variable is called found, given, known, said, told, asked, held or kept, and no docstring opens with What, Whether,
How, Who or Nothing.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_WORDS = frozenset({"found", "given", "known", "said", "told", "asked", "held", "kept"})
_OPENINGS = ("What ", "Whether ", "How ", "Who ", "Nothing ")

# Fields and parameters that users write by name, or under which files keep something.
_PUBLIC = frozenset(
    {
        ("platform/fedsweep/bench/setup.py", "asked"),
        ("platform/fedsweep/engine/state.py", "held"),
        ("platform/fedsweep/papers/dynamicfl/choosing.py", "said"),
        ("platform/fedsweep/reproduce/measured/table_kind.py", "said"),
        ("platform/fedsweep/card.py", "given"),
        ("platform/fedsweep/models/slicing.py", "kept"),
        ("platform/fedsweep/models/unit_submodel.py", "kept"),
    }
)


def main() -> int:
    """Print each such name and docstring; returns the exit code."""
    modules = sorted(path for folder in ("platform/fedsweep", "algorithms") for path in (_ROOT / folder).rglob("*.py"))
    lines = [line for path in modules for line in _lines(path)]
    print("\n".join(lines) or "all names say what a thing is, all docstrings begin with a verb or a noun")
    return 1 if lines else 0


def _lines(path: Path) -> Iterator[str]:
    place = path.relative_to(_ROOT).as_posix()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and _is_act(node.id, place):
            yield f"{place}:{node.lineno}: a variable called {node.id}; name what it holds"
        if isinstance(node, ast.arg) and _is_act(node.arg, place):
            yield f"{place}:{node.lineno}: a parameter called {node.arg}; name what it holds"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node) or ""
            if text.startswith(_OPENINGS):
                yield f"{place}:{getattr(node, 'lineno', 1)}: a docstring that opens with {text.split()[0]}"


def _is_act(name: str, place: str) -> bool:
    return name in _WORDS and (place, name) not in _PUBLIC


if __name__ == "__main__":
    sys.exit(main())
