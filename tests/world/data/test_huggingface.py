"""The Hugging Face door, with the real library and without a network."""

import os
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedsweep.errors import ConfigError, DataError
from fedsweep.world.data.datasets import Dataset, load_dataset
from fedsweep.world.data.huggingface_source import Source, numbered
from fedsweep.world.data.huggingface_tables import _narrowed, _next_tokens

datasets = pytest.importorskip("datasets", reason="the package datasets comes with the extra hf")


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def load(name: object, *, image_size: int | None = None) -> Dataset:
    return load_dataset(f"hf:{name}", root=None, download=False, image_size=image_size)


def test_without_download_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def refused(host: object, *more: object, **named: object) -> None:
        asked.append(host)
        raise OSError("no network")

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", refused)
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # the library's, between two questions
    with pytest.raises(DataError, match=r"can't be loaded.*scenario.download is false"):
        load("someone/something")
    assert not asked and not datasets.config.HF_HUB_OFFLINE


def picture(value: int, *, mode: str = "RGB", size: tuple[int, int] = (6, 5)) -> Image.Image:
    return Image.new(mode, size, value if mode == "L" else (value, 0, 255 - value))


def table(count: int, *, shift: int = 0, mode: str = "RGB", **columns: Any) -> Any:
    """Pictures whose grey (or red) value is their number, with labels by parity."""
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["even", "odd"])}
    content = {
        "image": [picture(shift + number, mode=mode) for number in range(count)],
        "label": [number % 2 for number in range(count)],
    }
    features |= {key: datasets.Value("string") for key in columns}
    return datasets.Dataset.from_dict(content | columns, features=datasets.Features(features))


def folder_of_pictures(root: Path) -> Path:
    for split, count in (("train", 6), ("test", 2)):
        for number in range(count):
            place = root / split / ("cat" if number % 2 else "ant")
            place.mkdir(parents=True, exist_ok=True)
            picture(10 * number).save(place / f"{number}.png")
    return root


def saved(root: Path) -> Path:
    datasets.DatasetDict(train=table(6), test=table(2, shift=100)).save_to_disk(str(root))
    return root


def as_parquet(root: Path) -> Path:
    root.mkdir()
    table(6).to_parquet(str(root / "train.parquet"))
    table(2, shift=100).to_parquet(str(root / "test.parquet"))
    return root


@pytest.mark.parametrize("make", [folder_of_pictures, saved, as_parquet])
def test_a_local_folder_becomes_a_data_set(make: Callable[[Path], Path], tmp_path: Path) -> None:
    found = load(make(tmp_path / "mine"))
    assert found.train_images.shape == (6, 3, 5, 6) and found.test_images.shape == (2, 3, 5, 6)
    assert found.num_classes == 2 and len(found.class_names) == 2 and sorted(found.train_labels) == [0, 0, 0, 1, 1, 1]
    red, labels = found.train_images[:, 0, 0, 0], found.train_labels
    assert {
        int(value) % 20 == 10 if make is folder_of_pictures else int(value) % 2 == 1 for value in red[labels == 1]
    } == {True}
    assert np.array_equal(found.train_images[:, 2, 0, 0], 255 - red)
    pixels = found.train_images / 255
    assert found.mean == pytest.approx(pixels.mean(axis=(0, 2, 3)), abs=1e-6)
    assert found.std == pytest.approx(np.maximum(pixels.std(axis=(0, 2, 3)), 1e-6), abs=1e-6)


def test_the_second_time_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = saved(tmp_path / "mine")
    first = load(place)
    monkeypatch.setattr("fedsweep.world.data.huggingface._decoded", lambda *_, **__: pytest.fail("decoded again"))
    assert np.array_equal(load(place).train_images, first.train_images)


def test_what_is_kept_is_of_the_columns_and_splits_that_were_named(tmp_path: Path) -> None:
    parts = {"train": table(6, third=[str(k % 3) for k in range(6)]), "test": table(2, shift=100, third=["0", "1"])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "set"))
    assert load(tmp_path / "set").writers is None
    assert load(f"{tmp_path / 'set'}?writer=third").writers.tolist() == [0, 1, 2, 0, 1, 2]  # type: ignore[union-attr]
    assert len(load(f"{tmp_path / 'set'}?train=test&test=train").train) == 2


