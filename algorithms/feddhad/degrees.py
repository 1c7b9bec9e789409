"""Non-IID degrees of clients, and the aggregation weights that follow from them; FedJS, where they are not learned.

Shape letters: C classes, M attendees, N federation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsweep.components.aggregation import Weighting
from fedsweep.errors import ConfigError
from fedsweep.records import ClientUpdate, ServerContext, State, SyncContext
from fedsweep.world.label_stats import js_divergence, population


def degrees(v: Tensor, b: Tensor, js: Tensor, *, floor: float) -> tuple[Tensor, Tensor]:
    """D = max(v JS + b, floor), and where the floor is not active (there D follows v and b); shapes as given."""
    raw = v * js + b
    return raw.clamp_min(floor), raw > floor


def degree_weights(num_samples_M: Tensor, degrees_M: Tensor) -> Tensor:
    """``q_k = (n_k / D_k) / sum_j n_j / D_j`` in float64 [M]; with equal degrees the very bits of n_k / sum_j n_j.

    Args:
        num_samples_M: n, above 0.
        degrees_M: D, above 0.
    """
    # Weights do not depend on the degrees' scale; relative to the largest, equal ones are exactly 1.
    counts = num_samples_M.double() / (degrees_M / degrees_M.max())
    return counts / counts.sum()


def divergences(counts_NC: np.ndarray) -> Tensor:
    """JS_k [N] of each client's labels from the population's, in nats: 0 .. ln 2.

    Args:
        counts_NC: Samples per client and class.

    Source: FedDHAD, Eq. of JS_k; logarithms are natural, 0 ln 0 = 0.
    """
    return torch.from_numpy(np.asarray(js_divergence(counts_NC, population(counts_NC)), dtype=np.float64).copy())


def label_counts_of(context: ServerContext) -> np.ndarray:
    """Samples per client and class [N, C]."""
    return np.stack([np.asarray(profile.label_counts, dtype=np.float64) for profile in context.profiles])


def samples_of(updates: Sequence[ClientUpdate]) -> Tensor:
    """The attendees' numbers of samples in float64 [M]."""
    return torch.tensor([u.num_samples for u in updates], dtype=torch.float64)


def check_floor(floor: float) -> None:
    """Raise a ConfigError unless the smallest degree is above 0."""
    if not 0 < floor < math.inf:
        raise ConfigError(f"method.floor must be a number above 0, but got {floor}")


@dataclass(frozen=True, kw_only=True)
class JensenShannon(Weighting):
    """Samples over the Jensen-Shannon divergence of the client's labels: FedJS, FedDH without learning.

    Attributes:
        floor: Smallest degree, above 0.

    Source: FedDHAD, the static comparator. Reading: the paper has no floor, but equal distributions give a
    degree of 0.
    """

    floor: float = 1e-3

    def __post_init__(self) -> None:
        check_floor(self.floor)

    def registration(self) -> tuple[str, ...]:
        """Label counts."""
        return ("label_counts",)

    def init(self, context: ServerContext) -> State:
        """JS of every client."""
        return {"js": divergences(label_counts_of(context))}

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        js = state["js"][[u.client for u in updates]]
        found, _ = degrees(torch.ones_like(js), torch.zeros_like(js), js, floor=self.floor)
        return degree_weights(samples_of(updates), found), state
