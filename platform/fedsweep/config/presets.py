"""The YAML files under ``tune_configs/``, found by name: ``quickstart/fedavg``, ``dynamicfl/table4``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fedsweep.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A configuration that ships with the package.

    Attributes:
        name: Its path below the folder, with slashes and without ``.yaml``.
        path: The file.
    """

    name: str
    path: Path

    @property
    def summary(self) -> str:
        """The first line of its first comment; empty where it has none."""
        with self.path.open(encoding="utf-8") as lines:
            for line in lines:
                text = line.strip()
                if text.startswith("#") and text.strip("# "):
                    return text.strip("# ")
                if text and not text.startswith("#"):
                    break
        return ""


def preset_folder() -> Path:
    """Return the presets' folder: inside an installed package, or beside ``platform/`` in a clone.

    Raises:
        ConfigError: Neither is there; the installation is incomplete.
    """
    places = (_PACKAGE / "tune_configs", _PACKAGE.parent.parent / "tune_configs")
    for place in places:
        if place.is_dir():
            return place
    raise ConfigError(f"the presets are missing: no folder {' or '.join(map(str, places))}; install fedsweep again")


def list_presets() -> tuple[Preset, ...]:
    """Return all presets, sorted by name; files that begin with an underscore hold what others share."""
    folder = preset_folder()
    files = [path for path in folder.rglob("*.yaml") if not path.name.startswith("_")]
    named_paths = [(path.relative_to(folder).with_suffix("").as_posix(), path) for path in files]
    return tuple(Preset(name=name, path=path) for name, path in sorted(named_paths))


def find_preset(name: str) -> Path | None:
    """Return the file of the preset of that name (``.yaml`` may be added), or None."""
    parts = name.removesuffix(".yaml").split("/")
    if {"", ".", ".."} & {*parts} or parts[-1].startswith("_"):
        return None
    path = preset_folder().joinpath(*parts[:-1], f"{parts[-1]}.yaml")
    return path if os.path.isfile(path) else None
