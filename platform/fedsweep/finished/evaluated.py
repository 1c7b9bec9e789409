"""The outcome of a test of a finished run's model, as a record, as rows and as plain values.

Shape letters: T test samples, C classes, N clients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedsweep.engine.per_client import spread
from fedsweep.results.seed_statistics import finite
from fedsweep.runs.places import place_name
from fedsweep.tasks.declaration import Declaration


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """The outcome of a test.

    Attributes:
        data: What was tested on.
        model: The file with the tested model.
        num_samples: T.
        test_accuracy: Over all samples, 0..1; NaN where they are not classified. Then there are no classes either,
            so C is 0, and N where no client has test samples of its own.
        test_loss: The task's mean loss, of classes the mean cross-entropy.
        metrics: Figures of the task, but for accuracy, and of the configuration's metrics, by column.
        confusion: Samples [C, C]: rows are the true classes, columns the predicted ones.
        class_names: One per class, or empty.
        class_accuracies: By class index [C]; NaN for a class without test samples.
        client_accuracies: By client [N]: over its own test samples, where they are told apart; else the mean of its
            classes' accuracies by their shares in its training data.
        client_samples: Its test samples, or those of its classes [N].
        has_own_tests: Samples are told apart by client.
        client_figure: What clients' figures are, the task's leading one, and which way is better.
        personal_accuracies: Of the models that clients themselves would use, each on its share of the test set [N];
            None where the method gives them none, or they are not there.
        personal_samples: Of these shares [N].
        notes: Sentences for the user.
    """

    data: str
    model: Path
    num_samples: int
    test_loss: float
    test_accuracy: float = math.nan
    confusion: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    class_names: tuple[str, ...] = ()
    class_accuracies: tuple[float, ...] = ()
    client_accuracies: np.ndarray = field(default_factory=lambda: np.zeros(0))
    client_samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    has_own_tests: bool = False
    client_figure: tuple[str, Declaration] = ("accuracy", Declaration())
    metrics: Mapping[str, float] = field(default_factory=dict)
    personal_accuracies: np.ndarray | None = None
    personal_samples: np.ndarray | None = None
    notes: tuple[str, ...] = ()

    @property
    def figures(self) -> dict[str, float]:
        """Figures over classes and over clients, under the names that ``rounds.parquet`` has for them."""
        name, how = self.client_figure
        figures = spread("class_accuracy", np.array(self.class_accuracies))
        figures |= spread(f"client_{name}", self.client_accuracies, mode=how.mode)
        if self.personal_accuracies is not None:
            figures |= spread("personal_accuracy", self.personal_accuracies)
        return figures

    def classes(self) -> list[dict[str, Any]]:
        """Return a row for each class: index, name (None without), accuracy (None without samples), test samples."""
        names = self.class_names or (None,) * len(self.class_accuracies)
        rows = zip(names, self.class_accuracies, self.confusion.sum(axis=1).tolist(), strict=True)
        return [
            {"class": label, "name": name, "accuracy": finite(accuracy), "samples": samples}
            for label, (name, accuracy, samples) in enumerate(rows)
        ]

    def clients(self) -> list[dict[str, Any]]:
        """Return a row for each client, with the columns of ``client_accuracy.parquet``."""
        columns: dict[str, list[Any]] = {
            "client": list(range(len(self.client_accuracies))),
            self.client_figure[0]: [finite(value) for value in self.client_accuracies.tolist()],
            "samples": self.client_samples.tolist(),
        }
        if self.personal_accuracies is not None and self.personal_samples is not None:
            columns["personal_accuracy"] = [finite(value) for value in self.personal_accuracies.tolist()]
            columns["personal_samples"] = self.personal_samples.tolist()
        return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]

    def tree(self) -> dict[str, Any]:
        """Return all of it as plain mappings, lists and scalars."""
        return {
            "data": self.data,
            "model": place_name(self.model),
            "samples": self.num_samples,
            "test_accuracy": finite(self.test_accuracy),
            "test_loss": finite(self.test_loss),
            **{name: finite(value) for name, value in self.figures.items()},
            "metrics": {name: finite(value) for name, value in self.metrics.items()},
            "classes": self.classes(),
            "clients": self.clients(),
            "confusion": self.confusion.tolist(),
            "notes": list(self.notes),
        }
