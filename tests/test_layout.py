from __future__ import annotations

import ast
import platform
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import fedsweep
from fedsweep.config import yaml12

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "platform" / "fedsweep"
ALGORITHMS = ROOT / "algorithms"
HEAVY = {"ray", "mlflow", "torchvision", "matplotlib", "plotly", "sklearn", "pyarrow"}


def modules() -> list[Path]:
    return [path for folder in (SOURCES, ALGORITHMS) for path in sorted(folder.rglob("*.py"))]


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def naming(*words: str, among: Iterable[Path] | None = None) -> list[Path]:
    """Files whose text has one of the words: no others need to be parsed to find a name."""
    return [path for path in among or modules() if any(word in path.read_text() for word in words)]


def imported(nodes: list[ast.stmt]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def imports_anywhere(path: Path) -> set[str]:
    return set(imported([node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt)]))


def imports_on_import(path: Path) -> set[str]:
    """What importing the module imports: neither inside functions nor under TYPE_CHECKING."""

    def executed(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                yield from executed(node.orelse)
                continue
            yield node
            for field in ("body", "orelse", "finalbody"):
                yield from executed(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                yield from executed(handler.body)

    return set(imported(list(executed(ast.parse(path.read_text()).body))))


def belongs_to(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_platform_is_the_standard_library_from_the_repository_root() -> None:
    found = Path(python("import sys; sys.path.insert(0, '.'); import platform; print(platform.__file__)"))
    assert found.name == "platform.py"
    assert ROOT not in found.parents


def test_platform_is_the_standard_library_under_pytest() -> None:
    assert platform.python_implementation() == "CPython"
    assert platform.__file__ is not None and ROOT not in Path(platform.__file__).parents


def test_platform_folder_holds_the_package_and_nothing_else() -> None:
    entries = {path.name for path in (ROOT / "platform").iterdir()}
    assert {name for name in entries if not name.endswith(".egg-info")} <= {"fedsweep", "__pycache__"}
    assert not (ROOT / "platform" / "__init__.py").exists()


def test_packages_list_equals_the_folders_on_disk() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    on_disk = {"fedsweep.tune_configs"}
    for folder, name in ((SOURCES, "fedsweep"), (ALGORITHMS, "fedsweep.algorithms")):
        for path in folder.rglob("*.py"):
            on_disk.add(".".join([name, *path.parent.relative_to(folder).parts]))
    assert set(settings["packages"]) == on_disk
    assert len(settings["packages"]) == len(on_disk)
    places = {name: ROOT / path for name, path in settings["package-dir"].items()}
    assert places == {
        "fedsweep": SOURCES,
        "fedsweep.algorithms": ALGORITHMS,
        "fedsweep.tune_configs": ROOT / "tune_configs",
    }


@pytest.mark.parametrize("folder", [SOURCES, ALGORITHMS], ids=label)
def test_each_folder_with_modules_is_a_package(folder: Path) -> None:
    assert {path.parent for path in folder.rglob("*.py")} == {path.parent for path in folder.rglob("__init__.py")}


def architecture() -> str:
    return (ROOT / "docs" / "architecture.md").read_text()


def drawn_in_the_architecture() -> Iterator[Path]:
    """What the drawing names: each entry stands two columns to the right of the folder that it lies in.

    Modules in an entry's text lie in the entry's folder, or in the one above where the entry is a module's.
    """
    above, place = [ROOT, ROOT, ROOT], ROOT
    for line in architecture().split("## Layout")[1].split("```")[1].splitlines():
        level = (len(line) - len(line.lstrip())) // 2
        first, *text = re.split(r"\s{2,}", line.strip())
        names = [word for word in re.split(r",? ", first) if re.search(r"(/|\.py)$", word)]
        if level < len(above) and names:
            yield from (above[level] / name for name in names)
            above[level + 1 :] = [above[level] / names[0]] * (len(above) - level - 1)
            place = above[level] / names[0] if names[0].endswith("/") else above[level]
        else:
            text = [line]
        for word in re.findall(r"[\w*]+\.py\b", " ".join(text)):
            yield place / word


def test_the_architectures_drawing_is_the_layout() -> None:
    drawn = set(drawn_in_the_architecture())
    assert [label(path) for path in sorted(drawn) if not path.exists()] == []
    # Git knows which folders are the project's; a copy without it has no others to be looked at.
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    top = {ROOT / path.split("/")[0] for path in tracked.splitlines() if "/" in path} - {ROOT / "platform"}
    assert ({path.parent for path in modules()} | top | {SOURCES / "reports" / "html"}) - drawn == set()
    assert set(SOURCES.glob("[a-z]*.py")) - drawn == set()


@pytest.mark.parametrize("room", ["client", "components", "driver", "engine", "experiment", "fleet", "runs"])
def test_the_drawing_names_every_module_that_a_run_passes_through(room: str) -> None:
    # Those that are named by what they begin with: fleet/ray_*.
    found = {path for path in modules() if SOURCES / room in path.parents and path.name != "__init__.py"}
    drawn = set(drawn_in_the_architecture())
    assert {label(path) for path in found - drawn if not path.name.startswith("ray_")} == set()


def test_the_paths_in_the_architectures_text_exist() -> None:
    named = re.findall(r"`((?:[\w-]+/)+[\w*.-]*|[\w-]+/?[\w-]*\.py)`", architecture().split("## The seams")[1])
    places = (ROOT, SOURCES)
    assert len(named) > 20
    assert [name for name in named if not any(list(place.glob(name)) for place in places if name)] == []


def test_the_architectures_chain_of_imports_is_the_contract() -> None:
    chain = re.search(r"^Imports point one way.*?```text\n(.*?)```", architecture(), re.DOTALL | re.MULTILINE)
    assert chain is not None
    said = [sorted(names.split(", ")) for names in " ".join(chain[1].split()).split(" -> ")]
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    assert said == [sorted(name.removeprefix("fedsweep.") for name in layer.split(" : ")) for layer in contract]


def test_what_plays_keeps_or_reads_runs_names_no_method() -> None:
    from fedsweep.algorithms.registry import METHODS

    rooms = {*("client", "components", "driver", "engine", "experiment", "fleet", "models", "records.py", "guard.py")}
    rooms |= {*("runs", "results", "sweeps", "tracking", "figures", "reports", "reproduce")}
    wrong = []
    for path in modules():
        if SOURCES in path.parents and path.relative_to(SOURCES).parts[0] in rooms:
            tree = ast.parse(path.read_text())
            said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
            texts = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in said)
            wrong += [(label(path), node.value) for node in texts if node.value in METHODS]
    # A schedule, which goes with any method.
    assert wrong == [("platform/fedsweep/experiment/schedules.py", "fedstg")]


def test_built_in_methods_import_what_users_are_told_to() -> None:
    """A method that is copied teaches the right imports; a tool that reads files is no method."""
    doors, wrong = {"fedsweep", "fedsweep.components"}, []
    for path in ALGORITHMS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("fedsweep"):
                wrong += [] if node.module in doors else [(path.name, node.module)]
    assert wrong == [("select_group.py", "fedsweep.bounded")]


def test_nothing_but_the_papers_wing_of_the_platform_looks_up_a_papers_wing() -> None:
    wings = [path.name for path in ALGORITHMS.iterdir() if path.is_dir() and path.name not in ("parts", "__pycache__")]
    found = [path for path in naming(*(f"fedsweep.algorithms.{wing}" for wing in wings)) if SOURCES in path.parents]
    assert found and {path.relative_to(SOURCES).parts[0] for path in found} == {"papers"}


def test_presets_are_data_and_never_imported() -> None:
    assert not list((ROOT / "tune_configs").rglob("*.py"))
    named = naming("tune_configs")
    assert not [label(p) for p in named if any(n.startswith("fedsweep.tune_configs") for n in imports_anywhere(p))]


def test_nothing_imports_algorithms_by_the_bare_name() -> None:
    everything = [*modules(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    named = naming("algorithms", among=everything)
    wrong = [(label(p), name) for p in named for name in imports_anywhere(p) if belongs_to(name, "algorithms")]
    assert wrong == []


def may_import_heavy_libraries(path: Path) -> bool:
    place = path.relative_to(SOURCES) if SOURCES in path.parents else path.relative_to(ROOT)
    start = {"sweeps": "", "fleet": "ray_", "driver": "ray_", "tracking": "mlflow_"}.get(place.parts[0])
    return start is not None and place.name.startswith(start)


def test_heavy_libraries_are_imported_where_they_are_used() -> None:
    wrong = [
        (label(path), name)
        for path in naming(*HEAVY)
        if not may_import_heavy_libraries(path)
        for name in imports_on_import(path)
        if name.split(".")[0] in HEAVY
    ]
    assert wrong == []


def test_no_module_is_named_like_one_of_the_standard_library() -> None:
    named = {
        path for path in [*modules(), *(ROOT / "scripts").glob("*.py")] if path.stem not in ("__init__", "__main__")
    }
    folders = {path.parent for path in modules()}
    assert [label(path) for path in sorted(named | folders) if path.stem in sys.stdlib_module_names] == []


def test_nothing_is_named_alpha_or_beta() -> None:
    def names(tree: ast.AST) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                yield node.arg
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.id if isinstance(node, ast.Name) else node.attr
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name

    named = naming("alpha", "beta")
    wrong = [(label(p), n) for p in named for n in names(ast.parse(p.read_text())) if n in ("alpha", "beta")]
    assert wrong == []


def test_importing_the_package_loads_nothing_else() -> None:
    code = (
        "import sys, fedsweep; print(*sorted({'torch', 'numpy', 'pydantic', 'yaml', 'ray', 'mlflow'} & {*sys.modules}))"
    )
    assert python(code) == ""


def test_exported_names_are_the_documented_ones_and_resolve() -> None:
    assert {"Dataset", "FederatedMethod", "Partition", "Result", "Stream", "load", "load_model", "run", "sweep"} <= {
        *fedsweep.__all__
    }
    assert set(fedsweep.__all__) <= set(dir(fedsweep))
    for name in fedsweep.__all__:
        assert getattr(fedsweep, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        fedsweep.runn  # noqa: B018


def test_version_is_the_one_of_the_distribution() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == fedsweep.__version__


def test_algorithms_are_found_in_a_clone_without_an_install() -> None:
    # -S leaves out site-packages, and with them the editable install's import hook
    code = "import sys; sys.path.insert(0, 'platform'); import fedsweep.algorithms as found; print(found.__file__)"
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert Path(done.stdout.strip()) == ALGORITHMS / "__init__.py"


@pytest.mark.slow
def test_training_core_imports_with_torch_and_numpy_alone() -> None:
    core = [path for path in modules() if is_training_core(path)]
    names = [
        ".".join(("fedsweep", *path.relative_to(SOURCES if SOURCES in path.parents else ROOT).with_suffix("").parts))
        for path in core
    ]
    blocked = sorted(HEAVY | {"typer", "rich", "pydantic", "yaml", "jinja2", "scipy", "pandas", "psutil"})
    code = f"""
import importlib, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {blocked!r}:
            raise ModuleNotFoundError(f'the training core must not import {{name}}')

sys.meta_path.insert(0, Blocked())
for name in {names!r}:
    importlib.import_module(name.removesuffix('.__init__'))
"""
    python(code)


def is_training_core(path: Path) -> bool:
    if ALGORITHMS in path.parents:
        return True
    place = path.relative_to(SOURCES)
    ground = ("records.py", "trees.py", "method.py", "streams.py", "errors.py", "submodel.py", "plugins.py")
    if place.parts[0] == "experiment" and place.name in ("build.py", "build_world.py", "implied.py"):
        return False  # they read a configuration
    return place.parts[0] in ("components", "models", "client", "engine", "experiment", *ground)


def test_each_fault_that_the_suite_is_tried_with_fits_the_tree() -> None:
    faults = yaml12.read(ROOT / "scripts" / "mutants.yaml")
    assert len({fault["name"] for fault in faults}) == len(faults) >= 120
    for fault in faults:
        assert (ROOT / fault["file"]).read_text().count(fault["old"]) == 1, fault["name"]
        assert fault["old"] != fault["new"] and all(
            (ROOT / path.partition("::")[0]).exists() for path in fault["tests"]
        ), fault["name"]


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """Modules that import each other on some way, imports for type checking and inside functions included."""
    reached: dict[str, set[str]] = {}
    for start in imports:
        todo, seen = [start], set[str]()
        while todo:
            for name in imports[todo.pop()] & imports.keys() - seen:
                seen.add(name)
                todo.append(name)
        reached[start] = seen
    rings = {frozenset(name for name in reached[start] if start in reached[name]) for start in imports}
    return [set(ring) for ring in sorted(rings, key=sorted) if ring]


def test_the_check_for_circles_finds_one() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "a"}, "d": {"a"}, "e": {"x"}}) == [{"a", "b", "c"}]


def test_no_modules_of_a_package_import_each_other_in_a_circle() -> None:
    names = {".".join(path.relative_to(SOURCES.parent).with_suffix("").parts): path for path in SOURCES.rglob("*.py")}
    graph = {
        name: {part for word in imports_anywhere(path) for part in (word, word.rpartition(".")[0]) if part in names}
        for name, path in names.items()
    }
    packages = {name.rpartition(".")[0] for name in names}
    for package in sorted(packages):
        inside = {name: graph[name] for name in names if name.rpartition(".")[0] == package}
        rings = circles(inside)
        assert not rings, f"{package}: {rings}"
