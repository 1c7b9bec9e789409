import json
from pathlib import Path

import numpy as np
import pytest

from fedsweep.errors import DataError
from fedsweep.world.data.datasets import is_present, load_dataset


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(folder: Path, users: dict[str, list[int]], name: str = "a.json") -> None:
    """A LEAF file; each image of a user has all pixels at label / 255."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {user: {"x": [[label / 255] * 784 for label in labels], "y": labels} for user, labels in users.items()}
    counts = [len(labels) for labels in users.values()]
    (folder / name).write_text(json.dumps({"users": list(users), "num_samples": counts, "user_data": data}))


@pytest.mark.parametrize("place", ["femnist", "femnist/data", "leaf/data/femnist/data", "."])
def test_train_and_test_folders_are_used_as_they_are(tmp_path: Path, place: str) -> None:
    write(tmp_path / "root" / place / "train", {"f2": [1, 2], "f1": [61]}, "b.json")
    write(tmp_path / "root" / place / "train", {"f3": [5]}, "c.json")
    write(tmp_path / "root" / place / "test", {"f1": [7, 8]})
    assert is_present("femnist", root=str(tmp_path / "root"))
    dataset = load_dataset("femnist", root=str(tmp_path / "root"), download=False)
    assert dataset.train_labels.tolist() == [1, 2, 61, 5] and dataset.test_labels.tolist() == [7, 8]
    assert dataset.train_images[:, 0, 3, 4].tolist() == [1, 2, 61, 5]
    assert dataset.writers is not None and dataset.writers.tolist() == [1, 1, 0, 2]
    assert dataset.test.groups is not None and dataset.test.groups.tolist() == [0, 0]
    assert dataset.train_images.shape == (4, 1, 28, 28) and dataset.train_images.dtype == np.uint8
    assert (dataset.num_classes, dataset.class_names[10], dataset.class_names[61]) == (62, "A", "z")


def test_all_data_alone_is_split_80_to_20_in_a_fixed_way(tmp_path: Path) -> None:
    write(tmp_path / "femnist/all_data", {f"f{user}": list(range(user, user + 9)) for user in range(7)})
    dataset = load_dataset("femnist", root=str(tmp_path), download=False)
    assert (len(dataset.train_labels), len(dataset.test_labels)) == (50, 13)  # floor(0.8 * 63)
    joined = np.sort(np.concatenate((dataset.train_labels, dataset.test_labels)))
    assert np.array_equal(joined, np.sort(np.concatenate([np.arange(user, user + 9) for user in range(7)])))
    assert np.array_equal(dataset.train_images[:, 0, 0, 0], dataset.train_labels)
    assert dataset.test.groups is not None and len(dataset.test.groups) == 13
    again = load_dataset("femnist", root=str(tmp_path), download=False)
    assert np.array_equal(dataset.train_labels, again.train_labels)


def test_missing_shards_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for part in ("train", "test"):
        for number in (0, 2, 4) if part == "train" else (0, 1):
            name = f"all_data_{number}_niid_0_keep_0_{part}_9.json"
            write(tmp_path / "femnist" / part, {f"f{number}": [1, 2]}, name)
    load_dataset("femnist", root=str(tmp_path), download=False)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.endswith("train lacks 2 of 5 shards (all_data_N, N = 1, 3): the writers in them are missing")


def test_decoded_arrays_are_kept_until_a_source_changes(tmp_path: Path, own_cache: Path) -> None:
    write(tmp_path / "femnist/train", {"f1": [1, 2]})
    write(tmp_path / "femnist/test", {"f1": [3]})
    load_dataset("femnist", root=str(tmp_path), download=False)
    stored = list(own_cache.rglob("train_labels.npy"))
    assert len(stored) == 1
    np.save(stored[0], np.array([2, 1]))
    assert load_dataset("femnist", root=str(tmp_path), download=False).train_labels.tolist() == [2, 1]
    write(tmp_path / "femnist/train", {"f1": [4, 4, 4]})
    assert load_dataset("femnist", root=str(tmp_path), download=False).train_labels.tolist() == [4, 4, 4]


def test_a_damaged_cache_is_decoded_again(tmp_path: Path, own_cache: Path) -> None:
    write(tmp_path / "femnist/train", {"f1": [1, 2]})
    write(tmp_path / "femnist/test", {"f1": [3]})
    load_dataset("femnist", root=str(tmp_path), download=False)
    next(own_cache.rglob("train_labels.npy")).write_bytes(b"damaged")
    assert load_dataset("femnist", root=str(tmp_path), download=False).train_labels.tolist() == [1, 2]


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path: Path, own_cache: Path) -> None:
    own_cache.write_text("a file where the folder should be")
    write(tmp_path / "femnist/train", {"f1": [1, 2]})
    write(tmp_path / "femnist/test", {"f1": [3]})
    assert load_dataset("femnist", root=str(tmp_path), download=False).train_labels.tolist() == [1, 2]


@pytest.mark.parametrize(
    "text",
    ["{", '{"users": ["f1"]}', '{"users": ["f1"], "user_data": {"f1": {"x": [[1, 2]], "y": [0]}}}', "[1]"],
)
def test_a_damaged_json_file_is_named(tmp_path: Path, text: str) -> None:
    write(tmp_path / "femnist/test", {"f1": [3]})
    (tmp_path / "femnist/train").mkdir()
    (tmp_path / "femnist/train/x.json").write_text(text)
    with pytest.raises(DataError, match=r"train/x\.json is not a LEAF file"):
        load_dataset("femnist", root=str(tmp_path), download=False)


def test_pixels_beyond_1_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "femnist/test", {"f1": [3]})
    write(tmp_path / "femnist/train", {"f1": [300]})
    with pytest.raises(DataError, match=r"0\.\.1"):
        load_dataset("femnist", root=str(tmp_path), download=False)


@pytest.mark.parametrize("label", [1.5, "1", True, -1, 62])
def test_labels_that_are_no_classes_are_refused_with_their_file(tmp_path: Path, label: object) -> None:
    write(tmp_path / "femnist/test", {"f1": [3]})
    write(tmp_path / "femnist/train", {"f1": [3]})
    file = tmp_path / "femnist/train/a.json"
    file.write_text(file.read_text().replace('"y": [3]', f'"y": [{json.dumps(label)}]'))
    with pytest.raises(
        DataError, match=rf"train/a\.json is not .* labels must be integers in 0..61, but one is {label!r}"
    ):
        load_dataset("femnist", root=str(tmp_path), download=False)


def test_a_user_who_is_listed_twice_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "femnist/test", {"f1": [3]})
    write(tmp_path / "femnist/train", {"f1": [3]})
    file = tmp_path / "femnist/train/a.json"
    file.write_text(file.read_text().replace('"users": ["f1"]', '"users": ["f1", "f1"]'))
    with pytest.raises(DataError, match=r"train/a\.json is not a LEAF file.*a user is listed twice"):
        load_dataset("femnist", root=str(tmp_path), download=False)


def test_a_copied_file_is_refused_and_a_user_in_two_files_is_not(tmp_path: Path) -> None:
    write(tmp_path / "femnist/test", {"f1": [3], "f2": []})
    write(tmp_path / "femnist/train", {"f1": [3], "f2": []})
    write(tmp_path / "femnist/train", {"f1": [4], "f2": []}, "b.json")
    assert load_dataset("femnist", root=str(tmp_path), download=False).train_labels.tolist() == [3, 4]
    write(tmp_path / "femnist/train", {"f1": [3]}, "a copy.json")
    with pytest.raises(
        DataError, match=r"train/a\.json is not .* user f1 has the same samples in .*/a copy\.json: take"
    ):
        load_dataset("femnist", root=str(tmp_path), download=False)


def test_all_data_is_read_where_train_or_test_is_not_there(tmp_path: Path) -> None:
    write(tmp_path / "femnist/train", {"f1": [3]})
    write(tmp_path / "femnist/all_data", {"f1": list(range(10))})
    assert len(load_dataset("femnist", root=str(tmp_path), download=False).train) == 8


def test_files_without_samples_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "femnist/test", {"f1": [3]})
    write(tmp_path / "femnist/train", {"f1": []})
    with pytest.raises(DataError, match="no training or no test samples"):
        load_dataset("femnist", root=str(tmp_path), download=False)


# -- Shakespeare -----------------------------------------------------------------------------------------------------

PLAY = "To be, or not to be: that is the question: whether 'tis nobler in the mind to suffer the slings! " * 8


def write_lines(folder: Path, users: dict[str, str], name: str = "a.json", **changes: object) -> None:
    """A LEAF file: each user's text in windows of 80 letters, with the letter that follows each."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        user: {"x": [text[k : k + 80] for k in range(len(text) - 80)], "y": list(text[80:])}
        for user, text in users.items()
    }
    counts = [len(text) - 80 for text in users.values()]
    tree = {"users": list(users), "num_samples": counts, "user_data": data, **changes}
    (folder / name).write_text(json.dumps(tree))


