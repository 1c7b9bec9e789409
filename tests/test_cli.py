from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from fedsweep import cli
from fedsweep.cli import main
from fedsweep.commands import catalog, doctor, verify
from fedsweep.commands.interrupts import interrupts, is_interrupted
from fedsweep.commands.run import summary
from fedsweep.config import yaml12
from fedsweep.config.load import load_config
from fedsweep.errors import RunError

COMMANDS = ("run", "compare", "verify", "partition", "select", "list", "show", "ui", "doctor")

TINY = """
# Two rounds of nearly nothing
name: tiny
scenario: {clients: 4, partition: {kind: iid}}
training: {rounds: 2, cohort_size: 2, local_steps: 2}
runtime: {backend: local}
tracking: {uri: none}
"""

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _own_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.fixture
def fedsweep(capsys: pytest.CaptureFixture[str]) -> Command:
    """Calls the command in this process; gives exit code, standard output and standard error."""

    def call(*words: str | Path) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "tiny.yaml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished tiny run."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny.yaml").write_text(TINY)
    assert main(["run", str(folder / "tiny.yaml"), "--out", str(folder / "run"), "--quiet"]) == 0
    return folder / "run"


# -- help and start-up -------------------------------------------------------------------------------------------


def test_help_names_every_command_and_shows_examples(fedsweep: Command) -> None:
    code, out, err = fedsweep("--help")
    assert (code, err) == (0, "")
    assert [name for name in COMMANDS if not re.search(rf"│ {name}\s", out)] == []
    assert "fedsweep run quickstart/dynamicfl" in out


def test_no_words_at_all_is_help(fedsweep: Command) -> None:
    assert fedsweep() == fedsweep("--help")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_has_an_example(command: str, fedsweep: Command) -> None:
    code, out, err = fedsweep(command, "--help")
    assert (code, err) == (0, "")
    assert f"fedsweep {command}" in out[out.index("Examples") :]


def test_help_loads_no_heavy_library() -> None:
    code = """
        import sys
        from fedsweep.cli import main
        main(["run", "--help"])
        heavy = {"torch", "numpy", "yaml", "ray", "mlflow", "matplotlib", "pyarrow"}
        print(*sorted(heavy & {*sys.modules}), file=sys.stderr)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""


def test_version(fedsweep: Command) -> None:
    assert fedsweep("--version") == (0, "fedsweep 0.1.0\n", "")


# -- run ---------------------------------------------------------------------------------------------------------


def test_run_prints_plain_lines_and_last_a_summary_with_folder_and_command(config: Path, fedsweep: Command) -> None:
    code, out, err = fedsweep("run", config, "--out", "here/run")
    assert (code, err) == (0, "")
    folder = Path("here/run").absolute()
    lines = out.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["round", "1/2"], ["round", "2/2"]]
    assert len(lines) == 4 and lines[3].startswith("finished: 2 rounds, accuracy 0.")
    assert f"in {folder}; compare: " in lines[3] and lines[3].endswith(f"compare {folder.parent}")
    assert "\x1b" not in out
    assert (folder / "result.json").is_file()
    assert [path.name for path in Path().iterdir()] == ["here"]


def test_quiet_run_prints_the_summary_alone(config: Path, fedsweep: Command) -> None:
    code, out, err = fedsweep("run", config, "--out", "run", "--quiet")
    assert (code, err) == (0, "")
    assert len(out.splitlines()) == 1 and out.startswith("finished: ")


def test_run_without_out_makes_a_folder_of_its_name_below_runs(config: Path, fedsweep: Command) -> None:
    assert fedsweep("run", config, "-q", "--set", "name=mine", "--set", "training.rounds=1")[0] == 0
    (folder,) = Path("runs").iterdir()
    assert re.fullmatch(r"mine-\d{8}-\d{6}", folder.name)


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
    assert text == "finished: 3 rounds, not evaluated, 2.5 MB sent, 1.2 s; in /r; compare: fedsweep compare /"


def test_dry_run_prints_a_loadable_configuration_with_a_forecast_and_writes_nothing(
    config: Path, fedsweep: Command
) -> None:
    code, out, err = fedsweep("run", config, "--dry-run", "--set", "method={name: fedprox, mu: 0.5}", "--out", "run")
    assert (code, err) == (0, "")
    assert list(Path().iterdir()) == []
    loaded = yaml12.parse(out, source="dry run")
    assert loaded["method"] == {"name": "fedprox", "mu": 0.5}
    forecast = out[out.index("# forecast") :]
    assert all(line.startswith("#") for line in forecast.splitlines())
    # 2 rounds x 2 clients x 2 steps; models there and back: 2 x 2 x 2 x 4 bytes x 26122 values
    assert "local steps, all clients: 8" in forecast
    assert f"{2 * 2 * 2 * 4 * 26122:,} (communication ratio 0.5" in forecast
    assert "simulated time" in forecast and "memory per actor" in forecast


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
    assert out == f"{finished} has finished already; there is nothing to go on with\n"
    assert sorted((path, path.stat().st_mtime_ns) for path in finished.rglob("*")) == before


def test_resume_without_a_checkpoint_starts_anew_from_the_configuration(finished: Path, fedsweep: Command) -> None:
    Path("run").mkdir()
    shutil.copy(finished / "config.yaml", "run/config.yaml")
    code, out, _ = fedsweep("run", "--resume", "run")
    assert code == 0
    assert "starting anew" in out and "finished: 2 rounds" in out
    assert sha256("run") == sha256(finished)


def sha256(folder: str | Path) -> str:
    result: dict[str, Any] = json.loads((Path(folder) / "result.json").read_text())
    return str(result["model_sha256"])


def test_interrupted_run_goes_on_to_the_same_model(config: Path, fedsweep: Command) -> None:
    settings = ["--set", "training.rounds=60", "--set", "checkpoint.every=1000"]
    assert fedsweep("run", config, "-q", "--out", "whole", *settings)[0] == 0
    command = [sys.executable, "-m", "fedsweep", "run", str(config), "--out", "broken", *settings]
    # The rounds take milliseconds; slowed down, so that the signal comes in the middle.
    Path("sitecustomize.py").write_text(SLOW)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([".", os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment) as process:
        assert process.stdout is not None and process.stderr is not None
        assert any(line.startswith("round  3/60") for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        err = process.stderr.read()
    assert process.returncode == 130
    assert re.fullmatch(r"interrupted; a checkpoint is written, .* run --resume .*/broken\n", err)
    killed = json.loads(Path("broken/result.json").read_text())
    assert killed["status"] == "killed" and 3 <= killed["rounds"] < 60
    assert pq.read_table("broken/rounds.parquet").num_rows == killed["rounds"]
    code, out, _ = fedsweep("run", "--resume", "broken")
    assert code == 0 and f"going on after round {killed['rounds']}" in out
    assert sha256("broken") == sha256("whole")


SLOW = """
import time
import fedsweep.tracking.progress as progress

