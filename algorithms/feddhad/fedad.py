"""FedAD: each device trains a smaller model, without units that do little, the smaller the slower the device.

Units are scored by the devices, and a base rate is taken from the curvature of their losses. From the base rate follow
rates of devices (by their times), from those the rates of units (by their scores); each round each device draws its
units anew. FedDHAD is FedDH's weights with FedAD's sub-models: ``merge(feddh(), fedad())``.

Source: Liu et al. (2025), FedDHAD: federated learning with dynamic aggregation and adaptive dropout, section on FedAD.

Shape letters: U maskable units of the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedsweep import Card, ConfigError, FederatedMethod, Limit, Network, with_card
from fedsweep.components import (
    FULL_MODEL,
    BelowOne,
    ClientUpdate,
    ComponentReport,
    Count,
    Positive,
    Probe,
    RoundContext,
    ServerContext,
    State,
    SubModel,
    SubModelPolicy,
    SyncContext,
    UnitGroup,
    fwd_macs_per_sample,
    parameters_of,
    takes,
    unit_submodel,
)

from ..parts.unit_draws import no_units
from .curvature import CurvatureGap
from .dropout_rates import (
    DeviceRate,
    Multiplier,
    device_dropout,
    device_time,
    drawn_units,
    rates_of_round,
    scales_in,
    target_time,
    unit_rates,
    why_not_in_weights,
)
from .unit_scores import UnitScores, maskable_groups

BaseRate = float | Literal["hessian"]
Refresh = Literal["trigger"] | tuple[int, ...]
Reference = Literal["largest", "slowest"]
SoftmaxOver = Literal["kind", "layer"]
Units = Mapping[str, tuple[int, ...]]
Scales = Mapping[str, tuple[float, ...]]

_WHOLE = "clients train the whole model, as in FedAvg"


@dataclass(frozen=True, kw_only=True)
class UnitDropout(SubModelPolicy):
    """Sub-models of units that are drawn by rates which follow unit scores and device times.

    Attributes:
        base_rate: Mean dropout rate of the reference device: a number, or hessian: from the gaps between the curvatures
            of the devices' losses. 0.05 is close to the paper's savings; 0 is FedAvg bit for bit.
        base_rate_cap: Largest base and device rate. On small networks the curvature rule gives 0 or nearly 1, so that
            the cap decides.
        device_rate: balanced: slow devices drop more, so that all take about as long; printed: the paper's formulas to
            the letter, where the fastest drops most. Without scenario.devices every device has the base rate.
        unit_rate_cap: Largest rate of one unit; what exceeds it is handed to the others. 0.5: multipliers of at most 2.
        reference: The device whose time the others are measured by: largest (data set) or slowest.
        softmax_over: Units that share a mean rate: kind (all filters, all neurons, all attention heads) or layer.
        temperature: Of the softmax over scores; the smaller, the further apart the units' rates. Small values (0.05)
            drive units of slow devices to unit_rate_cap.
        multiplier: Where 1 / (1 - rate) of a kept unit acts in training: activation: behind it; incoming: in the
            weights and biases that make it, divided out when they come back, so that their steps are smaller; split:
            its square root there and in the weights that read it; none: nowhere; auto: incoming where it can be had,
            else activation. The first three compute the same at a round's start. incoming and split need ReLU without
            norms, and SGD.
        scores: How units are scored.
    """

    base_rate: BaseRate = "hessian"
    base_rate_cap: BelowOne = 0.5
    device_rate: DeviceRate = "balanced"
    unit_rate_cap: BelowOne = 0.5
    reference: Reference = "largest"
    softmax_over: SoftmaxOver = "kind"
    temperature: Positive = 1.0
    multiplier: Multiplier = "auto"
    scores: UnitScores = UnitScores()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.base_rate != "hessian" and not 0 <= self.base_rate <= self.base_rate_cap:
            raise ConfigError(
                "0 <= base_rate <= base_rate_cap must hold, but got"
                f" base_rate={self.base_rate}, base_rate_cap={self.base_rate_cap}; lower method.base_rate"
            )

    @property
    def scales_steps(self) -> bool:
        return bool(self.base_rate) and self.multiplier in ("incoming", "split")

    def _costs(self, context: ServerContext) -> dict[str, Any]:
        """Return forward multiply-adds of a sample, 0 where no unit is ever left out; and whether there are filters.

        Raises:
            ConfigError: The network lists no units that can be left out, or none whose weights can bear the multiplier.
        """
        groups = maskable_groups(context.model)
        if not self.base_rate:
            return {"macs": 0, "has_filters": False}
        if not groups:
            raise no_units(context.model, method="fedad")
        scales_in(self.multiplier, context.model)
        shape = cast(Network, context.model).input_shape
        macs = fwd_macs_per_sample(context.model, shape, count_batch_norm=False)
        return {"macs": macs, "has_filters": any(group.kind == "conv" for group in groups)}

    def _own_scores(self, state: State) -> UnitScores:
        """Return the probe of scores, with what it costs on the network."""
        return replace(self.scores, has_filters=state["has_filters"])

    def _device_rate(self, time_s: float, target_s: float) -> float:
        """Return a device's mean rate, as far as its units can have it."""
        rate = device_dropout(time_s, target_s, cap=self.base_rate_cap, device_rate=self.device_rate)
        return min(rate, self.unit_rate_cap)

    def _unit_rates(self, groups: Sequence[UnitGroup], scores_U: Tensor, rate: float) -> dict[str, np.ndarray]:
        """Return each group's rates [size]."""
        parts = np.split(scores_U.numpy(), np.cumsum([group.size for group in groups])[:-1])
        together: dict[str, list[int]] = {}
        for number, group in enumerate(groups):
            together.setdefault(group.kind if self.softmax_over == "kind" else group.name, []).append(number)
        rates: dict[str, np.ndarray] = {}
        for members in together.values():
            joined = np.concatenate([parts[number] for number in members])
            joined_rates = unit_rates(joined, rate, cap=self.unit_rate_cap, temperature=self.temperature)
            for number in members:
                size = groups[number].size
                rates[groups[number].name], joined_rates = joined_rates[:size], joined_rates[size:]
        return rates

    def _drawn(self, context: RoundContext, client: int, scores_U: Tensor, rate: float) -> tuple[Units, Scales]:
        """Draw a device's units at its mean rate, and return them with their multipliers."""
        groups = maskable_groups(cast(Network, context.model))
        generator = context.stream.child("units", client).numpy()
        return drawn_units(groups, self._unit_rates(groups, scores_U, rate), generator=generator)

    def _part(self, model: nn.Module, units: Units, scales: Scales) -> SubModel:
        """Return the sub-model of drawn units, with their multipliers where these act."""
        form, groups = scales_in(self.multiplier, model), cast(Network, model).unit_groups()
        return unit_submodel(groups, units, scales=None if form is None else scales, scales_in=form or "activation")


