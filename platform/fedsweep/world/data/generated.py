"""Small data sets for tasks other than classification, generated or part of the package: nothing is downloaded.

They are the same whatever a run's seed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsweep.streams import Stream
from fedsweep.world.data.record import Dataset, Pixels, Samples

_SPEAKERS, _LINES_EACH, _LENGTH = 40, 40, 32
_LETTERS = "abcdefghijklmnopqrstuvwxyz .,"
_VERBS = ("sees", "likes", "finds", "takes", "hears", "wants", "keeps", "loses")
_THINGS = ("cat", "dog", "sun", "sea", "tree", "boat", "bird", "road", "stone", "lamp", "song", "wind")
_PEOPLE = ("anna", "ben", "clara", "david", "emma", "felix", "greta", "hugo")
_SIDE, _SHAPES_TRAIN, _SHAPES_TEST = 16, 800, 200
_PAIRS_TRAIN, _PAIRS_TEST = 2000, 500


def load_lines(root: Path, *, download: bool) -> Dataset:
    """Load lines of a small grammar by 40 speakers, 29 letters: 32 letters in, for each the next one.

    A speaker has a few people, verbs and things of its own; a fifth of each one's lines is the test.
    """
    del root, download
    ids = {letter: number for number, letter in enumerate(_LETTERS)}
    rows = {"train": [], "test": []}  # type: dict[str, list[tuple[int, list[int]]]]
    for speaker in range(_SPEAKERS):
        generator = Stream(("lines", speaker)).numpy()
        own = [list(generator.choice(words, size=3, replace=False)) for words in (_PEOPLE, _VERBS, _THINGS)]
        for line in range(_LINES_EACH):
            text = ""
            while len(text) <= _LENGTH:
                person, verb, thing = (str(generator.choice(words)) for words in own)
                text += f"{person} {verb} the {thing}. "
            part = "test" if line % 5 == 4 else "train"
            rows[part].append((speaker, [ids[letter] for letter in text[: _LENGTH + 1]]))

    def samples(part: str) -> Samples:
        letters = np.array([row for _, row in rows[part]], dtype=np.uint8)
        groups = np.array([speaker for speaker, _ in rows[part]])
        return Samples(inputs=letters[:, :-1], targets=letters[:, 1:].astype(np.int64), groups=groups)

    return Dataset(
        name="lines",
        train=samples("train"),
        test=samples("test"),
        num_classes=len(_LETTERS),
        class_names=tuple(_LETTERS),
    )


def load_diabetes(root: Path, *, download: bool) -> Dataset:
    """Load ten measurements of 442 patients, standardised, and a measure of how their diabetes went on in a year.

    354 for training, 88 for testing, always the same; targets are in units of 100.
    """
    del root, download
    table: NDArray[np.float32] = np.load(Path(__file__).with_name("diabetes.npy"), allow_pickle=False)
    order = Stream(("diabetes-split",)).numpy().permutation(len(table))
    test, train = np.sort(order[:88]), np.sort(order[88:])
    mean, std = table[train, :-1].mean(axis=0), table[train, :-1].std(axis=0)

    def samples(index: NDArray[np.int64]) -> Samples:
        return Samples(inputs=(table[index, :-1] - mean) / std, targets=table[index, -1] / np.float32(100))

    return Dataset(name="diabetes", train=samples(train), test=samples(test))


def load_shapes(root: Path, *, download: bool) -> Dataset:
    """Load pictures of one square, disc or cross on noise, 16 x 16 grey; each pixel is that or background."""
    del root, download
    generator = Stream(("shapes",)).numpy()
    count = _SHAPES_TRAIN + _SHAPES_TEST
    kinds, radii = generator.integers(1, 4, count), generator.integers(2, 5, count)
    centres = generator.integers(4, _SIDE - 4, (count, 2))
    rows, columns = (
        grid - centre[:, None, None] for grid, centre in zip(np.indices((_SIDE, _SIDE)), centres.T, strict=True)
    )
    size = radii[:, None, None]
    inside = np.select(
        [kinds[:, None, None] == 1, kinds[:, None, None] == 2],
        [np.maximum(abs(rows), abs(columns)) <= size, rows**2 + columns**2 <= size**2],
        default=((abs(rows) <= 1) & (abs(columns) <= size)) | ((abs(columns) <= 1) & (abs(rows) <= size)),
    )
    masks = np.where(inside, kinds[:, None, None], 0)
    light = 90 + 90 * inside + generator.normal(0, 30, inside.shape)
    pictures = light.clip(0, 255).astype(np.uint8)[:, None]
    return Dataset(
        name="shapes",
        train=Samples(inputs=pictures[:_SHAPES_TRAIN], targets=masks[:_SHAPES_TRAIN]),
        test=Samples(inputs=pictures[_SHAPES_TRAIN:], targets=masks[_SHAPES_TRAIN:]),
        num_classes=4,
        class_names=("background", "square", "disc", "cross"),
        pixels=Pixels(scale=255.0, mean=(0.4,), std=(0.2,)),
    )


def paired(digits: Dataset) -> Dataset:
    """Return pictures of two digits side by side, 8 x 16 grey, with a 1 for each of the ten digits that is there."""

    def samples(part: Samples, count: int) -> Samples:
        chosen = Stream(("pairs", len(part))).numpy().integers(0, len(part), (count, 2))
        labels = np.zeros((count, digits.num_classes), np.int64)
        for side in range(2):
            labels[np.arange(count), part.targets[chosen[:, side]]] = 1
        return Samples(
            inputs=np.concatenate([part.inputs[chosen[:, side]] for side in range(2)], axis=3), targets=labels
        )

    return replace(
        digits, name="multi_digits", train=samples(digits.train, _PAIRS_TRAIN), test=samples(digits.test, _PAIRS_TEST)
    )
