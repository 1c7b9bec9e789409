from __future__ import annotations

import enum
import json
import math
import struct
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import nn

from fedsweep.errors import DataError, InvariantError
from fedsweep.runs.checkpoints.state_codec import from_bytes, to_bytes

TORCH_TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
ARRAY_TYPES = "<f8 <f4 <f2 <i8 <i4 <i2 |i1 |u1 |b1".split()


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal in every type and bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return same([*a.keys()], [*b.keys()]) and same([*a.values()], [*b.values()])
    if isinstance(a, torch.Tensor):
        return bool(a.dtype == b.dtype and a.shape == b.shape and bits_of(a) == bits_of(b))
    if isinstance(a, np.ndarray):
        return bool(a.dtype.str == b.dtype.str and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, np.generic):
        return bool(a.dtype.str == b.dtype.str and a.tobytes() == b.tobytes())
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return bool(a == b)


def bits_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.resolve_conj().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def with_skeleton(text: str, **tensors: torch.Tensor) -> bytes:
    """A file with a skeleton that was made up."""
    return bytes(save({"skeleton": torch.tensor([*text.encode("ascii")], dtype=torch.uint8), **tensors}))


def shapes() -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, 3), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(TORCH_TYPES)), draw(shapes())
    size = math.prod(shape) * dtype.itemsize
    content = bytearray(draw(st.binary(min_size=size, max_size=size)))
    if dtype == torch.bool:
        content = bytearray(byte % 2 for byte in content)
    if not size:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(shape)


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    dtype, shape = np.dtype(draw(st.sampled_from(ARRAY_TYPES))), draw(shapes())
    size = math.prod(shape) * dtype.itemsize
    content = draw(st.binary(min_size=size, max_size=size))
    if dtype.kind == "b":
        content = bytes(byte % 2 for byte in content)
    return np.frombuffer(content, dtype=dtype).reshape(shape)


@st.composite
def numpy_scalars(draw: st.DrawFn) -> np.generic:
    dtype = np.dtype(draw(st.sampled_from(ARRAY_TYPES)))
    content = draw(st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize))
    scalar: np.generic = np.frombuffer(bytes([content[0] % 2]) if dtype.kind == "b" else content, dtype=dtype)[0]
    return scalar


def nan_with_payload(bits: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000001 | bits))[0]
    return value


def trees() -> st.SearchStrategy[Any]:
    leaves = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-(2**200), 2**200),
        st.floats(),
        st.integers(0, 2**51).map(nan_with_payload),
        st.text(st.characters(), max_size=8),
        tensors(),
        arrays(),
        numpy_scalars(),
    )
    keys = st.one_of(st.text(max_size=4), st.integers(-(2**70), 2**70))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.dictionaries(keys, inner, max_size=4),
        ),
        max_leaves=12,
    )


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(trees())
def test_every_tree_comes_back_with_its_types_and_bits(tree: Any) -> None:
    assert same(from_bytes(to_bytes(tree)), tree)


@settings(max_examples=40, deadline=None)
@given(trees())
def test_what_comes_back_gives_the_same_bytes_again(tree: Any) -> None:
    data = to_bytes(tree)
    assert to_bytes(from_bytes(data)) == data


@settings(max_examples=100, deadline=None)
@given(trees(), st.data())
def test_a_damaged_tree_is_a_tree_or_a_data_error_but_never_anything_else(tree: Any, data: st.DataObject) -> None:
    content = bytearray(to_bytes(tree))
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    try:
        found = from_bytes(bytes(content))
    except DataError:
        return
    assert same(from_bytes(to_bytes(found)), found)


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.one_of(
            st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.sampled_from(["0", "<f4", "f"])
        ),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(["tuple", "dict", "int", "float", "tensor", "array", "scalar", "x"]),
                inner,
                max_size=2,
            ),
        ),
        max_leaves=8,
    )
)
def test_a_made_up_skeleton_is_a_tree_or_a_data_error(root: Any) -> None:
    try:
        found = from_bytes(with_skeleton(json.dumps({"version": 1, "root": root}), **{"0": torch.zeros(2)}))
    except DataError:
        return
    assert same(from_bytes(to_bytes(found)), found)


