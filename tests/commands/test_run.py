from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
from waiting_run import waiting

import fedsweep as fedsweep_package
from fedsweep.client.modules import BoundModule
from fedsweep.commands.running.one_run import summary
from fedsweep.config import yaml12
from fedsweep.config.load import load_config
from fedsweep.fleet import ray_start

Command = Callable[..., tuple[int, str, str]]
Capture = pytest.CaptureFixture[str]


def test_run_prints_plain_lines_and_last_a_summary_with_folder_and_command(config: Path, fedsweep: Command) -> None:
    code, out, err = fedsweep("run", config, "--out", "here/run")
    assert (code, err) == (0, "")
    folder = Path("here/run").absolute()
    lines = out.splitlines()
    assert lines[0] == "tiny: 2 rounds, in this process (runtime.backend=local)"
    assert [line.split()[:2] for line in lines[1:3]] == [["round", "1/2"], ["round", "2/2"]]
    assert len(lines) == 4 and lines[3].startswith("finished: 2 rounds, accuracy 0.")
    assert f"in {folder}; compare: " in lines[3] and lines[3].endswith(f"compare {folder.parent}")
    assert "\x1b" not in out
    assert (folder / "result.json").is_file()
    assert [path.name for path in Path().iterdir()] == ["here"]


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The package's functions that lead to each step; comprehensions and lambdas are parts of others."""
    ways: list[list[str]] = []
    descend, package = BoundModule.descend, str(Path(fedsweep_package.__path__[0]).resolve())

    def noted(*arguments: Any) -> Any:
        frame: FrameType | None = sys._getframe(1)
        names = ["descend"]
        while frame is not None:
            code = frame.f_code
            if str(Path(code.co_filename).resolve()).startswith(package) and not code.co_name.startswith("<"):
                names.append(code.co_name)
            frame = frame.f_back
        ways.append(names[::-1])
        return descend(*arguments)

    monkeypatch.setattr(BoundModule, "descend", noted)
    return ways


def test_a_quiet_run_prints_the_summary_alone_and_a_step_is_few_calls_away(
    config: Path, fedsweep: Command, ways: list[list[str]]
) -> None:
    code, out, err = fedsweep("run", config, "--out", "run", "--quiet")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 1 and out.startswith("finished: ")
    # Typer's group of commands is one of our own, which says how an interrupted command is given again.
    assert len(ways) == 2 * 2 * 2 and all(len(way) <= 13 + 1 and way[:2] == ["main", "invoke"] for way in ways), ways[0]


def test_run_without_out_makes_a_folder_of_its_name_below_runs(config: Path, fedsweep: Command) -> None:
    assert fedsweep("run", config, "-q", "--set", "name=mine", "--set", "training.rounds=1")[0] == 0
    (folder,) = Path("runs").iterdir()
    assert re.fullmatch(r"mine-\d{8}-\d{6}", folder.name)


def test_a_name_that_is_too_long_for_a_folder(config: Path, fedsweep: Command) -> None:
    long = "x" * 10_000
    for words in (["run", config, "--set", f"name={long}"], ["run", config, "--out", long], ["compare", long]):
        code, _, err = fedsweep(*words)
        assert code == 2 and "too long for a file's name" in err and len(err) < 500
    assert [*Path().iterdir()] == []


def test_the_last_of_two_settings_wins(config: Path, fedsweep: Command) -> None:
    settings = ["--set", "training.rounds=5", "--set", "training.rounds=1"]
    assert fedsweep("run", config, "-q", "--out", "run", *settings)[0] == 0
    assert json.loads(Path("run/result.json").read_text())["rounds"] == 1


def test_overwrite_replaces_the_run(config: Path, fedsweep: Command) -> None:
    words = ["run", config, "-q", "--out", "run", "--set", "training.rounds=1"]
    assert fedsweep(*words)[0] == 0
    assert fedsweep(*words, "--set", "seed=7")[0] == 2
    assert fedsweep(*words, "--set", "seed=7", "--overwrite")[0] == 0
    assert load_config("run/config.yaml").seed == 7


