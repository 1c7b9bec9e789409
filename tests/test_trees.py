"""Arithmetic on flat vectors: the bits of an aggregation, and the one rule for sub-models."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsweep.trees import FlatLayout, are_equal, coverage_mean, layout_of, load_vector, model_vector, weighted_mean

BLOCK = 65_536


def rows_of(seed: int, num_rows: int, size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = np.random.default_rng(seed)
    scales = 10.0 ** generator.integers(-6, 6, size=(num_rows, size))
    return list(torch.from_numpy(generator.normal(size=(num_rows, size)) * scales).to(dtype))


def weights_of(seed: int, num_rows: int) -> list[float]:
    raw = np.random.default_rng(seed + 1).random(num_rows) + 0.01
    return [float(w) for w in raw / raw.sum()]


def bits(vector: Tensor) -> bytes:
    return vector.contiguous().numpy().tobytes()


def mean(rows: list[Tensor], weights: list[float]) -> Tensor:
    out = torch.empty_like(rows[0])
    weighted_mean(rows, weights, out)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weighted_mean_is_the_sum_in_row_order_in_float64(dtype: torch.dtype) -> None:
    rows, weights = rows_of(0, 5, BLOCK + 3, dtype), weights_of(0, 5)
    total = rows[0].numpy().astype(np.float64) * weights[0]
    for row, weight in zip(rows[1:], weights[1:], strict=True):
        total = total + row.numpy().astype(np.float64) * weight
    assert bits(mean(rows, weights)) == total.astype(rows[0].numpy().dtype).tobytes()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    num_rows=st.integers(1, 6),
    size=st.integers(1, 70) | st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 37]),
    data=st.data(),
)
def test_weighted_mean_has_the_same_bits_however_the_coordinates_are_cut(
    seed: int, num_rows: int, size: int, data: st.DataObject
) -> None:
    rows, weights = rows_of(seed, num_rows, size), weights_of(seed, num_rows)
    whole = mean(rows, weights)
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=5))})
    pieces = torch.empty_like(whole)
    for start, stop in itertools.pairwise(cuts):
        weighted_mean([row[start:stop] for row in rows], weights, pieces[start:stop])
    assert bits(pieces) == bits(whole)


@settings(max_examples=20, deadline=None)
@given(values=st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
def test_one_row_of_weight_one_comes_out_bit_for_bit(values: list[float]) -> None:
    row = torch.tensor(values, dtype=torch.float32)
    assert bits(mean([row], [1.0])) == bits(row)


def test_weighted_mean_may_write_into_one_of_its_rows() -> None:
    rows, weights = rows_of(3, 3, BLOCK + 5), weights_of(3, 3)
    expected = mean([row.clone() for row in rows], weights)
    weighted_mean(rows, weights, rows[1])
    assert bits(rows[1]) == bits(expected)


def test_weighted_mean_refuses_a_missing_weight() -> None:
    with pytest.raises(ValueError):
        mean(rows_of(0, 2, 4), [1.0])


def test_coverage_mean_without_masks_is_the_weighted_mean() -> None:
    rows, weights = rows_of(5, 4, 33), weights_of(5, 4)
    assert bits(coverage_mean(torch.zeros(33), rows, [None] * 4, weights)) == bits(mean(rows, weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_coverage_mean_averages_each_coordinate_over_its_holders(dtype: torch.dtype) -> None:
    """Coordinate 0: (1/4 x 1 + 3/4 x 5) = 4; 1: client 0 alone, 2; 2: client 1 alone, 7; 3: nobody, the server's."""
    server = torch.tensor([10.0, 20.0, 30.0, 40.0], dtype=dtype)
    rows = [torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=dtype), torch.tensor([5.0, 6.0, 7.0, 8.0], dtype=dtype)]
    covers = [torch.tensor([True, True, False, False]), torch.tensor([True, False, True, False])]
    assert coverage_mean(server, rows, covers, [0.25, 0.75]).tolist() == [4.0, 2.0, 7.0, 40.0]
    assert coverage_mean(server, rows, [covers[0], None], [0.25, 0.75]).tolist() == [4.0, 5.0, 7.0, 8.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_coverage_mean_leaves_what_it_is_given_untouched(dtype: torch.dtype) -> None:
    rows = rows_of(1, 2, 6, dtype)
    covers = [torch.tensor([True, False] * 3), torch.tensor([True, True, False] * 2)]
    server = torch.ones(6, dtype=dtype)
    before = [t.clone() for t in (*rows, *covers, server)]
    coverage_mean(server, rows, covers, [0.5, 0.5])
    assert all(torch.equal(a, b) for a, b in zip(before, (*rows, *covers, server), strict=True))


def test_coverage_mean_has_the_same_bits_however_the_coordinates_are_cut() -> None:
    size = BLOCK + 101
    rows, weights = rows_of(2, 3, size), weights_of(2, 3)
    masks = np.random.default_rng(4).random((3, size)) < 0.5
    covers, server = [torch.from_numpy(mask) for mask in masks], torch.full((size,), 7.0)
    whole = coverage_mean(server, rows, covers, weights)
    for start, stop in itertools.pairwise([0, 1, 90, BLOCK - 3, BLOCK + 2, size]):
        cut = slice(start, stop)
        piece = coverage_mean(server[cut], [r[cut] for r in rows], [c[cut] for c in covers], weights)
        assert bits(piece) == bits(whole[cut])
    assert set(whole[~torch.stack(covers).any(0)].tolist()) == {7.0}


def test_coverage_mean_ignores_what_nobody_vouches_for() -> None:
    rows = [torch.tensor([1.0, float("nan")]), torch.tensor([float("inf"), 3.0])]
    covers = [torch.tensor([True, False]), torch.tensor([False, True])]
    assert coverage_mean(torch.zeros(2), rows, covers, [0.5, 0.5]).tolist() == [1.0, 3.0]


def test_coverage_mean_keeps_the_servers_value_where_the_holders_have_no_weight() -> None:
    covers = [torch.tensor([True]), torch.tensor([False])]
    assert coverage_mean(torch.tensor([9.0]), [torch.tensor([1.0]), torch.tensor([2.0])], covers, [0.0, 1.0]) == 9.0


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**16), data=st.data())
def test_coverage_mean_stays_between_its_holders(seed: int, data: st.DataObject) -> None:
    rows, weights = rows_of(seed, 3, 8, torch.float64), weights_of(seed, 3)
    masks = data.draw(st.lists(st.lists(st.booleans(), min_size=8, max_size=8), min_size=3, max_size=3))
    out = coverage_mean(torch.full((8,), -5.0, dtype=torch.float64), rows, [torch.tensor(m) for m in masks], weights)
    for j in range(8):
        held = [float(row[j]) for row, mask in zip(rows, masks, strict=True) if mask[j]] or [-5.0]
        slack = 1e-9 * max(abs(v) for v in held)
        assert min(held) - slack <= float(out[j]) <= max(held) + slack


