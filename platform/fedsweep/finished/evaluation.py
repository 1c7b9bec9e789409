"""A finished run's model tested again: on its own test set to the bits of its last test, or on other data.

Shape letters: T test samples, C classes, N clients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedsweep.catalog import resolve
from fedsweep.client.compute_device import start_device
from fedsweep.components import Evaluation, GlobalModel
from fedsweep.config.load import load_config
from fedsweep.config.overrides import apply_overrides
from fedsweep.config.schema import Config
from fedsweep.driver.run import one_thread
from fedsweep.engine.aggregation import model_alone
from fedsweep.engine.evaluator import EvaluationResult, Evaluator
from fedsweep.engine.per_client import client_accuracies, own_accuracies, own_models_question, present_counts
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError, DataError, OutputError
from fedsweep.experiment.build import build_experiment
from fedsweep.experiment.build_world import dataset_of, part_of
from fedsweep.experiment.experiment import Experiment, server_context
from fedsweep.finished.evaluated import Evaluated
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.models.initial import read_weights, weights_file, weights_vector
from fedsweep.records import State
from fedsweep.runs.checkpoints.checkpoint import CheckpointStore
from fedsweep.runs.remote_folder import read_from
from fedsweep.runs.run_folder import CHECKPOINTS, CONFIG, MODEL, RunFolder
from fedsweep.runs.sources import samples_name
from fedsweep.tasks.base import Task
from fedsweep.trees import constants_sha256, layout_of, load_vector
from fedsweep.world.data.datasets import Dataset, load_dataset

# Of a run's configuration what may be another for a test; the rest says how its model came about.
_SETTABLE = ("scenario", "evaluation", "runtime")

# A data set by name, one in memory, or images [T, C, H, W] in the pixels of the run's own, with labels [T].
Data = str | Dataset | tuple[np.ndarray, np.ndarray]


def evaluate(
    source: str | Path, *, data: Data | None = None, model: str | Path | None = None, overrides: Sequence[str] = ()
) -> Evaluated:
    """Test the final model of a finished run, or another of its kind.

    Args:
        source: The run's folder, or its address; with ``model`` also a configuration's file or a preset's name.
        data: Whose test samples to take; None: the run's own. They are scaled and normalised as the run's own are.
        model: A file ``.safetensors`` to test in place of the run's model.
        overrides: ``KEY=VALUE`` below ``scenario``, ``evaluation`` and ``runtime``.

    Raises:
        InputError: A folder, a file or data are not there, are damaged or do not fit.
    """
    with read_from([source]) as (place,), one_thread():
        subject = open_subject(place, model=model, overrides=overrides)
        return subject.evaluated(data, as_before=data is None and model is None and not overrides)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model under test, with the world that it was made in.

    Attributes:
        config: The configuration.
        dataset: The scenario's.
        experiment: What they describe.
        file: The model's.
        values: Its tensors, without what else travelled with them [num_values].
        run: The run's folder where the model is the run's own.
        result: What its ``result.json`` holds.
        samples_changed: The data set is not what the run had.
    """

    config: Config
    dataset: Dataset
    experiment: Experiment
    file: Path
    values: Tensor
    run: RunFolder | None = None
    result: Mapping[str, Any]
    samples_changed: bool = False

    @property
    def round(self) -> int:
        """The run's last round; under drift clients have its classes."""
        last, planned = self.result.get("rounds"), self.experiment.training.rounds
        return min(last, planned) if isinstance(last, int) and last > 0 else planned

    def samples(self, data: Data | None) -> tuple[str, np.ndarray, np.ndarray, tuple[str, ...]]:
        """Return a name, images [T, C, H, W] in the pixels of the run's own set, labels [T], names of the classes.

        Raises:
            InputError: There are no such data, or they do not fit the model.
        """
        own, scenario = self.dataset, self.config.scenario
        if data is None:
            return own.name, own.test_images, own.test_labels, own.class_names
        if isinstance(data, str):
            load = partial(load_dataset, data, root=scenario.root, download=scenario.download, for_test=True)
            sides = set() if own.pixels is None else {*own.image_shape[1:]}
            try:
                data = load(image_size=sides.pop() if len(sides) == 1 else None)  # to others none can be resized
            except ConfigError:  # raised again, but where there are no pictures to be resized
                data = load()
        elif not isinstance(data, Dataset):
            data = _given(own, data)
        return self._fitting(data)

    def inputs(self, data: Data | None) -> tuple[Tensor, Tensor]:
        """Return the test samples as a model takes them, transformed, without augmentation, and their labels [T]."""
        _, images, labels, _ = self.samples(data)
        dtype = self.experiment.layout.dtype
        return self.experiment.world.data.transformed(images, dtype), torch.from_numpy(labels.copy())

    def _fitting(self, other: Dataset) -> tuple[str, np.ndarray, np.ndarray, tuple[str, ...]]:
        own, task = self.dataset, self.experiment.world.data.learned
        if own.pixels is not None and other.pixels is None:
            raise DataError(f"data {other.name!r} has no pictures, but the model takes {list(own.image_shape)}")
        labels, names = _own_classes(own, other) if task.has_classes else (other.test.targets, ())
        if own.pixels is None or not task.has_classes:
            return other.name, *_alike(own, other, task, labels), names
        if other.image_shape != own.image_shape:
            raise DataError(
                f"data {other.name!r}: its images are {list(other.image_shape)}, but the model takes"
                f" {list(own.image_shape)}; choose data of that shape"
            )
        if labels.ndim != 1 or labels.dtype.kind not in "iu":
            kind = f"{labels.dtype} {list(labels.shape[1:])}"
            raise DataError(f"data {other.name!r}: its targets are {kind} for each sample, but the model tells classes")
        if int(labels.max()) >= own.num_classes:
            raise DataError(
                f"data {other.name!r}: a label is {int(labels.max())}, but the model tells"
                f" {own.num_classes} classes, 0..{own.num_classes - 1}, from one another"
            )
        images = other.test_images
        if other.scale != own.scale:
            images = (images * np.float32(own.scale / other.scale)).astype(np.float32)
        return other.name, images, labels, names

    def evaluated(self, data: Data | None, *, as_before: bool) -> Evaluated:
        """Return the test.

        Args:
            data: See :func:`evaluate`.
            as_before: Nothing differs from the run's own last test, so the result must not either.
        """
        name, images, labels, class_names = self.samples(data)
        world = replace(self.experiment.world, test_images=images, test_labels=labels)
        if data is not None:
            world = replace(world, test_owners=None)
        experiment = replace(self.experiment, world=world)
        state, notes = self._last_state()
        tested = self._tested(experiment, *self._evaluation(state, notes))
        outcome = Evaluated(
            data=name,
            model=self.file,
            num_samples=len(labels),
            test_loss=tested.loss,
            metrics=tested.figures,
            **self._by_client(experiment, tested),
        )
        if as_before:
            notes += self._changes(tested, is_partial=bool(notes))
        if not world.data.learned.has_classes:
            return replace(outcome, notes=tuple(notes))
        num_classes = world.data.num_classes
        own = self._own_models(experiment, state)
        if own is not None:
            notes.append(
                "clients use models of their own, told apart as personal: the accuracy is the server's model's"
            )
        return replace(
            outcome,
            test_accuracy=cast(float, tested.accuracy),
            confusion=tested.confusion(num_classes),
            class_names=class_names if len(class_names) == num_classes else (),
            class_accuracies=tested.class_accuracies(num_classes),
            personal_accuracies=None if own is None else own[0],
            personal_samples=None if own is None else own[1],
            notes=tuple(notes),
        )

    def _changes(self, tested: EvaluationResult, *, is_partial: bool) -> list[str]:
        """Say where a test comes to something else than the run's own last one, and why; a partial one is of less."""
        why = "it was of that" if is_partial else "another machine's or library's arithmetic"
        notes = []
        if self.samples_changed:
            notes, why = ["the samples of scenario.dataset are others now than the run had"], "it was of those"
        if self.experiment.world.data.learned.has_classes:
            before = self.result.get("test_accuracy")
            moved = "" if before in (None, tested.accuracy) else str(before)
        else:
            moved = _moved(self.result.get("test_figures"), tested.figures)
        return [*notes, f"the run's own last test came to {moved}: {why}"] if moved else notes

    def _by_client(self, experiment: Experiment, tested: EvaluationResult) -> dict[str, Any]:
        """Return how good the model is for each client, as fields of :class:`Evaluated`, if that is told."""
        world, owners = experiment.world, experiment.test_owners(self.round)
        if owners is not None:
            return {
                "has_own_tests": True,
                "client_figure": tested.task.leading,
                "client_accuracies": tested.client_scores(len(world.profiles)),
                "client_samples": np.bincount(owners[owners >= 0], minlength=len(world.profiles)),
            }
        if not tested.task.has_classes or world.is_drawn:  # whose clients would all be made for it
            return {}
        num_classes = world.data.num_classes
        present_NC = present_counts(experiment.label_counts_NC, experiment.classes(self.round))
        tests_C = np.bincount(world.test_labels, minlength=num_classes)
        return {
            "client_accuracies": client_accuracies(tested.class_accuracies(num_classes), present_NC),
            "client_samples": np.where(present_NC > 0, tests_C, 0).sum(axis=1),
        }

    def _tested(
        self, experiment: Experiment, evaluation: Evaluation, state: State, voters: Sequence[Tensor]
    ) -> EvaluationResult:
        start_device(experiment.server_device, tf32=experiment.tf32)
        world, model = experiment.world, experiment.new_model().to(experiment.server_device)
        load_vector(model, layout_of(model), self.values)
        evaluator = Evaluator(experiment, world.test_images, world.test_labels, metrics=experiment.metrics)
        updates = [model_alone(vector, experiment.layout) for vector in voters]
        return evaluator.test(evaluation, state, model, updates, owners=experiment.test_owners(self.round))

    @cached_property
    def _first_state(self) -> State:
        """Return the state of the method's evaluation before round 1."""
        return self.experiment.method.evaluation.init(server_context(self.experiment, "evaluation"))

    def _evaluation(self, state: RunState | None, notes: list[str]) -> tuple[Evaluation, State, Sequence[Tensor]]:
        """Return the models that answer: the method's own way, where the folder has its state."""
        method = self.experiment.method
        if self._first_state in (None, {}):
            return method.evaluation, self._first_state, ()
        saved = state.components.get("evaluation") if state is not None else None
        voters = method.evaluation.voters(saved) if saved is not None else None
        if voters is not None:
            return method.evaluation, saved, voters
        notes.append(f"tested is the server's model, but in {method.name} more than that answers")
        return GlobalModel(), None, ()

    def _last_state(self) -> tuple[RunState | None, list[str]]:
        """Return the run's last state, beside its model, where the method's tests need it and it is there."""
        needed = self.experiment.method.evaluation.client_test() is not None or self._first_state not in (None, {})
        if not needed or self.run is None:
            return None, []
        store = CheckpointStore(self.run.path, keep=1, config_hash=str(self.result.get("config_hash")))
        state = store.newest(keep_handle=lambda memory: memory).state
        if state is not None and state.round == self.round:
            return state, []
        return None, [f"{CHECKPOINTS}/ has no state of round {self.round}: what clients and server kept is not tested"]

    def _own_models(self, experiment: Experiment, state: RunState | None) -> tuple[np.ndarray, np.ndarray] | None:
        test = experiment.method.evaluation.client_test()
        if test is None or state is None:
            return None
        question = own_models_question(experiment, test, state)
        answers = LocalFleet(experiment).measure(question, state.vector, state.memories)
        return own_accuracies(answers, question.clients)


