"""Folders with an address: begun, gone on with elsewhere, read, refused."""

from __future__ import annotations

import contextlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import fedsweep
from fedsweep.cli import main
from fedsweep.errors import ConfigError, OutputError, ResourceError, RunError
from fedsweep.runs.background import BackgroundCall
from fedsweep.runs.mirror import Mirror
from fedsweep.runs.places import place_name, stand_for
from fedsweep.runs.remote import Remote
from fedsweep.runs.remote_folder import MARK, read_from, worked_on
from fedsweep.runs.run_folder import MEASURED, RunFolder
from fedsweep.sweeps.sweep_folder import SweepFolder

TINY = """
name: tiny
scenario: {clients: 4, partition: {kind: iid}}
training: {rounds: 4, cohort_size: 2, local_steps: 1}
checkpoint: {every: 1}
tracking: {uri: none}
"""


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a folder elsewhere; this process stands in a folder of its own."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return f"file://{tmp_path}/there/study"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_run_with_an_address_lies_there_and_goes_on_from_there_on_another_machine(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("tiny.yaml").write_text(TINY)
    assert main(["run", "tiny.yaml", "--set", "training.rounds=2", "--out", address, "-q"]) == 0
    assert f"; in {address}; compare: " in (line := capsys.readouterr().out) and line.endswith(f" compare {address}\n")
    there = tmp_path / "there" / "study"
    assert RunFolder(there).read_result()["rounds"] == 2
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["run", "--resume", address, "--rounds", "4", "-q"]) == 0
    assert main(["run", str(tmp_path / "here" / "tiny.yaml"), "--out", "alone", "-q"]) == 0
    alone = RunFolder(Path("alone")).read_result()["model_sha256"]
    assert RunFolder(there).read_result()["model_sha256"] == alone
    capsys.readouterr()
    assert main(["compare", address]) == 0
    assert "finished" in capsys.readouterr().out


