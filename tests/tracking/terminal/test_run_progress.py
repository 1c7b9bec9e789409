from __future__ import annotations

import io
import re
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fedsweep.driver.observers import RunInfo
from fedsweep.records import RoundRecord
from fedsweep.testing import tiny_record
from fedsweep.tracking.terminal.run_progress import (
    LiveProgress,
    PlainProgress,
    Progress,
    QuietProgress,
    Standing,
    make_progress,
    megabytes_text,
)

ESCAPE = "\x1b"


def record(
    number: int, *, accuracy: float | None = 0.5, best: float | None = None, seconds: float = 2.0
) -> RoundRecord:
    return tiny_record(
        number,
        test_accuracy=accuracy,
        best_accuracy=accuracy if best is None else best,
        test_loss=None if accuracy is None else 1.25,
        train_loss=2.5,
        bytes_up=1_000_000,
        bytes_down=500_000,
        comm_ratio=0.25,
        wall_time_s=seconds,
        eval_time_s=0.5,
    )


def info(*, planned: int = 10, records: Sequence[RoundRecord] = ()) -> RunInfo:
    return RunInfo(name="study", folder=Path("x"), config={}, planned_rounds=planned, records=records)


def played(progress: Progress) -> None:
    with progress:
        progress.started(info())
        progress.round_done(record(1, accuracy=0.75))
        progress.message("an actor was lost")
        progress.round_done(record(2, accuracy=0.5, best=0.75))
        progress.checkpointed(2)
        progress.finished("finished", {})


def test_plain_progress_prints_one_line_per_round_with_the_figures() -> None:
    file = io.StringIO()
    played(PlainProgress(file))
    assert file.getvalue().splitlines() == [
        "study: 10 rounds",
        "round  1/10  accuracy 0.7500 (best 0.7500)  loss 1.25  1.5 MB sent  ratio 0.2500  2.50 s/round  0:00:22 left",
        "an actor was lost",
        "round  2/10  accuracy 0.5000 (best 0.7500)  loss 1.25  3.0 MB sent  ratio 0.2500  2.50 s/round  0:00:20 left",
    ]


def test_plain_progress_of_a_long_run_has_a_line_for_its_first_rounds_each_tenth_and_every_ten_seconds() -> None:
    file, now = io.StringIO(), [0.0]
    progress = PlainProgress(file, clock=lambda: now[0])
    progress.started(info(planned=100))
    for number in range(1, 101):
        now[0] += 6.0 if 50 < number <= 60 else 0.1
        progress.round_done(record(number))
    told = [int(line.split()[1].partition("/")[0]) for line in file.getvalue().splitlines()[1:]]
    assert told == [*range(1, 11), 20, 30, 40, 50, 52, 54, 56, 58, 60, 70, 80, 90, 100]


def test_plain_progress_shows_long_work_every_ten_seconds() -> None:
    file, now = io.StringIO(), [0.0]
    progress = PlainProgress(file, clock=lambda: now[0])
    progress.started(info())
    for second in range(1, 40):
        now[0] = float(second)
        progress.progress(f"iteration {second} of 40")
        if second == 15:
            progress.message("a sentence")
    # A sentence tells that something goes on, so the next line waits ten seconds from there.
    assert file.getvalue().splitlines()[1:] == [
        "iteration 10 of 40",
        "a sentence",
        "iteration 25 of 40",
        "iteration 35 of 40",
    ]


def test_what_is_waited_for_has_a_name_from_the_first_moment(capsys: pytest.CaptureFixture[str]) -> None:
    (shown, _), quiet = live(), QuietProgress()
    assert "starting" in drawn_by(shown)
    for progress in (shown, quiet):
        progress.waiting("libraries")
        progress.waiting("Ray")
    assert "starting: Ray" in drawn_by(shown)
    shown.started(info())
    assert "first round" in drawn_by(shown)
    shown.round_done(record(1))
    shown.waiting("ending: pictures")
    assert drawn_by(shown).splitlines()[-1].strip() == "ending: pictures"
    assert capsys.readouterr() == ("", "")


def test_plain_progress_names_only_what_is_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[threading.Timer] = []
    monkeypatch.setattr(threading.Timer, "start", lambda timer: timers.append(timer))
    file = io.StringIO()
    with PlainProgress(file) as progress:
        progress.waiting("libraries")
        progress.waiting("Ray")
        progress.started(info())
        progress.waiting("ending: mlflow")
    assert [timer.interval for timer in timers] == [3.0] * 3
    assert all(timer.finished.is_set() for timer in timers)  # each was taken back by what came next
    for timer in timers:
        timer.function(*timer.args)
    assert file.getvalue().splitlines() == [
        "study: 10 rounds",
        "starting: libraries",
        "starting: Ray",
        "ending: mlflow",
    ]


def test_the_first_line_says_where_the_run_runs_and_why() -> None:
    file = io.StringIO()
    (shown, written), plain = live(), PlainProgress(file)
    for progress in (shown, plain):
        progress.started(replace(info(), backend="in this process (runtime.backend=local)"))
    assert file.getvalue() == "study: 10 rounds, in this process (runtime.backend=local)\n"
    assert "study: 10 rounds, in this process (runtime.backend=local)" in written.getvalue()


