"""Files of the working folder never take the place of libraries; folders that nobody keeps go with their process."""

from __future__ import annotations

import gc
import importlib
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fedsweep import processes
from fedsweep.cli import main
from fedsweep.errors import ResourceError
from fedsweep.processes import check_memory, memory_here, scratch_folder

LIBRARIES = ("yaml", "jinja2", "pyarrow", "torch", "numpy", "ray", "rich", "typer", "pydantic", "safetensors", "mlflow")
OWN = """
from fedsweep.algorithms.fedavg import fedavg

def mine():
    return fedavg()
"""
TINY = """
name: tiny
scenario: {clients: 4, partition: {kind: iid}}
training: {rounds: 1, cohort_size: 2, local_steps: 1}
tracking: {uri: none}
"""


@pytest.fixture
def trapped(tmp_path: Path) -> Path:
    """A folder with modules called like libraries; each of them leaves a file when it is imported."""
    for name in LIBRARIES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} ')\n")
    return tmp_path


def call(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedsweep", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


@pytest.mark.slow
def test_a_foreign_run_folder_runs_no_code(trapped: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "tiny.yaml").write_text(TINY)
    words = ["run", str(elsewhere / "tiny.yaml"), "--set", "runtime.backend=local", "--out", str(elsewhere / "run")]
    assert main([*words, "--quiet"]) == 0
    shutil.copytree(elsewhere / "run", trapped, dirs_exist_ok=True)
    commands = [["compare", "."], ["report", ".", "--out", str(elsewhere / "page.html")]]
    code = "from fedsweep.processes import look_here_last; look_here_last(); from fedsweep.cli import main;"
    code += f"assert [main(words) for words in {commands}] == [0, 0]"
    both = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=trapped, check=False)
    for done in (both, call("verify", ".", "-q", folder=trapped)):
        assert done.returncode == 0, done.stderr
    assert not (trapped / "ran").exists()


@pytest.mark.ray
def test_workers_import_libraries_first_and_find_modules_of_the_working_folder(trapped: Path) -> None:
    (trapped / "my_methods.py").write_text(OWN)
    (trapped / "tiny.yaml").write_text(TINY + "runtime: {backend: ray, client_actors: 2}\n")
    (trapped / "my_nets.py").write_text(NET)
    own = ["--set", "method={name: 'my_methods:mine'}", "--set", "model={name: 'my_nets:net'}"]
    done = call("run", "tiny.yaml", *own, "--out", "run", "-q", folder=trapped)
    assert done.returncode == 0, done.stderr
    assert not (trapped / "ran").exists()
    # The driver and at least one actor have built the network.
    assert len(list(trapped.glob("built-by-*"))) > 1


NET = """
import os, pathlib
import torch

def net(*, input_shape, num_classes):
    pathlib.Path(__file__).with_name(f"built-by-{os.getpid()}").touch()
    size = input_shape[0] * input_shape[1] * input_shape[2]
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(size, num_classes))
"""


def test_the_working_folder_goes_to_the_end_wherever_it_stood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", "/a", str(tmp_path), "/b"])
    processes.look_here_last()
    assert sys.path == ["/a", "/b", str(tmp_path)]


def test_a_worker_works_where_the_driver_does_looks_there_last_and_collects_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    monkeypatch.setenv("FEDSWEEP_USER_FOLDERS", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = gc.get_threshold()
    try:
        processes.begin_worker()
        assert Path.cwd() == tmp_path
        # Behind them the job's own folder, which has what was shipped.
        assert sys.path[-2:] == [str(tmp_path), "/"] and str(tmp_path) not in sys.path[:-2]
        assert gc.isenabled() and gc.get_threshold() == (50_000, *before[1:])
    finally:
        gc.set_threshold(*before)


def test_a_removed_working_folder_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["list", "presets"]) == 2
    assert capsys.readouterr().err == "error: the working folder was removed; go to one that is there\n"


