"""Aggregation: how much each attendee counts, how one model comes of theirs, what the server does with it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedsweep.components.base import ServerComponent
from fedsweep.errors import InvariantError
from fedsweep.guard import Call, finite_vector, pair, returns
from fedsweep.parameters.ranges import Checked
from fedsweep.records import ClientUpdate, State, SyncContext
from fedsweep.trees import coverage_mean

When = Literal["always", "round_end"]


def _weights(answer: Any, call: Call) -> None:
    """Check weights against the class: a wrong sum shifts the model in silence, a NaN shows rounds later."""
    if not isinstance(answer, Tensor):
        raise call.wrong("a tensor of weights, and its state", answer)
    count, sums_to_one = len(call.like), call.component.sums_to_one  # type: ignore[attr-defined]
    fits = answer.shape == (count,) and bool(torch.isfinite(answer).all()) and float(answer.min()) >= 0
    if not fits or (sums_to_one and abs(float(answer.sum()) - 1) > 1e-6):
        rule = " that sum to 1" if sums_to_one else ""
        raise InvariantError(
            f"{type(call.component).__name__} must give {count} non-negative weights{rule},"
            f" but gave {answer.tolist()} {call.when}"
        )


class Weighting(ServerComponent):
    """Gives each attendee its aggregation weight.

    Class attributes:
        sums_to_one: The weights are shares, and the mean of the models is what comes of them. Otherwise they are steps:
            the params move by ``sum c_k (y_k - x)``, which may be shorter or longer than the mean's move; buffers go as
            far, but never beyond the mean. Then a round does not fold.
        from_anchor: A move is counted from the model that the client started from, ``y_k - a_k``, however old that is,
            and not from the server's present one; buffers take the mean. Then a round does not fold either.
        needs_effective_steps: ``ClientUpdate.effective_steps`` is read, so the optimiser must have such a number.
        knows_clients: Weights follow from what is known of each client: edge servers' models have none.

    Source: Wang et al. (2020), FedNova, and Nguyen et al. (2022), FedBuff, are steps from anchors; Xie et al. (2019),
    FedAsync, is a step towards one model, ``x + c (y - x)``.
    """

    sums_to_one: ClassVar[bool] = True
    from_anchor: ClassVar[bool] = False
    needs_effective_steps: ClassVar[bool] = False
    knows_clients: ClassVar[bool] = False

    @property
    def needs_mean(self) -> bool:
        """Tell whether weights are learned by how the models' mean moves with them, so that they must have one."""
        return False

    @property
    def needs_one_rate(self) -> bool:
        """Tell whether moves are divided by the client's learning rate, so that all parameters must have the same."""
        return self.needs_effective_steps

    def shares_of(self, updates: Sequence[ClientUpdate]) -> Tensor | None:
        """Return the shares [M] that steps are multiples of; None: their own, of what they sum to.

        Where clients hold parts of the model, a param moves by ``sum c_k (y_k - x)`` over its holders, divided by the
        sum of their shares.
        """
        return None

    @abstractmethod
    @returns(pair("weights [{n}], state", _weights))
    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        """Return weights [M] in float64, non-negative, that sum to 1 unless the class says otherwise; the new state.

        Where ``needs_updates`` is False, the weights of a sync point inside a round depend on who attends alone, and
        the state there stays as it is: where nobody could tell, such a point never comes to the server.
        """


def by_samples(updates: Sequence[ClientUpdate]) -> Tensor:
    """Compute ``n_k / sum_j n_j`` in float64 [M]."""
    counts = torch.tensor([u.num_samples for u in updates], dtype=torch.float64)
    return counts / counts.sum()


@dataclass(frozen=True, kw_only=True)
class BySamples(Weighting):
    """Weights proportional to the clients' numbers of samples.

    Source: McMahan et al. (2017), Algorithm 1.
    """

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        return by_samples(updates), state


@dataclass(frozen=True, kw_only=True)
class Uniform(Weighting):
    """The same weight for each attendee."""

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        return torch.full((len(updates),), 1.0 / len(updates), dtype=torch.float64), state


class Aggregation(Checked, ABC):
    """Makes one model of several: of what meets at the server before the server update, and at any other hub.

    Class attributes:
        plain_mean: It is the coverage mean. Any other rule goes with whole models and weights that are shares alone.
    """

    plain_mean: ClassVar[bool] = False

    @abstractmethod
    def combine(self, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext) -> Tensor:
        """Return one vector [V] of the attendees' models, which come ascending by client.

        Args:
            updates: Whole models, with vectors.
            weights: Their shares of a mean [M], float64.
            sync: The sync point; ``sync.vector`` is the hub's model before.
        """


@dataclass(frozen=True, kw_only=True)
class Mean(Aggregation):
    """The weighted mean.

    Source: McMahan et al. (2017), Algorithm 1.
    """

    plain_mean: ClassVar[bool] = True

    def combine(self, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext) -> Tensor:
        return mean_of_updates(updates, weights, sync)


