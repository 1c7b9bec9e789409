from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from fedsweep.commands import catalog

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
