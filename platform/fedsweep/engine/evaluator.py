"""Testing models: the task's figures and mean loss, the same on every machine of a kind; all tests after a round."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from fedsweep.client.messages import Handle, Question
from fedsweep.components.evaluation import Evaluation
from fedsweep.components.metrics import Metric, measured
from fedsweep.engine.aggregation import visible
from fedsweep.engine.per_client import client_accuracies, own_accuracies, own_models_question, present_counts, spread
from fedsweep.engine.state import HubModel, RunState
from fedsweep.errors import InvariantError
from fedsweep.experiment.experiment import Experiment
from fedsweep.guard import ask, guarded, wrong
from fedsweep.records import ClientUpdate, Payload, RoundRecord, State
from fedsweep.tasks.base import Task
from fedsweep.trees import Inputs, as_tensors, each, load_vector, placed, sample_values, taken, targets_of

# Test sets of up to this many bytes are transformed once.
_CACHE_BYTES = 512 * 2**20


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The outcome of a test.

    Attributes:
        task: What is learned.
        tally: The task's sums over all samples.
        loss: The mean loss; over samples, or what else the task counts.
        figures: Those of the task, but for accuracy, and of the evaluator's metrics, by column.
        by_client: The task's sums over each client's own test samples; None where there are no such samples.
    """

    task: Task
    tally: Mapping[str, Tensor]
    loss: float
    figures: Mapping[str, float] = field(default_factory=dict)
    by_client: Mapping[int, Mapping[str, Tensor]] | None = None

    @property
    def accuracy(self) -> float | None:
        """In 0..1, over all samples; NaN where the loss is: argmax would name a class even for outputs of NaN.

        None where samples are not classified.
        """
        if not self.task.has_classes:
            return None
        hits, count = self.tally["confusion"].diag().sum(), self.tally["count"]
        return math.nan if math.isnan(self.loss) else int(hits) / int(count)

    def client_scores(self, num_clients: int) -> np.ndarray:
        """Return the task's leading figure over each client's own test samples [N]; NaN where it has none."""
        scores_N = np.full(num_clients, math.nan)
        for client, tally in (self.by_client or {}).items():
            if (count := int(tally["count"])) and not math.isnan(self.loss):
                figures = {"loss": float(tally["loss"]) / count, **scores_of(self.task, tally)}
                scores_N[client] = figures[self.task.leading[0]]
        return scores_N

    def class_accuracies(self, num_classes: int) -> tuple[float, ...]:
        """Return the accuracy of each class [C], 0..1; NaN where the set has none of it."""
        accuracies_C = np.full(num_classes, np.nan)
        if not math.isnan(self.loss):
            cells_CC = self.confusion(num_classes)
            counts_C = cells_CC.sum(axis=1)
            labels = np.flatnonzero(counts_C)
            accuracies_C[labels] = np.diag(cells_CC)[labels] / counts_C[labels]
        return tuple(accuracies_C.tolist())

    def confusion(self, num_classes: int) -> np.ndarray:
        """Count samples by class [C, C]: rows are true, columns predicted."""
        cells_CC: np.ndarray = self.tally["confusion"].numpy()[:num_classes, :num_classes]
        return cells_CC


def scores_of(task: Task, tally: Mapping[str, Tensor], *, when: str = "at a test of the model") -> dict[str, float]:
    """Return a task's figures of a test's sums.

    Raises:
        InvariantError: They are not those that it declares.
    """
    return {name: float(value) for name, value in ask(task, "scores", tally, when=when).items()}