shows_round = progress.PlainProgress.shows_round

def slowly(self, standing, row):
    shows_round(self, standing, row)
    time.sleep(0.1)

progress.PlainProgress.shows_round = slowly
"""


# -- signals and errors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_a_keyboard_interrupt_and_handlers_are_put_back(number: int) -> None:
    before = signal.getsignal(number)
    with interrupts():
        assert not is_interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        assert is_interrupted()
    assert signal.getsignal(number) is before
    assert not is_interrupted()


def test_a_second_signal_ends_the_process_at_once() -> None:
    code = """
        import os, signal, time
        from fedsweep.commands.interrupts import interrupts
        with interrupts():
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                print("first", flush=True)
                os.kill(os.getpid(), signal.SIGINT)
                print("survived", flush=True)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "first\n")


def test_a_signal_that_the_parent_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            assert not is_interrupted()
    finally:
        signal.signal(signal.SIGINT, before)


def broken(error: BaseException) -> Callable[[str], list[catalog.Named]]:
    def raises(kind: str) -> list[catalog.Named]:
        raise error

    return raises


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyError("x"), 1, "error: KeyError: 'x'; this is a bug: --debug shows the traceback\n"),
        (RunError("the run\n  failed"), 1, "error: the run failed\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exceptions_become_one_line_and_an_exit_code(
    error: BaseException, code: int, line: str, fedsweep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "_of_kind", broken(error))
    assert fedsweep("list", "methods") == (code, "", line)


@pytest.mark.parametrize("words", [("--debug", "list", "methods"), ("list", "methods", "--debug")])
def test_debug_shows_the_traceback_from_anywhere_on_the_line(
    words: tuple[str, ...], fedsweep: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "_of_kind", broken(KeyError("x")))
    code, _, err = fedsweep(*words)
    assert code == 1
    assert err.startswith("Traceback") and "in raises" in err and err.splitlines()[-1].startswith("error: KeyError")


def test_reader_that_goes_away_is_no_traceback() -> None:
    command = [sys.executable, "-m", "fedsweep", "show", "--json-schema"]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


# -- verify ------------------------------------------------------------------------------------------------------


def test_verify_of_a_repeatable_run_is_exit_0(finished: Path, fedsweep: Command) -> None:
    before = sorted(finished.rglob("*"))
    code, out, err = fedsweep("verify", finished, "-q")
    assert (code, err) == (0, "")
    assert out == f"identical: 2 rounds, model {sha256(finished)}\n"
    assert sorted(finished.rglob("*")) == before and list(Path().iterdir()) == []


