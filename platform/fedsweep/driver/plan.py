"""A run that is ready to start."""

from __future__ import annotations

from dataclasses import dataclass

from fedsweep.config import yaml12
from fedsweep.config.schema import Config
from fedsweep.experiment.experiment import Experiment
from fedsweep.experiment.implied import implied
from fedsweep.runs.sources import Sources


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that is ready to start.

    Attributes:
        config: The resolved configuration.
        experiment: The experiment that it describes.
        num_actors: Client actors; 0: everything in this process.
        backend: Where it runs, and why, in words.
        sources: Hashes of the sources that its results follow from.
    """

    config: Config
    experiment: Experiment
    num_actors: int
    backend: str
    sources: Sources

    def to_yaml(self) -> str:
        """Return the configuration, and in comments the values that it leaves open."""
        values = implied(self.config, self.experiment.world)
        lines = [f"#   {line}" for line in yaml12.dump(values).splitlines()] if values else []
        return self.config.to_yaml() + "".join(f"{line}\n" for line in ["# null stands for", *lines] if lines)
