"""Methods that turn into something simpler without a word: told before a run, and after it."""

from __future__ import annotations

from collections.abc import Sequence

from fedsweep.engine.plan import RoundPlan
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError
from fedsweep.experiment.experiment import Experiment, server_context
from fedsweep.guard import guarded

_NEVER = "no inner synchronisation in any round: clients are averaged once a round, as in FedAvg"
_ALONE = "one client at most in the group that synchronises inside rounds: averaged alone, it keeps its model"


def foreseen(experiment: Experiment, plans: Sequence[RoundPlan]) -> list[str]:
    """What the user should know before a run: which parts of the method will do nothing.

    Args:
        experiment: The experiment.
        plans: Of its rounds, or of the first of them.
    """
    said = []
    with guarded(when="before the run", raises=ConfigError):
        for seam, component in experiment.method.server_components():
            said.append(component.foresee(server_context(experiment, seam)))
    if experiment.method.pacing.syncs_inside and plans:
        inner = [point for plan in plans for point in plan.points[:-1]]
        if not inner:
            said.append(_NEVER)
        elif all(len(point.attend) <= 1 for point in inner):
            said.append(_ALONE)
    return _told(experiment, said)


def happened(experiment: Experiment, state: RunState) -> list[str]:
    """What the user should know after a run: which parts of the method did nothing.

    Args:
        experiment: The experiment.
        state: The run as it ended.
    """
    seams = experiment.method.server_components()
    with guarded(when="at the run's end"):
        said = [component.remark(state.components[seam]) for seam, component in seams]
    if experiment.method.pacing.syncs_inside and state.records:
        groups = [record.high_frequency for record in state.records]
        if all(record.sync_points <= 1 for record in state.records):
            said.append(_NEVER)
        elif all(group is not None and len(group) <= 1 for group in groups):
            said.append(_ALONE)
    return _told(experiment, said)


def _told(experiment: Experiment, said: Sequence[str]) -> list[str]:
    return [f"{experiment.method.name}: {text}" for text in dict.fromkeys(said) if text]
