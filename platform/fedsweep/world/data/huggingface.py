"""Data sets of the Hugging Face hub, and local folders that its package ``datasets`` reads.

``hf:NAME`` is a data set of the hub, ``hf:./FOLDER`` (or an absolute path, or one with ``~``) a local one: written by
``save_to_disk``, parquet files, or pictures in one folder per class below ``train`` and ``test``. What columns and
splits mean is found by their types; where that is not plain, the name goes on with
``?image=COLUMN&label=COLUMN&writer=COLUMN&train=SPLIT&test=SPLIT&config=NAME``.

With ``text=COLUMN&tokenizer=FOLDER`` samples are texts, with ``columns=A,B,C`` rows of numbers, see
:mod:`fedsweep.world.data.huggingface_tables`; a local folder may then hold csv or json files, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedsweep.errors import ConfigError, DataError, FedsweepError, ResourceError
from fedsweep.world.data import huggingface_tables as tables
from fedsweep.world.data.cache import Arrays, cached_arrays, with_progress
from fedsweep.world.data.huggingface_reading import reason, stored_paths
from fedsweep.world.data.huggingface_source import PREFIX, Source, is_folder, numbered, open_splits, read_options
from fedsweep.world.data.record import Dataset, of_bytes

if TYPE_CHECKING:
    import datasets
    from PIL.Image import Image

_MOST_PIXELS = 4096 * 4096


def load(name: str, *, download: bool, image_size: int | None, for_test: bool = False) -> Dataset:
    """Load a data set of images with labels, of texts, or of rows of numbers.

    Where there is no split for testing, a fifth of the training split becomes the test set, the same in every run.
    Pictures are grey where all are; mean and deviation are those of the training pictures.

    Args:
        name: What follows ``hf:``.
        download: Whether the network may be used; what was fetched before is found without it.
        image_size: Height and width of all pictures; needed where theirs differ.
        for_test: Whether the test samples alone are wanted; where there are no others, they stand for those, too.

    Raises:
        ConfigError: There are no pictures that ``image_size`` could be of.
        ResourceError: The package ``datasets`` is not installed, or for texts ``transformers``.
        DataError: There is no such data set, it can't be read, or has no such samples.
    """
    place = name.partition("?")[0]
    options = read_options(name)
    try:
        import datasets as library
    except ImportError as error:
        raise ResourceError(f"{PREFIX}{place} needs the package datasets: pip install 'fedsweep[hf]'") from error
    library.disable_progress_bars()
    try:
        splits = open_splits(place, options, download=download)
        source = Source(name=f"{PREFIX}{place}", options=options, splits=splits, for_test=for_test)
        if "text" in options or "columns" in options:
            if image_size is not None:
                raise ConfigError(
                    f"scenario.image_size={image_size} resizes pictures, but data set {source.name!r} has none; leave"
                    " it out"
                )
            return tables.dataset(source)
        return _dataset(source, image_size=image_size)
    except FedsweepError:
        raise
    except Exception as error:  # its readers raise what they like, for what is not there as for what is damaged
        offline = "" if download or is_folder(place) else "; scenario.download is false"
        raise DataError(f"{PREFIX}{place} can't be loaded ({reason(error)}){offline}") from error


def _dataset(source: Source, *, image_size: int | None) -> Dataset:
    used = source.used()
    # Which column and which split is what, is no matter of the files.
    choice = hashlib.blake2b(repr(sorted(source.options.items())).encode(), digest_size=6).hexdigest()
    arrays = cached_arrays(
        f"hf-images-{image_size or 'own'}-{choice}",
        sources=_files(source, used),
        decode=lambda: _decoded(source, used, image_size=image_size),
    )
    values = arrays["train_images"] / np.float32(255)
    mean = tuple(float(mean) for mean in values.mean(axis=(0, 2, 3), dtype=np.float64))
    # A channel of one value has no deviation, and images are divided by it.
    std = tuple(float(max(std, 1e-6)) for std in values.std(axis=(0, 2, 3), dtype=np.float64))
    names = arrays.pop("class_names").tolist()
    if "train_writers" in arrays:
        arrays["writers"] = arrays.pop("train_writers")
    return of_bytes(source.name, arrays, pixels=(mean, std), classes=names)


def _files(source: Source, used: list[datasets.Dataset]) -> list[Path]:
    """Return all files that the pictures are in: the library's, and those that a table names, wherever they lie."""
    tables = [Path(file["filename"]) for part in used for file in part.cache_files]
    pictures = [Path(path) for part in used for path in stored_paths(part, source.column("image", part))]
    return tables + [picture for picture in pictures if picture.is_file()]


