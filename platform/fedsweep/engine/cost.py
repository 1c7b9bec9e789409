"""Costs: a sub-model's MACs and FLOPs, what a message that carries it counts, and a round's charges."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from fedsweep.client.coding import travelling
from fedsweep.components.base import Published
from fedsweep.engine.ledger import Ledger, Size, Versions, message_sizes, whole_values
from fedsweep.experiment.experiment import Experiment
from fedsweep.guard import ask
from fedsweep.models.cost import (
    BYTES_PER_VALUE,
    PASSES_OF_A_STEP,
    Counted,
    counted,
    fwd_macs_per_sample,
    training_flops,
)
from fedsweep.records import ClientWork, Payload
from fedsweep.streams import Stream
from fedsweep.submodel import Direction, SubModel


class CostModel:
    """Costs of sub-models; the forward MACs of each are counted once.

    Args:
        experiment: Gives the model and the shape of its inputs.

    Attributes:
        model: A template of the full model.
        layout: How the full model lies in its vector.
        job_passes: Forward passes of each of its samples that a client's work outside the steps takes in each job.
        codec: The method's.
    """

    def __init__(self, experiment: Experiment) -> None:
        self.model = experiment.template
        shape = experiment.world.data.images.shape[1:]
        self._shape = (int(shape[0]), int(shape[1]), int(shape[2]))
        self.layout = experiment.layout
        self._sizes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        batch = experiment.training.batch_size
        self._batch = batch if isinstance(batch, int) else batch[1]
        self._passes = cache(partial(experiment.method.passes, num_classes=experiment.world.data.num_classes))
        self.job_passes = self._passes(self._batch).job
        self._macs: dict[tuple[str, bool], int] = {}
        self.codec = experiment.method.codec
        self._noise: dict[int, Payload] = {}
        self._travelling: dict[str, Tensor] = {}

    @cached_property
    def _counted(self) -> Counted:
        return counted(self.model, self._shape)  # a forward pass, which planning without devices can do without

    @cached_property
    def _layers(self) -> Mapping[str, tuple[int, int]]:
        return self._counted.layers

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Operations of the full model that have no formula and count nothing, by torch's names."""
        return self._counted.unknown

    def macs(self, submodel: SubModel, *, count_batch_norm: bool = False) -> int:
        """Count multiply-accumulates of one sample's forward pass; the mean where a round's steps train many parts."""
        return round(sum(times * self._of_part(part, count_batch_norm) for part, times in submodel.trained()))

    def _of_part(self, submodel: SubModel, count_batch_norm: bool) -> int:
        key = (submodel.key(), count_batch_norm)
        if key not in self._macs:
            macs = self._scaled(submodel, count_batch_norm)
            if macs is None:
                module = submodel.build(self.model)
                macs = fwd_macs_per_sample(module, self._shape, count_batch_norm=count_batch_norm)
            self._macs[key] = macs
        return self._macs[key]

    def _scaled(self, submodel: SubModel, count_batch_norm: bool) -> int | None:
        """Return the layers' costs in proportion to their weights; None where the part's tensors are no slices.

        Spares a forward pass for each of the sub-models that are drawn anew in every round.
        """
        own = submodel.layout(self.layout)
        shapes = dict(zip(own.names, own.shapes, strict=True))
        total, densities = 0, submodel.densities(self.layout)
        for name, (macs, norm) in self._layers.items():
            whole, part = self._sizes.get(name), shapes.get(name)
            # A part may have tensors that the full model lacks, or lay them out otherwise: then its module is asked.
            if whole is None or part is None or len(part) != len(whole) or any(map(int.__gt__, part, whole)):
                return None
            share = (macs + norm * count_batch_norm) * math.prod(part) // math.prod(whole)
            total += round(share * densities[name]) if name in densities else share
        return total

    def flops(self, submodel: SubModel, samples: int, *, work: ClientWork | None = None, probed: float = 0) -> int:
        """Return FLOPs of a client's work.

        Args:
            submodel: What it trains.
            samples: Samples that go through a step, repeats included.
            work: What it does in the round; None: steps of the configured size.
            probed: Forward passes of one sample that its measurements take.
        """
        macs = self.macs(submodel)
        passes = self._passes(self._batch if work is None else work.samples_in(1)).step
        return training_flops(macs, samples, passes=passes) + training_flops(macs, probed, passes=1)

    def forward_flops(self, submodel: SubModel) -> int:
        """Return FLOPs of one sample's forward pass."""
        return training_flops(self.macs(submodel), 1, passes=1)

    def forward_macs(self, submodel: SubModel) -> float:
        """Count MACs of a sample's forward pass, batch norms included; teachers' in the proportion they add to a step.

        Source: FedDHAD's column "MLPs", which leaves open what a teacher counts.
        """
        return self.macs(submodel, count_batch_norm=True) * self._passes(self._batch).step / PASSES_OF_A_STEP

    def sizes(self, submodel: SubModel, direction: Direction) -> Mapping[str, Size]:
        """Size a message that carries the sub-model, by kind, without the masks that come with it once a round.

        A codec's message is taken to be as long as one of noise: of most it depends on the number of values alone.
        """
        if direction == "down" or not self.codec.encodes:
            return whole_values(submodel.message(self.layout, direction))
        size = int(self.travelling(submodel).sum())
        if size not in self._noise:
            # Keyed by the length alone: a plan costs the same with every seed, and in every round.
            source = Stream(("codec", size))
            noise = torch.randn(size, generator=source.torch(), dtype=self.layout.dtype)
            self._noise[size] = ask(self.codec, "encode", noise, source, when="for a plan")
        return self.encoded(submodel, self._noise[size])

    def encoded(self, submodel: SubModel, message: Payload) -> Mapping[str, Size]:
        """Size the message up where a codec made this of the params: buffers and optimiser state go beside it."""
        whole = whole_values(submodel.message(self.layout, "up"))
        return {f"update/{kind}": size for kind, size in message_sizes(message, self.layout.dtype).items()} | {
            kind: size for kind, size in whole.items() if kind != "params"
        }

    def travelling(self, submodel: SubModel) -> Tensor:
        """Mark the sub-model's params that travel (bool [P of the part])."""
        key = submodel.key()
        if key not in self._travelling:
            self._travelling = {key: travelling(submodel, self.layout)}  # parts that are drawn anew do not come back
        return self._travelling[key]

    def num_bytes(self, submodel: SubModel, direction: Direction) -> int:
        """Return bytes of that message in total."""
        return sum(size.num_bytes for size in self.sizes(submodel, direction).values())