@pytest.mark.slow
def test_whatever_reads_a_finished_run_reads_one_at_an_address(
    address: str, tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("tiny.yaml").write_text(TINY)
    result = fedsweep.run("tiny.yaml", out=address)
    with pytest.raises(OutputError, match="is in use already"):
        fedsweep.run("tiny.yaml", out=address)
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    bits, before = result.summary["model_sha256"], names(tmp_path / "there")
    loaded = fedsweep.load(address)
    assert isinstance(loaded, fedsweep.Result) and loaded.summary["model_sha256"] == bits
    assert (again := loaded.evaluate()).test_accuracy == result.summary["test_accuracy"]
    assert again.tree()["model"] == f"{address}/model.safetensors"
    for one, other in zip(fedsweep.load_model(address).parameters(), result.model.parameters(), strict=True):
        assert one.equal(other)
    assert "finished" in fedsweep.compare(address) and fedsweep.report(address, out="page.html").stat().st_size > 10_000
    for words in (["evaluate", address], ["verify", address, "-q"], ["replay", address]):
        assert main(words) == 0, words
    said = capsys.readouterr().out
    assert f"identical: 4 rounds, model {bits}" in said and f"model {address}/model.safetensors" in said
    assert names(tmp_path / "there") == before and [path.name for path in elsewhere.iterdir()] == ["page.html"]
    for answer in ("MLflow has everything of it now", "MLflow has everything of it"):
        assert main(["sync", address, "--uri", f"sqlite:///{store}"]) == 0
        assert capsys.readouterr().out == f"{address}: {answer}\n"
    assert names(tmp_path / "there") == before | {"mlflow.json"}
    assert main(["sync", address, "--follow"]) == 2


def test_a_place_in_use_is_not_written_to_without_being_asked_to(address: str, tmp_path: Path) -> None:
    with worked_on(address, going_on=False) as folder:
        (folder / "config.yaml").write_text("x")
    with pytest.raises(OutputError, match="is in use already"), worked_on(address, going_on=False):
        pass
    with worked_on(address, going_on=True) as again:
        assert again == folder and (again / "config.yaml").read_text() == "x"
    # The folder knows where it belongs.
    with worked_on(folder, going_on=True):
        (folder / "more").write_text("y")
    assert (tmp_path / "there/study/more").read_text() == "y"


def test_where_nothing_was_begun_nothing_is_left(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wrong"), worked_on(address, going_on=False) as folder:
        raise ConfigError("wrong")
    assert not folder.exists() and names(tmp_path / "there") == set()


def begin(address: str) -> Path:
    """Begin a run at the address; return the folder here."""
    with worked_on(address, going_on=False) as folder:
        (folder / "checkpoints").mkdir()
        for name in ("config.yaml", "rounds.parquet", "checkpoints/round-000001.json"):
            (folder / name).write_text("x")
    return Path.cwd() / folder


def test_an_address_above_runs_leaves_them_alone(address: str, tmp_path: Path) -> None:
    begin(f"{address}/first")
    before = names(tmp_path / "there")
    with pytest.raises(OutputError, match="no run"), worked_on(address, going_on=True) as folder:
        Remote.at(address).mirror(folder).push()
        raise OutputError("no run")
    assert names(tmp_path / "there") == before
    with worked_on(address, going_on=False) as folder:
        (folder / "config.yaml").write_text("new")
    assert names(tmp_path / "there/study/first") == before


def test_no_sweep_begins_above_runs_and_none_over_a_table(address: str, tmp_path: Path) -> None:
    begin(f"{address}/first")
    (tmp_path / "there/table").mkdir()
    (tmp_path / "there/table" / MEASURED).write_text("{}")
    before = names(tmp_path / "there")
    for going_on in (False, True):
        with (
            pytest.raises(OutputError, match=r"in use already \(first\)"),
            worked_on(address, going_on=going_on) as folder,
        ):
            SweepFolder(folder).check_free(overwrite=going_on)
    table = f"file://{tmp_path}/there/table"
    with pytest.raises(OutputError, match="in use already"), worked_on(table, going_on=False):
        pass
    with worked_on(table, going_on=True) as folder:
        assert (folder / MEASURED).is_file()
    assert names(tmp_path / "there") == before


def test_a_run_that_came_to_the_address_otherwise_is_brought(address: str, tmp_path: Path) -> None:
    folder = begin(address)
    there = tmp_path / "there"
    (there / "study" / MARK).unlink()
    folder.rename(tmp_path / "lost")
    with worked_on(address, going_on=True) as again:
        assert names(again) >= {"config.yaml", "rounds.parquet", "round-000001.json"}
    assert names(there) == {"config.yaml", "rounds.parquet", "round-000001.json", MARK}


@pytest.mark.parametrize("is_marked", [True, False])
def test_what_breaks_off_while_it_is_brought_is_brought_again(
    is_marked: bool, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(address)
    if not is_marked:
        (tmp_path / "there/study" / MARK).unlink()
    before = names(tmp_path / "there")
    monkeypatch.chdir(tmp_path)
    fetch, brought = Mirror._fetch, list[str]()

    def breaking(self: Mirror, name: str) -> None:
        if len(brought) == 2:
            raise OSError("connection reset")
        brought.append(name)
        fetch(self, name)

    with monkeypatch.context() as patch, pytest.raises(ResourceError, match="connection reset"):
        patch.setattr(Mirror, "_fetch", breaking)
        with worked_on(address, going_on=True):
            pass
    with worked_on(address, going_on=True) as folder:
        assert names(folder) >= before
    assert names(tmp_path / "there") == before | {MARK}


def test_work_here_outlives_a_lost_answer_of_the_store(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = begin(address)
    (folder / "rounds.parquet").write_text("newer")
    write = Remote.write

    def losing(self: Remote, name: str, data: bytes) -> None:
        write(self, name, data)
        raise ResourceError("no answer")

    with monkeypatch.context() as patch, pytest.raises(ResourceError, match="no answer"):
        patch.setattr(Remote, "write", losing)
        with worked_on(folder, going_on=True):
            pass
    with worked_on(folder, going_on=True):
        assert (folder / "rounds.parquet").read_text() == "newer"


def test_a_damaged_mark_replaces_nothing(address: str, tmp_path: Path) -> None:
    folder, there = begin(address), tmp_path / "there/study"
    (folder / "rounds.parquet").write_text("newer")
    (there / MARK).write_text("{")
    with pytest.raises(OutputError, match="damaged"), worked_on(address, going_on=True):
        pass
    (there / MARK).unlink()
    with worked_on(address, going_on=True):
        pass
    assert (there / "rounds.parquet").read_text() == "newer"


def test_a_trial_run_looks_at_what_the_address_has_and_leaves_nothing(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = begin(address)
    before = names(tmp_path / "there")
    with worked_on(address, going_on=True, dry=True) as same:
        assert same.absolute() == folder
    monkeypatch.chdir(tmp_path / "there")
    with worked_on(address, going_on=True, dry=True) as brought:
        assert names(brought) == before - {MARK}
    with pytest.raises(OutputError, match="is in use already"), worked_on(address, going_on=False, dry=True):
        pass
    with worked_on(f"{address}-2", going_on=False, dry=True) as new:
        assert not new.exists()
    assert names(tmp_path / "there") == before and not brought.exists()
    with worked_on(address, going_on=True) as elsewhere:
        (elsewhere / "result.json").touch()
    monkeypatch.chdir(folder.parents[1])
    with worked_on(address, going_on=True, dry=True) as newer:
        assert newer != folder and (newer / "result.json").exists()


def test_a_sweep_takes_runs_over_from_an_address(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("sweep.yaml").write_text(f"{TINY}sweep: {{space: {{seed: {{grid: [0, 1]}}}}}}")
    begin(f"{address}/first")
    assert main(["sweep", "sweep.yaml", "--out", "s", "--dry-run", "--reuse", address]) == 0
    assert "0 of 2 trials to run have finished there" in capsys.readouterr().err


def test_who_was_overtaken_copies_no_more_and_keeps_its_own_work(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        pytest.raises(RunError, match=r"another process writes there now.*to keep what it has"),
        worked_on(address, going_on=False) as first,
    ):
        (first / "config.yaml").write_text("old")
        own = first.absolute()
        monkeypatch.chdir(tmp_path)
        with worked_on(address, going_on=True) as second:
            (second / "config.yaml").write_text("new")
        monkeypatch.chdir(tmp_path / "here")
    assert (tmp_path / "there/study/config.yaml").read_text() == "new"
    with pytest.raises(OutputError, match=f"another process has written {address}"), worked_on(own, going_on=True):
        pass
    assert (own / "config.yaml").read_text() == "old"
    (tmp_path / "there/study" / MARK).unlink()
    with worked_on(own, going_on=True):
        pass
    assert (tmp_path / "there/study/config.yaml").read_text() == "old"


def test_who_begins_nothing_takes_no_address_away(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as other:
        with pytest.raises(ConfigError, match="wrong"), worked_on(address, going_on=False):
            monkeypatch.chdir(tmp_path)
            folder = other.enter_context(worked_on(address, going_on=True))
            monkeypatch.chdir(tmp_path / "here")
            raise ConfigError("wrong")
        (tmp_path / folder / "config.yaml").write_text("x")
        monkeypatch.chdir(tmp_path)
    assert names(tmp_path / "there") == {"config.yaml", MARK}


def test_who_comes_second_is_refused_before_the_first_has_copied_anything(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with worked_on(address, going_on=False) as folder:
        folder = folder.absolute()
        monkeypatch.chdir(tmp_path)
        way_on = "wait for whoever has just begun there, replace it with --overwrite"
        with pytest.raises(OutputError, match=f"is in use already .*; {way_on}"), worked_on(address, going_on=False):
            pass
        monkeypatch.chdir(tmp_path / "here")
        (folder / "config.yaml").write_text("x")
    assert names(tmp_path / "there") == {"config.yaml", MARK}
    # A killed one leaves no more than its mark.
    for path in (folder, tmp_path / "there/study"):
        (path / "config.yaml").unlink()
    with worked_on(address, going_on=False):
        pass


def test_a_folder_that_is_gone_takes_nothing_from_its_copy(address: str, tmp_path: Path) -> None:
    begin(address)
    before = names(tmp_path / "there")
    with pytest.raises(RunError, match=f"is gone.*{address}"), worked_on(address, going_on=True) as folder:
        shutil.rmtree(folder)
    assert names(tmp_path / "there") == before
    with worked_on(address, going_on=True) as again:
        assert names(again) >= before


def test_a_mark_that_is_gone_is_nobody_elses_work(address: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"{MARK} is gone.*--resume"), worked_on(address, going_on=False) as folder:
        (folder / "config.yaml").write_text("x")
        (tmp_path / "there/study" / MARK).unlink()
    with worked_on(folder, going_on=True):
        pass
    assert names(tmp_path / "there") == {"config.yaml", MARK}


def test_who_is_refused_at_the_folder_takes_no_address_away(address: str, tmp_path: Path) -> None:
    def take() -> None:
        with worked_on(address, going_on=True):
            raise AssertionError("two write the folder")

    with worked_on(address, going_on=False) as folder, ThreadPoolExecutor(1) as pool:
        (folder / "config.yaml").write_text("x")
        with pytest.raises(OutputError, match="is being written by process"):
            pool.submit(take).result()
    assert (tmp_path / "there/study/config.yaml").read_text() == "x" and names(folder) == {"config.yaml", MARK}


def test_what_is_gone_in_the_middle_is_said_at_the_end_and_copied_by_the_next(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    with pytest.raises(RunError, match="has everything"), worked_on(address, going_on=False) as folder:
        (folder / "config.yaml").write_text("x")
        monkeypatch.setattr(Mirror, "push", lambda self: (_ for _ in ()).throw(OSError("gone")))
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path / "here")
    with worked_on(folder, going_on=True):
        pass
    assert names(there) == {"config.yaml", MARK}


def test_what_is_large_gets_the_time_that_a_slow_store_takes(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patience = []

    def wait(call: BackgroundCall[object], *, silent_s: float, at_most_s: float) -> object:
        patience.append(silent_s)
        return call._call()

    with worked_on(address, going_on=False) as folder:
        (folder / "config.yaml").write_text("x")
        with open(folder / "model.safetensors", "wb") as file:
            file.truncate(20_000_000)
        monkeypatch.setattr(Mirror, "push", lambda self: 0)
        monkeypatch.setattr(BackgroundCall, "wait", wait)
    assert max(patience) > 60 + 100


@pytest.mark.parametrize(
    ("address", "error", "words"),
    [
        ("s3://bucket", ConfigError, "names no folder"),
        ("s3:/bucket/x?secret_key=geheim", ConfigError, "one slash where an address has two; write s3://"),
        (Path("file:///tmp/x"), ConfigError, "in Python as a str"),
        ("nosuch://x/y", ConfigError, "no folder can have this address"),
        ("s3://key:geheim@bucket/x", ConfigError, "user or password"),
        ("s3://bucket/x?secret_key=geheim", ConfigError, "user or password"),
        ("s3://bucket/x?Secret_Key=geheim", ConfigError, "user or password"),
        ("s3://bucket/x?secret=geheim", ConfigError, "user or password"),
        ("s3://bucket/x#1?secret_key=geheim", ConfigError, "write %23"),
        ("s3://bucket//x?region=us-east-1", ConfigError, "no folder can have this address.*without //"),
        ("file:///tmp/x/..", ConfigError, "no folder can have this address.*without //, . and .."),
        ("file:///proc/none/x", ResourceError, "cannot be written"),
    ],
)
def test_a_wrong_address_ends_in_one_line_before_anything_is_written(
    address: str | Path, error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words) as raised, worked_on(address, going_on=False):
        pass
    assert "geheim" not in str(raised.value) and list(tmp_path.iterdir()) == []


def test_an_address_with_nothing_is_no_run(address: str) -> None:
    with pytest.raises(OutputError, match="nothing at this address"), read_from([address]):
        pass


def test_what_is_not_at_an_address_is_told_of_the_address(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["run", "--resume"], ["sync"]):
        assert main([*words, address]) == 2
        assert capsys.readouterr().err == f"error: {address} holds no run: there is no config.yaml in it\n"


def test_runs_at_addresses_are_called_by_these_and_each_is_shown_once(address: str, tmp_path: Path) -> None:
    for name in ("one", "two"):
        run = RunFolder.create(tmp_path / "there/study" / name, overwrite=False)
        run.write_config("name: run\nseed: 0\nscenario: {}\nmethod: {name: fedavg}\n")
        run.write_result({"status": "finished"})
    one, two = f"{address}/one", f"{address}/two"
    lines = fedsweep.compare(one, two, one).splitlines()
    assert [line.split()[0] for line in lines] == ["run", "one", "two"]
    run.path.joinpath("result.json").write_text("{")
    with pytest.raises(OutputError, match=f"^{two}/result.json: not readable"):
        fedsweep.compare(one, two)
    page = fedsweep.report(one, two, out="page.html", script="beside").read_text()
    assert f"{two}/result.json: not readable" in page and f"fedsweep verify {one}<" in page
    (run.path.parent / "sweep.json").write_text("{}")
    page += fedsweep.report(address, out="page.html", script="beside").read_text()
    assert f"{address}/sweep.json: not a plan" in page and "again: " not in page
    assert "fedsweep-scratch" not in page


def test_a_folder_whose_name_begins_like_one_that_stands_for_an_address_has_its_own(tmp_path: Path) -> None:
    stand_for(tmp_path / "a", "s3://lab/one?region=x")
    named = place_name(f"{tmp_path}/a: {tmp_path}/a/b.json; {tmp_path}/a-2, {tmp_path}/a.txt and {tmp_path}/a.")
    assert named == (
        f"s3://lab/one?region=x: s3://lab/one/b.json; {tmp_path}/a-2, {tmp_path}/a.txt and s3://lab/one?region=x."
    )


def test_an_address_may_have_blanks_and_letters_with_accents(address: str, tmp_path: Path) -> None:
    with worked_on(f"{address} é", going_on=False) as folder:
        (folder / "config.yaml").write_text("x")
    assert (tmp_path / "there/study é/config.yaml").read_text() == "x"
    with read_from([f"{address}%20%C3%A9"]) as (same,):
        assert names(Path(same)) == {"config.yaml"}


def test_a_trial_at_an_address_is_its_sweeps_to_log(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = tmp_path / "there/study/0001"
    trial.mkdir(parents=True)
    (trial / "config.yaml").write_text(TINY.replace("uri: none", "uri: sqlite:///mlflow.db"))
    (trial.parent / "sweep.json").write_text("{}")
    assert main(["sync", f"{address}/0001"]) == 2
    way_out = f"fedsweep sweep --resume --out {address} logs what MLflow lacks of it"
    assert capsys.readouterr().err == f"error: {address}/0001: {way_out}\n"
    assert main(["sync", f"{address}/0001", "--uri", "sqlite:///other.db"]) == 2
    assert f"{address}/0001 is a sweep's trial" in capsys.readouterr().err
