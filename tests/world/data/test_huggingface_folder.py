"""Which files of a local folder are read, and which split each belongs to."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from fedsweep.errors import DataError
from fedsweep.runs import run_folder
from fedsweep.world.data import huggingface_folder
from fedsweep.world.data.huggingface_folder import files_of, layout

pytest.importorskip("datasets", reason="the package datasets comes with the extra hf")


def pictures(*folders: str, each: int = 2) -> list[str]:
    return [f"{folder}/{number}.png" for folder in folders for number in range(each)]


def splits_of(paths: Sequence[str], *, as_table: bool = False) -> dict[str, list[str]]:
    return layout("hf:/mine", sorted(paths), as_table=as_table)[1]


def make(root: Path, *paths: str) -> Path:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).touch()
    return root


@pytest.mark.parametrize("word", ["train", "training", "test", "evaluation", "validation", "val", "dev"])
def test_a_class_that_is_called_like_a_split_is_a_class_below_a_split(word: str) -> None:
    for test in ("test", "val"):
        train, tests = (pictures(f"{split}/{word}", f"{split}/dog") for split in ("train", test))
        assert splits_of(train + tests) == {
            "train": sorted(train),
            "test" if test == "test" else "validation": sorted(tests),
        }
    assert splits_of(pictures(f"train/{word}", "train/dog")).keys() == {"train"}


def test_words_in_names_of_files_and_of_other_folders_say_nothing() -> None:
    flat = ["cat/cat_test_1.png", "cat/2-val.png", "dog/train.png", "dev board/1.png", "pre-test/1.png"]
    assert splits_of(flat) == {"train": sorted(flat)}
    stations = pictures("train_station", "test_track")  # without classes below
    assert splits_of(stations) == {"train": sorted(stations)}


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("train", "test"),
        ("training", "testing"),
        ("train_images", "test_images"),
        ("data/train", "data/test"),
        ("Train", "TEST"),
        ("data/Train", "data/Test"),
        ("Train_images", "Test_images"),
    ],
)
def test_splits_are_the_first_folders_side_by_side(train: str, test: str) -> None:
    parts = [pictures(f"{split}/cat", f"{split}/ant") for split in (train, test)]
    other = pictures(f"{train.rpartition('/')[0]}/unlabelled".lstrip("/"))
    assert splits_of(parts[0] + parts[1] + other) == {"train": sorted(parts[0]), "test": sorted(parts[1])}


def test_a_table_with_labels_above_the_splits_is_refused() -> None:
    words = r"metadata.csv lies above the splits test, train; give each of these folders a table of its own pictures"
    with pytest.raises(DataError, match=words):
        splits_of([*pictures("train", "test"), "metadata.csv"])
    flat = [*pictures("pictures"), "metadata.csv"]
    assert splits_of(flat) == {"train": sorted(flat)}


def test_beside_a_split_with_classes_pictures_without_are_left_out() -> None:
    paths = pictures("train/ant", "train/bee", "unlabelled")
    assert splits_of(paths) == {"train": pictures("train/ant", "train/bee")}


def test_a_folder_that_can_not_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(folder: Path) -> None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("os.scandir", denied)
    with pytest.raises(DataError, match=r"can't be listed \(Permission denied\); give the right to read it"):
        files_of(tmp_path)


@pytest.mark.parametrize("table", ["metadata.csv", "metadata.jsonl", "metadata.parquet"])
def test_a_table_with_labels_goes_with_the_split_that_it_lies_in(table: str) -> None:
    paths = sorted([*pictures("train", "test"), f"train/{table}", f"test/{table}"])
    reader, splits = layout("hf:/mine", paths, as_table=False)
    assert reader == huggingface_folder.PICTURES and [len(part) for part in splits.values()] == [3, 3]
    assert layout("hf:/mine", paths, as_table=True)[0] != huggingface_folder.PICTURES
    flat = [*pictures("pictures"), "metadata.csv"]
    assert splits_of(flat) == {"train": sorted(flat)}


@pytest.mark.parametrize(
    ("folders", "message"),
    [
        (["train", "bus", "plane"], "train is called like a split, but bus, plane beside it are not: if it is a class"),
        (["all/test", "all/bus"], "all/test is called like a split, but bus beside it is not"),
        (["train/cat", "train/dog", "holdout/cat"], "train is called like a split, but holdout beside it is not"),
        (
            ["train", "test"],
            r"no labels: test is a split, but its pictures lie in no folder for each class, test/CLA",
        ),
        (["train/cat", "train/dog", "test"], "no labels: test is a split"),
        (["train/cat", "test/cat", "test/dog"], "the split train has pictures of one class alone, cat; give it pict"),
        (["Train", "bus", "plane"], "Train is called like a split, but bus, plane beside it are not: if it is a class"),
    ],
)
def test_what_may_be_a_split_or_a_class_is_refused(folders: list[str], message: str) -> None:
    with pytest.raises(DataError, match=f"hf:/mine: .*{message}") as error:
        splits_of(pictures(*folders))
    assert "\n" not in str(error.value)


def test_tables_are_split_by_shards_else_by_words_in_folders_else_in_files() -> None:
    shards = ["data/test-00000-of-00001.parquet", "data/train-00000-of-00001-a1.parquet", "more.parquet"]
    assert splits_of(shards) == {"train": [shards[1]], "test": [shards[0]]}
    folders = ["a/training/x.csv", "dev/z.csv", "test_a.csv", "train/y.csv"]
    assert splits_of(folders, as_table=True) == {
        "train": ["train/y.csv", "a/training/x.csv"],
        "validation": ["dev/z.csv"],
    }
    files = ["a-train.csv", "eval.csv", "other.csv", "train_1.csv", "train_2.csv"]
    assert splits_of(files, as_table=True) == {
        "train": ["train_1.csv", "train_2.csv", "a-train.csv"],
        "test": ["eval.csv"],
    }
    assert splits_of(["a.csv", "notes.txt", "run.yaml"], as_table=True) == {"train": ["a.csv"]}
    assert splits_of(["Test.csv", "Train.csv"], as_table=True) == {"train": ["Train.csv"], "test": ["Test.csv"]}


def test_tables_of_two_kinds_are_refused() -> None:
    with pytest.raises(DataError, match=r"files of one kind, but are csv, json \(train\.csv, test\.jsonl\); take out"):
        splits_of(["train.csv", "test.jsonl"], as_table=True)


def test_hidden_files_and_runs_are_passed_over(tmp_path: Path) -> None:
    ours = make(tmp_path / "mine", "cat/1.png", "dog/2.png", "config.yaml", "with/config.yaml")
    make(ours, ".cache/x.parquet", "cat/._1.png", "__MACOSX/1.png", "README.md", "dataset_info.json")
    make(ours, "runs/a/config.yaml", "runs/a/rounds.parquet", "runs/a/pictures/1.png")
    make(ours, "runs/b/config.yaml", "runs/b/checkpoints/1.json", "swept/config.yaml", "swept/sweep.json")
    assert files_of(ours) == ["cat/1.png", "config.yaml", "dog/2.png", "with/config.yaml"]
    assert layout("hf:mine", files_of(ours), as_table=False)[0] == huggingface_folder.PICTURES
    parts = {run_folder.ROUNDS, run_folder.RESULT, run_folder.CLIENTS, run_folder.CHECKPOINTS, run_folder.PLAN}
    assert huggingface_folder._OF_RUNS == parts and huggingface_folder._CONFIG == run_folder.CONFIG


def test_links_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    make(tmp_path / "real", "cat/1.png", "dog/2.png")
    make(tmp_path / "mine", "train/cat/1.png")
    (tmp_path / "mine" / "test").symlink_to(tmp_path / "real")
    (tmp_path / "mine" / "train" / "dog").symlink_to(tmp_path / "real" / "dog")
    (tmp_path / "real" / "cat" / "up").symlink_to(tmp_path / "mine")
    assert files_of(tmp_path / "mine") == ["test/cat/1.png", "test/dog/2.png", "train/cat/1.png", "train/dog/2.png"]


def test_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    make(tmp_path, "train/cat/1.png")
    (tmp_path / "test").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"/test is a link to what is not there; mend it, or take it away"):
        files_of(tmp_path)
