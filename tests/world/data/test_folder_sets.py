from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedsweep.errors import DataError
from fedsweep.world.data.datasets import is_present, load_dataset


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_picture(path: Path, colour: tuple[int, int, int] | int, side: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", (side, side), colour).save(path)


@pytest.fixture
def cinic(tmp_path: Path) -> Path:
    for part in ("train", "valid", "test"):
        for label, name in enumerate(("airplane", "automobile", "bird")):
            for index in range(2):
                write_picture(tmp_path / "CINIC-10" / part / name / f"{index}.png", (label, index, len(part)), 32)
    return tmp_path


def test_cinic10_takes_train_and_test_class_by_class(cinic: Path) -> None:
    assert is_present("cinic10", root=str(cinic))
    dataset = load_dataset("cinic10", root=str(cinic), download=False)
    assert dataset.class_names == ("airplane", "automobile", "bird")
    assert dataset.train_labels.tolist() == dataset.test_labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert dataset.train_images[:, :, 5, 6].tolist() == [[c, i, 5] for c in range(3) for i in range(2)]
    assert (dataset.test_images[:, 2] == 4).all()


def test_cinic10_is_decoded_once(cinic: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_dataset("cinic10", root=str(cinic), download=False)
    monkeypatch.setattr(Image, "open", lambda *args: pytest.fail("a picture was decoded again"))
    assert np.array_equal(load_dataset("cinic10", root=str(cinic), download=False).train_images, first.train_images)


def test_a_damaged_picture_is_named(cinic: Path) -> None:
    (cinic / "CINIC-10/test/bird/1.png").write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"test/bird/1\.png cannot be read"):
        load_dataset("cinic10", root=str(cinic), download=False)


def test_a_picture_of_the_wrong_size_is_named(cinic: Path) -> None:
    write_picture(cinic / "CINIC-10/test/bird/1.png", 0, 31)
    with pytest.raises(DataError, match="32 x 32 pixels, but has 31 x 31"):
        load_dataset("cinic10", root=str(cinic), download=False)


def test_a_class_without_pictures_is_named(cinic: Path) -> None:
    for path in (cinic / "CINIC-10/test/bird").iterdir():
        path.unlink()
    with pytest.raises(DataError, match="holds no pictures"):
        load_dataset("cinic10", root=str(cinic), download=False)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny-imagenet-200"
    for grey, name in ((40, "n02"), (20, "n01")):
        for index in range(2):
            write_picture(folder / f"train/{name}/images/{name}_{index}.JPEG", grey + index, 64)
    for index, grey in enumerate((45, 25, 26)):
        write_picture(folder / f"val/images/val_{index}.JPEG", grey, 64)
    lines = ["val_0.JPEG\tn02\t0\t0\t62\t62", "val_1.JPEG\tn01\t0\t0\t62\t62", "val_2.JPEG\tn01\t0\t0\t62\t62"]
    (folder / "val/val_annotations.txt").write_text("\n".join(lines) + "\n")
    (folder / "wnids.txt").write_text("n02\nn01\n")
    (folder / "words.txt").write_text("n01\tgoldfish, Carassius auratus\nn03\tnothing\n")
    return tmp_path


def test_tiny_imagenet_tests_on_the_annotated_validation_pictures(tiny: Path) -> None:
    assert is_present("tiny_imagenet", root=str(tiny))
    dataset = load_dataset("tiny_imagenet", root=str(tiny), download=False)
    assert dataset.class_names == ("goldfish", "n02")
    assert dataset.train_labels.tolist() == [0, 0, 1, 1] and dataset.test_labels.tolist() == [1, 0, 0]
    assert dataset.train_images[:, 1, 9, 9].tolist() == [20, 21, 40, 41]
    assert dataset.test_images.shape == (3, 3, 64, 64) and dataset.test_images[:, 2, 0, 0].tolist() == [45, 25, 26]


def test_tiny_imagenet_can_be_had_at_32_pixels(tiny: Path) -> None:
    dataset = load_dataset("tiny_imagenet", root=str(tiny), download=False, image_size=32)
    assert dataset.train_images.shape == (4, 3, 32, 32) and dataset.train_images[3, 0, 0, 0] == 41


def test_a_picture_that_the_annotations_name_must_be_there(tiny: Path) -> None:
    (tiny / "tiny-imagenet-200/val/images/val_2.JPEG").unlink()
    with pytest.raises(DataError, match=r"1 files are missing, the first is .*val_2\.JPEG"):
        load_dataset("tiny_imagenet", root=str(tiny), download=False)


def test_a_wrong_annotation_is_shown(tiny: Path) -> None:
    (tiny / "tiny-imagenet-200/val/val_annotations.txt").write_text("val_0.JPEG\tn99\t0\n")
    with pytest.raises(DataError, match="n99"):
        load_dataset("tiny_imagenet", root=str(tiny), download=False)