def test_verify_says_what_differs(finished: Path, fedsweep: Command) -> None:
    shutil.copytree(finished, "run")
    text = Path("run/config.yaml").read_text()
    Path("run/config.yaml").write_text(text.replace("lr: 0.05", "lr: 0.06"))
    code, out, _ = fedsweep("verify", "run", "-q")
    assert code == 1
    assert f"model_sha256: {sha256(finished)} there, " in out
    assert "lr: 0.05 there, 0.06 here, first in row 1, 2 rows in all" in out
    assert not re.search(r"^(timestamp_ms|wall_time_s|eval_time_s|server_time_s|cohort|bytes_up):", out, re.MULTILINE)


def test_verify_needs_a_finished_run(finished: Path, fedsweep: Command) -> None:
    shutil.copytree(finished, "run")
    Path("run/result.json").write_text('{"status": "killed"}')
    code, _, err = fedsweep("verify", "run")
    assert code == 2 and "this one is killed; finish it with fedsweep run --resume" in err


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (float("nan"), float("nan"), True),
        ([1, float("nan")], [1, float("nan")], True),
        ([1, 2], [1], False),
        (None, 0.0, False),
        (0.1 + 0.2, 0.3, False),
    ],
)
def test_cells_are_compared_bit_by_bit_and_nan_equals_nan(one: Any, other: Any, same: bool) -> None:
    assert verify._same(one, other) is same


# -- tables ------------------------------------------------------------------------------------------------------


def test_compare_lists_runs_and_draws(finished: Path, fedsweep: Command) -> None:
    code, out, err = fedsweep("compare", finished.parent, "--plot", "picture.png")
    assert (code, err) == (0, "")
    header, row, last = out.splitlines()
    assert header.split()[:4] == ["run", "method", "acc", "best"] and row.split()[:2] == ["tiny", "fedavg"]
    assert last == f"picture: {Path('picture.png').absolute()}"
    assert Path("picture.png").read_bytes().startswith(b"\x89PNG")


def test_partition_counts_every_sample_once(config: Path, fedsweep: Command) -> None:
    code, out, err = fedsweep("partition", config, "--plot", "split.png")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["client", "samples", *(f"c{label}" for label in range(10)), "KL", "JS"]
    rows = [[int(cell) for cell in line.split()[1:12]] for line in lines[1:5]]
    assert all(sum(row[1:]) == row[0] for row in rows)
    assert [int(cell) for cell in lines[5].split()[1:]] == [sum(column) for column in zip(*rows, strict=True)]
    assert lines[6].startswith("digits, iid, seed 0: 4 clients, 359 to 360 samples (mean 359.2), 10 to 10 classes")
    assert Path("split.png").is_file()


def test_partition_of_many_clients_shows_the_first_and_the_last(config: Path, fedsweep: Command) -> None:
    _, out, _ = fedsweep("partition", config, "--set", "scenario.clients=100")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:52]] == [
        *map(str, range(25)),
        "...",
        *map(str, range(75, 100)),
    ]
    assert "(50 more)" in lines[26]


def test_partition_of_ones_own_from_the_working_directory(config: Path, fedsweep: Command) -> None:
    code = """
        from dataclasses import dataclass
        import numpy as np
        from fedsweep.world.partitions import Partition

        @dataclass(frozen=True, kw_only=True)
        class Blocks(Partition):
            def split(self, labels, num_clients, stream, *, num_classes, writers=None):
                return np.array_split(np.arange(len(labels)), num_clients)
    """
    Path("blocks_of_my_own.py").write_text(textwrap.dedent(code))
    code_, out, _ = fedsweep("partition", config, "--set", "scenario.partition={kind: 'blocks_of_my_own:Blocks'}")
    assert code_ == 0 and "digits, blocks_of_my_own:Blocks, seed 0: 4 clients" in out


def test_select_prints_one_line_of_json(fedsweep: Command) -> None:
    Path("counts.csv").write_text("8,0\n0,8\n4,4\n7,1\n")
    words = ["select", "--counts", "counts.csv", "--method", "exhaustive", "--size", "2", "--json"]
    code, out, err = fedsweep(*words)
    assert (code, err) == (0, "") and len(out.splitlines()) == 1
    found = json.loads(out)
    # The population is (19, 13); of the pairs, rows 2 and 3 hold (11, 5), rows 0 and 1 (8, 8), rows 1 and 3 (7, 9),
    # rows 0 and 2 (12, 4), rows 1 and 2 (4, 12), rows 0 and 3 (15, 1): the shares nearest 0.594 are 0.5 and 0.6875.
    assert found["clients"] == [0, 1] and set(found) == {"clients", "kl_divergence", "seconds"}
    assert found["kl_divergence"] == pytest.approx(0.5 * math.log(16 / 19) + 0.5 * math.log(16 / 13), rel=1e-9)


