"""The sections ``runtime``, ``checkpoint`` and ``tracking``: how a run is carried out, not what it computes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from fedsweep.config.base import Auto, GpuShare, Section, Text
from fedsweep.parameters.ranges import Count, NotNegative, Positive


class Runtime(Section):
    """Where clients and server compute."""

    backend: Literal["auto", "local", "ray"] = Field(
        default="auto",
        description="local: in this process; ray: on actors; auto: ray with a client actor per CPU, local where that"
        " is one or where the clients' training is forecast to take less than a minute on one core, unless"
        " client_actors, gpus_per_client or address asks for more.",
    )
    executor: Literal["loop", "lanes", "auto"] = Field(
        default="loop",
        description="How an actor steps its clients: loop, one after another; lanes, many at once; auto, lanes where"
        " clients have a share of a GPU. Results of the two differ in the last bits.",
    )
    lanes: Auto | Count = Field(
        default="auto",
        description="Clients that are stepped at once in lanes; auto: 8, on a GPU as many as fit into its memory; never"
        " more than the cohort.",
    )
    device: Literal["auto", "cpu", "cuda", "lazy"] = Field(
        default="auto",
        description="What tensors are computed on; auto: the GPU for whoever has a share of one. With cpu and an"
        " address the shares are only reserved, of what the cluster counts as GPUs. lazy: torch's lazy device, which"
        " computes on the CPU and refuses plain CPU tensors: to try a method without a GPU.",
    )
    tf32: bool = Field(
        default=False,
        description="On a GPU: convolutions and matrix products of float32 read their factors rounded to ten bits, as"
        " torch's convolutions do unless told otherwise. Faster for large networks; results are farther from a CPU's.",
    )
    client_actors: Auto | Count = Field(default="auto", description="How many actors the clients are laid on.")
    cpus_per_client: Positive = Field(default=1.0, description="CPUs that each client actor reserves.")
    gpus_per_client: GpuShare = Field(
        default=0.0, description="Share of a GPU that each client actor is pinned to: 1/k, or a whole number."
    )
    cpus_per_server: NotNegative = Field(default=0.0, description="CPUs that the server reserves.")
    gpus_per_server: GpuShare = Field(default=0.0, description="Share of a GPU that the server reserves.")
    address: Text | None = Field(
        default=None, description='An existing Ray cluster ("auto", "host:6379"); null: start one here, end it after.'
    )

    @model_validator(mode="after")
    def _address_means_ray(self) -> Runtime:
        if self.address is not None and self.backend == "local":
            raise ValueError(
                f"an address means Ray, but got backend=local with address={self.address!r}; set backend to ray or"
                " address to null"
            )
        return self


class Checkpoint(Section):
    """Checkpoints from which a run goes on."""

    every: Count = Field(default=10, description="Rounds from one checkpoint to the next.")
    keep: Count = Field(default=2, description="How many of the newest are kept.")


class Tracking(Section):
    """Where the run is kept beside its folder."""

    uri: Text | None = Field(
        default=None, description='MLflow store; null: mlflow.db in the folder above --out; "none": no MLflow at all.'
    )
    experiment: Text = Field(
        default="fedsweep", description="MLflow experiment; a sweep that names none has one of its own."
    )
    also: list[Text] = Field(
        default=[],
        description="Further places that a run's figures go to, in its own folder: csv, tensorboard, wandb (offline);"
        " package.module:callable, or the name of an entry point in fedsweep.observers, for one's own.",
    )
