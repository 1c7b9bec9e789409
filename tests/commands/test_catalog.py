from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fedsweep import plugins
from fedsweep.commands import catalog
from fedsweep.commands.listing import entries

Command = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("kind", "name", "source"),
    [
        ("methods", "dynamicfl", "DynamicFL"),
        ("datasets", "digits", "Alpaydin"),
        ("models", "mlp", "DynaFed"),
        ("partitions", "dirichlet", "NIID-Bench"),
        ("presets", "quickstart/fedavg", "tune_configs/quickstart/fedavg.yaml"),
    ],
)
def test_list_has_a_line_each_with_summary_and_source(kind: str, name: str, source: str, fedsweep: Command) -> None:
    code, out, err = fedsweep("list", kind)
    assert (code, err) == (0, "")
    (line,) = [line for line in out.splitlines() if line.split()[0] == name]
    assert re.fullmatch(rf"{name}\s+\S.+  \[.*{re.escape(source)}.*\]", line)


def test_list_of_tables_is_exit_0(fedsweep: Command) -> None:
    code, _, err = fedsweep("list", "tables")
    assert (code, err) == (0, "")


def test_show_of_a_method_has_its_parameters_with_type_default_and_meaning(fedsweep: Command) -> None:
    code, out, _ = fedsweep("show", "fedprox")
    assert code == 0
    assert out.startswith("method fedprox: FedAvg with a proximal term on the clients\n") and "source: Li et al." in out
    (line,) = [line for line in out.splitlines() if line.startswith("mu ")]
    assert line.split()[:2] == ["mu", "float"] and len(line.split()) > 5


@pytest.mark.parametrize("kind", list(catalog.KINDS))
def test_everything_that_is_listed_can_be_shown(kind: str, fedsweep: Command) -> None:
    entries = catalog.KINDS[kind]()
    for entry in entries:
        catalog._print_entry(kind.removesuffix("s"), entry)
    code, out, err = fedsweep("show", entries[-1].name)
    assert (code, err) == (0, "")
    assert all(f"{kind.removesuffix('s')} {entry.name}: " in out for entry in entries)


@pytest.mark.parametrize("kind", ["datasets", "models", "partitions"])
def test_what_installed_packages_add_is_listed_and_shown(
    kind: str, fedsweep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = {f"fedsweep.{kind}": [EntryPoint("rotating", "fedsweep.world.partitions.kinds:IID", f"fedsweep.{kind}")]}
    for module in (entries, plugins):
        monkeypatch.setattr(module, "entry_points", lambda group: added.get(group, []))
    assert "rotating" in fedsweep("list", kind)[1]
    code, out, err = fedsweep("show", "rotating")
    assert (code, err) == (0, "") and out.startswith(f"{kind.removesuffix('s')} rotating: of an installed package\n")


def test_show_of_a_preset_is_its_file(fedsweep: Command) -> None:
    _, out, _ = fedsweep("show", "quickstart/dynamicfl")
    assert "high_interval: a" in out


def test_json_schema_has_every_section(fedsweep: Command) -> None:
    code, out, _ = fedsweep("show", "--json-schema")
    assert code == 0
    assert set(json.loads(out)["properties"]) >= {"scenario", "method", "training", "runtime", "tracking"}


def test_show_of_a_table_as_json_has_everything_resolved(fedsweep: Command) -> None:
    code, out, err = fedsweep("show", "dynamicfl/figure3", "--json")
    tree = json.loads(out)
    assert (code, err) == (0, "") and tree["source"].endswith("Figure 3")
    assert [column["name"] for column in tree["columns"]] == ["Dir 0.1"] and len(tree["rows"]) == 15
    assert tree["printed"]["a-b"]["Dir 0.1"] == {"accuracy": [72.7, 0.5], "cost": 0.418}
    method = tree["settings"]["a-b"]["Dir 0.1"]["method"]
    assert (method["high_interval"], method["low_interval"], method["orders"]) == ("a", "b", 10)
    code, _, err = fedsweep("show", "quickstart/fedavg", "--json")
    assert code == 2 and "lacks the section table:" in err


OWN = '''
from fedsweep import Card, FederatedMethod, Limit, with_card


@with_card(Card(limits=(Limit(given={"mu": 0.0}),)))
def mine(*, mu: float = 0.1) -> FederatedMethod:
    """A method of one's own."""
    return FederatedMethod(name="mine", source="Me 2026")


@with_card(Card())
def unfinished(*, mu: float) -> FederatedMethod:
    """A method without a default."""
    return FederatedMethod(name="unfinished", source="")
'''


@pytest.fixture
def own_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shown_methods.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own_methods")
def test_show_of_a_method_of_ones_own_has_what_its_card_says(fedsweep: Command) -> None:
    code, out, _ = fedsweep("show", "shown_methods:mine")
    assert code == 0 and out.startswith("component shown_methods:mine: your own\n")
    assert "executors: loop, lanes" in out and "mu=0.0: the models of fedavg, bit for bit" in out
    assert out.endswith("source in full: Me 2026\n")


@pytest.mark.usefixtures("own_methods")
def test_a_method_that_can_not_be_built_as_it_is_shows_its_parameters_and_has_no_json(fedsweep: Command) -> None:
    code, out, _ = fedsweep("show", "shown_methods:unfinished")
    assert code == 0 and "(must be given)" in out
    code, _, err = fedsweep("show", "shown_methods:unfinished", "--json")
    assert code == 2 and "method 'shown_methods:unfinished' cannot be built (TypeError:" in err


def test_what_is_not_there_has_no_heading(fedsweep: Command) -> None:
    code, out, err = fedsweep("show", "fedsweep:nothing_of_that_name")
    assert (code, out) == (2, "") and "unknown attribute" in err
