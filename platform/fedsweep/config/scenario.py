"""The section ``scenario``: the world, the same for every method in a fair comparison.

What a partition, a fleet or a drift takes is declared where it is built (:mod:`fedsweep.world`), not here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from fedsweep.config.base import Component, KindComponent, MetricEntry, Section, Text, is_empty
from fedsweep.parameters.ranges import BelowOne, Count, PositiveShare


class ProxyData(Section):
    """Data that the server keeps for methods that need it."""

    per_class: Count | None = Field(default=None, description="Samples of each class, kept of the training set.")
    labelled: bool = Field(default=True, description="Whether the method may see their labels.")
    dataset: Text | None = Field(
        default=None, description="Another data set that they are from, as scenario.dataset; its labels are not seen."
    )
    samples: Count | None = Field(default=None, description="Samples of that data set, drawn at random.")

    @model_validator(mode="after")
    def _of_one_set(self) -> ProxyData:
        if (self.per_class is None) == (self.dataset is None) or (self.samples is None) != (self.dataset is None):
            raise ValueError(
                "proxy data are {per_class: N} of the training set, or {dataset: NAME, samples: N} of another one, but"
                f" got per_class={self.per_class}, dataset={self.dataset}, samples={self.samples}"
            )
        return self


class ServerData(Section):
    """The server's part of the training set, taken before the rest is split."""

    validation: BelowOne = Field(default=0.0, description="Share of the training set kept for validation.")
    proxy: ProxyData | None = Field(
        default=None, description="Proxy data: {per_class: N, labelled: true or false} or {dataset: NAME, samples: N}."
    )


class Subset(Section):
    """A part of the data set, in place of all of it."""

    share: PositiveShare | None = Field(default=None, description="Share of the training and the test samples.")
    train: Count | None = Field(default=None, description="Training samples.")
    test: Count | None = Field(default=None, description="Test samples.")
    groups: Count | None = Field(
        default=None, description="Natural clients (writers, speakers), with their training and test samples alone."
    )
    order: Literal["random", "first", "last"] = Field(
        default="random", description="Which ones: drawn by the seed, or as the data set has them."
    )

    @model_validator(mode="after")
    def _says_how_much(self) -> Subset:
        if self.share is not None and (self.train, self.test) != (None, None):
            raise ValueError("share excludes train and test, but got both; leave one out")
        if (self.share, self.train, self.test, self.groups) == (None,) * 4:
            raise ValueError("share, train, test or groups must be given; leave the section out to have all samples")
        return self


def _of_the_run(budgets: Any) -> Any:
    """Name the kind of a budget of the whole run, which has no other parameters."""
    is_total = isinstance(budgets, dict) and "kind" not in budgets and {"total_bytes", "sim_time_s"} & budgets.keys()
    return {"kind": "total", **budgets} if is_total else budgets


def _default_partition() -> KindComponent:
    return KindComponent.model_validate({"kind": "dirichlet", "dirichlet_alpha": 0.3, "min_samples": 5})


class Devices(Component):
    """The simulated fleet; what it takes beside ``stragglers`` is declared in :mod:`fedsweep.world.devices`."""

    stragglers: KindComponent | None = Field(
        default=None,
        description="When the server stops waiting: {kind: wait} (as null), deadline, over_select, drop_out or"
        " partial.",
    )


class TaskComponent(KindComponent):
    """The task; what it takes is declared in :mod:`fedsweep.tasks`."""

    metrics: list[MetricEntry] | None = Field(
        default=None, description="What it measures, the leading figure first; written by the program."
    )


class Scenario(Section):
    """The world that every method faces alike."""

    dataset: Text = Field(
        default="digits",
        description="digits, fashion_mnist, mnist, cifar10, cifar100, svhn, femnist, cinic10, tiny_imagenet,"
        " hf:NAME or hf:./FOLDER (Hugging Face datasets), or package.module:callable.",
    )
    root: Text | None = Field(
        default=None, description="Folder that holds the data, torchvision layout; null: the user's cache."
    )
    download: bool = Field(default=True, description="false: never touch the network.")
    transform: Text = Field(
        default="normalize",
        description="normalize, dynamicfl, dynafed, fedstg, niid_bench, or package.module:callable.",
    )
    image_size: Annotated[int, Field(ge=1, le=4096)] | None = Field(
        default=None, description="Resize to N x N; null: as the data set is."
    )
    subset: Subset | None = Field(
        default=None,
        exclude_if=is_empty,
        description="Part of the samples: {share: 0.1}, {train: 500, test: 100}, {groups: 20}; null: all.",
    )
    task: TaskComponent | None = Field(
        default=None,
        exclude_if=is_empty,
        description="What is learned: {kind: classification, multi_label, regression, next_token, segmentation,"
        " generative, self_supervised}, or package.module:callable; null: the data set's own, by default"
        " classification.",
    )
    # Tables have clients' numbers as 32 bits.
    clients: Annotated[int, Field(ge=1, le=2_000_000_000)] = Field(
        default=20, description="Number of clients in the federation."
    )
    partition: KindComponent = Field(
        default_factory=_default_partition,
        description="How the data falls to clients: dirichlet, iid, classes, writer, dirichlet_balanced, quantity,"
        " mixture, drawn, flwr, or package.module:callable.",
    )
    feature_skew: KindComponent | None = Field(
        default=None,
        description="How clients' pictures differ: {kind: noise, level: 0.1}, {kind: rotation, groups: 4}; null: not.",
    )
    server_data: ServerData = Field(default_factory=ServerData, description="What the server keeps before the split.")
    drift: KindComponent | None = Field(
        default=None, description="How client data changes over rounds, e.g. {kind: cosine_rotation}; null: not at all."
    )
    availability: KindComponent | None = Field(
        default=None, description="Who is there in a round, e.g. {kind: capability}; null: all clients."
    )
    budgets: Annotated[KindComponent | None, BeforeValidator(_of_the_run)] = Field(
        default=None,
        description="Of the whole run: {total_bytes: 2 GB} or {sim_time_s: 3600}; or who affords the high rate: {kind:"
        " fixed or dynamic, budget_fraction: 0.3} or {kind: values, clients: N or a list, server: N}; null: no limit.",
    )
    devices: Devices | None = Field(
        default=None,
        description="The simulated fleet: {profile, seed, ...} with profile phone-slow, phone-lte, phone-wifi,"
        " edge-accel, flash-tiers or homogeneous, or {file: ...}; null: no virtual times.",
    )
    topology: KindComponent | None = Field(
        default=None,
        exclude_if=is_empty,
        description="Who talks with whom: {kind: star} (as null), tree, ring, exponential, random, complete or file.",
    )
