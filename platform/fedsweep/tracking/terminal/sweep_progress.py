"""A sweep's progress for people: a live table of trials on a terminal, a line per ended trial for a pipe."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedsweep.tracking.terminal.run_progress import megabytes_text

_WAITING, _RUNNING = "waiting", "running"
_ORDER = {_RUNNING: 0, "failed": 1, "finished": 2, _WAITING: 3}
_SHOWN = 16


@dataclass
class TrialState:
    """A trial as the audience sees it.

    Attributes:
        label: Its values.
        seed: Its seed, where the sweep varies it.
        planned: Rounds.
        status: ``waiting``, ``running``, ``finished`` or ``failed``.
        round: The last.
        metric: The sweep's first metric; NaN as long as it is unknown.
        total_bytes: Sent so far.
        changed: When it last changed.
        was_there: It had finished before this sweep went on.
    """

    label: str
    seed: int | None
    planned: int
    status: str = _WAITING
    round: int = 0
    metric: float = float("nan")
    total_bytes: float = 0.0
    changed: float = 0.0
    was_there: bool = False


class SweepProgress:
    """Shows how trials get on; this one shows nothing but keeps the count.

    Args:
        metric: What is shown of a trial.
        clock: Seconds that only go up.
    """

    def __init__(self, metric: str = "test_accuracy", *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metric, self._clock = metric, clock
        self._trials: dict[str, TrialState] = {}
        self._total = 0
        self._began = clock()
        self._lock = threading.Lock()

    def __enter__(self) -> SweepProgress:
        self._began = self._clock()
        self.opened()
        return self

    def __exit__(self, *unused: object) -> None:
        self.closed()

    def planned(self, total: int) -> None:
        """Note the number of trials that there will be."""
        self._total = total

    def add(self, name: str, state: TrialState) -> None:
        """Note a trial, by its folder's name."""
        with self._lock:
            self._trials[name] = state

    def began(self, name: str) -> None:
        """Note that a trial has a process."""
        self._change(name, status=_RUNNING)

    def round_done(self, name: str, result: Mapping[str, Any]) -> None:
        """Note that a trial has done a round."""
        # Ray Tune has a method's own figures, and the test's metrics, one level below: extra/NAME.
        group, _, column = self._metric.partition("/")
        value = result.get(group, {}).get(column) if column else result.get(group)
        self._change(
            name,
            status=_RUNNING,
            round=int(result.get("round", 0)),
            metric=float("nan") if value is None else float(value),
            total_bytes=result.get("total_bytes", 0),
        )

    def told(self, name: str, text: str) -> None:
        """Show a trial's sentence, about a client actor that was replaced, say."""
        self.say(f"{self._named(name)}: {text}")

    def retried(self, name: str, cause: str) -> None:
        """Note that a trial broke down and goes on from its last checkpoint."""
        self.say(f"{self._named(name)}: {cause}; it goes on from its last checkpoint")

    def ended(self, name: str, status: str, remark: str | None) -> None:
        """Note that a trial is over, ``finished`` or ``failed``; the remark says why where there is one."""
        self._change(name, status=status)

    def say(self, text: str) -> None:
        """Show a sentence for the user."""
        print(text, file=sys.stderr, flush=True)

    def opened(self) -> None:
        """Note that the sweep begins."""

    def closed(self) -> None:
        """End the display: no more comes."""

    def _change(self, name: str, **values: Any) -> None:
        with self._lock:
            state = self._trials.setdefault(name, TrialState(label=name, seed=None, planned=0))
            for key, value in values.items():
                setattr(state, key, value)
            state.changed = self._clock()

    def _named(self, name: str) -> str:
        state = self._trials.get(name)
        if state is None:
            return name
        return state.label if state.seed is None else f"{state.label} seed={state.seed}"

    def _counts(self) -> str:
        with self._lock:
            statuses = [state.status for state in self._trials.values()]
        done, failed, running = (statuses.count(status) for status in ("finished", "failed", _RUNNING))
        passed = round(self._clock() - self._began)
        if not (total := max(self._total, len(statuses))):
            return f"planning trials, {passed // 60}:{passed % 60:02d}"
        text = f"{done}/{total} finished, {running} running"
        return f"{text}{f', {failed} failed' if failed else ''}, {passed // 60}:{passed % 60:02d}"


class PlainSweepProgress(SweepProgress):
    """A line per trial that ends."""

    def ended(self, name: str, status: str, remark: str | None) -> None:
        super().ended(name, status, remark)
        state = self._trials[name]
        if state.was_there:
            return
        metric, sent = _figure(state.metric, ".4g"), megabytes_text(state.total_bytes)
        figures = f"{state.round} rounds, {self._metric} {metric}, {sent} MB sent"
        self.say(f"{self._counts()}: {self._named(name)}: {status}{f' ({remark})' if remark else ''}, {figures}")

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            print(text, flush=True)


class LiveSweepProgress(SweepProgress):
    """A table of the trials that run or ended last, drawn in place."""

    def __init__(self, console: Console, metric: str, *, is_interrupted: Callable[[], bool] = lambda: False) -> None:
        super().__init__(metric)
        self._console, self._is_interrupted = console, is_interrupted
        self._live = Live(get_renderable=self._draw, console=console, refresh_per_second=4, transient=True)

    def opened(self) -> None:
        self._live.start()

    def closed(self) -> None:
        self._live.stop()

    def ended(self, name: str, status: str, remark: str | None) -> None:
        super().ended(name, status, remark)
        if status == "failed":
            self.say(f"{self._named(name)}: failed: {remark}")

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def _draw(self) -> RenderableType:
        counts = self._counts()
        if self._is_interrupted():
            return Text("interrupted: trials are put away in good order (Ctrl-C again: at once)", style="yellow")
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("trial", no_wrap=True, overflow="ellipsis")
        for heading in ("seed", "status", "round", self._metric, "MB sent"):
            table.add_column(heading, justify="right", no_wrap=True)
        for state in self._shown():
            style = {"failed": "red", _RUNNING: "", "finished": "green"}.get(state.status, "dim")
            seed = "-" if state.seed is None else str(state.seed)
            figures = (
                f"{state.round}/{state.planned}",
                _figure(state.metric, ".4f"),
                megabytes_text(state.total_bytes),
            )
            table.add_row(Text(state.label), seed, state.status, *figures, style=style)
        return Group(table, Text(counts))

    def _shown(self) -> Sequence[TrialState]:
        with self._lock:
            states = sorted(self._trials.values(), key=lambda state: (_ORDER[state.status], -state.changed))
        return states[:_SHOWN]


def _figure(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def make_sweep_progress(
    metric: str, *, quiet: bool, plain: bool, is_interrupted: Callable[[], bool] = lambda: False
) -> SweepProgress:
    """Make the display that suits a command's output, as :func:`~.run_progress.make_progress` for a run."""
    if quiet:
        return SweepProgress(metric)
    if plain:
        return PlainSweepProgress(metric)
    return LiveSweepProgress(Console(), metric, is_interrupted=is_interrupted)
