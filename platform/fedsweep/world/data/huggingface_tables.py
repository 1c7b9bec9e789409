"""Texts and rows of numbers of data sets that Hugging Face's ``datasets`` reads.

``hf:FOLDER?text=COLUMN&tokenizer=FOLDER&length=64`` gives ``input_ids`` and ``attention_mask`` [S, T]; with
``label=COLUMN`` a class or a number is learned of a text, without one the next token. ``hf:FOLDER?columns=A,B&label=Y``
gives rows [S, F] of numbers, with a class where Y holds integers or names, else a number.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedsweep.errors import DataError
from fedsweep.world.data.huggingface_reading import reason
from fedsweep.world.data.huggingface_source import Source, numbered
from fedsweep.world.data.record import Array, Dataset, Samples
from fedsweep.world.data.torchvision_compat import import_transformers

if TYPE_CHECKING:
    import datasets

_LENGTH, _LONGEST = 64, 65_536
_LARGEST = float(np.finfo(np.float32).max)
# A target that counts for nothing: it lies behind a text's end.
_NOTHING = -100
_ARRAYS = {"input_ids": np.int32, "attention_mask": np.uint8}


def dataset(source: Source) -> Dataset:
    """Return texts or rows of numbers with what is learned of them.

    Args:
        source: The data set and the user's options, of which ``text`` or ``columns`` is there.

    Raises:
        DataError: A column or the tokenizer is not there, or holds something else.
        ResourceError: The package ``transformers`` is not installed.
    """
    used, label = source.used(), source.options.get("label")
    if "text" not in source.options and label is None:
        raise DataError(f"{source.name}: which column is learned? Say label=COLUMN behind the name")
    classes: tuple[str, ...] = ()
    inputs: list[Any]
    num_outputs = 0
    if "text" in source.options:
        inputs, num_outputs = _texts(source, used)
    else:
        inputs = list(_rows(source, used))
    if label is None:
        targets = [_next_tokens(texts) for texts in inputs]
    else:
        targets, classes = _labels(source, label, used)
        num_outputs = len(classes)
    samples = [
        Samples(inputs=rows, targets=wanted, groups=groups)
        for rows, wanted, groups in zip(inputs, targets, source.writers(used), strict=True)
    ]
    if len(samples) == 1:
        samples = [samples[0].taken(np.flatnonzero(rows)) for rows in source.divided(len(samples[0]))]
    named = () if label is None else classes
    return Dataset(name=source.name, train=samples[0], test=samples[1], num_classes=num_outputs, class_names=named)


def _texts(source: Source, used: list[datasets.Dataset]) -> tuple[list[dict[str, Array]], int]:
    """Return the texts' ids and masks [S, T], and how many words there are."""
    length = source.options.get("length", str(_LENGTH))
    if not length.isascii() or not length.isdigit() or not 2 <= int(length) <= _LONGEST:
        raise DataError(f"{source.name}: length must be an integer of 2 to {_LONGEST}, but is {length}")
    if "tokenizer" not in source.options:
        raise DataError(f"{source.name}: say tokenizer=FOLDER behind the name, a folder with a tokenizer.json")
    place = Path(source.options["tokenizer"]).expanduser().absolute()
    if not place.is_dir():
        raise DataError(f"{source.name}: there is no tokenizer's folder {place}")
    tokenizer = _tokenizer(source, place)
    parts = []
    for part in used:
        texts = source.filled(source.named(source.options["text"], part), part)
        if (odd := next((row for row, text in enumerate(texts) if not isinstance(text, str)), None)) is not None:
            raise DataError(
                f"{source.name}: the column {source.options['text']} must hold texts, but {source.place(odd, part)}"
                f" holds {str(texts[odd])[:50]}"
            )
        coded = tokenizer(texts, truncation=True, padding="max_length", max_length=int(length))
        ids, mask = (np.asarray(coded[name], dtype=kind) for name, kind in _ARRAYS.items())
        parts.append({"input_ids": ids, "attention_mask": mask})
    return parts, len(tokenizer)


