"""FEMNIST and Shakespeare as LEAF's tools write them: JSON files with the samples of each writer or role.

Expected below the data folder, in ``femnist``, ``femnist/data`` or ``leaf/data/femnist/data``: the folders ``train``
and ``test``, or ``all_data`` alone; ``shakespeare`` likewise. Each file holds ``users``, ``num_samples`` and
``user_data``, which maps a user to ``x`` (784 numbers from 0 to 1 per image, or 80 letters) and ``y`` (labels 0..61, or
the letter that comes next).
"""

from __future__ import annotations

import json
import logging
import re
import string
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsweep.bounded import read_regular
from fedsweep.errors import DataError
from fedsweep.streams import Stream
from fedsweep.world.data.cache import Arrays, cached_arrays, with_progress
from fedsweep.world.data.record import Dataset, Samples, of_bytes

_logger = logging.getLogger(__name__)
_SHARD = re.compile(r"all_data_(\d+)")
_PLACES = ("{0}", "{0}/data", "leaf/data/{0}/data")
# LEAF's, in its order.
LETTERS = "\n !\"&'(),-.0123456789:;>?" + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"
_CLASSES = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
_WINDOW = 80
_SIDE = 28
_LARGEST_BYTES = 2**30
_TRAIN_SHARE = 0.8


def find(name: str, root: Path) -> Path | None:
    """Return the folder that holds LEAF's ``train`` and ``test``, or ``all_data``; None where there is none."""
    folders = [root / place.format(name) for place in _PLACES]
    for folder in [*folders, root] if name == "femnist" else folders:
        if _parts(folder):
            return folder
    return None


def _parts(folder: Path) -> tuple[str, ...]:
    """Return the parts that are read of a folder; none where they are not there."""
    ways = (("train", "test"), ("all_data",))
    return next((way for way in ways if all(any((folder / part).glob("*.json")) for part in way)), ())


def _located(name: str, root: Path) -> tuple[Path, tuple[str, ...], list[Path]]:
    """Return LEAF's folder, its parts, and the files in them."""
    folder = find(name, root)
    if folder is None:
        raise DataError(
            f"data set {name!r} is not under {root}; clone https://github.com/TalwalkarLab/leaf, run"
            f" data/{name}/preprocess.sh -s niid --sf 1.0 -k 0 -t sample, and copy data/{name}/data/train and"
            f" data/{name}/data/test (or all_data) to {root / name}; fedsweep does not download it"
        )
    parts = _parts(folder)
    return folder, parts, [file for part in parts for file in sorted((folder / part).glob("*.json"))]


def load_femnist(root: Path, *, download: bool) -> Dataset:
    """Load FEMNIST, 28 x 28 grey, 62 classes, each sample with its writer, of the test too.

    Where ``train`` and ``test`` are there, LEAF's split is used; where only ``all_data`` is, all samples are split at
    random 80 to 20, always in the same way.

    Source: Caldas et al. 2018 (LEAF); the split of all samples: DynamicFL's authors.

    Raises:
        DataError: the files are not there (they have to be made with LEAF's scripts, ``download`` changes nothing), or
            one is damaged.
    """
    folder, parts, sources = _located("femnist", root)
    _warn_of_gaps(folder, parts)
    arrays = cached_arrays("femnist-with-writers", sources=sources, decode=lambda: _decode(folder, parts))
    return of_bytes("femnist", arrays, pixels=((0.9614,), (0.1634,)), classes=_CLASSES)


def load_shakespeare(root: Path, *, download: bool) -> Dataset:
    """Load Shakespeare, 80 letters in, the next one of 80 asked for, each sample with its role, of the test too.

    Where ``train`` and ``test`` are there, LEAF's split is used; where only ``all_data`` is, the first 80 % of a role's
    windows are for training and, after the 79 that overlap with them, the rest for testing.

    Source: Caldas et al. 2018 (LEAF), after McMahan et al. 2017.

    Raises:
        DataError: the files are not there (they have to be made with LEAF's scripts, ``download`` changes nothing), or
            one is damaged.
    """
    folder, parts, sources = _located("shakespeare", root)
    arrays = cached_arrays("shakespeare", sources=sources, decode=lambda: _decode_lines(folder, parts))

    def samples(part: str) -> Samples:
        targets = np.full(arrays[f"{part}_inputs"].shape, -100, np.int16)  # the last position alone is asked for
        targets[:, -1] = arrays[f"{part}_targets"]
        return Samples(inputs=arrays[f"{part}_inputs"], targets=targets, groups=arrays[f"{part}_groups"])

    return Dataset(
        name="shakespeare",
        train=samples("train"),
        test=samples("test"),
        num_classes=len(LETTERS),
        class_names=tuple(LETTERS),
    )


