from pathlib import Path

import numpy as np
import pytest

from fedsweep.errors import ConfigError, DataError
from fedsweep.world.data.datasets import DATASETS, default_root, is_present, load_dataset

OWN_MODULE = """
import numpy as np
from fedsweep.errors import DataError
from fedsweep.world.data.datasets import Dataset

def floats(root, download):
    ramp = np.broadcast_to(np.linspace(0, 1, 8, dtype=np.float32), (3, 1, 8, 8)).copy()
    labels = np.array([0, 1, 0])
    return Dataset.images(name=f"{root}|{download}", train_images=ramp, train_labels=labels, test_images=ramp,
                   test_labels=labels, num_classes=2, scale=1.0, mean=(0.5,), std=(0.3,))

def wrong(root, download):
    return 3

def broken(root, download):
    raise FileNotFoundError("no pixels.csv")

def refused(root, download):
    raise DataError("mine is missing")

number = 4
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_dataset_module.py").write_text(OWN_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_digits_have_1437_training_and_360_test_samples_stratified() -> None:
    digits = load_dataset("digits", root=None, download=False)
    assert digits.train_images.shape == (1437, 1, 8, 8) and digits.test_images.shape == (360, 1, 8, 8)
    assert digits.train_images.dtype == np.uint8 and digits.train_images.max() == digits.scale == 16
    train, test = np.bincount(digits.train_labels), np.bincount(digits.test_labels)
    assert (np.abs(test - (train + test) * 360 / 1797) < 1).all()


def test_digits_are_all_of_scikit_learn_s_and_normalised_by_their_own_constants() -> None:
    from sklearn.datasets import load_digits

    digits = load_dataset("digits", root=None, download=False)
    images = np.concatenate((digits.train_images, digits.test_images)).reshape(1797, 64)
    labels = np.concatenate((digits.train_labels, digits.test_labels))
    theirs = load_digits()
    joined, all_of_them = np.column_stack((images, labels)), np.column_stack((theirs.data, theirs.target))
    assert sorted(map(tuple, joined.tolist())) == sorted(map(tuple, all_of_them.astype(int).tolist()))
    pixels = digits.train_images / 16
    assert digits.mean[0] == pytest.approx(pixels.mean())
    assert digits.std[0] == pytest.approx(pixels.std())


def test_digits_split_is_fixed() -> None:
    first, second = (load_dataset("digits", root=None, download=True) for _ in range(2))
    assert np.array_equal(first.test_images, second.test_images)
    # Pinned: another split would change every published figure of the quick start.
    assert first.test_labels[:12].tolist() == [0, 3, 4, 8, 9, 3, 4, 0, 5, 9, 7, 0]


def test_every_name_has_a_summary_and_a_source() -> None:
    assert tuple(DATASETS) == (
        "digits",
        "lines",
        "diabetes",
        "shapes",
        "multi_digits",
        "mnist",
        "fashion_mnist",
        "cifar10",
        "cifar100",
        "svhn",
        "femnist",
        "shakespeare",
        "cinic10",
        "tiny_imagenet",
    )
    assert all(entry.summary and entry.source for entry in DATASETS.values())


@pytest.mark.parametrize("name", [name for name, entry in DATASETS.items() if name != "digits" and entry.task is None])
def test_a_missing_data_set_is_one_error_with_address_and_place(name: str, tmp_path: Path) -> None:
    assert not is_present(name, root=str(tmp_path))
    with pytest.raises(DataError) as raised:
        load_dataset(name, root=str(tmp_path), download=False)
    assert "http" in str(raised.value) and str(tmp_path) in str(raised.value) and name in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_an_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cifar10'"):
        load_dataset("cifr10", root=None, download=False)


def test_the_default_root_is_the_user_s_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_root() == tmp_path / "fedsweep"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_root() == tmp_path / ".cache" / "fedsweep"


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="must be a folder"):
        load_dataset("digits", root=str(tmp_path / "file"), download=False)


def test_a_data_set_of_one_s_own_gets_root_and_download(own_module: Path) -> None:
    dataset = load_dataset("own_dataset_module:floats", root=str(own_module), download=True)
    assert dataset.name == f"{own_module}|True"


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        ("wrong", DataError, "gives a int"),
        ("broken", DataError, "no pixels.csv"),
        ("refused", DataError, "^mine is missing$"),
        ("number", ConfigError, "must be callable"),
        ("floatz", ConfigError, "did you mean 'floats'"),
        ("", ConfigError, "package.module:callable"),
    ],
)
def test_a_data_set_of_one_s_own_that_fails_says_how(
    own_module: Path, function: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_dataset(f"own_dataset_module:{function}", root=None, download=False)


def test_image_size_resizes_and_keeps_the_type(own_module: Path) -> None:
    digits = load_dataset("digits", root=None, download=False, image_size=4)
    assert digits.train_images.shape == (1437, 1, 4, 4) and digits.train_images.dtype == np.uint8
    assert digits.train_images.max() <= 16
    full = load_dataset("digits", root=None, download=False).train_images
    assert digits.train_images.mean() == pytest.approx(full.mean(), rel=0.05)
    ramp = load_dataset("own_dataset_module:floats", root=None, download=False, image_size=16).train_images
    assert ramp.dtype == np.float32 and (np.diff(ramp[0, 0, 5]) >= 0).all() and ramp.max() == pytest.approx(1)


def test_image_size_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="image_size"):
        load_dataset("digits", root=None, download=False, image_size=0)