def _decoded(source: Source, used: list[datasets.Dataset], *, image_size: int | None) -> Arrays:
    labels, names = _labels(source, used)
    parts: list[Arrays] = [
        {"images": _pictures(source, part, image_size=image_size), "labels": own}
        for part, own in zip(used, labels, strict=True)
    ]
    for part, writers in zip(parts, source.writers(used), strict=True):
        part.update({} if writers is None else {"writers": writers})
    grey = all(part["images"].shape[1] == 1 for part in parts)
    for part in parts:
        if not grey and part["images"].shape[1] == 1:
            part["images"] = np.repeat(part["images"], 3, axis=1)
    if len(parts) == 1:
        parts = [
            {key: values[rows] for key, values in parts[0].items()} for rows in source.divided(len(parts[0]["labels"]))
        ]
    arrays = {
        f"{role}_{key}": values
        for role, part in zip(("train", "test"), parts, strict=True)
        for key, values in part.items()
    }
    return {**arrays, "class_names": np.array(names, dtype=str)}


def _labels(source: Source, used: list[datasets.Dataset]) -> tuple[list[NDArray[np.int64]], list[str]]:
    """Return each part's labels [S] and the classes' names, which are the numbers' own where they have no others."""
    columns = [source.column("label", part) for part in used]
    labels, names = source.classes(columns, used)
    for values in labels:
        if values.ndim > 1:
            raise DataError(f"{source.name}: a picture's label is one class, but the column {columns[0]} holds lists")
        # As whole numbers floats are exact to 2^53 alone.
        if values.dtype.kind == "f" and (odd := values[(values != np.floor(values)) | ~(abs(values) <= 2**53)]).size:
            raise DataError(
                f"{source.name}: pictures' labels are classes, integers or texts, but the column {columns[0]} holds"
                f" {odd[0]:g}"
            )
        if values.size and values.min() < 0:
            raise DataError(
                f"{source.name}: labels must not be negative, but the column {columns[0]} holds {values.min():g}"
            )
    labels = [values if values.dtype.kind in "bu" else values.astype(np.int64) for values in labels]
    return (labels, names) if names else numbered(labels)


def _pictures(source: Source, part: datasets.Dataset, *, image_size: int | None) -> NDArray[np.uint8]:
    """Decode pictures to ``[S, C, H, W]``; one channel where every picture is grey."""
    from PIL.Image import Resampling

    name, column = source.name, source.column("image", part)
    pictures: list[NDArray[np.uint8]] = []
    rows = part.select_columns([column])
    for row, picture in enumerate(_opened(source, rows, column)):
        if picture.width * picture.height > _MOST_PIXELS:
            raise DataError(
                f"{name}: the picture {_place(rows, column, row)} has {picture.width} x {picture.height} pixels, more"
                f" than {_MOST_PIXELS}"
            )
        if picture.mode.startswith(("I", "F")):  # to be converted, all above 255 would become white
            raise DataError(
                f"{name}: the picture {_place(rows, column, row)} has more than 8 bits a channel (mode {picture.mode});"
                " save it with 8"
            )
        picture = picture.convert("L" if picture.mode in ("1", "L") else "RGB")
        if image_size is not None:
            picture = picture.resize((image_size, image_size), Resampling.BILINEAR)
        pictures.append(np.atleast_3d(np.asarray(picture)).transpose(2, 0, 1))
    channels = max((len(picture) for picture in pictures), default=1)
    pictures = [np.repeat(one, channels, axis=0) if len(one) < channels else one for one in pictures]
    if len(sizes := {picture.shape[1:] for picture in pictures}) != 1:
        shown = ", ".join(f"{height} x {width}" for height, width in sorted(sizes)[:3]) or "none"
        raise DataError(f"{name}: pictures must be of one size, but are {shown}; set scenario.image_size")
    return np.stack(pictures)


def _opened(source: Source, rows: datasets.Dataset, column: str) -> Iterator[Image]:
    """Yield the pictures one by one; of one that can't be read the error names the file, or else the row."""
    num_read = 0
    try:
        for row in with_progress(rows, label=f"reading {source.name}"):
            if row[column] is None:
                break
            yield row[column]
            num_read += 1
    except Exception as error:  # of damaged files Pillow raises what it likes
        place = _place(rows, column, num_read)
        raise DataError(
            f"{source.name} can't be loaded: the picture {place} can't be read ({reason(error)})"
        ) from error
    if num_read < len(rows):
        raise DataError(f"{source.name}: row {num_read + 1} has no picture in the column {column}; leave it out")


def _place(rows: datasets.Dataset, column: str, row: int) -> str:
    """Return the file of a picture, or else its row."""
    import datasets as library

    stored = rows.cast_column(column, library.Image(decode=False))[row][column]
    return str(stored["path"]) if stored["bytes"] is None else f"in row {row + 1}"
