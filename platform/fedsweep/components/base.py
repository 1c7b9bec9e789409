"""The base of all server-side components: optional hooks, each with a default that does nothing.

A component is a frozen, keyword-only dataclass whose fields are hyper-parameters. What changes during a run is its
state: made by :meth:`init`, kept and checkpointed by the engine, handed in and handed back. A state is a tree of
dicts, lists, tuples, tensors, arrays, numbers, strings and None, and is never changed in place.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from torch import Tensor

from fedsweep.components.probes import Probe
from fedsweep.guard import Call, items, named, new_state, returns
from fedsweep.parameters.ranges import Checked
from fedsweep.records import ClientUpdate, Payload, RoundRecord, ServerContext, State, SyncContext


@dataclass(frozen=True, kw_only=True)
class ComponentReport:
    """A component's figures and pictures after a round.

    Attributes:
        metrics: Numbers by name; they become columns and MLflow metrics.
        high_frequency: The group that synchronises often, if there is one.
        pictures: Arrays by name ([H, W] or [H, W, 3], 0..1), saved as PNG.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    high_frequency: tuple[int, ...] | None = None
    pictures: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Published:
    """Content of which every client gets the same.

    Attributes:
        value: On the CPU; never changed in place.
        like: ``"params"``: one value per param of the full model [P], in their order; a client gets those of its
            sub-model. None: it is sent as it is.
        is_kept: Clients keep it until it changes; otherwise it is sent with the model each time.
        made: Which codecs' messages have made it what it is, where it goes through one; set by the engine.
    """

    value: Tensor
    like: Literal["params"] | None = None
    is_kept: bool = True
    made: tuple[tuple[int, ...], ...] = ()


def _a_report(answer: Any, call: Call) -> None:
    if not isinstance(answer, ComponentReport):
        raise call.wrong("a ComponentReport", answer)
    for name, value in answer.metrics.items():
        if not isinstance(value, int | float | np.number):
            raise call.wrong(f"numbers as metrics ({name!r})", value)


class ServerComponent(Checked, ABC):
    """Base of every server-side component.

    Class attributes:
        needs_updates: The component reads the updates' vectors. Where no component does, and the server update is
            the plain mean, aggregations inside a round may happen among the client actors.
        probes_stay: What its probes measure stays with the client, so that they go with models that meet elsewhere than
            at the server: nothing of it travels. Only those are asked in a round whom ``Probe.asks`` names.
        observes_start: The initial model is evaluated, and ``observe`` sees that as the record of a round 0.
    """

    needs_updates: ClassVar[bool] = False
    probes_stay: ClassVar[bool] = False
    observes_start: ClassVar[bool] = False

    @property
    def needs_whole_models(self) -> bool:
        """Tell whether clients must train the whole model; sub-models are then refused before the run."""
        return False

    @property
    def asks_models(self) -> bool:
        """Tell whether the server makes forward passes of clients' models; refused where these don't travel whole."""
        return False

    @classmethod
    def has_own(cls, *hooks: str) -> bool:
        """Tell whether the component's class has one of these optional hooks, whatever that comes to in a round."""
        # Against the seam, not the parent: a hook that a component has from another one is asked all the same.
        return any(getattr(cls, hook) is not _of_the_seam(cls, hook) for hook in hooks)

    def registration(self) -> tuple[str, ...]:
        """Return names of what clients send once before round 1 for this component (``"label_counts"``)."""
        return ()

    def init(self, context: ServerContext) -> State:
        """Return the state before round 1."""
        return {}

    @returns(items(Probe))
    def setup(self, state: State, context: ServerContext) -> tuple[Probe, ...]:
        """Return one-off exchange before round 1: what every client measures at the initial model."""
        return ()

    @returns(new_state)
    def setup_done(self, state: State, answers: Mapping[int, Payload], context: ServerContext) -> State:
        """Return the state after every client has answered this component's set-up probes."""
        return state

    @returns(named(Published))
    def publish(self, state: State) -> Mapping[str, Published]:
        """Publish what clients get once and keep until it changes; metered once per client and version, if so.

        Clients find it under its name, or under ``"<name>/<param>"`` where it lies like the params.
        """
        return {}

    @returns(items(Probe))
    def probes(self, state: State, round: int) -> tuple[Probe, ...]:
        """Return extra measurements that this round's clients make."""
        return ()

    @returns(new_state)
    def learn(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> State:
        """Return the state after a sync point."""
        return state

    @returns(new_state)
    def observe(self, state: State, record: RoundRecord) -> State:
        """Return the state after a round."""
        return state

    def notes(self, context: ServerContext, state: State | None = None) -> tuple[str, ...]:
        """Warn the user, in sentences: of what the component will not do in such a run, or did not do.

        Args:
            context: The run's.
            state: At the run's end; None before it (``--dry-run``).
        """
        return ()

    @returns(_a_report)
    def report(self, state: State) -> ComponentReport:
        """Report what is to be seen after a round."""
        return ComponentReport()


def _of_the_seam(kind: type, hook: str) -> object:
    """Return the hook as the seam's abstract base has it: the first class that knows it."""
    return next(vars(base)[hook] for base in reversed(kind.__mro__) if hook in vars(base))
