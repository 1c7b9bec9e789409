"""Communication budgets: which clients can afford the high rate, and how many of them the server admits.

A :class:`Budget` is the rule of the scenario; :meth:`Budget.assign` applies it to the clients once, at the start of the
run, and gives a :class:`BudgetPlan` that methods ask each round. Costs are values (scalars) that a client moves in a
round, kappa = 2 x |W| x number of synchronisations, and come from the method.

Source: DynamicFL (budgets tau_m and tau_g, costs kappa_m and kappa_g, Eq. 2 and 5; settings Fix-beta and Dynamic-beta).
"""

from __future__ import annotations

import csv
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedsweep.errors import ConfigError, DataError
from fedsweep.parameters.byte_counts import Bytes, whole_bytes
from fedsweep.parameters.ranges import Checked, NotNegative, Positive, Share, check_value
from fedsweep.streams import Stream
from fedsweep.world.spec_checks import read_text

Array = TypeVar("Array", bound=NDArray[np.generic])

# Products such as 0.57 x 100 lie a hair off the whole number that is meant.
SLACK = 1e-9


@dataclass(frozen=True, kw_only=True)
class RunSpending:
    """A run's spending so far.

    Attributes:
        num_bytes: Sent, both ways.
        seconds: Virtual ones; 0 without devices.
        most_bytes: The budget or limit; None: there is none.
        most_s: Likewise, virtual seconds.
    """

    num_bytes: int = 0
    seconds: float = 0.0
    most_bytes: int | None = None
    most_s: float | None = None

    @property
    def left_bytes(self) -> int | None:
        """Bytes that are left; None: there is no limit."""
        return None if self.most_bytes is None else max(0, self.most_bytes - self.num_bytes)

    @property
    def left_s(self) -> float | None:
        """Virtual seconds that are left; None: there is no limit."""
        return None if self.most_s is None else max(0.0, self.most_s - self.seconds)


