"""FedDF: the server distils the ensemble of the clients' models into their average, on data without labels.

Source: Lin, Kong, Stich, Jaggi (2020): Ensemble distillation for robust model fusion in federated learning. NeurIPS.
Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor

from fedsweep import Card, ConfigError, FederatedMethod, Limit, with_card
from fedsweep.components import (
    Adam,
    ClientUpdate,
    ComponentReport,
    Count,
    CountOrZero,
    Positive,
    Refinement,
    ServerContext,
    State,
    SyncContext,
    taken,
    takes,
)

from .parts.distilling import BatchNorm, Student, batches, cosine_rate
from .parts.ensembles import ensemble_logits, server_inputs

Keep = Literal["best", "last"]


@dataclass(frozen=True, kw_only=True)
class Distilled(Refinement):
    """Adam steps on ``KL(softmax(mean of the clients' logits / T) || student)`` from the aggregate.

    Attributes:
        steps: Of the distillation a round, at most; 0 is FedAvg bit for bit. The paper's number is for tens of
            thousands of proxy samples.
        patience: Steps without a better validation accuracy after which it ends.
        check_every: Steps from one validation to the next.
        learning_rate: Adam's; falls to 0 along half a cosine.
        batch_size: Proxy samples a step.
        temperature: Of the softmax, on both sides.
        clip_norm: Greatest norm of a gradient.
        keep: best: the student that was best on the validation data; last; null: best where the scenario has
            validation data.
        batch_norm: proxy: batch norm's statistics follow the proxy data; frozen: they stay the clients' mean.

    Source: Lin et al. (2020), Algorithm 1, and the authors' program: logits are averaged, not probabilities; no factor
    T^2; the best student is kept, against which the average itself does not compete. Reading: the last step is
    validated, too, so that short runs have a best student.
    """

    needs_updates: ClassVar[bool] = True
    steps: CountOrZero = 10_000
    patience: Count = 1_000
    check_every: Count = 100
    learning_rate: Positive = 1e-3
    batch_size: Count = 128
    temperature: Positive = 1.0
    clip_norm: Positive = 5.0
    keep: Keep | None = None
    batch_norm: BatchNorm = "proxy"

    @property
    def asks_models(self) -> bool:
        return True

    def init(self, context: ServerContext) -> State:
        """Return the state before the first distillation.

        Raises:
            ConfigError: Data is needed but not there.
        """
        if self.keep == "best" and context.validation_data is None:
            raise ConfigError(
                "method.keep=best needs validation data on the server, but the scenario has none; set"
                " scenario.server_data.validation=0.05, say, or method.keep=last"
            )
        server_inputs(context, "feddf")  # refuses a server without
        return {"loss": None, "steps": 0}

    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        inputs = server_inputs(sync, "feddf")
        validation = None if self.keep == "last" else sync.validation_data
        targets = (ensemble_logits(updates, sync, inputs).mean(dim=0) / self.temperature).softmax(dim=1)
        student = Student(vector, sync, batch_norm=self.batch_norm)
        optimizer = Adam(student.module.parameters(), lr=self.learning_rate, foreach=False)
        # Below every accuracy, so that the first student that is validated is kept whatever it knows.
        best_vector, best, best_step, losses = vector, -1.0, 0, []
        for step, index in enumerate(batches(len(targets), self.batch_size, sync.stream, steps=self.steps), start=1):
            optimizer.param_groups[0]["lr"] = self.learning_rate * cosine_rate(step - 1, self.steps)
            losses.append(
                student.step(
                    optimizer,
                    taken(inputs, index),
                    targets[index],
                    temperature=self.temperature,
                    clip_norm=self.clip_norm,
                )
            )
            if step % self.check_every and step < self.steps:
                continue
            sync.working(f"distilling: step {step} of {self.steps}, loss {losses[-1]:.4f}")
            accuracy = 0.0 if validation is None else student.accuracy(*validation)
            if validation is None or accuracy > best:
                best_vector, best, best_step = student.vector(), accuracy, step
            elif step - best_step >= self.patience:
                break
        return best_vector, {"loss": sum(losses) / len(losses), "steps": len(losses)}

    def report(self, state: State) -> ComponentReport:
        if state["loss"] is None:
            return ComponentReport()
        return ComponentReport(metrics={"distillation_loss": state["loss"], "distillation_steps": state["steps"]})


@with_card(
    Card(
        title="FedDF",
        source="Lin et al., NeurIPS 2020",
        needs=("proxy", "classes"),
        limits=(Limit(given={"steps": 0}),),
        live=("distillation_loss", "distillation_steps"),
        small={"steps": 10, "check_every": 5, "batch_size": 8},
    )
)
@takes(Distilled)
def feddf(**parameters: Any) -> FederatedMethod:
    """FedAvg, then ensemble distillation on the server's unlabelled data."""
    refinements = (Distilled(**parameters),) if parameters["steps"] else ()
    return FederatedMethod(name="feddf", refinements=refinements)
