"""Sentences on a run whose figures mean little: its model computes NaN, nobody trained, or it ended at chance."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fedsweep.components.evaluation import GlobalModel
from fedsweep.engine.state import RunState
from fedsweep.errors import ClientJobError, InvariantError
from fedsweep.experiment.experiment import Experiment
from fedsweep.guard import hook_of
from fedsweep.records import RoundRecord


def caveats(experiment: Experiment, records: Sequence[RoundRecord], vector: Tensor) -> list[str]:
    """Return the warnings that a reader of a finished run's result needs before its figures, a sentence each.

    Args:
        experiment: The run's.
        records: Its rounds.
        vector: The last model [P].
    """
    sentences = []
    if broken := [record.round for record in records if _computes_nan(record)]:
        rounds = f"round {broken[0]}" + (f" and {len(broken) - 1} more" if len(broken) > 1 else "")
        largest = float(vector.abs().max()) if len(vector) else math.nan
        # Large values overflow in a layer; small ones do not, and the network alone makes NaN of them.
        other = f", or, as its values are {largest:.3g} at most, look into {_answering(experiment)}"
        other = other if largest < math.inf else ""
        sentences.append(
            f"the model of {rounds} computes NaN, so it has no accuracy there; {_maker(experiment)} made it: lower the"
            f" server's or the clients' learning rate{other}"
        )
    if not records:
        sentences.append(
            "no round was played: the first would pass the limit on bytes or virtual time, and the model is the one"
            " that the run began with"
        )
    if records and not any(record.attendees for record in records):
        worked = "nobody's training counted" if any(record.local_steps for record in records) else "nobody trained"
        sentences.append(
            f"{worked} in any of the {len(records)} rounds: availability, drop-outs or a deadline kept everybody away,"
            " and the model is the one that the run began with"
        )
    tested = [r.test_accuracy for r in records if r.test_accuracy is not None and not math.isnan(r.test_accuracy)]
    if not experiment.world.data.learned.has_classes:
        return sentences
    guess = float(np.bincount(experiment.world.test_labels).max() / len(experiment.world.test_labels))
    # Where clients have models of their own, the server's need not have learned anything.
    if tested and tested[-1] <= guess and experiment.method.evaluation.client_test() is None:
        sentences.append(
            f"the run ended at chance: an accuracy of {tested[-1]:.4f}, and always answering the test"
            f" set's largest class has {guess:.4f}"
        )
    return sentences


def fault_of_model(error: ClientJobError, experiment: Experiment, state: RunState) -> Exception | None:
    """Return the fault of whatever made the model, where a client failed because it computes NaN; None elsewhere."""
    if not state.records or not _computes_nan(state.records[-1]):
        return None
    last = state.round
    return InvariantError(
        f"the model that {_maker(experiment)} made in round {last} computes NaN, so no client can train it (seen in"
        f" round {error.round}); lower the server's or the clients' learning rate"
    )


def _computes_nan(record: RoundRecord) -> bool:
    return record.test_loss is not None and math.isnan(record.test_loss)


def _answering(experiment: Experiment) -> str:
    evaluation = experiment.method.evaluation
    own = "" if isinstance(evaluation, GlobalModel) else f" and {hook_of(evaluation, 'predict')}, which answers tests"
    return f"the network{own}"


def _maker(experiment: Experiment) -> str:
    return hook_of(experiment.method.server_update, "apply")
