"""Hashes of the sources that a run's results follow from, and what has changed since a run was made.

Counted are fedsweep's own folders from ``driver`` downwards (nothing above takes part in a run: imports point one way)
and the modules of the user's plug-ins: those that the configuration names and, by their ``import`` statements, all that
these import outside of the standard library and installed packages. A module that imports by computed names counts
with all that lies beside it. Files that the scenario names (a graph, a fleet of devices, budgets) count too, but for
traces to replay, which may become longer. The samples count as they were loaded, where that is known; what else a
plug-in reads from files is not seen.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import site
import socket
import sys
import sysconfig
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from fedsweep.bounded import MOST_DOCUMENT_BYTES, read_regular
from fedsweep.errors import ConfigError, ResourceError

# Hexadecimal digits by name: a folder of fedsweep's (``fedsweep/engine``) or a file of the user's (``lab/noise.py``).
Sources = Mapping[str, str]

# Folders and modules that no run passes through; tests/runs/test_sources.py holds this to the contract of imports.
NO_PART = frozenset(
    {
        "__main__",
        "api",
        "bench",
        "cli",
        "commands",
        "figures",
        "finished",
        "papers",
        "reports",
        "reproduce",
        "study",
        "sweeps",
        "testing",
    }
    | {"tracking"}
)
_APART = frozenset({"algorithms", "tune_configs"})  # one is walked by itself, the other is in each run's config.yaml
_IS_REFERENCE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):[A-Za-z_][\w.]*")
_COMPUTED_IMPORT = re.compile(rb"\bimport_module\b|\b__import__\b|\bspec_from_file_location\b|\brunpy\b")
# In place of a hash of what a session was typed: never the same twice, as far as anybody knows.
_SESSION = uuid.uuid4().hex[:16]
_NO_RESULT = frozenset({"name", "tracking", "sweep", "runtime", "checkpoint"})
# In the scenario: of a topology, of devices, and of budgets.
_FILE_KEYS = ("path", "file", "clients")
# Of the versions in a result, those on which its bits depend.
LIBRARIES_THAT_COUNT = ("torch", "torchvision", "numpy")
_MOST_NAMED = 4
# So begins the name of a data set's digest among the sources, for whoever has loaded it.
_SAMPLES = "the samples of "


def sources_of(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the hashes of the sources behind a configuration, given as its tree.

    Raises:
        ConfigError: A module was changed after this process had imported it.
    """
    return {**own_sources(), **_plugin_sources(_roots(tree)), **_scenario_files(tree.get("scenario"))}


