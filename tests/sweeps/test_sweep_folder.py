"""What a sweep's folder lets a resumed sweep change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fedsweep.cli import main
from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError, OutputError
from fedsweep.sweeps.space import list_trials
from fedsweep.sweeps.summary import Summary, write_summary
from fedsweep.sweeps.sweep_folder import SweepFolder, SweepPlan


def begun(path: Path, given: dict[str, Any]) -> SweepFolder:
    folder = SweepFolder(path)
    trials = tuple(list_trials(load_config(given))) if "sweep" in given else ()
    folder.create(SweepPlan(config_tree=given, trials=trials), config_yaml="seed: 0\n", overwrite=False)
    return folder


def test_a_folder_that_may_not_be_read_holds_no_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables look for finished runs in the folders beside theirs, which in /tmp are others' too."""
    stat = os.stat

    def forbidden(path: Any, **more: Any) -> os.stat_result:
        if str(path).startswith(str(tmp_path / "others")):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **more)

    monkeypatch.setattr(os, "stat", forbidden)
    assert not SweepFolder(tmp_path / "others").has_plan


def test_a_kill_while_a_folder_is_made_leaves_a_sweep_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """As SIGKILL: what lies on the disk stays, and nothing more is written."""

    replace = os.replace

    def killed(*paths: Any) -> None:
        replace(*paths)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "replace", killed)
        begun(tmp_path / "s", {"seed": 1})
    folder = SweepFolder(tmp_path / "s")
    assert folder.read_plan().config_tree == {"seed": 1}
    with pytest.raises(OutputError, match="go on with --resume"):
        folder.check_free(overwrite=False)


@pytest.mark.parametrize("runtime", [{}, {"address": "host:1"}, {"address": "host:2"}, {"address": None}])
def test_a_sweep_may_go_on_on_another_cluster(tmp_path: Path, runtime: dict[str, Any]) -> None:
    folder = begun(tmp_path / "s", {"seed": 1, "runtime": {"address": "host:1"}})
    folder.check_same({"seed": 1, "runtime": runtime})
    folder.check_same({"seed": 1})


def test_nothing_else_may_change(tmp_path: Path) -> None:
    folder = begun(tmp_path / "s", {"seed": 1, "runtime": {"address": "host:1", "client_actors": 2}})
    with pytest.raises(ConfigError, match="differs in runtime"):
        folder.check_same({"seed": 1, "runtime": {"address": "host:1", "client_actors": 4}})
    with pytest.raises(ConfigError, match="differs in seed"):
        folder.check_same({"seed": 2, "runtime": {"client_actors": 2}})


def test_resume_without_a_file_takes_the_address_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"tracking": {"uri": "none"}, "sweep": {"space": {"seed": {"grid": [0]}}}}
    begun(tmp_path / "s", given)
    words = ["sweep", "--resume", "--out", str(tmp_path / "s"), "--dry-run", "--set"]
    assert main([*words, "training.rounds=3"]) == 2
    assert "of --set it takes runtime.address and sweep.budget alone" in capsys.readouterr().err
    assert main([*words, "runtime.address=auto"]) == 0


def test_dry_run_leaves_out_what_is_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(tmp_path / "s", {"tracking": {"uri": "none"}, "sweep": {"space": {"seed": {"grid": [3, 4, 5]}}}})
    monkeypatch.setattr(SweepFolder, "has_finished", lambda self, trial: trial.values["seed"] != 4)
    assert main(["sweep", "--resume", "--out", str(tmp_path / "s"), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines()[1:-1]] == ["4"]
    assert out.splitlines()[-1].startswith("1 trials beside 2 that have finished, about")


def test_an_overwritten_sweep_leaves_nothing_that_the_next_would_add_to(tmp_path: Path) -> None:
    folder = begun(tmp_path / "s", {"sweep": {"space": {"seed": {"grid": [0]}}}})
    for name in ("summary.json", "optuna.log", "elapsed.json", "mlflow.json", "notes.txt"):
        (folder.path / name).write_text("earlier")
    folder.create(SweepPlan(config_tree={}, trials=()), config_yaml=None, overwrite=True)
    assert sorted(path.name for path in folder.path.iterdir()) == ["notes.txt", "sweep.json"]


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]"], ids=["none", "cut", "deep", "list"])
def test_a_plan_that_is_none_is_an_error_that_names_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(OutputError, match=r"sweep\.json"):
        SweepFolder(tmp_path).read_plan()


def test_a_summary_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    folder = begun(tmp_path / "s", {"seed": 1})
    (folder.path / "summary.parquet").mkdir()
    nothing = Summary(metrics=("test_accuracy",), modes=("max",), trials=(), settings=(), differences=(), notes=())
    with pytest.raises(OutputError, match=r"summary\.parquet: cannot be written: Is a directory"):
        write_summary(folder, nothing)
