"""Builds the wheel and imports all of it from outside the repository.

An editable install finds what the wheel lacks (a forgotten subpackage, a preset), so only this check sees it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

IMPORT_ALL = """
import importlib, pkgutil, sys
wheel, libraries = sys.argv[1:]
sys.path[:0] = [wheel]
sys.path.append(libraries)
import fedsweep
names = [module.name for module in pkgutil.walk_packages(fedsweep.__path__, "fedsweep.")]
names.remove("fedsweep.__main__")
for name in names:
    module = importlib.import_module(name)
    assert module.__file__ and module.__file__.startswith(wheel), f"{name} came from {module.__file__}"
assert "fedsweep.algorithms.registry" in names, names
print(len(names), "modules")
from fedsweep.config.presets import list_presets
print(*(preset.name for preset in list_presets()), sep="\\n")
"""


def build(folder: Path) -> Path:
    """The wheel of this repository, built into ``folder``; build/ would bring deleted modules back."""
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(ROOT)], check=True)
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    (wheel,) = folder.glob("fedsweep-*.whl")
    return wheel


def main() -> None:
    """Builds, unpacks and imports the wheel; fails with the import's own error or the difference in presets."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        unpacked = folder / "unpacked"
        with zipfile.ZipFile(build(folder)) as archive:
            archive.extractall(unpacked)
        # -S leaves out site's .pth files, and with them the editable install of this very package
        command = [sys.executable, "-S", "-c", IMPORT_ALL, str(unpacked), sysconfig.get_path("purelib")]
        done = subprocess.run(command, check=False, cwd=folder, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            sys.exit("the wheel cannot be imported outside the repository: see above")
        count, *shipped = done.stdout.splitlines()
    presets = {path.relative_to(ROOT / "tune_configs").with_suffix("").as_posix() for path in _yaml_files()}
    if presets != set(shipped):
        sys.exit(f"presets in the wheel differ from those in tune_configs/: {sorted(presets ^ set(shipped))}")
    print(f"the wheel is complete: {count}, {len(presets)} presets")


def _yaml_files() -> list[Path]:
    return sorted(path for path in (ROOT / "tune_configs").rglob("*.yaml") if not path.name.startswith("_"))


if __name__ == "__main__":
    main()
