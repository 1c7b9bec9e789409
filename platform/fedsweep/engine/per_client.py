"""Accuracies by class and by client, and how far they lie apart: the fairness of a model.

One pass over the test set gives the accuracy of each class, and of each client where test samples are the clients'
own. Where they are not, a client's is the mean of its classes' by their shares among its own training samples. Neither
costs a pass of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from fedsweep.client.messages import Question
from fedsweep.client.worker import broadcast_of
from fedsweep.components.base import Published
from fedsweep.components.probes import ClientTest
from fedsweep.engine.cost import CostModel
from fedsweep.engine.round_codecs import RoundCodecs
from fedsweep.engine.state import RunState
from fedsweep.experiment.experiment import Experiment
from fedsweep.guard import ask
from fedsweep.records import Payload, RoundRecord
from fedsweep.submodel import FULL_MODEL

_COUNTED = ("hits", "samples")  # what a test on a client says


def client_accuracies(class_accuracies: tuple[float, ...], label_counts_NC: np.ndarray) -> np.ndarray:
    """Compute a model's accuracy for each client [N]; NaN for one that has no sample of a tested class.

    Args:
        class_accuracies: By class [C]; NaN for a class without test samples, which then counts for nobody.
        label_counts_NC: Samples per client and class.
    """
    accuracy_C = np.array(class_accuracies)
    weights_NC = np.where(np.isnan(accuracy_C), 0, label_counts_NC)
    totals_N = weights_NC.sum(axis=1)
    summed_N = (weights_NC * np.nan_to_num(accuracy_C)).sum(axis=1)
    return np.where(totals_N > 0, summed_N / np.maximum(totals_N, 1), math.nan)


def present_counts(label_counts_NC: np.ndarray, classes: Mapping[int, tuple[int, ...]]) -> np.ndarray:
    """Return the clients' samples [N, C] in a round, under drift those of its classes; without, these are empty."""
    if not classes:
        return label_counts_NC
    present_NC = np.zeros_like(label_counts_NC)
    for client, own in classes.items():
        present_NC[client, list(own)] = label_counts_NC[client, list(own)]
    return present_NC


def spread(name: str, values: np.ndarray, *, mode: Literal["max", "min"] = "max") -> dict[str, float]:
    """Compute the mean, the deviation, and the means of the worst and the best tenth, as columns; without NaN.

    Args:
        name: Of the mean's column; the others' begin with it.
        values: [N].
        mode: Whether the highest or the lowest are the best.
    """
    present = np.sort(values[~np.isnan(values)])
    if not len(present):
        return {}
    if mode == "min":
        present = present[::-1]
    tenth = math.ceil(len(present) / 10)
    mean = _mean(present)
    with np.errstate(invalid="ignore", over="ignore"):
        squares = (present - mean) ** 2
    return {
        name: mean,
        f"{name}_sd": math.sqrt(_mean(squares)),
        f"{name}_worst10": _mean(present[:tenth]),
        f"{name}_best10": _mean(present[-tenth:]),
    }


def _mean(values: np.ndarray) -> float:
    """Compute the mean; of what has none that is a number, as of infinite values of both signs, NaN."""
    try:
        # Rounded once: in what order numpy itself would sum is not ours to say.
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):
        return math.nan


def own_models_question(experiment: Experiment, test: ClientTest, state: RunState) -> Question:
    """Ask every client how good the model is that it would use itself after a round; under drift, with its classes.

    Args:
        experiment: The experiment.
        test: Tests.
        state: The run's state after the round; hubs' models are asked about of those that are clients.
    """
    return Question(
        clients=tuple(range(len(experiment.world.profiles))),
        probes=(test,),
        round=state.round,
        classes=experiment.classes(state.round),
        models={hub: own.vector for hub, own in state.models.items() if hub >= 0},
        broadcast=_broadcast(experiment, state) if test.reads_broadcast else {},
    )


def _broadcast(experiment: Experiment, state: RunState) -> Payload:
    """Return what components publish by now, as a client with the whole model will have it once it is sent."""
    contents: dict[str, Published] = {}
    for seam, component in experiment.method.having["publish"]:
        contents |= ask(component, "publish", state.components[seam], when=f"after round {state.round}")
    codecs = RoundCodecs(CostModel(experiment), experiment.seed, state)
    # Nothing is sent: what the next round's first message will say is found here, and forgotten.
    sent = codecs.sent(contents, 0) if codecs.down_encodes else contents
    return broadcast_of(sent, FULL_MODEL, experiment.layout)


def own_accuracies(answers: Mapping[int, Payload], clients: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Read their answers: accuracies [N], NaN for a client without test samples, and how many each has [N]."""
    hits, samples = (np.array([int(answers[k][f"{ClientTest.name}/{part}"]) for k in clients]) for part in _COUNTED)
    return np.where(samples > 0, hits / np.maximum(samples, 1), np.nan), samples


def untested(record: RoundRecord, columns: Collection[str] = ()) -> RoundRecord:
    """Return the row of a round after which nothing was tested; ``columns`` are those of metrics and of the task."""
    names = (
        *(f"{kind}_accuracy" for kind in ("class", "client", "personal", "own")),
        *(f"client_{c}" for c in columns),
    )
    return replace(
        record,
        test_accuracy=None,
        test_loss=None,
        validation_accuracy=None,
        class_accuracies=None,
        client_scores=None,
        personal_accuracies=None,
        eval_time_s=0.0,
        extra={k: value for k, value in record.extra.items() if not k.startswith(names) and k not in columns},
    )
