"""Local training: one client's work in one round, job by job.

A client's model is one flat vector; the module's parameters are views into it, and so are the gradients. So an
optimiser step, an average and a message are each one operation on one array, and a worker that steps several
clients in turn binds its one module to the next client's vector without copying.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedsweep.client.coding import Encoder
from fedsweep.client.lanes.lane import Lane, LaneSteps
from fedsweep.client.messages import ClientSide, ClientTask, Progress, Reply, RoundTotals
from fedsweep.client.modules import BoundModule, ClientModel
from fedsweep.client.optimizer import ClientOptimizer
from fedsweep.client.shards import Batches, Shard, pass_accuracies
from fedsweep.client.step_parts import PartSteps
from fedsweep.client.steps import Steps
from fedsweep.client.terms import ClientTerm
from fedsweep.components.local import ClientFacts, LocalWork
from fedsweep.components.probes import PASSES_TAKEN, LocalClient, Probe
from fedsweep.errors import ClientJobError
from fedsweep.guard import OnClient, ask
from fedsweep.records import LocalJob, Payload, State
from fedsweep.streams import Stream, stream
from fedsweep.submodel import FULL_MODEL
from fedsweep.trees import FlatLayout, all_finite, to_arrays, to_tensors


@dataclass
class _Job:
    """A client's work from one sync point to the next.

    Attributes:
        due: Local steps that are still to be taken.
        steps: Those that it was asked for.
        effective_steps: What these came to, see ``ClientUpdate``.
    """

    due: int = 0
    steps: int = 0
    effective_steps: float = 0.0


class LocalRound:
    """One client's work in one round.

    Args:
        side: The experiment's client side.
        task: The client's part in the round.
        round: From 1.
        learning_rate: The round's.
        slot: The module of the sub-model's size, to which clients are bound in turn.
        shard: The client's samples of this round.
        full: The full model's layout.
        memory: What the client remembers; None: nothing yet.
        num_classes: Strata of the training data.
        strata: The stratum of each of the client's samples of this round [n].
        tests: The client's share of the test set, where it is to test a model.

    Attributes:
        facts: What the client knows of itself.
        model: Its own.
        steps: Takes its steps.
        progress: What it has done since it last received a model.
        received: The server's model that its moves are counted from [V full], where a codec encodes them.
    """

    def __init__(
        self,
        side: ClientSide,
        task: ClientTask,
        *,
        round: int,
        learning_rate: float,
        slot: BoundModule,
        shard: Shard,
        full: FlatLayout,
        memory: State,
        num_classes: int,
        strata: np.ndarray,
        tests: Shard | None = None,
    ) -> None:
        self._side, self._shard, self._tests, self._learning_rate = side, shard, tests, learning_rate
        self.facts = facts = ClientFacts(
            client=task.client,
            round=round,
            num_samples=task.work.num_samples,
            label_counts=torch.from_numpy(np.bincount(strata, minlength=num_classes)),
            work=task.work,
            submodel=task.submodel,
            told_share=side.share(task.client) if side.needs_share else None,
        )
        self._work = task.work
        memory = memory or {}
        self.model = ClientModel(slot, task.submodel, full)
        self._optimizer = ClientOptimizer(
            side.optimizer,
            self.model,
            learning_rate=learning_rate,
            memory=memory.get("optimizer") if side.optimizer.keep == "persist" or task.progress is not None else None,
        )
        remembered = memory.get("terms", {})
        self._terms = [ClientTerm(term, remembered.get(term.name), facts, full) for term in side.terms]
        self._encoder = Encoder(side, task.submodel, full, memory) if side.codec.encodes else None
        self.received: Tensor | None = None  # by reference: nobody changes it as long as a codec needs it
        self._batches = Batches(shard, task.work, seed=side.seed, round=round, client=task.client)
        takes = Steps if task.submodel.step_parts is None else PartSteps
        self.steps = takes(
            side,
            self.model,
            optimizer=self._optimizer,
            batches=self._batches,
            terms=self._terms,
            facts=facts,
            learning_rate=learning_rate,
        )
        self._job, self._totals = _Job(), RoundTotals(steps=0, samples=0, loss_sum=0.0)
        self._extras: Payload = {}
        self.progress = Progress()
        # Until the round's first job begins: what it goes on with is work of an earlier round.
        self._goes_on = task.progress is not None
        if task.progress is not None:
            self._restore(task.progress, memory)

    def _restore(self, progress: Progress, memory: dict[str, Any]) -> None:
        """Take up the work of an earlier round."""
        self.progress = progress
        self._optimizer.momentum_weight = progress.momentum_weight
        # Copies: arrays from Ray's object store are read-only.
        self.model.vector.copy_(to_tensors(memory["held"]))
        if "anchor" in memory:
            self.model.set_anchor(to_tensors(memory["anchor"]).to(self._side.device))

    def begin(
        self, job: LocalJob, anchor: Tensor | None, *, version: int, broadcast: Payload, probes: tuple[Probe, ...]
    ) -> None:
        """Begin a job; its steps are taken when a sync point waits for the client, see :meth:`advance`.

        Args:
            job: Its steps, and whether the client goes on from its own params.
            anchor: The server's model that was just sent [V full]; None where the job resumes.
            version: That model's.
            broadcast: Published content that came with it.
            probes: The segment's; those that measure at the start do so now.
        """
        work, model = self._work, self.model
        if anchor is not None:
            model.receive(anchor)
            self.progress = Progress(anchor_version=version, samples=work.num_samples, classes=work.classes)
            self.steps.broadcast = broadcast
            if self._encoder is not None:
                self.received = anchor
            if probes or self._side.needs_anchor:
                # A new tensor each time: a term may keep the one before.
                model.set_anchor(model.vector.clone())
        elif self._goes_on:
            self.progress = self.progress.carried_on(work.num_samples, work.classes)
            self.steps.broadcast = broadcast  # of which nothing has changed since it was sent
        self._goes_on = False
        for term in self._terms:
            model.replace(term.prepare(model.params, model.values, model.anchor_tree, self._view))
        if anchor is not None and model.submodel.withholds:
            model.complete_anchor()
        if probes:
            self._measure([p for p in probes if p.when == "start"])
        self._job = _Job(due=job.steps, steps=job.steps)

    def lane(self) -> Lane | None:
        """Give the client's part in steps that it takes together with others; None where none are due."""
        if not self._job.due:
            return None
        first = self._totals.steps
        return Lane(
            facts=self.facts,
            slot=self.model.slot,
            vector=self.model.vector,
            optimizer=self._optimizer,
            anchor=self.model.anchor,
            memories={term.name: term.memory or {} for term in self._terms},
            broadcast=self.steps.broadcast,
            learning_rate=self._learning_rate,
            first=first,
            sizes=self._batches.sizes(first, self._job.due),
            all_sizes=self._batches.sizes,
            batches=self._batches.joined,
            seed=self._batches.seed,
        )

    def advance(self, probes: tuple[Probe, ...] = (), lane_steps: LaneSteps | None = None) -> None:
        """Take the steps that are due, or note those that a lane took; then let terms and probes finish."""
        first, due, model = self._totals.steps, self._job.due, self.model
        if lane_steps is not None:
            self._count(lane_steps.losses, lane_steps.hits)
        elif due:
            module = model.bound()
            if not module.training:
                module.train()
            losses = [self.steps.take(position) for position in range(first, first + due)]
            only_one = len(losses) == 1
            hits = torch.stack(self.steps.counts).tolist() if self.steps.counts else ()
            self.steps.counts.clear()
            self._count([float(losses[0])] if only_one else cast("list[float]", torch.stack(losses).tolist()), hits)
        if self._terms:
            self._finish_terms()
        if probes:
            self._measure([p for p in probes if p.when != "start"])
        # Of lanes it is known, and to ask a GPU is to wait for it; a term may have put other values in their place.
        is_finite = all_finite(model.vector) if lane_steps is None or self._terms else lane_steps.is_finite
        if not is_finite:
            raise self._error(self._totals.steps, "its model has values that are not finite; lower the learning rate")

    def _count(self, losses: Sequence[float], hits: Sequence[int]) -> None:
        """Take note of steps that were taken, by their losses and, where asked for, what they classified rightly."""
        first, steps, loss_sum = self._totals.steps, len(losses), math.fsum(losses)
        self.steps.hits += zip(hits, self._batches.sizes(first, steps), strict=False)
        self._job.due, self.steps.reached = 0, first + steps
        self._totals = replace(
            self._totals,
            steps=first + steps,
            samples=self._totals.samples + sum(self._batches.sizes(first, steps)),
            loss_sum=self._totals.loss_sum + loss_sum,
        )
        if not math.isfinite(loss_sum):
            step = first + 1 + [math.isfinite(value) for value in losses].index(False)
            raise self._error(step, "its loss is not finite; lower the learning rate or clip the gradient")
        self._job.effective_steps = self._optimizer.advance_effective_steps(steps)
        self.progress = replace(
            self.progress,
            steps=self.progress.steps + steps,
            effective_steps=self.progress.effective_steps + self._job.effective_steps,
            momentum_weight=self._optimizer.momentum_weight,
            loss_sum=self.progress.loss_sum + loss_sum,
        )

    def _finish_terms(self) -> None:
        work = LocalWork(
            anchor=self.model.anchor_tree,
            params=self.model.params,
            values=self.model.values,
            steps=self._job.steps,
            effective_steps=self._job.effective_steps,
            learning_rate=self._learning_rate,
            step_scales=self._optimizer.step_scales,
            num_samples=self._work.num_samples,
            broadcast=self.steps.broadcast,
            client=self.facts,
        )
        for term in self._terms:
            payload, replacing = term.finish(work, self._view)
            if payload:
                self._keep_extras(term.name, payload)
            self.model.replace(replacing)
        if self._side.job_passes:
            self._add_probed(self._side.job_passes * len(self._shard))

    def _add_probed(self, passes: float) -> None:
        """Count forward passes of one sample."""
        self._totals = replace(self._totals, probed=self._totals.probed + passes)

    def measured_at(self, anchor: Tensor, probes: Sequence[Probe], broadcast: Payload) -> Payload:
        """Measure a model [V full] that the client does not train, and what comes with it."""
        self.model.receive(anchor)
        self.steps.broadcast = broadcast
        self.model.set_anchor(self.model.vector)
        passes = self._measure(probes)
        return {**self._extras, **passes}

    def _measure(self, probes: Sequence[Probe]) -> Payload:
        """Keep what the probes measure; returns what they took, of those that tell it."""
        passes: dict[str, Tensor] = {}
        when = OnClient(self.facts.client, self.facts.round)
        for probe in (probe for probe in probes if probe.asks(self.facts.client)):
            view = self._view(f"probe {probe.name}", reads_data=probe.reads_data)
            answer = dict(ask(probe, "measure", view, when=when))
            if PASSES_TAKEN in answer:
                passes[f"{probe.name}/{PASSES_TAKEN}"] = answer.pop(PASSES_TAKEN)
            self._keep_extras(probe.name, answer)
            taken, samples = passes.get(f"{probe.name}/{PASSES_TAKEN}"), len(self._shard)
            self._add_probed(probe.passes_over(samples) if taken is None else float(taken) * samples)
        # A probe may have run backward passes; what it left must not reach the next step.
        self.model.slot.gradient.zero_()
        return passes

    @cached_property
    def _inputs(self) -> Any:
        return self._shard.everything()[0]  # made ready once, where somebody looks at them

    def _view(self, purpose: str, *, reads_data: bool = True) -> LocalClient:
        """Return the client as it is now; ``purpose`` names its random numbers."""
        model, anchor, facts = self.model.bound().eval(), self.model.anchor_tree, self.facts
        tests = (None, None) if self._tests is None else self._tests.everything()
        return LocalClient(
            client=facts.client,
            round=facts.round,
            inputs=self._inputs if reads_data else torch.empty(0),
            targets=self._shard.targets,
            num_classes=len(facts.label_counts),
            anchor={name: anchor[name] for name in self.model.params if anchor},
            params=self.model.params,
            model=model,
            forward_with=lambda values, inputs: torch.func.functional_call(model, values, (inputs,), strict=False),
            stream=stream(self._side.seed, purpose, facts.round, facts.client),
            broadcast=self.steps.broadcast,
            memories={term.name: memory for term in self._terms if (memory := term.remembered()) is not None},
            test_inputs=tests[0],
            test_targets=tests[1],
        )

    def _keep_extras(self, owner: str, payload: Payload) -> None:
        for name, value in payload.items():
            # A copy, since the value may be a view of the params, which go on changing.
            self._extras[f"{owner}/{name}"] = value.detach().cpu().clone()

    # -- results -------------------------------------------------------------------------------------------------

    def reply(self, *, leaves: bool, on_device: bool = False) -> Reply:
        """Answer a sync point; where the client ``leaves``, its round ends, and the vector itself may go.

        With ``on_device`` a whole model stays where it was trained: its mean is taken there.
        """
        extras, self._extras = self._extras, {}
        facts, vector = self.facts, self.model.vector
        if not on_device or self._encoder is not None or facts.submodel != FULL_MODEL:
            vector = vector.cpu()
        vector = vector if leaves else vector.clone()
        reply = Reply(client=facts.client, vector=vector, progress=self.progress, extras=extras)
        if self._encoder is None:
            return reply
        return self._encoder.encoded(reply, self.received, self._codec_stream())

    def sent(self) -> Tensor:
        """Give the client's model [V of its part] as the other end of its message has it."""
        if self._encoder is None:
            return self.model.vector
        vector, client = self.model.vector.cpu(), self.facts.client
        return self._encoder.decoded(client, vector, self.received, self._codec_stream())

    def _codec_stream(self) -> Stream:
        return stream(self._side.seed, "codec", self.facts.round, self.facts.client, self._totals.steps)

    def close(self, *, attended: bool) -> tuple[RoundTotals, State]:
        """End the round.

        Args:
            attended: The client's work has reached the server; otherwise it goes on from it next time.

        Returns:
            The round's figures, and what the client remembers (None: nothing).
        """
        # Nobody waited for these steps: what is kept over the round's end is the job done, not the job begun.
        if self._job.due:
            self.advance()
        totals = replace(self._totals, progress=None if attended else self.progress)
        if self._side.track_accuracy:
            totals = replace(totals, pass_accuracies=pass_accuracies(self.steps.hits, len(self._shard)))
        memory: dict[str, Any] = {} if self._encoder is None else {**self._encoder.memory()}
        if terms := {term.name: term.kept() for term in self._terms if term.is_stateful}:
            memory["terms"] = terms
        if self._side.optimizer.keep == "persist" or not attended:
            memory["optimizer"] = self._optimizer.arrays()
        if not attended:
            memory["held"] = to_arrays(self.model.vector.cpu().clone())
            if self.model.anchor is not None:
                memory["anchor"] = to_arrays(self.model.anchor.cpu().clone())
        return totals, memory or None

    def _error(self, step: int, reason: str) -> ClientJobError:
        return ClientJobError(client=self.facts.client, round=self.facts.round, step=step, reason=reason)
