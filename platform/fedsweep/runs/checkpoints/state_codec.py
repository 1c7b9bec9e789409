"""State trees as bytes, without pickle: what a component or a client remembers must survive a crash exactly.

A tree is taken apart into a JSON skeleton and numbered tensors; together they are one safetensors file. Coming
back, the bytes are treated as hostile: kinds, types, shapes and sizes are checked against what the file really holds,
and nothing in it can name code.

Kept exactly: types (tuple or list, numpy or torch, bool or int, string or int keys), the order of keys, dtypes, shapes
and every bit of a value, NaN payloads included. Not kept: memory layout (tensors come back contiguous, owning their
memory), devices (they come back on the CPU), and that two leaves were one object.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from fedsweep.errors import DataError, InvariantError
from fedsweep.records import State

_SKELETON = "skeleton"
_VERSION = 1
_MAX_DEPTH = 100
# Integers beyond this are written in hexadecimal, for which Python has no limit on the number of digits.
_PLAIN_INT = 2**63

# What every version of safetensors can name.
_NAMES = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool".split()
_TORCH_TYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
# By numpy's own names: "<f8" to "|b1".
_ARRAY_TYPES = {np.dtype(name).str: dtype for name, dtype in _TORCH_TYPES.items() if name != "bfloat16"}
_ALLOWED = (
    "a state is a tree of dicts (string or int keys), lists, tuples, tensors, arrays and numpy scalars of real numbers,"
    " int, float, str, bool and None"
)


_Path = tuple[Any, ...]  # what the tree is called, then keys and indices


def to_bytes(tree: State, *, root: str = "tree") -> bytes:
    """Return a tree as the bytes of one safetensors file; equal trees give equal bytes.

    Args:
        tree: Dicts, lists, tuples, torch tensors and numpy arrays of real numbers, int, float, str, bool, None.
        root: What the tree is called in errors.

    Raises:
        InvariantError: The tree holds something else, or is deeper than 100 levels; the message has the path to it.
    """
    from safetensors.torch import save

    encoder = _Encoder()
    content = {"version": _VERSION, "root": encoder.node(tree, (root,))}
    skeleton = json.dumps(content, separators=(",", ":"), allow_nan=False).encode("ascii")
    return bytes(save({_SKELETON: torch.frombuffer(bytearray(skeleton), dtype=torch.uint8), **encoder.tensors}))


def from_bytes(data: bytes) -> State:
    """Return the tree in the bytes of a safetensors file, with memory of its own.

    Args:
        data: Bytes from anywhere.

    Raises:
        DataError: They aren't what :func:`to_bytes` gives.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors: dict[str, Tensor] = load(data)
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise DataError(f"a state tree must be a safetensors file, but: {error}") from error
    skeleton = tensors.pop(_SKELETON, None)
    if skeleton is None or skeleton.dtype != torch.uint8 or skeleton.dim() != 1:
        raise DataError("a state tree must have a skeleton, a vector of bytes, but this safetensors file has none")
    try:
        text = bytes(skeleton.numpy()).decode("ascii")
    except UnicodeDecodeError as error:
        raise DataError(f"the skeleton of a state tree must be ASCII, but: {error}") from error
    try:
        parsed = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the skeleton of a state tree must be JSON, but: {error}") from error
    if not isinstance(parsed, dict) or set(parsed) != {"version", "root"} or parsed["version"] != _VERSION:
        raise DataError(f"the skeleton of a state tree must have a root and version {_VERSION}")
    decoder = _Decoder(tensors)
    tree = decoder.node(parsed["root"], 0)
    if unused := set(tensors) - decoder.used:
        raise DataError(f"a state tree must name all of its tensors, but {sorted(unused)[:3]} are left over")
    return tree


def refuse_constant(text: str) -> NoReturn:
    """Refuse a constant for :func:`json.loads`, which by itself takes NaN and infinities; always a ValueError."""
    raise ValueError(f"{text} is no JSON")


def _text(path: _Path) -> str:
    return str(path[0]) + "".join(f"[{_key_text(key)}]" for key in path[1:])


def _key_text(key: object) -> str:
    return hex(key) if type(key) is int and abs(key) >= _PLAIN_INT else repr(key)


def _int(value: int) -> Any:
    return value if abs(value) < _PLAIN_INT else {"int": hex(value)}


