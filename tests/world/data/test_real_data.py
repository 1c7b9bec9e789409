"""The official files, where ``FEDSWEEP_TEST_DATA`` names a folder that holds them."""

import hashlib
import os

import numpy as np
import pytest

from fedsweep.world.data.datasets import Dataset, is_present, load_dataset

ROOT = os.environ.get("FEDSWEEP_TEST_DATA")


def load(name: str) -> Dataset:
    if ROOT is None:
        pytest.skip("FEDSWEEP_TEST_DATA does not name a folder with data sets")
    if not is_present(name, root=ROOT):
        pytest.skip(f"{name} is not under FEDSWEEP_TEST_DATA={ROOT}")
    return load_dataset(name, root=ROOT, download=False)


def test_fashion_mnist_is_complete_and_its_constants_are_its_own() -> None:
    dataset = load("fashion_mnist")
    assert dataset.train_images.shape == (60000, 1, 28, 28) and dataset.test_images.shape == (10000, 1, 28, 28)
    assert np.bincount(dataset.train_labels).tolist() == [6000] * 10
    pixels = dataset.train_images[::10] / dataset.scale
    assert dataset.mean[0] == pytest.approx(pixels.mean(), abs=5e-3)
    assert dataset.std[0] == pytest.approx(pixels.std(), abs=5e-3)


def test_cifar10_has_the_official_pixels_and_constants() -> None:
    dataset = load("cifar10")
    assert hashlib.md5(dataset.train_images.tobytes()).hexdigest() == "11af95666bd6fd7846144e768325bf13"
    assert hashlib.md5(dataset.test_images.tobytes()).hexdigest() == "f1aa22116df97725db0e47461c45a82b"
    assert np.bincount(dataset.train_labels).tolist() == [5000] * 10
    assert dataset.class_names[:2] == ("airplane", "automobile")
    pixels = dataset.train_images[::10] / dataset.scale
    assert dataset.mean == pytest.approx(tuple(pixels.mean(axis=(0, 2, 3))), abs=5e-3)
    assert dataset.std == pytest.approx(tuple(pixels.std(axis=(0, 2, 3))), abs=5e-3)
