"""Initial values from a file: the final model of a run, or any safetensors file with the model's tensors.

A safetensors file names no code; names, shapes and values are checked all the same before anything is trained.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fedsweep.bounded import open_regular, read_regular
from fedsweep.errors import DataError
from fedsweep.trees import FlatLayout

MODEL, SUFFIX = "model.safetensors", ".safetensors"
# What a file's metadata call the constants that its values were trained on.
BASE = "base_sha256"
_KEY = "model.init_from"
# Beside its tensors, a file has their names; values may be of twice the model's precision.
_HEADER_BYTES = 10 * 2**20


def weights_file(source: str, *, key: str = _KEY) -> Path:
    """Return the file that ``model.init_from`` means, absolute.

    Args:
        source: A run's folder, or a file that ends in ``.safetensors``.
        key: Where it was given, for messages.

    Raises:
        DataError: There is no such file.
    """
    path = Path(source).expanduser().absolute()
    file = path / MODEL if path.is_dir() else path
    if not os.path.lexists(file):
        what = "has no model (only a finished run leaves one)" if path.is_dir() else "is neither a folder nor a file"
        raise DataError(f"{key}: {path} {what}; name a finished run's folder or a file {SUFFIX}")
    if file.suffix != SUFFIX:
        raise DataError(f"{key}: {file} is no file {SUFFIX}; other formats can hold code and are not read")
    return file


def weights_sha256(file: Path, *, key: str = _KEY) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits.

    Args:
        file: The file.
        key: Where it was given, for messages.

    Raises:
        DataError: It can't be read, or is no regular file.
    """
    try:
        with open_regular(file, follow=True) as handle, open(handle, "rb", closefd=False) as data:
            return hashlib.file_digest(data, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{key}: {file} cannot be read: {error.strerror or error}") from error


def read_weights(
    file: Path, layout: FlatLayout, *, sha256: str | None, model: str, key: str = _KEY, base: str | None = None
) -> Tensor:
    """Return the values of a file as a vector [num_values].

    Args:
        file: The file.
        layout: Of the model that gets them.
        sha256: What the file must have; None: whatever it has.
        model: The model's name, for messages.
        key: Where the file was given, likewise.
        base: SHA-256 of the model's constants; None: it has none.

    Raises:
        DataError: The file can't be read, is another one than it was, does not have the model's tensors, or was trained
            on other constants.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        data = read_regular(file, max_bytes=8 * layout.num_values + _HEADER_BYTES, follow=True)
    except OSError as error:
        raise DataError(f"{key}: {file} cannot be read as values of model {model}: {error.strerror}") from error
    digest = hashlib.sha256(data).hexdigest()
    if sha256 is not None and digest != sha256:
        raise DataError(
            f"{key}: {file} has the SHA-256 {digest}, but the configuration was made with {sha256}; put the former file"
            f" there, or remove {key.rpartition('.')[0]}.{'init' if key == _KEY else 'base'}_sha256"
        )
    try:
        tensors: Mapping[str, Tensor] = load(data)
    except (SafetensorError, ValueError) as error:
        raise DataError(f"{key}: {file} is no safetensors file: {error}") from error
    except KeyError as error:
        raise DataError(f"{key}: {file} holds values of the type {error}, which can't be read") from error
    check_base(data, base, source=f"{key}: {file}")
    return weights_vector(tensors, layout, source=f"{key}: {file}", model=model)


def check_base(data: bytes, base: str | None, *, source: str) -> None:
    """Refuse values that were trained on another base than the model's: they mean nothing there.

    Args:
        data: A safetensors file; one that names no base passes.
        base: SHA-256 of the model's constants; None: it has none.
        source: The file, for messages.

    Raises:
        DataError: The file names another base.
    """
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    named = (header.get("__metadata__") or {}).get(BASE)
    if named is not None and named != base:
        raise DataError(
            f"{source}: its values were trained on a frozen base with the SHA-256 {named}, but this model's base has"
            f" {base}; give the same model.adapter, model and seed as there"
        )


def weights_vector(tensors: Mapping[str, Tensor], layout: FlatLayout, *, source: str, model: str) -> Tensor:
    """Return a model's tensors from a file, checked, as a vector [num_values].

    Args:
        tensors: By name.
        layout: Of the model that gets them.
        source: The file, for messages.
        model: The model's name, likewise.

    Raises:
        DataError: They are not the model's tensors, or hold values that are not finite.
    """
    if difference := _difference(tensors, layout):
        raise DataError(f"{source}: its tensors are not those of model {model!r}: {difference}")
    vector = layout.flatten({name: tensor.to(layout.dtype) for name, tensor in tensors.items()})
    if not bool(torch.isfinite(vector).all()):
        raise DataError(f"{source}: it holds values that are not finite")
    return vector


def _difference(tensors: Mapping[str, Tensor], layout: FlatLayout) -> str:
    """Return the first thing in which they differ from the model's; empty where they don't."""
    wanted = dict(zip(layout.names, layout.shapes, strict=True))
    for name, shape in wanted.items():
        if name not in tensors:
            return f"{name!r} is missing"
        if tuple(tensors[name].shape) != tuple(shape):
            return f"{name!r} is {list(tensors[name].shape)}, but must be {list(shape)}"
        if not tensors[name].is_floating_point():
            return f"{name!r} holds {tensors[name].dtype}, but must hold floats"
    more = sorted(tensors.keys() - wanted.keys())
    return f"{more[0]!r} is not the model's" if more else ""
