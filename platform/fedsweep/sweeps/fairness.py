"""Which trials may be compared.

Everything random in a run is keyed by seed and purpose, so trials that share scenario, model, training and seed have
the same partition, initial model and batches, and the same cohorts unless their method chooses cohorts itself. What is
left to check is that a space does not change the world beside the method, and that settings have the same seeds.

Budgets are part of the world of those methods alone that plan with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedsweep.catalog import build_method
from fedsweep.components.planning import Pacing
from fedsweep.results.config_table import config_table, flat_config, is_aside
from fedsweep.results.keys import keys_below
from fedsweep.results.texts import canonical, some_of
from fedsweep.sweeps.space import Trial

if TYPE_CHECKING:
    from fedsweep.config.schema import Config

_WORLD = ("scenario", "model")
_PRACTICE = ("training", "evaluation")
_BUDGETS = ("scenario.budgets",)
_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class TrialWorld:
    """The world that trials must share to be compared, the seed apart.

    Attributes:
        shared: What all of them must share.
        budgets: What those must share besides whose methods plan with budgets; None: its method does not.
    """

    shared: str
    budgets: str | None


def world_of(config: Config) -> TrialWorld:
    """Return the world of a trial with this configuration."""
    flat = flat_config(config.tree())
    world = {key: flat[key] for key in keys_below(_WORLD, flat) if not is_aside(key)}
    budgets = {key: world.pop(key) for key in keys_below(_BUDGETS, flat)}
    return TrialWorld(shared=canonical(world), budgets=canonical(budgets) if plans_with_budgets(config) else None)


def comparable(worlds: Sequence[TrialWorld]) -> list[list[int]]:
    """Group those that may all be compared with each other; who knows no budgets is in the groups of all.

    Returns:
        Indices into ``worlds``, ascending in each group.
    """
    places: dict[TrialWorld, list[int]] = {}
    for place, world in enumerate(worlds):
        places.setdefault(world, []).append(place)
    with_budgets = {world.shared for world in places if world.budgets is not None}
    return [
        sorted({*own, *places.get(replace(world, budgets=None), ())})
        for world, own in places.items()
        if world.budgets is not None or world.shared not in with_budgets
    ]


def plans_with_budgets(config: Config) -> bool:
    """Check that the method has two frequencies of its own, which budgets are compared with."""
    return type(build_method(config).pacing).costs is not Pacing.costs


def notes(config: Config, trials: Sequence[Trial], configs: Sequence[Config]) -> list[str]:
    """Return notes for a reader of the comparison; none where trials differ in method and seed alone.

    The trials' resolved configurations are in the same order, and before them the sweep's.
    """
    sweep, chooser = config.sweep, _chooser_of(config)
    flats = [flat_config(own.tree()) for own in configs]
    planning = [flat for flat, own in zip(flats, configs, strict=True) if plans_with_budgets(own)]
    differing = config_table(flats).differing
    sentences = []
    changed = [key for key in keys_below(_WORLD, differing) if not keys_below(_BUDGETS, [key])]
    changed += keys_below(_BUDGETS, config_table(planning).differing)
    if changed:
        sentences.append(
            f"trials differ in {some_of(changed, _SHOWN)}: these are different worlds, and only trials of the same"
            " world are compared with each other"
            + (f", but {chooser} judges all of them alike, as if they shared one" if chooser else "")
        )
    if changed := keys_below(_PRACTICE, differing):
        sentences.append(
            f"trials differ in {some_of(changed, _SHOWN)}: partition and initial model are shared, but a difference may"
            " come from these keys as well as from the method"
        )
    # A search gives seeds out itself, and ``pbt`` takes one alone.
    return sentences + ([] if sweep.search == "optuna" or sweep.scheduler == "pbt" else _seed_notes(trials))


def _chooser_of(config: Config) -> str | None:
    """Return what ends trials by their figures alone; None where nothing does, or world by world."""
    if config.sweep.scheduler not in (None, "front"):
        return f"sweep.scheduler={config.sweep.scheduler}"
    return None if config.sweep.rungs is None else "the choice of the best third"


def _seed_notes(trials: Sequence[Trial]) -> list[str]:
    seeds: dict[str, set[int | None]] = {}
    labels = {trial.setting: trial.label for trial in trials}
    for trial in trials:
        seeds.setdefault(trial.setting, set()).add(trial.seed)
    if len(seeds) < 2:
        return []
    if len({frozenset(values) for values in seeds.values()}) > 1:
        first, *others = seeds
        odd = next(other for other in others if seeds[other] != seeds[first])
        example = f"{labels[first]}: {_seeds(seeds[first])}; {labels[odd]}: {_seeds(seeds[odd])}"
        return [
            f"settings have different seeds ({example}):"
            " only seeds that two settings share are paired; make the seed a grid to share them all"
        ]
    if all(len(values) == 1 for values in seeds.values()):
        return [
            "each setting has a single seed, so nothing can be said about chance; add seed: {grid: [0, 1, 2, 3, 4]} to"
            " sweep.space"
        ]
    return []


def _seeds(values: set[int | None]) -> str:
    return ", ".join(str(seed) for seed in sorted(values, key=str))