def test_without_a_test_split_a_fifth_is_kept_for_it(tmp_path: Path) -> None:
    table(200, mode="L", who=[f"w{number // 50}" for number in range(200)]).save_to_disk(str(tmp_path / "mine"))
    found = load(f"{tmp_path / 'mine'}?writer=who")
    values = [set(part[:, 0, 0, 0].tolist()) for part in (found.train_images, found.test_images)]
    assert found.num_channels == 1 and values[0] | values[1] == set(range(200)) and not values[0] & values[1]
    assert 25 <= len(values[1]) <= 55
    assert found.writers is not None and np.array_equal(found.writers, found.train_images[:, 0, 0, 0] // 50)
    assert found.test.groups is not None and np.array_equal(found.test.groups, found.test_images[:, 0, 0, 0] // 50)
    assert np.array_equal(found.train_labels, found.train_images[:, 0, 0, 0] % 2)


def renamed(part: Any, names: list[str]) -> Any:
    """The same numbers, which mean other classes."""
    return part.cast_column("label", datasets.ClassLabel(names=names))


def test_a_class_is_what_its_name_says_in_either_split(tmp_path: Path) -> None:
    parts = {"train": table(6), "test": renamed(table(4), ["odd", "none"])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "set"))
    found = load(tmp_path / "set")
    assert found.class_names == ("even", "odd", "none") and found.num_classes == 3
    assert found.train_labels.tolist() == [0, 1, 0, 1, 0, 1] and found.test_labels.tolist() == [1, 2, 1, 2]
    rows = {name: part.remove_columns("image").add_column("age", [1] * len(part)) for name, part in parts.items()}
    datasets.DatasetDict(rows).save_to_disk(str(tmp_path / "rows"))
    found = load(f"{tmp_path / 'rows'}?columns=age&label=label")
    assert found.class_names == ("even", "odd", "none") and found.test_labels.tolist() == [1, 2, 1, 2]


def test_a_split_for_testing_alone_is_tested_whole_and_not_trained_on(tmp_path: Path) -> None:
    for split in ("test", "validation"):
        place = tmp_path / split
        datasets.DatasetDict({split: table(20)}).save_to_disk(str(place))
        with pytest.raises(
            DataError, match=rf"samples for testing alone, the split {split}, and none .*\?train={split}"
        ):
            load(place)
        whole = load_dataset(f"hf:{place}", root=None, download=False, for_test=True)
        assert whole.test_images[:, 0, 0, 0].tolist() == [*range(20)]
        assert len(load(f"{place}?train={split}").train) + len(load(f"{place}?train={split}").test) == 20
    rows = datasets.DatasetDict(test=datasets.Dataset.from_dict({"age": [*range(9)], "dose": [0, 1, 2] * 3}))
    rows.save_to_disk(str(tmp_path / "rows"))
    name = f"hf:{tmp_path / 'rows'}?columns=age&label=dose"
    assert load_dataset(name, root=None, download=False, for_test=True).test.inputs[:, 0].tolist() == [*range(9)]
    with pytest.raises(DataError, match="samples for testing alone, the split test"):
        load_dataset(name, root=None, download=False)


def labelled(labels: list[Any]) -> Any:
    return table(len(labels)).remove_columns("label").add_column("label", labels)


def test_texts_and_whole_numbers_beside_pictures_are_classes(tmp_path: Path) -> None:
    parts = {"train": labelled(["cat", "ant", "cat"]), "test": labelled(["bee", "cat"])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "texts"))
    found = load(tmp_path / "texts")
    assert found.class_names == ("ant", "bee", "cat")
    assert found.train_labels.tolist() == [2, 0, 2] and found.test_labels.tolist() == [1, 2]
    datasets.DatasetDict(train=labelled([0.0, 2.0]), test=labelled([1.0])).save_to_disk(str(tmp_path / "whole"))
    assert load(tmp_path / "whole").train_labels.tolist() == [0, 2] and load(tmp_path / "whole").num_classes == 3
    datasets.DatasetDict(train=table(6), test=labelled(["odd", "even"])).save_to_disk(str(tmp_path / "mixed"))
    assert load(tmp_path / "mixed").test_labels.tolist() == [1, 0]