class Evaluator:
    """Tests models on one data set.

    Args:
        experiment: Says what is done to a batch, how large it is, and where the passes run: on the server's device.
        images: Inputs [T, ...].
        labels: Targets [T, ...].
        metrics: What is measured beside accuracy and loss.
    """

    def __init__(
        self, experiment: Experiment, images: np.ndarray, labels: np.ndarray, *, metrics: Sequence[Metric] = ()
    ) -> None:
        self._metrics = metrics
        self._transform, self._batch_size = experiment.world.data.transform, experiment.evaluation_batch
        self._device, self._dtype = experiment.server_device, experiment.layout.dtype
        self._images = images
        self._task = experiment.world.data.learned
        self._labels = targets_of(labels)
        self._last_class = int(self._labels.max()) if self._task.has_classes and len(labels) else -1
        # A task of the user's may change in place what it counts, and the next test has the same targets.
        self._copies = not type(self._task).__module__.startswith("fedsweep.")
        self._ready: list[Inputs] | None = None
        if sample_values(images) * len(images) * 4 <= _CACHE_BYTES:
            self._ready = [self._inputs(start) for start in range(0, len(images), self._batch_size)]

    def _inputs(self, start: int) -> Inputs:
        raw = as_tensors(np.array(self._images[start : start + self._batch_size]))
        with guarded(when="at a test of the model"):
            inputs = self._transform(raw, generator=None, train=False)
        return placed(inputs, device=self._device, dtype=self._dtype)

    def test(
        self,
        evaluation: Evaluation,
        state: State,
        model: nn.Module,
        updates: Sequence[ClientUpdate],
        *,
        when: str = "at a test of the model",
        owners: np.ndarray | None = None,
    ) -> EvaluationResult:
        """Test a model, loaded and on the evaluator's device, in one pass; the updates are the last attendees'.

        Where ``owners`` says whose each sample is [T] (-1: nobody's), the sums are also taken client by client.

        Raises:
            ComponentError: A metric failed; the message says ``when``.
            InvariantError: The evaluation's answer, or a metric's, is not what it must be.
        """
        model.eval()
        outputs: list[Tensor] = []
        tally: dict[str, Tensor] = {}
        by_client: dict[int, dict[str, Tensor]] | None = None if owners is None else {}
        with torch.no_grad():
            for number, start in enumerate(range(0, len(self._labels), self._batch_size)):
                inputs = self._ready[number] if self._ready is not None else self._inputs(start)
                targets = self._labels[start : start + self._batch_size].to(self._device)
                answer = ask(evaluation, "predict", state, model, updates, inputs, like=targets, when=when)
                is_table = answer.ndim == 2 and answer.is_floating_point()
                if self._task.has_classes and not (is_table and answer.shape[1] > self._last_class):
                    must = f"float logits [{len(targets)}, {self._last_class + 1} classes or more]"
                    raise wrong(evaluation, "predict", must=must, answer=answer, when=when)
                if self._metrics:
                    outputs.append(answer.cpu())
                truth = inputs if self._task.of_inputs else targets
                counted = (answer.clone(), each(torch.clone, truth)) if self._copies else (answer, truth)
                for name, value in ask(self._task, "tally", *counted, when=when).items():
                    if name in tally and (shapes := [tuple(np.shape(v)) for v in (tally[name], value)])[0] != shapes[1]:
                        must, answer = "sums of one shape whatever the batch", f"{name} of {shapes[0]} and {shapes[1]}"
                        raise wrong(self._task, "tally", must=must, answer=answer, when=when)
                    tally[name] = tally[name] + value if name in tally else value
                if owners is not None and by_client is not None:
                    whose = owners[start : start + self._batch_size]
                    _add_by_client(self._task, by_client, answer, truth, whose, when=when)
        if not (count := int(tally["count"])):
            raise wrong(self._task, "tally", must="a count above 0 over the whole test", answer="0", when=when)
        loss = float(tally["loss"]) / count
        diverged = math.isnan(loss)
        figures: dict[str, float] = {}
        if not self._task.has_classes:
            missing = dict.fromkeys(self._task.measures, math.nan)
            figures = missing if diverged else scores_of(self._task, tally, when=when)
        if self._metrics:
            figures |= measured(self._metrics, torch.cat(outputs), self._labels, when=when, diverged=diverged)
        return EvaluationResult(task=self._task, tally=tally, loss=loss, figures=figures, by_client=by_client)


