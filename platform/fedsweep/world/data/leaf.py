"""FEMNIST as LEAF's tools write it: JSON files with the samples of each writer.

Expected below the data folder, in ``femnist``, ``femnist/data`` or ``leaf/data/femnist/data``: the folders ``train``
and ``test``, or ``all_data`` alone. Each file holds ``users``, ``num_samples`` and ``user_data``, which maps a user to
``x`` (784 numbers from 0 to 1 per image) and ``y`` (labels 0..61).
"""

from __future__ import annotations

import json
import logging
import re
import string
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsweep.bounded import read_regular
from fedsweep.errors import DataError
from fedsweep.streams import Stream
from fedsweep.world.data.cache import Arrays, cached_arrays, with_progress
from fedsweep.world.data.record import Dataset, of_bytes

_logger = logging.getLogger(__name__)
_SHARD = re.compile(r"all_data_(\d+)")
_PLACES = ("femnist", "femnist/data", "leaf/data/femnist/data", ".")
_SIDE = 28
_LARGEST_BYTES = 2**30
_TRAIN_SHARE = 0.8


def find_femnist(root: Path) -> Path | None:
    """Return the folder that holds LEAF's ``train`` and ``test``, or ``all_data``; None where there is none."""
    for place in _PLACES:
        folder = root / place
        has_split = any((folder / "train").glob("*.json")) and any((folder / "test").glob("*.json"))
        if has_split or any((folder / "all_data").glob("*.json")):
            return folder
    return None


def load_femnist(root: Path, *, download: bool) -> Dataset:
    """Load FEMNIST, 28 x 28 grey, 62 classes, each training sample with its writer.

    Where ``train`` and ``test`` are there, LEAF's split is used; where only ``all_data`` is, all samples are split at
    random 80 to 20, always in the same way.

    Source: Caldas et al. 2018 (LEAF); the split of all samples: DynamicFL's authors.

    Raises:
        DataError: the files are not there (they have to be made with LEAF's scripts, ``download`` changes nothing), or
            one is damaged.
    """
    folder = find_femnist(root)
    if folder is None:
        raise DataError(
            f"data set 'femnist' is not under {root}; clone https://github.com/TalwalkarLab/leaf, run "
            "data/femnist/preprocess.sh -s niid --sf 1.0 -k 0 -t sample, and copy data/femnist/data/train and "
            f"data/femnist/data/test (or all_data) to {root / 'femnist'}; fedsweep does not download it"
        )
    has_split = any((folder / "train").glob("*.json"))
    parts = ("train", "test") if has_split else ("all_data",)
    sources = [file for part in parts for file in sorted((folder / part).glob("*.json"))]
    _warn_of_gaps(folder, parts)
    arrays = cached_arrays("femnist", sources=sources, decode=lambda: _decode(folder, parts))
    class_names = [*string.digits, *string.ascii_uppercase, *string.ascii_lowercase]
    return of_bytes("femnist", arrays, pixels=((0.9614,), (0.1634,)), class_names=class_names)


def _warn_of_gaps(folder: Path, parts: tuple[str, ...]) -> None:
    """Warn of missing files, which LEAF numbers from 0: a copy that was cut short trains on fewer writers."""
    for part in parts:
        numbers = {int(shard[1]) for file in (folder / part).glob("*.json") if (shard := _SHARD.match(file.name))}
        if missing := sorted(set(range(max(numbers, default=-1) + 1)) - numbers):
            shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            _logger.warning(
                "femnist: %s lacks %d of %d shards (all_data_N, N = %s): the writers in them are missing",
                folder / part,
                len(missing),
                max(numbers) + 1,
                shown,
            )


def _decode(folder: Path, parts: tuple[str, ...]) -> Arrays:
    images, labels, writers = _read_part(folder / parts[0])
    if len(parts) == 2:
        test_images, test_labels, _ = _read_part(folder / parts[1])
    else:
        order = np.argsort(Stream(("femnist-split",)).numpy().random(len(labels)), kind="stable")
        num_train = int(_TRAIN_SHARE * len(labels))
        train, test = np.sort(order[:num_train]), np.sort(order[num_train:])
        test_images, test_labels = images[test], labels[test]
        images, labels, writers = images[train], labels[train], writers[train]
    names, writer_numbers = np.unique(writers, return_inverse=True)
    if not len(names) or not len(test_labels):
        raise DataError(f"{folder}: the JSON files hold no training or no test samples")
    return {
        "train_images": images,
        "train_labels": labels,
        "test_images": test_images,
        "test_labels": test_labels,
        "writers": writer_numbers.reshape(-1).astype(np.int64),
    }


def _read_part(folder: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.str_]]:
    """Read all samples of a folder, in the order of file names, then of users."""
    images: list[NDArray[np.uint8]] = [np.empty((0, 1, _SIDE, _SIDE), np.uint8)]
    labels: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
    writers: list[NDArray[np.str_]] = [np.empty(0, np.str_)]
    for path in with_progress(sorted(folder.glob("*.json")), label=f"reading {folder.name}"):
        try:
            content = json.loads(read_regular(path, max_bytes=_LARGEST_BYTES, follow=True))
            for user in content["users"]:
                user_images, user_labels = _read_user(content["user_data"][user])
                images.append(user_images)
                labels.append(user_labels)
                writers.append(np.full(len(user_labels), str(user)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is not a LEAF file of FEMNIST ({type(error).__name__}: {error})") from error
    return np.concatenate(images), np.concatenate(labels), np.concatenate(writers)


def _read_user(data: dict[str, Any]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    labels = np.asarray(data["y"], dtype=np.int64).reshape(-1)
    pixels = np.asarray(data["x"], dtype=np.float64).reshape(len(labels), 1, _SIDE, _SIDE)
    if pixels.size and not (pixels.min() >= 0 and pixels.max() <= 1):
        raise ValueError("pixels must lie in 0..1")
    # LEAF wrote bytes divided by 255, so rounding gives the bytes back.
    return np.rint(pixels * 255).astype(np.uint8), labels
