"""Local training: one client's work in one round, step by step.

A client's model is one flat vector; the module's parameters are views into it, and so are the gradients. So an
optimiser step, an average and a message are each one operation on one array, and a worker that steps several
clients in turn binds its one module to the next client's vector without copying.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedsweep.client.coding import Encoder
from fedsweep.client.lanes.draws import seed_draws
from fedsweep.client.lanes.lane import Lane, Taken
from fedsweep.client.messages import ClientSide, Reply, RoundTotals, Tally, Turn
from fedsweep.client.modules import ModuleSlot, Narrowed, part_of_step
from fedsweep.client.optimizer import ClientOptimizer
from fedsweep.client.shards import Batches, Shard, pass_accuracies
from fedsweep.client.terms import ClientTerms
from fedsweep.components.local import ClientFacts, LocalStep, LocalWork, Memory
from fedsweep.components.probes import LocalClient, Probe
from fedsweep.errors import ClientJobError
from fedsweep.guard import OnClient, check_named, check_scalar
from fedsweep.records import LocalJob, Payload, State
from fedsweep.streams import stream
from fedsweep.submodel import SubModel
from fedsweep.trees import FlatLayout, ParamTree


class LocalRound:
    """One client's work in one round.

    Args:
        side: The experiment's client side.
        turn: The client's part in the round.
        round: From 1.
        learning_rate: The round's.
        slot: A module of the sub-model's size.
        shard: The client's samples of this round.
        full: The full model's layout.
        memory: What the client remembers; None: nothing yet.
        num_classes: Classes of the data set.
        tests: The client's share of the test set, where it is to test a model.

    Attributes:
        step_reached: The local step of this round that was begun last, from 1; 0 before the first.
    """

    def __init__(
        self,
        side: ClientSide,
        turn: Turn,
        *,
        round: int,
        learning_rate: float,
        slot: ModuleSlot,
        shard: Shard,
        full: FlatLayout,
        memory: State,
        num_classes: int,
        tests: Shard | None = None,
    ) -> None:
        self.client = turn.client
        self.submodel: SubModel = turn.submodel
        self.layout = slot.layout
        self._side, self._round, self._learning_rate = side, round, learning_rate
        self._slot, self._shard, self._full = slot, shard, full
        self._num_classes, self._tests = num_classes, tests
        self._work, self._when = turn.work, OnClient(turn.client, round)
        self._facts = ClientFacts(
            client=turn.client,
            round=round,
            num_samples=turn.work.num_samples,
            label_counts=torch.bincount(shard.targets.cpu(), minlength=num_classes),
            work=turn.work,
            submodel=turn.submodel,
            told_share=side.share(turn.client),
        )
        self._batches = Batches(shard, turn.work, seed=side.seed, round=round, client=turn.client)
        self._position = self.step_reached = self._due = self._samples = 0
        self._job_steps, self._job_effective_steps = 0, 0.0
        self._loss_sum = self._probed = 0.0
        self._hits: list[tuple[int, int]] = []
        self._tally, self._fresh = Tally(), True
        self._broadcast: Payload = {}
        self._extras: Payload = {}
        self._anchor: Tensor | None = None
        self._narrowed: dict[str, Narrowed] = {}
        self._anchor_tree: ParamTree = {}
        self._restore(turn, memory or {})

    def _restore(self, turn: Turn, memory: dict[str, Any]) -> None:
        settings, layout, device = self._side.optimizer, self.layout, self._side.device
        self.vector = torch.zeros(layout.num_values, dtype=layout.dtype, device=device)
        self._params = layout.views(self.vector)
        self._trained, self._values = layout.parts(self._params)
        self._views = list(self._params.values())
        self._flat = nn.Parameter(self.vector[: layout.num_params])
        self._flat.grad = self._slot.gradient
        goes_on = settings.keep == "persist" or turn.held is not None
        self._optimizer = ClientOptimizer(
            settings,
            self._flat,
            learning_rate=self._learning_rate,
            submodel=self.submodel,
            part=layout,
            full=self._full,
            riders={name: self._params[name] for name in layout.names if name.startswith("optimizer.")},
            kept=memory.get("optimizer") if goes_on else None,
        )
        codec = self._side.codec
        self._encoder = Encoder(codec, self.submodel, self._full, memory.get("codec")) if codec.encodes else None
        self._terms = ClientTerms(self._side.terms, memory.get("terms", {}), self._facts, self._full)
        self._is_bare = self._side.solver.plain and self._optimizer.is_bare and not self._terms.see_gradients
        if turn.held is not None:
            self._tally, self._fresh = turn.held, False
            self._optimizer.momentum_weight = turn.held.momentum_weight
            # Copied first: arrays from Ray's object store are read-only, and torch warns of tensors made of them.
            self.vector.copy_(torch.from_numpy(np.array(memory["held"])))
            if "anchor" in memory:
                self._see(torch.from_numpy(np.array(memory["anchor"])).to(device))

    def _see(self, anchor: Tensor) -> None:
        """Make an anchor the one that terms and probes see. Its views are made once: they hold as long as it does."""
        self._anchor, self._anchor_tree = anchor, self.layout.model(anchor)

    def begin(
        self, job: LocalJob, anchor: Tensor | None, *, version: int, broadcast: Payload, probes: tuple[Probe, ...]
    ) -> None:
        """Take up a job. Its steps are taken when the client is waited for, see :meth:`advance`.

        The server's model [V full], its version and a broadcast were just sent; there is none where the job resumes.
        """
        if anchor is not None:
            self.vector.copy_(self.submodel.extract(anchor, self._full))
            classes = self._work.classes
            self._tally = Tally(anchor_version=version, samples=self._work.num_samples, classes=classes)
            self._broadcast = broadcast
            if probes or self._encoder or any(term.needs_anchor for term in self._side.terms):
                # A new tensor each time: a term may keep the one before.
                self._see(self.vector.clone())
        elif self._fresh is False and self._position == 0:
            self._tally = self._tally.carried_on(self._work.num_samples, self._work.classes)
        for replacing in self._terms.prepare(self._trained, self._values, self._anchor_tree, self._view):
            self._replace(replacing)
        self._measure([p for p in probes if p.when == "start"])
        self._due += job.steps
        self._job_steps, self._job_effective_steps = job.steps, 0.0

    def lane(self) -> Lane | None:
        """What the client brings to steps that it takes together with others; None where none are due."""
        if not self._due:
            return None
        first = self._position
        return Lane(
            facts=self._facts,
            slot=self._slot,
            vector=self.vector,
            optimizer=self._optimizer,
            anchor=self._anchor,
            memories=self._terms.present,
            broadcast=self._broadcast,
            learning_rate=self._learning_rate,
            first=first,
            sizes=self._batches.sizes(first, self._due),
            batch=self._batches.at,
            seed=self._batches.seed,
        )

    def advance(self, probes: tuple[Probe, ...] = (), taken: Taken | None = None) -> None:
        """Take the steps that are due, or note that others took them along; then let terms and probes finish."""
        if taken is not None:
            self._hits += zip(taken.hits, self._batches.sizes(self._position, self._due), strict=True)
            self._count(taken.losses)
        elif self._due:
            module = self._slot.bind(self._views)
            if not module.training:
                module.train()
            steps = range(self._position, self._position + self._due)
            losses = [self._one_step(module, position) for position in steps]
            only_one = len(losses) == 1
            self._count([float(losses[0])] if only_one else cast("list[float]", torch.stack(losses).tolist()))
        self._finish_terms()
        self._measure([p for p in probes if p.when != "start"])
        # The sum first, one number; it may overflow where all values are finite, so only then each is looked at.
        total = float(self.vector.sum())
        if not math.isfinite(total) and not bool(torch.isfinite(self.vector).all()):
            raise self._error(self._position, "its model has values that are not finite; lower the learning rate")

    def _count(self, values: Sequence[float]) -> None:
        """Take note of steps that were taken, by their losses."""
        first, steps = self._position, len(values)
        self._due, self._position, self.step_reached = 0, first + steps, first + steps
        self._samples += sum(self._batches.sizes(first, steps))
        loss_sum = math.fsum(values)
        if not math.isfinite(loss_sum):
            step = first + 1 + [math.isfinite(value) for value in values].index(False)
            raise self._error(step, "its loss is not finite; lower the learning rate or clip the gradient")
        self._loss_sum += loss_sum
        self._job_effective_steps = self._optimizer.effective_steps(steps)
        self._tally = dataclasses.replace(
            self._tally,
            steps=self._tally.steps + steps,
            effective_steps=self._tally.effective_steps + self._job_effective_steps,
            momentum_weight=self._optimizer.momentum_weight,
            loss_sum=self._tally.loss_sum + loss_sum,
        )

    def _one_step(self, module: nn.Module, position: int) -> Tensor:
        side = self._side
        self.step_reached = position + 1
        inputs, targets = self._batches.at(position)
        # Before each step: what dropout draws must not depend on which clients this worker stepped before.
        seed_draws(self._batches.seed(position), side.device)
        narrow = part_of_step(self.submodel, position, slot=self._slot, known=self._narrowed)
        step = LocalStep(
            inputs=inputs,
            targets=targets,
            model=module if narrow is None else narrow.module(),
            params=self._trained if narrow is None else narrow.params,
            anchor=self._anchor_tree if narrow is None or self._anchor is None else narrow.tree(self._anchor),
            memory={},
            broadcast=self._broadcast if narrow is None else narrow.broadcast(self._broadcast),
            stream=stream(side.seed, "method", self._round, self.client, position),
            position=position,
            learning_rate=self._learning_rate,
            whole=None if narrow is None else module,
            client=self._facts,
            _twin=self._slot.twin if narrow is None else narrow.twin,
        )

        def take() -> Tensor:
            if self._is_bare and narrow is None:
                return self._slot.descend(self._loss(step), self._views, self._learning_rate)
            return side.solver.step(self._optimizer.torch, lambda: self._gradient(step, narrow))

        if narrow is None:
            loss = take()
        else:
            loss = narrow.stepped(take, step, self.vector, self._optimizer.restless(plain=side.solver.plain))
            step.params, step.anchor, step._twin = self._trained, self._anchor_tree, self._slot.twin
            step.broadcast = self._broadcast
        for replacing in self._terms.after_step(step, self._slot.gradients):
            self._replace(replacing)
        if side.track_accuracy:
            self._hits.append((int((step.logits.argmax(1) == targets).sum()), len(targets)))
        return loss

    def _gradient(self, step: LocalStep, narrow: Narrowed | None = None) -> Tensor:
        """The loss at the present parameters; its gradient lies in the slot's gradient vector."""
        # In place, never None: the parameters' gradients are views of this vector, to which a backward pass adds.
        self._slot.gradient.zero_()
        if narrow is not None:
            narrow.load(self.vector)
        seen = None if narrow is None else narrow.memory
        loss = self._loss(step, seen)
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = self._slot.gradients if narrow is None else narrow.gradients
        for added in self._terms.gradients(step, seen, like=gradients):
            for name, value in added.items():
                gradients[name].add_(value)
        if narrow is not None:
            narrow.add_gradient(self._slot.gradient)
        self._optimizer.scale_and_clip()
        return loss.detach()

    def _loss(self, step: LocalStep, seen: Callable[[Memory], Memory] | None = None) -> Tensor:
        """Objective and terms at the present parameters; ``seen`` cuts memories to what the step trains."""
        step._features = step._logits = step._whole_logits = None  # a solver may come back with other parameters
        loss = self._side.objective.loss(step)
        check_scalar(loss, self._side.objective, "loss", when=self._when)
        for extra in self._terms.losses(step, seen):
            loss = loss + extra
        return loss

    def _replace(self, params: ParamTree | None) -> None:
        for name, value in (params or {}).items():
            self._params[name].copy_(value)

    def _finish_terms(self) -> None:
        if not self._side.terms:
            return
        work = LocalWork(
            anchor=self._anchor_tree,
            params=self._trained,
            values=self._values,
            steps=self._job_steps,
            effective_steps=self._job_effective_steps,
            learning_rate=self._learning_rate,
            num_samples=self._work.num_samples,
            broadcast=self._broadcast,
            client=self._facts,
        )
        for name, payload, replacing in self._terms.finish(work, self._view):
            self._keep_extras(name, payload)
            self._replace(replacing)
        self._probed += sum(term.job_passes for term in self._side.terms) * len(self._shard)

    def measured_at(self, anchor: Tensor, probes: Sequence[Probe]) -> Payload:
        """What the client measures at a model [V full] that it does not train."""
        self.vector.copy_(self.submodel.extract(anchor, self._full))
        self._see(self.vector)
        self._measure(probes)
        return self._extras

    def _measure(self, probes: Sequence[Probe]) -> None:
        if not probes:
            return
        for probe in probes:
            found = probe.measure(self._view(f"probe {probe.name}", reads_data=probe.reads_data))
            check_named(found, Tensor, probe, "measure", when=self._when)
            self._keep_extras(probe.name, found)
            self._probed += probe.passes * len(self._shard)
        # A probe may have run backward passes; what it left must not reach the next step.
        self._slot.gradient.zero_()

    @cached_property
    def _inputs(self) -> Tensor:
        return self._shard.everything()[0]  # made ready once, where somebody looks at them

    def _view(self, purpose: str, *, reads_data: bool = True) -> LocalClient:
        """The client as it is now; ``purpose`` names its random numbers."""
        model = self._slot.bind(self._views).eval()
        tests = (None, None) if self._tests is None else self._tests.everything()
        return LocalClient(
            client=self.client,
            round=self._round,
            inputs=self._inputs if reads_data else torch.empty(0),
            targets=self._shard.targets,
            num_classes=self._num_classes,
            anchor={name: self._anchor_tree[name] for name in self._trained if self._anchor_tree},
            params=self._trained,
            model=model,
            forward_with=lambda values, inputs: torch.func.functional_call(model, values, (inputs,), strict=False),
            stream=stream(self._side.seed, purpose, self._round, self.client),
            memories=self._terms.memories(),
            test_inputs=tests[0],
            test_targets=tests[1],
        )

    def _keep_extras(self, owner: str, payload: Payload) -> None:
        for name, value in payload.items():
            # A copy, since the value may be a view of the params, which go on changing.
            self._extras[f"{owner}/{name}"] = value.detach().cpu().clone()

    # -- results -------------------------------------------------------------------------------------------------

    def reply(self, *, leaves: bool) -> Reply:
        """What travels at a sync point; where the client ``leaves``, its round ends, and the vector itself may go."""
        extras, self._extras = self._extras, {}
        vector = self.vector.cpu() if leaves else self.vector.cpu().clone()
        reply = Reply(client=self.client, vector=vector, tally=self._tally, extras=extras)
        source = stream(self._side.seed, "codec", self._round, self.client, self._position)
        return reply if self._encoder is None else self._encoder.encoded(reply, self._anchor, source)

    def close(self, *, attended: bool) -> tuple[RoundTotals, State]:
        """End the round.

        Args:
            attended: The client's work has reached the server; otherwise it goes on from it next time.

        Returns:
            The round's figures, and what the client remembers (None: nothing).
        """
        # Nobody waited for these steps: what is kept over the round's end is the job done, not the job begun.
        if self._due:
            self.advance()
        totals = RoundTotals(
            steps=self._position,
            samples=self._samples,
            loss_sum=self._loss_sum,
            held=None if attended else self._tally,
            pass_accuracies=pass_accuracies(self._hits, len(self._shard)),
            probed=self._probed,
        )
        memory: dict[str, Any] = {} if self._encoder is None else {**self._encoder.memory()}
        if terms := self._terms.kept():
            memory["terms"] = terms
        if self._side.optimizer.keep == "persist" or not attended:
            memory["optimizer"] = self._optimizer.arrays()
        if not attended:
            memory["held"] = self.vector.cpu().numpy().copy()
            if self._anchor is not None:
                memory["anchor"] = self._anchor.cpu().numpy().copy()
        return totals, memory or None

    def _error(self, step: int, reason: str) -> ClientJobError:
        return ClientJobError(client=self.client, round=self._round, step=step, reason=reason)
