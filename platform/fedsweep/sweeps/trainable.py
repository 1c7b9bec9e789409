"""The trial as a Ray Tune trainable: a process that plays trials one after the other.

It is the class API: Tune then tells the trial that it is to end, so that a checkpoint and a result are written, and a
process can take over the next trial without importing everything again.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray import tune
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from fedsweep.config.schema import Config
from fedsweep.driver.observers import method_name
from fedsweep.driver.plan import Plan
from fedsweep.driver.ray_disk import DriverDisk
from fedsweep.driver.ray_session import fleet_settings
from fedsweep.driver.run import Session, open_session, session_settings
from fedsweep.driver.session import RunSession
from fedsweep.fleet.fleet import Fleet
from fedsweep.fleet.ray_fleet import RayFleet
from fedsweep.fleet.ray_metrics import RayMetrics
from fedsweep.runs.checkpoints.exchange import replace_checkpoints
from fedsweep.runs.facts import tell_commit
from fedsweep.runs.mirror import Mirror
from fedsweep.runs.sources import Sources
from fedsweep.sweeps.prepared_trial import dataset_key, overlaid
from fedsweep.sweeps.resources import Share
from fedsweep.sweeps.space import TRIAL
from fedsweep.sweeps.together.group import TrialGroup
from fedsweep.sweeps.trial import ENDED_BY_SCHEDULER, FATAL, OTHERS, ActiveTrial, TrialSpec

SPEC, SHARE, VALUES = "spec", "share", "values"
FATAL_MARK = "fatal"
Specs = Sequence[TrialSpec]
_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The driver's side of what trials are played with.

    Attributes:
        umask: The driver's.
        git_commit: That of the driver's fedsweep.
        sources: The driver's.
        datasets: References to those that are loaded already, by
            :func:`~fedsweep.sweeps.prepared_trial.dataset_key`.
        disk: The way to the sweep's folder where a node may not have it.
    """

    umask: int = 0o077
    git_commit: str | None = None
    sources: Sources = field(default_factory=dict)
    datasets: Mapping[str, Any] = field(default_factory=dict)
    disk: DriverDisk | None = None


