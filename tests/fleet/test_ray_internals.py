"""A Ray that calls what it does not promise by other names: runs on it have the same bits, at most with a sentence."""

from __future__ import annotations

import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError, RaySystemError, RayTaskError

from fedsweep.cli import main
from fedsweep.fleet import ray_internals
from fedsweep.fleet.ray_quick_start import plain_trials, quick_settings
from fedsweep.runs.run_folder import RunFolder

TINY = """
name: tiny
scenario: {clients: 4, partition: {kind: iid}}
training: {rounds: 2, cohort_size: 2, local_steps: 2}
tracking: {uri: none}
"""
# Ray's own modules are read with another name in place of each name that fedsweep takes, as a later Ray may have it.
RENAMED = """
import sys
from importlib.machinery import PathFinder, SourceFileLoader

NAMES = sys.argv.pop(1).split()

class Loader(SourceFileLoader):
    def get_code(self, fullname):
        source = self.get_data(self.path).decode()
        for name in NAMES:
            source = source.replace(name, name + "_renamed")
        return self.source_to_code(source, self.path)

class Finder:
    def find_spec(fullname, path=None, target=None):
        own = fullname.startswith(("ray._private", "ray.job_config"))
        spec = PathFinder.find_spec(fullname, path, target) if own else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            if any(name in spec.loader.get_data(spec.origin).decode() for name in NAMES):
                spec.loader = Loader(fullname, spec.origin)
        return spec

sys.meta_path.insert(0, Finder)
from fedsweep.cli import main
sys.exit(main())
"""
PRINTS = "This Ray prints what it reports of the cluster here, not to ray.log"
SLOWER = "Ray starts more slowly: this Ray has another name for what fedsweep leaves out"
# The names of the quick start, and where Ray has them.
QUICK = {
    "WORKER_PROCESS_SETUP_HOOK_ENV_VAR": "ray._private.ray_constants",
    "start_monitor": "ray._private.node:Node",
    "start_log_monitor": "ray._private.node:Node",
    "start_api_server": "ray._private.node:Node",
}


@pytest.fixture(scope="module")
def local_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The SHA-256 of the model that the run has in one process."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "tiny.yaml").write_text(TINY)
    words = ["run", str(folder / "tiny.yaml"), "--set", "runtime.backend=local", "--out", str(folder / "run"), "-q"]
    assert main(words) == 0
    return str(RunFolder(folder / "run").read_result()["model_sha256"])


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_a_ray_with_other_names_gives_the_same_model(local_model: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY + "runtime: {backend: ray, client_actors: 2}\n")
    names = " ".join([*QUICK, "_py_driver_sys_path", "ENABLE_RAY_CLUSTER", "print_to_stdstream"])
    command = [sys.executable, "-c", RENAMED, names, "run", "tiny.yaml", "--out", "run"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run/result.json").read_text())["model_sha256"] == local_model
    (slower,) = [line for line in done.stderr.splitlines() if line.startswith(SLOWER)]
    assert any(name in slower for name in QUICK)
    assert PRINTS in done.stderr.splitlines()


@pytest.mark.parametrize("name", [*QUICK, "_py_driver_sys_path"])
def test_a_ray_without_one_name_is_started_by_public_settings_and_a_sentence_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if name in QUICK:
        monkeypatch.delattr(pkgutil.resolve_name(QUICK[name]), name)
    else:
        monkeypatch.setattr("ray.job_config.JobConfig", SimpleNamespace)
    with caplog.at_level("INFO", logger="fedsweep"), quick_settings(dashboard=False) as settings:
        assert list(settings) == ["runtime_env"]
    (line,) = caplog.messages
    assert line.startswith(SLOWER) and name in line


def test_a_quick_start_leaves_ray_and_the_environment_as_they_were() -> None:
    def state() -> list[object]:
        return [dict(os.environ), *(getattr(pkgutil.resolve_name(owner), name) for name, owner in QUICK.items())]

    before = state()
    with quick_settings(dashboard=False) as settings:
        assert list(settings) == ["job_config"]
        assert [was == now for was, now in zip(before, state(), strict=True)] == [False, True, False, False, False]
    assert state() == before
    with quick_settings(dashboard=True) as settings:
        assert list(settings) == ["runtime_env"] and state() == before


@pytest.mark.parametrize("kind", [ImportError, AttributeError, ConnectionError])
def test_what_ray_raises_as_it_starts_is_raised_as_it_is(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="fedsweep"), pytest.raises(kind, match="Ray's own"):
        with quick_settings(dashboard=False):
            raise kind("Ray's own")
    assert caplog.messages == []


def test_trials_have_no_runtime_environment_and_one_class_and_another_tune_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray.tune.execution import class_cache

    class Trial:
        pass

    before = class_cache._ActorClassCache.get
    with plain_trials():
        made = class_cache._ActorClassCache().get(Trial)
        assert not made._default_options.get("runtime_env")
        assert class_cache._ActorClassCache().get(Trial) is made
    assert class_cache._ActorClassCache.get is before
    monkeypatch.delattr(class_cache, "_ActorClassCache")
    with plain_trials() as is_there:
        assert not is_there


def test_what_ray_reports_goes_to_the_folder_and_not_through_a_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ray._private import worker

    before = worker.print_to_stdstream
    report = {"lines": ["a worker died", "and another"], "pid": "raylet", "is_err": False}
    with ray_internals.reports_in(tmp_path):
        worker.print_to_stdstream(report, ignore_prefix=False)
    assert (tmp_path / "ray.log").read_text() == "a worker died\nand another\n"
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "ray.log").symlink_to(tmp_path / "elsewhere")
    for folder in (linked, None):
        with ray_internals.reports_in(folder):
            worker.print_to_stdstream(report, ignore_prefix=False)
    assert worker.print_to_stdstream is before
    assert not (tmp_path / "elsewhere").exists() and capsys.readouterr().out == ""


def test_only_what_a_module_has_is_replaced_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    module = SimpleNamespace(switch=True)
    monkeypatch.setitem(sys.modules, "switches", module)
    with ray_internals.replaced("switches", "switch", False) as is_there:
        assert is_there and module.switch is False
    assert module.switch is True
    with ray_internals.replaced("switches", "other", False) as is_there:
        assert not is_there and not hasattr(module, "other")
    with ray_internals.replaced("switches.moved_elsewhere", "switch", False) as is_there:
        assert not is_there


@pytest.mark.parametrize(
    ("error", "is_death"),
    [
        (OutOfMemoryError("low on memory"), True),
        (RaySystemError("?"), True),
        (ActorDiedError(), True),
        (RayTaskError("train", "", ValueError()), False),
    ],
)
def test_whatever_ray_says_of_a_trial_but_its_own_error_is_the_death_of_its_process(
    error: Exception, is_death: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.air.execution._internal.actor_manager import RayActorManager

    heard: list[Exception] = []
    monkeypatch.setattr(RayActorManager, "_actor_task_failed", lambda manager, task, exception: heard.append(exception))
    before = RayActorManager._actor_task_failed
    with ray_internals.any_loss():
        RayActorManager(SimpleNamespace())._actor_task_failed(tracked_actor_task=None, exception=error)
    assert RayActorManager._actor_task_failed is before
    assert isinstance(heard[0], RayActorError) == is_death and str(heard[0]) == str(error)


def test_a_sweep_counts_no_callbacks_for_which_it_would_import_each_tracker() -> None:
    from ray.air._internal import usage

    before = usage.tag_callbacks
    with ray_internals.uncounted_callbacks():
        assert usage.tag_callbacks([]) is False and usage.tag_callbacks is not before
    assert usage.tag_callbacks is before
