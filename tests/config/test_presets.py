from __future__ import annotations

from pathlib import Path

import pytest

from fedsweep.config import load_config, presets
from fedsweep.config.presets import find_preset, list_presets, preset_folder
from fedsweep.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "fedsweep"
    (package / "tune_configs" / "quickstart").mkdir(parents=True)
    monkeypatch.setattr(presets, "_PACKAGE", package)
    return package / "tune_configs"


def test_presets_of_a_clone_lie_beside_the_platform() -> None:
    assert preset_folder() == ROOT / "tune_configs"


def test_presets_are_listed_with_the_first_comment_line(folder: Path) -> None:
    (folder / "quickstart" / "b.yaml").write_text("# FedAvg on digits\n# more\nseed: 1\n")
    (folder / "quickstart" / "a.yaml").write_text("seed: 2  # no summary\n# too late\n")
    (folder / "notes.md").write_text("# not a preset\n")
    assert [(preset.name, preset.summary) for preset in list_presets()] == [
        ("quickstart/a", ""),
        ("quickstart/b", "FedAvg on digits"),
    ]


def test_preset_is_loaded_by_name_with_or_without_its_ending(folder: Path) -> None:
    (folder / "quickstart" / "a.yaml").write_text("seed: 2\n")
    assert load_config("quickstart/a").seed == 2
    assert load_config("quickstart/a.yaml", ["seed=3"]).seed == 3
    assert find_preset("quickstart") is None


@pytest.mark.parametrize("name", ["", "quickstart/", "quickstart/_shared", "../outside", "quickstart/../../outside"])
def test_what_is_not_listed_is_no_preset(name: str, folder: Path) -> None:
    for path in (
        folder / "quickstart" / "_shared.yaml",
        folder.parent / "outside.yaml",
        folder / "quickstart" / ".yaml",
    ):
        path.write_text("seed: 2\n")
    assert find_preset(name) is None and find_preset(str(folder / "quickstart" / "a")) is None


def test_unknown_preset_is_an_error_with_the_nearest(folder: Path) -> None:
    (folder / "quickstart" / "fedavg.yaml").write_text("seed: 2\n")
    with pytest.raises(ConfigError, match="did you mean 'quickstart/fedavg'"):
        load_config("quickstart/fedvag")


def test_file_beats_a_preset_of_the_same_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a.yaml").write_text("seed: 2\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("seed: 5\n")
    assert load_config("a.yaml").seed == 5
    assert load_config("a").seed == 2


def test_missing_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "_PACKAGE", tmp_path / "site" / "lib" / "fedsweep")
    with pytest.raises(ConfigError, match="presets are missing"):
        list_presets()


@pytest.mark.parametrize("preset", list_presets(), ids=lambda preset: preset.name)
def test_each_shipped_preset_loads_and_has_a_summary(preset: presets.Preset) -> None:
    load_config(preset.name)
    assert preset.summary
