"""The fit of a client's label divergence to its non-IID degree, from a finished run's folder.

    divergence JS_k    Jensen-Shannon from the population's labels, in nats, as FedDH has it
    loss F_k(w)        mean cross-entropy on the client's samples, in evaluation mode and without augmentation
    degree             F_k(w*) - F_k(w_k*), at least 0: at the global optimum against at the client's own

Source: Liu et al. 2025 (FedDHAD), Figure 7. Reading: w* is the run's last global model; w_k* is found from there, by
Adam on the client's samples alone until their loss stops falling.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsweep.config.load import load_config
from fedsweep.experiment.build import build_experiment
from fedsweep.experiment.experiment import Experiment
from fedsweep.figures.style import name_axes
from fedsweep.finished.saved_model import load_model
from fedsweep.papers.model_measures import once_per_run, samples_of
from fedsweep.reproduce.figures.scene import Scene, panels_of
from fedsweep.results.view import RunView
from fedsweep.runs.run_folder import CONFIG
from fedsweep.streams import stream
from fedsweep.world.label_stats import js_divergence, population

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Training alone: it ends when so many epochs in a row lower the loss by less than this share, or after the last.
_RATE, _BATCH, _MOST_EPOCHS = 1e-3, 50, 100
_PATIENCE, _WORTH = 3, 0.01


@dataclass(frozen=True, kw_only=True)
class ClientGaps:
    """The clients of one cell.

    Attributes:
        divergence: JS_k [N], 0..ln 2.
        loss: F_k(w*) [N], at least 0.
        own_loss: F_k(w_k*) [N], at most ``loss``.
    """

    divergence: np.ndarray
    loss: np.ndarray
    own_loss: np.ndarray

    @property
    def gap(self) -> np.ndarray:
        """The non-IID degree F_k(w*) - F_k(w_k*) [N]."""
        gap: np.ndarray = self.loss - self.own_loss
        return gap

    def figures(self) -> dict[str, float | None]:
        """Return the correlations by a measure's name ``of``; None where divergences or gaps are all equal."""
        from scipy.stats import rankdata

        pearson = correlation(self.divergence, self.gap)
        return {
            "gap_pearson": pearson,
            "gap_r2": None if pearson is None else pearson**2,
            "gap_spearman": correlation(rankdata(self.divergence), rankdata(self.gap)),
        }


def correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    """Compute Pearson's coefficient, -1..1; None where one of the two does not vary."""
    from scipy.stats import pearsonr

    return float(pearsonr(x, y).statistic) if np.ptp(x) > 0 and np.ptp(y) > 0 else None


def client_gaps(experiment: Experiment, model: nn.Module) -> ClientGaps:
    """Tests a model, which stays as it is, on every client's samples; and when the client trains it further alone."""
    world = experiment.world
    counts_NC = np.stack([profile.label_counts for profile in world.profiles])
    losses = []
    for client in range(len(world.indices)):
        inputs, targets = samples_of(experiment, client)
        source = stream(experiment.seed, "own-optimum", client)
        with source.child("network").drawn_globally():
            losses.append(own_optimum(copy.deepcopy(model), inputs, targets, order=source.torch()))
    return ClientGaps(
        divergence=js_divergence(counts_NC, population(counts_NC)),
        loss=np.array([before for before, _ in losses]),
        own_loss=np.array([best for _, best in losses]),
    )


def own_optimum(model: nn.Module, inputs: Tensor, targets: Tensor, *, order: torch.Generator) -> tuple[float, float]:
    """Compute the loss on a client's samples as the model is, and the lowest that training on them alone reaches.

    Args:
        model: Where to begin; it is trained.
        inputs: The samples [n, ...].
        targets: Their classes [n].
        order: Draws the batches.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE, foreach=False)
    before = best = _loss(model, inputs, targets)
    since = 0
    for _ in range(_MOST_EPOCHS):
        model.train()
        for batch in torch.split(torch.randperm(len(inputs), generator=order), _BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[batch]), targets[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        loss = _loss(model, inputs, targets)
        since = 0 if loss < (1 - _WORTH) * best else since + 1
        best = min(best, loss)
        if since >= _PATIENCE:
            break
    return before, best


def _loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    model.eval()
    with torch.no_grad():
        return float(F.cross_entropy(model(inputs), targets, reduction="none").to(torch.float64).mean())


@once_per_run
def gaps_of(folder: Path) -> ClientGaps:
    """Return the clients of a finished run.

    Raises:
        InputError: The folder is damaged, or its data set is not there.
    """
    return client_gaps(build_experiment(load_config(folder / CONFIG)), load_model(folder))


def gap_figure(scene: Scene) -> Figure:
    """Return a point for each client: its labels' divergence, and its loss above that at its optimum."""
    figure, shown = panels_of(scene, lambda run: gaps_of(run.folder), "clients")
    for axes, _, gaps in shown:
        axes.scatter(gaps.divergence, gaps.gap, s=10)
        pearson = gaps.figures()["gap_pearson"]
        if pearson is not None:
            axes.set_title(f"{axes.get_title()} (Pearson {pearson:.3f})".strip())
        name_axes(axes, x="JS divergence (nats)", y="Non-IID degree (nats)")
    return figure


def gap_pearson(run: RunView) -> float | None:
    """Compute Pearson's coefficient of divergence and degree over a finished run's clients, -1..1."""
    return gaps_of(run.folder).figures()["gap_pearson"]


def gap_r2(run: RunView) -> float | None:
    """Return the square of :func:`gap_pearson`, 0..1."""
    return gaps_of(run.folder).figures()["gap_r2"]


def gap_spearman(run: RunView) -> float | None:
    """Return the same of ranks, -1..1."""
    return gaps_of(run.folder).figures()["gap_spearman"]
