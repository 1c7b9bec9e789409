"""Opens data sets that Hugging Face's ``datasets`` reads, and finds their splits and columns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray

from fedsweep.errors import DataError, unknown_name
from fedsweep.streams import Stream
from fedsweep.world.data.huggingface_folder import files_of, layout
from fedsweep.world.data.huggingface_reading import read

if TYPE_CHECKING:
    import datasets

PREFIX = "hf:"
_OPTIONS = ("image", "label", "writer", "train", "test", "config", "text", "tokenizer", "length", "columns")
_TEST_SPLITS = ("test", "validation", "valid", "val")
_LABELS = ("label", "labels", "fine_label", "character")
_TEST_SHARE = 0.2


def read_options(name: str) -> dict[str, str]:
    """Return what a name says of columns and splits behind its question mark.

    Raises:
        DataError: An option is unknown.
    """
    options = dict(parse_qsl(name.partition("?")[2], keep_blank_values=True))
    for option in options:
        if option not in _OPTIONS:
            raise DataError(f"scenario.dataset {PREFIX}{name}: {unknown_name('option', option, _OPTIONS)}")
    return options


def is_folder(place: str) -> bool:
    """Return whether a name means a local folder."""
    return place.startswith((".", "/", "~"))


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keep the library to what was fetched before: told so by its arguments, it asks the hub all the same."""
    import datasets as library
    from huggingface_hub import constants

    before = library.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    library.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        library.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def open_splits(place: str, options: Mapping[str, str], *, download: bool) -> Mapping[str, datasets.Dataset]:
    """Open a data set's splits by name; no sample is read."""
    import datasets as library

    if not is_folder(place):
        with contextlib.nullcontext() if download else _offline():
            return dict(library.load_dataset(place, options.get("config")))
    folder = Path(place).expanduser()
    if not folder.is_dir():
        raise DataError(f"{PREFIX}{place}: there is no folder {folder.absolute()}")
    if any((folder / file).exists() for file in ("dataset_dict.json", "state.json")):
        stored = library.load_from_disk(str(folder))
        return {"train": stored} if isinstance(stored, library.Dataset) else dict(stored)
    reader, splits = layout(f"{PREFIX}{place}", files_of(folder), as_table="text" in options or "columns" in options)
    if not splits:
        raise DataError(
            f"{PREFIX}{place}: there are no pictures in {folder}; of a table say ?columns=A,B&label=C behind the name,"
            " of texts ?text=COLUMN; tables are called .parquet, .csv, .jsonl or .json"
        )
    return read(f"{PREFIX}{place}", folder, reader, splits)


