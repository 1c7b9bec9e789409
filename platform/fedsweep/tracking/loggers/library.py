"""Libraries that a logger needs and that an extra of this package installs."""

from __future__ import annotations

import importlib
from typing import Any

from fedsweep.errors import ResourceError


def imported(module: str, *, extra: str) -> Any:
    """Return a logger's library.

    Args:
        module: What of it is needed.
        extra: The extra of this package that installs it; called like the logger.

    Raises:
        ResourceError: It cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ResourceError(
            f"tracking.also: {extra} can't be imported ({error}); install fedsweep[{extra}], or leave {extra} out"
        ) from error
