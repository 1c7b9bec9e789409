"""A trial with its configuration, loaded and bound once."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fedsweep.catalog import resolve
from fedsweep.config.execution import Runtime
from fedsweep.config.load import load_config
from fedsweep.config.overrides import apply_overrides, set_value
from fedsweep.config.sweep import Sweep
from fedsweep.errors import InputError
from fedsweep.results.texts import canonical
from fedsweep.runs.sources import Sources, samples_name, sources_of
from fedsweep.sweeps.resources import Share
from fedsweep.sweeps.space import Trial
from fedsweep.tracking.mlflow_store import NO_TRACKING

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.world.data.datasets import Dataset


@dataclass(frozen=True, kw_only=True)
class PreparedTrial:
    """A trial with its configuration.

    Attributes:
        trial: Which one.
        user_config: Its resolved configuration, as the user gave it.
        config: The same for the trial's process, which is on the cluster already.
        share: What it reserves.
        sources: Hashes of the sources that its results follow from.
    """

    trial: Trial
    user_config: Config
    config: Config
    share: Share
    sources: Sources

    def with_samples(self, datasets: Mapping[str, Dataset]) -> PreparedTrial:
        """Return the trial with its samples among its sources, where its data set is one by :func:`dataset_key`."""
        dataset, scenario = datasets.get(dataset_key(self.config)), self.config.scenario
        if dataset is None:
            return self
        name = samples_name(scenario.dataset, scenario.image_size)
        return replace(self, sources={**self.sources, name: dataset.digest})

    @property
    def texts(self) -> frozenset[tuple[str, str]]:
        """The texts in its configuration, by key: methods, data, files, but not its own name."""
        flat = self.user_config.flat().items()
        return frozenset((key, value) for key, value in flat if isinstance(value, str) and key != "name")


def make_entry(config: Config, trial: Trial, *, uri: str | None, loaded: Config | None = None) -> PreparedTrial:
    """Make a trial of a sweep with its configuration: loaded and bound once.

    It may be loaded already, but for name and tracking.

    Raises:
        ConfigError: Its values are wrong; the message names the trial.
    """
    try:
        if loaded is None:
            user_config = load_config(_given(config, trial, uri=uri))
        else:
            tracking = loaded.tracking.model_copy(update={"uri": uri or NO_TRACKING})
            name = loaded.name if "name" in trial.values else _name(config, trial)
            user_config = loaded.model_copy(update={"name": name, "tracking": tracking, "sweep": Sweep()})
        user_config = resolve(user_config)
        share = Share.of(user_config)
        here = Runtime.model_validate({**user_config.runtime.model_dump(), **_backend(user_config, share.actors)})
        placed = user_config.model_copy(update={"runtime": here})
        return PreparedTrial(
            trial=trial, user_config=user_config, config=placed, share=share, sources=sources_of(user_config.tree())
        )
    except InputError as error:
        raise type(error)(f"trial {trial.number} ({trial.label}): {error}") from None


def dataset_key(config: Config) -> str:
    """Return the name of the data set that a configuration asks for."""
    scenario = config.scenario
    return canonical([scenario.dataset, scenario.root, scenario.image_size])


def overlaid(tree_before: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's tree with other values for some dotted keys."""
    tree = apply_overrides(tree_before, ())
    for key, value in values.items():
        set_value(tree, key, value=copy.deepcopy(value))
    return tree


def _given(config: Config, trial: Trial, *, uri: str | None) -> dict[str, Any]:
    """Return the sweep's configuration with the trial's values, without the sweep itself, under its own name."""
    tree = overlaid({key: value for key, value in config.given.items() if key != "sweep"}, trial.values)
    if "name" not in trial.values:
        tree["name"] = _name(config, trial)
    tree["tracking"] = {**(tree.get("tracking") or {}), "uri": uri or NO_TRACKING}
    return tree


def _name(config: Config, trial: Trial) -> str:
    return f"{config.name} {trial.label}".replace("/", "_").replace("\\", "_") if trial.label else config.name


def _backend(config: Config, actors: int) -> dict[str, Any]:
    """Return the settings of the backend in the trial's own process: it is on the cluster already."""
    if actors:
        return {"backend": "ray", "client_actors": actors}
    # What is reserved and not computed on is the cluster's affair: without it the trial is a run for any machine.
    unused = {"gpus_per_client": 0.0, "gpus_per_server": 0.0} if config.runtime.device == "cpu" else {}
    return {"backend": "local", "address": None, **unused}
