"""The folder of a run: every file that a run leaves, written so that a kill at any byte leaves it readable.

A file is written beside its place, forced to disk and moved into it; nobody ever sees half of one. What is read back
is checked and never unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedsweep.bounded import MOST_TEXT_BYTES, open_regular, parse_json, read_regular
from fedsweep.errors import FedsweepError, OutputError
from fedsweep.fleet.ray_internals import RAY_LOG
from fedsweep.models.initial import BASE, check_base
from fedsweep.records import RoundRecord
from fedsweep.runs.tables.rounds import GrowingTable, check_round_table, table_to_records

if TYPE_CHECKING:
    import pyarrow as pa
from fedsweep.runs.files import EARLIER, SOURCES, TAKEN_OVER, TEMPORARY, TRACKING, atomic_write, jsonable, remove_files

CONFIG, ROUNDS, CLIENTS = "config.yaml", "rounds.parquet", "clients.parquet"
CLIENT_ACCURACY, TRAFFIC = "client_accuracy.parquet", "traffic.parquet"
RESULT, MODEL, CHECKPOINTS = "result.json", "model.safetensors", "checkpoints"
PLAN = "sweep.json"  # no run's: the folder that has it is a sweep's
MEASURED = "measured.json"  # nor this: a reproduced table's
SCENARIO, PICTURES, ROUNDS_CSV, DECISIONS = "scenario.json", "pictures", "rounds.csv", "plan.json"
TENSORBOARD, WANDB = "tensorboard", "wandb"
# What these two are left has names that only a run writes.
EVENTS_SUFFIX, ID_PREFIX = ".fedsweep", "fedsweep"
STATUSES, UNFINISHED = ("finished", "failed", "killed"), "unfinished"
BY_SCHEDULER = "scheduler"  # the result's stopped_by, where a sweep's scheduler ended the run before its own end
# The configuration goes last when a folder is cleared: as long as anything is left, it is known as a run's.
_TABLES = (ROUNDS, ROUNDS_CSV, CLIENTS, CLIENT_ACCURACY, TRAFFIC)
_FILES = (*_TABLES, SCENARIO, DECISIONS, RESULT, MODEL, EARLIER, SOURCES, TAKEN_OVER, TRACKING, RAY_LOG, CONFIG)
_MOST_TABLE_BYTES = 256 * 2**20
# What is more was not written by a run; values in lists count, too.
_MOST_ROWS, _MOST_VALUES = 1_000_000, 20_000_000
# With rows for each client of each round; larger ones are read in pieces, with pyarrow.
_MOST_CLIENT_ROWS = 5_000_000
_MOST_BYTES = dict.fromkeys((ROUNDS, CLIENTS, CLIENT_ACCURACY, TRAFFIC), _MOST_TABLE_BYTES)
# Beside its tensors, a model's file has their names.
_HEADER_BYTES = 10 * 2**20


class RunFolder:
    """A run's folder.

    Args:
        path: The folder; it need not exist yet.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._rounds = GrowingTable()

    @classmethod
    def create(cls, path: str | Path, *, overwrite: bool) -> RunFolder:
        """Make the folder, and its parents, for a new run.

        Args:
            path: The folder; may exist and hold other things.
            overwrite: Clear an earlier run's files (nothing else) instead of refusing the folder.

        Raises:
            OutputError: The folder holds a run and ``overwrite`` is false; it holds files with a run's names that no
                run wrote; or it cannot be made or written.
        """
        folder = cls(path)
        folder.check_free(overwrite=overwrite)
        try:
            if folder._held():
                folder._clear()
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{folder.path}: cannot be made a run's folder: {_reason(error)}") from error
        if not os.access(folder.path, os.W_OK | os.X_OK):
            raise OutputError(f"{folder.path}: no permission to write into this folder; choose another --out")
        return folder

    def check_free(self, *, overwrite: bool) -> None:
        """Refuse a folder that holds a run; writes nothing. Arguments and errors are :meth:`create`'s."""
        if (self.path / PLAN).exists():
            raise OutputError(f"{self.path} is a sweep's; choose another --out")
        names = self._held()
        if names and not overwrite:
            raise OutputError(
                f"{self.path} holds a run already ({', '.join(names)}); choose another --out, go on with --resume,"
                " or replace it with --overwrite"
            )
        if self.path.exists() and not self.path.is_dir():
            raise OutputError(f"{self.path}: cannot be made a run's folder: it is a file")

    def check_is_run(self) -> None:
        """Refuse a folder that is not there, or a sweep's, whose configuration looks like a run's.

        Raises:
            OutputError: It is one of these.
        """
        if not self.path.is_dir():
            raise OutputError(f"{self.path}: there is no such folder")
        if (self.path / PLAN).exists():
            raise OutputError(
                f"{self.path} is a sweep's, so name one of the runs in it; the sweep itself goes on, and MLflow gets"
                f" what it lacks, with fedsweep sweep --resume --out {shlex.quote(str(self.path))}"
            )

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.path / CHECKPOINTS

    def write_config(self, text: str) -> None:
        """Write the resolved configuration; the first file of a run."""
        self._write(CONFIG, text.encode())

    def read_config(self) -> str:
        """Read the resolved configuration's text.

        Raises:
            OutputError: The file is missing or not UTF-8.
        """
        try:
            return self._read(CONFIG).decode()
        except UnicodeDecodeError as error:
            raise OutputError(f"{self.path / CONFIG}: not a text file in UTF-8 (byte {error.start})") from error

    def write_table(self, name: str, table: pa.Table, *, values_recur: bool = True) -> None:
        """Write one of the run's tables, or replaces it; where values seldom recur, without looking for that."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, use_dictionary=values_recur)
        self._write(name, sink.getvalue().to_pybytes())

    def write_rounds(self, records: Sequence[RoundRecord]) -> None:
        """Replace the table of rounds by one with a row for each record."""
        # As often as there are checkpoints: what goes with the rounds played is to be little.
        self.write_table(ROUNDS, self._rounds.of(records), values_recur=False)

    def rounds_table(self) -> pa.Table:
        """Read the table of rounds.

        Raises:
            OutputError: The file is missing, damaged, or no table of rounds.
        """
        table = self._read_table(ROUNDS)
        check_round_table(table, self.path / ROUNDS)
        return table

    def read_rounds(self) -> list[RoundRecord]:
        """Read one record per round; raises as :meth:`rounds_table`."""
        return table_to_records(self.rounds_table())

    def read_clients(self) -> pa.Table:
        """Read the table of clients.

        Raises:
            OutputError: The file is missing, damaged, or lacks a column, or clients are no whole numbers.
        """
        table = self._read_table(CLIENTS)
        for name in ("client", "num_samples", "label_counts"):
            if name not in table.column_names or table.column(name).null_count:
                raise OutputError(f"{self.path / CLIENTS}: the column {name!r} is missing or has empty cells")
        if (kind := str(table.column("client").type)) != "int64":
            raise OutputError(f"{self.path / CLIENTS}: the column 'client' must hold int64, but it holds {kind}")
        return table

    def client_table(self, name: str) -> pa.Table | None:
        """Read :data:`CLIENT_ACCURACY` or :data:`TRAFFIC`; None where the run has none.

        Raises:
            OutputError: The file is damaged, or has more rows than a run writes that fits into memory.
        """
        return self._read_table(name) if (self.path / name).exists() else None

    def write_scenario(self, text: str) -> None:
        """Write who was there and with which classes, as ``scenario.drift`` and ``.availability`` can replay it."""
        self._write(SCENARIO, text.encode())

    def write_plan(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        """Write how a budget was spent, round by round."""
        self._write(DECISIONS, (json.dumps(jsonable(decisions), indent=1, allow_nan=False) + "\n").encode())

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write the result; what is not finite becomes null."""
        text = json.dumps(jsonable(result), indent=2, sort_keys=True, allow_nan=False)
        self._write(RESULT, f"{text}\n".encode())

    def read_result(self) -> dict[str, Any]:
        """Read the result.

        Raises:
            OutputError: The file is missing, not JSON, or has no known ``status``.
        """
        path, data = self.path / RESULT, self._read(RESULT)
        try:
            result = parse_json(data)
        except ValueError as error:
            raise OutputError(f"{path}: not readable as JSON: {error}") from error
        if not isinstance(result, dict) or result.get("status") not in STATUSES:
            raise OutputError(f"{path}: not a run's result: its status must be one of {', '.join(STATUSES)}")
        return result

    def result_if_any(self) -> dict[str, Any]:
        """Read the result; empty where the run has not come to an end. Raises as :meth:`read_result`."""
        return self.read_result() if (self.path / RESULT).is_file() else {}

    @property
    def status(self) -> str:
        """One of :data:`STATUSES`, or :data:`UNFINISHED`. Raises as :meth:`read_result`."""
        return str(self.result_if_any().get("status", UNFINISHED))

    def has_finished(self) -> bool:
        """Check that the run has finished, by a result that can be read."""
        try:
            return self.status == "finished"
        except FedsweepError:
            return False

    def check_finished(self, does: str) -> None:
        """Refuse a run that has not finished by an OutputError, which says what only a finished one ``does``."""
        if (status := self.status) != "finished":
            what = f"only a finished run {does}, but this one is {status}"
            raise OutputError(f"{self.path}: {what}; finish it with fedsweep run --resume")

    def has_rounds(self) -> bool:
        """True where a table of rounds has been written."""
        return (self.path / ROUNDS).is_file()

    def write_model(self, state: Mapping[str, Tensor], *, base: str | None = None) -> str:
        """Write the model's tensors; equal tensors give equal bytes.

        Args:
            state: By name.
            base: SHA-256 of the constants that they were trained on; None: there are none.

        Returns:
            The file's SHA-256, in hexadecimal digits.
        """
        from safetensors.torch import save

        # clone: safetensors refuses tensors that share memory, as tied weights and views of one vector do.
        tensors = {
            name: state[name].detach().cpu().clone(memory_format=torch.contiguous_format) for name in sorted(state)
        }
        data = save(tensors, metadata=None if base is None else {BASE: base})
        self._write(MODEL, data)
        return hashlib.sha256(data).hexdigest()

    def read_model(self, *, num_values: int, base: str | None = None) -> dict[str, Tensor]:
        """Read the model's tensors, by name.

        Args:
            num_values: Scalars that it should have; a file that is much larger is refused before it is read.
            base: SHA-256 of the model's constants; None: it has none.

        Raises:
            DataError: They were trained on other constants.
            OutputError: The file is missing or damaged, or is not the one that ``result.json`` names.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        data = self._read(MODEL, most=8 * num_values + _HEADER_BYTES)
        expected = self.result_if_any().get("model_sha256")
        digest = hashlib.sha256(data).hexdigest()
        if expected is not None and digest != expected:
            raise OutputError(f"{self.path / MODEL}: its SHA-256 is {digest}, but {RESULT} says {expected}")
        try:
            tensors: dict[str, Tensor] = load(data)
        except (SafetensorError, ValueError, KeyError) as error:  # the last: of a type that can't be read
            raise OutputError(f"{self.path / MODEL}: not a safetensors file: {error}") from error
        check_base(data, base, source=str(self.path / MODEL))
        return tensors

    def model_bytes(self) -> int:
        """Return the size of the model's file.

        Raises:
            OutputError: There is none, or it is no regular file.
        """
        try:
            with open_regular(self.path / MODEL) as handle:
                return os.fstat(handle).st_size
        except OSError as error:
            raise OutputError(f"{self.path / MODEL}: cannot be read: {_reason(error)}") from error

    def model_sha256(self, *, num_bytes: int) -> str:
        """Return the SHA-256 of the model's file as it is, in hexadecimal digits.

        Args:
            num_bytes: Its size; a larger file is refused.
        """
        return hashlib.sha256(self._read(MODEL, most=num_bytes)).hexdigest()

    def _held(self) -> list[str]:
        return [name for name in (*_FILES, CHECKPOINTS) if os.path.lexists(self.path / name)]

    def _clear(self) -> None:
        """Remove an earlier run. Its folder may be someone's project with a ``checkpoints`` of its own."""
        if not self._is_ours():
            raise OutputError(
                f"{self.path} has files with the names of a run's, but no {CONFIG} that a run wrote, so they are not"
                " replaced; choose another --out, or remove them by hand"
            )
        if self.checkpoints.is_dir() and not self.checkpoints.is_symlink():
            shutil.rmtree(self.checkpoints)
        remove_files(self.path / PICTURES, "*.png")
        for path in event_files(self.path):
            path.unlink()
        for path in offline_runs(self.path):
            shutil.rmtree(path)
        leftovers = [path.name for name in _FILES for path in self.path.glob(f".{name}.*{TEMPORARY}")]
        for name in (CHECKPOINTS, *leftovers, *_FILES):
            (self.path / name).unlink(missing_ok=True)

    def forget_rounds(self) -> None:
        """Remove what tells of rounds that are played no further: of other code, or of another configuration."""
        remove_files(self.path / PICTURES, "*.png")
        for name in (*_TABLES, SCENARIO, DECISIONS, TRACKING, RESULT):
            (self.path / name).unlink(missing_ok=True)

    def _is_ours(self) -> bool:
        if not (self.path / CONFIG).is_file():
            return False
        lines = self.read_config().splitlines()
        return all(any(line.startswith(f"{key}:") for line in lines) for key in ("scenario", "method"))

    def _write(self, name: str, data: bytes) -> None:
        try:
            atomic_write(self.path / name, data)
        except OSError as error:
            raise OutputError(f"{self.path / name}: cannot be written: {_reason(error)}") from error

    def _read(self, name: str, *, most: int | None = None) -> bytes:
        try:
            return read_regular(self.path / name, max_bytes=most or _MOST_BYTES.get(name, MOST_TEXT_BYTES))
        except OSError as error:
            raise OutputError(f"{self.path / name}: cannot be read: {_reason(error)}") from error

    def _read_table(self, name: str) -> pa.Table:
        import pyarrow as pa
        import pyarrow.parquet as pq

        data = self._read(name)
        try:
            # Not by path: pyarrow would make columns of a folder named "lr=0.1". And without threads: in a process that
            # has imported torch first, every third one with pyarrow's own thread pool aborts when it exits.
            file = pq.ParquetFile(pa.BufferReader(data))
            most_rows = _MOST_CLIENT_ROWS if name in (CLIENT_ACCURACY, TRAFFIC) else _MOST_ROWS
            _check_table_size(file.metadata, self.path / name, most_rows=most_rows)
            return file.read(use_threads=False)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise OutputError(f"{self.path / name}: not a readable parquet file: {error}") from error


def event_files(folder: Path) -> Sequence[Path]:
    """Return the event files for TensorBoard in a run's folder."""
    return sorted((folder / TENSORBOARD).glob(f"events.out.tfevents.*{EVENTS_SUFFIX}"))


def offline_runs(folder: Path) -> Sequence[Path]:
    """Return the folders of offline Weights & Biases runs in a run's folder, in the order of their beginning."""
    paths = sorted((folder / WANDB).glob(f"offline-run-*-{ID_PREFIX}*"))
    return [path for path in paths if path.is_dir() and not path.is_symlink()]


def _check_table_size(metadata: Any, source: Path, *, most_rows: int) -> None:
    """Refuse a parquet file by its metadata, before its rows are read: a few bytes stand for millions of rows."""
    if metadata.num_rows > most_rows:
        raise OutputError(f"{source}: it has {metadata.num_rows} rows, more than {most_rows}")
    groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
    values = sum(group.column(j).num_values for group in groups for j in range(metadata.num_columns))
    if values > (most := max(_MOST_VALUES, 6 * most_rows)):
        raise OutputError(f"{source}: it has {values} values, more than {most}")
    names = metadata.schema.to_arrow_schema().names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise OutputError(f"{source}: the column {twice[0]!r} is there twice")


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