def _decode_lines(folder: Path, parts: tuple[str, ...]) -> Arrays:
    read = [_read_part(folder / part, _read_lines, "Shakespeare") for part in parts]
    if len(read) == 1:
        inputs, letters, roles = read[0]
        _, first, numbers = np.unique(roles, return_index=True, return_inverse=True)
        order = np.argsort(first[numbers.reshape(-1)], kind="stable")  # role by role, as they come
        places = np.split(order, np.cumsum(np.bincount(numbers.reshape(-1))[np.argsort(first)])[:-1])
        cuts = [int(_TRAIN_SHARE * len(own)) for own in places]
        train = np.concatenate([own[:cut] for own, cut in zip(places, cuts, strict=True)] or [np.empty(0, np.int64)])
        test = np.concatenate(
            [own[cut + _WINDOW - 1 :] for own, cut in zip(places, cuts, strict=True)] or [np.empty(0, np.int64)]
        )
        read = [(inputs[index], letters[index], roles[index]) for index in (train, test)]
    names = np.unique(np.concatenate([roles for _, _, roles in read]))
    if not all(len(letters) for _, letters, _ in read):
        raise DataError(f"{folder}: the JSON files hold no training or no test samples")
    arrays: Arrays = {}
    for part, (inputs, letters, roles) in zip(("train", "test"), read, strict=True):
        arrays[f"{part}_inputs"], arrays[f"{part}_targets"] = inputs, letters
        arrays[f"{part}_groups"] = np.searchsorted(names, roles).astype(np.int64)
    return arrays


def _read_lines(data: dict[str, Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    windows, following = list(data["x"]), list(data["y"])
    if len(windows) != len(following) or not all(
        isinstance(x, str) and len(x) == _WINDOW and isinstance(y, str) and len(y) == 1
        for x, y in zip(windows, following, strict=True)
    ):
        raise ValueError(f"x must be texts of {_WINDOW} letters, y as many single letters")
    text = "".join(windows) + "".join(following)
    if others := sorted({*text} - {*LETTERS}):
        raise ValueError(f"{others[0]!r} is none of LEAF's {len(LETTERS)} letters")
    ids = np.zeros(128, np.uint8)
    ids[[ord(letter) for letter in LETTERS]] = np.arange(len(LETTERS))
    numbers = ids[np.frombuffer(text.encode("ascii"), np.uint8)]
    end = _WINDOW * len(windows)
    return numbers[:end].reshape(-1, _WINDOW), numbers[end:]


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
    images, labels, writers = _read_part(folder / parts[0], _read_user, "FEMNIST")
    if len(parts) == 2:
        test_images, test_labels, test_writers = _read_part(folder / parts[1], _read_user, "FEMNIST")
    else:
        order = np.argsort(Stream(("femnist-split",)).numpy().random(len(labels)), kind="stable")
        num_train = int(_TRAIN_SHARE * len(labels))
        train, test = np.sort(order[:num_train]), np.sort(order[num_train:])
        test_images, test_labels, test_writers = images[test], labels[test], writers[test]
        images, labels, writers = images[train], labels[train], writers[train]
    names = np.unique(np.concatenate([writers, test_writers]))
    if not len(labels) or not len(test_labels):
        raise DataError(f"{folder}: the JSON files hold no training or no test samples")
    return {
        "train_images": images,
        "train_labels": labels,
        "test_images": test_images,
        "test_labels": test_labels,
        "writers": np.searchsorted(names, writers).astype(np.int64),
        "test_writers": np.searchsorted(names, test_writers).astype(np.int64),
    }


def _read_part(
    folder: Path, read_user: Callable[[dict[str, Any]], tuple[NDArray[Any], NDArray[Any]]], what: str
) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.str_]]:
    """Read all samples of a folder, in the order of file names, then of users: inputs, labels, names of users."""
    inputs, labels = ([part] for part in read_user({"x": [], "y": []}))
    users: list[NDArray[np.str_]] = [np.empty(0, np.str_)]
    files: dict[tuple[str, bytes], Path] = {}
    for path in with_progress(sorted(folder.glob("*.json")), label=f"reading {folder.name}"):
        try:
            content = json.loads(read_regular(path, max_bytes=_LARGEST_BYTES, follow=True))
            if len({*content["users"]}) != len(content["users"]):
                raise ValueError("a user is listed twice")
            for user in content["users"]:
                own_inputs, own_labels = read_user(content["user_data"][user])
                digest = blake2b(own_inputs.tobytes() + own_labels.tobytes(), digest_size=16).digest()
                first = files.setdefault((str(user), digest), path)
                if first != path and len(own_labels):
                    raise ValueError(f"user {user} has the same samples in {first}: take away the one that is a copy")
                inputs.append(own_inputs)
                labels.append(own_labels)
                users.append(np.full(len(own_labels), str(user)))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"{path} is not a LEAF file of {what} ({type(error).__name__}: {error})") from error
    return np.concatenate(inputs), np.concatenate(labels), np.concatenate(users)


def _read_user(data: dict[str, Any]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    labels = list(data["y"])
    pixels = np.asarray(data["x"], dtype=np.float64).reshape(len(labels), 1, _SIDE, _SIDE)
    if pixels.size and not (pixels.min() >= 0 and pixels.max() <= 1):
        raise ValueError("pixels must lie in 0..1")
    if odd := [label for label in labels if type(label) is not int or not 0 <= label < len(_CLASSES)]:
        raise ValueError(f"labels must be integers in 0..{len(_CLASSES) - 1}, but one is {odd[0]!r:.50}")
    # LEAF wrote bytes divided by 255, so rounding gives the bytes back.
    return np.rint(pixels * 255).astype(np.uint8), np.array(labels, dtype=np.int64)