def test_select_for_people_obeys_eligible_and_seed(fedsweep: Command) -> None:
    Path("counts.csv").write_text("\n".join(["1,2"] * 8))
    words = ["select", "--counts", "counts.csv", "--method", "random", "--max-size", "2", "--eligible", "1, 3,5"]
    code, out, _ = fedsweep(*words, "--seed", "4")
    assert code == 0
    clients = [int(client) for client in out.splitlines()[0].removeprefix("clients: ").split(",")]
    assert len(clients) == 2 and set(clients) <= {1, 3, 5}
    assert fedsweep(*words, "--seed", "4")[1].splitlines()[:3] == out.splitlines()[:3]


# -- what can be named -------------------------------------------------------------------------------------------


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
    assert out.startswith("method fedprox: FedAvg with a pull") and "source: Li et al." in out
    (line,) = [line for line in out.splitlines() if line.startswith("mu ")]
    assert line.split()[:2] == ["mu", "float"] and len(line.split()) > 5


@pytest.mark.parametrize("kind", list(catalog.KINDS))
def test_everything_that_is_listed_can_be_shown(kind: str, fedsweep: Command) -> None:
    for entry in catalog.KINDS[kind]():
        code, out, err = fedsweep("show", entry.name)
        assert (code, err) == (0, "") and f"{kind.removesuffix('s')} {entry.name}: " in out


def test_show_of_a_preset_is_its_file(fedsweep: Command) -> None:
    _, out, _ = fedsweep("show", "quickstart/dynamicfl")
    assert "high_interval: a" in out


def test_json_schema_has_every_section(fedsweep: Command) -> None:
    code, out, _ = fedsweep("show", "--json-schema")
    assert code == 0
    assert set(json.loads(out)["properties"]) >= {"scenario", "method", "training", "runtime", "tracking"}


# -- this machine ------------------------------------------------------------------------------------------------


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, list[str], dict[str, str]]]]:
    """What the process would have been replaced by."""
    calls: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execvpe", lambda *call: calls.append(call))
    yield calls


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_ui_opens_the_store_below_runs(
    replaced: list[tuple[str, list[str], dict[str, str]]], fedsweep: Command, tmp_path: Path
) -> None:
    Path("runs").mkdir()
    Path("runs/mlflow.db").touch()
    Path("mlflow.db").touch()
    port = free_port()
    code, out, err = fedsweep("ui", "--port", str(port))
    assert (code, err) == (0, "") and f"http://127.0.0.1:{port}" in out
    ((_, command, _),) = replaced
    assert f"sqlite:///{tmp_path}/runs/mlflow.db" in command and "127.0.0.1" in command


def test_ui_falls_back_to_the_store_in_this_folder(
    replaced: list[tuple[str, list[str], dict[str, str]]], fedsweep: Command, tmp_path: Path
) -> None:
    Path("mlflow.db").touch()
    assert fedsweep("ui", "--port", str(free_port()))[0] == 0
    assert f"sqlite:///{tmp_path}/mlflow.db" in replaced[0][1]


def test_ui_refuses_a_port_in_use(fedsweep: Command) -> None:
    import socket

    Path("mlflow.db").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, err = fedsweep("ui", "--port", str(taken.getsockname()[1]))
    assert code == 2 and "in use" in err and "--port" in err


def test_doctor_names_the_problem_and_is_exit_1(fedsweep: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CHECKS", {"Python": doctor._python, "juggler": doctor._imported("no_such_juggler")})
    code, out, err = fedsweep("doctor")
    assert (code, err) == (1, "")
    first, second, last = out.splitlines()
    assert first.startswith("ok       Python: 3.")
    assert second.startswith("PROBLEM  juggler: cannot be imported") and "no_such_juggler" in second
    assert last.startswith("1 problem:")


def test_doctor_plays_the_main_job() -> None:
    began = time.perf_counter()
    assert doctor._main_job().startswith("2 tiny rounds in ")
    assert time.perf_counter() - began < 60


def test_doctor_says_why_the_main_job_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_TINY", {"scenario": {"dataset": "digots"}})
    with pytest.raises(doctor.Problem, match="unknown dataset 'digots'; did you mean 'digits'"):
        doctor._main_job()


def test_explain_keeps_the_exit_codes_of_the_interface() -> None:
    from fedsweep.errors import ClientJobError, ConfigError, DataError, OutputError, ResourceError

    wrong = [cli.explain(kind("x"))[1] for kind in (ConfigError, DataError, OutputError, ResourceError)]
    failed = [cli.explain(RunError("x"))[1], cli.explain(ClientJobError(client=1, round=2, step=3, reason="x"))[1]]
    assert (wrong, failed) == ([2, 2, 2, 2], [1, 1])