def _own_classes(own: Dataset, other: Dataset) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return other data's test labels as the model numbers its classes, by their names where both have some in common.

    Raises:
        DataError: A class is none of the model's.
    """
    labels, names = other.test.targets, other.class_names
    are_numbers = own.class_names and all(map(str.isdecimal, own.class_names))
    if all(map(str.isdecimal, names)) and not (are_numbers or set(names) & set(own.class_names)):
        # Classes without names are called by their numbers, and may leave some out.
        labels = np.array([int(name) for name in names])[labels] if names else labels
        return labels, own.class_names or names
    if names == own.class_names or not set(names) & set(own.class_names):
        return labels, names or own.class_names
    if missing := sorted({names[label] for label in np.unique(labels)} - set(own.class_names)):
        raise DataError(
            f"data {other.name!r}: the model knows no {', '.join(missing)}, but {', '.join(own.class_names)}"
        )
    places = [own.class_names.index(name) if name in own.class_names else 0 for name in names]
    return np.array(places)[labels], own.class_names


def _alike(own: Dataset, other: Dataset, task: Task, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return other data's test inputs and targets, which are numbered as the model's.

    Raises:
        DataError: They are of another shape or type than the run's own.
    """
    for part in ("inputs", "targets"):
        mine, theirs = getattr(own.test, part), getattr(other.test, part)
        if theirs.shape[1:] != mine.shape[1:] or theirs.dtype != mine.dtype:
            raise DataError(
                f"data {other.name!r}: test {part} are {list(theirs.shape[1:])} {theirs.dtype}, but the model was"
                f" trained with {list(mine.shape[1:])} {mine.dtype}"
            )
    truth = other.test.inputs if task.of_inputs else targets
    task.check(truth, f"data {other.name!r}: test {'inputs' if task.of_inputs else 'targets'}")
    return other.test.inputs, targets


