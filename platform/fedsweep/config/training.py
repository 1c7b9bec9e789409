"""The sections ``training`` and ``evaluation``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from fedsweep.config.base import (
    Auto,
    CountOrRange,
    KindComponent,
    MetricEntry,
    Section,
    Text,
    is_empty,
)
from fedsweep.parameters.byte_counts import Bytes
from fedsweep.parameters.ranges import BelowOne, Count, NotNegative, Positive, PositiveShare


class OptimizerGroup(Section):
    """Parameters that are stepped otherwise than the rest."""

    match: Text = Field(
        description="A parameter's name, a layer's path, or the end of either: classifier, bias, blocks.*.norm."
    )
    rate: NotNegative = Field(default=1.0, description="Multiple of the learning rate; 0: they stay as they are.")
    weight_decay: NotNegative | None = Field(default=None, description="In place of the optimiser's; null: that one.")


Groups = Annotated[
    list[OptimizerGroup],
    Field(
        exclude_if=is_empty,
        description="Parameters with rates or decays of their own: [{match: classifier, rate: 0.1}, {match: bias,"
        " weight_decay: 0}]; a parameter goes by the first that it matches.",
    ),
]


class Sgd(Section):
    """Stochastic gradient descent."""

    name: Literal["sgd"] = "sgd"
    lr: Positive = Field(default=0.05, description="Learning rate before any schedule.")
    momentum: BelowOne = Field(default=0.0, description="Share of the last step's direction that is kept.")
    nesterov: bool = Field(default=False, description="Nesterov's form of momentum.")
    weight_decay: NotNegative = Field(default=0.0, description="Multiple of the parameters added to the gradient.")
    groups: Groups = Field(default_factory=list)

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Sgd:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs momentum > 0, but got momentum=0; set it or leave nesterov out")
        return self


class Adam(Section):
    """Adam (Kingma and Ba, 2015)."""

    name: Literal["adam"] = "adam"
    lr: Positive = Field(default=1e-3, description="Learning rate before any schedule.")
    mean_decay: BelowOne = Field(default=0.9, description="Decay of the gradients' mean (beta 1).")
    square_decay: BelowOne = Field(default=0.999, description="Decay of their squares' mean (beta 2).")
    epsilon: Positive = Field(default=1e-8, description="Added to the denominator.")
    weight_decay: NotNegative = Field(default=0.0, description="Multiple of the parameters added to the gradient.")
    groups: Groups = Field(default_factory=list)


Optimizer = Annotated[Sgd | Adam, Field(discriminator="name")]


class Schedule(KindComponent):
    """Change of the learning rate; its parameters are declared in :mod:`fedsweep.experiment.schedules`."""

    @model_serializer(mode="wrap")
    def _as_word(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any] | str:
        # A word where there are no parameters: checkpoints are known by the hash of what is written here.
        tree: dict[str, Any] = dump(self)
        return tree if self.parameters else self.kind


def _as_mapping(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


class MetricTarget(Section):
    """A value of a figure of the test."""

    metric: Text = Field(description="A column of rounds.parquet: one of the task's figures, or of evaluation.metrics.")
    value: float = Field(description="Reached where the figure is at least as good: up or down, as the metric says.")


class Stop(Section):
    """Limits that end a run before its last round."""

    target: MetricTarget | None = Field(
        default=None,
        exclude_if=is_empty,
        description="{metric: rmse, value: 0.6}: ends after the round whose test reaches it, whichever way is better.",
    )

    target_accuracy: PositiveShare | None = Field(
        default=None, description="Ends after the round whose test accuracy reaches it."
    )
    total_bytes: Bytes | None = Field(
        default=None,
        description="Ends before the first round with which more bytes would have been sent, before round 1 or since: a"
        " number, or 50 MB, 2 GB, ...",
    )
    sim_time_s: Positive | None = Field(
        default=None, description="Ends before the first round that would pass this virtual time."
    )
    wall_time_s: Positive | None = Field(default=None, description="Ends after the round that reached this real time.")


class Training(Section):
    """Local training, and its length in rounds."""

    rounds: Count = Field(default=20, description="Number of rounds.")
    cohort_fraction: PositiveShare | None = Field(
        default=0.5, description="Share of all clients in a round, capped by who is there."
    )
    cohort_size: Count | None = Field(default=None, description="Clients in a round, in place of cohort_fraction.")
    local_epochs: CountOrRange | None = Field(
        default=1, description="Passes over a client's data per round; {range: [3, 5]}: drawn once per client."
    )
    local_steps: CountOrRange | Auto | None = Field(
        default=None,
        description="Gradient steps per client and round, in place of local_epochs; auto: by local_epochs, equally many"
        " for all clients, floor(samples of all clients x local_epochs / (clients x batch_size)) (DynamicFL, Eq. 4)."
        " Each batch then has batch_size samples, some of them more than once where a client has fewer.",
    )
    equal_steps: bool | None = Field(
        default=None,
        description="With local_epochs: whether all clients take equally many steps, in batches as of local_steps;"
        " null: as the method asks.",
    )
    batch_size: CountOrRange = Field(default=10, description="Samples per step; {range: [32, 64]}: drawn per client.")
    optimizer: Optimizer = Field(default_factory=Sgd, description="How clients step: sgd or adam.")
    clip_norm: Positive | None = Field(default=None, description="Largest norm of a gradient; null: any.")
    optimizer_state: Literal["reset", "persist", "average"] = Field(
        default="reset",
        description="At each participation: start anew, go on with the client's own, or move it with the model.",
    )
    schedule: Annotated[Schedule, BeforeValidator(_as_mapping, json_schema_input_type=Text | Schedule)] = Field(
        default_factory=lambda: Schedule(kind="constant"),
        description="The learning rate over rounds: constant, {kind: cosine, floor: 1.0e-4},"
        " {kind: exponential, decay: 0.99}, fedstg, or package.module:callable.",
    )
    stop: Stop = Field(default_factory=Stop, description="Limits that end the run early.")

    @model_validator(mode="after")
    def _auto_has_epochs(self) -> Training:
        if self.local_steps == "auto" and self.local_epochs is None:
            raise ValueError("local_steps: auto goes by local_epochs, but that is null; give a number of passes")
        if self.local_steps == "auto" and self.equal_steps is False:
            raise ValueError(
                "local_steps: auto means equally many steps for all clients, but got equal_steps=False; leave one out"
            )
        return self

    @model_validator(mode="after")
    def _one_of_each_pair(self) -> Training:
        for first, second in EXCLUSIVE_KEYS:
            set_keys = [key for key in (first, second) if getattr(self, key) not in NO_NUMBER]
            if not set_keys:
                raise ValueError(f"one of {first} and {second} must be given, but both are null")
            if len(set_keys) == 2:
                raise ValueError(
                    f"{first} and {second} exclude each other, but got {first}={_shown(getattr(self, first))} and"
                    f" {second}={_shown(getattr(self, second))}; leave one out or set it to null"
                )
        return self


def _shown(value: Any) -> Any:
    return value.model_dump(mode="json") if isinstance(value, Section) else value


EXCLUSIVE_KEYS = (("cohort_fraction", "cohort_size"), ("local_epochs", "local_steps"))
# Values with which a key excludes no other.
NO_NUMBER = (None, "auto")


def _as_metric(entry: Any) -> Any:
    return {"name": entry} if isinstance(entry, str) else entry


Metric = Annotated[MetricEntry, BeforeValidator(_as_metric, json_schema_input_type=Text | MetricEntry)]


class EvaluationSection(Section):
    """When and how the global model is tested."""

    every: Count = Field(default=1, description="Rounds from one evaluation to the next; the last is always evaluated.")
    batch_size: Count = Field(default=1000, description="Test samples per forward pass.")
    per_client: bool = Field(
        default=False,
        description="Also the accuracy by class, and for each client on its own test samples or, where the data do not"
        " tell them apart, on the classes that it holds, from the same pass: columns of rounds.parquet, and"
        " client_accuracy.parquet.",
    )
    targets: list[PositiveShare] = Field(
        default_factory=list,
        description="Test accuracies; the round, virtual time, bytes and FLOPs that first reached each go to"
        " result.json and MLflow.",
    )
    metrics: list[Metric] = Field(
        default_factory=list,
        description="Further figures of each test, by name or as {name, mode, unit, chance}: macro_f1,"
        " balanced_accuracy, top5_accuracy, brier_score, or package.module:callable.",
    )

    @field_validator("targets")
    @classmethod
    def _differ(cls, targets: list[float]) -> list[float]:
        if len(set(targets)) < len(targets):
            raise ValueError(f"targets must differ, but got {targets}")
        return targets