def test_a_worker_looks_in_folders_that_a_program_put_on_its_path_and_imported_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("mods", "pkgs", "unused", "variable", "site-packages"):
        (tmp_path / place).mkdir()
        (tmp_path / place / f"from_{place[:4]}.py").touch()
        monkeypatch.syspath_prepend(tmp_path / place)
    (tmp_path / "pkgs" / "own_package").mkdir()
    (tmp_path / "pkgs" / "own_package" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "variable"))
    monkeypatch.setattr(sys, "path", [None, *sys.path])  # which imports pass over
    for name in ("from_mods", "own_package", "from_vari", "from_site"):
        importlib.import_module(name)
    folders = processes.worker_variables()["FEDSWEEP_USER_FOLDERS"].split(os.pathsep)
    assert [folder for folder in folders if Path(folder).is_relative_to(tmp_path)] == [
        str(tmp_path / "pkgs"),
        str(tmp_path / "mods"),
        str(tmp_path),
    ]
    assert folders[-1] == str(tmp_path)  # where workers work
    assert processes._own_modules()["own_package/__init__.py"] == str(tmp_path / "pkgs/own_package/__init__.py")


FAULTS = """
import resource
import numpy as np
from fedsweep import processes

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.empty(2**26, np.uint8).fill(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

by_default = [faults() for _ in range(3)][-1]
{call}
print(by_default, [faults() for _ in range(3)][-1])
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is another one")
def test_memory_that_a_step_gives_back_is_not_mapped_anew(tmp_path: Path) -> None:
    def faults(call: str) -> list[int]:
        words = [sys.executable, "-c", FAULTS.format(call=call)]
        return [int(word) for word in subprocess.check_output(words, cwd=tmp_path, text=True).split()]

    pages = 2**26 // resource.getpagesize()
    by_default, kept = faults("processes.keep_freed_memory()")
    # Huge pages, where the kernel gives them, are fewer.
    assert by_default > pages // 1024 and kept < by_default // 10
    assert min(faults("")) > pages // 1024


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_it_goes_with_what_is_in_it_and_another_of_a_living_process_stays(temporary: Path) -> None:
    with scratch_folder() as one:
        (one / "inner").mkdir()
        with scratch_folder() as other:
            assert one != other and (one / "inner").is_dir()
        assert one.is_dir() and not other.exists()
    assert list(temporary.iterdir()) == []


def test_that_of_a_killed_process_is_removed_by_the_next(temporary: Path) -> None:
    code = f"""
import os, signal, tempfile
from fedsweep.errors import ResourceError
from fedsweep.processes import check_memory, memory_here, scratch_folder
tempfile.tempdir = {str(temporary)!r}
with scratch_folder() as folder:
    (folder / "run").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    (left,) = temporary.iterdir()
    (temporary / "other").mkdir()
    with scratch_folder():
        assert not left.exists()
    assert [path.name for path in temporary.iterdir()] == ["other"]


def test_nothing_behind_a_link_is_removed(temporary: Path) -> None:
    (temporary / "mine").mkdir()
    (temporary / "mine" / "file").touch()
    (temporary / "fedsweep-scratch-x").symlink_to("mine")
    with scratch_folder():
        pass
    assert (temporary / "mine" / "file").is_file()


def test_a_process_that_may_not_map_the_libraries_says_so_before_they_abort() -> None:
    words = [sys.executable, "-m", "fedsweep", "list", "methods"]
    limits = (5 * 10**8, 5 * 10**8)
    done = subprocess.run(
        words, capture_output=True, text=True, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limits)
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: not enough memory: ulimit -v leaves 500 MB of addresses, and the libraries")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("own", "limits"),
    [
        ("4:memory:/host/box\n0::/\n", {"memory/memory.limit_in_bytes": "330000000"}),  # a container: itself at the top
        ("4:cpu,memory:/job/step\n", {"memory/job/memory.limit_in_bytes": "330000000", "memory/job/step/x": ""}),
        ("0::/user/job\n", {"user/memory.max": "330000000\n", "user/job/memory.max": "max\n"}),
        ("7:pids:/\n0::/\n", {"memory.max": "330000000\n", "memory/memory.limit_in_bytes": "1"}),
    ],
)
def test_a_control_group_too_small_for_a_run_is_told_before_the_kernel_kills_it(
    own: str,
    limits: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, text in {"own": own, **limits}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    check_memory()
    monkeypatch.setattr(processes, "_OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(processes, "_GROUPS", tmp_path)
    assert memory_here() == 330_000_000
    with pytest.raises(ResourceError, match="330 MB"):
        check_memory()
    assert main(["run", "quickstart/fedavg", "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("error: not enough memory: this container, job")
    assert main(["list", "codecs"]) == 0  # what only reads takes less
