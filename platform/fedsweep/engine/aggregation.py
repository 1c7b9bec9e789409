"""What the server does at a sync point: weigh, update, refine, learn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fedsweep.errors import InvariantError
from fedsweep.method import FederatedMethod
from fedsweep.records import ClientUpdate, State, SyncContext
from fedsweep.streams import Stream
from fedsweep.trees import FlatLayout


@dataclass(frozen=True, kw_only=True)
class SyncPlace:
    """Where in the run a sync point lies; see :class:`SyncContext` for the fields."""

    round: int
    index: int
    ends_round: bool
    vector: Tensor
    anchors: Mapping[int, Tensor]
    learning_rate: float
    cohort: tuple[int, ...]
    classes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


class Aggregator:
    """Carries out a method's server side.

    Args:
        method: The method.
        layout: How the full model lies in its vector.
        model: A template for the components' forward passes; taken over.
        stream_for: ``stream_for(seam, round, index)``.
        message: Takes a component's sentences for the user.
        working: Takes a component's lines on how far long work is.
        device: Where components do heavy work.
    """

    def __init__(
        self,
        method: FederatedMethod,
        layout: FlatLayout,
        *,
        model: nn.Module,
        stream_for: Callable[[str, int, int], Stream],
        message: Callable[[str], None] = lambda text: None,
        working: Callable[[str], None] = lambda text: None,
        device: str = "cpu",
    ) -> None:
        self._message, self._working, self._device = message, working, device
        self._method, self._layout, self._model, self._stream_for = method, layout, model, stream_for

    def weigh(self, state: State, updates: Sequence[ClientUpdate], place: SyncPlace) -> tuple[Tensor, State]:
        """Checked weights [M] of a sync point's attendees, and the weighting's new state."""
        sync = self._context("weighting", place)
        weights, state = self._method.weighting.weigh(state, updates, sync)
        fits = weights.shape == (len(updates),) and bool(torch.isfinite(weights).all())
        if not fits or float(weights.min()) < 0 or abs(float(weights.sum()) - 1) > 1e-6:
            raise InvariantError(
                f"{type(self._method.weighting).__name__} must give {len(updates)} non-negative weights that sum to 1,"
                f" but gave {weights.tolist()} in round {place.round}"
            )
        return weights, state

    def sync(
        self,
        components: Mapping[str, State],
        updates: Sequence[ClientUpdate],
        place: SyncPlace,
        *,
        keep: Callable[[str, State], None],
        resumed: Mapping[str, State],
    ) -> tuple[Tensor, Tensor, dict[str, State]]:
        """Aggregate.

        Args:
            components: The components' states.
            updates: The attendees', ascending by client, with vectors.
            place: Where this is.
            keep: ``keep(call, tree)`` saves a refinement's unfinished work.
            resumed: What such a call saved before an interruption.

        Returns:
            The server's next vector [V], the weights [M], the new states.
        """
        method, states = self._method, dict(components)
        seen = [self.shown(u, needs=method.weighting.needs_updates) for u in updates]
        weights, states["weighting"] = self.weigh(states["weighting"], seen, place)
        sync = self._context("server_update", place)
        vector, states["server_update"] = method.server_update.apply(states["server_update"], updates, weights, sync)
        for number, refinement in enumerate(method.refinements):
            if refinement.when == "round_end" and not place.ends_round:
                continue
            seam = f"refinement{number}"
            call = f"{seam}@{place.index}"  # of several calls in a round each finds what it kept itself
            sync = replace(
                self._context(seam, place),
                checkpoint=functools.partial(keep, call),
                resumed=resumed.get(call),
            )
            shown = [self.shown(u, needs=refinement.needs_updates) for u in updates]
            vector, states[seam] = refinement.refine(states[seam], vector, shown, sync)
        if not bool(torch.isfinite(vector).all()):
            raise InvariantError(f"the server's model has values that are not finite after round {place.round}")
        return vector, weights, self._learned(states, updates, replace(place, vector=vector))

    def _learned(self, states: dict[str, State], updates: Sequence[ClientUpdate], place: SyncPlace) -> dict[str, State]:
        for seam, component in self._method.server_components():
            shown = [self.shown(u, needs=component.needs_updates) for u in updates]
            states[seam] = component.learn(states[seam], shown, self._context(seam, place))
        return states

    @staticmethod
    def shown(update: ClientUpdate, *, needs: bool) -> ClientUpdate:
        """The update as a component may see it: without the vector where it said it needs none."""
        return update if needs or update.vector is None else replace(update, vector=None)

    def _context(self, seam: str, place: SyncPlace) -> SyncContext:
        return SyncContext(
            round=place.round,
            index=place.index,
            ends_round=place.ends_round,
            vector=place.vector,
            layout=self._layout,
            anchors=place.anchors,
            learning_rate=place.learning_rate,
            cohort=place.cohort,
            classes=place.classes,
            model=self._model,
            stream=self._stream_for(seam, place.round, place.index),
            checkpoint=lambda tree: None,
            message=self._message,
            working=self._working,
            device=self._device,
        )