@dataclass(frozen=True, kw_only=True)
class Source:
    """An opened data set, before any sample is read.

    Attributes:
        name: As it was named.
        options: What the name says of columns and splits.
        splits: The library's data sets by name.
        for_test: Whether the samples for testing alone are wanted, so that there need be no others.
    """

    name: str
    options: Mapping[str, str]
    splits: Mapping[str, datasets.Dataset]
    for_test: bool = False

    def split(self, role: str, candidates: tuple[str, ...]) -> str | None:
        """Return the split that has a role, as the user or its name says."""
        choice = self.options.get(role)
        if choice is not None and choice not in self.splits:
            raise DataError(f"{self.name}: {unknown_name('split', choice, list(self.splits))}")
        return choice or next((split for split in candidates if split in self.splits), None)

    def _roles(self) -> tuple[str | None, str | None]:
        """Return the splits for training and for testing; one for testing alone has no samples for training."""
        test = self.split("test", _TEST_SPLITS)
        return self.split("train", tuple(split for split in ("train", *self.splits) if split != test)), test

    def used(self) -> list[datasets.Dataset]:
        """Return the training split, and the one for testing where there is one; of a test alone that one.

        Raises:
            DataError: There are no samples, or none for training where these are wanted.
        """
        train, test = self._roles()
        if train is None and test is None:
            raise DataError(f"{self.name} holds nothing")
        if train is None and not self.for_test:
            raise DataError(
                f"{self.name} has samples for testing alone, the split {test}, and none for training; to train on"
                f" them and keep a fifth for testing, say ?train={test} behind the name"
            )
        return [self.splits[split] for split in dict.fromkeys((train, test)) if split is not None]

    def divided(self, count: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which samples of the one split that is used are for training, and which for testing.

        All are for both where it is a split for testing: then nobody trains on them.
        """
        if self._roles()[0] is None:
            everything = np.ones(count, dtype=bool)
            return everything, everything
        chosen = Stream(("hf-split",)).numpy().random(count) < _TEST_SHARE
        if chosen.all() or not chosen.any():
            raise DataError(
                f"{self.name} has no split for testing, and too few samples ({count}) to keep a fifth of them for it"
            )
        return ~chosen, chosen

    def named(self, column: str, of: datasets.Dataset) -> str:
        """Return a column that the user named, and refuse one that is not there."""
        if column not in of.column_names:
            way = ""
            if len(of.column_names) == 1 and {*";\t|"} & {*of.column_names[0]}:
                way = "; in a csv file commas part the columns"
            raise DataError(f"{self.name}: {unknown_name('column', column, of.column_names)}{way}")
        return column

    def place(self, row: int, of: datasets.Dataset) -> str:
        """Return what a row is called, from 1, with its split where there are several."""
        split = next(name for name, part in self.splits.items() if part is of)
        return f"row {row + 1}{f' of {split}' if len(self.splits) > 1 else ''}"

    def values(self, column: str, of: datasets.Dataset) -> NDArray[Any]:
        """Return a column's values [S], or of lists [S, K], of which none may be missing or not finite."""
        filled = self.filled(column, of)
        if filled and isinstance(filled[0], dict):
            raise DataError(
                f"{self.name}: the column {column} must hold one value in each row, or lists of one length, but"
                f" {self.place(0, of)} holds {str(filled[0])[:50]}"
            )
        lengths = [len(value) if isinstance(value, list) else None for value in filled]
        if odd := next((row for row, length in enumerate(lengths) if length != lengths[0]), 0):
            raise DataError(
                f"{self.name}: the column {column} must hold one value in each row, or lists of one length, but"
                f" {self.place(0, of)} holds {str(filled[0])[:50]} and {self.place(odd, of)} {str(filled[odd])[:50]}"
            )
        if filled and isinstance(filled[0], Decimal):  # each with as many digits behind the point as its column's type
            is_whole = int(filled[0].as_tuple().exponent) >= 0
            filled = [int(value) if is_whole else float(value) for value in filled]
        values = np.asarray(filled)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            row = int(np.argwhere(~np.isfinite(values))[0, 0])
            raise DataError(
                f"{self.name}: the column {column} must hold finite numbers, but holds {filled[row]} in"
                f" {self.place(row, of)}; mend the row, or leave it out"
            )
        return values

    def filled(self, column: str, of: datasets.Dataset) -> list[Any]:
        """Return a column's values as they are stored, of which none may be missing."""
        try:
            values: list[Any] = of[column][:]
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.name}: the column {column} holds texts that are not in UTF-8 ({error.reason}); save its files"
                " in UTF-8"
            ) from None
        missing = [row for row, value in enumerate(values) if value is None]
        if missing:
            rows = f"{len(missing)} of {len(values)} rows have no value, the first is {self.place(missing[0], of)}"
            raise DataError(f"{self.name}: the column {column} is not filled: {rows}")
        return values

    def classes(
        self, columns: Sequence[str], parts: Sequence[datasets.Dataset]
    ) -> tuple[list[NDArray[Any]], list[str]]:
        """Return each part's classes [S], and their names; numbers without names stay as they are.

        Parts may name other classes, or the same in another order: a class is what its name says. Those that the
        training part does not have come behind its own.
        """
        values = [self.values(self.named(column, part), part) for column, part in zip(columns, parts, strict=True)]
        named = [getattr(part.features[column], "names", None) for column, part in zip(columns, parts, strict=True)]
        is_text = any(part.dtype.kind not in "biuf" for part in values)
        if is_text and any(part.ndim > 1 for part in values):
            raise DataError(f"{self.name}: the column {columns[0]} holds lists of texts; a label is one text")
        if not is_text and (None in named or all(names == named[0] for names in named)):
            return values, list(named[0] or ())
        if any(names is not None and min(part) < 0 for names, part in zip(named, values, strict=True)):
            raise DataError(f"{self.name}: rows of the column {columns[0]} have no class (-1); leave them out")
        texts = [
            part.astype(str) if names is None else np.asarray(names)[part]
            for names, part in zip(named, values, strict=True)
        ]
        listed = [name for names in named for name in names or ()]
        seen = np.unique(np.concatenate(texts)).tolist()
        all_names = listed + seen if named[0] else seen + listed
        numbers = {name: n for n, name in enumerate(dict.fromkeys(all_names))}
        return [np.array([numbers[text] for text in part.tolist()]) for part in texts], list(numbers)

    def writers(self, parts: Sequence[datasets.Dataset]) -> list[NDArray[np.int64] | None]:
        """Return each sample's natural client [S], numbered over all parts, the training's first.

        None for all where nobody said which column it is, and for a test part that does not have it.
        """
        if (writer := self.options.get("writer")) is None:
            return [None] * len(parts)
        self.named(writer, parts[0])
        values = [self.values(writer, part) if writer in part.column_names else None for part in parts]
        if any(part is not None and part.ndim > 1 for part in values):
            raise DataError(f"{self.name}: the column {writer} must hold one client in each row, but holds lists")
        names = np.unique(np.concatenate([part for part in values if part is not None]))
        return [None if part is None else np.searchsorted(names, part).astype(np.int64) for part in values]

    def column(self, role: str, of: datasets.Dataset) -> str:
        """Return the column that has a role."""
        import datasets as library

        kinds = {"image": library.Image, "label": library.ClassLabel}
        choice = self.options.get(role)
        names: list[str] = of.column_names
        typed = [column for column in names if isinstance(of.features[column], kinds[role])]
        named = [column for column in names if role == "label" and column in _LABELS]
        fitting = [column for column in typed if column in named] or typed or named
        if choice is None and fitting and (len(fitting) == 1 or (role == "label" and fitting[0] in _LABELS)):
            choice = fitting[0]
        if role == "label" and all(isinstance(of.features[column], library.Image) for column in names):
            raise DataError(
                f"{self.name}: its pictures have no labels, since their folders make no two classes; each is a folder,"
                " train/CLASS/*.png, all of one depth, and one class alone is none"
            )
        if choice is None or choice not in names:
            raise DataError(
                f"{self.name}: which column is the {role}? Say ?{role}=COLUMN behind the name; there are"
                f" {', '.join(names)}"
            )
        if role == "image" and choice not in typed:
            raise DataError(f"{self.name}: the column {choice} holds no pictures")
        return choice


def numbered(parts: Sequence[NDArray[Any]]) -> tuple[list[NDArray[np.int64]], list[str]]:
    """Return numbers of each part [S] as classes, which are named by them; only those that a part has are one."""
    present = [np.unique(part, return_inverse=True) for part in parts]
    # As Python's numbers: signed and unsigned ones of 64 bits have no type in common.
    numbers = sorted({number for values, _ in present for number in values.tolist()})
    classes = {number: place for place, number in enumerate(numbers)}
    places = [np.array([classes[number] for number in values.tolist()], dtype=np.int64) for values, _ in present]
    return [own[rows] for own, (_, rows) in zip(places, present, strict=True)], list(map(str, numbers))
