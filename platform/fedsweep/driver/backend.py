"""Where a run runs: in this process or on Ray, by the configuration alone, and the cluster that it then needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fedsweep.config.schema import Config
from fedsweep.engine.forecast import Forecast, forecast
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.experiment.experiment import Experiment

if TYPE_CHECKING:
    from fedsweep.driver.plan import Plan
    from fedsweep.fleet.ray_start import ClusterNeeds, ClusterStart

# With ``backend: auto`` a run whose clients train for less than this, one after another, stays in this process.
SHORT_S = 60.0
# What that is reckoned by, on every machine alike: a core's speed, and what a local step takes beside its arithmetic.
_FLOPS_PER_S = 2e10
_STEP_S = 5e-4
# So many rounds are planned for it.
_PLANNED = 5


def training_seconds(experiment: Experiment) -> float:
    """Estimate how long the clients train one after another on one core, from the plan: the same on every machine.

    Reckoned are 20 GFLOP/s and half a millisecond for each local step; the first rounds stand for all.
    """
    return reckoned_seconds(forecast(experiment, most_planned=_PLANNED))


def reckoned_seconds(cost: Forecast) -> float:
    """Estimate a forecast's time on one core; see :func:`training_seconds`."""
    return cost.flops / _FLOPS_PER_S + cost.local_steps * _STEP_S


def choose_backend(config: Config, experiment: Experiment) -> tuple[int, str]:
    """Return client actors of a run, where 0 is the local backend; and why, in words.

    ``auto`` is this process where the clients' training is short, or only one client actor would be there; elsewhere,
    where client actors are asked for or an address is given, it is Ray with an actor per CPU (at most the cohort).

    Raises:
        ConfigError: The local backend is asked for together with a cluster.
    """
    runtime = config.runtime
    if runtime.backend == "local":
        if runtime.address is not None:
            raise ConfigError("runtime.backend=local and runtime.address exclude each other; leave one of them out")
        return 0, "in this process (runtime.backend=local)"
    actors = _actors(config, experiment)
    ray = f"on {actors} Ray client actor{'s' if actors > 1 else ''}"
    if runtime.address is not None:
        return actors, f"{ray} (runtime.address)"
    if runtime.backend == "ray":
        return actors, f"{ray} (runtime.backend=ray)"
    if actors == 1:
        return 0, "in this process (runtime.backend=auto: there would be one client actor)"
    if isinstance(runtime.client_actors, int):
        return actors, f"{ray} (runtime.client_actors={runtime.client_actors})"
    if runtime.gpus_per_client:
        return actors, f"{ray} (runtime.gpus_per_client={runtime.gpus_per_client:g})"
    seconds = training_seconds(experiment)
    about = f"about {seconds:.1f} s of training on one core; runtime.backend=auto is Ray from {SHORT_S:.0f} s"
    return (0, f"in this process ({about})") if seconds < SHORT_S else (actors, f"{ray} ({about})")


def _actors(config: Config, experiment: Experiment) -> int:
    """Return client actors on Ray; more than the cohort would have nothing to do."""
    runtime = config.runtime
    cohort = experiment.most_in_cohort
    if isinstance(runtime.client_actors, int):
        return min(runtime.client_actors, cohort)
    from fedsweep.fleet.ray_start import room_here

    return min(room_here(runtime), cohort)


@contextlib.contextmanager
def cluster_for(
    plan: Plan, folder: Path, *, dashboard: bool = False, begun: ClusterStart | None = None
) -> Iterator[None]:
    """Hold the Ray cluster of a run, where it needs one; what Ray has to say goes into the run's folder.

    The rest is :func:`~fedsweep.fleet.ray_cluster.ray_cluster`'s.
    """
    if not plan.num_actors:
        yield
        return
    from fedsweep.fleet.ray_cluster import ray_cluster

    with ray_cluster(plan.config.runtime.address, _needs(plan), dashboard=dashboard, folder=folder, begun=begun):
        _check_nodes(plan)
        yield


def check_resources(plan: Plan) -> None:
    """Check that what a run asks for is there, without starting a cluster; a given one is joined for a moment.

    Raises:
        ResourceError: It is not, or a node lacks what a run is played with.
    """
    check_experiment(plan.experiment)
    if not plan.num_actors:
        return
    from fedsweep.fleet.ray_cluster import check_gpus, ray_cluster

    if plan.config.runtime.address is None:
        check_gpus(_needs(plan))
        return
    with ray_cluster(plan.config.runtime.address, _needs(plan)):
        _check_nodes(plan)


def _check_nodes(plan: Plan) -> None:
    """Ask the nodes of a cluster that others began whether clients can be trained there."""
    if plan.config.runtime.address is not None:
        from fedsweep.driver.ray_nodes import check_nodes

        check_nodes(plan.config.tree())


def _needs(plan: Plan) -> ClusterNeeds:
    from fedsweep.fleet.ray_start import ClusterNeeds

    runtime = plan.config.runtime
    data = plan.experiment.world.data
    model_bytes = 8 * plan.experiment.layout.num_values
    return ClusterNeeds(
        actors=plan.num_actors,
        cpus_per_client=runtime.cpus_per_client,
        gpus_per_client=runtime.gpus_per_client,
        cpus_per_server=runtime.cpus_per_server,
        gpus_per_server=runtime.gpus_per_server,
        store_bytes=2**29 + 2 * data.images.nbytes + 8 * model_bytes * plan.experiment.most_in_cohort,
    )
