"""Losses and figures of the tasks are scikit-learn's, or torch's closed forms, batch by batch as in one piece."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsweep.errors import DataError
from fedsweep.tasks.base import Task
from fedsweep.tasks.kinds import TASKS, Classification, MultiLabel, NextToken, Regression, Segmentation, stratum_of
from fedsweep.tasks.unlabelled import Generative, SelfSupervised

DRAWS = torch.Generator().manual_seed(5)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=DRAWS)


def ids(below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape, generator=DRAWS)


def summed(task: Task, outputs: Tensor, targets: Tensor, batch: int) -> Mapping[str, Tensor]:
    tally: dict[str, Tensor] = {}
    for start in range(0, len(outputs), batch):
        part = slice(start, start + batch)
        for name, value in task.tally(outputs[part], targets[part]).items():
            tally[name] = tally.get(name, torch.zeros((), dtype=value.dtype)) + value
    return tally


def sklearn_of(task: Task, outputs: Tensor, targets: Tensor) -> dict[str, float]:
    from sklearn import metrics as m

    name = next(name for name, kind in TASKS.items() if isinstance(task, kind))

    if name == "multi_label":
        said, true = (outputs > 0).numpy(), targets.numpy()
        return {
            "loss": float(
                np.mean(
                    [m.log_loss(t, o, labels=[0, 1]) for t, o in zip(true.T, outputs.sigmoid().numpy().T, strict=True)]
                )
            ),
            "micro_f1": m.f1_score(true, said, average="micro"),
            "label_f1": m.f1_score(true, said, average="macro", zero_division=0),
            "exact_match": m.accuracy_score(true, said),
        }
    if name == "regression":
        return {
            "loss": m.mean_squared_error(targets, outputs),
            "rmse": math.sqrt(m.mean_squared_error(targets, outputs)),
            "mae": m.mean_absolute_error(targets, outputs),
            "r2": m.r2_score(targets, outputs),
        }
    if name == "next_token":
        asked = targets.flatten() != -100
        flat, true = outputs.flatten(0, 1)[asked].double().softmax(1).numpy(), targets.flatten()[asked].numpy()
        loss = m.log_loss(true, flat, labels=range(outputs.shape[-1]))
        return {"loss": loss, "perplexity": math.exp(loss), "token_accuracy": m.accuracy_score(true, flat.argmax(1))}
    if name == "segmentation":
        asked = targets.flatten() != -100
        flat = outputs.double().softmax(1).permute(0, 2, 3, 1).flatten(0, 2)[asked].numpy()
        true = targets.flatten()[asked].numpy()
        return {
            "loss": m.log_loss(true, flat, labels=range(outputs.shape[1])),
            "mean_iou": m.jaccard_score(true, flat.argmax(1), average="macro"),
            "pixel_accuracy": m.accuracy_score(true, flat.argmax(1)),
        }
    if name == "generative":
        true, made, mean, log_variance = targets.flatten(1), outputs[:, :12], outputs[:, 12:15], outputs[:, 15:]
        code = torch.distributions.Normal(mean.double(), (log_variance.double() / 2).exp())
        normal = torch.distributions.Normal(0.0, 1.0)
        divergence = float(torch.distributions.kl_divergence(code, normal).sum(1).mean())
        mse = m.mean_squared_error(true, made)
        return {"loss": 12 / 2 * mse + divergence, "reconstruction": mse, "divergence": divergence}
    if name == "self_supervised":
        true, made, hidden = targets.flatten(1).double(), outputs[:, 0].double(), outputs[:, 1] > 0
        mse = m.mean_squared_error(true[hidden], made[hidden])
        places = [true[hidden[:, place], place] for place in range(12)]
        around = sum(float((values - values.mean()).square().sum()) for values in places)
        return {"loss": mse, "masked_mse": mse, "masked_r2": 1 - mse * int(hidden.sum()) / around}
    shares = outputs.double().softmax(1).numpy()
    return {
        "loss": m.log_loss(targets, shares, labels=range(outputs.shape[1])),
        "accuracy": m.accuracy_score(targets, shares.argmax(1)),
    }


with_gaps = ids(7, 40, 9)
with_gaps[:, -2:] = -100
with_holes = ids(3, 40, 6, 5)  # the fourth class is predicted alone
with_holes[:, :2, :3] = -100
rare = ids(2, 40, 4)
rare[:, 1] = 0
CASES: dict[str, tuple[Task, Tensor, Tensor]] = {
    "classification": (Classification(num_classes=5), drawn(40, 5), ids(5, 40)),
    "multi_label": (MultiLabel(num_classes=4, target_shape=(4,)), drawn(40, 4), ids(2, 40, 4)),
    "regression": (Regression(target_shape=(3,)), drawn(40, 3) + 100, drawn(40, 3) + 100),
    "next_token": (NextToken(num_classes=7, target_shape=(9,)), drawn(40, 9, 7), with_gaps),
    "segmentation": (Segmentation(num_classes=4, target_shape=(6, 5)), drawn(40, 4, 6, 5), ids(4, 40, 6, 5)),
    "multi_label, one of nobody": (MultiLabel(num_classes=4, target_shape=(4,)), drawn(40, 4), rare),
    "regression of one number": (Regression(), drawn(40, 1), drawn(40)),
    "segmentation with holes": (Segmentation(num_classes=4, target_shape=(6, 5)), drawn(40, 4, 6, 5), with_holes),
    "generative": (Generative(latent=3, target_shape=(1, 3, 4)), drawn(40, 18).double(), drawn(40, 1, 3, 4).double()),
    "self_supervised": (
        SelfSupervised(target_shape=(1, 3, 4)),
        torch.stack([drawn(40, 12), ids(2, 40, 12).float()], dim=1),
        drawn(40, 1, 3, 4),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_figures_are_scikit_learns(name: str) -> None:
    task, outputs, targets = CASES[name]
    expected = sklearn_of(task, outputs, targets)
    assert float(task.loss(outputs, targets)) == pytest.approx(expected["loss"], abs=1e-6)
    for batch in (40, 7, 1):
        tally = summed(task, outputs, targets, batch)
        scores = task.scores(tally)
        assert list(scores) == list(task.measures)
        assert float(tally["loss"]) / int(tally["count"]) == pytest.approx(expected["loss"], abs=1e-6)
        for figure, value in scores.items():
            assert value == pytest.approx(expected[figure], abs=1e-6), figure


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_padding_are_what_the_task_says(name: str) -> None:
    task, outputs, targets = CASES[name]
    assert task.outputs == tuple(outputs.shape[1:])
    if task.skips_padding:
        more = torch.cat([targets, torch.full_like(targets[:3], -100)])
        assert float(task.loss(torch.cat([outputs, outputs[:3]]), more)) == float(task.loss(outputs, targets))


@pytest.mark.parametrize("name", ["next_token", "segmentation"])
def test_a_batch_in_which_nothing_is_asked_has_no_loss_and_moves_nothing(name: str) -> None:
    task, outputs, targets = CASES[name]
    asked = outputs[:2].clone().requires_grad_()
    loss = task.loss(asked, torch.full_like(targets[:2], -100))
    (gradient,) = torch.autograd.grad(loss, asked)
    assert float(loss.detach()) == 0 and not gradient.any()


def test_strata_are_of_the_training_set() -> None:
    assert Regression(bins=4).strata(np.arange(8.0)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    labels = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 1, 1], [0, 0, 0]])
    task = MultiLabel(target_shape=(3,))
    assert task.strata(labels).tolist() == [0, 0, 1, 2, 3] and task.num_strata == 4
    masks = np.zeros((3, 4, 4), int)
    masks[0, :1], masks[1, :2], masks[1, 2] = 2, 1, 2
    assert Segmentation(num_classes=3, target_shape=(4, 4)).strata(masks).tolist() == [2, 1, 0]
    assert NextToken(num_classes=3, target_shape=(4,)).strata(masks[0]) is None


@pytest.mark.parametrize(
    ("task", "targets", "message"),
    [
        (Regression(), np.zeros(3, int), "must be floats"),
        (MultiLabel(target_shape=(2,)), np.full((3, 2), 2), "of 0 and 1"),
        (Classification(num_classes=3), np.array([0, 3]), r"must lie in 0\.\.2, but one is 3"),
        (Classification(num_classes=3), np.array([0, -1]), r"must lie in 0\.\.2, but one is -1"),
        (Classification(num_classes=3), np.array([0, -100]), r"must lie in 0\.\.2, but one is -100"),
        (NextToken(num_classes=3, target_shape=(2,)), np.full((3, 2), -100), "are -100 throughout"),
        (Segmentation(num_classes=3, target_shape=(2, 2)), np.full((3, 2, 2), 0.5, np.float32), "must be integers"),
        (NextToken(num_classes=3, target_shape=(2,)), np.full((3, 2), 3), r"must lie in 0\.\.2"),
        (NextToken(num_classes=3, target_shape=(2,)), np.zeros(3, int), r"\[samples, positions\]"),
        (Segmentation(num_classes=3, target_shape=(2, 2)), np.zeros((3, 2), int), r"\[samples, height, width\]"),
    ],
)
def test_targets_of_another_kind_are_refused(task: Task, targets: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        task.check(targets, "train targets")


def test_every_task_of_the_package_is_among_the_cases() -> None:
    assert {type(task) for task, _, _ in CASES.values()} == {*TASKS.values()}


@pytest.mark.parametrize(
    ("task", "name"),
    [
        (None, "class"),
        ({"kind": "regression", "bins": 4}, "quantile"),
        ({"kind": "my_tasks:poisson"}, "stratum"),
        ({"kind": ["regression"]}, "stratum"),
        ("regression", "class"),
    ],
)
def test_strata_are_named_of_any_configuration_also_a_foreign_one(task: Any, name: str) -> None:
    assert stratum_of({"scenario": {"task": task}}) == name


def test_strata_are_classes_where_nothing_is_said() -> None:
    assert stratum_of({}) == stratum_of({"scenario": 7}) == "class"


@pytest.mark.parametrize("said", [0.1, 0.2])
def test_a_number_that_does_not_vary_counts_in_r2_as_met_or_not(said: float) -> None:
    """As scikit-learn's, where 0.1 is exact; its sums of squares leave a variance of some 1e-16, or below 0."""
    from sklearn.metrics import r2_score

    true = torch.tensor([[0.1, value] for value in np.linspace(0, 1, 999)], dtype=torch.float64)
    outputs = torch.stack([torch.full([999], said, dtype=torch.float64), true[:, 1] + 0.1], dim=1)
    task = Regression(target_shape=(2,))
    assert task.scores(task.tally(outputs, true))["r2"] == pytest.approx(
        ((said == 0.1) + r2_score(true[:, 1], outputs[:, 1])) / 2
    )
