"""YAML as its version 1.2 reads it: ``1e-3`` is a number, ``no`` and ``on`` are text, ``010`` is ten.

PyYAML follows version 1.1, where all of these are something else. Only the rules for plain scalars are replaced; a
key given twice, which PyYAML takes in silence, is an error. ruamel.yaml knows version 1.2, but would be one dependency
more for these rules; the bounds on aliases and the layout of what is written would stay here.
"""

from __future__ import annotations

import copy
import io
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from fedsweep.bounded import MOST_LEVELS, MOST_TEXT_BYTES, read_regular
from fedsweep.errors import ConfigError

_PREFIX = "tag:yaml.org,2002:"
_CORE = (
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    (
        "float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
)


# What a configuration may come to once its aliases are followed; a resolved one has some hundred.
MOST_NODES = 100_000


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the core schema of YAML 1.2, for documents of bounded size."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        if yaml.__with_libyaml__:
            # libyaml reads five times as fast. It would also make the nodes, but without counting them.
            events = yaml.CSafeLoader(stream)
            for name in ("check_event", "peek_event", "get_event"):
                setattr(self, name, getattr(events, name))
        self._num_nodes = 0
        self._level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """See PyYAML; ends where there are too many nodes or levels."""
        self._num_nodes += 1
        self._level += 1
        if self._num_nodes > MOST_NODES or self._level > MOST_LEVELS:
            raise _too_large(self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        self._level -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        """See PyYAML; counts what aliases share as often as it is named."""
        node = super().get_single_node()
        if node is not None and _expanded(node, {}) > MOST_NODES:
            raise _too_large(node.start_mark)
        return node


def _expanded(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Count the nodes of a document without aliases."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in sizes:
        sizes[id(node)] = MOST_NODES  # what contains itself never ends
        is_mapping = isinstance(node, yaml.MappingNode)
        below = [part for pair in node.value for part in pair] if is_mapping else node.value
        sizes[id(node)] = 1 + sum(_expanded(part, sizes) for part in below)
    return sizes[id(node)]


def _too_large(mark: yaml.Mark) -> yaml.MarkedYAMLError:
    rule = f"more than {MOST_NODES} values once aliases are followed, or more than {MOST_LEVELS} levels"
    return yaml.composer.ComposerError(None, None, f"{rule}: too large to be a configuration", mark)


class _Dumper(yaml.SafeDumper):
    """Quotes whatever either version of YAML would read as something other than text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Loader.yaml_implicit_resolvers = {}
_Dumper.yaml_implicit_resolvers = {key: list(rules) for key, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()}
for _name, _pattern, _first in _CORE:
    _Loader.add_implicit_resolver(_PREFIX + _name, _pattern, _first)
for _name, _pattern, _first in reversed(_CORE):
    for _character in _first:
        _Dumper.yaml_implicit_resolvers.setdefault(_character, []).insert(0, (_PREFIX + _name, _pattern))


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    # PyYAML folds these three rare line breaks unless they are escaped, which double quotes do.
    style = '"' if set(text) & set("\x85\u2028\u2029") else None
    return dumper.represent_scalar(_PREFIX + "str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                None, None, f"keys are text, but got {key!r}; put it in quotes", key_node.start_mark
            )
        if key == "<<":
            problem = (
                "'<<' is of YAML 1.1; write what is shared under a key x-NAME at the top, and here extends: '#x-NAME'"
            )
            raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
        if key in mapping:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", key_node.start_mark)
        mapping[key] = loader.construct_object(value_node, deep=True)
    return mapping


def _construct_sequence(loader: _Loader, node: yaml.SequenceNode) -> list[Any]:
    return [loader.construct_object(item, deep=True) for item in node.value]


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    base = {"0o": 8, "0x": 16}.get(text[:2], 10)
    return int(text if base == 10 else text[2:], base)


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    text = loader.construct_scalar(node).lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor(_PREFIX + "map", _construct_mapping)
_Loader.add_constructor(_PREFIX + "seq", _construct_sequence)
_Loader.add_constructor(_PREFIX + "int", _construct_int)
_Loader.add_constructor(_PREFIX + "float", _construct_float)


def parse(text: str, *, source: str) -> Any:
    """Parse the value of one YAML document; messages name its source.

    Raises:
        ConfigError: It is not YAML, gives a key twice, or has a key that is not text; the message names the line.
    """
    try:
        # _Loader derives from SafeLoader: no tag makes an object of a class.
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}, line {mark.line + 1}" if mark else source
        problem = str(error.problem or error.context)
        is_tab = "tab character" in problem or ("start any token" in problem and "\t" in text)
        way_out = "; YAML is indented with spaces, not with tabs" if is_tab else ""
        raise ConfigError(f"{where}: {problem}{way_out}") from error
    # PyYAML lets what a tag or an escape leads to through: !!bool maybe is a KeyError.
    except (yaml.YAMLError, ValueError, KeyError, OverflowError, TypeError, AttributeError) as error:
        raise ConfigError(f"{source}: not readable as YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply to be a configuration") from error


def read(path: Path) -> Any:
    """Return the value of a YAML file.

    Raises:
        ConfigError: The file cannot be read, or :func:`parse` refuses it.
    """
    try:
        text = read_regular(path, max_bytes=MOST_TEXT_BYTES, follow=True).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file in UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}") from error
    return copied(_parsed(text, str(path))) if len(text) <= _KEPT_CHARACTERS else parse(text, source=str(path))


# Files that many others refer to are read again and again: to parse one takes some twenty times as long as to copy it.
_KEPT_CHARACTERS = 100_000
_parsed = lru_cache(maxsize=32)(lambda text, source: parse(text, source=source))


def copied(tree: Any) -> Any:
    """Return a copy of a tree of mappings, lists and values, in a fraction of the time that ``copy.deepcopy`` takes."""
    kind = type(tree)
    if kind is dict:
        return {key: copied(value) for key, value in tree.items()}
    if kind is list:
        return [copied(value) for value in tree]
    return tree if kind in _VALUES else copy.deepcopy(tree)


_VALUES = {str, int, float, bool, type(None)}


def dump(value: Any) -> str:
    """Return a YAML document that :func:`parse` reads back as the same value.

    Args:
        value: Mappings with text keys, lists, tuples (written as lists), text, numbers, booleans and None.
    """
    node = _Dumper(io.StringIO(), sort_keys=False).represent_data(value)
    _lay_out(node, depth=0)
    text: str = yaml.serialize(node, Dumper=_Dumper, allow_unicode=True, width=120)
    return text


def _lay_out(node: yaml.Node, *, depth: int) -> None:
    """Lay sections out one key per line; below them, what holds nothing but scalars on one line."""
    if not isinstance(node, yaml.CollectionNode):
        return
    is_mapping = isinstance(node, yaml.MappingNode)
    below = [item[1] for item in node.value] if is_mapping else node.value
    are_scalars = all(isinstance(item, yaml.ScalarNode) for item in below)
    node.flow_style = are_scalars and (depth > 1 or not is_mapping)
    for item in below:
        _lay_out(item, depth=depth + 1)
