"""The choosers of a high-frequency group by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from fedsweep import ConfigError
from fedsweep.components import unknown_name

from .chooser import GroupChooser, RandomGroup
from .dynacomm import DynaComm
from .exact import ExactGroup
from .search import ExhaustiveGroup, GeneticGroup
from .similarity import SimilarityGroup

GROUP_CHOOSERS: dict[str, Callable[..., GroupChooser]] = {
    "random": RandomGroup,
    "dynacomm": DynaComm,
    "exact": ExactGroup,
    "exhaustive": ExhaustiveGroup,
    "genetic": GeneticGroup,
    "similarity": SimilarityGroup,
}


def group_chooser(name: str, **options: object) -> GroupChooser:
    """Return the chooser of that name; options that it does not have (``orders`` of the random one) are left out.

    Raises:
        ConfigError: No chooser has the name, or an option is out of its range.
    """
    if name not in GROUP_CHOOSERS:
        raise ConfigError(unknown_name("group chooser", name, GROUP_CHOOSERS))
    build = GROUP_CHOOSERS[name]
    field_names = {field.name for field in dataclasses.fields(build)}  # type: ignore[arg-type]
    return build(**{key: value for key, value in options.items() if key in field_names})