def test_numbers_beside_pictures_are_classes_of_their_names_as_in_tables(tmp_path: Path) -> None:
    parts = {"train": labelled([1, 2, 3, 1]), "test": labelled([3, 5])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "set"))
    rows = {name: part.remove_columns("image").add_column("age", [1] * len(part)) for name, part in parts.items()}
    datasets.DatasetDict(rows).save_to_disk(str(tmp_path / "rows"))
    for data in (load(tmp_path / "set"), load(f"{tmp_path / 'rows'}?columns=age&label=label")):
        assert data.class_names == ("1", "2", "3", "5") and data.num_classes == 4
        assert data.train.targets.tolist() == [0, 1, 2, 0] and data.test.targets.tolist() == [2, 3]
    labelled([0, -1, 1, 2]).save_to_disk(str(tmp_path / "without"))
    with pytest.raises(DataError, match="labels must not be negative, but the column label holds -1"):
        load(tmp_path / "without")


def test_numbers_of_sixty_four_bits_without_a_sign_are_classes() -> None:
    classes, names = numbered([np.array([2**64 - 1, 5], np.uint64), np.array([5, -1])])
    assert names == ["-1", "5", str(2**64 - 1)] and [part.tolist() for part in classes] == [[2, 1], [1, 0]]


def test_decimals_are_numbers_and_without_digits_behind_the_point_integers(tmp_path: Path) -> None:
    prices = [Decimal("0.50"), Decimal("1.00"), Decimal("2.25")] * 4
    columns = {"price": prices, "number": [Decimal(number % 2) for number in range(12)]}
    kinds = {"price": datasets.Value("decimal128(10, 2)"), "number": datasets.Value("decimal128(38, 0)")}
    datasets.Dataset.from_dict(columns, datasets.Features(kinds)).to_parquet(str(tmp_path / "rows.parquet"))
    classed, priced = (load(f"{tmp_path}?columns={named}") for named in ("price&label=number", "number&label=price"))
    assert set(classed.train_images.ravel().tolist()) == {0.5, 1.0, 2.25} and classed.class_names == ("0", "1")
    assert set(priced.train_labels.tolist()) == {0.5, 1.0, 2.25} and priced.num_classes == 0


def test_numbers_between_classes_and_rows_without_a_class_are_refused(tmp_path: Path) -> None:
    labelled([0.0, 1.5, 2.0]).save_to_disk(str(tmp_path / "between"))
    with pytest.raises(DataError, match=r"labels are classes, integers or texts, but the column label holds 1\.5"):
        load(tmp_path / "between")
    hidden = renamed(table(2), ["odd", "none"]).map(lambda row: {"label": -1})
    datasets.DatasetDict(train=table(6), test=hidden).save_to_disk(str(tmp_path / "hidden"))
    with pytest.raises(DataError, match=r"rows of the column label have no class \(-1\); leave them out"):
        load(tmp_path / "hidden")


def test_a_size_of_pictures_is_refused_for_rows_of_numbers(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"age": [1, 2, 3], "dose": [0, 1, 0]}).to_parquet(str(tmp_path / "rows.parquet"))
    with pytest.raises(ConfigError, match=r"scenario\.image_size=8 resizes pictures, but data set .* has none; leave"):
        load(f"{tmp_path}?columns=age&label=dose", image_size=8)


def test_a_class_called_test_is_no_test_set(tmp_path: Path) -> None:
    for split, count in (("train", 4), ("val", 2)):
        for number in range(count):
            place = tmp_path / "mine" / split / ("test" if number % 2 else "good")
            place.mkdir(parents=True, exist_ok=True)
            picture(10 * number + count).save(place / f"a[{number}]*?.png")
    data = load(tmp_path / "mine")
    assert data.class_names == ("good", "test")
    assert data.train_images[:, 0, 0, 0].tolist() == [4, 24, 14, 34] and data.train_labels.tolist() == [0, 0, 1, 1]
    assert data.test_images[:, 0, 0, 0].tolist() == [2, 12] and data.test_labels.tolist() == [0, 1]


