"""Values of parameters that are null: the profile's, which a configuration leaves open.

They stay null in ``config.yaml``: filled in, they would win over another profile in a configuration made from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fedsweep.catalog import bound
from fedsweep.config.schema import Config
from fedsweep.experiment.experiment import World
from fedsweep.world.devices import from_profile


def implied(config: Config, world: World) -> dict[str, Any]:
    """Return dotted key -> value, for parameters of drift, availability and devices that are null.

    Args:
        config: The configuration.
        world: What was built of it.
    """
    return dict(_implied(config, world))


def _implied(config: Config, world: World) -> Iterator[tuple[str, Any]]:
    for key in ("scenario.drift", "scenario.availability", "scenario.devices"):
        item = bound(config, key)
        if item is None:
            continue
        if key == "scenario.devices":
            values = from_profile(item.parameters, run_seed=config.seed)
        else:
            values = vars(world.drift if key == "scenario.drift" else world.availability)
        open_ones = (name for name, value in item.parameters.items() if value is None and name in values)
        yield from ((f"{key}.{name}", values[name]) for name in open_ones)
