"""Costs: a sub-model's MACs and FLOPs, what a message that carries it counts, and a round's charges."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property, partial
from operator import itemgetter

import torch

from fedsweep.client.coding import travelling
from fedsweep.client.messages import Reply
from fedsweep.components.base import Published
from fedsweep.components.codec import Codec, Shapes
from fedsweep.engine.ledger import ContentHashes, Ledger, Size, message_sizes, whole_values
from fedsweep.experiment.experiment import Experiment
from fedsweep.guard import ask
from fedsweep.models.cost import (
    BYTES_PER_VALUE,
    PASSES_OF_A_STEP,
    Counted,
    fwd_macs_per_sample,
    training_flops,
)
from fedsweep.records import ClientWork
from fedsweep.streams import Stream
from fedsweep.submodel import FULL_MODEL, Direction, SubModel

_MOST_SHAPES = 1000

# How many of the server's encoded messages one download carries, by codec: entry k counts those of codec k of
# ``CostModel.downs``; several in all where the client skipped rounds. Empty: one message of the round's own codec.
Missed = tuple[int, ...]
# The codecs of the server's messages so far, run-length encoded: (number of a run's last message, from 1; its codec).
Made = tuple[tuple[int, ...], ...]


class CostModel:
    """Costs of sub-models; the forward MACs of each are counted once.

    Args:
        experiment: Gives the model and the shape of its inputs.
        downs: The codecs that the server's messages may have gone through in other rounds; none: the experiment's own.

    Attributes:
        model: A template of the full model.
        layout: How the full model lies in its vector.
        job_passes: Forward passes of each of its samples that a client's work outside the steps takes in each job.
        codecs: Of what clients send, and of what the server sends.
        downs: Codecs of the server's messages, in this and in other rounds.
        own_down: Place of this round's among them.
        encodes_down: Some of the server's messages go through a codec.
    """

    def __init__(self, experiment: Experiment, downs: Sequence[Codec] = ()) -> None:
        self._experiment = experiment
        self.model = experiment.template
        shape = experiment.world.data.images.shape[1:]
        self._shape = tuple(int(size) for size in shape)
        self.layout = experiment.layout
        self._sizes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        batch = experiment.training.batch_size
        self._batch = batch if isinstance(batch, int) else batch[1]
        self._passes = cache(partial(experiment.method.passes, num_classes=experiment.world.data.num_classes))
        self.job_passes = self._passes(self._batch).job
        # An objective may be worth several plain steps; what frozen layers spare a plain step, they spare in each.
        self._plain_steps = experiment.method.objective.passes / PASSES_OF_A_STEP
        self._macs: dict[tuple[str, bool], int] = {}
        self.codecs: dict[Direction, Codec] = {"up": experiment.up_codec, "down": experiment.communication.down}
        self._own_codec = experiment.method.codec.encodes
        self.downs = tuple(downs) or (self.codecs["down"],)
        self.own_down = self.downs.index(self.codecs["down"])
        self.encodes_down = any(codec.encodes for codec in self.downs)
        self._encoded: dict[tuple[Direction, int, Shapes], Mapping[str, Size]] = {}
        self._of_full: dict[tuple[Direction, Missed] | None, Mapping[str, Size]] = {}

    @cached_property
    def _counted(self) -> Counted:
        return self._experiment.forward_pass  # which planning without devices can do without

    @cached_property
    def up_varies(self) -> bool:
        """Tell whether clients' messages are as long as what is in them asks for, which no plan knows."""
        return self.codecs["up"].varies(travelling(FULL_MODEL, self.layout).shapes, self.layout.dtype)

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
        for name, (macs, norm) in self._counted.layers.items():
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
        flops = training_flops(macs, samples, passes=passes) + training_flops(macs, probed, passes=1)
        if not self._counted.spared:
            return flops
        # What frozen layers spare a plain step of one sample; a part in proportion to its MACs.
        spared = self._counted.spared * macs // max(1, self.macs(FULL_MODEL))
        return flops - training_flops(spared, samples, passes=self._plain_steps)

    def forward_flops(self, submodel: SubModel) -> int:
        """Return FLOPs of one sample's forward pass."""
        return training_flops(self.macs(submodel), 1, passes=1)

    def forward_macs(self, submodel: SubModel) -> float:
        """Count MACs of a sample's forward pass, batch norms included; teachers' in the proportion they add to a step.

        Source: FedDHAD's column "MLPs", which leaves open what a teacher counts.
        """
        return self.macs(submodel, count_batch_norm=True) * self._passes(self._batch).step / PASSES_OF_A_STEP

    def sizes(self, submodel: SubModel, direction: Direction, missed: Missed = ()) -> Mapping[str, Size]:
        """Size a message that carries the sub-model, by kind, without the masks that come with it once a round.

        A codec's message is taken to be as long as one of noise: of most it depends on shapes alone. ``missed``: the
        receiver is sent so many at once, see ``ServerMessages``.
        """
        # Rounds that fold have thousands of messages with the whole model.
        key = (direction, missed) if submodel is FULL_MODEL and sum(missed) <= 1 else None
        if key in self._of_full:
            return self._of_full[key]
        sizes: Mapping[str, Size] = whole_values(submodel.message(self.layout, direction))
        if self.codecs[direction].encodes or missed:
            sizes = self.encoded(submodel, direction, self.of_params(submodel, direction, missed))
        if key is not None:
            self._of_full[key] = sizes
        return sizes

    @cached_property
    def message_values(self) -> int:
        """Values of four bytes that a message with the whole model is worth, the mean of both ways, rounded up."""
        both = self.num_bytes(FULL_MODEL, "up") + self.num_bytes(FULL_MODEL, "down")
        return -(-both // (2 * BYTES_PER_VALUE))

    def encodes_payloads(self, direction: Direction) -> bool:
        """Tell whether what travels beside models in the params' form is encoded: not by a method's own codec."""
        return self.codecs[direction].encodes and not (direction == "up" and self._own_codec)

    def of_params(self, submodel: SubModel, direction: Direction, missed: Missed = ()) -> Mapping[str, Size]:
        """Size what a codec makes of values in the form of the sub-model's params, by its tensors' names.

        Of several messages all, or, where that is less, all values as they are.
        """
        if not missed:
            return self._message(submodel, direction, self.own_down)
        counted = [(times, self._message(submodel, direction, codec)) for codec, times in enumerate(missed) if times]
        if sum(missed) == 1:
            return counted[0][1]
        sizes: dict[str, Size] = {}
        for times, message in counted:
            for kind, size in message.items():
                before = sizes.get(kind, Size(0, 0))
                sizes[kind] = Size(before.values + times * size.values, before.num_bytes + times * size.num_bytes)
        number = travelling(submodel, self.layout).size
        whole = Size(number, BYTES_PER_VALUE * number)
        return {"whole": whole} if sum(size.num_bytes for size in sizes.values()) >= whole.num_bytes else sizes

    def _message(self, submodel: SubModel, direction: Direction, number: int) -> Mapping[str, Size]:
        """Size one message of params; ``number``: of the codec, for what the server sends."""
        travels = travelling(submodel, self.layout)
        key = (direction, number, travels.shapes)
        if not travels.size:
            return {}
        if key not in self._encoded:
            codec = self.codecs["up"] if direction == "up" else self.downs[number]
            if not codec.encodes:
                return {"whole": Size(travels.size, BYTES_PER_VALUE * travels.size)}
            # Keyed by the length alone: a plan costs the same with every seed, and in every round.
            source = Stream(("codec", travels.size))
            noise = torch.randn(travels.size, generator=source.torch(), dtype=self.layout.dtype)
            message = ask(codec.fitted(travels.shapes), "encode", noise, source, when="for a plan")
            # Of parts that are drawn anew in each round some have the same shapes; those that do not are forgotten.
            if len(self._encoded) >= _MOST_SHAPES:
                self._encoded = {}
            self._encoded[key] = message_sizes(message, self.layout.dtype)
        return self._encoded[key]

    def encoded(self, submodel: SubModel, direction: Direction, params: Mapping[str, Size]) -> Mapping[str, Size]:
        """Size a message with the sub-model whose params a codec turned into tensors of these sizes.

        Buffers and optimiser state travel beside them as they are.
        """
        whole = whole_values(submodel.message(self.layout, direction))
        return {f"update/{kind}": size for kind, size in params.items()} | {
            kind: size for kind, size in whole.items() if kind != "params"
        }

    def num_bytes(self, submodel: SubModel, direction: Direction, missed: Missed = ()) -> int:
        """Return bytes of that message, or of so many at once, in total."""
        return sum(size.num_bytes for size in self.sizes(submodel, direction, missed).values())


class Charges:
    """Charges what travels in a round to its ledger.

    Args:
        costs: The sub-models' costs.
        submodel: Gives what part of the model a client trains.
        published: Which versions of published content clients have.
        downloads: The messages of each download through a codec, by client, see ``ServerMessages``.

    Attributes:
        ledger: What travelled.
        published: The versions where that changed.
    """

    def __init__(
        self,
        costs: CostModel,
        submodel: Callable[[int], SubModel],
        published: Mapping[int, Mapping[str, str]],
        downloads: Mapping[int, Sequence[Missed]] | None = None,
    ) -> None:
        self._costs, self._submodel, self._published = costs, submodel, published
        self._downloads = {client: iter(messages) for client, messages in (downloads or {}).items()}
        self.ledger = Ledger(dtype=costs.layout.dtype)
        self.published: dict[int, dict[str, str]] = {}
        self._masked: set[int] = set()  # clients that have got their sub-model's masks, which travel once a round

    @cached_property
    def _hashes(self) -> ContentHashes:
        return ContentHashes()

    def download(self, client: int, contents: Mapping[str, Published]) -> None:
        """Charge the model, its masks and what is published, of this what the client has not got yet."""
        submodel = self._submodel(client)
        missed = next(self._downloads[client]) if self._downloads else ()
        self.ledger.message(client, "down", self._costs.sizes(submodel, "down", missed))
        if client not in self._masked:
            self.ledger.message(client, "down", {"mask": Size(0, submodel.index_bytes())})
            self._masked.add(client)
        has = self.published.get(client, self._published.get(client, {}))
        if not contents and not has:
            return
        versions = {}
        for name, content in contents.items():
            if content.made:
                versions[name] = str(content.made[-1][0])
                self._encoded_content(client, name, content.made, _number(has.get(name)))
                continue
            versions[name] = f"{self._hashes.of(content.value)} {submodel.key() if content.like else ''}"
            if has.get(name) != versions[name] or not content.is_kept:
                self._content(client, name, content, submodel)
        self.published[client] = versions

    def _encoded_content(self, client: int, name: str, made: Made, last: int) -> None:
        # Content begins with zeros everywhere: message 1 only announces it, and who comes later is not sent it.
        kinds = len(self._costs.downs)
        missed = messages_after(made, last, kinds) if last or made[-1][0] == 1 else messages_after(made, 1, kinds)
        if any(missed):
            sizes = self._costs.of_params(self._submodel(client), "down", missed)
            self.ledger.message(client, "down", {f"{name}/{kind}": size for kind, size in sizes.items()})

    def _content(self, client: int, name: str, content: Published, submodel: SubModel) -> None:
        size = submodel.message(self._costs.layout, "down")["params"] if content.like else content.value.numel()
        self.ledger.payload(client, "down", {name: content.value.flatten()[:size]})

    def upload(self, client: int, reply: Reply | None = None) -> None:
        """Charge the client's model, and what it sends beside it.

        Args:
            client: Who sends.
            reply: What it sent; None: a model of the planned size alone.
        """
        submodel, costs = self._submodel(client), self._costs
        if reply is None or reply.encoded is None:
            self.ledger.message(client, "up", costs.sizes(submodel, "up"))
        else:
            params = message_sizes(reply.encoded, costs.layout.dtype)
            self.ledger.message(client, "up", costs.encoded(submodel, "up", params))
        for owner, message in () if reply is None else reply.encoded_extras.items():
            sizes = message_sizes(message, costs.layout.dtype)
            self.ledger.message(client, "up", {f"{owner}/{kind}": size for kind, size in sizes.items()})
        if reply is not None and reply.extras:
            self.ledger.payload(client, "up", reply.extras)


def _number(version: str | None) -> int:
    """Return the number of the message by which a client has content; 0: it has none, or not by a message."""
    return int(version) if version is not None and version.isdecimal() else 0


def messages_after(made: Made, last: int, kinds: int) -> Missed:
    """Return the messages after number ``last``, by number of their codec; of so many codecs."""
    counts = [0] * kinds
    for upto, codec in made[bisect_right(made, last, key=itemgetter(0)) :]:
        counts[codec], last = counts[codec] + upto - last, upto
    return tuple(counts)


def registration_sizes(experiment: Experiment) -> Mapping[Direction, int]:
    """Return bytes that travel once per client: number of samples, label counts where they are read; the mean, back."""
    labels = experiment.world.data.num_classes if "label_counts" in experiment.method.registration else 0
    return {"up": BYTES_PER_VALUE * (1 + labels), "down": BYTES_PER_VALUE * int(experiment.method.needs_share)}


def registration_bytes(experiment: Experiment) -> int:
    """Return the same of all clients, both ways."""
    return sum(registration_sizes(experiment).values()) * len(experiment.world.profiles)
