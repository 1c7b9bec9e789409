"""Reads the files of a local folder with Hugging Face's ``datasets``, and says which of them can't be read.

The library's own errors name no file, and what it leaves out or calls otherwise it does not say.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsweep.errors import DataError, FedsweepError
from fedsweep.world.data.huggingface_folder import PICTURES, Splits, label_tables

if TYPE_CHECKING:
    import datasets

_BATCH_ROWS = 1000
_warn = logging.getLogger("fedsweep").warning
# Packed otherwise, the library alone can unpack them.
_CSV = (".csv", ".csv.gz")


def read(name: str, folder: Path, reader: str, splits: Splits) -> dict[str, datasets.Dataset]:
    """Return each split's rows; pictures are not opened.

    Args:
        name: The data set's, for messages.
        folder: What the paths begin at.
        reader: Of :func:`~fedsweep.world.data.huggingface_folder.layout`, as ``splits`` are.
        splits: The files of each.

    Raises:
        DataError: A file can't be read or does not go with the others, a split has no rows, or pictures have none.
    """
    import datasets as library

    top = folder.resolve()
    places = {split: [top / path for path in paths] for split, paths in splits.items()}
    with _quiet():
        try:
            for place in (place for own in places.values() for place in own):
                try:
                    str(place).encode()
                except UnicodeEncodeError:
                    raise DataError(f"{name}: the name of {str(place)!a} is not in UTF-8; call it otherwise") from None
                if place.name.lower().endswith(_CSV):
                    _check_first_rows(name, place)
            files = {split: _listed(own) for split, own in places.items()}
            builder = library.load_dataset_builder(reader, data_files=files)
            builder.download_and_prepare()
        except FedsweepError:
            raise
        except Exception as error:  # its readers raise what they like
            raise DataError(f"{name} can't be loaded: {_cause(reader, places, error)}") from error
        for split, own in places.items():
            if not builder.info.splits[split].num_examples:
                why = f"{own[0]} holds no rows"
                if reader == PICTURES:
                    why = f"no {' or '.join(sorted(label_tables()))} in it has a row for its pictures"
                raise DataError(f"{name}: the split {split} has no samples: {why}; fill it, or take it out")
        parts = dict(builder.as_dataset())
    if reader == PICTURES:
        for split, part in parts.items():
            _check_pictures(name, places[split], part)
    return parts


def reason(error: BaseException) -> str:
    """Return what went wrong, in one line; the library says of what stopped it only that something did."""
    while type(error).__name__ == "DatasetGenerationError" and error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def stored_paths(part: datasets.Dataset, column: str) -> list[str]:
    """Return the paths of the pictures of a column that are stored as files of their own, beside the table."""
    import pyarrow.compute as pc

    pictures = part.data.column(column)
    is_file = pc.is_null(pc.struct_field(pictures, "bytes"))
    return [path for path in pc.struct_field(pictures.filter(is_file), "path").to_pylist() if path is not None]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the library from telling of an error what is told here."""
    from datasets.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _listed(places: Sequence[Path]) -> Any:
    """Return files as the library lists them, with what tells it that one was changed, behind a link, too."""
    from datasets.data_files import DataFilesList

    states = [(str(status.st_mtime_ns), str(status.st_size)) for status in map(Path.stat, places)]
    return DataFilesList([place.as_posix() for place in places], states)


def _check_first_rows(name: str, place: Path) -> None:
    """Refuse a csv file whose columns the library would take for others.

    It calls the second of two columns of one name otherwise, and takes the first fields of rows that are longer than
    the header for the rows' names.
    """
    import pandas

    names = pandas.read_csv(place, header=None, nrows=1, dtype=str, keep_default_na=False).iloc[0].tolist()
    if twice := [column for column, times in Counter(names).items() if column and times > 1]:
        raise DataError(f"{name}: {place} has several columns {twice[0]}; call each otherwise")
    if not isinstance(pandas.read_csv(place, nrows=1).index, pandas.RangeIndex):
        raise DataError(
            f"{name}: rows of {place} have more fields than its first line, which names the columns"
            f" ({', '.join(names)[:50]}); name them all, and part them by commas alone"
        )


def _cause(reader: str, places: Mapping[str, Sequence[Path]], error: Exception) -> str:
    """Return why files can't be read together: one can't be read alone, or has other columns than the first."""
    cause = error.__cause__ or error
    listed = [place for own in places.values() for place in own]
    if getattr(cause, "errno", None) is not None:  # of the disk, and with a path
        return reason(error)
    if reader == PICTURES:
        listed = [place for place in listed if place.name in label_tables()]
    first: tuple[Path, dict[str, str]] | None = None
    for place in listed:
        if not place.stat().st_size:
            return f"{place} is empty; fill it, or take it out"
        try:
            columns = _columns(reader, place)
        except Exception as own:  # as above
            return f"{place} can't be read ({reason(own)}); mend it, or take it out"
        first = first or (place, columns)
        if other := dict(columns.items() ^ first[1].items()):
            column = min(other)
            one, two = (kinds.get(column, "not there") for kinds in (first[1], columns))
            return f"the column {column} is {one} in {first[0]}, but {two} in {place}; give all files the same columns"
    return reason(error)


def _columns(reader: str, place: Path) -> dict[str, str]:
    """Read a file to its end, without keeping anything, and return the types of its columns."""
    import datasets as library

    rows = library.load_dataset(reader, data_files=[str(place)], split="train", streaming=True)
    columns: dict[str, str] = {}
    for batch in rows.with_format("arrow").iter(_BATCH_ROWS):
        columns = columns or {field.name: str(field.type) for field in batch.schema}
    return columns


def _check_pictures(name: str, places: Sequence[Path], part: datasets.Dataset) -> None:
    """Warn of pictures that a table with labels beside them leaves out."""
    import datasets as library

    names = label_tables()
    tables = [place for place in places if place.name in names]
    columns = [column for column, kind in part.features.items() if isinstance(kind, library.Image)]
    if not tables or not columns:
        return
    labelled = {os.path.normpath(path) for column in columns for path in stored_paths(part, column)}
    if left := [place for place in places if place.name not in names and str(place) not in labelled]:
        _warn(
            f"{name}: pictures that stand in no row of {tables[0].name} are left out, {len(left)} in all; the first is"
            f" {left[0]}"
        )
