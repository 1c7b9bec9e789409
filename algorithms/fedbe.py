"""FedBE: the server distils a Bayesian ensemble, models drawn around the clients', into their average.

Source: Chen, Chao (2021): FedBE: making Bayesian model ensemble applicable to federated learning. ICLR. Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedsweep import Card, ConfigError, FederatedMethod, Limit, Stream, with_card
from fedsweep.components import (
    SGD,
    BelowOne,
    ClientUpdate,
    ComponentReport,
    Count,
    CountOrZero,
    NotNegative,
    Positive,
    Refinement,
    ServerContext,
    Share,
    State,
    SyncContext,
    by_samples,
    taken,
    takes,
)

from .parts.distilling import BatchNorm, Student, batches
from .parts.ensembles import ensemble_logits, model_logits, server_inputs

Posterior = Literal["gaussian", "authors", "dirichlet"]


@dataclass(frozen=True, kw_only=True)
class BayesianEnsemble(Refinement):
    """SGD with averaged weights on ``KL(sharpened mean of the teachers' probabilities || student)``.

    The teachers are models drawn around the clients', the aggregate, and the clients' models.

    Attributes:
        posterior: gaussian: around the clients' mean, each value with their variance (the paper); authors: around the
            mean of their normalised moves, per tensor, with spread 0.1 (the program); dirichlet: random convex
            combinations of the clients' models.
        samples: Models drawn from it.
        spread: Factor of its standard deviation; the concentration of dirichlet.
        with_average: The average is a teacher, too.
        with_clients: The clients' models are teachers, too.
        sharpening: The teachers' mean probabilities are taken to the power of 1 / this.
        epochs: Passes over the proxy data a round; 0 is FedAvg bit for bit.
        learning_rate: The server's SGD.
        momentum: The server's SGD.
        weight_decay: The server's SGD.
        batch_size: Proxy samples a step.
        average_from: Share of the steps before the student's weights are averaged; 0.32 is the authors' 500 of 1,580.
        average_every: Steps between two of the averaged weights.
        batch_norm: proxy: batch norm's statistics follow the proxy data; frozen: they stay the clients' mean.

    Source: Chen and Chao (2021), Algorithm 1 and section 4; the program's constants. Reading: drawn models have the
    aggregate's buffers, since drawn variances could be negative; a run too short to be averaged keeps its last weights.
    """

    needs_updates: ClassVar[bool] = True
    posterior: Posterior = "gaussian"
    samples: CountOrZero = 10
    spread: NotNegative = 1.0
    with_average: bool = True
    with_clients: bool = True
    sharpening: Positive = 0.5
    epochs: CountOrZero = 20
    learning_rate: Positive = 1e-3
    momentum: BelowOne = 0.9
    weight_decay: NotNegative = 1e-5
    batch_size: Count = 128
    average_from: Share = 0.32
    average_every: Count = 25
    batch_norm: BatchNorm = "proxy"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.posterior == "dirichlet" and not self.spread:
            raise ConfigError("method.spread must be a number > 0 with posterior dirichlet, but got 0")
        if not (self.samples or self.with_average or self.with_clients):
            raise ConfigError("fedbe needs teachers; set method.samples, method.with_average or method.with_clients")

    @property
    def needs_whole_models(self) -> bool:
        """Models are drawn around whole ones; with ``samples=0`` none are drawn."""
        return bool(self.samples)

    @property
    def asks_models(self) -> bool:
        return self.with_clients

    def init(self, context: ServerContext) -> State:
        server_inputs(context, "fedbe")  # refuses a server without
        return {"loss": None}

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        inputs = server_inputs(sync, "fedbe")
        targets = self._targets(vector, updates, sync, inputs)
        student = Student(vector, sync, batch_norm=self.batch_norm)
        optimizer = SGD(
            student.module.parameters(),
            lr=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            foreach=False,
        )
        steps = self.epochs * max(1, len(targets) // self.batch_size)
        size, total, averaged, losses = sync.layout.num_params, torch.zeros(()), 0, []
        for step, index in enumerate(batches(len(targets), self.batch_size, sync.stream, steps=steps), start=1):
            losses.append(student.step(optimizer, taken(inputs, index), targets[index]))
            if step >= self.average_from * steps and step % self.average_every == 0:
                total, averaged = total + student.vector()[:size].double(), averaged + 1
                sync.working(f"distilling: step {step} of {steps}, loss {losses[-1]:.4f}")
        refined = student.vector()
        if averaged:
            refined[:size] = total / averaged
            # Averaged weights have activations of their own, which the last student's statistics do not fit.
            refined = student.with_statistics(refined, inputs) if self.batch_norm == "proxy" else refined
        return refined, {"loss": sum(losses) / len(losses)}

    def _targets(self, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext, inputs: Tensor) -> Tensor:
        """Return the teachers' sharpened mean probabilities [B, C]."""
        logits = [ensemble_logits(updates, sync, inputs)] if self.with_clients else []
        full = ([vector] if self.with_average else []) + self._drawn(vector, updates, sync)
        if full:
            logits.append(model_logits(full, sync, inputs))
        sharp = torch.cat(logits).softmax(dim=2).mean(dim=0) ** (1 / self.sharpening)
        return sharp / sharp.sum(dim=1, keepdim=True)

    def _drawn(self, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext) -> list[Tensor]:
        if not self.samples:
            return []
        params = slice(sync.layout.num_params)
        rows = self.draws(
            torch.stack([u.vector[params] for u in updates if u.vector is not None]),
            by_samples(updates),
            start=sync.vector[params],
            shapes=[value.numel() for value in sync.layout.params(sync.vector).values()],
            stream=sync.stream.child("posterior"),
        )
        return [torch.cat([row.to(vector.dtype), vector[params.stop :]]) for row in rows]

    def draws(
        self, models_MP: Tensor, samples_M: Tensor, *, start: Tensor, shapes: list[int], stream: Stream
    ) -> Tensor:
        """Return parameters [samples, P] drawn from the posterior.

        Args:
            models_MP: The clients' parameters.
            samples_M: Their numbers of samples, or shares.
            start: What they started from [P].
            shapes: Values in each of the model's tensors, in order; they sum to P.
            stream: Where the numbers come from.

        Source: Chen and Chao (2021), section 3.2. Reading: in the program the variance of normalised moves is at least
        1e-5, and a client that did not move counts as a move of 0.
        """
        models, shares = models_MP.double(), samples_M.double() / samples_M.sum()
        if self.posterior == "dirichlet":
            mixes = torch.from_numpy(stream.numpy().dirichlet([self.spread] * len(models), size=self.samples))
            mixes = mixes * samples_M.double()
            return (mixes / mixes.sum(dim=1, keepdim=True)) @ models
        noise = torch.randn(self.samples, models.shape[1], generator=stream.torch(), dtype=torch.float64)
        if self.posterior == "gaussian":
            mean = shares @ models
            return mean + self.spread * (shares @ (models - mean).square()).sqrt() * noise
        parts = []
        moved = (models - start).split(shapes, dim=1)  # type: ignore[no-untyped-call]
        for moves, own in zip(moved, noise.split(shapes, dim=1), strict=True):  # type: ignore[no-untyped-call]
            norms = moves.norm(dim=1, keepdim=True)
            directions = torch.where(norms > 0, moves / norms, 0.0)
            deviation = directions.var(dim=0, correction=0).clamp_min(1e-5).sqrt()
            parts.append(norms.mean() * (directions.mean(dim=0) + self.spread * deviation * own))
        return start.double() + torch.cat(parts, dim=1)

    def report(self, state: State) -> ComponentReport:
        return ComponentReport(metrics={} if state["loss"] is None else {"distillation_loss": state["loss"]})


@with_card(
    Card(
        title="FedBE",
        source="Chen and Chao, ICLR 2021",
        needs=("proxy", "classes"),
        limits=(Limit(given={"epochs": 0}),),
        live=("distillation_loss",),
        small={"epochs": 3, "average_every": 2, "batch_size": 8},
    )
)
@takes(BayesianEnsemble)
def fedbe(**parameters: Any) -> FederatedMethod:
    """FedAvg, then distillation of a Bayesian ensemble on the server's unlabelled data."""
    refinements = (BayesianEnsemble(**parameters),) if parameters["epochs"] else ()
    return FederatedMethod(name="fedbe", refinements=refinements)
