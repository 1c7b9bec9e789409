"""Imports torchvision, also where its compiled operators do not fit the installed torch.

PyPI's torchvision is built against PyPI's torch for GPUs. Beside a torch built for CPUs only, its library ``_C`` does
not load, and ``import torchvision`` then fails with "operator torchvision::nms does not exist": the package attaches
shape rules to two operators which nobody has declared. fedsweep uses the data sets alone, none of the operators, so
declaring their signatures is enough. Where the library loads, nothing is declared and nothing changes.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any

from fedsweep.errors import ResourceError

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def import_torchvision() -> Any:
    """Return the module ``torchvision``, imported with its operators declared where they cannot be loaded.

    Raises:
        ResourceError: torchvision is not installed, or cannot be imported for another reason.
    """
    if "torchvision" in sys.modules:
        return sys.modules["torchvision"]
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ResourceError("this data set needs torchvision, which is not installed; run 'pip install torchvision'")
    if not _operators_load(Path(spec.origin).parent):
        _declare_operators()
    try:
        return importlib.import_module("torchvision")
    except (ImportError, RuntimeError, OSError) as error:
        raise ResourceError(
            f"torchvision is installed but cannot be imported ({type(error).__name__}: {error}); install the "
            "torchvision release that belongs to the installed torch"
        ) from error


def import_transformers() -> Any:
    """Return the module ``transformers``.

    Raises:
        ResourceError: It is not installed.
    """
    if importlib.util.find_spec("torchvision") is not None:
        import_torchvision()  # it is imported there too, and may need help
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ResourceError("hf: models and texts need transformers: pip install 'fedsweep[hf]'") from error


def imports_alone() -> bool:
    """Return whether ``import torchvision`` works in a program that does not go through here."""
    spec = importlib.util.find_spec("torchvision")
    return spec is not None and spec.origin is not None and _operators_load(Path(spec.origin).parent)


def _operators_load(package: Path) -> bool:
    """Return whether torchvision's compiled library is there and loads; torchvision's own second load has no effect."""
    import torch

    finder = importlib.machinery.FileFinder(
        str(package), (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES)
    )
    spec = finder.find_spec("_C")
    if spec is None or spec.origin is None:
        return False
    try:
        torch.ops.load_library(spec.origin)  # type: ignore[no-untyped-call]
    except (ImportError, OSError):
        return False
    return True


@cache
def _declare_operators() -> Any:
    """Declare the operators' signatures, once per process: a library takes them back when it is collected."""
    import torch

    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for schema in _SCHEMAS:
        library.define(schema)  # type: ignore[no-untyped-call]
    return library
