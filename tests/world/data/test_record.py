import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from fedsweep.errors import DataError
from fedsweep.world.data.record import Dataset, Samples


def small(**changes: Any) -> Dataset:
    fields: dict[str, Any] = {
        "name": "own",
        "train_images": np.zeros((4, 2, 3, 5), np.uint8),
        "train_labels": np.array([0, 1, 2, 0]),
        "test_images": np.zeros((2, 2, 3, 5), np.uint8),
        "test_labels": np.array([2, 1]),
        "num_classes": 3,
        "scale": 255.0,
        "mean": (0.5, 0.5),
        "std": (0.5, 0.25),
    }
    return Dataset.images(**{**fields, **changes})


def test_integers_become_int64_and_arrays_contiguous() -> None:
    images = np.zeros((4, 5, 3, 2), np.float32).transpose(0, 3, 2, 1)
    dataset = small(
        train_images=images,
        test_images=np.zeros((2, 2, 3, 5), np.float32),
        train_labels=np.array([0, 1, 2, 0], np.uint8),
        writers=np.array([0, 0, 1, 1], np.int32),
        mean=[0, 0],
    )
    assert dataset.train_images.flags.c_contiguous
    assert dataset.train_labels.dtype == np.int64
    assert dataset.writers is not None and dataset.writers.dtype == np.int64
    assert dataset.mean == (0.0, 0.0)
    assert (dataset.num_channels, dataset.image_shape) == (2, (2, 3, 5))


def test_an_axis_that_was_added_lies_in_memory_as_after_a_journey_to_an_actor() -> None:
    """Its step is free where it has one channel; torch's convolutions go by it, so rounding would differ."""
    grey = np.zeros((4, 4, 4), dtype=np.uint8)[:, None]
    data = small(train_images=grey, test_images=grey[:2], mean=(0.5,), std=(0.5,))
    assert grey.strides[1] == 0
    for images in (data.train_images, data.test_images):
        assert images.strides == pickle.loads(pickle.dumps(images)).strides == (16, 16, 4, 1)
        assert images[[0, 1]].strides == (16, 16, 4, 1)


def test_a_dataset_is_frozen_and_picklable() -> None:
    dataset = small()
    with pytest.raises(dataclasses.FrozenInstanceError):
        dataset.name = "other"  # type: ignore[misc]
    assert np.array_equal(pickle.loads(pickle.dumps(dataset)).train_labels, dataset.train_labels)


def named(*fields: tuple[str, Any]) -> np.ndarray:
    rows = np.zeros(4, dtype=[*fields, ("b", np.float32)])
    rows["b"] = np.arange(4)
    return rows


def test_fields_of_another_machines_order_are_numbers() -> None:
    rows = named(("a", ">f4"))
    rows["a"] = np.arange(4)
    inputs = Samples(inputs=rows, targets=np.zeros(4)).inputs
    assert inputs["a"].dtype.isnative and inputs["a"].tolist() == inputs["b"].tolist() == [0, 1, 2, 3]


WITH_NAN = named(("a", np.float32))
WITH_NAN["a"][2] = np.nan
MASKED = np.ma.masked_array(np.zeros((4, 3)), np.arange(12).reshape(4, 3) == 5)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            np.zeros((4, 3), np.longdouble),
            "inputs must be bool, integers or floats of at most 64 bits, but is float128",
        ),
        (named(("a", object)), r"inputs\['a'\] must be bool, integers or floats of at most 64 bits, but is object"),
        (WITH_NAN, r"inputs\['a'\] must be finite in float32"),
        (MASKED, "inputs must have no masked values; fill them, or leave out the samples"),
        ({"x": MASKED}, r"inputs\['x'\] must have no masked values"),
    ],
)
def test_inputs_that_no_network_can_be_given_are_refused(inputs: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Samples(inputs=inputs, targets=np.zeros(4))


def test_masked_labels_and_groups_are_refused() -> None:
    labels = np.ma.masked_array([0, 1, 2, 0], [False, True, False, False])
    with pytest.raises(DataError, match="train_labels must have no masked values"):
        small(train_labels=labels)
    with pytest.raises(DataError, match="groups must have no masked values"):
        Samples(inputs=np.zeros((4, 3)), targets=np.zeros(4), groups=labels)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"train_images": np.zeros((4, 3, 5), np.uint8)},
            r"train_images must be a non-empty numpy array \[S, C, H, W\]",
        ),
        ({"train_images": np.zeros((0, 2, 3, 5), np.uint8)}, "non-empty"),
        ({"train_images": [[1]]}, "list"),
        ({"test_images": np.zeros((2, 2, 3, 5), np.int32)}, "uint8 or float32"),
        ({"test_images": np.zeros((2, 2, 3, 6), np.uint8)}, "one shape and type"),
        ({"test_images": np.zeros((2, 2, 3, 5), np.float32)}, "one shape and type"),
        ({"train_images": np.full((4, 2, 3, 5), np.nan, np.float32)}, "finite"),
        ({"train_labels": np.array([0, 1, 3, 0])}, r"0\.\.2, but one is 3"),
        ({"train_labels": np.array([0, 1, -1, 0])}, "negative"),
        ({"train_labels": np.array([0, 1])}, "one per image"),
        ({"train_labels": np.array([0.0, 1, 2, 0])}, "integers"),
        ({"writers": np.array([0, 1])}, "writers"),
        ({"num_classes": 0}, "num_classes >= 1"),
        ({"scale": 0.0}, "scale > 0"),
        ({"mean": (0.5,)}, "per channel"),
        ({"std": (0.5, 0.0)}, "std > 0"),
        ({"std": (0.5, float("inf"))}, "finite"),
        ({"class_names": ("a",)}, "class_names"),
    ],
)
def test_what_breaks_a_rule_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        small(**changes)


def test_numbers_beyond_sixty_three_bits_are_refused_as_too_large() -> None:
    large = np.array([0, 1, 2**63, 2**64 - 1], np.uint64)
    for name in ("train_labels", "writers"):
        with pytest.raises(DataError, match=f"{name} must be less than 2\\^63, but one is {2**64 - 1}; number them"):
            small(**{name: large})
    with pytest.raises(DataError, match=f"groups must be less than 2\\^63, but one is {2**64 - 1}"):
        Samples(inputs=np.zeros((4, 1)), groups=large)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"targets must be less than 2\^63, but one is"):
        Samples(inputs=np.zeros((4, 1)), targets=large)
    assert Samples(inputs=np.zeros((4, 1)), targets=large // 4).targets.dtype == np.uint64
