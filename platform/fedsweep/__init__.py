"""Federated-learning experiments: one method against one world, on a Ray cluster, swept with Ray Tune.

The names below are looked up when first used, so that importing the package costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsweep.api import Result, load_model, run
    from fedsweep.sweeps import sweep

__version__ = "0.1.0"
__all__ = ["Result", "__version__", "load_model", "run", "sweep"]

_HOME = {
    "Result": "fedsweep.api",
    "load_model": "fedsweep.api",
    "run": "fedsweep.api",
    "sweep": "fedsweep.sweeps",
}

# In a clone, algorithms/ lies beside platform/; with this, PYTHONPATH=platform is enough to find it.
_SOURCE_ROOT = Path(__file__).resolve().parent.parent
if _SOURCE_ROOT.name == "platform" and (_SOURCE_ROOT.parent / "algorithms" / "__init__.py").is_file():
    __path__.append(str(_SOURCE_ROOT.parent))


def __getattr__(name: str) -> object:
    """Imports an exported name's module when the name is first used.

    Raises:
        AttributeError: If the package exports no such name.
    """
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The exported names, looked up or not."""
    return sorted({*globals(), *__all__})
