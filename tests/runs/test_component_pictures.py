from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedsweep.errors import InvariantError
from fedsweep.runs.component_pictures import png_bytes, write_pictures
from fedsweep.runs.run_folder import RunFolder


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (7, 5, 3), (40, 30, 3)])
def test_another_reader_sees_the_same_pixels(tmp_path: Path, shape: tuple[int, ...]) -> None:
    from PIL import Image

    picture = np.random.default_rng(0).random(shape).astype(np.float32)
    path = tmp_path / "a.png"
    path.write_bytes(png_bytes(picture))
    with Image.open(path) as image:
        image.verify()
    with Image.open(path) as image:
        assert image.mode == ("L" if len(shape) == 2 else "RGB")
        found = np.asarray(image)
    assert np.array_equal(found, (picture * 255).round())


def test_values_outside_are_cut_off_and_nan_is_black() -> None:
    expected = png_bytes(np.array([[0.0, 1.0, 0.0]]))
    assert png_bytes(np.array([[-3.0, 7.0, np.nan]])) == expected


@pytest.mark.parametrize("shape", [(3,), (2, 2, 4), (0, 3), (1, 2, 3, 3)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvariantError, match="shape"):
        png_bytes(np.zeros(shape))


def test_a_picture_is_written_once(tmp_path: Path) -> None:
    first, second = (tmp_path / "pictures" / name for name in ("a_1.png", "b.png"))
    write_pictures(tmp_path, {"a_1": np.zeros((2, 2))})
    data = first.read_bytes()
    assert not second.exists()
    write_pictures(tmp_path, {"a_1": np.ones((2, 2)), "b": np.ones((2, 2))})
    assert first.read_bytes() == data != second.read_bytes()


def test_nothing_to_show_makes_no_folder(tmp_path: Path) -> None:
    write_pictures(tmp_path, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../a", "a/b", "", ".a", "a b"])
def test_names_never_leave_the_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvariantError, match="name"):
        write_pictures(tmp_path, {name: np.zeros((2, 2))})


def test_overwriting_a_run_removes_its_pictures_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    RunFolder.create(folder, overwrite=False).write_config("scenario: {}\nmethod: {}\n")
    write_pictures(folder, {"a": np.zeros((2, 2))})
    (folder / "pictures" / "mine.txt").write_text("mine")
    RunFolder.create(folder, overwrite=True)
    assert [path.name for path in (folder / "pictures").iterdir()] == ["mine.txt"]
    (folder / "pictures" / "mine.txt").unlink()
    RunFolder.create(folder, overwrite=True).write_config("scenario: {}\nmethod: {}\n")
    write_pictures(folder, {"a": np.zeros((2, 2))})
    RunFolder.create(folder, overwrite=True)
    assert not (folder / "pictures").exists()
