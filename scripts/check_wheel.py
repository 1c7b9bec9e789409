"""Builds the wheel, imports all of it from outside the repository, and runs the README's first commands with it.

An editable install finds what the wheel lacks (a forgotten subpackage, a preset), so only this check sees it. The
environment that the wheel is installed into is empty but for a path to the libraries of this one.
"""

from __future__ import annotations

import re
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


def try_out(wheel: Path, folder: Path) -> int:
    """Installs the wheel into an environment of its own and runs there what a newcomer does; how many commands."""
    environment, place = folder / "environment", folder / "place"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(python)]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheel)], check=True)
    (libraries,) = environment.glob("lib/python*/site-packages")
    # A path file is not read in a folder that a path file names, so this one's editable install stays out of it.
    (libraries / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    place.mkdir()
    (first,) = re.findall(r"```yaml file=first.yaml\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (place / "first.yaml").write_text(first)
    short = ["--set", "training.rounds=2", "--set", "runtime.backend=local"]
    commands = [
        ["--version"],
        ["partition", "first.yaml"],
        ["run", "first.yaml", "--dry-run", *short],
        ["run", "first.yaml", "--out", "runs/first", *short],
        ["compare", "runs", "--plot", "runs/comparison.png"],
        ["report", "runs", "--out", "runs/report.html"],
        ["show", "dynamicfl/table4"],
    ]
    for words in commands:
        done = subprocess.run(
            [str(environment / "bin" / "fedsweep"), *words], cwd=place, check=False, capture_output=True, text=True
        )
        if done.returncode != 0:
            sys.exit(f"installed from the wheel, fedsweep {' '.join(words)} fails:\n{done.stdout}{done.stderr}")
    return len(commands)


def main() -> None:
    """Fails with the import's own error, the difference in presets, or the command that the wheel can't carry out."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        unpacked = folder / "unpacked"
        wheel = build(folder)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        # -S leaves out site's .pth files, and with them the editable install of this very package
        command = [sys.executable, "-S", "-c", IMPORT_ALL, str(unpacked), sysconfig.get_path("purelib")]
        done = subprocess.run(command, check=False, cwd=folder, stdout=subprocess.PIPE, text=True)
        if done.returncode != 0:
            sys.exit("the wheel cannot be imported outside the repository: see above")
        count, *shipped = done.stdout.splitlines()
        tried = try_out(wheel, folder)
    presets = {path.relative_to(ROOT / "tune_configs").with_suffix("").as_posix() for path in _yaml_files()}
    if presets != set(shipped):
        sys.exit(f"presets in the wheel differ from those in tune_configs/: {sorted(presets ^ set(shipped))}")
    print(f"the wheel is complete: {count}, {len(presets)} presets; {tried} commands ran from it")


def _yaml_files() -> list[Path]:
    return sorted(path for path in (ROOT / "tune_configs").rglob("*.yaml") if not path.name.startswith("_"))


if __name__ == "__main__":
    main()
