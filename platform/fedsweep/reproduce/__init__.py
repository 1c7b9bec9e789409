"""The papers' tables and figures: from a table's file to runs, figures measured beside printed, and pictures.

The package is what it does, too: ``fedsweep.reproduce("dynamicfl/table4")`` is :func:`reproduce_table`, as
``fedsweep.run`` runs. A function of that name in ``fedsweep`` would be replaced by this package once it is imported.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *positional: Any, **named: Any) -> Any:
        from fedsweep.reproduce.task import reproduce_table

        return reproduce_table(*positional, **named)


sys.modules[__name__].__class__ = _Callable
