"""What the server does at a sync point: weigh, update, refine, learn."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedsweep.errors import InvariantError
from fedsweep.guard import new_state, pair, vector_and_state, wrong
from fedsweep.method import FederatedMethod
from fedsweep.records import ClientUpdate, State, SyncContext
from fedsweep.streams import stream


class Aggregator:
    """Carries out a method's server side.

    Args:
        method: The method.
        seed: The run's.
    """

    def __init__(self, method: FederatedMethod, seed: int) -> None:
        self._method, self._seed = method, seed

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        """Checked weights [M] of a sync point's attendees, and the weighting's new state."""
        weighting, when = self._method.weighting, f"in round {sync.round}"
        given = weighting.weigh(state, updates, self._for("weighting", sync))
        weights, state = pair(given, weighting, "weigh", must=f"weights [{len(updates)}], state", when=when)
        if not isinstance(weights, Tensor):
            raise wrong(weighting, "weigh", must="a tensor of weights, and its state", given=weights, when=when)
        # Checked here for every weighting: a wrong sum shifts the model in silence, and a NaN is found rounds later.
        fits = weights.shape == (len(updates),) and bool(torch.isfinite(weights).all()) and float(weights.min()) >= 0
        if not fits or (weighting.sums_to_one and abs(float(weights.sum()) - 1) > 1e-6):
            rule = " that sum to 1" if weighting.sums_to_one else ""
            raise InvariantError(
                f"{type(weighting).__name__} must give {len(updates)} non-negative weights{rule},"
                f" but gave {weights.tolist()} in round {sync.round}"
            )
        return weights, state

    def aggregate(
        self,
        components: Mapping[str, State],
        updates: Sequence[ClientUpdate],
        sync: SyncContext,
        *,
        keep: Callable[[str, State], None],
        resumed: Mapping[str, State],
    ) -> tuple[Tensor, Tensor, dict[str, State]]:
        """Weigh, update, refine, learn.

        Args:
            components: The components' states.
            updates: The attendees', ascending by client, with vectors.
            sync: The sync point, for nobody in particular.
            keep: ``keep(call, tree)`` saves a refinement's unfinished work.
            resumed: What such a call saved before an interruption.

        Returns:
            The server's next vector [V], the weights [M], the new states.
        """
        method, states = self._method, dict(components)
        seen = {needs: [self.shown(u, needs=needs) for u in updates] for needs in (True, False)}
        weights, states["weighting"] = self.weigh(states["weighting"], seen[method.weighting.needs_updates], sync)
        when = f"in round {sync.round}"
        given = method.server_update.apply(states["server_update"], updates, weights, self._for("server_update", sync))
        # Each model as it comes: before anybody learns from it and a checkpoint keeps it.
        vector, states["server_update"] = vector_and_state(given, sync.vector, method.server_update, "apply", when=when)
        # In the method's order, each on what the one before it made: the order is part of the method.
        for number, refinement in enumerate(method.refinements):
            if refinement.when == "round_end" and not sync.ends_round:
                continue
            seam = f"refinement{number}"
            call = f"{seam}@{sync.index}"  # of several calls in a round each finds what it kept itself
            own = self._for(seam, sync)
            own = replace(own, checkpoint=functools.partial(keep, call), resumed=resumed.get(call))
            given = refinement.refine(states[seam], vector, [*seen[refinement.needs_updates]], own)
            vector, states[seam] = vector_and_state(given, sync.vector, refinement, "refine", when=when, before=vector)
        shown = [*seen[method.submodels.needs_updates]]
        given = method.submodels.settle(states["submodels"], vector, shown, self._for("submodels", sync))
        vector, states["submodels"] = vector_and_state(
            given, sync.vector, method.submodels, "settle", when=when, before=vector
        )
        # Last, so that each component learns of the model that the next round starts from.
        after = replace(sync, vector=vector)
        for seam, component in method.server_components():
            if component.has_own("learn"):
                learnt = component.learn(states[seam], [*seen[component.needs_updates]], self._for(seam, after))
                states[seam] = new_state(learnt, states[seam], component, "learn", when=when)
        return vector, weights, states

    @staticmethod
    def shown(update: ClientUpdate, *, needs: bool) -> ClientUpdate:
        """The update as a component may see it: without the vector where it said it needs none."""
        # Who did not say that it reads models can't: a folded round has none, and bits may not depend on folding.
        return update if needs or update.vector is None else replace(update, vector=None)

    def _for(self, seam: str, sync: SyncContext) -> SyncContext:
        """The sync point as a component sees it: with random numbers that no other component has."""
        # By the sync point's number, not by how many were aggregated here: folded or not, a component draws the same.
        return replace(sync, stream=stream(self._seed, seam, sync.round, -1, sync.index))