@pytest.mark.parametrize("value", [True, 1, 1.0, np.int64(1), np.float64(1), np.bool_(True), "1"])
def test_values_that_are_equal_keep_their_types(value: object) -> None:
    assert type(from_bytes(to_bytes([value]))[0]) is type(value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -math.nan, -0.0, 5e-324, 0.1 + 0.2])
def test_floats_keep_every_bit(value: float) -> None:
    assert same(from_bytes(to_bytes(value)), value)


def test_int_and_string_keys_stay_apart_and_in_order() -> None:
    tree = {3: "a", "3": "b", -1: "c"}
    assert same(from_bytes(to_bytes(tree)), tree)


def test_ints_of_any_length_come_back() -> None:
    value = -(7**9000)
    assert from_bytes(to_bytes({value: value})) == {value: value}
    with pytest.raises(InvariantError, match=r"\[-0x"):
        to_bytes({value: set()})


def test_a_lone_surrogate_comes_back() -> None:
    assert from_bytes(to_bytes("\ud800")) == "\ud800"


def test_views_and_repeated_tensors_are_kept_by_value() -> None:
    base = torch.arange(6.0)
    loaded = from_bytes(to_bytes([base, base, base[2:], base.view(2, 3).T, base[:1].expand(3)]))
    assert [t.tolist() for t in loaded[:3]] == [base.tolist(), base.tolist(), base[2:].tolist()]
    assert loaded[3].tolist() == [[0, 3], [1, 4], [2, 5]] and loaded[4].tolist() == [0, 0, 0]
    loaded[0].zero_()
    assert loaded[1].sum() == 15


def test_reversed_and_read_only_arrays_are_kept_and_come_back_writable() -> None:
    array = np.arange(4.0)[::-1]
    array.flags.writeable = False
    loaded = from_bytes(to_bytes(array))
    loaded += 1
    assert loaded.tolist() == [4, 3, 2, 1] and array.tolist() == [3, 2, 1, 0]


def test_a_lazily_negated_tensor_is_kept_as_what_it_is() -> None:
    assert from_bytes(to_bytes(torch._neg_view(torch.tensor([1.0])))).tolist() == [-1]


def test_equal_trees_give_equal_bytes_whatever_the_layout_in_memory() -> None:
    assert to_bytes([torch.eye(3)[:, :2]]) == to_bytes([torch.eye(3)[:, :2].contiguous()])


def test_the_input_stays_untouched() -> None:
    tensor, array = torch.arange(3), np.arange(2)
    loaded = from_bytes(to_bytes([tensor, array]))
    loaded[0].fill_(9)
    loaded[1].fill(9)
    assert tensor.tolist() == [0, 1, 2] and array.tolist() == [0, 1]


def test_what_was_decoded_has_memory_of_its_own() -> None:
    data = to_bytes([torch.zeros(2), np.zeros(2)])
    for loaded in from_bytes(data):
        loaded += 1
    assert [loaded.tolist() for loaded in from_bytes(data)] == [[0, 0], [0, 0]]


class Pair(NamedTuple):
    first: int


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({1, 2}, "set"),
        (b"x", "bytes"),
        (Pair(1), "Pair"),
        (Colour.RED, "Colour"),
        (OrderedDict(a=1), "OrderedDict"),
        (1j, "complex"),
        (nn.Parameter(torch.zeros(1)), "Parameter"),
        (np.ma.masked_array([1]), "MaskedArray"),
        (lambda: 0, "function"),
        (np.array([object()]), "object"),
        (np.zeros(1, dtype=[("a", "i4")]), "void|V4|'a'"),
        (np.str_("a"), "str_"),
        (np.complex64(1), "complex64"),
        (np.datetime64("2020"), "datetime64"),
        (np.array(["a"]), "<U1"),
        (np.array([1j]), "complex128"),
        (np.zeros(1, dtype=">f8"), ">f8"),
        (torch.zeros(1, dtype=torch.complex64), "complex64"),
        (torch.zeros(1, dtype=torch.uint16), "uint16"),
        (torch.zeros(1, requires_grad=True), "detach"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
    ],
)
def test_what_cannot_be_kept_is_named_with_its_path(value: object, kind: str) -> None:
    with pytest.raises(InvariantError, match=rf"state\['c'\]\[2\] .*({kind})"):
        to_bytes({"c": [0, 1, value]}, root="state")


