"""Conformance of sub-models: what is cut is put back where it was, and what nobody holds stays."""

from __future__ import annotations

import pickle

import torch

from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.planning import SubModelPolicy
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.testing.subject import Subject
from fedsweep.testing.worlds import local_engine, play_round, run_rounds
from fedsweep.trees import FlatLayout


def parts_are_cut_and_put_back(subject: Subject) -> None:
    """For a method that gives clients parts of the model; others have nothing to show."""
    if not subject.method.submodels.cuts:
        return
    work = subject.world(subject.method, optimizer=OptimizerSettings(momentum=0.9, weight_decay=0.1), cohort_size=2)
    engine = local_engine(work)
    state, cut = engine.start(), 0
    while engine.finished_by(state) is None:
        played = play_round(engine, state)
        after = run_rounds(engine, state, rounds=1)
        held = torch.zeros(engine.layout.num_values, dtype=torch.bool)
        for update in played.updates:
            cut += update.submodel != FULL_MODEL
            held |= _checked(update.submodel, state.vector, engine.layout)
        settles = type(subject.method.submodels).settle is not SubModelPolicy.settle or subject.method.refinements
        plain = subject.method.server_update.plain_mean and not settles
        if plain and not torch.equal(after.vector[~held], state.vector[~held]):
            raise AssertionError("values that no client held have moved")
        state = after
    if not cut:
        raise AssertionError("no client got less than the whole model; give the card parameters in `small` that cut")


def _checked(part: SubModel, vector: torch.Tensor, full: FlatLayout) -> torch.Tensor:
    """Which values the part holds [V], after its own promises were checked."""
    kind, own = type(part).__name__, part.layout(full)
    copy = pickle.loads(pickle.dumps(part))
    if copy.key() != part.key():
        raise AssertionError(f"{kind} has another key after pickling")
    cut = part.extract(vector, full)
    if len(cut) != own.num_values:
        raise AssertionError(f"{kind} cuts {len(cut)} values, but its layout has {own.num_values}")
    back = part.embed(cut, full)
    cover = torch.ones(full.num_values, dtype=torch.bool) if back.cover is None else back.cover
    if not torch.equal(back.vector[cover], vector[cover]):
        raise AssertionError(f"{kind} does not put values back where they were")
    again = part.extract(torch.where(cover, back.vector, vector), full)
    if not torch.equal(again, cut):
        raise AssertionError(f"{kind} cuts something else from what it put back")
    if sum(part.message(full, "up").values()) > full.num_values:
        raise AssertionError(f"{kind} sends more than the whole model")
    return cover