def test_a_taken_folder_is_refused_before_ray_is_started(
    config: Path, fedsweep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", config, "-q", "--out", "run", "--set", "training.rounds=1"]
    assert fedsweep(*words)[0] == 0
    monkeypatch.setattr(ray_start, "early_cluster", None)  # not callable: a start would be a crash
    code, _, err = fedsweep(*words, "--set", "runtime={backend: ray, client_actors: 2}")
    assert code == 2 and "--overwrite" in err


@pytest.mark.parametrize(
    ("setting", "waited"),
    [
        ("method={name: fedprox, mu: much}", []),
        ("scenario.partition={kind: classes, classes_per_client: 11}", ["waited"]),
    ],
)
def test_what_is_wrong_is_said_before_ray_ends(
    setting: str, waited: list[str], config: Path, fedsweep: Command, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """What needs no data even before it is there."""
    happened: list[str] = []

    @contextmanager
    def early_cluster(needs: object, folder: Path) -> Iterator[object]:
        assert needs is not None
        try:
            yield SimpleNamespace(wait=lambda: happened.append("waited"))
        finally:
            happened.append(capsys.readouterr().err)

    monkeypatch.setattr(ray_start, "early_cluster", early_cluster)
    settings = ["--set", "runtime={backend: ray, client_actors: 2}", "--set", setting]
    code, _, err = fedsweep("run", config, "-q", "--out", "run", *settings)
    assert (code, err) == (2, "")  # not said twice
    assert happened[:-1] == waited and happened[-1].startswith("error: ") and happened[-1].count("\n") == 1
    assert fedsweep("run", config, "-q", "--out", "run", *settings, "--debug")[0] == 2
    assert happened[-1].startswith("Traceback") and "\nerror: " in happened[-1]
    assert not Path("run").exists()


def test_run_that_stops_at_a_limit_names_it(config: Path, fedsweep: Command) -> None:
    code, out, _ = fedsweep("run", config, "-q", "--out", "run", "--set", "training.stop.target_accuracy=0.001")
    assert code == 0
    assert out.startswith("finished: 1 rounds (target_accuracy), ")


def test_summary_says_what_a_run_without_evaluation_has_not() -> None:
    result = {
        "status": "finished",
        "rounds": 3,
        "stopped_by": "rounds",
        "test_accuracy": None,
        "best_test_accuracy": None,
        "comm_ratio": None,
        "total_bytes": 2_500_000,
        "wall_time_s": 1.25,
    }
    text = summary(result, Path("/r"), opened_by="fedsweep compare /")
    assert text == "finished: 3 rounds, no accuracy, 2.5 MB sent, 1.2 s; in /r; compare: fedsweep compare /"


def test_dry_run_prints_a_loadable_configuration_with_a_forecast_and_writes_nothing(
    config: Path, fedsweep: Command
) -> None:
    code, out, err = fedsweep("run", config, "--dry-run", "--set", "method={name: fedprox, mu: 0.5}", "--out", "run")
    assert (code, err) == (0, "")
    assert list(Path().iterdir()) == []
    loaded = yaml12.parse(out, source="dry run")
    assert loaded["method"] == {"name": "fedprox", "mu": 0.5, "penalty": "half"}
    forecast = out[out.index("# forecast") :]
    assert all(line.startswith("#") for line in forecast.splitlines())
    # 2 rounds x 2 clients x 2 steps; models there and back: 2 x 2 x 2 x 4 bytes x 26122 values
    assert "local steps, all clients: 8" in forecast
    registered = 4 * load_config(config).scenario.clients
    assert f"{2 * 2 * 2 * 4 * 26122 + registered:,} (communication ratio 0.5" in forecast
    assert f"of them before round 1: {registered:,}" in forecast
    assert "simulated time" in forecast and "memory per actor" in forecast


def test_dry_run_of_more_than_any_machine_can_do_is_a_forecast(config: Path, fedsweep: Command) -> None:
    endless = ["--set", "training.local_steps=null", "--set", f"training.local_epochs=1{'0' * 30}"]
    code, out, err = fedsweep("run", config, "--dry-run", *endless)
    assert (code, err) == (0, "") and "local steps, all clients: 143,999," in out  # 4 x 36 x 10^30


def test_dry_run_forecasts_what_the_run_then_costs(config: Path, fedsweep: Command) -> None:
    setting = "method={name: dynamicfl, high_interval: 1, low_interval: 2}"
    _, out, _ = fedsweep("run", config, "--dry-run", "--set", setting, "--set", "training.local_steps=6")
    assert fedsweep("run", config, "-q", "--out", "run", "--set", setting, "--set", "training.local_steps=6")[0] == 0
    total = json.loads(Path("run/result.json").read_text())["total_bytes"]
    assert f"bytes sent, both ways: {total:,} " in out


def test_diverged_client_is_exit_1_and_named(config: Path, fedsweep: Command) -> None:
    code, _, err = fedsweep("run", config, "--out", "run", "--set", "training.optimizer.lr=1e30", "-q")
    assert code == 1
    assert re.fullmatch(r"error: client \d failed in round 1, local step 2: its loss is not finite; .*\n", err)
    assert json.loads(Path("run/result.json").read_text())["status"] == "failed"


def test_resume_of_a_finished_run_says_so(finished: Path, fedsweep: Command) -> None:
    before = sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*"))
    code, out, err = fedsweep("run", "--resume", finished)
    assert (code, err) == (0, "")
    untracked = "nothing is tracked (tracking.uri is none)"
    assert (
        out
        == f"{finished} has finished already; there is nothing to go on with (--rounds N gives it more); {untracked}\n"
    )
    assert sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*")) == before


@pytest.mark.slow
def test_resume_draws_the_pictures_of_a_run_that_was_killed_at_its_end(finished: Path, fedsweep: Command) -> None:
    shutil.copytree(finished, "run")
    shutil.rmtree("run/pictures", ignore_errors=True)
    Path("run/pictures").mkdir()
    Path("run/pictures/.partition.png.99999999.tmp").write_bytes(b"half")
    result = json.loads(Path("run/result.json").read_text())
    del result["timing"]  # which is written last
    Path("run/result.json").write_text(json.dumps(result))
    assert "has finished already" in fedsweep("run", "--resume", "run")[1]
    assert Path("run/pictures/partition.png").is_file() and not [*Path("run").rglob(".*.tmp")]


def test_resume_without_a_checkpoint_starts_anew_from_the_configuration(finished: Path, fedsweep: Command) -> None:
    Path("run").mkdir()
    shutil.copy(finished / "config.yaml", "run/config.yaml")
    code, out, _ = fedsweep("run", "--resume", "run")
    assert code == 0
    assert "starting anew" in out and "finished: 2 rounds" in out
    assert sha256("run") == sha256(finished)


def sha256(folder: str | Path) -> str:
    result = json.loads((Path(folder) / "result.json").read_text())
    return str(result["model_sha256"])


# That each of the signals is heard is in terminal/test_interrupts.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "number"),
    [
        ("local", signal.SIGTERM),
        pytest.param("local", signal.SIGHUP, marks=pytest.mark.exhaustive),
        pytest.param("local", signal.SIGUSR1, marks=pytest.mark.exhaustive),
        pytest.param("ray", signal.SIGTERM, marks=pytest.mark.ray),
    ],
)
def test_run_that_gets_a_signal_goes_on_to_the_same_model(
    backend: str, number: int, config: Path, fedsweep: Command
) -> None:
    settings = ["--set", "training.rounds=6", "--set", "checkpoint.every=1000"]
    assert fedsweep("run", config, "-q", "--out", "whole", *settings)[0] == 0
    command = [sys.executable, "-m", "fedsweep", "run", str(config), "--out", "broken", *settings]
    command += ["--set", f"runtime.backend={backend}", "--set", "runtime.client_actors=2"]
    environment = waiting(Path.cwd(), after_round=3)
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        assert any(line.startswith("round 3/6") for line in process.stdout)
        process.send_signal(number)
        err = process.stderr.read()
    assert process.returncode == 130
    assert re.fullmatch(r"interrupted; a checkpoint is written, .* run --resume .*/broken\n", err)
    killed = json.loads(Path("broken/result.json").read_text())
    assert killed["status"] == "killed" and 3 <= killed["rounds"] < 6
    assert pq.read_table("broken/rounds.parquet").num_rows == killed["rounds"]
    if backend == "ray":  # the same comes out where it goes on
        text = Path("broken/config.yaml").read_text()
        Path("broken/config.yaml").write_text(text.replace("backend: ray", "backend: local"))
    code, out, _ = fedsweep("run", "--resume", "broken")
    assert code == 0 and f"going on after round {killed['rounds']}" in out
    assert sha256("broken") == sha256("whole")


def test_an_interrupt_before_another_run_is_replaced_is_not_of_that_run(
    config: Path, tmp_path: Path, fedsweep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedsweep.commands.running.one_run._planned", interrupted)
    (tmp_path / "run" / "checkpoints" / "00000010").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("name: earlier\n")
    code, _, err = fedsweep("run", config, "--out", tmp_path / "run", "--overwrite")
    assert (code, err) == (130, "interrupted before the run began; nothing was written\n")


@pytest.mark.parametrize(
    "words", ["run --resume S", "run C --out S", "run C --out S --overwrite", "verify S", "evaluate S", "sync S"]
)
def test_a_sweeps_folder_is_taken_for_no_run(words: str, config: Path, tmp_path: Path, fedsweep: Command) -> None:
    folder = tmp_path / "s"
    folder.mkdir()
    shutil.copy(config, folder / "config.yaml")
    (folder / "sweep.json").write_text("{}")
    code, _, err = fedsweep(*(str({"S": folder, "C": config}.get(word, word)) for word in words.split()))
    assert code == 2 and err.startswith(f"error: {folder} is a sweep's") and err.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "sweep.json"]


def test_seeds_are_compared_by_what_the_configurations_own_sweep_goes_by(tmp_path: Path, fedsweep: Command) -> None:
    text = "scenario: {dataset: diabetes, clients: 4, partition: {kind: iid}}\ntraining: {rounds: 2}\n"
    words = ("--seeds", "0-1", "--dry-run", "--out", tmp_path / "out")
    (tmp_path / "d.yaml").write_text(text)
    assert (
        "note: no trial has test_accuracy, since task regression classifies nothing"
        in fedsweep("run", tmp_path / "d.yaml", *words)[2]
    )
    sweep = "sweep: {metric: extra/rmse, mode: min, space: {method.mu: {grid: [1]}}}\n"
    (tmp_path / "d.yaml").write_text(text + sweep)
    code, out, err = fedsweep("run", tmp_path / "d.yaml", *words)
    assert (code, err) == (0, "") and "\n2 trials, " in out