@pytest.mark.parametrize("key", [True, None, 1.5, (1,), np.int64(1), np.str_("a")])
def test_keys_that_are_neither_string_nor_int_are_refused(key: object) -> None:
    with pytest.raises(InvariantError, match=r"tree\['a'\] has the key"):
        to_bytes({"a": {key: 1}})


def test_a_tree_that_holds_itself_is_refused() -> None:
    tree: list[object] = []
    tree.append(tree)
    with pytest.raises(InvariantError, match="deeper than 100"):
        to_bytes(tree)


def test_a_skeleton_that_is_too_deep_is_refused() -> None:
    for depth in (102, 100_000):
        with pytest.raises(DataError):
            from_bytes(with_skeleton('{"version":1,"root":' + "[" * depth + "]" * depth + "}"))


@pytest.mark.parametrize(
    "root",
    [
        {"object": "os.system"},
        {"tuple": {}},
        {"tuple": [], "dict": []},
        {},
        {"dict": [["a", 1], ["a", 2]]},
        {"dict": [[True, 1]]},
        {"dict": [[{"tuple": []}, 1]]},
        {"dict": [["a"]]},
        {"int": "1"},
        {"int": 7},
        {"float": "00"},
        {"array": ["0", "|O8", [2]]},
        {"array": ["0", "i4,i4", [1]]},
        {"array": ["0", "<f8", [2]]},
        {"array": ["0", "<f3", [2]]},
        {"tensor": ["0", "float32", [3]]},
        {"tensor": ["0", "float32", [-1]]},
        {"tensor": ["0", "float32", [2.0]]},
        {"tensor": ["0", "float32", [2**62, 2**62]]},
        {"tensor": ["0", "float32", [1] * 40]},
        {"tensor": ["0", "int32", [2]]},
        {"tensor": ["0", "complex128", [1]]},
        {"tensor": ["0", "qint8", [2]]},
        {"tensor": ["0", "storage", [2]]},
        {"tensor": ["1", "float32", [2]]},
        {"tensor": [["0"], "float32", [2]]},
        [{"tensor": ["0", "float32", [2]]}, {"tensor": ["0", "float32", [2]]}],
        "a tensor is left over",
    ],
)
def test_hostile_skeletons_are_refused(root: object) -> None:
    with pytest.raises(DataError):
        from_bytes(with_skeleton(json.dumps({"version": 1, "root": root}), **{"0": torch.zeros(2)}))


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version":1}', '{"version":2,"root":1}', '{"version":1,"root":NaN}', '{"root":' + "9" * 5000]
)
def test_skeletons_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(DataError):
        from_bytes(with_skeleton(text))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04N.",
        b"\xff" * 64,
        save({"0": torch.zeros(1)}),
        save({"skeleton": torch.zeros(2)}),
        save({"skeleton": torch.tensor([200, 1], dtype=torch.uint8)}),
    ],
)
def test_bytes_that_are_no_tree_are_refused(data: bytes) -> None:
    with pytest.raises(DataError):
        from_bytes(data)


def test_nothing_but_json_and_tensors_is_in_the_file() -> None:
    tensors = load(to_bytes({"a": (torch.ones(2), 1)}))
    assert json.loads(bytes(tensors.pop("skeleton").numpy())) == {
        "version": 1,
        "root": {"dict": [["a", {"tuple": [{"tensor": ["0", "float32", [2]]}, 1]}]]},
    }
    assert [*tensors] == ["0"] and tensors["0"].tolist() == [1, 1]


def test_what_the_lazy_device_hands_over_is_kept() -> None:
    wrapped = torch._to_functional_tensor(torch.arange(3.0)) + 1
    assert torch.equal(from_bytes(to_bytes({"a": wrapped}, root="state"))["a"], torch.tensor([1.0, 2.0, 3.0]))
