"""The promises of every method: fourteen checks, which hold it to its card and to the platform's rules."""

from __future__ import annotations

import inspect
import itertools
import pickle
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from fedsweep.card import Limit
from fedsweep.catalog import method_builder
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.local import LocalStep, LocalTerm
from fedsweep.components.planning import UniformSelection
from fedsweep.config.signatures import bind, describe
from fedsweep.engine.engine import Engine
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError, RunError, unknown_name
from fedsweep.experiment.checks import check_experiment
from fedsweep.experiment.experiment import Experiment
from fedsweep.method import SEAMS, FederatedMethod, MethodSettings
from fedsweep.runs.checkpoints.state_codec import from_bytes, to_bytes
from fedsweep.tasks.kinds import Regression
from fedsweep.testing.checks import (
    bytes_are_the_cards,
    merges_run_or_are_refused,
    parts_are_cut_and_put_back,
    passes_are_those_that_torch_counts,
)
from fedsweep.testing.fleets import SplitFleet
from fedsweep.testing.subject import (
    ROUNDS,
    NormedNetwork,
    PlainNetwork,
    Subject,
    fedavg_with,
    golden_problem,
    states_of,
    subject_of,
)
from fedsweep.testing.worlds import local_engine, run_rounds, tiny_data
from fedsweep.world.topology import Star


def method_conforms(method: str | Callable[..., FederatedMethod], *, checks: Collection[str] | None = None) -> None:
    """Hold a method to its card and to what every method promises.

    Args:
        method: Its name, or its builder, with a card.
        checks: Names of :data:`CHECKS`; all of them by default.

    Raises:
        AssertionError: It has no card, a parameter has no default, or it fails a check; the message says which and how.
        ConfigError: There is no such check.
    """
    subject = subject_of(method)
    for name in CHECKS if checks is None else [checks] if isinstance(checks, str) else checks:
        if name not in CHECKS:
            raise ConfigError(unknown_name("check", name, CHECKS))
        try:
            CHECKS[name](subject)
        except Exception as error:
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            raise AssertionError(f"method {subject.name}, check {name!r}: {kind}{error}") from error


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


# -- what it is --------------------------------------------------------------------------------------------------


def components_are_values(subject: Subject) -> None:
    """Components are frozen, hashable and picklable; every parameter is explained."""
    for method in (subject.built({}), subject.method):
        components: list[Any] = [*(getattr(method, seam) for seam in SEAMS), *method.terms, *method.refinements]
        for component in (c for c in components if c is not None):
            kind = type(component).__name__
            _require(is_dataclass(component), f"{kind} must be a frozen dataclass")
            _require(type(component).__dataclass_params__.frozen, f"{kind} must be a frozen dataclass")
            _require(all(field.kw_only for field in fields(component)), f"{kind}'s fields must be keyword-only")
            copy = pickle.loads(pickle.dumps(component))
            _require(copy == component and hash(copy) == hash(component), f"{kind} does not survive pickling")
    silent = [row.name for row in describe(subject.builder) if not row.doc]
    _require(not silent, f"the builder's docstring says nothing of {silent}; explain them under Args:")
    _require(bool(inspect.getdoc(subject.builder)), "the builder has no docstring")


# -- the same everywhere -----------------------------------------------------------------------------------------


def _same(actual: RunState, expected: RunState, what: str) -> None:
    _require(torch.equal(actual.vector, expected.vector), f"{what} gives another model")
    own = [to_bytes({hub: model.vector for hub, model in state.models.items()}) for state in (actual, expected)]
    _require(own[0] == own[1], f"{what} gives hubs other models")
    same = to_bytes(dict(actual.components)) == to_bytes(dict(expected.components))
    _require(same, f"{what} gives other component states")
    memories = [to_bytes(dict(state.memories)) for state in (actual, expected)]
    _require(memories[0] == memories[1], f"{what} gives other client memories")
    traffic = [[(r.bytes_up, r.bytes_down, r.flops) for r in state.records] for state in (actual, expected)]
    _require(traffic[0] == traffic[1], f"{what} gives other costs")


def bits_do_not_depend_on_placement(subject: Subject) -> None:
    """Require that a second run, and one on three workers with clients elsewhere, in another order, are the same."""
    work = subject.world()
    try:
        _same(run_rounds(Engine(work, SplitFleet(work))), subject.states[-1], "a run on three workers")
    except AssertionError:
        _same(states_of(subject.world())[-1], subject.states[-1], "a second run")  # workers are not why
        raise