def test_a_changed_file_behind_a_link_is_read_anew(tmp_path: Path) -> None:
    real, place = folder_of_pictures(tmp_path / "real"), tmp_path / "mine"
    place.mkdir()
    for split in ("train", "test"):
        (place / split).symlink_to(real / split)
    assert len(load(place).train) == 6 and load(place).test_images[:, 0, 0, 0].tolist() == [0, 10]
    before = (real / "test" / "cat" / "1.png").stat()
    picture(77).save(real / "test" / "cat" / "1.png")
    os.utime(real / "test" / "cat" / "1.png", ns=(before.st_atime_ns, before.st_mtime_ns + 1000))
    assert load(place).test_images[:, 0, 0, 0].tolist() == [0, 77]


def test_runs_beside_pictures_are_no_data(tmp_path: Path) -> None:
    place = folder_of_pictures(tmp_path / "mine")
    (place / "runs" / "first").mkdir(parents=True)
    (place / "runs" / "first" / "config.yaml").touch()
    datasets.Dataset.from_dict({"round": [1]}).to_parquet(str(place / "runs" / "first" / "rounds.parquet"))
    assert len(load(place).train) == 6 and len(load(place).test) == 2


def test_pictures_of_different_sizes_need_a_size(tmp_path: Path) -> None:
    place = folder_of_pictures(tmp_path / "mine")
    picture(1, size=(9, 9)).save(place / "train" / "ant" / "big.png")
    with pytest.raises(DataError, match=r"one size, but are 5 x 6, 9 x 9; set scenario\.image_size"):
        load(place)
    assert load(place, image_size=8).train_images.shape == (7, 3, 8, 8)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{}/none", "there is no folder"),
        ("{}/mine?lable=x", "unknown option 'lable'; did you mean 'label'"),
        ("{}/mine?test=exam", "unknown split 'exam'"),
        ("{}/mine?label=nothing", "which column is the label.*there are image, label"),
        ("{}/mine?writer=nobody", "unknown column 'nobody'"),
        ("someone/something", "hf:someone/something can't be loaded.*scenario.download is false"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(name: str, said: str, tmp_path: Path) -> None:
    saved(tmp_path / "mine")
    with pytest.raises(DataError, match=said) as error:
        load(name.format(tmp_path))
    assert "\n" not in str(error.value) and len(str(error.value)) < 500


def test_a_damaged_picture_is_said_in_one_line(tmp_path: Path) -> None:
    place = folder_of_pictures(tmp_path / "mine")
    (place / "train" / "ant" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n no picture")
    with pytest.raises(DataError, match="can't be loaded"):
        load(place)


def test_a_picture_that_is_cut_off_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder_of_pictures(tmp_path / "mine")
    whole = (place / "train/ant/0.png").read_bytes()
    rows = datasets.Dataset.from_dict({"image": [{"bytes": whole}, {"bytes": whole[:45]}], "label": [0, 1]})
    rows.cast_column("image", datasets.Image()).save_to_disk(str(tmp_path / "rows"))
    with pytest.raises(DataError, match=r"can't be loaded: the picture in row 2 can't be read \(\w+: "):
        load(tmp_path / "rows")

    def cut_off(*_: object, **__: object) -> None:  # of a file the library would leave one open
        raise OSError("image file is truncated")

    monkeypatch.setattr(datasets.Image, "decode_example", cut_off)
    file = place / "train" / "ant" / "0.png"
    with pytest.raises(DataError, match=rf"the picture {file} can't be read \(OSError: image file is truncated\)"):
        load(place)


def test_a_picture_of_sixteen_bits_is_refused(tmp_path: Path) -> None:
    place = folder_of_pictures(tmp_path / "mine")
    Image.fromarray(np.full((5, 6), 40_000, np.uint16)).save(place / "train" / "ant" / "deep.png")
    with pytest.raises(
        DataError,
        match=rf"the picture {place}/train/ant/deep.png has more than 8 bits a channel \(mode I;16\); save it with 8",
    ):
        load(place)


def test_where_a_folder_lies_is_looked_up_once_however_many_pictures_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, looked_up, real = folder_of_pictures(tmp_path / "mine"), Counter[str](), os.path.realpath

    def counted(path: Any, **options: Any) -> Any:
        looked_up[os.fspath(path)] += 1
        return real(path, **options)

    monkeypatch.setattr(os.path, "realpath", counted)
    assert len(load(place).train_images) == 6
    assert looked_up[str(place)] < 6 and not [path for path in looked_up if path.endswith(".png")]


def test_a_row_without_a_picture_and_a_column_without_any_are_named(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"image": [picture(1), None], "label": [0, 1], "age": [3, 4]})
    rows.cast_column("image", datasets.Image()).save_to_disk(str(tmp_path))
    with pytest.raises(DataError, match="row 2 has no picture in the column image; leave it out"):
        load(tmp_path)
    with pytest.raises(DataError, match="the column age holds no pictures"):
        load(f"{tmp_path}?image=age")


def test_a_changed_picture_that_a_table_names_elsewhere_is_read_anew(tmp_path: Path) -> None:
    for split, numbers in (("train", (0, 1)), ("test", (2, 3))):
        (tmp_path / split).mkdir()
        names = [f"../pictures/{number}.png" for number in numbers]
        lines = [f'{{"file_name": "{name}", "label": {place}}}\n' for place, name in enumerate(names)]
        (tmp_path / split / "metadata.jsonl").write_text("".join(lines))
    (tmp_path / "pictures").mkdir()
    for number in range(4):
        picture(number).save(tmp_path / "pictures" / f"{number}.png")
    assert load(tmp_path).train_images[:, 0, 0, 0].tolist() == [0, 1]
    picture(100).save(tmp_path / "pictures" / "1.png")
    assert load(tmp_path).train_images[:, 0, 0, 0].tolist() == [0, 100]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("columns=age&label=dose", "the column dose is not filled: 1 of 3 rows have no value, the first is row 2"),
        ("columns=dose&label=age", "the column dose is not filled"),
        ("columns=age&label=group", "the column group is not filled: 2 of 3 rows have no value, the first is row 1"),
        ("columns=age&label=age2&writer=group", "the column group is not filled"),
        ("columns=rate&label=age", "the column rate must hold finite numbers, but holds nan in row 2; mend the row"),
        ("columns=age&label=rate", "the column rate must hold finite numbers, but holds nan in row 2"),
        ("columns=age&label=age2&writer=rate", "the column rate must hold finite numbers, but holds nan in row 2"),
        ("columns=name&label=age", "the column name must hold numbers, but row 2 holds 'b'"),
        ("columns=lists&label=age", "the column lists must hold one value .* but row 1 holds .1. and row 3 .3, 4."),
        ("columns=age&label=lists", "the column lists must hold one value in each row, or lists of one length, but"),
        ("columns=age&label=box", r"the column box must hold one value .* but row 1 holds \{'x': 1\}"),
        ("columns=age&label=age2&writer=box", "the column box must hold one value in each row"),
        ("columns=age&label=names", "the column names holds lists of texts; a label is one text"),
        ("columns=age&label=age2&writer=names", "the column names must hold one client in each row, but holds lists"),
    ],
)
def test_a_table_that_lacks_something_is_said_in_one_line(options: str, said: str, tmp_path: Path) -> None:
    columns = {"age": [1, 2, 3], "age2": [1, 2, 3], "dose": [0.5, None, 0.7], "group": [None, "b", None]}
    columns |= {"rate": [0.5, float("nan"), 1.0], "name": ["1", "b", "c"], "lists": [[1], [2], [3, 4]]}
    columns |= {"names": [["a"], ["b"], ["c"]], "box": [{"x": 1}, {"x": 2}, {"x": 1}]}
    datasets.Dataset.from_dict(columns).to_parquet(str(tmp_path / "rows.parquet"))
    with pytest.raises(DataError, match=said):
        load(f"{tmp_path}?{options}")


