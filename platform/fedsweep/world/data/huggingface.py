"""Data sets of the Hugging Face hub, and local folders that its package ``datasets`` reads.

``hf:NAME`` is a data set of the hub, ``hf:./FOLDER`` (or an absolute path, or one with ``~``) a local one: written by
``save_to_disk``, parquet files, or pictures in one folder per class below ``train`` and ``test``. What columns and
splits mean is found by their types; where that is not plain, the name goes on with
``?image=COLUMN&label=COLUMN&writer=COLUMN&train=SPLIT&test=SPLIT&config=NAME``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray

from fedsweep.errors import DataError, FedsweepError, ResourceError, unknown_name
from fedsweep.streams import Stream
from fedsweep.world.data.cache import Arrays, cached_arrays, with_progress
from fedsweep.world.data.record import Dataset

if TYPE_CHECKING:
    import datasets

PREFIX = "hf:"
_OPTIONS = ("image", "label", "writer", "train", "test", "config")
_TEST_SPLITS = ("test", "validation", "valid", "val")
_LABELS = ("label", "labels", "fine_label", "character")
_TEST_SHARE = 0.2
_MOST_PIXELS = 4096 * 4096


def load(name: str, *, download: bool, image_size: int | None) -> Dataset:
    """Load a data set of images with labels.

    Where there is no split for testing, a fifth of the training split becomes the test set, the same in every run.
    Pictures are grey where all are; mean and deviation are those of the training pictures.

    Args:
        name: What follows ``hf:``.
        download: Whether the network may be used; what was fetched before is found without it.
        image_size: Height and width of all pictures; needed where theirs differ.

    Raises:
        ResourceError: The package ``datasets`` is not installed.
        DataError: There is no such data set, it can't be read, or has no pictures with labels.
    """
    place, _, query = name.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    for option in options:
        if option not in _OPTIONS:
            raise DataError(f"scenario.dataset {PREFIX}{name}: {unknown_name('option', option, _OPTIONS)}")
    try:
        import datasets as library
    except ImportError as error:
        raise ResourceError(f"{PREFIX}{place} needs the package datasets: pip install 'fedsweep[hf]'") from error
    library.disable_progress_bars()
    try:
        splits = _splits(place, options, download=download)
        source = _Source(name=f"{PREFIX}{place}", options=options, splits=splits)
        return _dataset(source, image_size=image_size)
    except FedsweepError:
        raise
    except Exception as error:  # its readers raise what they like, for what is not there as for what is damaged
        reason = " ".join(str(error).split())[:300]
        offline = "" if download or _is_folder(place) else "; scenario.download is false"
        raise DataError(f"{PREFIX}{place} can't be loaded ({type(error).__name__}: {reason}){offline}") from error


def _is_folder(place: str) -> bool:
    return place.startswith((".", "/", "~"))


def _splits(place: str, options: Mapping[str, str], *, download: bool) -> Mapping[str, datasets.Dataset]:
    import datasets as library

    if not _is_folder(place):
        local = library.DownloadConfig(local_files_only=not download)
        return dict(library.load_dataset(place, options.get("config"), download_config=local))
    folder = Path(place).expanduser()
    if not folder.is_dir():
        raise DataError(f"{PREFIX}{place}: there is no folder {folder}")
    if any((folder / file).exists() for file in ("dataset_dict.json", "state.json")):
        stored = library.load_from_disk(str(folder))
        return {"train": stored} if isinstance(stored, library.Dataset) else dict(stored)
    # The reader is named, so that a folder's content can't choose one.
    reader = "parquet" if any(folder.rglob("*.parquet")) else "imagefolder"
    return dict(library.load_dataset(reader, data_dir=str(folder)))


@dataclass(frozen=True, kw_only=True)
class _Source:
    """An opened data set, before any picture is read."""

    name: str
    options: Mapping[str, str]
    splits: Mapping[str, datasets.Dataset]

    def split(self, role: str, candidates: tuple[str, ...]) -> str | None:
        """Return the split that has a role, as the user or its name says."""
        choice = self.options.get(role)
        if choice is not None and choice not in self.splits:
            raise DataError(f"{self.name}: {unknown_name('split', choice, list(self.splits))}")
        return choice or next((split for split in candidates if split in self.splits), None)

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
        if choice is None or choice not in names:
            raise DataError(
                f"{self.name}: which column is the {role}? Say ?{role}=COLUMN behind the name; there are"
                f" {', '.join(names)}"
            )
        return choice


def _dataset(source: _Source, *, image_size: int | None) -> Dataset:
    train = source.split("train", ("train", *source.splits))
    if train is None:
        raise DataError(f"{source.name} holds nothing")
    test = source.split("test", _TEST_SPLITS)
    test = None if test == train else test
    used = [source.splits[split] for split in (train, test) if split is not None]
    labels = source.column("label", used[0])
    arrays = cached_arrays(
        f"hf-{image_size or 'own'}",
        sources=[Path(file["filename"]) for part in used for file in part.cache_files],
        decode=lambda: _decoded(source, used, image_size=image_size),
    )
    values = arrays["train_images"] / np.float32(255)
    names = getattr(used[0].features[labels], "names", None)
    return Dataset.images(
        name=source.name,
        **{key: values for key, values in arrays.items() if key != "train_writers"},
        num_classes=len(names) if names else int(arrays["train_labels"].max()) + 1,
        scale=255.0,
        mean=tuple(float(mean) for mean in values.mean(axis=(0, 2, 3), dtype=np.float64)),
        # A channel of one value has no deviation, and images are divided by it.
        std=tuple(float(max(std, 1e-6)) for std in values.std(axis=(0, 2, 3), dtype=np.float64)),
        writers=arrays.get("train_writers"),
        class_names=tuple(names or ()),
    )


def _decoded(source: _Source, used: list[datasets.Dataset], *, image_size: int | None) -> Arrays:
    parts = [_part(source, part, image_size=image_size) for part in used]
    grey = all(part["images"].shape[1] == 1 for part in parts)
    for part in parts:
        if not grey and part["images"].shape[1] == 1:
            part["images"] = np.repeat(part["images"], 3, axis=1)
    if len(parts) == 1:
        chosen = Stream(("hf-split",)).numpy().random(len(parts[0]["labels"])) < _TEST_SHARE
        parts = [{key: values[rows] for key, values in parts[0].items()} for rows in (~chosen, chosen)]
    return {
        f"{role}_{key}": values
        for role, part in zip(("train", "test"), parts, strict=True)
        for key, values in part.items()
        if (role, key) != ("test", "writers")
    }


def _part(source: _Source, part: datasets.Dataset, *, image_size: int | None) -> Arrays:
    images, label = source.column("image", part), source.column("label", part)
    arrays: Arrays = {
        "images": _pictures(source.name, part.select_columns([images]), images, image_size=image_size),
        "labels": np.asarray(part[label][:], dtype=np.int64),
    }
    if (writer := source.options.get("writer")) is not None:
        if writer not in part.column_names:
            raise DataError(f"{source.name}: {unknown_name('column', writer, part.column_names)}")
        arrays["writers"] = np.unique(np.asarray(part[writer][:]), return_inverse=True)[1].reshape(-1)
    return arrays


def _pictures(name: str, rows: datasets.Dataset, column: str, *, image_size: int | None) -> NDArray[np.uint8]:
    """Decode pictures to ``[S, C, H, W]``; one channel where every picture is grey."""
    from PIL.Image import Resampling

    pictures: list[NDArray[np.uint8]] = []
    for row in with_progress(rows, label=f"reading {name}"):
        picture = row[column]
        if picture.width * picture.height > _MOST_PIXELS:
            raise DataError(
                f"{name}: a picture has {picture.width} x {picture.height} pixels, more than {_MOST_PIXELS}"
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
