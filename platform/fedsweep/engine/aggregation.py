"""Aggregation at a sync point: clients' updates are made, weighed and averaged, refined and learned from."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fedsweep.client.messages import Handle, Progress, Reply
from fedsweep.components.base import ServerComponent
from fedsweep.engine.state import RunState
from fedsweep.guard import ask
from fedsweep.method import FederatedMethod
from fedsweep.records import ClientUpdate, State, SyncContext
from fedsweep.streams import stream
from fedsweep.submodel import FULL_MODEL, SubModel
from fedsweep.trees import FlatLayout, to_tensors


def client_update(
    reply: Reply,
    *,
    learning_rate: float,
    layout: FlatLayout,
    submodel: SubModel = FULL_MODEL,
) -> ClientUpdate:
    """Make a client's update from its answer; a progress without steps: it has yet to work, or was idle.

    Args:
        reply: What it sent, or stands for.
        learning_rate: The rate of its steps.
        layout: The full model's.
        submodel: What part of the model it has.
    """
    progress = reply.progress
    return ClientUpdate(
        client=reply.client,
        vector=reply.vector,
        layout=submodel.layout(layout),
        submodel=submodel,
        anchor_version=progress.anchor_version,
        num_samples=progress.samples,
        steps=progress.steps,
        effective_steps=progress.effective_steps,
        learning_rate=learning_rate,
        classes_since_anchor=progress.classes,
        train_loss=progress.loss_sum / progress.steps if progress.steps else float("nan"),
        extras=reply.extras,
    )


def held_update(
    client: int, state: RunState, fetch: Callable[[Handle], State], *, learning_rate: float, layout: FlatLayout
) -> ClientUpdate:
    """Return the update of a client that worked in earlier rounds only; it sends what it kept then.

    Args:
        client: Who.
        state: The run's state before the round.
        fetch: Gives the memory behind a handle.
        learning_rate: The rate of its last steps.
        layout: The full model's.
    """
    memory, progress = fetch(state.memories[client]), state.held[client]
    # A copy: arrays from Ray's object store are read-only.
    reply = Reply(client=client, vector=to_tensors(memory["held"]), progress=progress)
    return client_update(reply, learning_rate=learning_rate, layout=layout)


def model_alone(vector: Tensor, layout: FlatLayout) -> ClientUpdate:
    """Make an update of which no more than the model is known."""
    reply = Reply(client=0, vector=vector, progress=Progress())
    return client_update(reply, learning_rate=0.0, layout=layout)


def visible(updates: Sequence[ClientUpdate], component: ServerComponent) -> list[ClientUpdate]:
    """Return the updates as a component may see them: without vectors where it said that it needs none."""
    # Who did not say that it reads models can't: a folded round has none, and bits may not depend on folding.
    hidden = not component.needs_updates
    return [replace(u, vector=None) if hidden and u.vector is not None else u for u in updates]


class Aggregator:
    """Carries out a method's server side.

    Args:
        method: The method.
        seed: The run's.
    """

    def __init__(self, method: FederatedMethod, seed: int) -> None:
        self._method, self._seed = method, seed
        self._has_after_aggregate = method.submodels.has_own("after_aggregate")

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        """Return the checked weights [M] of a sync point's attendees, and the weighting's new state."""
        weighting = self._method.weighting
        attendees, own = visible(updates, weighting), self._for("weighting", sync)
        weights, state = ask(weighting, "weigh", state, attendees, own, like=attendees, when=f"in round {sync.round}")
        return weights, state

    def aggregate(
        self,
        components: Mapping[str, State],
        updates: Sequence[ClientUpdate],
        sync: SyncContext,
        *,
        keep: Callable[[str, State], None],
        resumed: Mapping[str, State],
        sent: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, dict[str, State]]:
        """Weigh, update, refine.

        Args:
            components: The components' states.
            updates: The attendees', ascending by client, with vectors.
            sync: The sync point, for nobody in particular.
            keep: ``keep(call, tree)`` saves a refinement's unfinished work.
            resumed: What such a call saved before an interruption.
            sent: Turns the server's next model into what clients decode of it; None: they get it as it is.

        Returns:
            The server's next vector [V], the weights [M], the new states.
        """
        method, states = self._method, dict(components)
        # Each model is checked as it comes: before anybody learns from it and a checkpoint keeps it.
        checked = functools.partial(ask, like=sync.vector, when=f"in round {sync.round}")
        weights, states["weighting"] = self.weigh(states["weighting"], updates, sync)
        own = self._for("server_update", sync)
        vector, states["server_update"] = checked(
            method.server_update, "apply", states["server_update"], updates, weights, own
        )
        # In the method's order, each on what the one before it made: the order is part of the method.
        for number, refinement in enumerate(method.refinements):
            if refinement.when == "round_end" and not sync.ends_round:
                continue
            seam = f"refinement{number}"
            call = f"{seam}@{sync.index}"  # of several calls in a round each finds what it kept itself
            own = replace(self._for(seam, sync), checkpoint=functools.partial(keep, call), resumed=resumed.get(call))
            vector, states[seam] = checked(
                refinement, "refine", states[seam], vector, visible(updates, refinement), own
            )
        if self._has_after_aggregate:
            seen, own = visible(updates, method.submodels), self._for("submodels", sync)
            vector, states["submodels"] = checked(
                method.submodels, "after_aggregate", states["submodels"], vector, seen, own
            )
        return vector if sent is None else sent(vector), weights, states

    def learned(self, states: dict[str, State], updates: Sequence[ClientUpdate], sync: SyncContext) -> dict[str, State]:
        """Return the states after components have learned of a sync point; those that are given are changed."""
        when = f"in round {sync.round}"
        for seam, component in self._method.having["learn"]:
            seen, own = visible(updates, component), self._for(seam, sync)
            states[seam] = ask(component, "learn", states[seam], seen, own, like=sync.vector, when=when)
        return states

    def _for(self, seam: str, sync: SyncContext) -> SyncContext:
        """Return the sync point as a component sees it: with random numbers that no other component has."""
        # By the sync point's number, not by how many were aggregated here: folded or not, a component draws the same.
        return replace(sync, stream=stream(self._seed, seam, sync.round, -1, sync.index))
