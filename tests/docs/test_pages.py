"""All pages: what they name exists."""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from fedsweep.catalog import resolve
from fedsweep.cli import app, main
from fedsweep.components import aggregation, base, evaluation, local, planning, probes
from fedsweep.config.load import load_config

_DOCS = Path(__file__).resolve().parents[2] / "docs"
NAMES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{page.name}" for page in sorted(_DOCS.glob("*.md")))]
# What contributors read names modules; what others read, only what is promised to stay.
USERS_PAGES = [name for name in NAMES if name not in ("CONTRIBUTING.md", "CHANGELOG.md", "docs/architecture.md")]
PROMISED = {"fedsweep", "fedsweep.components", "fedsweep.testing"}
# Names of entry points, and of a tracked run's tags.
NO_MODULES = {
    *("datasets", "figures", "measures", "methods", "observers", "partitions", "schedules", "transforms"),
    *("dataset", "kind", "method", "seed", "setting"),
}
BASES = [
    local.Objective,
    local.LocalSolver,
    planning.Selection,
    planning.SubModelPolicy,
    planning.Pacing,
    aggregation.Weighting,
    aggregation.Aggregation,
    aggregation.ServerUpdate,
    aggregation.Refinement,
    evaluation.Evaluation,
    probes.Probe,
]


def command_lines(pages: Any, name: str) -> list[list[str]]:
    """Every fedsweep command line in any fenced block, and in any code span that is more than a command's name."""
    texts = [block.text.replace("\\\n", " ") for block in pages.blocks(name)]
    lines = [re.sub(r"\s{2,}#.*", "", line) for text in texts for line in text.splitlines()]
    said = re.sub(r"^Not there yet: .*$", "", (pages.root / name).read_text(), flags=re.MULTILINE)
    spans = re.findall(r"`(fedsweep [^`\n]+)`", said)
    found = [re.search(r"(?:^|-- |python -m )(fedsweep [a-z-].*)", line.strip()) for line in lines]
    return [shlex.split(text.split("|")[0]) for text in [*(m[1] for m in found if m), *spans]]


def missing_commands(pages: Any) -> set[str]:
    """Commands that README.md says are not there yet; other pages may speak of them."""
    said = re.search(r"^Not there yet: (.*)$", (pages.root / "README.md").read_text(), flags=re.MULTILINE)
    return set(re.findall(r"`fedsweep (\w+)`", said[1])) if said else set()


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_all_pages_are_looked_at(pages: Any) -> None:
    assert [pages.root / name for name in sorted(NAMES)] == sorted(pages.all())


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(pages: Any, name: str) -> None:
    page = pages.root / name
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("name", NAMES)
def test_commands_and_their_options_exist(pages: Any, name: str) -> None:
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for words in command_lines(pages, name):
        if words[1] in missing_commands(pages):
            continue
        assert words[1] in known, words
        options = {option for parameter in known[words[1]].params for option in parameter.opts}
        assert {word for word in words[2:] if word.startswith("--")} <= options, words


def test_command_lines_are_found_in_blocks_and_in_text(pages: Any) -> None:
    assert ["fedsweep", "verify", "runs/first"] in command_lines(pages, "README.md")
    assert ["fedsweep", "list", "methods"] in command_lines(pages, "README.md")
    submitted = next(words for words in command_lines(pages, "docs/cluster.md") if "/shared/runs/my-run" in words)
    assert submitted[:3] == ["fedsweep", "run", "experiment.yaml"]


@pytest.mark.parametrize("name", NAMES)
def test_configurations_are_valid(pages: Any, name: str) -> None:
    for block in pages.blocks(name):
        if block.language == "yaml" and "my_" not in block.text:
            resolve(load_config(yaml.safe_load(block.text)))


@pytest.mark.parametrize("name", NAMES)
def test_python_blocks_compile(pages: Any, name: str) -> None:
    for block in pages.blocks(name):
        if block.language == "python":
            compile(block.text, name, "exec")


