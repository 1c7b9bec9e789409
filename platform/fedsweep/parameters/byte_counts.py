"""Numbers of bytes, as users write them: 2e9, ``2 GB``, ``1.5 kB``."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from fedsweep.errors import ConfigError
from fedsweep.parameters.ranges import Count

BYTE_UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*(B|{'|'.join(BYTE_UNITS)})?")


def whole_bytes(size: object) -> object:
    """Return a text, or a float (as YAML reads 2e9), as the whole number of bytes that it is; others as they are."""
    if isinstance(size, str):
        matched = _SIZE.fullmatch(size.strip())
        total = float(matched[1]) * BYTE_UNITS.get(matched[2], 1) if matched else math.inf
        if not math.isfinite(total):
            raise ConfigError(f"an amount is a number of bytes, or one with a unit: 50 MB, but got {size!r}")
        return round(total)
    return int(size) if isinstance(size, float) and size.is_integer() else size


class _AsWritten:
    """Has pydantic, which training does without, read a value before its range is checked."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core.core_schema import no_info_before_validator_function

        return no_info_before_validator_function(whole_bytes, handler(source))


Bytes = Annotated[Count, _AsWritten()]