class SweepTrial(tune.Trainable):
    """Plays the trial that its configuration describes under ``trial``: ``spec``, ``share`` and ``values``."""

    def setup(self, config: dict[str, Any], specs: Specs = (), driver: Driver | None = None) -> None:
        """Begin a process with its first trial; its files are as readable as the driver's.

        Args:
            config: See the class.
            specs: Where a scheduler copies configurations from trial to trial: each trial's own, in their order.
            driver: Who began the sweep.
        """
        driver = driver or Driver()
        os.umask(driver.umask)
        tell_commit(driver.git_commit)
        self._specs, self._sources, self._disk = specs, driver.sources, driver.disk
        self._away: Away | None = None
        self._metrics: RayMetrics | None = None
        self._datasets = driver.datasets
        self._failure: Exception | None = None
        self._active = self._begin(config)

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return the bundles that this trial reserves."""
        # All bundles or none, near each other where there is room.
        return tune.PlacementGroupFactory(config[TRIAL][SHARE].bundles, strategy="PACK")

    def step(self) -> dict[str, Any]:
        """Play a round, or several short ones."""
        if self._failure is not None:
            raise self._failure
        try:
            report = self._active.step()
            self._show(report)
            return report
        except Exception as error:
            if not isinstance(error, FATAL):
                raise
            # One more report, so that the driver knows that trying again is no use; then the error itself.
            self._failure = error
            return {**self._active.last_report(), FATAL_MARK: True}
        finally:
            self._send()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Give Tune the run's own newest checkpoint, for a trial that is to go on from it."""
        self._active.save()
        self._send()
        source = self._active.folder / _CHECKPOINTS
        if source.is_dir():
            shutil.copytree(source, Path(checkpoint_dir) / _CHECKPOINTS)

    def load_checkpoint(self, checkpoint_dir: str | dict[str, Any] | None) -> None:
        """Go on from another trial's checkpoint instead of the own one."""
        source = Path(str(checkpoint_dir)) / _CHECKPOINTS
        if not source.is_dir():
            return
        self._end_early()
        replace_checkpoints(self._active.folder / _CHECKPOINTS, source)
        self._send()
        self._active = self._begin(self._described)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take over another trial in this process, or its own with other values."""
        self._end_early()
        self._failure = None
        self._active = self._begin(new_config)
        return True

    def __repr__(self) -> str:
        """Name the process in logs and in Ray's dashboard, by the trial that it begins with."""
        return f"SweepTrial[{self._active.folder.name}]"

    def cleanup(self) -> None:
        """End the trial, or put it away where the whole sweep is interrupted."""
        self._end_early()
        if self._away is not None:
            self._away.leave()

    def _end_early(self) -> None:
        if self._away is not None:
            self._away.mirror.pull_file(ENDED_BY_SCHEDULER)
        self._active.end_early()
        self._send()

    def _send(self) -> None:
        """Bring what the trial has written to the driver's node, where this is another."""
        if self._away is not None:
            self._away.mirror.push()

    def _show(self, report: Mapping[str, Any]) -> None:
        """Show a report on Ray's metrics endpoint; a trial that has finished before has nothing to show."""
        config = self._active.config
        if config is None:
            return
        if self._metrics is None:
            share: Share = self._described[TRIAL][SHARE]
            self._metrics = RayMetrics(
                run=self._active.folder.name,
                sweep=self._active.folder.parent.name,
                method=method_name(config),
                planned_rounds=config.training.rounds,
                client_actors=share.actors,
                gpus=sum(bundle.get("GPU", 0.0) for bundle in share.bundles),
            )
        self._metrics.show(
            round=report["round"], test_accuracy=report.get("test_accuracy"), total_bytes=report["total_bytes"]
        )

    def _begin(self, config: Mapping[str, Any]) -> ActiveTrial | TrialGroup:
        self._described = config
        self._metrics = None
        described = config[TRIAL]
        spec = self._specs[place_of(self.trial_id)] if self._specs else described[SPEC]
        if spec.config_hash is not None:
            # The scheduler changes values on the way.
            tree = overlaid(json.loads(spec.config_json), described[VALUES])
            spec = replace(spec, config_json=json.dumps(tree))
        if self._away is not None:
            self._away.leave()
        self._away = None
        if self._disk is not None and not self._disk.is_here():
            self._away = Away.of(spec.folder, self._disk, near=Path(self.logdir))
            spec = replace(spec, folder=self._away.folder)
        if others := described.get(OTHERS):
            return TrialGroup([spec, *others], self._find_dataset, self._sources)
        make_session = session_in_group if described[SHARE].actors else open_session
        return ActiveTrial(spec, self._find_dataset, make_session, self._sources)

    def _find_dataset(self, config: Config) -> Any:
        reference = self._datasets.get(dataset_key(config))
        return None if reference is None else ray.get(reference)


@dataclass(frozen=True, kw_only=True)
class Away:
    """The place of a trial on a node that does not see the sweep's folder.

    Attributes:
        folder: The trial's folder here; what the driver's node has of it has been brought.
        mirror: Brings what is written there to the driver's node.
        top: Made for this trial, and removed after it.
    """

    folder: Path
    mirror: Mirror
    top: Path

    @classmethod
    def of(cls, folder: Path, disk: DriverDisk, *, near: Path) -> Away:
        """Make it for a trial whose folder on the driver's node is given, among what Ray has on this one."""
        top = Path(tempfile.mkdtemp(prefix="fedsweep-trial-", dir=near))
        here = top / folder.parent.name / folder.name  # messages and metrics name a trial by its last two
        here.mkdir(parents=True)
        mirror = Mirror(here, disk.files(), str(folder))
        mirror.pull()
        return cls(folder=here, mirror=mirror, top=top)

    def leave(self) -> None:
        """Remove it; the driver's node has everything."""
        shutil.rmtree(self.top, ignore_errors=True)


def place_of(trial_id: str) -> int:
    """Return the trial's number in a listed sweep, from 0: Tune numbers them in the order of the list."""
    return int(trial_id.rsplit("_", 1)[1])


@contextlib.contextmanager
def session_in_group(plan: Plan, folder: Path) -> Iterator[Session]:
    """Open a session in this process, with client actors in the bundles of the trial's placement group."""
    torch.set_num_threads(1)  # as everywhere else: how many there are shows in the bits
    settings = session_settings(plan, folder)
    with contextlib.closing(RunSession(plan.experiment, lambda warn: _fleet_in_group(plan, warn), settings)) as session:
        yield session


def _fleet_in_group(plan: Plan, warn: Any) -> Fleet:
    group: Any = get_current_placement_group()

    def placed(index: int) -> dict[str, Any]:
        place = PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=1 + index, placement_group_capture_child_tasks=True
        )
        return {"scheduling_strategy": place}

    return RayFleet(ray.put(plan.experiment), fleet_settings(plan, placed), warn)