class Charges:
    """Charges what travels in a round to its ledger.

    Args:
        costs: The sub-models' costs.
        submodel: Gives what part of the model a client trains.
        published: Which versions of published content clients have.

    Attributes:
        ledger: What travelled.
        published: The versions where that changed.
    """

    def __init__(
        self, costs: CostModel, submodel: Callable[[int], SubModel], published: Mapping[int, Mapping[str, str]]
    ) -> None:
        self._costs, self._submodel, self._published = costs, submodel, published
        self.ledger = Ledger()
        self.published: dict[int, dict[str, str]] = {}
        self._masked: set[int] = set()  # clients that have got their sub-model's masks, which travel once a round

    @cached_property
    def _versions(self) -> Versions:
        return Versions()

    def download(self, client: int, contents: Mapping[str, Published]) -> None:
        """Charge the model, its masks and what is published, of this what the client has not got yet."""
        submodel = self._submodel(client)
        self.ledger.message(client, "down", self._costs.sizes(submodel, "down"))
        if client not in self._masked:
            self.ledger.message(client, "down", {"mask": Size(0, submodel.index_bytes())})
            self._masked.add(client)
        has = self.published.get(client, self._published.get(client, {}))
        if not contents and not has:
            return
        versions = {}
        for name, content in contents.items():
            versions[name] = f"{self._versions.of(content.value)} {submodel.key() if content.like else ''}"
            if has.get(name) != versions[name]:
                size = self._costs.sizes(submodel, "down")["params"].values if content.like else content.value.numel()
                self.ledger.payload(client, "down", {name: content.value.flatten()[:size]})
        self.published[client] = versions

    def upload(self, client: int, encoded: Payload | None = None) -> None:
        """Charge the client's model, or what a codec made of it."""
        submodel, costs = self._submodel(client), self._costs
        sent = costs.sizes(submodel, "up") if encoded is None else costs.encoded(submodel, encoded)
        self.ledger.message(client, "up", sent)


def registration_sizes(experiment: Experiment) -> Mapping[Direction, int]:
    """Return bytes that travel once per client: number of samples, label counts where they are read; the mean, back."""
    labels = experiment.world.data.num_classes if "label_counts" in experiment.method.registration else 0
    return {"up": BYTES_PER_VALUE * (1 + labels), "down": BYTES_PER_VALUE * int(experiment.method.needs_share)}


def registration_bytes(experiment: Experiment) -> int:
    """Return the same of all clients, both ways."""
    return sum(registration_sizes(experiment).values()) * len(experiment.world.profiles)
