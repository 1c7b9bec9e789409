"""Keyed random streams: what a draw depends on, and what it does not."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsweep.streams import Stream, stream


def test_a_stream_starts_anew_at_each_call() -> None:
    source = stream(1, "batches", 2, 3)
    assert source.numpy().random(5).tolist() == source.numpy().random(5).tolist()
    assert torch.equal(torch.rand(5, generator=source.torch()), torch.rand(5, generator=source.torch()))


def test_every_part_of_the_key_matters() -> None:
    keys = [
        (0, "a", 1, 2, 3),
        (1, "a", 1, 2, 3),
        (0, "b", 1, 2, 3),
        (0, "a", 2, 2, 3),
        (0, "a", 1, 3, 3),
        (0, "a", 1, 2, 4),
    ]
    seeds = {stream(*key).seed() for key in keys}
    assert len(seeds) == len(keys)


def test_children_are_streams_of_their_own() -> None:
    parent = stream(0, "devices")
    seeds = {parent.seed(), parent.child("up").seed(), parent.child("down").seed(), parent.child("up", 1).seed()}
    assert len(seeds) == 4
    assert parent.child("up").child(1) == parent.child("up", 1)


def test_a_number_and_its_digits_are_different_keys() -> None:
    assert Stream((1,)).seed() != Stream(("1",)).seed()
    assert Stream((1, 2)).seed() != Stream((12,)).seed()


@pytest.mark.parametrize("bits", [8, 56, 64, 128])
def test_seeds_have_as_many_bits_as_asked_for(bits: int) -> None:
    seeds = [stream(0, "x", k).seed(bits) for k in range(200)]
    assert all(0 <= seed < 2**bits for seed in seeds)
    assert max(seeds) >= 2 ** (bits - 1)


def test_draws_touch_no_global_generator() -> None:
    np_state, torch_state = np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[index]
    stream(0, "x").numpy().random(10)
    torch.rand(3, generator=stream(0, "x").torch())
    assert np.random.get_state()[1].tolist() == np_state  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), torch_state)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**40), round=st.integers(0, 10_000), client=st.integers(-1, 10_000))
def test_a_stream_survives_pickling(seed: int, round: int, client: int) -> None:
    source = stream(seed, "batches", round, client)
    assert pickle.loads(pickle.dumps(source)).seed() == source.seed()


def test_numpy_integers_name_the_same_stream_as_python_ones() -> None:
    assert stream(0, "x", int(np.int64(3)), 4) == stream(0, "x", np.int64(3), np.int64(4))  # type: ignore[arg-type]


GOLDEN_SEED = 16073599761456741336
GOLDEN_ORDER = [0, 5, 1, 2, 3, 4]


def test_the_numbers_behind_a_key_never_change() -> None:
    """Golden values: a change here changes the bits of every run that anybody has recorded."""
    assert stream(0, "batches", 1, 2).seed() == GOLDEN_SEED
    assert stream(0, "batches", 1, 2).numpy().permutation(6).tolist() == GOLDEN_ORDER


@pytest.mark.parametrize("bits", [56, 64])
def test_torchs_own_generator_draws_from_a_stream_for_a_while(bits: int) -> None:
    source, state = stream(0, "x"), torch.get_rng_state()
    with source.drawn_globally(bits=bits):
        drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(source.seed(bits))))
    assert torch.equal(torch.get_rng_state(), state)


def test_torchs_own_generator_is_put_back_after_an_error() -> None:
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="inside"), stream(0, "x").drawn_globally():
        torch.rand(1)
        raise ValueError("inside")
    assert torch.equal(torch.get_rng_state(), state)