@pytest.mark.parametrize(
    "numbers",
    [
        [np.arange(1_700_000_000, 1_700_000_020)],
        [np.array([100.0, 100 + 1e-6])],
        [np.array([2**60]), np.array([2**60 + 1, 2**60 + 90])],
        [np.array([2**63, 2**63 + 5], np.uint64)],
        [np.array([1_700_000_000, 1_700_000_100, 1_700_000_200])],
    ],
)
def test_numbers_that_float32_moves_are_refused(numbers: list[Any]) -> None:
    source = Source(name="hf:x", options={}, splits={})
    with pytest.raises(DataError, match=r"hf:x: the numbers of the column age, \S+ to \S+, lie too close.*subtract an"):
        _narrowed(source, "age", numbers)
    lowest = min(part.min() for part in numbers)
    shifted = [part - lowest for part in numbers]
    assert all(np.allclose(a, b) for a, b in zip(_narrowed(source, "age", shifted), shifted, strict=True))


def test_numbers_that_float32_tells_apart_are_taken(tmp_path: Path) -> None:
    source = Source(name="hf:x", options={}, splits={})
    drawn = np.random.default_rng(0).normal(size=100)
    rows: list[Any] = [drawn, drawn + 1000, np.full(3, 1_700_000_001), np.array([True, False]), np.array([])]
    rows += [np.array([0, 2**63], np.uint64), np.array([-3e38, 3e38]), np.array([np.nan, 1e9, 1e9 + 1])[:1]]
    for numbers in rows:
        assert np.array_equal(_narrowed(source, "age", [numbers])[0], numbers.astype(np.float32), equal_nan=True)
    datasets.Dataset.from_dict({"age": [1e300, 2.0], "dose": [0, 1]}).save_to_disk(str(tmp_path / "rows"))
    with pytest.raises(DataError, match="must be finite in float32"):
        load(f"{tmp_path / 'rows'}?columns=age&label=dose")


