"""The configuration: its schema, YAML reading, overrides and presets.

:func:`load_config` reads and checks what a file says by itself; :func:`fedsweep.catalog.resolve` then binds what it
names (the method, the partition, the model) to the signatures of their builders, so that every parameter is checked and
listed.
"""

from fedsweep.config.load import load_config
from fedsweep.config.schema import Config

__all__ = ["Config", "load_config"]
