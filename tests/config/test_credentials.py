"""A password in a configuration is refused before it is written, printed or uploaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsweep.cli import main
from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError

SECRETS = [
    "https://me:s3cret@host:5000",
    "HTTP://s3cret@host/",
    "https://me:s3/cr@et@host",
    "https://[s3cret:x@host",
    "postgresql://me:s3cret@host/db",
    "mysql+pymysql://host/db?user=me&password=s3cret",
]


@pytest.mark.parametrize("uri", SECRETS)
def test_addresses_with_a_password_are_refused_in_one_line(uri: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^tracking\.uri: .*MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    ) as no:
        load_config({"tracking": {"uri": uri}})
    assert "s3c" not in str(no.value) and "s3/" not in str(no.value) and "\n" not in str(no.value)


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"runtime": {"address": SECRETS[0]}}, "runtime.address"),
        ({"scenario": {"root": SECRETS[0]}}, "scenario.root"),
        ({"tracking": {"also": ["csv", SECRETS[4]]}}, "tracking.also"),
        ({"sweep": {"space": {"tracking.uri": {"grid": [None, SECRETS[0]]}}}}, "sweep.space.tracking.uri.grid"),
    ],
)
def test_so_they_are_at_every_other_key(tree: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}: "):
        load_config(tree)


@pytest.mark.parametrize(
    "uri",
    [
        "http://host:5000",
        "https://host/a@b?x=1",
        "postgresql://me@host/db",
        "sqlite:////home/a:b@c/mlflow.db",
        "databricks://profile",
    ],
)
def test_addresses_without_one_are_not(uri: str) -> None:
    assert load_config({"tracking": {"uri": uri}}).tracking.uri == uri


@pytest.mark.parametrize(
    "words",
    [
        ["run", "quickstart/fedavg", "--out", "out", "--set", f"tracking.uri={SECRETS[0]}"],
        ["run", "quickstart/fedavg", "--dry-run", "--set", f"tracking.uri={SECRETS[4]}"],
        ["sweep", "quickstart/fedavg", "--out", "out", "--set", f"tracking.uri={SECRETS[0]}"],
        ["ui", "--uri", SECRETS[0]],
        ["report", "fedsweep", "--out", "page.html", "--uri", SECRETS[0]],
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_no_command_writes_or_prints_it(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    shown = capsys.readouterr()
    assert "s3cret" not in shown.out + shown.err and "MLFLOW_TRACKING_PASSWORD" in shown.err
    assert list(tmp_path.iterdir()) == []