def test_shakespeare_has_letters_roles_and_asks_for_the_next_letter(tmp_path: Path) -> None:
    write_lines(tmp_path / "shakespeare/train", {"HAMLET": PLAY[:85], "GHOST": PLAY[5:88]})
    write_lines(tmp_path / "shakespeare/test", {"HAMLET": PLAY[90:172]})
    assert is_present("shakespeare", root=str(tmp_path))
    dataset = load_dataset("shakespeare", root=str(tmp_path), download=False)
    assert (dataset.num_classes, dataset.train.inputs.shape, dataset.test.inputs.shape) == (80, (8, 80), (2, 80))

    def text(ids: np.ndarray) -> str:
        return "".join(dataset.class_names[k] for k in ids)

    assert [text(row) for row in dataset.train.inputs[:2]] == [PLAY[:80], PLAY[1:81]]
    assert text(dataset.train.targets[:5, -1]) == PLAY[80:85] and (dataset.train.targets[:, :-1] == -100).all()
    assert dataset.train.groups is not None and dataset.test.groups is not None
    assert (dataset.train.groups.tolist(), dataset.test.groups.tolist()) == ([1] * 5 + [0] * 3, [1, 1])


def test_shakespeare_without_a_split_leaves_out_what_overlaps(tmp_path: Path) -> None:
    write_lines(tmp_path / "shakespeare/all_data", {"HAMLET": PLAY, "GHOST": PLAY[:90]})
    dataset = load_dataset("shakespeare", root=str(tmp_path), download=False)
    windows = len(PLAY) - 80
    cut = int(0.8 * windows)
    assert (len(dataset.train), len(dataset.test)) == (cut + 8, windows - cut - 79)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1", "JSONDecodeError"),
        ("[" * 100_000, "RecursionError"),
        ('{"users": ["a"], "user_data": {}}', "KeyError: 'a'"),
        ('{"users": ["a"], "user_data": {"a": {"x": ["short"], "y": ["b"]}}}', "x must be texts of 80 letters"),
        ('{"users": ["a"], "user_data": {"a": {"x": [], "y": ["b"]}}}', "x must be texts of 80 letters"),
        (
            json.dumps({"users": ["a"], "user_data": {"a": {"x": ["\u00e9" * 80], "y": ["b"]}}}),
            "none of LEAF's 80 letters",
        ),
        ('{"users": [], "user_data": {}}', "hold no training or no test samples"),
    ],
)
def test_a_damaged_file_of_shakespeare_is_one_line(tmp_path: Path, content: str, message: str) -> None:
    write_lines(tmp_path / "shakespeare/test", {"HAMLET": PLAY[:85]})
    (tmp_path / "shakespeare/train").mkdir(parents=True)
    (tmp_path / "shakespeare/train/a.json").write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        load_dataset("shakespeare", root=str(tmp_path), download=False)
    assert "\n" not in str(caught.value)