def it_goes_on_after_a_stop(subject: Subject) -> None:
    """From what a checkpoint keeps after each round, and in the middle of a refinement, to the same end."""
    unfinished = subject.unfinished
    for state in (*subject.states[1:-1], *unfinished[:: max(1, len(unfinished) // 3)]):
        stored = replace(
            state,
            components={seam: from_bytes(to_bytes(own)) for seam, own in state.components.items()},
            memories={client: from_bytes(to_bytes(own)) for client, own in state.memories.items()},
        )
        continued = run_rounds(local_engine(subject.world()), stored)
        _same(
            continued, subject.states[-1], f"going on after round {state.round}{' and a half' if state.partial else ''}"
        )


def nothing_is_changed_in_place(subject: Subject) -> None:
    """Require that a round leaves the state that it began from as it was, byte by byte."""

    def content(state: RunState) -> bytes:
        return to_bytes(
            {
                "components": dict(state.components),
                "vector": state.vector,
                "memories": dict(state.memories),
                "models": {hub: own.vector for hub, own in state.models.items()},
                "anchors": dict(state.anchors),
            }
        )

    engine = local_engine(subject.world())
    for state in subject.states[:-1]:
        before = content(state)
        run_rounds(engine, state, rounds=1)
        _require(content(state) == before, f"round {state.round + 1} changed what it was given")


# -- limits and life ---------------------------------------------------------------------------------------------


def limits_are_other_methods(subject: Subject) -> None:
    """With each limit's parameters the models are the other method's, on unequal and on equal clients."""
    for limit in subject.card.limits:
        for sizes in ((16,) * 6,) if limit.equal_sizes else (None, (16,) * 6):
            _check_limit(subject, limit, sizes)


def _check_limit(subject: Subject, limit: Limit, sizes: tuple[int, ...] | None) -> None:
    builder = method_builder(limit.of)
    own = subject.built({**subject.card.small, **limit.given})
    other = builder(**bind("method", limit.of, builder, limit.of_given))
    settings = own.settings if limit.equal_sizes else other.settings
    options = {} if sizes is None else {"sizes": sizes}
    vector = states_of(subject.world(own, **options))[-1].vector
    expected = subject.end_of(replace(other, settings=settings), sizes)
    apart = float((vector - expected).abs().max())
    _require(
        torch.equal(vector, expected) if not limit.tolerance else apart <= limit.tolerance,
        f"with {dict(limit.given)} the models should be those of {limit.of} ({limit.tolerance or 'bit for bit'}), but"
        f" are {apart:.3g} apart; correct the method or the card's limit",
    )


def it_is_alive(subject: Subject) -> None:
    """It differs from FedAvg where it should, its figures are not 0, and it moves."""
    card, states, plain = subject.card, subject.states, subject.plain
    models = [state.vector for state in states]
    _require(bool(torch.isfinite(models[-1]).all()), "its model is not finite")
    moves = all(not torch.equal(a, b) for a, b in itertools.pairwise(models))
    if all(torch.equal(model, models[0]) for model in models):  # none travels: what is learned stays with the clients
        moves = len({to_bytes(dict(state.memories)) for state in states}) == len(states)
    _require(moves or subject.method.pacing.carries_work(), "its model does not change in every round")
    dead = [name for name in card.live if not any(state.records[-1].extra.get(name) for state in states[1:])]
    _require(not dead, f"figures of the card's `live` are 0 or missing in {ROUNDS} rounds: {dead}")
    own = subject.method
    if own == FederatedMethod(name=own.name, source=own.source, settings=own.settings):
        return  # FedAvg itself
    same_models = any(limit.of == "fedavg" and not limit.given and not limit.equal_sizes for limit in card.limits)
    if same_models:
        losses = [[r.test_loss for r in run[-1].records] for run in (states, plain)]
        _require(losses[0] != losses[1], "its answers are FedAvg's")
    elif not any(limit.of == "fedavg" and not limit.given for limit in card.limits):
        _require(not torch.equal(models[-1], plain[-1].vector), "on skewed clients its model is FedAvg's")


# -- rough worlds ------------------------------------------------------------------------------------------------


def _rough(subject: Subject, **options: Any) -> Experiment:
    return subject.world(subject.method, **options)


ROUGH: Mapping[str, Callable[[Subject], Experiment]] = {
    "batch norm": lambda s: _rough(s, build=NormedNetwork),
    "a network that says nothing of itself": lambda s: _rough(s, build=PlainNetwork),
    "one client a round": lambda s: _rough(s, cohort_size=1),
    "one client in all": lambda s: _rough(s, num_clients=1, cohort_size=1, sizes=(96,)),
    "clients of one or two samples": lambda s: _rough(s, sizes=(1, 2, 1, 2, 1, 2)),
    "a class that nobody has": lambda s: _rough(s, **_without_a_class()),
    "twenty times the steps": lambda s: _rough(s, local_epochs=40, cohort_size=2, rounds=1),
    "averaged momentum": lambda s: _rough(s, optimizer=OptimizerSettings(momentum=0.9, keep="average")),
    "kept momentum and weight decay": lambda s: _rough(
        s, learning_rate=0.02, optimizer=OptimizerSettings(momentum=0.9, weight_decay=0.01, keep="persist")
    ),
    "Adam on the clients": lambda s: _rough(s, learning_rate=0.01, optimizer=OptimizerSettings(name="adam")),
    "float64": lambda s: _rough(s, double=True),
    "no data on the server": lambda s: _rough(s, proxy=None, validation=None),
    "no devices": lambda s: _without_devices(_rough(s)),
    "a star": lambda s: _rough(s, topology=Star()),
    "a learning rate of 0": lambda s: _rough(s, learning_rate=0.0),
    "numbers in place of classes": lambda s: _with_numbers(s.world()),
}
# What a card may need, and the world that lacks it.
LACKING = {
    "devices": "no devices",
    "proxy": "no data on the server",
    "labelled proxy": "no data on the server",
    "validation": "no data on the server",
    "features": "a network that says nothing of itself",
    "input shape": "a network that says nothing of itself",
    "units": "a network that says nothing of itself",
    "no batch norm": "batch norm",
    "graph": "a star",
    "tree": "a star",
    "two clients": "one client in all",
    "two samples": "clients of one or two samples",
    "classes": "numbers in place of classes",
}

# Worlds in which a move is of gradients of other rounds, too, so that it is not read off what a step's gradient was.
_MOMENTUM_OF_OTHER_ROUNDS = {"averaged momentum", "kept momentum and weight decay"}


def _without_devices(experiment: Experiment) -> Experiment:
    profiles = tuple(replace(profile, device=None) for profile in experiment.world.profiles)
    return replace(experiment, world=replace(experiment.world, profiles=profiles))


def _with_numbers(experiment: Experiment) -> Experiment:
    """Return the world with four numbers to be told for each sample; its classes are strata."""
    world, data = experiment.world, experiment.world.data
    numbers = np.eye(data.num_classes, dtype=np.float32)
    task = Regression(target_shape=(data.num_classes,))

    def with_numbers(samples: Any) -> Any:
        return None if samples is None else (samples[0], None if samples[1] is None else numbers[samples[1]])

    world = replace(
        world,
        data=replace(data, labels=numbers[data.labels], strata=data.labels, task=task),
        test_labels=numbers[world.test_labels],
        validation=with_numbers(world.validation),
        proxy=with_numbers(world.proxy),
    )
    return replace(experiment, world=world)


def _without_a_class() -> dict[str, Any]:
    images, labels = tiny_data()
    return {"images": images, "labels": np.where(labels == 1, 0, labels)}


def rough_worlds_are_survived_or_refused(subject: Subject) -> None:
    """Each rough world is refused before the run, or gone through to a finite model; what the card needs is needed."""
    refused = {}
    for name, make in ROUGH.items():
        work = make(subject)
        try:
            check_experiment(work)
        except ConfigError as error:
            refused[name] = str(error)
            continue
        try:
            state = run_rounds(local_engine(work))
        except Exception as error:
            if type(error) is RunError:
                continue  # it says on purpose why it can't go on
            raise AssertionError(f"{name}: not refused before the run, which then fails: {error}") from error
        _require(bool(torch.isfinite(state.vector).all()), f"{name}: the model is not finite")
        _require(len(state.records) == work.training.rounds, f"{name}: the run ended early")
        if name == "batch norm":
            variances = work.layout.views(state.vector)["norm1.running_var"]
            _require(bool((variances > 0).all()), f"{name}: a running variance is not above 0")
    allowed = {LACKING[need] for need in subject.card.needs if need in LACKING}
    missing = sorted(allowed - refused.keys())
    _require(not missing, f"the card says that it needs what these worlds lack, but they are not refused: {missing}")
    allowed |= _MOMENTUM_OF_OTHER_ROUNDS if subject.method.needs_one_rate else set()
    allowed |= {"Adam on the clients"} if subject.method.needs_effective_steps else set()
    odd = {name: text for name, text in refused.items() if name not in allowed}
    _require(not odd, f"refused, though the card does not say that it is needed: {odd}")


# -- order and streams -------------------------------------------------------------------------------------------


class _Seen(LocalTerm):
    """Writes down what each step is on."""

    needs_anchor = False
    name = "seen by the conformance check"

    def __init__(self) -> None:
        self.batches: list[tuple[int, int, int, bytes]] = []

    def gradient(self, step: LocalStep) -> None:
        facts = step.client
        self.batches.append((facts.round, facts.client, step.position, step.inputs.numpy().tobytes()))


def streams_are_fedavgs(subject: Subject) -> None:
    """Whatever the method draws, cohorts, steps and batches are those of FedAvg; who takes no step, takes none."""
    batches, cohorts = _seen(subject, subject.method)
    expected, plain = _plain_seen(subject.method.settings)
    default = type(subject.method.selection) is UniformSelection
    _require(cohorts == plain or not default, f"cohorts are {cohorts}, FedAvg's {plain}")
    if default and batches:
        extra = batches - expected
        _require(not extra, f"{len(extra)} of {len(batches)} batches are not FedAvg's")


def _seen(subject: Subject, method: FederatedMethod) -> tuple[set[Any], list[Any]]:
    """Return a run's batches and cohorts."""
    seen = _Seen()
    end = states_of(subject.world(replace(method, terms=(*method.terms, seen))))[-1]
    return set(seen.batches), [record.cohort for record in end.records]


@cache
def _plain_seen(settings: MethodSettings) -> tuple[set[Any], list[Any]]:
    return _seen(subject_of("fedavg"), fedavg_with(settings))


def clients_names_do_not_matter(subject: Subject) -> None:
    """Where nothing is drawn for a client, clients with other numbers come to the same model."""
    whole: dict[str, Any] = {"cohort_size": 6, "batch_size": 1000, "local_epochs": 1, "double": True}
    model, other = (states_of(replace(subject.world(subject.method, **whole), seed=k))[-1].vector for k in (0, 1))
    if not torch.allclose(model, other, rtol=0, atol=1e-12):
        return  # it draws something for clients or steps, which goes by their numbers
    turned = _relabelled(subject.world(subject.method, **whole))
    apart = float((states_of(turned)[-1].vector - model).abs().max())
    _require(apart < 1e-9, f"with its clients numbered the other way round, the model is {apart:.3g} away")


def _relabelled(experiment: Experiment) -> Experiment:
    """Return the same clients with their numbers the other way round."""
    world = experiment.world
    last = len(world.profiles) - 1
    profiles = tuple(replace(p, client=last - p.client) for p in reversed(world.profiles))
    return replace(experiment, world=replace(world, profiles=profiles, indices=world.indices[::-1]))


# -- golden ------------------------------------------------------------------------------------------------------


def golden_rounds_are_met(subject: Subject) -> None:
    """On two quadratics the model is what the card says, to nine digits."""
    card = subject.card
    states = golden_problem(subject.built(card.golden_given), rounds=len(card.golden)) if card.golden else []
    figures = [float(state.vector) for state in states[1:]]
    apart = [abs(a - b) for a, b in zip(figures, card.golden, strict=True)]
    _require(all(gap < 1e-9 for gap in apart), f"the golden problem gives {figures}, but the card says {card.golden}")


CHECKS: Mapping[str, Callable[[Subject], None]] = {
    "values": components_are_values,
    "bits": bits_do_not_depend_on_placement,
    "resume": it_goes_on_after_a_stop,
    "purity": nothing_is_changed_in_place,
    "ledger": bytes_are_the_cards,
    "limits": limits_are_other_methods,
    "life": it_is_alive,
    "merges": merges_run_or_are_refused,
    "rough worlds": rough_worlds_are_survived_or_refused,
    "order": clients_names_do_not_matter,
    "streams": streams_are_fedavgs,
    "cost": passes_are_those_that_torch_counts,
    "golden": golden_rounds_are_met,
    "sub-models": parts_are_cut_and_put_back,
}