def batch_norm_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3, 2), nn.BatchNorm1d(2))


def test_layout_puts_parameters_first_then_float_buffers_then_riders() -> None:
    layout = layout_of(batch_norm_model(), [("optimizer.step", (1,))])
    assert layout.names == (
        "1.weight",
        "1.bias",
        "2.weight",
        "2.bias",
        "2.running_mean",
        "2.running_var",
        "optimizer.step",
    )
    assert (layout.num_params, layout.num_buffers, layout.num_riders, layout.num_values) == (12, 4, 1, 17)


def test_vector_survives_a_round_trip_through_a_model() -> None:
    layout = layout_of(batch_norm_model())
    vector = torch.arange(float(layout.num_values))
    model = batch_norm_model()
    load_vector(model, layout, vector)
    assert torch.equal(model_vector(model, layout), vector)
    assert torch.equal(layout.flatten(layout.views(vector)), vector)


def test_views_share_memory_and_params_leave_the_rest_out() -> None:
    layout = layout_of(batch_norm_model())
    vector = torch.zeros(layout.num_values)
    layout.views(vector)["1.bias"].fill_(1.0)
    assert float(vector.sum()) == 2.0
    assert list(layout.params(vector)) == ["1.weight", "1.bias", "2.weight", "2.bias"]


def test_layout_refuses_parameters_of_two_types_and_models_without_any() -> None:
    mixed = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).double())
    for model in (mixed, nn.Flatten()):
        with pytest.raises(ValueError, match="share one floating type"):
            layout_of(model)


def test_empty_layout_flattens_to_nothing() -> None:
    layout = FlatLayout(names=(), shapes=(), num_params=0, num_buffers=0)
    assert layout.flatten({}).shape == (0,)


EQUAL = {"a": [torch.ones(2), (np.arange(3), "x")], "b": None}
NOT_A_NUMBER = [math.nan, torch.tensor([1.0, math.nan]), np.array([math.nan]), torch.tensor(math.nan)]


@pytest.mark.parametrize(
    "other",
    [
        {**EQUAL, "c": 1},
        {**EQUAL, "b": 0},
        {"a": [torch.ones(2).double(), (np.arange(3), "x")], "b": None},
        {"a": [torch.zeros(2), (np.arange(3), "x")], "b": None},
        {"a": [torch.ones(2), (np.arange(4), "x")], "b": None},
        {"a": [torch.ones(2), (np.arange(3.0), "x")], "b": None},
        {"a": [torch.ones(2)], "b": None},
    ],
)
def test_trees_are_equal_by_their_values(other: dict[str, object]) -> None:
    assert are_equal(EQUAL, {"a": [torch.ones(2), (np.arange(3), "x")], "b": None})
    assert not are_equal(EQUAL, other)


@pytest.mark.parametrize("value", NOT_A_NUMBER)
def test_what_is_no_number_is_the_same_as_itself(value: object) -> None:
    copy = value.clone() if isinstance(value, Tensor) else float("nan") if isinstance(value, float) else np.array(value)
    assert are_equal({"a": value}, {"a": copy}) and not are_equal({"a": value}, {"a": 1.0})