@pytest.mark.parametrize("name", NAMES)
def test_named_sources_exist(pages: Any, name: str) -> None:
    text = re.sub(r"^```.*?^```$", "", (pages.root / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    roots = (pages.root, pages.root / "platform" / "fedsweep", pages.root / "docs")
    for path in re.findall(r"`((?:\w+/)+\w+\.(?:py|sh|md|yaml))`", text):
        assert any((root / path).exists() for root in roots), path


@pytest.mark.slow
def test_the_readmes_commands_without_a_run_work(
    pages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages.write_files("README.md", tmp_path)
    monkeypatch.chdir(tmp_path)
    small = ["--set", "runtime.backend=local", "--set", "tracking.uri=none", "--set", "training.rounds=2"]
    done = []
    for line in pages.commands("README.md"):
        words = shlex.split(line)[1:]
        if words[0] in ("doctor", "ui", "verify"):  # seconds, a server, and a run again
            continue
        takes_set = words[0] in ("run", "partition") and "--resume" not in words
        assert main([*words, *(small if takes_set else [])]) == 0, (line, capsys.readouterr().err)
        done.append(words[0])
    assert done == ["partition", "run", "run", "run", "run", "compare", "report", "run"]
    assert (tmp_path / "runs" / "comparison.png").stat().st_size > 1000


def test_the_readmes_table_of_files_is_what_a_run_leaves(pages: Any) -> None:
    from fedsweep.runs import run_folder

    named = set(re.findall(r"^\| `(\w+(?:\.\w+|/))` \|", (pages.root / "README.md").read_text(), flags=re.MULTILINE))
    files = {run_folder.CONFIG, run_folder.ROUNDS, run_folder.CLIENTS, run_folder.RESULT, run_folder.MODEL}
    folders = {f"{run_folder.CHECKPOINTS}/", f"{run_folder.PICTURES}/"}
    assert named == files | folders | {run_folder.SCENARIO, run_folder.CLIENT_ACCURACY, run_folder.TRAFFIC}


def test_what_the_readme_calls_missing_is_missing(pages: Any) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert missing_commands(pages).isdisjoint(commands)


def test_the_architectures_signatures_are_the_codes(pages: Any) -> None:
    text = (pages.root / "docs/architecture.md").read_text()
    found = {(cls, method): args for cls, method, args in re.findall(r"^(\w+)\.(\w+)\(([\w, ]*)\) +->", text, re.M)}
    expected = {}
    for seam in BASES:
        (method,) = seam.__abstractmethods__
        parameters = [name for name in inspect.signature(getattr(seam, method)).parameters if name != "self"]
        expected[seam.__name__, method] = ", ".join(parameters)
    assert found == expected


def test_the_architecture_names_every_hook(pages: Any) -> None:
    text = (pages.root / "docs/architecture.md").read_text()
    for owner in (base.ServerComponent, local.LocalTerm, planning.Pacing):
        for name, value in vars(owner).items():
            if inspect.isfunction(value) and not name.startswith("_"):
                assert re.search(rf"`(\w+\.)?{name}\b|^\w+\.{name}\(|[, `]{name}\(", text, re.M), (owner, name)


@pytest.mark.parametrize("page", USERS_PAGES)
def test_the_pages_import_and_name_what_stays_when_modules_move(pages: Any, page: str) -> None:
    text = (pages.root / page).read_text()
    assert set(re.findall(r"^ *(?:from|import) (fedsweep[\w.]*)", text, flags=re.MULTILINE)) <= PROMISED
    for name in re.findall(r"`(fedsweep(?:\.\w+)+)\b", text):
        place, _, last = name.rpartition(".")
        is_offered = place in PROMISED and last in importlib.import_module(place).__all__
        assert is_offered or name in PROMISED or last in NO_MODULES, name
