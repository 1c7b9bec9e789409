"""Client side: one objective, any number of terms, and a solver that takes the steps.

A method has one objective and terms that stack on it. A term adds a loss on the batch or a gradient on the
parameters, and owns one slot of the client's memory under its name; so terms stack without clashes.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedsweep.guard import optional, pair, params_tree, returns, scalar, term_finish, term_memory
from fedsweep.models.functional import features_with, logits_with
from fedsweep.parameters.ranges import Checked
from fedsweep.records import ClientWork, Payload
from fedsweep.streams import Stream
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.tasks.base import Task
from fedsweep.tasks.kinds import Classification
from fedsweep.trees import ParamTree, copied, trained_params

Memory = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class ClientFacts:
    """A client's knowledge of itself in a round.

    Attributes:
        client: Its id.
        round: From 1; 0 before.
        num_samples: Samples that it has in this round.
        label_counts: Of those by class [C], int64.
        work: How much it does; None where nobody works.
        submodel: The part of the model that it trains.
        told_share: See :attr:`share`; None: nobody told it.
    """

    client: int = 0
    round: int = 0
    num_samples: int = 0
    label_counts: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    work: ClientWork | None = None
    submodel: SubModel = FULL_MODEL
    told_share: float | None = None

    @property
    def classes(self) -> tuple[int, ...]:
        """The classes that it has samples of in this round, ascending."""
        return tuple(self.label_counts.nonzero().flatten().tolist())

    @property
    def share(self) -> float:
        """Its number of samples over the federation's mean, both as registered.

        Raises:
            ValueError: Neither the objective nor a term declares ``needs_share``: the mean is one value that the
                server sends to each client before round 1.
        """
        if self.told_share is None:
            raise ValueError("a client knows its share only where an objective or a term declares needs_share = True")
        return self.told_share


NOBODY = ClientFacts()


def eval_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a client's module in evaluation mode, to be asked under any values."""
    # Not the client's own: in training mode a forward pass would move its batch norms' statistics and draw its dropout.
    return copied(model).eval()


class FrozenModel:
    """A model under given values; gradients reach the inputs, not the values.

    Args:
        model: The module to ask with, a :func:`eval_copy`.
        values: Params by name, and float buffers.

    Raises:
        ValueError: Values are missing.
    """

    def __init__(self, model: nn.Module, values: ParamTree) -> None:
        missing = [name for name in trained_params(model) if name not in values]
        if missing:
            raise ValueError(f"a frozen model needs all params by name, but {', '.join(missing[:3])} are not given")
        # Passed along with each call, not written into the module: the next model to be asked must not change what a
        # backward pass of this one finds.
        self._model, self._values = model, {name: value.detach() for name, value in values.items()}

    def features(self, inputs: Tensor) -> Tensor:
        """Return output of the model's ``features`` [B, D]."""
        return features_with(self._model, self._values, inputs)

    def logits(self, inputs: Tensor) -> Tensor:
        """Return logits [B, C]."""
        return logits_with(self._model, self._values, inputs)


