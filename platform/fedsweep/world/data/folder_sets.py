"""CINIC-10 and TinyImageNet, from the folders that their official archives unpack to.

Both are many small pictures; the decoded arrays are kept in the user's cache, so that minutes pass only once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsweep.errors import DataError
from fedsweep.world.data.cache import Arrays, cached_arrays, with_progress
from fedsweep.world.data.record import Dataset, of_bytes

# The folders below the data folder that may hold a set, and what must be in them.
_PLACES = {
    "cinic10": (("CINIC-10", "cinic-10", "cinic10", "."), ("train/airplane", "test/airplane")),
    "tiny_imagenet": (("tiny-imagenet-200", "tiny_imagenet", "."), ("train", "val/val_annotations.txt", "wnids.txt")),
}

Labelled = list[tuple[Path, int]]


def find(name: str, root: Path) -> Path | None:
    """Return the folder that holds a set; None where there is none."""
    places, needs = _PLACES[name]
    return next((root / place for place in places if all((root / place / need).exists() for need in needs)), None)


def load_cinic10(root: Path, *, download: bool) -> Dataset:
    """Load CINIC-10, 32 x 32 colour, 10 classes, 90,000 images each for training and testing, without its ``valid``.

    Source: Darlow et al. 2018, "CINIC-10 is not ImageNet or CIFAR-10".

    Raises:
        DataError: the folder is not there (``download`` changes nothing), or a picture is damaged.
    """
    folder = find("cinic10", root)
    if folder is None:
        raise DataError(
            f"data set 'cinic10' is not under {root}; fetch "
            "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz and unpack it to "
            f"{root / 'CINIC-10'} (with the folders train, valid, test); fedsweep does not download it"
        )
    class_names = sorted(entry.name for entry in (folder / "train").iterdir() if entry.is_dir())
    samples = {part: _class_folders(folder / part, class_names) for part in ("train", "test")}
    arrays = _decoded("cinic10", samples, side=32, extra_sources=())
    pixels = (0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)
    return of_bytes("cinic10", arrays, pixels=pixels, classes=class_names)


def load_tiny_imagenet(root: Path, *, download: bool) -> Dataset:
    """Load TinyImageNet, 64 x 64 colour, 200 classes, 100,000 training images; the 10,000 of ``val`` are the test set.

    Reading: the official ``test`` has no public labels, so the validation pictures and their annotations are used.

    Raises:
        DataError: the folder is not there (``download`` changes nothing), or a file is damaged.
    """
    folder = find("tiny_imagenet", root)
    if folder is None:
        raise DataError(
            f"data set 'tiny_imagenet' is not under {root}; fetch http://cs231n.stanford.edu/tiny-imagenet-200.zip "
            f"(md5 90528d7ca1a48142e341f4ef8d21d0de) and unpack it to {root / 'tiny-imagenet-200'}; fedsweep does not "
            "download it"
        )
    class_ids = sorted((folder / "wnids.txt").read_text(encoding="utf-8").split())
    annotations = folder / "val" / "val_annotations.txt"
    samples = {
        "train": _class_folders(folder / "train", class_ids, inner="images"),
        "test": _annotated(annotations, class_ids),
    }
    arrays = _decoded("tiny_imagenet", samples, side=64, extra_sources=(annotations,))
    pixels = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
    return of_bytes("tiny_imagenet", arrays, pixels=pixels, classes=_words(folder / "words.txt", class_ids))


def _class_folders(folder: Path, class_names: Sequence[str], *, inner: str = ".") -> Labelled:
    """Return the pictures of one folder per class, class by class, by file name."""
    samples: Labelled = []
    for label, name in enumerate(class_names):
        files = sorted(path for path in (folder / name / inner).glob("*") if path.suffix.lower() in (".png", ".jpeg"))
        if not files:
            raise DataError(f"{folder / name / inner} holds no pictures; unpack the data set again")
        samples.extend((path, label) for path in files)
    return samples


def _annotated(annotations: Path, class_ids: Sequence[str]) -> Labelled:
    """Return the pictures that the annotation file names: file, class id and box, separated by tabs."""
    numbers = {name: label for label, name in enumerate(class_ids)}
    samples: Labelled = []
    for line in annotations.read_text(encoding="utf-8").splitlines():
        fields = line.split("\t")
        if len(fields) < 2 or fields[1] not in numbers:
            raise DataError(f"{annotations}: the line {line!r} names no file and class of wnids.txt")
        samples.append((annotations.parent / "images" / fields[0], numbers[fields[1]]))
    return samples


def _words(path: Path, class_ids: Sequence[str]) -> tuple[str, ...]:
    """Return the classes' names in words where the file is there, else their ids."""
    if not path.exists():
        return tuple(class_ids)
    lines = (line.partition("\t") for line in path.read_text(encoding="utf-8").splitlines())
    words = {class_id: text.split(",")[0].strip() for class_id, _, text in lines}
    return tuple(words.get(class_id, class_id) for class_id in class_ids)


def _decoded(name: str, samples: dict[str, Labelled], *, side: int, extra_sources: Sequence[Path]) -> Arrays:
    sources = [*(path for part in samples.values() for path, _ in part), *extra_sources]
    absent = [path for path in sources if not path.exists()]
    if absent:
        raise DataError(f"data set {name!r}: {len(absent)} files are missing, the first is {absent[0]}")

    def decode() -> Arrays:
        arrays: Arrays = {}
        for part, labelled in samples.items():
            arrays[f"{part}_images"] = _decode_pictures([path for path, _ in labelled], side=side, label=name)
            arrays[f"{part}_labels"] = np.array([label for _, label in labelled], dtype=np.int64)
        return arrays

    return cached_arrays(name, sources=sources, decode=decode)


def _decode_pictures(paths: Sequence[Path], *, side: int, label: str) -> NDArray[np.uint8]:
    """Decode pictures to ``[S, 3, side, side]``; a grey one gets three equal channels."""
    from PIL import Image

    images = np.empty((len(paths), 3, side, side), np.uint8)
    for index, path in enumerate(with_progress(paths, label=f"reading {label}")):
        try:
            with Image.open(path) as picture:
                pixels = np.asarray(picture.convert("RGB"))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as a picture: {error}") from error
        if pixels.shape != (side, side, 3):
            raise DataError(f"{path} should have {side} x {side} pixels, but has {pixels.shape[1]} x {pixels.shape[0]}")
        images[index] = pixels.transpose(2, 0, 1)
    return images
