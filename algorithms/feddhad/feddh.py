"""FedDH, FedDHE and FedJS: clients whose labels are far from the population's count less.

A client's weight is its number of samples over its non-IID degree ``D_k = v_k JS_k + b_k``, where JS_k is the
Jensen-Shannon divergence of its labels from the population's. The control parameters v_k and b_k are learned by one
gradient step a round on the global loss (FedDH) or stay at 1 and 0 (FedJS). FedDHE estimates the label shares.

Source: Liu et al. (2025), FedDHAD: federated learning with dynamic aggregation and adaptive dropout, section on FedDH,
Algorithm 1, Theorem 5.7.

Shape letters: C classes, M attendees, N federation, P trained parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedsweep import Card, ConfigError, FederatedMethod, Limit, with_card
from fedsweep.components import (
    FULL_MODEL,
    PASSES_OF_A_STEP,
    ClientUpdate,
    ComponentReport,
    NotNegative,
    ParamTree,
    Positive,
    Probe,
    ServerContext,
    Share,
    State,
    SyncContext,
    Weighting,
    coverage_mean,
    logits_with,
    taken,
    takes,
    trained_params,
)

from ..parts.server_updates import in_whole
from .degrees import (
    GradientAtAnchor,
    JensenShannon,
    degree_gradients,
    degree_weights,
    degrees,
    divergences,
    label_counts_of,
    loss_gradient,
    mean_gradient,
    mean_move,
    no_gradient,
    note_of_equals,
    pulls,
    refuse_without_classes,
    samples_of,
    sent_gradient,
    with_gradient,
)

GradientSource = Literal["deferred", "same_round", "explicit", "proxy"]
Estimate = Literal["counts", "gradients"]
EstimateFrom = Literal["reciprocal", "norm"]


@dataclass(frozen=True, kw_only=True)
class NonIIDDegree(Weighting):
    """Samples over a learned non-IID degree ``D_k = max(v_k JS_k + b_k, floor)``.

    The weights of a round's last aggregation take part in one gradient step on v and b; other sync points use v and b
    as they are. Clients that did not attend keep theirs.

    Attributes:
        gradient: Where the server takes the gradient for the degrees from: deferred (the next round's clients' moves),
            same_round (the moves that led to the aggregate, as printed), explicit (the next round's clients measure
            and send it: one more model up) or proxy (labelled data on the server).
        learning_rate_v: Rate of the factor v_k of the label divergence; 0: not learned.
        decay_v: Its decay per round.
        learning_rate_b: Rate of the offset b_k; 0: not learned.
        decay_b: Its decay per round.
        floor: Smallest degree; a larger one, 0.02 say, keeps nearly IID clients from taking all the weight.
        estimate: Label shares as counts that clients register, or estimated from gradients on labelled, balanced data
            on the server (FedDHE).
        sharpness: Factor in the exponent of FedDHE's estimate.
        estimate_from: Whether that exponent has the reciprocal of a class's squared gradient norm or that (as printed).

    Source: FedDHAD, section on FedDH and Algorithm 1. Reading: the paper has no floor, but equal distributions give a
    degree of 0. It does not say where the server's gradient comes from: the moves of the next round's clients start
    exactly at the aggregate; the printed order of the steps fits those of the same round, which led to it. Weights of
    sizes in the global loss are those of the clients that were drawn. ``deferred`` and ``explicit`` keep one value per
    attendee and parameter until the next round.
    """

    needs_updates: ClassVar[bool] = True

    gradient: GradientSource = "deferred"
    learning_rate_v: NotNegative = 1e-4
    decay_v: Share = 0.999
    learning_rate_b: NotNegative = 1e-4
    decay_b: Share = 0.99
    floor: Positive = 1e-3
    estimate: Estimate = "counts"
    sharpness: NotNegative = 1.0
    estimate_from: EstimateFrom = "reciprocal"

    @property
    def _learns(self) -> bool:
        return bool(self.learning_rate_v or self.learning_rate_b)

    @property
    def _waits(self) -> bool:
        """Return whether the gradient comes with the next round."""
        return self._learns and self.gradient in ("deferred", "explicit")

    @property
    def needs_mean(self) -> bool:
        return self._learns  # by the chain rule, through that mean

    @property
    def needs_one_rate(self) -> bool:
        """Tell whether gradients are read off the clients' moves."""
        return self._learns and self.gradient in ("deferred", "same_round")

    @property
    def asks_models(self) -> bool:
        return self.estimate == "gradients"

    def registration(self) -> tuple[str, ...]:
        return ("label_counts",) if self.estimate == "counts" else ()

    def init(self, context: ServerContext) -> State:
        """Return factors v of 1 and offsets b of 0 for everybody.

        Raises:
            ConfigError: Proxy data or classes are needed but not there, or do not fit.
        """
        if self.estimate == "gradients":
            refuse_without_classes(context, "estimate=gradients")
        if self._learns and self.gradient in ("explicit", "proxy"):
            refuse_without_classes(context, f"gradient={self.gradient}")
        size = len(context.profiles)
        state: dict[str, object] = {
            "v": torch.ones(size, dtype=torch.float64),
            "b": torch.zeros(size, dtype=torch.float64),
            "pending": None,
            "proxy": self._proxy(context),
        }
        if self.estimate == "counts":
            return state | {"js": divergences(label_counts_of(context))}
        return state | {
            "sizes": torch.tensor([p.num_samples for p in context.profiles], dtype=torch.float64),
            "shares": torch.zeros(size, context.num_classes, dtype=torch.float64),
            "known": torch.zeros(size, dtype=torch.bool),
        }

    def notes(self, context: ServerContext, state: State | None = None) -> tuple[str, ...]:
        rest = f"sizes {'and the offsets b' if self.learning_rate_b else 'alone'}"
        notes = () if self.estimate == "gradients" else note_of_equals(context, rest)
        if state is None and self._learns and self.gradient == "explicit":
            notes += ("forecasts leave out the pass that clients take for the gradient (method.gradient=explicit)",)
        return notes

    def _proxy(self, context: ServerContext) -> dict[str, Tensor] | None:
        wanted = "gradient=proxy" if self.gradient == "proxy" and self._learns else ""
        wanted = "estimate=gradients" if self.estimate == "gradients" else wanted
        if not wanted:
            return None
        inputs, targets = context.proxy_data or (None, None)
        if inputs is None or targets is None:
            raise ConfigError(
                f"method.{wanted} needs labelled data on the server; set scenario.server_data.proxy to"
                " {per_class: 10, labelled: true}, say"
            )
        counts = torch.bincount(targets, minlength=context.num_classes)
        if self.estimate == "gradients" and (int(counts.min()) < 1 or int(counts.min()) != int(counts.max())):
            raise ConfigError(
                "method.estimate=gradients needs the same number of proxy samples, at least one, of each class, but got"
                f" {counts.tolist()}; set scenario.server_data.proxy.per_class"
            )
        return {"inputs": inputs, "targets": targets}

    def probes(self, state: State, round: int) -> tuple[Probe, ...]:
        """Return the gradient at the last aggregate, where it is to be measured; in a round's first jobs alone."""
        pending = state["pending"]
        if self.gradient != "explicit" or pending is None or pending["followed_in"] == round:
            return ()
        return (GradientAtAnchor(),)

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        if self.estimate == "gradients":
            state = self._estimated(state, updates, sync)
        if state["pending"] is not None:
            state = self._followed(state, updates, sync)
        members = [u.client for u in updates]
        js = self._divergences(state)[members]
        degrees_M, free = degrees(state["v"][members], state["b"][members], js, floor=self.floor)
        weights = degree_weights(samples_of(updates), degrees_M)
        # A single attendee has all the weight whatever its degree, so there is nothing to be learned from it.
        if not self._learns or not sync.ends_round or len(updates) == 1:
            return weights, state
        pending = {
            # The newest anchor is the present model, which this aggregation replaces.
            "version": max(sync.anchors) + 1,
            "round": sync.round,
            "clients": members,
            "degrees": degrees_M,
            # dD/dv and dD/db: JS and 1, and 0 where the floor holds.
            "js": js * free,
            "free": free.double(),
            "pulls": pulls(updates, weights, sync),
            "followed_in": 0,
        }
        if self._waits:
            return weights, {**state, "pending": pending | no_gradient(sync.layout.num_params)}
        return weights, self._stepped(state, pending, self._gradient_now(state, updates, weights, sync=sync))

    # -- label shares --------------------------------------------------------------------------------------------

    def _estimated(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> State:
        """Add the label shares of clients that come for the first time."""
        shares, estimated = state["shares"].clone(), state["known"].clone()
        for update in updates:
            # Without a step a client has the server's model, which tells nothing of its labels.
            if estimated[update.client] or not update.steps:
                continue
            module = update.submodel.build(sync.model)
            squares = _squared_gradient_norms(module, update.params, state["proxy"], shares.shape[1])
            shares[update.client] = estimated_shares(
                squares, sharpness=self.sharpness, estimate_from=self.estimate_from
            )
            estimated[update.client] = True
            samples = len(state["proxy"]["targets"])
            sync.count_flops(PASSES_OF_A_STEP * samples * sync.forward_flops(update.submodel))
        return {**state, "shares": shares, "known": estimated}

    def _divergences(self, state: State) -> Tensor:
        """Return JS [N]; who was never seen has the mean of the others, 0 where nobody was."""
        if self.estimate == "counts":
            js: Tensor = state["js"]
            return js
        divergences_N = torch.zeros(len(state["known"]), dtype=torch.float64)
        estimated = state["known"]
        if bool(estimated.any()):
            of_estimated = divergences((state["sizes"][estimated, None] * state["shares"][estimated]).numpy())
            divergences_N[estimated] = of_estimated
            divergences_N[~estimated] = of_estimated.mean()
        return divergences_N

    # -- the gradient step ---------------------------------------------------------------------------------------

    def _followed(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> State:
        """Add the gradient at the last round's aggregate, from these clients, who started there."""
        pending = state["pending"]
        for update in updates:
            # It started from another model, where the gradient is another.
            if update.anchor_version != pending["version"]:
                continue
            vector = sent_gradient(update) if self.gradient == "explicit" else mean_move(update, sync)
            if vector is not None:
                pending = with_gradient(pending, vector, update, sync)
        if not sync.ends_round:
            return {**state, "pending": pending | {"followed_in": sync.round}}
        return {**self._stepped(state, pending, mean_gradient(pending)), "pending": None}

    def _gradient_now(
        self, state: State, updates: Sequence[ClientUpdate], weights: Tensor, *, sync: SyncContext
    ) -> Tensor:
        if self.gradient == "same_round":
            sums = no_gradient(sync.layout.num_params)
            for update in updates:
                vector = mean_move(update, sync)
                sums = sums if vector is None else with_gradient(sums, vector, update, sync)
            return mean_gradient(sums)
        parts = [in_whole(u, sync) for u in updates]
        mean = coverage_mean(sync.vector, [c.vector for c in parts], [c.cover for c in parts], weights.tolist())
        views, model = sync.layout.views(mean), copy.deepcopy(sync.model).eval()
        samples = len(state["proxy"]["targets"])
        sync.count_flops(PASSES_OF_A_STEP * samples * sync.forward_flops(FULL_MODEL))
        return loss_gradient(
            lambda own, x: logits_with(model, {**views, **own}, x),
            sync.layout.params(mean),
            state["proxy"]["inputs"],
            targets=state["proxy"]["targets"],
        )

    def _stepped(self, state: State, pending: State, gradient: Tensor) -> State:
        """Step ``v_k -= rate_v dF/dv_k``, ``b_k -= rate_b dF/db_k`` for the attendees of the aggregation."""
        slopes = degree_gradients(gradient, pending["pulls"], pending["degrees"])
        v, b, members, past = state["v"].clone(), state["b"].clone(), pending["clients"], pending["round"] - 1
        v[members] -= self.learning_rate_v * self.decay_v**past * slopes * pending["js"]
        b[members] -= self.learning_rate_b * self.decay_b**past * slopes * pending["free"]
        return {**state, "v": v, "b": b}

    def report(self, state: State) -> ComponentReport:
        return ComponentReport(
            metrics={"noniid_v_mean": float(state["v"].mean()), "noniid_b_mean": float(state["b"].mean())}
        )


# -- FedDHE's estimate of a client's label shares -----------------------------------------------------------------


def _squared_gradient_norms(module: nn.Module, params: ParamTree, proxy: State, num_classes: int) -> Tensor:
    """Return G [C], float64: of each class the squared norm of its samples' mean loss's gradient, in evaluation mode.

    A class that the client has seen often is fitted already, so its gradient on a balanced set is small.
    """
    trained = {name: params[name] for name in trained_params(module)}
    model, squares = copy.deepcopy(module).eval(), []
    for label in range(num_classes):
        of_class = proxy["targets"] == label
        gradient = loss_gradient(
            lambda own, x: logits_with(model, {**params, **own}, x),
            trained,
            taken(proxy["inputs"], of_class),
            targets=proxy["targets"][of_class],
        )
        squares.append(gradient.double().square().sum())
    return torch.stack(squares)


def estimated_shares(squares_C: Tensor, *, sharpness: float, estimate_from: EstimateFrom) -> Tensor:
    """Return label shares [C], of sum 1: ``softmax(sharpness * x)`` with ``x = 1/G`` or ``G``, divided by its mean.

    Args:
        squares_C: G, squared norms, at least 0.
        sharpness: At least 0; 0: all classes alike.
        estimate_from: ``"reciprocal"``: 1/G; ``"norm"``: G.

    Source: FedDHAD, FedDHE's estimate. Reading: the paper prints softmax(G) and announces a factor that is missing in
    the formula; the reciprocal fits its reason, that a class well represented has a small gradient, and was closer to
    the truth in a trial. The division by the mean keeps the exponent in range.
    """
    largest = squares_C.max()
    if not float(largest) > 0:
        return torch.full_like(squares_C, 1.0 / len(squares_C))
    # A class may be fitted so well that its gradient is 0, which has no reciprocal.
    values = squares_C.clamp_min(1e-12 * float(largest))
    values = 1.0 / values if estimate_from == "reciprocal" else values
    return torch.softmax(sharpness * values / values.mean(), dim=0)


# -- methods -----------------------------------------------------------------------------------------------------


def gradient_up(
    *, raw_params: int, gradient: GradientSource, round: int, learning_rate_v: float, learning_rate_b: float
) -> int:
    """With `gradient` explicit, and a rate above 0, the client's gradient, `raw_params` values, from round 2 on."""
    learns = learning_rate_v or learning_rate_b
    return raw_params if gradient == "explicit" and round > 1 and learns else 0


@with_card(
    Card(
        title="FedDH",
        source="Liu et al. 2025, FedDHAD",
        up=(gradient_up,),
        limits=(Limit(given={"learning_rate_v": 0.0, "learning_rate_b": 0.0}, of="fedjs"),),
        live=("noniid_v_mean", "noniid_b_mean"),
    )
)
@takes(NonIIDDegree)
def feddh(**parameters: Any) -> FederatedMethod:
    """FedAvg with weights by samples over a learned degree of label skew.

    The rates are by default those of LeNet on CIFAR-10.
    """
    return FederatedMethod(name="feddh", weighting=NonIIDDegree(**parameters))


@with_card(Card(title="FedJS", source="Liu et al. 2025, FedDHAD"))
@takes(JensenShannon)
def fedjs(**parameters: Any) -> FederatedMethod:
    """FedAvg with weights by samples over the divergence of the client's labels: FedDH without learning."""
    return FederatedMethod(name="fedjs", weighting=JensenShannon(**parameters))