class ServerUpdate(ServerComponent):
    """Turns what is combined of the attendees' models into the server's next model.

    Class attributes:
        plain_mean: ``apply`` is :func:`combined` and nothing else.
        combines: ``apply`` begins with :func:`combined`, so that it goes with every aggregation; False: it makes
            something of the models itself.
    """

    plain_mean: ClassVar[bool] = False
    combines: ClassVar[bool] = True

    @property
    def follows_mean(self) -> bool:
        """Tell whether the next model moves by as much as what is combined, of the parts that clients were given."""
        return True

    @property
    def has_several(self) -> bool:
        """Tell whether clients start from other models, too: then no move counts from the one that the server has."""
        return False

    @abstractmethod
    @returns(pair("vector [{n}], state", finite_vector))
    def apply(
        self, state: State, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext
    ) -> tuple[Tensor, State]:
        """Return the server's next vector [V] and the new state.

        It begins with :func:`combined`. Only the first ``layout.num_params`` coordinates may be extrapolated; buffers
        and riders take what is combined.
        """


def combined(updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext) -> Tensor:
    """Return what the method's aggregation makes of the attendees' models [V]; by default :func:`mean_of_updates`."""
    return mean_of_updates(updates, weights, sync) if sync.combine is None else sync.combine(updates, weights, sync)


def mean_of_updates(updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext) -> Tensor:
    """Average the attendees' models [V], sorted by client id, with these weights: their coverage mean.

    Where the weighting gives steps instead of shares (``Weighting.sums_to_one``), the server's params and the step;
    steps from the server that sum to 1 are the mean, bit for bit. Where they sum to less, the server's buffers have
    the rest, as its params do.
    """
    covered = []
    for update in updates:
        if update.vector is None:
            raise ValueError("an aggregation on the server needs the attendees' models")
        covered.append(update.submodel.embed(update.vector, sync.layout))
    rows, covers = [c.vector for c in covered], [c.cover for c in covered]
    total = float(weights.sum())
    if sync.moves_from is None or (math.isclose(total, 1, rel_tol=1e-12) and _start_at_server(updates, sync)):
        return coverage_mean(sync.vector, rows, covers, weights.tolist())
    # Steps may all be 0: then nothing moves, and nothing can be divided by their sum.
    shares = (weights / total).tolist() if total else [0.0] * len(updates)
    vector = coverage_mean(sync.vector, rows, covers, shares) if total else sync.vector.clone()
    if sync.moves_from == "server" and total < 1:
        vector = torch.lerp(sync.vector, vector, total)
    params = slice(sync.layout.num_params)
    # Differences of near vectors: in float64, so that a step of nearly all weight is nearly the mean.
    server = sync.vector[params].double()
    starts = [
        sync.anchors[u.anchor_version][params].double() if sync.moves_from == "anchor" else server for u in updates
    ]
    moves = [row[params].double() - start for row, start in zip(rows, starts, strict=True)]
    param_covers = [None if cover is None else cover[params] for cover in covers]
    # Over zeros: what nobody holds does not move.
    mean_move = coverage_mean(torch.zeros_like(server), moves, param_covers, shares)
    vector[params] = (server + _lengths(weights, sync.shares_of(updates), param_covers) * mean_move).to(vector)
    return vector


def _lengths(weights: Tensor, shares: Tensor | None, covers: Sequence[Tensor | None]) -> Tensor | float:
    """Return the factor of the moves' mean [P]: its holders' steps over their shares, of all of them the steps' sum."""
    total, some = float(weights.sum()), [cover for cover in covers if cover is not None]
    if shares is None or not some:
        return total
    steps, mass = torch.zeros(2, len(some[0]), dtype=torch.float64)
    for weight, share, cover in zip(weights.tolist(), shares.tolist(), covers, strict=True):
        is_held = 1.0 if cover is None else cover.double()
        steps += weight * is_held
        mass += share * is_held
    # The sum itself where all hold a param: no rounding then tells parts that are alike from the whole.
    return torch.where(torch.stack(some).all(dim=0), total, steps / mass.clamp_min(torch.finfo(mass.dtype).tiny))


def _start_at_server(updates: Sequence[ClientUpdate], sync: SyncContext) -> bool:
    """Tell whether every update's move is counted from the server's present model."""
    starts = {u.anchor_version for u in updates} if sync.moves_from == "anchor" else set()
    return all(torch.equal(sync.anchors[version], sync.vector) for version in starts)


@dataclass(frozen=True, kw_only=True)
class Replace(ServerUpdate):
    """The server's next model is what is combined of the attendees' models.

    Source: McMahan et al. (2017), Algorithm 1.
    """

    needs_updates: ClassVar[bool] = False
    plain_mean: ClassVar[bool] = True

    def apply(
        self, state: State, updates: Sequence[ClientUpdate], weights: Tensor, sync: SyncContext
    ) -> tuple[Tensor, State]:
        # As `combined` has it, without a call more in FedAvg's round.
        combine = sync.combine or mean_of_updates
        return combine(updates, weights, sync), state


class Refinement(ServerComponent):
    """Changes the aggregated model; a method has a tuple of these.

    Class attributes:
        when: At every aggregation, or only at the one that ends the round.
        needs_server: False where the method is whole without it if no model meets at a server: it then goes there.
    """

    when: ClassVar[When] = "round_end"
    needs_server: ClassVar[bool] = True

    @abstractmethod
    @returns(pair("vector [{n}], state", finite_vector))
    def refine(
        self, state: State, vector: Tensor, updates: Sequence[ClientUpdate], sync: SyncContext
    ) -> tuple[Tensor, State]:
        """Return the refined vector [V] and the new state."""
