"""Costs that no plan can tell, since they depend on what is learned on the way."""

from __future__ import annotations

import numpy as np

from fedsweep.components.base import ServerComponent
from fedsweep.experiment.clients import ClientColumns
from fedsweep.experiment.experiment import Experiment, World, server_context
from fedsweep.world.availability import KIND_SPEEDS, capabilities

# Hooks by which the components that a round's plan asks learn from its training.
_LEARNING_HOOKS = {
    "selection": ("learn", "observe"),
    "submodels": ("learn", "observe", "after_aggregate"),
    "pacing": ("learn", "observe"),
}


def why_unknown(experiment: Experiment) -> str | None:
    """Return the reason why a run's costs cannot be told from its plan, or None where they can."""
    method, stop = experiment.method, experiment.training.stop
    for seam, component in method.server_components:
        if _learns_plans(seam, component):
            return f"its {type(component).__name__} learns from the clients' work"
    for seam, component in method.server_components:
        if _asks_first(experiment, seam, component):
            return f"its {type(component).__name__} has every client measure something before round 1"
    if method.exchanges:
        return f"{method.exchanges[0]} more than models"
    if _asks_history(experiment.world):
        return "who is available depends on the clients' accuracies (scenario.availability)"
    if _spends_by_loss(experiment):
        return f"its {type(experiment.spending).__name__} goes by the training loss (planner)"
    if stop.target_accuracy is not None or stop.target is not None or stop.wall_time_s is not None:
        return "its end depends on the training (training.stop)"
    return None


def plans_are_learned(experiment: Experiment) -> bool:
    """Tell whether who takes part, and how much each does, depends on the training, so that a plan is an estimate."""
    learned = any(
        _learns_plans(seam, component) or (seam in _LEARNING_HOOKS and _asks_first(experiment, seam, component))
        for seam, component in experiment.method.server_components
    )
    return learned or _asks_history(experiment.world) or _spends_by_loss(experiment)


def _spends_by_loss(experiment: Experiment) -> bool:
    return experiment.spending is not None and experiment.spending.reads_losses


def _learns_plans(seam: str, component: ServerComponent) -> bool:
    return component.has_own(*_LEARNING_HOOKS.get(seam, ()))


def _asks_first(experiment: Experiment, seam: str, component: ServerComponent) -> bool:
    return bool(component.setup(experiment.initial_states[seam], server_context(experiment, seam)))


def _asks_history(world: World) -> bool:
    """Check if availability comes out differently for clients that learn badly and clients that learn well."""
    availability, profiles = world.availability, world.profiles
    if availability is None:
        return False
    # Of a drawn population one client of each capability stands for all: they are not compared, nor made here.
    able = capabilities(len(KIND_SPEEDS)) if world.is_drawn else ClientColumns.of(profiles).capabilities
    poor, rich = (
        availability.probability(1, capabilities=able, history=dict.fromkeys(range(len(able)), (value,) * 3))
        for value in (0.0, 1.0)
    )
    return not np.array_equal(poor, rich)