def _tokenizer(source: Source, place: Path) -> Any:
    """Return the tokenizer in a folder, with a token that fills texts up."""
    transformers = import_transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # as of tables
        raise DataError(f"{source.name}: the tokenizer in {place} can't be read ({reason(error)})") from error
    # The library makes one of a configuration alone, to which every word is unknown.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise DataError(f"{source.name}: the tokenizer in {place} has no words; put its tokenizer.json there")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token is None:
        raise DataError(
            f"{source.name}: the tokenizer in {place} has no token to fill texts up with; name one as pad_token in its"
            " tokenizer_config.json"
        )
    return tokenizer


def _next_tokens(texts: dict[str, Array]) -> NDArray[np.int64]:
    """Return for each position the id behind it; nothing where either is padding, on whichever side that is."""
    ids, mask = texts["input_ids"], texts["attention_mask"]
    targets = np.full(ids.shape, _NOTHING, dtype=np.int64)
    targets[:, :-1] = np.where(mask[:, :-1] & mask[:, 1:], ids[:, 1:], _NOTHING)
    return targets


def _rows(source: Source, used: list[datasets.Dataset]) -> list[NDArray[np.float32]]:
    """Return the chosen columns of each part as rows [S, F]."""
    columns = []
    for name in map(str.strip, source.options["columns"].split(",")):
        if name == source.options["label"]:
            raise DataError(f"{source.name}: the column {name} is learned, so it can't be an input, too")
        parts = [source.values(source.named(name, part), part) for part in used]
        for values, part in zip(parts, used, strict=True):
            if values.ndim != 1 or values.dtype.kind not in "buif":
                row = next((row for row, value in enumerate(values.tolist()) if not _is_number(value)), 0)
                raise DataError(
                    f"{source.name}: the column {name} must hold numbers, but {source.place(row, part)} holds"
                    f" {str(values[row])[:50]!r}"
                )
        columns.append(_narrowed(source, name, parts))
    return [np.stack(part, axis=1) for part in zip(*columns, strict=True)]


def _is_number(value: Any) -> bool:
    with contextlib.suppress(TypeError, ValueError):
        return math.isfinite(float(value))
    return False


def _labels(source: Source, column: str, used: list[datasets.Dataset]) -> tuple[list[Array], tuple[str, ...]]:
    """Return targets [S]: classes with their names, or numbers without; lists [S, K] are no classes."""
    values, names = source.classes([column] * len(used), used)
    if any(part.dtype.kind == "f" for part in values):
        return list(_narrowed(source, column, values)), ()
    if not names and values[0].ndim == 1:
        values, names = numbered(values)
    return [part.astype(np.int64) for part in values], tuple(map(str, names))


def _narrowed(source: Source, column: str, parts: list[Array]) -> list[NDArray[np.float32]]:
    """Return a column's numbers in float32, as networks take them.

    Raises:
        DataError: That moves one by more than a thousandth of the range that the numbers lie in.
    """
    with np.errstate(over="ignore"):  # what is too large is refused with all that is not finite
        narrow = [part.astype(np.float32) for part in parts]
    ends = [end.item() for part in parts if part.size for end in (part.min(), part.max())]
    lowest, highest = min(ends, default=0), max(ends, default=0)
    most, bound = max(-lowest, highest), (highest - lowest) / 1000
    if not bound or not most <= _LARGEST or float(np.spacing(np.float32(most))) / 2 <= bound:
        return narrow
    for part, rounded in zip(parts, narrow, strict=True):
        values, first = np.unique(part, return_index=True)
        # Python's integers are exact.
        whole = values.dtype.kind in "iu"
        for value, close in zip(values.tolist(), rounded[first].tolist(), strict=True):
            if abs((int(close) if whole else close) - value) > bound:
                raise DataError(
                    f"{source.name}: the numbers of the column {column}, {lowest} to {highest}, lie too close for"
                    f" float32, in which {value} is {close:.12g}: subtract an offset beforehand, such as {lowest}"
                )
    return narrow
