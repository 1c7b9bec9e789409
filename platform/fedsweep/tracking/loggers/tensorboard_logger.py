"""A run for TensorBoard: event files in ``tensorboard/`` of its folder.

``tensorboard --logdir runs`` shows all runs below; the configuration and the last figures stand under *HParams*.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fedsweep.driver.observers import Observer, RunInfo
from fedsweep.runs.run_folder import EVENTS_SUFFIX, TENSORBOARD, event_files
from fedsweep.runs.targets import TargetWatch
from fedsweep.tracking.loggers.library import imported
from fedsweep.tracking.rows import TrackedRow, telling

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from fedsweep.records import RoundRecord

_FLUSH_S = 5
_LAST = ("test_accuracy", "best_test_accuracy", "total_bytes")


class TensorBoardLogger(Observer):
    """Writes scalars under the names that MLflow has them under, by round, and what was learnt also by kB sent.

    A run that goes on writes its event files anew from the first round, so each point is there once.
    """

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None
        self._targets = TargetWatch(())
        self._info: RunInfo | None = None

    def check(self) -> None:
        _writer_class()

    def started(self, info: RunInfo) -> None:
        for old in event_files(info.folder):
            old.unlink()
        self._info, self._targets = info, TargetWatch(info.targets)
        with _quiet():
            # purge_step: a TensorBoard that is open drops what it has read of the files before.
            self._writer = _writer_class()(
                str(info.folder / TENSORBOARD), purge_step=0, flush_secs=_FLUSH_S, filename_suffix=EVENTS_SUFFIX
            )
        for record in info.records:
            self.round_done(record)

    def round_done(self, record: RoundRecord) -> None:
        if self._writer is None:
            return
        row = TrackedRow(record=record, reached=self._targets.see(record))
        with _quiet():
            for point in row.points():
                self._writer.add_scalar(point.key, point.value, point.step, walltime=point.timestamp_ms / 1000)

    def checkpointed(self, round: int) -> None:
        if self._writer is not None:
            self._writer.flush()

    def finished(self, status: str, result: Mapping[str, Any]) -> None:
        if self._writer is None or self._info is None:
            return
        with _quiet():
            self._add_hparams({**self._info.tags, **telling(self._info.config), "status": status}, result)
            self._writer.close()

    def _add_hparams(self, shown: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        assert self._writer is not None
        figures = {f"last/{name}": float(result[name]) for name in _LAST if result.get(name) is not None}
        # The writer's own add_hparams would begin another file.
        events: Any = self._writer.file_writer
        for summary in hparams({key: _plain(value) for key, value in shown.items()}, figures):  # type: ignore[no-untyped-call]
            events.add_summary(summary)
        for name, value in figures.items():
            self._writer.add_scalar(name, value, int(result.get("rounds", 0)))


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # between TensorBoard and its dependencies
        yield


def _writer_class() -> type[SummaryWriter]:
    with _quiet():
        return imported("torch.utils.tensorboard", extra="tensorboard").SummaryWriter  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)