@dataclass(kw_only=True, slots=True)
class LocalStep:
    """One gradient step as objective and terms see it. ``features`` and ``logits`` are computed once, when asked.

    Attributes:
        inputs: The batch [B, ...], transformed; several tensors by name where the data set has several.
        targets: Its labels [B], or targets [B, ...].
        model: The module with the client's live params; forward passes carry gradients. Where the step trains a part
            of what the client has, it is that part's, and so are params, anchor, memory and what the server sent like
            the params, until the step is done; in ``gradient`` not where the loss read ``whole_logits``.
        params: The live params by name (views; not to be changed in place).
        anchor: The model that the client last received, params and float buffers, in what it is not sent its own at the
            job's start; empty where no term asks for it.
        memory: The client's memory slot of the term that is being called.
        broadcast: What the server sent beside the model.
        stream: Random numbers of this client at this step.
        position: The step's number within the round, from 0.
        learning_rate: The round's rate.
        whole: The module of all that the client has, where the step trains a part of it.
        client: What the client knows of itself.
        task: What is learned.
    """

    inputs: Tensor
    targets: Tensor
    model: nn.Module
    params: ParamTree
    anchor: ParamTree
    memory: Memory
    broadcast: Payload
    stream: Stream
    position: int
    learning_rate: float
    whole: nn.Module | None = None
    client: ClientFacts = NOBODY
    task: Task = Classification()
    _eval_copy: Callable[[], nn.Module] | None = None
    # Cuts a memory to the part that the step trains; None: it trains all.
    _cut: Callable[[Memory], Memory] | None = None
    _features: Tensor | None = None
    _logits: Tensor | None = None
    _whole_logits: Tensor | None = None

    @property
    def features(self) -> Tensor:
        """Output of the model's ``features`` for the batch [B, D]."""
        if self._features is None:
            features: Callable[[Tensor], Tensor] = self.model.features  # type: ignore[assignment]
            self._features = features(self.inputs)
        return self._features

    @property
    def logits(self) -> Tensor:
        """The model's outputs for the batch: logits [B, C], or what the task says [B, ...]."""
        if self._logits is None:
            # By way of the features where the network has them: a term that asks for them shares this forward pass.
            head = getattr(self.model, "head", None)
            split = head is not None and hasattr(self.model, "features")
            self._logits = head(self.features) if split else self.model(self.inputs)  # type: ignore[misc]
        return self._logits

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits of other inputs under the live params."""
        logits: Tensor = self.model(inputs)
        return logits

    @property
    def whole_logits(self) -> Tensor:
        """Logits for the batch of all that the client has [B, C], which the step then trains too."""
        if self.whole is None:
            return self.logits
        if self._whole_logits is None:
            self._whole_logits = self.whole(self.inputs)
        return self._whole_logits

    def head(self, features: Tensor) -> Tensor:
        """Return logits of given features [B, D] under the live params."""
        head: Callable[[Tensor], Tensor] = self.model.head  # type: ignore[assignment]
        return head(features)

    def frozen(self, values: ParamTree) -> FrozenModel:
        """Return a model that is only asked, in evaluation mode: ``step.frozen(step.anchor).logits(inputs)``.

        Args:
            values: All params by name, and the float buffers; buffers that are not given are the live ones.
        """
        if self._eval_copy is None:
            self._eval_copy = functools.cache(functools.partial(eval_copy, self.model))
        return FrozenModel(self._eval_copy(), dict(self.model.named_buffers()) | values)

    def forward_with(self, params: ParamTree, inputs: Tensor) -> Tensor:
        """Return logits of inputs under given, frozen params: of :meth:`frozen`."""
        return self.frozen(params).logits(inputs)


@dataclass(frozen=True, kw_only=True)
class LocalWork:
    """A finished job as a term's ``finish`` sees it.

    Attributes:
        anchor: The model that the client last received, params and float buffers; see :class:`LocalStep`.
        params: Its params now.
        values: The same with its float buffers, as :meth:`LocalStep.frozen` takes them.
        steps: Local steps of the job.
        effective_steps: Sum of the weights with which the job's gradients entered the move, see ``ClientUpdate``.
        learning_rate: The rate that was applied.
        step_scales: By name the scales that its steps had, see ``SubModel.step_scale``; empty: none had one.
        num_samples: Samples that the client holds in this round.
        broadcast: What the server sent beside the model.
        client: What the client knows of itself.
    """

    anchor: ParamTree
    params: ParamTree
    steps: int
    learning_rate: float
    num_samples: int
    broadcast: Payload
    values: ParamTree = field(default_factory=dict)
    effective_steps: float = math.nan
    step_scales: ParamTree = field(default_factory=dict)
    client: ClientFacts = NOBODY


class Objective(Checked, ABC):
    """The loss that a client minimises.

    Class attributes:
        needs_share: ``step.client.share`` is read.
        skips_padding: As of a task, where the task passes padding over; to be said again beside a subclass's own loss.
        in_lanes: See :class:`LocalTerm`.
    """

    needs_share: ClassVar[bool] = False
    skips_padding: ClassVar[bool] = False
    in_lanes: ClassVar[bool] = True

    @property
    def passes(self) -> float:
        """Cost of a step for a sample, in forward passes: one forward and a backward that costs two."""
        return 3

    @abstractmethod
    @returns(scalar)
    def loss(self, step: LocalStep) -> Tensor:
        """Return a differentiable scalar, the mean over the batch."""


@dataclass(frozen=True, kw_only=True)
class TaskLoss(Objective):
    """The task's loss of the batch: mean cross-entropy where samples are classified."""

    skips_padding: ClassVar[bool] = True

    def loss(self, step: LocalStep) -> Tensor:
        return step.task.loss(step.logits, step.inputs if step.task.of_inputs else step.targets)


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Cost of a term beside the plain step, in forward passes of one sample.

    Attributes:
        step: For each sample of a step; 1 for a teacher that is asked.
        job: For each of the client's samples, once in every job: work outside the steps.
    """

    step: float = 0
    job: float = 0


class LocalTerm(Checked, ABC):
    """Something that is added to the objective, with a memory of its own.

    Class attributes:
        sends: ``finish`` returns a payload; then every sync point goes through the server.
        needs_anchor: ``step.anchor`` is read.
        stateful: ``init`` returns something; the memory is kept between the client's participations.
        keeps_models: Trees of params in the memory are models: what of them the client's sub-models never held, a job
            finds as it was received; otherwise as 0.
        needs_share: The client's share of the samples is read.
        needs_effective_steps: ``LocalWork.effective_steps`` is read, so the optimiser must have such a number, and no
            other term's ``prepare`` have the client begin elsewhere than with what it received.
        in_lanes: Several clients' steps may be taken at once; false where it draws random numbers or looks at values.
        needs_exact_moves: The server repeats what the client makes of its move: no codec changes it, and that number is
            exact, since momentum, where there is any, starts at zero in each round.
        adds_up: The server adds up what the client notes of its moves, so each of them must reach it, once.
        sets_params: ``after_step`` or ``finish`` put params in the place of those to which a step led; zeros that have
            been zero all along do not count. One term of a method at most.

    A concrete term is a frozen dataclass with a ``name``, unique in a method. ``init``, ``prepare`` and ``finish`` may
    take further arguments: ``client: ClientFacts = NOBODY``, what the client knows of itself, and for work outside the
    steps ``local: LocalClient | None = None``, its data, its module in evaluation mode and random numbers.
    """

    sends: ClassVar[bool] = False
    needs_anchor: ClassVar[bool] = True
    stateful: ClassVar[bool] = False
    keeps_models: ClassVar[bool] = False
    needs_share: ClassVar[bool] = False
    needs_effective_steps: ClassVar[bool] = False
    in_lanes: ClassVar[bool] = True
    needs_exact_moves: ClassVar[bool] = False
    adds_up: ClassVar[bool] = False
    sets_params: ClassVar[bool] = False
    name: str

    @classmethod
    def has_own(cls, *hooks: str) -> bool:
        """Tell whether the term does something in one of these hooks."""
        return any(getattr(cls, hook) is not getattr(LocalTerm, hook) for hook in hooks)

    def passes(self, batch_size: int, num_classes: int) -> Passes:
        """Give what the term adds to the cost of a client's work.

        Args:
            batch_size: Samples of a step: a term with inputs of its own, one for each class, say, depends on it.
            num_classes: C.
        """
        return Passes()

    @returns(term_memory)
    def init(self, params: ParamTree) -> Memory:
        """Return the client's memory before its first job."""
        return {}

    @returns(pair("memory, params or None", term_memory, params_tree))
    def prepare(self, memory: Memory, anchor: ParamTree) -> tuple[Memory, ParamTree | None]:
        """Begin a job; may return params that replace the starting ones."""
        return memory, None

    @returns(optional(scalar))
    def loss(self, step: LocalStep) -> Tensor | None:
        """Return a differentiable scalar that is added to the objective."""
        return None

    @returns(params_tree)
    def gradient(self, step: LocalStep) -> ParamTree | None:
        """Return a gradient that is added after the backward pass, before clipping."""
        return None

    @returns(pair("memory, params or None", term_memory, params_tree))
    def after_step(self, step: LocalStep, gradients: ParamTree) -> tuple[Memory, ParamTree | None]:
        """End an optimiser step; may return params that replace the present ones."""
        return step.memory, None

    @returns(term_finish)
    def finish(
        self, memory: Memory, work: LocalWork
    ) -> tuple[Memory, Payload] | tuple[Memory, Payload, ParamTree | None]:
        """End a job; the payload travels with the update. Params that come third replace the present ones."""
        return memory, {}