def test_next_tokens_are_the_same_whatever_side_is_padded() -> None:
    ids = np.array([[7, 8, 9, 0, 0], [5, 0, 0, 0, 0], [1, 2, 3, 4, 5]], np.int32)
    mask = np.array([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 1, 1, 1]], np.uint8)
    right = _next_tokens({"input_ids": ids, "attention_mask": mask})
    rolled = {"input_ids": np.stack([np.roll(row, 5 - own.sum()) for row, own in zip(ids, mask, strict=True)])}
    left = _next_tokens({**rolled, "attention_mask": mask[:, ::-1]})
    assert right.tolist() == [[8, 9, -100, -100, -100], [-100] * 5, [2, 3, 4, 5, -100]]
    assert left.tolist() == [[-100, -100, 8, 9, -100], [-100] * 5, [2, 3, 4, 5, -100]]


def test_a_folder_without_pictures_is_told_what_to_say(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("age,dose\n1,0.5\n")
    with pytest.raises(DataError, match=r"there are no pictures in .*; of a table say \?columns=A,B&label=C behind"):
        load(f"{tmp_path}?label=dose")


def test_pictures_of_one_class_alone_are_said_to_have_no_labels(tmp_path: Path) -> None:
    (tmp_path / "train" / "cat").mkdir(parents=True)
    for number in range(3):
        picture(10 * number).save(tmp_path / "train" / "cat" / f"{number}.png")
    with pytest.raises(DataError, match="its pictures have no labels, since their folders make no two classes"):
        load(tmp_path)


def test_a_folder_that_is_not_there_is_told_with_its_whole_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's configuration is read again from other places, too."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=f"hf:./none: there is no folder {tmp_path}/none"):
        load("./none")


def test_the_split_of_a_row_is_said_where_there_are_several(tmp_path: Path) -> None:
    parts = {name: datasets.Dataset.from_dict({"age": [1, 2], "dose": [0, None]}) for name in ("train", "test")}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path))
    with pytest.raises(DataError, match="1 of 2 rows have no value, the first is row 2 of train"):
        load(f"{tmp_path}?columns=age&label=dose")


