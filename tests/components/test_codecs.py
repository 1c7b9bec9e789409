"""The codecs that a configuration can name: what they promise of every message."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsweep.components.codec import Codec
from fedsweep.components.compression.base import spread
from fedsweep.components.compression.packing import packed, packed_places, unpacked, unpacked_places
from fedsweep.components.compression.registry import CODECS
from fedsweep.engine.ledger import message_sizes
from fedsweep.errors import ConfigError
from fedsweep.parameters.signature import docs_of, signature_of
from fedsweep.records import Payload
from fedsweep.streams import Stream

FIXED = {"none"}
NAMES = [name for name in CODECS if name not in FIXED]


def drawn(name: str, number: int) -> tuple[Codec, Tensor]:
    """A codec of random parameters, fitted to random shapes, and a random move: sometimes of zeros, or of one value."""
    draw = Stream(("test codecs", name, number)).numpy()
    options: dict[str, Any] = {}
    if name in ("topk", "randomk", "ternary"):
        options["share"] = float(draw.uniform(0.001, 1))
    if name == "count_sketch":
        options |= {"share": float(draw.uniform(0.05, 1)), "rows": int(draw.integers(1, 6))}
    if name == "qsgd":
        options |= {"bits": int(draw.integers(2, 9)), "bucket": int(draw.integers(1, 200))}
    if name == "powersgd":
        options["rank"] = int(draw.integers(1, 5))
    if name != "count_sketch":
        options["error_feedback"] = bool(draw.integers(2))
    shapes = tuple(
        tuple(int(size) for size in draw.integers(1, 9, size=draw.integers(0, 4))) for _ in range(draw.integers(1, 6))
    )
    size = sum(math.prod(shape) for shape in shapes)
    move = torch.from_numpy(draw.standard_normal(size) * 10.0 ** draw.uniform(-4, 2)).float()
    move *= float(draw.integers(0, 20) > 0)
    return CODECS[name](**options).fitted(shapes), move


def buffer(message: Payload) -> bytes:
    """A message as one buffer, tensor after tensor: what would go over a wire."""
    arrays = [
        np.packbits(tensor.numpy()) if tensor.dtype == torch.bool else tensor.contiguous().numpy()
        for tensor in message.values()
    ]
    return b"".join(array.tobytes() for array in arrays)


def bound(name: str, codec: Any, move: Tensor) -> float:
    """The largest length of the error that the codec's source allows."""
    size, length = len(move), float(move.double().norm())
    kept = math.sqrt(max(0.0, 1 - codec.number(size) / size)) if hasattr(codec, "number") else 1.0
    if name == "fp16":
        return 2**-11 * length + 2**-25 * math.sqrt(size)
    if name == "bf16":
        return 2**-8 * length
    if name == "int8":
        parts = torch.split(move, codec.sizes(size))
        return math.sqrt(sum(len(part) * float(part.abs().max() / 127) ** 2 for part in parts if len(part)))
    if name == "qsgd":
        parts = torch.split(move, codec.bucket)
        return math.sqrt(sum(len(part) * float(part.norm() / (2 ** (codec.bits - 1) - 1)) ** 2 for part in parts))
    if name == "topk":
        return kept * length
    if name == "randomk" and not codec.error_feedback:
        return max(1.0, size / codec.number(size) - 1) * length
    return length  # a projection, or signs of the mean size: never further off than nothing at all