@dataclass(frozen=True, kw_only=True, eq=False)
class BudgetPlan(ABC):
    """Clients' budgets for a whole run."""

    @abstractmethod
    def client_budgets(self, cost_high: float, cost_low: float) -> NDArray[np.float64]:
        """Return tau_m: each client's budget per round [N], in values; infinite where there is no limit.

        Args:
            cost_high: kappa of a client that synchronises at the high rate.
            cost_low: kappa at the low rate.
        """

    def max_high(self, cohort_size: int, *, cost_high: float, cost_low: float) -> int:
        """Return H: the largest number of high-rate clients in a cohort of this size, 0..cohort_size.

        All, where the server has no limit.

        Raises:
            ConfigError: The server's budget does not even cover a cohort at the low rate.
        """
        return cohort_size

    def eligible(self, cohort: Sequence[int], cost_high: float) -> NDArray[np.bool_]:
        """Return whether each client affords the high rate [M], in the cohort's order: tau_m >= kappa_high."""
        # The low cost only fills the budgets of clients that cannot afford more, so any smaller number serves.
        budgets = self.client_budgets(cost_high, -math.inf)
        return np.asarray(budgets[np.asarray(cohort, dtype=np.int64)] >= cost_high)

    def check(self, cohort: Sequence[int] | None, cost_low: float, *, cost_high: float) -> None:
        """Refuse clients that cannot afford even the low rate.

        Args:
            cohort: Clients to look at; None: all.
            cost_low: kappa at the low rate.
            cost_high: kappa at the high rate.

        Raises:
            ConfigError: A budget is below ``cost_low``; the message names the first such client and what it lacks.
        """
        budgets = self.client_budgets(cost_high, cost_low)
        clients = range(len(budgets)) if cohort is None else cohort
        poor = [client for client in clients if budgets[client] < cost_low]
        if poor:
            first = poor[0]
            others = f" ({len(poor) - 1} more clients lack as well)" if len(poor) > 1 else ""
            raise ConfigError(
                f"each client's budget must cover the low rate, {cost_low:.15g} values a round, but client {first} "
                f"has {budgets[first]:.15g}, {cost_low - budgets[first]:.15g} too few{others}; raise its budget or "
                "the method's low interval"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class RelativeBudgets(BudgetPlan):
    """Budgets that are defined by what they buy.

    Attributes:
        affords_high: Whether each client's budget is kappa_high [N]; otherwise it is kappa_low.
        admitted_fraction: The share of a cohort that the server admits at the high rate.
    """

    affords_high: NDArray[np.bool_]
    admitted_fraction: float = 1.0

    def client_budgets(self, cost_high: float, cost_low: float) -> NDArray[np.float64]:
        return np.where(self.affords_high, float(cost_high), float(cost_low))

    def max_high(self, cohort_size: int, *, cost_high: float, cost_low: float) -> int:
        return math.floor(self.admitted_fraction * cohort_size + SLACK)


@dataclass(frozen=True, kw_only=True, eq=False)
class GivenBudgets(BudgetPlan):
    """Budgets in values.

    Attributes:
        values: Each client's [N], >= 0; infinite where there is no limit.
        server_values: The server's, >= 0 or infinite.
    """

    values: NDArray[np.float64]
    server_values: float = math.inf

    def client_budgets(self, cost_high: float, cost_low: float) -> NDArray[np.float64]:
        return self.values

    def max_high(self, cohort_size: int, *, cost_high: float, cost_low: float) -> int:
        all_low = cohort_size * cost_low
        if self.server_values < all_low:
            raise ConfigError(
                f"the server's budget must cover {cohort_size} clients at the low rate, {all_low:.15g} values a round, "
                f"but it is {self.server_values:.15g}, {all_low - self.server_values:.15g} too few; raise it, take a "
                "smaller cohort, or raise the method's low interval"
            )
        if cost_high <= cost_low or math.isinf(self.server_values):
            return cohort_size
        # Whole costs compare exactly here, where a quotient might be off by one.
        fits = (h for h in range(cohort_size, 0, -1) if all_low + h * (cost_high - cost_low) <= self.server_values)
        return next(fits, 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedBudgets(BudgetPlan):
    """Budgets as shares of the high rate's cost; no limit on the server.

    Attributes:
        shares: Each client's budget over kappa_high [N], >= 0; the high rate is affordable from 1 on.
    """

    shares: NDArray[np.float64]

    def client_budgets(self, cost_high: float, cost_low: float) -> NDArray[np.float64]:
        return self.shares * cost_high


@dataclass(frozen=True, kw_only=True)
class Budget(Checked, ABC):
    """A scenario's way to hand out budgets."""

    section: ClassVar[str] = "scenario.budgets"

    @abstractmethod
    def assign(self, num_clients: int, stream: Stream) -> BudgetPlan | None:
        """Hand the budgets out, once for the whole run; None where clients have none of their own.

        Args:
            num_clients: N, clients in the federation.
            stream: Decides who is chosen; the same stream chooses the same clients.

        Raises:
            ConfigError: The budgets are given for another number of clients.
        """


@dataclass(frozen=True, kw_only=True)
class FixedBudget(Budget):
    """Client heterogeneity: ceil(budget_fraction x N) clients afford the high rate, the same ones in all rounds.

    Attributes:
        budget_fraction: The papers' beta, 0..1. The server has no limit.

    Source: DynamicFL, setting Fix-beta.
    """

    budget_fraction: Share

    def assign(self, num_clients: int, stream: Stream) -> BudgetPlan:
        affords = np.zeros(num_clients, dtype=np.bool_)
        chosen = math.ceil(self.budget_fraction * num_clients - SLACK)
        affords[stream.numpy().choice(num_clients, size=chosen, replace=False)] = True
        return RelativeBudgets(affords_high=_frozen(affords))


@dataclass(frozen=True, kw_only=True)
class DynamicBudget(Budget):
    """Server heterogeneity: every client affords the high rate, the server admits floor(budget_fraction x A) of A.

    Attributes:
        budget_fraction: The papers' beta, 0..1: an upper bound, methods may take fewer.

    Source: DynamicFL, setting Dynamic-beta.
    """

    budget_fraction: Share

    def assign(self, num_clients: int, stream: Stream) -> BudgetPlan:
        affords = _frozen(np.ones(num_clients, dtype=np.bool_))
        return RelativeBudgets(affords_high=affords, admitted_fraction=float(self.budget_fraction))


@dataclass(frozen=True, kw_only=True)
class ValueBudget(Budget):
    """Budgets by hand, in values a round.

    Attributes:
        clients: One number per client, one for all, or the path of a CSV file with one number per line in the order of
            the clients, or lines ``client,budget_values``; a header is allowed. >= 0, may be infinite.
        server: The server's, >= 0, may be infinite.
    """

    clients: str | tuple[float, ...] | float = math.inf
    server: NotNegative = math.inf

    def __post_init__(self) -> None:
        if isinstance(self.clients, str):
            object.__setattr__(self, "clients", _read_csv(self.clients))
        _check_per_client("scenario.budgets.clients", self.clients, default=math.inf)
        super().__post_init__()

    def assign(self, num_clients: int, stream: Stream) -> BudgetPlan:
        values = _per_client("budgets.clients", self.clients, num_clients)
        return GivenBudgets(values=values, server_values=float(self.server))


@dataclass(frozen=True, kw_only=True)
class MixedBudget(Budget):
    """tau_m = (weight x user share + (1 - weight) x bandwidth share) x kappa_high.

    Attributes:
        user_share: What the user is willing to spend, as a share of the high rate's cost; one number per client or one
            for all, >= 0.
        bandwidth_share: What the link carries, in the same unit.
        weight: Weight of the user's share, 0..1.

    Source: DynamicFL defines tau as the mean of user budget and bandwidth (weight 0.5) and never uses it in its
        experiments.
    Reading: both are shares of kappa_high, so that they can be averaged and hold for any model and interval; shares
        above 1 are allowed, since a rich link may make up for a thrifty user.
    """

    user_share: tuple[float, ...] | float
    bandwidth_share: tuple[float, ...] | float
    weight: Share = 0.5

    def __post_init__(self) -> None:
        _check_per_client("scenario.budgets.user_share", self.user_share)
        _check_per_client("scenario.budgets.bandwidth_share", self.bandwidth_share)
        super().__post_init__()

    def assign(self, num_clients: int, stream: Stream) -> BudgetPlan:
        user = _per_client("budgets.user_share", self.user_share, num_clients)
        bandwidth = _per_client("budgets.bandwidth_share", self.bandwidth_share, num_clients)
        # Rounded, so that shares of 0.9 and 1.1 make 1 and not a hair less.
        return SharedBudgets(shares=_frozen(np.round(self.weight * user + (1 - self.weight) * bandwidth, 12)))


@dataclass(frozen=True, kw_only=True)
class TotalBudget(Budget):
    """A budget of the whole run, which it never passes; a planner spends it.

    Attributes:
        total_bytes: Both ways, what goes before round 1 included: a number, or a text such as ``2 GB``; kB, MB,
            GB and TB are powers of 1000.
        sim_time_s: Virtual seconds.
    """

    total_bytes: Bytes | None = None
    sim_time_s: Positive | None = None

    def __post_init__(self) -> None:
        if self.total_bytes is None and self.sim_time_s is None:
            raise ConfigError("scenario.budgets of kind total needs total_bytes, e.g. 2 GB, or sim_time_s")
        object.__setattr__(self, "total_bytes", whole_bytes(self.total_bytes))
        super().__post_init__()

    def assign(self, num_clients: int, stream: Stream) -> None:
        return None


BUDGETS: Mapping[str, type[Budget]] = {
    "fixed": FixedBudget,
    "dynamic": DynamicBudget,
    "values": ValueBudget,
    "mixed": MixedBudget,
    "total": TotalBudget,
}


def _read_csv(path: str) -> tuple[float, ...]:
    try:
        lines = [row for row in csv.reader(read_text("scenario.budgets.clients", path).splitlines()) if row]
    except csv.Error as error:
        raise DataError(f"{path} must be a CSV file, but: {error}; correct it") from error
    if lines and not any(map(_is_number, lines[0])):
        lines = lines[1:]
    width = len(lines[0]) if lines else 0
    if width not in (1, 2) or any(len(row) != width or not all(map(_is_number, row)) for row in lines):
        raise DataError(
            f"{path} must have one number per line, or lines `client,budget_values`, with an optional header; "
            "correct it"
        )
    if width == 1:
        return tuple(float(row[0]) for row in lines)
    by_client = {row[0].strip(): float(row[1]) for row in lines}
    ids = [str(client) for client in range(len(lines))]
    if sorted(by_client) != sorted(ids):
        raise DataError(f"{path} must name each client from 0 to {len(lines) - 1} once; correct its first column")
    return tuple(by_client[client] for client in ids)


def _is_number(text: str) -> bool:
    try:
        return not math.isnan(float(text))
    except ValueError:
        return False


def _check_per_client(name: str, values: object, *, default: float | None = None) -> None:
    if not isinstance(values, tuple):
        check_value(name, values, NotNegative, default=default)
        return
    for client, value in enumerate(values):
        check_value(f"{name}[{client}]", value, NotNegative, default=default)


def _per_client(name: str, amounts: str | tuple[float, ...] | float, num_clients: int) -> NDArray[np.float64]:
    if isinstance(amounts, tuple) and len(amounts) != num_clients:
        raise ConfigError(
            f"`{name}` must have one number per client, but it has {len(amounts)} and scenario.clients={num_clients}; "
            "change one of the two, or give one number for all"
        )
    return _frozen(np.broadcast_to(np.asarray(amounts, dtype=np.float64), (num_clients,)).copy())


def _frozen(array: Array) -> Array:
    array.setflags(write=False)
    return array