def test_live_progress_shows_long_work_below_the_bar_until_the_round_is_done() -> None:
    progress, file = live()
    with progress:
        progress.started(info())
        progress.progress("iteration 3 of 40")
        assert "study: iteration 3 of 40" in drawn_by(progress)
        progress.round_done(record(1))
        assert "iteration" not in drawn_by(progress)
        progress.progress("iteration 4 of 40")
        assert drawn_by(progress).splitlines()[-1].strip() == "iteration 4 of 40"
    assert "iteration 4 of 40" in file.getvalue()


def drawn_by(progress: LiveProgress) -> str:
    console = Console(file=io.StringIO(), width=90)
    with console.capture() as captured:
        console.print(progress._draw())
    return captured.get()


def test_quiet_progress_shows_no_long_work(capsys: pytest.CaptureFixture[str]) -> None:
    QuietProgress().progress("iteration 3 of 40")
    assert capsys.readouterr() == ("", "")


def test_round_without_evaluation_shows_a_dash_and_the_training_loss() -> None:
    row = Standing("study", 10).add(record(1, accuracy=None))
    assert (row["accuracy"], row["best"], row["loss"]) == ("-", "-", "2.5 (train)")


def test_rounds_from_before_a_resume_count_in_bytes_and_best() -> None:
    file = io.StringIO()
    progress = PlainProgress(file)
    progress.started(info(records=[record(1, accuracy=0.9), record(2, best=0.9)]))
    progress.round_done(record(3, best=0.9))
    (_, line) = file.getvalue().splitlines()
    assert line.startswith("round  3/10  accuracy 0.5000 (best 0.9000)") and "4.5 MB sent" in line


def test_pace_forgets_the_first_round() -> None:
    standing = Standing("study", 10)
    standing.add(record(1, seconds=59.5))
    assert standing.pace == pytest.approx(60.0)
    standing.add(record(2, seconds=1.5))
    assert standing.pace == pytest.approx(2.0)
    assert standing.left == "0:00:16"


def test_quiet_progress_prints_messages_alone_and_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    played(QuietProgress())
    assert capsys.readouterr() == ("", "an actor was lost\n")


def live(*, width: int = 90, interrupted: bool = False) -> tuple[LiveProgress, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, height=20)
    return LiveProgress(console, is_interrupted=lambda: interrupted, clock=lambda: 0.0), file


def test_live_progress_ends_with_the_newest_rounds_and_gives_the_cursor_back() -> None:
    progress, file = live()
    with progress:
        progress.started(info(planned=7))
        for number in range(1, 8):
            progress.round_done(record(number, accuracy=number / 10))
        progress.finished("finished", {})
    drawn = file.getvalue()
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn[drawn.rindex("round") :])
    assert [line.split()[:2] for line in last.splitlines()[1:6]] == [[str(n), f"0.{n}000"] for n in range(3, 8)]
    assert "7/7" in last
    assert drawn.rindex(f"{ESCAPE}[?25h") > drawn.rindex(f"{ESCAPE}[?25l")


def test_live_progress_prints_messages_as_they_are() -> None:
    progress, file = live()
    with progress:
        progress.message("client [red]3[/red] was lost")
    assert "client [red]3[/red] was lost" in file.getvalue()


def test_live_progress_shows_a_name_letter_by_letter() -> None:
    progress, file = live()
    with progress:
        progress.started(replace(info(), name="[/]a[red]b"))
        progress.round_done(record(1))
    assert "[/]a[red]b" in file.getvalue()


def test_live_progress_says_that_it_was_interrupted() -> None:
    progress, file = live(interrupted=True)
    with progress:
        progress.started(info())
        progress.round_done(record(1))
    assert "interrupted" in file.getvalue()


def test_live_progress_fits_a_narrow_terminal() -> None:
    progress, file = live(width=40)
    played(progress)
    visible = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert max(len(line.rpartition("\r")[2]) for line in visible.splitlines()) <= 40


class Gone(io.StringIO):
    tried = 0

    def write(self, text: str) -> int:
        self.tried += 1
        raise BrokenPipeError


def test_progress_goes_on_without_an_audience() -> None:
    file = Gone()
    progress = PlainProgress(file)
    played(progress)
    progress.round_done(record(3))
    assert file.tried > 0


@pytest.mark.parametrize(
    ("quiet", "plain", "kind"),
    [(True, False, QuietProgress), (True, True, QuietProgress), (False, True, PlainProgress)],
)
def test_quiet_beats_plain_and_plain_beats_live(quiet: bool, plain: bool, kind: type[Progress]) -> None:
    assert type(make_progress(quiet=quiet, plain=plain)) is kind
    assert type(make_progress(quiet=False, plain=False)) is LiveProgress


def test_figures_that_are_not_finite_are_shown() -> None:
    assert Standing("study", 3).add(replace(record(1), test_loss=float("nan")))["loss"] == "nan"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0.0"), (1, "1e-06"), (48_212, "0.0482"), (150_000, "0.1"), (12_540_000, "12.5")]
)
def test_megabytes_of_what_was_sent_are_never_none(count: int, text: str) -> None:
    assert megabytes_text(count) == text