def shared_sources(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the sources that other processes have: not what was typed into this session, nor the scenario's files.

    The first travels by value; of the files the driver makes the world.
    """
    return {**own_sources(), **_plugin_sources(_roots(tree) - {"__main__"})}


def check_same(driver: Sources, tree: Mapping[str, Any]) -> None:
    """Check in another process that it is of the driver's sources, which are its :func:`shared_sources`.

    Raises:
        ResourceError: They differ.
    """
    if others := _differing(driver, shared_sources(tree)):
        raise ResourceError(
            f"a client actor on {socket.gethostname()!r} would train with other sources than this run's:"
            f" {_some(others)}; install the same fedsweep and plug-ins on every node"
        )


def _scenario_files(section: Any) -> dict[str, str]:
    """Return the hashes of the files that a part of the scenario names; what can't be read is left to who reads it."""
    digests: dict[str, str] = {}
    is_read = isinstance(section, Mapping) and section.get("kind") != "replay"
    for key, value in section.items() if is_read else ():
        if isinstance(value, Mapping):
            digests |= _scenario_files(value)
        elif isinstance(value, str) and key in _FILE_KEYS:
            with contextlib.suppress(OSError, ValueError):
                text = read_regular(Path(value).expanduser(), max_bytes=MOST_DOCUMENT_BYTES, follow=True)
                digests[value] = _digest([(key, text)])
    return digests


def _roots(tree: Mapping[str, Any]) -> set[str]:
    return {name for key, value in tree.items() if key not in _NO_RESULT for name in _modules_named(value)}


@cache
def own_sources() -> Sources:
    """Return the hashes of fedsweep's own folders, as they were when this process first asked."""
    import fedsweep

    algorithms = importlib.util.find_spec("fedsweep.algorithms")
    places = [(Path(fedsweep.__path__[0]), "fedsweep")]
    places += [(Path(p), "fedsweep/algorithms") for p in (algorithms and algorithms.submodule_search_locations) or ()]
    return {name: digest for root, prefix in places for name, digest in _folders(root, prefix)}


def samples_name(dataset: str, image_size: int | None) -> str:
    """Return the name among the sources of the samples that a scenario asks for."""
    return f"{_SAMPLES}{dataset}" + (f", {image_size} pixels wide" if image_size else "")


def is_of_samples(name: str) -> bool:
    """Tell whether a source's name is that of samples, which only those know who have loaded them."""
    return name.startswith(_SAMPLES)


def changes(before: object, now: Sources) -> str:
    """Describe differences of the sources that a file tells of to those that are here, in words; empty: none."""
    if not isinstance(before, Mapping) or not before:
        return "it does not say of which sources it was made"
    names = _differing(before, now)
    return f"changed since: {_some(names)}" if names else ""


def _differing(one: Sources, other: Sources) -> list[str]:
    """Return names that do not stand for the same in both, the user's own first; samples that one has not loaded do."""
    shared = {*one} & {*other}
    names = {name for name in {*one, *other} if name in shared or not is_of_samples(name)}
    return sorted((n for n in names if one.get(n) != other.get(n)), key=lambda n: (_is_own(n), n))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"{', '.join(map(str, names[:_MOST_NAMED]))}{more}"


def misfit(result: Mapping[str, Any], now: Sources, versions: Mapping[str, Any]) -> str:
    """Say why a finished run, by its result, is not one of these sources and libraries; empty: it is."""
    if result.get("sources_changed"):
        return "its sources changed on the way"
    recorded = result.get("versions")
    there = recorded if isinstance(recorded, Mapping) else {}
    others = [name for name in LIBRARIES_THAT_COUNT if there.get(name) != versions.get(name)]
    libraries = [f"{name} was {str(there.get(name))[:20]} and is {versions.get(name)}" for name in others]
    return "; ".join(filter(None, [changes(result.get("sources"), now), *libraries]))


# -- fedsweep's own ----------------------------------------------------------------------------------------------------


def _folders(root: Path, prefix: str) -> Iterator[tuple[str, str]]:
    for folder, below, files in os.walk(root):
        is_top = prefix == "fedsweep" and Path(folder) == root
        apart = NO_PART | _APART if is_top else frozenset()
        below[:] = sorted(name for name in below if name not in apart and name != "__pycache__" and name[0] != ".")
        counted = [name for name in sorted(files) if name[0] != "." and not name.endswith((".pyc", "~"))]
        counted = [name for name in counted if name.removesuffix(".py") not in apart]
        if counted:
            texts = ((name, Path(folder, name).read_bytes()) for name in counted)
            yield "/".join([prefix, *Path(folder).relative_to(root).parts]), _digest(texts)


def _digest(texts: Iterable[tuple[str, bytes]]) -> str:
    whole = hashlib.sha256()
    for name, text in texts:
        whole.update(f"{name}\0{len(text)}\0".encode() + text)
    return whole.hexdigest()[:16]


def _is_own(name: str) -> bool:
    return name == "fedsweep" or name.startswith("fedsweep/")


# -- plug-ins ----------------------------------------------------------------------------------------------------------

# Name -> the module's spec, which a reload replaces, and the hash of its file when it was first seen with that spec.
_first_seen: dict[str, tuple[ModuleSpec | None, str]] = {}


def _modules_named(value: Any) -> Iterator[str]:
    """Yield modules that a part of a configuration names, as ``package.module:callable`` or by an entry point."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _modules_named(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _modules_named(item)
    elif isinstance(value, str):
        references = map(_IS_REFERENCE.fullmatch, _entry_points().get(value, (value,)))
        yield from (reference[1] for reference in references if reference)


@cache
def _entry_points() -> Mapping[str, tuple[str, ...]]:
    """Return what installed packages give a name to: several things may have one, a method and a data set, say."""
    points = importlib.metadata.entry_points()
    ours = [point for group in points.groups if group.startswith("fedsweep.") for point in points.select(group=group)]
    names = {point.name for point in ours}
    return {name: tuple(sorted({point.value for point in ours if point.name == name})) for name in names}


def _plugin_sources(roots: Iterable[str]) -> dict[str, str]:
    digests: dict[str, str] = {}
    todo, done = sorted(roots), set[str]()
    while todo:
        name = todo.pop()
        if name in done or _takes_part(name):
            continue
        done.add(name)
        above = name.split(".")[:-1]
        is_library = _is_library(*_place_of(name.split(".")[0]))
        if is_library and name not in roots:
            continue
        origin, locations = _place_of(name)
        if name == "__main__" and origin is None:
            digests["what was typed in"] = _SESSION
        if above and not is_library:
            todo.append(".".join(above))  # a package's __init__ is executed first
        if origin is None:
            continue
        text = origin.read_bytes()
        folders = above if locations is None else name.split(".")
        digests["/".join([*folders, origin.name])] = _checked(name, origin, text)
        if is_library or origin.suffix != ".py":
            continue
        todo += _imports(text, name, is_package=locations is not None)
        if _COMPUTED_IMPORT.search(text):
            digests |= dict(_beside(origin.parent, folders))
    return digests


def _checked(name: str, origin: Path, text: bytes) -> str:
    """Return the file's hash; refused where this process goes on with what the file was before."""
    digest = _digest([(origin.name, text)])
    module = sys.modules.get(name)
    if module is None:
        return digest
    spec = getattr(module, "__spec__", None)
    seen = _first_seen.get(name)
    if seen is None or seen[0] is not spec:
        _first_seen[name] = (spec, digest)
    elif seen[1] != digest:
        raise ConfigError(
            f"{origin} was changed after this process had imported it, so that what would run is not what stands"
            f" there; start the program again, or importlib.reload the module {name}"
        )
    return digest


def _takes_part(name: str) -> bool:
    """Check if a module is one of fedsweep's that are counted already."""
    top, _, rest = name.partition(".")
    return top == "fedsweep" and rest.partition(".")[0] not in NO_PART


def _place_of(name: str) -> tuple[Path | None, list[str] | None]:
    """Return a module's file, and the folders of a package; None for the file of what has none."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if spec is None and module is not None:  # a script
        file = getattr(module, "__file__", None)
        return (Path(file).resolve() if file and os.path.isfile(file) else None), None
    spec = spec or _spec_on_disk(name)
    if spec is None:
        return None, None
    locations = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
    origin = spec.origin if spec.has_location else None
    return (Path(origin).resolve() if origin and os.path.isfile(origin) else None), locations


def _spec_on_disk(name: str) -> ModuleSpec | None:
    """Return a module's spec; unlike importlib's own function, this imports no package above it."""
    parent, path = name.rpartition(".")[0], None
    if parent:
        path = _place_of(parent)[1]
        if path is None:
            return None
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        with contextlib.suppress(ImportError, KeyError):  # KeyError: a namespace package whose parent was not imported
            if find is not None and (spec := find(name, path)) is not None:
                return spec  # type: ignore[no-any-return]
    return None


def _is_library(origin: Path | None, locations: list[str] | None) -> bool:
    """Check if a top-level module is of the standard library or an installed package's."""
    places = [origin] if origin is not None else [Path(place) for place in locations or ()]
    # By name too: one environment may see another's packages.
    named = [{"site-packages", "dist-packages"} & {*place.parts} for place in places]
    return any(named) or any(p.is_relative_to(folder) for p in places for folder in _library_folders())


@cache
def _library_folders() -> frozenset[Path]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [*map(sysconfig.get_path, kinds), *site.getsitepackages(), site.getusersitepackages()]
    return frozenset(Path(folder).resolve() for folder in folders if folder)


def _imports(text: bytes, name: str, *, is_package: bool) -> Iterator[str]:
    """Yield names that a module's import statements may mean, those inside functions included."""
    package = name if is_package else name.rpartition(".")[0]
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join(filter(None, [*above, node.module or ""]))
            yield from [base, *(f"{base}.{alias.name}" for alias in node.names if alias.name != "*")] if base else []


def _beside(folder: Path, above: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the files that a module may import by a computed name: those of its folder and of the packages in it."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".py" and path.is_file():
            yield "/".join([*above, path.name]), _digest([(path.name, path.read_bytes())])
        elif path.is_dir() and (path / "__init__.py").is_file():
            yield from _beside(path, [*above, path.name])