def _moved(before: Any, figures: Mapping[str, float]) -> str:
    """Return the figures of a run's last test that are others now; empty where none is."""
    earlier = before if isinstance(before, Mapping) else {}
    moved = {name: value for name, value in earlier.items() if value is not None and figures.get(name) != value}
    return ", ".join(f"{name} {value}" for name, value in moved.items())


def open_subject(source: str | Path, *, model: str | Path | None, overrides: Sequence[str]) -> Subject:
    """Read and check everything that a test needs; arguments and errors are :func:`evaluate`'s."""
    path = Path(source).expanduser()
    _check_overrides(overrides)
    folder, result = RunFolder(path.absolute()), {}
    if path.is_dir():
        folder.check_is_run()
        folder.read_config()
        config, result = load_config(path / CONFIG), folder.result_if_any()
        if model is None:
            folder.check_finished("has a model to test")
    elif model is None:
        raise OutputError(f"{path}: there is no such folder; name a finished run's, or give a file by --model")
    else:
        config = load_config(source)
    config = resolve(load_config(config.tree(), [*_here(config), *overrides]))
    dataset = dataset_of(config.scenario)
    experiment, recorded = build_experiment(config, dataset), result.get("sources")
    name = samples_name(config.scenario.dataset, config.scenario.image_size)
    layout, base = layout_of(experiment.template), constants_sha256(experiment.template)
    if model is not None:
        file = weights_file(str(model), key="--model")
        values = read_weights(file, layout, sha256=None, model=config.model.name, key="--model", base=base)
    else:
        file = folder.path / MODEL
        tensors = folder.read_model(num_values=layout.num_values, base=base)
        values = weights_vector(tensors, layout, source=str(file), model=config.model.name)
    return Subject(
        config=config,
        dataset=part_of(config, dataset),
        experiment=experiment,
        file=file,
        values=values,
        run=folder if model is None else None,
        result=result,
        samples_changed=isinstance(recorded, Mapping) and recorded.get(name) not in (None, dataset.digest),
    )


