"""Which file of a local folder can't be read is said, and so is what would be read as something else."""

import gc
import gzip
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from fedsweep.errors import DataError
from fedsweep.world.data.huggingface_folder import files_of, layout
from fedsweep.world.data.huggingface_reading import read, reason, stored_paths

datasets = pytest.importorskip("datasets", reason="the package datasets comes with the extra hf")


# The library leaves csv files open.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("hf")))
    yield
    gc.collect()  # in this test, not in one that takes the warning for an error


def read_folder(folder: Path) -> dict[str, datasets.Dataset]:
    reader, splits = layout("hf:mine", files_of(folder), as_table=not any(folder.rglob("*.png")))
    return read("hf:mine", folder, reader, splits)


def write(root: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        place = root / name.replace("_", ".")
        place.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def write_pictures(root: Path, table: str = "") -> Path:
    """Two pictures in each of two splits, with a table of their labels."""
    for split in ("train", "test"):
        (root / split).mkdir()
        for number in range(2):
            Image.new("L", (2, 2), number).save(root / split / f"{number}.png")
        (root / split / "metadata.csv").write_text(table or "file_name,label\n0.png,cat\n1.png,ant\n")
    return root


def test_the_cause_of_what_the_library_could_not_read_is_said() -> None:
    try:
        raise datasets.exceptions.DatasetGenerationError("An error occurred") from ValueError("3 fields\n in line 3")
    except datasets.exceptions.DatasetGenerationError as error:
        assert reason(error) == "ValueError: 3 fields in line 3"
    assert reason(OSError("no")) == "OSError: no"


@pytest.mark.parametrize(
    ("test_file", "said"),
    [
        ({"test_csv": ""}, r"can't be loaded: {}/test.csv is empty; fill it, or take it out"),
        ({"test_csv": "age,dose\n"}, "the split test has no samples: {}/test.csv holds no rows; fill it"),
        ({"test_csv": b"age,dose\n1,\xe9t\xe9\n"}, r"{}/test.csv can't be read \(UnicodeDecodeError: .*mend it"),
        ({"test_csv": "age,dose\n1,2\n1,2,3\n"}, r"{}/test.csv can't be read \(ParserError: .* in line 3, saw 3"),
        ({"test_csv": "age,dose\n1,high\n"}, "column dose is int64 in {}/train.csv, but .*string in {}/test.csv; give"),
        ({"test_csv": "age,dose,more\n1,2,3\n"}, "the column more is not there in {}/train.csv, but int64 in {}/test"),
    ],
)
def test_the_table_that_can_not_be_read_is_named(
    test_file: dict[str, str | bytes], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("datasets").addHandler(caplog.handler)
    write(tmp_path, train_csv="age,dose\n1,2\n3,4\n", **test_file)
    with pytest.raises(DataError, match="hf:mine.*" + said.replace("{}", str(tmp_path))) as error:
        read_folder(tmp_path)
    logging.getLogger("datasets").removeHandler(caplog.handler)
    assert "\n" not in str(error.value) and not caplog.records


@pytest.mark.parametrize(
    ("kind", "break_off"), [("parquet", lambda content: content[:-40]), ("jsonl", lambda content: content[:-5])]
)
def test_a_file_that_breaks_off_is_named(kind: str, break_off: Callable[[bytes], bytes], tmp_path: Path) -> None:
    for split in ("train", "test"):
        rows, place = datasets.Dataset.from_dict({"age": [1, 2], "dose": ["a", "b"]}), tmp_path / f"{split}.{kind}"
        rows.to_parquet(str(place)) if kind == "parquet" else rows.to_json(str(place))
    place.write_bytes(break_off(place.read_bytes()))
    with pytest.raises(DataError, match=rf"hf:mine can't be loaded: {place} can't be read \(ArrowInvalid: .*mend it"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("age,age,dose\n1,2,0\n", "has several columns age; call each otherwise"),
        ("age,dose\n1,0,7\n2,1,8\n", r"have more fields than its first line, which names the columns \(age, dose\)"),
        ("age,dose\n1,0,\n2,1,\n", "have more fields than its first line"),
        ("age;dose\n1,5;0\n2,5;1\n", r"have more fields .* \(age;dose\); name them all, and part them by commas alone"),
    ],
)
def test_columns_that_would_be_taken_for_others_are_refused(rows: str, said: str, tmp_path: Path) -> None:
    write(tmp_path, rows_csv=rows)
    with pytest.raises(DataError, match=rf"hf:mine: .*{tmp_path}/rows.csv {said}"):
        read_folder(tmp_path)
    (tmp_path / "rows.csv").unlink()
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(rows.encode()))
    with pytest.raises(DataError, match=rf"{tmp_path}/rows.csv.gz {said}"):
        read_folder(tmp_path)