class RoundTester:
    """Tests models after a round, and writes their figures into its row.

    Args:
        experiment: Its world has the test set, and its method says how a model is tested.

    Attributes:
        model: The model that is tested, into which each round's values are loaded; nobody else changes it.
        asks_clients: Whether clients test models, too.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment, world = experiment, experiment.world
        self._evaluation = experiment.method.evaluation
        self.model = experiment.new_model().to(experiment.server_device)
        self._test = Evaluator(experiment, world.test_images, world.test_labels, metrics=experiment.metrics)
        self._validation = None if world.validation is None else Evaluator(experiment, *world.validation)
        self._client_test = self._evaluation.client_test()
        self.asks_clients = self._client_test is not None

    def tested(self, record: RoundRecord, vector: Tensor, state: State, updates: Sequence[ClientUpdate]) -> RoundRecord:
        """Return the row with the tests' figures of the server's model [V]."""
        began, experiment = time.perf_counter(), self._experiment
        load_vector(self.model, experiment.layout, vector)
        shown = visible(updates, self._evaluation)
        when = f"in round {record.round}" if record.round else "before round 1"
        owners = experiment.test_owners(record.round) if experiment.evaluate_per_client else None
        tested = self._test.test(self._evaluation, state, self.model, shown, when=when, owners=owners)
        validation = None
        if self._validation is not None:
            validation = self._validation.test(self._evaluation, state, self.model, shown, when=when).accuracy
        if experiment.evaluate_per_client:
            record = self.with_shares(record, tested)
        if tested.figures:
            record = _with_figures(record, tested.figures)
        return replace(
            record,
            test_accuracy=tested.accuracy,
            test_loss=tested.loss,
            validation_accuracy=validation,
            eval_time_s=time.perf_counter() - began,
        )

    def with_shares(self, record: RoundRecord, tested: EvaluationResult) -> RoundRecord:
        """Return the row with how good the tested model is by class and by client."""
        experiment, figures = self._experiment, {}
        if tested.task.has_classes:
            accuracies = tested.class_accuracies(experiment.world.data.num_classes)
            record = replace(record, class_accuracies=accuracies)
            figures = spread("class_accuracy", np.array(accuracies))
        if tested.by_client is None:  # then there are classes
            present_NC = present_counts(experiment.label_counts_NC, experiment.classes(record.round))
            scores_N = client_accuracies(accuracies, present_NC)
        else:
            scores_N = tested.client_scores(len(experiment.world.profiles))
            record = replace(record, client_scores=tuple(scores_N.tolist()))
        name, how = tested.task.leading
        return _with_figures(record, figures | spread(f"client_{name}", scores_N, mode=how.mode))

    def clients_tested(
        self,
        record: RoundRecord,
        state: RunState,
        measure: Callable[[Question, Tensor, Mapping[int, Handle]], Mapping[int, Payload]],
    ) -> RoundRecord:
        """Return the row with how good the models are that clients themselves would use.

        Args:
            record: The row.
            state: The run's state after the round.
            measure: Asks clients, as :meth:`~fedsweep.fleet.fleet.Fleet.measure` does.
        """
        assert self._client_test is not None
        began, experiment = time.perf_counter(), self._experiment
        question = own_models_question(experiment, self._client_test, state)
        accuracies, _ = own_accuracies(measure(question, state.vector, state.memories), question.clients)
        if experiment.evaluate_per_client and state.models:
            record = _with_figures(record, self._tested_in_full(state.models, state.components["evaluation"]))
        seconds = record.eval_time_s + time.perf_counter() - began
        record = replace(record, personal_accuracies=tuple(accuracies.tolist()), eval_time_s=seconds)
        return _with_figures(record, spread("personal_accuracy", accuracies))

    def _tested_in_full(self, models: Mapping[int, HubModel], state: State) -> dict[str, float]:
        """Return the accuracies of clients' own models on the whole test set: mean, deviation, tenths."""
        accuracies = []
        for vector in (own.vector for hub, own in models.items() if hub >= 0):
            load_vector(self.model, self._experiment.layout, vector)
            accuracies.append(self._test.test(self._evaluation, state, self.model, ()).accuracy)
        return spread("own_accuracy", np.array(accuracies, dtype=float))


def _with_figures(record: RoundRecord, figures: Mapping[str, float]) -> RoundRecord:
    if clash := sorted(figures.keys() & record.extra.keys()):
        raise InvariantError(
            f"{', '.join(clash)} is reported by a component and is also a figure of the evaluation; rename one"
        )
    return replace(record, extra={**record.extra, **figures})


def _add_by_client(
    task: Task,
    by_client: dict[int, dict[str, Tensor]],
    outputs: Tensor,
    targets: Inputs,
    owners: np.ndarray,
    *,
    when: str,
) -> None:
    """Add a batch's sums to those of the clients whose samples [B] are in it."""
    for client in np.unique(owners[owners >= 0]).tolist():
        places = torch.from_numpy(np.flatnonzero(owners == client)).to(outputs.device)
        own = by_client.setdefault(client, {})
        for name, value in ask(task, "tally", outputs[places], taken(targets, places), when=when).items():
            own[name] = own[name] + value if name in own else value
