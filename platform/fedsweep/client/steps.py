"""A client's local steps: a batch, the loss of objective and terms, and the move that follows from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedsweep.client.messages import ClientSide
from fedsweep.client.modules import ClientModel
from fedsweep.client.optimizer import ClientOptimizer
from fedsweep.client.shards import Batches, seed_draws
from fedsweep.client.terms import ClientTerm
from fedsweep.components.local import ClientFacts, LocalStep
from fedsweep.guard import OnClient, ask
from fedsweep.records import Payload
from fedsweep.streams import stream
from fedsweep.trees import ParamTree


class Steps:
    """Takes a client's local steps, each on all that the client has.

    Args:
        side: The experiment's client side.
        model: The client's.
        optimizer: Over its params.
        batches: Its batches of the round.
        terms: The method's, on this client.
        facts: What it knows of itself.
        learning_rate: The round's.

    Attributes:
        broadcast: What the server sent beside the model, for the present job.
        reached: The step of this round that was begun last, from 1; 0 before the first.
        counts: Of the steps since the last reading how many samples were classified rightly, where that is asked for;
            to read one has the host wait for a GPU.
        hits: The same of each step before, with how many there were.
    """

    def __init__(
        self,
        side: ClientSide,
        model: ClientModel,
        *,
        optimizer: ClientOptimizer,
        batches: Batches,
        terms: Sequence[ClientTerm],
        facts: ClientFacts,
        learning_rate: float,
    ) -> None:
        self._side, self._model, self._optimizer, self._batches = side, model, optimizer, batches
        self._terms, self._facts, self._learning_rate = terms, facts, learning_rate
        self._when = OnClient(facts.client, facts.round)
        self._is_bare = side.bare_steps and not model.submodel.scales_steps
        self.broadcast: Payload = {}
        self.reached = 0
        self._hits: Tensor | None = None  # of the last pass
        self.counts: list[Tensor] = []
        self.hits: list[tuple[int, int]] = []

    def take(self, position: int) -> Tensor:
        """Take a step, numbered from 0 within the round; returns the loss at its start."""
        self.reached = position + 1
        inputs, targets = self._batches.at(position)
        # Before each step: what dropout draws must not depend on which clients this worker stepped before.
        seed_draws(self._batches.seed(position), self._side.device)
        step = self._shown(position, inputs, targets)
        if self._is_bare:
            loss = self._model.slot.descend(self._loss(step), self._model.views, self._learning_rate)
        else:
            loss = self._moved(step)
        for term in self._terms:
            self._model.replace(term.after_step(step, self._model.slot.gradients))
        if self._hits is not None:
            self.counts.append(self._hits)
        return loss

    def _shown(self, position: int, inputs: Tensor, targets: Tensor) -> LocalStep:
        """Return the step as objective and terms see it."""
        model, facts = self._model, self._facts
        return LocalStep(
            inputs=inputs,
            targets=targets,
            model=model.slot.module,
            params=model.params,
            anchor=model.anchor_tree,
            memory={},
            broadcast=self.broadcast,
            stream=stream(self._side.seed, "method", facts.round, facts.client, position),
            position=position,
            learning_rate=self._learning_rate,
            client=facts,
            task=self._side.task,
            _eval_copy=model.slot.eval_copy,
        )

    def _moved(self, step: LocalStep) -> Tensor:
        """Move the model by a step of the method's solver; returns the loss at its start."""
        loss: Tensor = self._side.solver.step(self._optimizer.as_torch, lambda: self._gradient(step))
        return loss

    def _gradient(self, step: LocalStep) -> Tensor:
        """Return the loss at the present parameters; its gradient lies in the slot's gradient vector."""
        # In place, never None: the parameters' gradients are views of this vector, to which a backward pass adds.
        self._model.slot.gradient.zero_()
        loss = self._loss(step)
        loss.backward()  # type: ignore[no-untyped-call]
        self._add_terms(step, self._model.slot.gradients)
        self._optimizer.scale_and_clip()
        return loss.detach()

    def _loss(self, step: LocalStep) -> Tensor:
        """Return objective and terms at the present parameters."""
        step._features = step._logits = step._whole_logits = None  # a solver may come back with other parameters
        loss: Tensor = ask(self._side.objective, "loss", step, when=self._when)
        for term in self._terms:
            extra = term.loss(step)
            if extra is not None:
                loss = loss + extra
        if self._side.track_accuracy:
            self._hits = count_hits(step)
        return loss

    def _add_terms(self, step: LocalStep, gradients: ParamTree) -> None:
        """Add what the terms add to the gradient, in place."""
        for term in self._terms:
            for name, value in (term.gradient(step, like=gradients) or {}).items():
                gradients[name].add_(value)


def count_hits(step: LocalStep) -> Tensor:
    """Count the samples that a step's forward pass classified rightly; a scalar.

    Where the objective made no such pass, of the batch as it is, one is made that changes nothing of the model.
    """
    logits = step._logits
    if logits is None:
        step.model.eval()
        with torch.no_grad():
            logits = step.forward(step.inputs)
        step.model.train()
    return (logits.detach().argmax(1) == step.targets).sum()
