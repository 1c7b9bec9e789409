"""Conformance of merging: what goes together runs, in either order to the same model; what does not is refused."""

from __future__ import annotations

import torch

from fedsweep.catalog import method_builder
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.method import FederatedMethod, merge
from fedsweep.testing.subject import Subject, subject_of
from fedsweep.testing.worlds import local_engine, run_rounds

# One for each seam: a term, a term with a memory, weights, the server's step, intervals, parts of the model.
PARTNERS = ("fedprox", "moon", "fednova", "fedavgm", "dynamicfl", "federated_dropout")


def merges_run_or_are_refused(subject: Subject) -> None:
    """With one method for each seam: a pair is refused with both names, or runs the same in either order."""
    for name in PARTNERS:
        partner = subject_of(method_builder(name))
        if partner.builder is not subject.builder:
            _check_pair(subject, partner.method)


def _check_pair(subject: Subject, partner: FederatedMethod) -> None:
    pair = f"{subject.method.name} and {partner.name}"
    try:
        both = merge(subject.method, partner), merge(partner, subject.method)
        for method in both:
            check_experiment(subject.world(method))
    except ConfigError as error:
        if not (subject.method.name in str(error) and partner.name in str(error)):
            raise AssertionError(f"{pair} are refused without both names: {error}") from error
        return
    ends = [_end(subject, method, pair) for method in both]
    if not bool(torch.isfinite(ends[0].vector).all()):
        raise AssertionError(f"{pair} together: the model is not finite")
    ordered = len(subject.method.refinements) * len(partner.refinements) > 0
    if not ordered and not torch.allclose(ends[0].vector, ends[1].vector, rtol=0, atol=1e-6):
        raise AssertionError(f"{pair} give another model where they are merged in the other order")


def _end(subject: Subject, method: FederatedMethod, pair: str) -> RunState:
    try:
        return run_rounds(local_engine(subject.world(method, rounds=2, cohort_size=3, local_epochs=1)))
    except Exception as error:
        raise AssertionError(f"{pair} can be merged, but the run fails: {error}") from error
