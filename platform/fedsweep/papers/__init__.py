"""The papers' own kinds of tables, measures and figures, by name in :mod:`fedsweep.papers.registry`; and commands.

The commands stand here, since the command line has to be there at once.
"""

from __future__ import annotations

from collections.abc import Mapping

COMMANDS: Mapping[str, str] = {
    "select": "fedsweep.papers.dynamicfl.select_command:select",
}