class LocalSolver(Checked, ABC):
    """Takes one local step at a time.

    Class attributes:
        plain: A step is one gradient and one step of the optimiser, so it may be taken otherwise to the same end:
            several clients' together, or without this solver being asked. Not so, unless it says so again, for a class
            with a ``step`` of its own.
    """

    plain: ClassVar[bool] = False

    def __init_subclass__(cls, **more: object) -> None:
        super().__init_subclass__(**more)
        if "step" in vars(cls):
            cls.plain = bool(vars(cls).get("plain", False))

    @abstractmethod
    def step(self, optimizer: torch.optim.Optimizer, evaluate: Callable[[], Tensor]) -> Tensor:
        """Take one step and return the loss at its start.

        Args:
            optimizer: The client's optimiser over its parameters as one vector.
            evaluate: Computes the loss at the present parameters and leaves its gradient (terms and clipping
                included) with the optimiser; may be called several times.
        """


@dataclass(frozen=True, kw_only=True)
class OptimizerSteps(LocalSolver):
    """One gradient, one step of the configured optimiser."""

    plain: ClassVar[bool] = True

    def step(self, optimizer: torch.optim.Optimizer, evaluate: Callable[[], Tensor]) -> Tensor:
        loss = evaluate()
        optimizer.step()
        return loss