@pytest.mark.parametrize("messages", [100, pytest.param(1000, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", NAMES)
def test_messages_are_charged_as_packed_and_decode_within_their_bound(name: str, messages: int) -> None:
    sizes: dict[Any, int] = {}
    for number in range(messages):
        codec, move = drawn(name, number)
        before = move.clone()
        message = codec.encode(move, Stream((name, number)))
        charge = sum(size.num_bytes for size in message_sizes(message, torch.float32).values())
        assert charge == len(buffer(message)) and torch.equal(move, before)
        # As long whatever is in it: a plan knows the bytes of a run that nobody has trained.
        other = codec.encode(torch.zeros_like(move), Stream((name, "other")))
        assert len(buffer(other)) == charge
        decoded = codec.decode(message, len(move))
        assert decoded.shape == move.shape and not codec.decode(other, len(move)).any()
        if name == "count_sketch":
            # Each value is read with what shares its cells, or, where it is not read, as zero.
            off = float((decoded.double() - move.double()).abs().max()) if len(move) else 0.0
            assert off <= float(move.double().abs().sum()) * (1 + 1e-5), (number, codec)
        else:
            error = float((decoded.double() - move.double()).norm())
            assert error <= bound(name, codec, move) * (1 + 1e-5) + 1e-30, (number, codec)
        sizes[type(codec)] = sizes.get(type(codec), 0) + 1
    assert sizes == {type(codec): messages}


def test_scales_are_spread_over_as_many_values_as_there_are() -> None:
    """257 is no bfloat16, as 2^24 + 1 is no float32."""
    scales = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert spread(scales, [257, 2]).tolist() == [1.0] * 257 + [2.0] * 2


def test_a_sketch_reads_what_stands_out() -> None:
    """Three values of 100 among noise of 0.01, in a table of a fifth of the values."""
    move = torch.full((2000,), 0.01)
    move[[3, 700, 1999]] = torch.tensor([100.0, -100.0, 100.0])
    codec = CODECS["count_sketch"](share=0.2, keep=0.0015).fitted(((2000,),))
    decoded = codec.decode(codec.encode(move, Stream(("a",))), 2000)
    assert decoded.nonzero().flatten().tolist() == [3, 700, 1999]
    assert float((decoded[[3, 700, 1999]] - move[[3, 700, 1999]]).abs().max()) < 0.5


@pytest.mark.parametrize("rows", [1, 2, 4, 5])
def test_a_sketch_favours_no_sign(rows: int) -> None:
    move = torch.randn(300, generator=torch.Generator().manual_seed(4))
    codec = CODECS["count_sketch"](share=0.5, rows=rows, keep=1.0)
    decoded, opposite = (codec.decode(codec.encode(m, Stream(("a",))), 300) for m in (move, -move))
    assert torch.equal(decoded, -opposite)


def test_a_sketch_of_a_sum_is_the_sum_of_sketches() -> None:
    codec = CODECS["count_sketch"]().fitted(((500,),))
    first, second = (torch.randn(500, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    tables = [codec.encode(move, Stream((n,)))["table"] for n, move in enumerate((first, second, first + second))]
    assert codec.decodes_sums and torch.allclose(tables[0] + tables[1], tables[2], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [
        *(("int8", {}, dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16)),
        *(("qsgd", {"bits": 8}, dtype) for dtype in (torch.bfloat16, torch.float16)),
        ("qsgd", {}, torch.float64),
        ("qsgd", {"bits": 2, "bucket": 16}, torch.float64),
        ("randomk", {"share": 0.2}, torch.float64),
    ],
)
def test_means_of_many_messages_are_the_move(name: str, options: Mapping[str, Any], dtype: torch.dtype) -> None:
    """Of a move as small as a step: in 16 bits the scales of such a one have few digits, or none."""
    move = (1e-3 * torch.randn(64, generator=torch.Generator().manual_seed(3)).double()).to(dtype)
    codec, tries = CODECS[name](**options).fitted(((8, 4), (32,))), 1000
    decoded = torch.stack([codec.decode(codec.encode(move, Stream((name, n))), 64).double() for n in range(tries)])
    error = decoded.std(dim=0) / math.sqrt(tries)
    off = (decoded.mean(dim=0) - move).abs() / error.clamp(min=1e-12)
    # Of 64 values one in six passes three standard errors by chance; all together they are 64 draws of a normal.
    assert float(off.max()) < 4.2 and float(off.square().mean()) < 1.6
    total = decoded.sum(dim=1)
    assert abs(float(total.mean() - move.sum())) <= 3 * float(total.std()) / math.sqrt(tries)


def test_the_same_stream_gives_the_same_message_and_another_another() -> None:
    move = torch.randn(300, generator=torch.Generator().manual_seed(3))
    for name in ("int8", "qsgd", "randomk", "powersgd"):
        codec = CODECS[name]().fitted(((30, 10),))
        first, again, other = (buffer(codec.encode(move, Stream((key,)))) for key in ("a", "a", "b"))
        assert first == again != other


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CODECS)
def test_models_of_16_bits_go_through_every_codec(name: str, dtype: torch.dtype) -> None:
    """The values are those that float32 would have, as far as 16 bits tell them."""
    codec, stream = CODECS[name]().fitted(((6, 8), (8,), ())), Stream(("16 bits",))
    move = torch.randn(57, generator=Stream(("move",)).torch()).to(dtype)
    message = codec.encode(move, stream)
    decoded = codec.decode(message, 57)
    assert decoded.shape == (57,) and bool(torch.isfinite(decoded).all())
    sizes = [{kind: len(part) for kind, part in each.items()} for each in (message, codec.encode(move.float(), stream))]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_what_is_too_large_for_halves_becomes_the_largest(name: str, dtype: torch.dtype) -> None:
    move = torch.tensor([3e38, -3e38, 66000.0, 0.0]).to(dtype)
    decoded = CODECS[name]().decode(CODECS[name]().encode(move, Stream(("a",))), 4)
    assert decoded.tolist() == ([65504, -65504, 65504, 0] if name == "fp16" else move.bfloat16().tolist())


def test_power_sgd_gets_a_matrix_of_its_rank_back() -> None:
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(20, 2, generator=generator) @ torch.randn(2, 30, generator=generator)
    bias = torch.randn(5, generator=generator)
    codec = CODECS["powersgd"](rank=2).fitted(((20, 30), (5,)))
    move = torch.cat([matrix.flatten(), bias])
    message = codec.encode(move, Stream(("a",)))
    assert sum(map(len, message.values())) == 2 * (20 + 30) + 5
    assert torch.allclose(codec.decode(message, len(move)), move, atol=1e-4)


@pytest.mark.parametrize("bits", [1, 2, 3, 7, 8, 17, 31])
def test_whole_numbers_survive_packing(bits: int) -> None:
    codes = torch.from_numpy(Stream((bits,)).numpy().integers(0, 2**bits, size=41))
    sent = packed(codes, bits)
    assert len(sent) == -(-41 * bits // 8) and torch.equal(unpacked(sent, bits, 41), codes)
    assert not len(packed(codes[:0], bits))


@pytest.mark.parametrize(("size", "number"), [(1, 1), (2, 1), (100, 3), (100, 60), (4096, 5), (70000, 7000)])
def test_places_survive_packing_in_the_shorter_form(size: int, number: int) -> None:
    places = torch.from_numpy(np.sort(Stream((size,)).numpy().choice(size, number, replace=False)))
    sent = packed_places(places, size)
    assert torch.equal(unpacked_places(sent, size, number), places)
    assert len(buffer({"places": sent})) <= min(-(-size // 8), -(-number * max(1, math.ceil(math.log2(size))) // 8))


@pytest.mark.parametrize("name", CODECS)
def test_each_parameter_is_told_of(name: str) -> None:
    """A class's own, and those of its bases."""
    names = signature_of(CODECS[name]).keys() - {"shapes", "brain"}
    texts = docs_of(CODECS[name])
    assert all(texts.get(parameter) and "``" not in texts[parameter] for parameter in names), (names, texts)


def test_a_sketch_has_no_memory() -> None:
    with pytest.raises(ConfigError, match=r"none of them knows what its own left out; set error_feedback=false"):
        CODECS["count_sketch"](error_feedback=True)