@pytest.mark.parametrize(
    "rows",
    ["\ufeffage,dose,,\r\n1,a,,\r\n2,b,,\r\n", 'age,dose\n1,"a"\n2,"b"\n', f"age,dose,t\n1,a,{'x' * 200_000}\n2,b,\n"],
)
def test_csv_files_as_other_programs_write_them_are_read(rows: str, tmp_path: Path) -> None:
    part = read_folder(write(tmp_path, rows_csv=rows))["train"]
    assert part["age"][:] == [1, 2] and part["dose"][:] == ["a", "b"]


def test_pictures_that_no_row_names_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_pictures(tmp_path)
    assert read_folder(tmp_path)["train"]["label"][:] == ["cat", "ant"] and not caplog.records
    Image.new("L", (2, 2)).save(tmp_path / "train" / "2.png")
    assert read_folder(tmp_path)["train"]["label"][:] == ["cat", "ant"]
    (record,) = caplog.records
    left = f"no row of metadata.csv are left out, 1 in all; the first is {tmp_path}/train/2.png"
    assert record.getMessage().endswith(left)


def test_pictures_that_lie_elsewhere_are_found_by_their_rows(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    (tmp_path / "pictures").mkdir()
    for split in ("train", "test"):
        for number in range(2):
            (tmp_path / split / f"{number}.png").rename(tmp_path / "pictures" / f"{split}{number}.png")
        table = tmp_path / split / "metadata.csv"
        table.write_text(table.read_text().replace("\n0", f"\n../pictures/{split}0").replace("\n1", "\n../pictures/1"))
    assert stored_paths(read_folder(tmp_path)["test"], "image") == [
        f"{tmp_path}/test/../pictures/test0.png",
        f"{tmp_path}/test/../pictures/1.png",
    ]


def test_a_split_without_rows_for_its_pictures_is_named(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    (tmp_path / "test" / "metadata.csv").unlink()
    (tmp_path / "test" / "cat").mkdir()
    (tmp_path / "test" / "1.png").rename(tmp_path / "test" / "cat" / "1.png")
    with pytest.raises(
        DataError, match=r"the split test has no samples: no metadata\.csv or .* for its pictures; fill"
    ):
        read_folder(tmp_path)


def test_a_table_of_pictures_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    write_pictures(tmp_path, table="name,label\n0.png,cat\n1.png,ant\n")
    with pytest.raises(DataError, match=rf"{tmp_path}/train/metadata.csv can't be read \(ValueError: .file_name"):
        read_folder(tmp_path)


def test_a_name_that_is_no_text_is_refused_of_what_is_read_alone(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.new("L", (2, 2)).save(tmp_path / name / "1.png")
    odd = os.fsdecode(b"caf\xe9")
    (tmp_path / f"{odd}.txt").touch()
    assert read_folder(tmp_path)["train"]["label"][:] == [0, 1]
    (tmp_path / "cat" / f"{odd}.png").touch()
    with pytest.raises(DataError, match=r"^hf:mine: the name of '.*cat/caf\\udce9\.png' is not in UTF-8; call it"):
        read_folder(tmp_path)