def _check_overrides(overrides: Sequence[str]) -> None:
    for section in apply_overrides({}, overrides):
        if section not in _SETTABLE:
            raise ConfigError(
                f"--set {section}: a test can have another {', '.join(_SETTABLE)}, but this says how the model came"
                " about; leave it out, or run that configuration"
            )


def _here(config: Config) -> list[str]:
    """Return overrides for a test in this process of a configuration that may have been for a cluster."""
    runtime = config.runtime
    on_gpu = runtime.gpus_per_server or (runtime.device == "cuda" and runtime.backend == "local")
    device = "cuda" if on_gpu and torch.cuda.is_available() else "cpu"
    # Where the model's training began is of no concern, and its file may be gone.
    runs_on = f"runtime={{backend: local, device: {device}, tf32: {str(runtime.tf32).lower()}}}"
    return [runs_on, "model.init_from=null", "model.init_sha256=null"]


def _given(own: Dataset, arrays: Any) -> Dataset:
    """Return images and labels as a data set, which checks them."""
    if not isinstance(arrays, tuple | list) or len(arrays) != 2:
        what = "a data set's name, a Dataset, or images and their labels, two arrays"
        raise ConfigError(f"data are {what}; got a {type(arrays).__name__}")
    images, labels = arrays
    channels = images.shape[1] if getattr(images, "ndim", 0) == 4 else 1
    try:
        return Dataset.images(
            name="given arrays",
            train_images=images,
            train_labels=labels,
            test_images=images,
            test_labels=labels,
            num_classes=own.num_classes,
            scale=own.scale,
            mean=(0.0,) * channels,
            std=(1.0,) * channels,
        )
    except DataError as error:
        raise DataError(str(error).replace(": train_", ": ")) from error  # there are no others, for training
