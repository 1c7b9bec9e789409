"""The whole configuration: every key, its default and what it means."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import (
    Field,
    PrivateAttr,
    field_validator,
    model_validator,
)

from fedsweep.config import yaml12
from fedsweep.config.base import KindComponent, NamedComponent, Section, Text, is_empty
from fedsweep.config.communication import Communication, Planner
from fedsweep.config.execution import Checkpoint, Runtime, Tracking
from fedsweep.config.scenario import Scenario
from fedsweep.config.sweep import Sweep
from fedsweep.config.training import EvaluationSection, Training

Scalar = str | int | float | bool | None


class Model(NamedComponent):
    """The network; its options stand beside the name."""

    init_from: Text | None = Field(
        default=None,
        exclude_if=is_empty,
        description="A finished run's folder or a .safetensors file: initial values in place of drawn ones.",
    )
    init_sha256: str | None = Field(
        default=None,
        exclude_if=is_empty,
        pattern="^[0-9a-f]{64}$",
        description="That file's SHA-256; a run's config.yaml has it.",
    )
    adapter: KindComponent | None = Field(
        default=None,
        exclude_if=is_empty,
        description="What is trained on a frozen base: {kind: lora, rank: 8, targets: [...]}, {kind: part,"
        " train: [...]} or package.module:callable; null: the whole network.",
    )


class Config(Section):
    """One experiment; with a ``sweep`` section, many.

    Made by :func:`fedsweep.config.load_config`, which keeps what was given, so that values can be laid over it later.
    """

    name: str = Field(
        default="my-experiment",
        min_length=1,
        description="MLflow run name, and part of the output folder's; without slashes.",
    )
    seed: int = Field(default=0, ge=0, description="Everything random follows from it.")
    scenario: Scenario = Field(default_factory=Scenario, description="The world.")
    model: Model = Field(
        default_factory=lambda: Model(name="mlp"),
        description="mlp, cnn, lenet5, feddhad_cnn, convnet3, fedstg_cnn, resnet18, feddhad_resnet18, vgg11,"
        " vit_tiny, or package.module:callable; its options stand beside the name, and init_from: a finished run's"
        " folder or a .safetensors file to begin with.",
    )
    method: dict[str, Any] = Field(
        default_factory=lambda: {"name": "fedavg"},
        description="{name: ...} with the method's parameters beside the name, or {merge: [{name: ...}, ...]}.",
    )
    training: Training = Field(default_factory=Training, description="How clients train, and for how long.")
    communication: Communication = Field(
        default_factory=Communication,
        exclude_if=lambda section: section == Communication(),
        description="What messages go through.",
    )
    planner: Planner | None = Field(
        default=None,
        exclude_if=is_empty,
        description="Spends scenario.budgets {total_bytes: 2 GB}, or a limit of training.stop, among choices that it is"
        " allowed; null: rounds are all alike.",
    )
    evaluation: EvaluationSection = Field(
        default_factory=EvaluationSection, description="When the global model is tested."
    )
    runtime: Runtime = Field(default_factory=Runtime, description="Where it is computed.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="What a run leaves to go on from.")
    tracking: Tracking = Field(default_factory=Tracking, description="Where MLflow keeps the run.")
    sweep: Sweep = Field(default_factory=Sweep, description="What fedsweep sweep tries.")

    _given: dict[str, Any] = PrivateAttr(default_factory=dict)
    _bound: dict[str, Any] = PrivateAttr(default_factory=dict)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Config:
        """Copy; the catalog binds what was updated anew, and what it binds of the copy is not the original's."""
        copy = super().model_copy(update=update, deep=deep)
        copy._bound = {key: item for key, item in self._bound.items() if key.partition(".")[0] not in (update or {})}
        return copy

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.tree() == other.tree()

    @property
    def given(self) -> dict[str, Any]:
        """Return the user's own tree, before defaults: file and overrides as one."""
        return self._given

    @property
    def bound(self) -> dict[str, Any]:
        """Return the builders that :mod:`fedsweep.catalog` has bound so far, by key: a configuration never changes."""
        return self._bound

    @field_validator("name")
    @classmethod
    def _fits_a_folder(cls, name: str) -> str:
        if not name.isprintable() or set(name) & set("/\\"):
            raise ValueError(
                f"it becomes part of a folder's name, so it must be one line without slashes, but is {name!r}"
            )
        return name

    @field_validator("method")
    @classmethod
    def _names_or_merges(cls, method: dict[str, Any]) -> dict[str, Any]:
        if ("name" in method) == ("merge" in method):
            raise ValueError(f"exactly one of name and merge must be given, but got {method!r}")
        if "name" in method:
            if not isinstance(method["name"], str) or not method["name"]:
                raise ValueError(f"name must be a method's name, but got {method['name']!r}")
            return method
        parts = method["merge"]
        if not isinstance(parts, list) or not parts or len(method) > 1:
            raise ValueError(f"merge must be a list of methods and stand alone, but got {method!r}")
        for part in parts:
            if not isinstance(part, dict) or not isinstance(part.get("name"), str):
                raise ValueError(f"each method of merge must be a mapping with a name, but one is {part!r}")
        return method

    @model_validator(mode="after")
    def _cohort_fits(self) -> Config:
        size, clients = self.training.cohort_size, self.scenario.clients
        if size is not None and size > clients:
            raise ValueError(
                f"training.cohort_size <= scenario.clients must hold, but got training.cohort_size={size},"
                f" scenario.clients={clients}; lower the one or raise the other"
            )
        return self

    def tree(self) -> dict[str, Any]:
        """Return the resolved configuration as plain mappings, lists and scalars, in the order of the schema."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """Return the resolved configuration as YAML; loading it gives an equal one."""
        return yaml12.dump(self.tree())

    def flat(self) -> dict[str, Scalar]:
        """Return dotted key -> scalar, as MLflow's params want it; lists of scalars become JSON text."""
        return dict(_flatten("", self.tree()))

    def hash(self) -> str:
        """Return the SHA-256 (hexadecimal) of everything that affects results.

        Left out: the name, where data and initial values lie, the targets (they are read off the results), accuracies
        by client and metrics where nobody asks for them, the runtime but for its executor, lanes and TF32,
        tracking, checkpoints, sweep.
        """
        tree = self.tree()
        for key in ("name", "tracking", "checkpoint", "sweep"):
            del tree[key]
        for key in ("root", "download"):
            del tree["scenario"][key]
        tree["scenario"].get("task", {}).pop("metrics", None)
        tree["model"].pop("init_from", None)
        tree["model"].get("adapter", {}).pop("base", None)
        del tree["evaluation"]["targets"]
        if not tree["evaluation"]["per_client"]:
            del tree["evaluation"]["per_client"]
        if not tree["evaluation"]["metrics"]:
            del tree["evaluation"]["metrics"]
        runtime = tree["runtime"] = {key: tree["runtime"][key] for key in ("executor", "lanes", "tf32")}
        # Where clients are stepped one by one, how many would be stepped at once means nothing.
        if runtime["executor"] == "loop":
            del runtime["lanes"]
        if not runtime["tf32"]:
            del runtime["tf32"]
        canonical = json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}


def _flatten(prefix: str, value: Any) -> list[tuple[str, Scalar]]:
    if isinstance(value, dict) and value:
        below = [_flatten(f"{prefix}.{key}" if prefix else key, item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        below = [_flatten(f"{prefix}.{position}", item) for position, item in enumerate(value)]
    else:
        return [(prefix, json.dumps(value) if isinstance(value, dict | list) else value)]
    return [pair for pairs in below for pair in pairs]
