"""Parts of the driver that Ray Tune pickles with its state, although that state is never read back."""

from __future__ import annotations

from typing import Any


class Nothing:
    """What stands in such a state in place of a part of the driver."""


class KeptHere:
    """Leaves :class:`Nothing` behind when it is pickled, and is itself when it is copied."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Nothing, ()

    def __copy__(self) -> KeptHere:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptHere:
        return self