@dataclass(frozen=True, kw_only=True)
class AdaptiveDropout(UnitDropout):
    """Sub-models of units drawn by rates that follow unit scores, curvature and device times.

    Rates are 0 until the first refresh. In rounds that measure, devices get the full model. A refresh sets the base
    rate, the unit scores and the time to which devices are levelled.

    Attributes:
        refresh: When scores and rates are measured anew: trigger (when the scores settle) or a list of rounds, in which
            the devices train the full model.
        check_every: Rounds between two checks of the trigger.
        patience: Checks in a row without a smaller change of the scores before the first refresh.

    Source: FedDHAD, section on FedAD. Reading: the trigger compares the scores' change from check to check: the first
    refresh comes after ``patience`` checks in a row whose change has not fallen, later ones at each check whose change
    has. With ``"hessian"`` and the trigger the curvature is measured, and the scores anew, in the round after the check
    that asked for it: only then does the server know. Without simulated devices all count as equally fast, so every
    device has the base rate. Reading: the paper's "generate the sub model using the mask variables" can mean
    multipliers on activations, or in the weights that are sent: the same forward pass with smaller steps. Dividing them
    out on return is ours; without it the weights would grow from round to round.
    Reading: attention heads are a kind of their own beside filters and neurons, each kind with the device's mean rate;
    a head is left out with its query, key and value, and its multiplier acts on its output before the projection.
    """

    refresh: Refresh = "trigger"
    check_every: Count = 10
    patience: Count = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        rounds = () if self.refresh == "trigger" else self.refresh
        if any(low >= high for low, high in pairwise((0, *rounds))):
            raise ConfigError(f"method.refresh must be rounds in ascending order from 1, but got {list(rounds)}")

    def init(self, context: ServerContext) -> State:
        """Return the state before any score, with all rates 0.

        Raises:
            ConfigError: The network lists no units that can be left out, or none whose weights can bear the multiplier.
        """
        return {
            **self._costs(context),
            "params": context.layout.num_params,
            "scores": None,
            "base_rate": 0.0,
            "raw_base_rate": 0.0,
            "target_s": 0.0,
            "times": {},
            "seen": None,
            "change": None,
            "quiet": 0,
            "triggered": False,
            "due": False,
            "refreshes": 0,
            "rates": rates_of_round([], []),
        }

    # -- what a user should know ---------------------------------------------------------------------------------

    def notes(self, context: ServerContext, state: State | None = None) -> tuple[str, ...]:
        """Warn of rates that come too late for the run or are 0, and of a multiplier that can't be where it is best."""
        if state is not None:
            return tuple(filter(None, [self._idle(state)]))
        if not self.base_rate:
            return (f"base_rate=0: {_WHOLE}",)
        if late := self._too_late(context):
            return (late,)
        if self.multiplier == "auto" and (between := why_not_in_weights(context.model)):
            return (f"{between}, so the multiplier acts on activations (method.multiplier=activation)",)
        return ()

    def _too_late(self, context: ServerContext) -> str:
        if self.refresh == "trigger":
            first = self.check_every * (self.patience + 2) + (self.base_rate == "hessian")
            why = f"with check_every={self.check_every}, patience={self.patience} the first refresh is in round {first}"
        else:
            first = min(self.refresh, default=context.num_rounds)
            why = f"the first refresh is in round {first}"
        if first < context.num_rounds:
            return ""
        return (
            f"{why}, and rates hold from the next one on, but the run has {context.num_rounds}: {_WHOLE}; set"
            " method.refresh=[1], say"
        )

    def _idle(self, state: State) -> str:
        """Say why no unit was left out at the run's end; empty where rates were measured, and more than 0."""
        if self.base_rate and not state["refreshes"]:
            return f"there was no refresh: {_WHOLE}; set method.refresh=[1], say"
        if not state["base_rate"]:
            why = f"the curvature rule gave a base rate of 0 at the last of {state['refreshes']} refreshes"
            return f"{why if self.base_rate else 'base_rate=0'}: {_WHOLE}; set method.base_rate=0.05, say"
        return ""

    # -- what is measured, and when ------------------------------------------------------------------------------

    def _is_check(self, round: int) -> bool:
        return bool(self.base_rate) and self.refresh == "trigger" and round % self.check_every == 0

    def _is_refresh(self, state: State, round: int) -> bool:
        """Return whether a round was announced as one in which everything is measured."""
        listed = self.refresh != "trigger" and round in self.refresh
        return bool(self.base_rate) and (listed or bool(state["due"]))

    def probes(self, state: State, round: int) -> tuple[Probe, ...]:
        if self._is_refresh(state, round):
            own = self._own_scores(state)
            return (own, CurvatureGap(num_params=state["params"])) if self.base_rate == "hessian" else (own,)
        return (self._own_scores(state),) if self._is_check(round) else ()

    def learn(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> State:
        measured = [u for u in updates if "unit_scores/scores" in u.extras]
        if not measured:
            return state
        scores = _mean([u.extras["unit_scores/scores"] for u in measured], measured)
        is_refresh, due = self._is_refresh(state, sync.round), False
        if self._is_check(sync.round):
            state, due = self._checked(state, scores)
        if is_refresh or (due and self.base_rate != "hessian"):
            return self._refreshed(state, measured, scores)
        return {**state, "due": due}

    def _checked(self, state: State, scores: Tensor) -> tuple[State, bool]:
        """Return the trigger's step at a check, and whether it asks for a refresh."""
        before, last = state["seen"], state["change"]
        change = None if before is None else float((scores - before).norm())
        quiet, triggered, due = state["quiet"], state["triggered"], False
        if change is not None and last is not None:
            fell = change < last
            quiet = 0 if fell else quiet + 1
            due = fell if triggered else quiet >= self.patience
        return {**state, "seen": scores, "change": change, "quiet": quiet, "triggered": triggered or due}, due

    def _refreshed(self, state: State, measured: Sequence[ClientUpdate], scores: Tensor) -> State:
        if self.base_rate == "hessian":
            rates = [u.extras["curvature_gap/rate"] for u in measured]
            raw = float(_mean(rates, measured))
            base = float(_mean([rate.clamp(0.0, self.base_rate_cap) for rate in rates], measured))
        else:
            raw = base = float(self.base_rate)
        times = state["times"]
        if self.reference == "largest":
            chosen = max(measured, key=lambda u: (u.num_samples, -u.client)).client
        else:
            chosen = max(measured, key=lambda u: (times[u.client], -u.client)).client
        return {
            **state,
            "scores": scores,
            "base_rate": base,
            "raw_base_rate": raw,
            "target_s": target_time(base, times[chosen], device_rate=self.device_rate),
            "due": False,
            "refreshes": state["refreshes"] + 1,
        }

    # -- sub-models ----------------------------------------------------------------------------------------------

    def assign(self, state: State, context: RoundContext) -> tuple[Mapping[int, SubModel], State]:
        whole: dict[int, SubModel] = dict.fromkeys(context.cohort, FULL_MODEL)
        # Scores and curvature are those of the whole model, so in such a round everybody trains it.
        if self._is_check(context.round) or self._is_refresh(state, context.round):
            times = {k: device_time(state["macs"], context, k) for k in context.cohort}
            samples = [context.profiles[k].num_samples for k in context.cohort]
            return whole, {**state, "times": times, "rates": rates_of_round([0.0] * len(samples), samples)}
        if not state["base_rate"] or not context.cohort or context.model is None:
            return whole, state
        submodels: dict[int, SubModel] = {}
        device_rates = []
        for client in context.cohort:
            time_s = device_time(state["macs"], context, client)
            rate = self._device_rate(time_s, state["target_s"])
            device_rates.append(rate)
            submodels[client] = self._part(context.model, *self._drawn(context, client, state["scores"], rate))
        samples = [context.profiles[k].num_samples for k in context.cohort]
        return submodels, {**state, "rates": rates_of_round(device_rates, samples)}

    def report(self, state: State) -> ComponentReport:
        """Return the rates: base (as used and as measured), those of the round's devices; refreshes so far."""
        return ComponentReport(
            metrics={
                "dropout_base_rate": state["base_rate"],
                "dropout_base_rate_raw": state["raw_base_rate"],
                "dropout_refreshes": float(state["refreshes"]),
                **state["rates"],
            }
        )


def _mean(values: Sequence[Tensor], updates: Sequence[ClientUpdate]) -> Tensor:
    """Return ``sum_k n_k x_k / sum_k n_k`` in float64."""
    total = sum(u.num_samples for u in updates)
    parts = [value.to(torch.float64) * u.num_samples for value, u in zip(values, updates, strict=True)]
    return torch.stack(parts).sum(dim=0) / total


def scores_up(*, units: int, round: int, refresh: Refresh, check_every: int, base_rate: BaseRate) -> int:
    """A score for each of `units` in the rounds of `refresh`, with `base_rate` hessian the client's rate, 1 value, too.

    Under the trigger the scores alone in each `check_every`-th round; with `base_rate` 0 nothing.
    """
    if not base_rate:
        return 0
    if refresh == "trigger":
        return units if round % check_every == 0 else 0
    return units + (base_rate == "hessian") if round in refresh else 0


@with_card(
    Card(
        title="FedAD",
        source="Liu et al. 2025, FedDHAD",
        needs=("units", "classes"),
        up=(scores_up,),
        limits=(Limit(given={"base_rate": 0.0}),),
        live=("dropout_base_rate", "dropout_device_rate"),
        differs=("Under the trigger the rounds that measure again follow from training: they are not in the formula.",),
        small={"base_rate": 0.4, "refresh": [1]},
    )
)
@takes(AdaptiveDropout, UnitDropout, UnitScores, but=("scores", "name", "has_filters"))
def fedad(**parameters: Any) -> FederatedMethod:
    """FedAvg on sub-models: units that do little are left out at random, more of them on slow devices."""
    own = parameters_of(AdaptiveDropout, parameters)
    rounds = own.pop("refresh")
    return FederatedMethod(
        name="fedad",
        submodels=AdaptiveDropout(
            refresh=rounds if rounds == "trigger" else tuple(rounds),
            scores=UnitScores(**parameters_of(UnitScores, parameters)),
            **own,
        ),
    )
