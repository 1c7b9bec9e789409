"""Functions stay small: at most 40 lines of code and 6 parameters, constructors and builders apart; modules 400 lines.

A folder of the package holds at most 17 modules.

A builder turns parameters that a user names into a value: a method's builder, a command of the command line.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_MOST_LINES, _MOST_PARAMETERS, _MOST_OF_A_MODULE, _MOST_OF_A_COMMAND = 40, 6, 400, 200
_MOST_IN_A_FOLDER = 17


def main() -> int:
    """Print what is too large; returns the exit code."""
    found = [*(text for path in _modules() for text in _too_large(path)), *_too_full(_ROOT / "platform/fedsweep")]
    print("\n".join(found) or "no function, module or folder is too large")
    return 1 if found else 0


def _modules() -> list[Path]:
    return sorted(path for folder in ("platform/fedsweep", "algorithms") for path in (_ROOT / folder).rglob("*.py"))


def _too_full(package: Path) -> Iterator[str]:
    for folder, count in sorted(Counter(path.parent for path in package.rglob("*.py")).items()):
        if count > _MOST_IN_A_FOLDER:
            yield f"{folder.relative_to(_ROOT).as_posix()}: {count} modules, at most {_MOST_IN_A_FOLDER}"


def _too_large(path: Path) -> Iterator[str]:
    text, place = path.read_text(), path.relative_to(_ROOT).as_posix()
    is_command = path.parent.name == "commands"
    most = _MOST_OF_A_COMMAND if is_command else _MOST_OF_A_MODULE
    if (lines := text.count("\n")) > most:
        yield f"{place}: {lines} lines, at most {most}"
    lines_of_code = [line.strip() and not line.strip().startswith("#") for line in text.split("\n")]
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        start = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0].lineno
        size = sum(map(bool, lines_of_code[start - 1 : node.end_lineno]))
        if size > _MOST_LINES:
            yield f"{place}:{node.lineno}: {node.name} has {size} lines of code, at most {_MOST_LINES}"
        given = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args) if arg.arg not in ("self", "cls")]
        given += [arg.arg for arg in node.args.kwonlyargs]
        if len(given) > _MOST_PARAMETERS and not _is_builder(node):
            yield f"{place}:{node.lineno}: {node.name} has {len(given)} parameters, at most {_MOST_PARAMETERS}"


def _is_builder(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether its parameters are what a user names."""
    options = [arg.annotation for arg in node.args.args if arg.annotation is not None]
    is_command = any("typer." in ast.unparse(option) for option in options)
    if node.name == "__init__" or node.name in _NAMED or is_command:
        return True
    return ast.unparse(node.returns) in _BUILT if node.returns is not None else False


# What a builder gives: a method, or a part of the world.
_BUILT = ("FederatedMethod", "Drift", "Availability", "CosineRotation", "CapabilityAvailability", "DeviceFleet")
# Called with two or three of what they may take, each a keyword with a default; mask_up is called by a card.
_NAMED = ("mask_up", "select_group", "tiny_experiment", "unit_group")


if __name__ == "__main__":
    sys.exit(main())