class _Encoder:
    """Takes a tree apart. Types are compared exactly: a subclass would come back as its base."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._memory: set[int] = set()

    def node(self, value: State, path: _Path) -> Any:
        """Return the JSON of a subtree."""
        if len(path) > _MAX_DEPTH:
            raise InvariantError(f"{_text(path)} is deeper than {_MAX_DEPTH} levels; does the tree hold itself?")
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return _int(value)
        if kind is float:
            # JSON has neither NaN nor infinity; digits also keep which NaN it was.
            return value if isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if kind is list or kind is tuple:
            items = [self.node(item, (*path, index)) for index, item in enumerate(value)]
            return items if kind is list else {"tuple": items}
        if kind is dict:
            return {"dict": [[self._key(key, path), self.node(item, (*path, key))] for key, item in value.items()]}
        if kind is Tensor:
            return self._tensor(value, path)
        if kind is np.ndarray:
            return {"array": self._array(value, path)}
        if isinstance(value, np.generic) and not isinstance(value, str | bytes):
            return {"scalar": self._array(np.asarray(value), path)}
        raise InvariantError(
            f"{_text(path)} is a {kind.__module__}.{kind.__qualname__}, which can't be kept: {_ALLOWED}"
        )

    def _key(self, key: object, path: _Path) -> Any:
        if type(key) is str:
            return key
        if type(key) is int:
            return _int(key)
        raise InvariantError(f"{_text(path)} has the key {key!r} of type {type(key).__qualname__}: {_ALLOWED}")

    def _tensor(self, tensor: Tensor, path: _Path) -> Any:
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in _TORCH_TYPES or tensor.layout != torch.strided or tensor.is_meta:
            raise InvariantError(
                f"{_text(path)} is a {tensor.layout} tensor of {name} on {tensor.device}: keep a dense one of one of"
                f" {', '.join(_NAMES)}"
            )
        if tensor.requires_grad:
            raise InvariantError(f"{_text(path)} is a tensor that requires a gradient; keep its .detach().clone()")
        if torch._is_functional_tensor(tensor):
            # As the lazy device hands them over: they say that they are on the CPU and have no memory of their own.
            torch._sync(tensor)  # type: ignore[attr-defined,no-untyped-call]
            tensor = torch._from_functional_tensor(tensor)
        return {"tensor": [self._store(tensor.cpu().resolve_neg().contiguous()), name, list(tensor.shape)]}

    def _array(self, array: np.ndarray, path: _Path) -> list[Any]:
        text = array.dtype.str
        if text not in _ARRAY_TYPES:
            raise InvariantError(
                f"{_text(path)} is an array of {array.dtype}: keep one of {', '.join(_NAMES)} (without bfloat16)"
            )
        # Copied: torch warns of read-only arrays, and takes none with negative strides.
        return [self._store(torch.from_numpy(np.array(array, order="C"))), text, list(array.shape)]

    def _store(self, values: Tensor) -> str:
        """Keep a tensor under the next number; safetensors refuses two in the same memory."""
        memory = values.untyped_storage().data_ptr()
        if memory in self._memory:
            values = values.clone()
            memory = values.untyped_storage().data_ptr()
        self._memory.add(memory)
        name = str(len(self.tensors))
        self.tensors[name] = values
        return name


class _Decoder:
    """Puts a tree together from a skeleton that may have been made up."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.used: set[str] = set()
        self._kinds: dict[str, Callable[[Any, int], State]] = {
            "tuple": lambda value, depth: tuple(self._items(value, depth)),
            "dict": self._dict,
            "int": lambda value, depth: _hex_int(value),
            "float": lambda value, depth: _hex_float(value),
            "tensor": lambda value, depth: self._stored(value, _TORCH_TYPES),
            "array": lambda value, depth: self._stored(value, _ARRAY_TYPES).numpy(),
            "scalar": lambda value, depth: self._stored(value, _ARRAY_TYPES).numpy()[()],
        }

    def node(self, value: Any, depth: int) -> State:
        """Return a subtree from its JSON."""
        if depth > _MAX_DEPTH:
            raise DataError(f"a state tree has at most {_MAX_DEPTH} levels")
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, list):
            return self._items(value, depth)
        if len(value) != 1:
            raise DataError(f"a node of a state tree has one kind, but got {sorted(value)[:5]}")
        (kind,) = value
        if kind not in self._kinds:
            raise DataError(f"a node of a state tree can't be a {kind!r}")
        return self._kinds[kind](value[kind], depth)

    def _items(self, value: Any, depth: int) -> list[State]:
        return [self.node(item, depth + 1) for item in _typed(value, list)]

    def _dict(self, value: Any, depth: int) -> dict[str | int, State]:
        tree: dict[str | int, State] = {}
        for pair in _typed(value, list):
            raw, item = _fields(pair, 2)
            key = self.node(raw, depth + 1) if isinstance(raw, dict) else raw
            if type(key) not in (str, int) or key in tree:
                raise DataError(f"the keys of a dict are different strings or ints, but got {key!r}")
            tree[key] = self.node(item, depth + 1)
        return tree

    def _stored(self, value: Any, types: Mapping[str, torch.dtype]) -> Tensor:
        """Return a copy of a named tensor; torch's own allocation, since some sums depend on how memory is aligned."""
        name, text, raw_shape = _fields(value, 3)
        dtype, shape = types.get(_typed(text, str)), _shape(raw_shape)
        if dtype is None:
            raise DataError(f"unknown type {text!r} of a tensor or an array")
        tensor = self._tensors.get(_typed(name, str))
        if tensor is None or name in self.used:
            raise DataError(f"the tensor {name!r} of a state tree is missing or named twice")
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise DataError(
                f"the tensor {name!r} must be {dtype} of shape {list(shape)}, but is {tensor.dtype} of"
                f" {list(tensor.shape)}"
            )
        self.used.add(name)
        return tensor.clone()


def _shape(value: Any) -> tuple[int, ...]:
    sizes = _typed(value, list)
    if len(sizes) > 32 or any(type(size) is not int or not 0 <= size < 2**40 for size in sizes):
        raise DataError(f"a shape has at most 32 sizes from 0, but got {str(sizes)[:80]}")
    return tuple(sizes)


def _hex_int(value: Any) -> int:
    if not re.fullmatch(r"-?0x[0-9a-f]+", _typed(value, str)):
        raise DataError(f"a long int is written in hexadecimal, but got {value[:40]!r}")
    return int(value, 16)


def _hex_float(value: Any) -> float:
    if not re.fullmatch(r"[0-9a-f]{16}", _typed(value, str)):
        raise DataError(f"a float that is not finite is written as 16 hexadecimal digits, but got {value[:40]!r}")
    number: float = struct.unpack(">d", bytes.fromhex(value))[0]
    return number


def _fields(value: Any, count: int) -> list[Any]:
    fields: list[Any] = _typed(value, list)
    if len(fields) != count:
        raise DataError(f"a node of a state tree has {count} fields here, but got {len(fields)}")
    return fields


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise DataError(f"a state tree has a {kind.__name__} here, but got a {type(value).__name__}")
    return value