def test_numbers_in_lists_are_several_targets_of_a_sample(tmp_path: Path) -> None:
    columns = {"age": [*range(9)], "both": [[1, 2, 1]] * 9, "doses": [[0.5, 1.5]] * 9}
    datasets.Dataset.from_dict(columns).to_parquet(str(tmp_path / "rows.parquet"))
    whole = load(f"{tmp_path}?columns=age&label=both")
    assert whole.train.targets[0].tolist() == [1, 2, 1] and whole.num_classes == 0 and not whole.class_names
    assert load(f"{tmp_path}?columns=age&label=doses").train.targets[0].tolist() == [0.5, 1.5]


def test_numbers_with_a_point_in_one_split_are_numbers_in_all(tmp_path: Path) -> None:
    doses = {"train": [1, 2], "test": [1.5, 2.0]}
    parts = {name: datasets.Dataset.from_dict({"age": [1, 2], "dose": values}) for name, values in doses.items()}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path))
    found = load(f"{tmp_path}?columns=age&label=dose")
    assert found.train.targets.tolist() == [1, 2] and found.test.targets.tolist() == [1.5, 2.0]
    assert found.num_classes == 0 and found.train.targets.dtype == np.float32


def test_too_few_samples_for_a_fifth_are_said(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"age": [1], "dose": [0]}).to_parquet(str(tmp_path / "rows.parquet"))
    with pytest.raises(DataError, match=r"has no split for testing, and too few samples \(1\) to keep a fifth of them"):
        load(f"{tmp_path}?columns=age&label=dose")


def test_columns_parted_by_something_else_are_said_to_be(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"age;dose": ["1;0", "2;1"]}).to_parquet(str(tmp_path / "rows.parquet"))
    with pytest.raises(DataError, match=r"unknown column 'age'.*\(known: age;dose\); in a csv file commas part the"):
        load(f"{tmp_path}?columns=age&label=dose")


def tokenizer(place: Path, **tokens: str) -> Path:
    transformers = pytest.importorskip("transformers", reason="the package transformers comes with the extra hf")
    models, pre = pytest.importorskip("tokenizers").models, pytest.importorskip("tokenizers").pre_tokenizers
    names = {name: number for number, name in enumerate([*tokens.values(), "good", "bad"])}
    of_words = pytest.importorskip("tokenizers").Tokenizer(models.WordLevel(names, unk_token="good"))
    of_words.pre_tokenizer = pre.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=of_words, **tokens).save_pretrained(str(place))
    return place


def test_a_tokenizer_that_does_not_do_is_told_with_its_folder(tmp_path: Path) -> None:
    texts = {"text": ["good", "bad", "good bad"] * 3, "number": [*range(9)]}
    datasets.Dataset.from_dict(texts).save_to_disk(str(tmp_path / "rows"))
    name = f"{tmp_path / 'rows'}?text=text&length=4&tokenizer="
    filled = load(f"{name}{tokenizer(tmp_path / 'filled', pad_token='[PAD]')}")
    assert filled.num_classes == 3 and filled.train.inputs["input_ids"][0].tolist() in ([1, 0, 0, 0], [2, 0, 0, 0])
    with pytest.raises(DataError, match=r"/bare has no token to fill texts up with; name one as pad_token in its tok"):
        load(f"{name}{tokenizer(tmp_path / 'bare')}")
    (tmp_path / "bare" / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"the tokenizer in .*/bare can't be read \(JSONDecodeError: "):
        load(f"{name}{tmp_path / 'bare'}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    with pytest.raises(DataError, match=r"the tokenizer in .*/empty has no words; put its tokenizer.json there"):
        load(f"{name}{tmp_path / 'empty'}")
    with pytest.raises(DataError, match="the column number must hold texts, but row 1 holds 0"):
        load(f"{tmp_path / 'rows'}?text=number&tokenizer={tmp_path / 'filled'}")
