"""How well a client's label divergence tells its gap in loss, from a finished run's folder.

The run's last global model w is tested on every client's own training samples, and over the clients the gap is
correlated with the divergence of their labels from the population's.

    divergence JS_k    Jensen-Shannon, in nats, as FedDH has it
    loss F_k(w)        mean cross-entropy on the client's samples, without augmentation
    gap                |F_k(w) - F(w)| with F = sum_k n_k F_k / sum_k n_k, the global loss

Source: Liu et al. 2025 (FedDHAD), Figure 7. Reading: the paper correlates the divergence with a degree that comes from
the gap between a device's loss and the global one; at which model, and whether with its sign, is not known to us. We
take the last global model of the cell's method and the absolute value, since a divergence has no sign: a device whose
labels are all of an easy class lies as far off as one whose labels are all of a hard one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedsweep.api import load_model
from fedsweep.components.evaluation import Evaluation, GlobalModel
from fedsweep.config.load import load_config
from fedsweep.engine.evaluator import Evaluator
from fedsweep.experiment.build import build_experiment
from fedsweep.experiment.experiment import Experiment
from fedsweep.runs.run_folder import CONFIG
from fedsweep.world.label_stats import js_divergence, population


@dataclass(frozen=True, kw_only=True)
class ClientGaps:
    """The clients of one cell.

    Attributes:
        num_samples: n_k [N].
        divergence: JS_k [N], 0..ln 2.
        loss: F_k(w) [N], at least 0.
    """

    num_samples: np.ndarray
    divergence: np.ndarray
    loss: np.ndarray

    @property
    def signed_gap(self) -> np.ndarray:
        """F_k(w) - F(w) [N]; its mean weighted by samples is 0."""
        gap: np.ndarray = self.loss - np.average(self.loss, weights=self.num_samples)
        return gap

    @property
    def gap(self) -> np.ndarray:
        """|F_k(w) - F(w)| [N]."""
        gap: np.ndarray = np.abs(self.signed_gap)
        return gap

    def figures(self) -> dict[str, float | None]:
        """The correlations by the name that a measure's ``of`` has; None where divergences or gaps are all equal."""
        from scipy.stats import rankdata

        return {
            "gap_pearson": correlation(self.divergence, self.gap),
            "gap_spearman": correlation(rankdata(self.divergence), rankdata(self.gap)),
            "gap_pearson_signed": correlation(self.divergence, self.signed_gap),
        }


def correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    """Pearson's coefficient, -1..1; None where one of the two does not vary."""
    from scipy.stats import pearsonr

    return float(pearsonr(x, y).statistic) if np.ptp(x) > 0 and np.ptp(y) > 0 else None


def client_gaps(experiment: Experiment, model: nn.Module) -> ClientGaps:
    """Tests a model on every client's samples.

    Args:
        experiment: Whose clients.
        model: A network with its values.
    """
    world = experiment.world
    counts_NC = np.stack([profile.label_counts for profile in world.profiles])
    evaluation: Evaluation = GlobalModel()
    losses = []
    for indices in world.indices:
        evaluator = Evaluator(
            world.data.images[indices],
            world.data.labels[indices],
            transform=world.data.transform,
            batch_size=experiment.evaluation_batch,
            device="cpu",
            dtype=torch.get_default_dtype(),
        )
        losses.append(evaluator.test(evaluation, {}, model, ())[1])
    return ClientGaps(
        num_samples=counts_NC.sum(axis=1),
        divergence=js_divergence(counts_NC, population(counts_NC)),
        loss=np.array(losses),
    )


@lru_cache(maxsize=32)
def gaps_of(folder: Path) -> ClientGaps:
    """The clients of a finished run.

    Args:
        folder: Its folder; what it holds is not read again.

    Raises:
        InputError: The folder is damaged, or its data set is not there.
    """
    return client_gaps(build_experiment(load_config(folder / CONFIG)), load_model(folder))
