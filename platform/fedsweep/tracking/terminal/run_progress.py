"""A run's progress for people: a live table on a terminal, plain lines for a pipe, nothing but messages when quiet."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from fedsweep.driver.observers import Observer, RunInfo

if TYPE_CHECKING:
    from fedsweep.records import RoundRecord

# The pace is the mean of so many rounds; the live table shows the newest few.
_PACE_ROUNDS = 10
_SHOWN_ROUNDS = 5
# In a pipe so many seconds pass at least between two lines on the same long work.
_PLAIN_EVERY_S = 10.0
_FIRST_ROUNDS = 10
# What is waited for before the first round or after the last is told there once it has taken so many seconds.
_PLAIN_WAIT_S = 3.0
# From here on digits behind the point say nothing, and a line would have hundreds before it.
_LARGE = 1e5
# The leading figure of the test, and which way is better, where samples are classified.
_ACCURACY = ("accuracy", "max")
_HEADINGS = ("round", "accuracy", "best", "loss", "MB sent", "ratio", "s/round")


class Standing:
    """The standing of a run: its rounds so far, and the time that is left.

    Attributes:
        name: The run's.
        planned: Rounds that it is planned for.
        done: The last finished round.
        total_bytes: Bytes both ways so far.
        best: Best value of it so far; None before the first evaluation.
        figure: The leading figure of the test: the accuracy, 0..1, or what the task says.
        where: Where it runs, to stand behind the rounds; may be empty.
    """

    def __init__(self, name: str, planned: int, backend: str = "", leading: tuple[str, str] = _ACCURACY) -> None:
        self.name, self.planned = name, planned
        self.figure, self._mode = leading
        self.where = f", {backend}" if backend else ""
        self.done, self.total_bytes = 0, 0
        self.best: float | None = None
        self._seconds: deque[float] = deque(maxlen=_PACE_ROUNDS)
        self._counted = 0

    def add(self, record: RoundRecord) -> dict[str, str]:
        """Count a round; returns its row, text by heading."""
        self.done = record.round
        self.total_bytes = record.total_bytes or 0
        value = record.test_accuracy if self.figure == _ACCURACY[0] else record.extra.get(self.figure)
        if self.figure == _ACCURACY[0]:
            self.best = record.best_accuracy
        elif value is not None and value == value:
            self.best = value if self.best is None else (min if self._mode == "min" else max)(self.best, value)
        if self._counted == 1:
            self._seconds.clear()  # the first round loads libraries and says little about the others
        self._counted += 1
        self._seconds.append(record.wall_time_s + record.eval_time_s)
        loss = _figure(record.test_loss, "%.4g")
        if record.test_loss is None and record.train_loss is not None:
            loss = f"{record.train_loss:.4g} (train)"
        figures = (_figure(value, "%.4f"), _figure(self.best, "%.4f"), loss)
        sent = (megabytes_text(self.total_bytes), _figure(record.comm_ratio, "%.4f"))
        return dict(zip(_HEADINGS, (str(record.round), *figures, *sent, f"{self.pace:.2f}"), strict=True))

    @property
    def pace(self) -> float:
        """Seconds per round, of late."""
        return sum(self._seconds) / len(self._seconds) if self._seconds else 0.0

    @property
    def left(self) -> str:
        """Time to the last planned round, as h:mm:ss."""
        return _duration(self.pace * max(0, self.planned - self.done))


class Progress(Observer):
    """Shows how a run gets on; a context manager that leaves the terminal as it was.

    What reads the output may go away in the middle; the run goes on without an audience.
    """

    def __init__(self) -> None:
        self._standing: Standing | None = None

    def __enter__(self) -> Progress:
        with contextlib.suppress(OSError):
            self.opened()
        return self

    def __exit__(self, *unused: object) -> None:
        with contextlib.suppress(OSError):
            self.closed()

    def started(self, info: RunInfo) -> None:
        task = [info.config.get(f"scenario.task.metrics.0.{key}") for key in ("name", "mode")]
        leading = _ACCURACY if task[0] is None else (str(task[0]), str(task[1]))
        self._standing = Standing(info.name, info.planned_rounds, info.backend, leading)
        with contextlib.suppress(OSError):
            self.shows_start(self._standing)
        for record in info.records:
            self._standing.add(record)

    def round_done(self, record: RoundRecord) -> None:
        if self._standing is not None:
            row = self._standing.add(record)
            with contextlib.suppress(OSError):
                self.shows_round(self._standing, row)

    def waiting(self, text: str) -> None:
        """Show in a few words what is waited for before the first round or after the last."""
        with contextlib.suppress(OSError):
            self.shows_waiting(text)

    def message(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self.shows_message(text)

    def progress(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self.shows_working(text)

    def finished(self, status: str, result: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self.closed()

    def opened(self) -> None:
        """Show that the run is being prepared."""

    def closed(self) -> None:
        """End the display: no more comes; may be called twice."""

    def shows_waiting(self, text: str) -> None:
        """Show the cause of a wait before the first round or after the last."""

    def shows_start(self, standing: Standing) -> None:
        """Show that the first round begins."""

    def shows_round(self, standing: Standing, row: Mapping[str, str]) -> None:
        """Show that a round is done."""

    def shows_working(self, text: str) -> None:
        """Show the progress of long work inside a round."""

    @abstractmethod
    def shows_message(self, text: str) -> None:
        """Show a sentence for the user."""


class QuietProgress(Progress):
    """Only messages, on standard error."""

    def shows_message(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class PlainProgress(Progress):
    """Lines on rounds, on long work inside a round one every ten seconds, and on what is waited for if it takes long.

    The first ten rounds have a line each, later ones at every tenth of the run and ten seconds after the last line.

    Args:
        file: Where to; by default standard output.
        clock: Seconds that only go up.
    """

    def __init__(self, file: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._file, self._clock = file, clock
        self._spoke = clock()
        self._waits = threading.Timer(0, lambda: None)

    def shows_waiting(self, text: str) -> None:
        self._waits.cancel()
        prefix = "starting: " if self._standing is None else ""
        self._waits = threading.Timer(_PLAIN_WAIT_S, self.message, [f"{prefix}{text}"])
        self._waits.daemon = True
        self._waits.start()

    def closed(self) -> None:
        self._waits.cancel()

    def shows_start(self, standing: Standing) -> None:
        self._waits.cancel()
        self.shows_message(f"{standing.name}: {standing.planned} rounds{standing.where}")

    def shows_round(self, standing: Standing, row: Mapping[str, str]) -> None:
        done, planned = standing.done, max(1, standing.planned)
        is_mark = done <= _FIRST_ROUNDS or 10 * done // planned > 10 * (done - 1) // planned
        if not is_mark and self._clock() - self._spoke < _PLAIN_EVERY_S:
            return
        width = len(str(standing.planned))
        self.shows_message(
            f"round {standing.done:{width}d}/{standing.planned}"
            f"  {standing.figure} {row['accuracy']} (best {row['best']})"
            f"  loss {row['loss']}  {row['MB sent']} MB sent  ratio {row['ratio']}  {row['s/round']} s/round"
            f"  {standing.left} left"
        )

    def shows_working(self, text: str) -> None:
        if self._clock() - self._spoke >= _PLAIN_EVERY_S:
            self.shows_message(text)

    def shows_message(self, text: str) -> None:
        print(text, file=self._file or sys.stdout, flush=True)
        self._spoke = self._clock()


class LiveProgress(Progress):
    """A table of the newest rounds above a bar, drawn in place.

    Args:
        console: A terminal.
        is_interrupted: Whether the user has asked for the end.
        clock: Seconds that only go up.
    """

    def __init__(
        self,
        console: Console,
        *,
        is_interrupted: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._console, self._is_interrupted, self._clock = console, is_interrupted, clock
        self._rows: deque[Mapping[str, str]] = deque(maxlen=_SHOWN_ROUNDS)
        self._spinner, self._work = Spinner("dots", "starting"), ""
        self._live = Live(
            get_renderable=self._draw,
            console=console,
            refresh_per_second=4,
            redirect_stderr=sys.stderr.isatty(),  # what goes to a file stays there
        )
        self._began = clock()

    def opened(self) -> None:
        self._live.start()

    def closed(self) -> None:
        # Before the first round there is only a spinner, of which nothing should stay.
        self._live.transient = not self._rows
        self._live.stop()

    def shows_waiting(self, text: str) -> None:
        self._work = text

    def shows_start(self, standing: Standing) -> None:
        self._began, self._work = self._clock(), ""
        if standing.where:
            self.shows_message(f"{standing.name}: {standing.planned} rounds{standing.where}")

    def shows_round(self, standing: Standing, row: Mapping[str, str]) -> None:
        self._rows.append(row)
        self._work = ""

    def shows_working(self, text: str) -> None:
        self._work = text

    def shows_message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def _draw(self) -> RenderableType:
        standing = self._standing
        if self._is_interrupted():
            return Text("interrupted: ending in good order (Ctrl-C again: at once)", style="yellow")
        if standing is None or not self._rows:
            present = (
                f"starting: {self._work}" if standing is None else f"{standing.name}: {self._work or 'first round'}"
            )
            self._spinner.update(text=Text(present))
            return self._spinner
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in _HEADINGS:
            table.add_column(Text(standing.figure if heading == _ACCURACY[0] else heading), justify="right")
        for row in list(self._rows):
            table.add_row(*(row[heading] for heading in _HEADINGS))
        return Group(table, self._bar(standing), *([Text(self._work)] if self._work else []))

    def _bar(self, standing: Standing) -> RenderableType:
        line = Table.grid(padding=(0, 1))
        line.add_row(
            Text(standing.name),
            ProgressBar(total=standing.planned, completed=standing.done, width=30),
            f"{standing.done}/{standing.planned}",
            _duration(self._clock() - self._began),
            f"{standing.left} left",
        )
        return line


def make_progress(*, quiet: bool, plain: bool, is_interrupted: Callable[[], bool] = lambda: False) -> Progress:
    """Make the progress display that suits a command's output.

    Args:
        quiet: Messages alone.
        plain: Lines; otherwise a live table, for terminals.
        is_interrupted: Whether the user has asked for the end.
    """
    if quiet:
        return QuietProgress()
    if plain:
        return PlainProgress()
    return LiveProgress(Console(), is_interrupted=is_interrupted)


def megabytes_text(count: float) -> str:
    """Return bytes in MB, without the unit: ``12.5``; of few bytes three digits, ``0.0123``, since none is 0.0."""
    megabytes = count / 1e6
    return f"{megabytes:.1f}" if not count or megabytes >= 0.1 else f"{megabytes:.3g}"


def _duration(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _figure(value: float | None, form: str) -> str:
    if value is None:
        return "-"
    return form % value if abs(value) < _LARGE else f"{value:.4g}"
