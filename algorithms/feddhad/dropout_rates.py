"""FedAD's rates: from unit scores and device times to the chance with which each unit is left out, and the draw.

Also where the multiplier of kept units acts, and whether a network lets it pass there.

Shape letters: U units of a group of layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from torch import nn

from fedsweep import ConfigError
from fedsweep.components import BYTES_PER_VALUE, MultiplierIn, RoundContext, UnitGroup, client_time, training_flops

from ..parts.unit_draws import has_norm, why_not_homogeneous
from .unit_scores import maskable_groups

DeviceRate = Literal["balanced", "printed"]
Multiplier = Literal["auto", "activation", "incoming", "split", "none"]

# Under "printed" the fastest device's rate reaches 1, where the multiplier 1 / (1 - rate) has no value.
_BELOW_ONE = 0.99
# Of the weights of units whose rates are not capped: a smaller sum has few digits, or none.
_SMALLEST = 1e-290


def device_time(macs: int, context: RoundContext, client: int) -> float:
    """Return seconds that a device would need for its round with the full model, without jitter; 1 without devices."""
    device, work = context.profiles[client].device, context.work[client]
    if device is None:
        return 1.0
    bits = 8 * BYTES_PER_VALUE * context.num_values
    return client_time(
        device,
        steps=work.steps,
        flops=training_flops(macs, work.samples_in(work.steps)),
        bits_down=bits,
        bits_up=bits,
    ).total_s


def target_time(base_rate: float, reference_s: float, *, device_rate: DeviceRate) -> float:
    """Return the time to which devices are levelled, in seconds.

    Args:
        base_rate: d_avg, 0..1.
        reference_s: The reference device's time for a round without dropout.
        device_rate: ``"balanced"``: ``(1 - d_avg) reference``; ``"printed"``: ``d_avg reference``.
    """
    return (1 - base_rate if device_rate == "balanced" else base_rate) * reference_s


def device_dropout(time_s: float, target_s: float, *, cap: float, device_rate: DeviceRate) -> float:
    """Return a device's mean dropout rate d_k*, 0 .. ``cap`` (printed: below 1).

    Args:
        time_s: Its time for a round without dropout, above 0.
        target_s: See :func:`target_time`.
        cap: Largest rate under ``"balanced"``.
        device_rate: ``"balanced"``: ``min(1 - min(T / time, 1), cap)``, so that ``time (1 - rate) <= T`` unless the cap
            is active; ``"printed"``: ``min(T / time, 1)``.

    Source: FedDHAD, device rates. Reading: as printed the fastest device drops everything and the slowest least; the
    formulas make sense for the kept share, which ``"balanced"`` takes them for.
    """
    share = min(target_s / time_s, 1.0)
    return min(1 - share, cap) if device_rate == "balanced" else min(share, _BELOW_ONE)


def rates_of_round(rates: Sequence[float], samples: Sequence[int]) -> dict[str, float]:
    """Summarise the rates of a round's devices for a table: their mean hides that most have none and some much.

    Args:
        rates: Each device's mean rate, 0..1; none: nobody drops anything.
        samples: Its number of samples.
    """
    drawn = np.asarray(rates if len(rates) else [0.0], dtype=np.float64)
    low, median, high = np.quantile(drawn, [0.1, 0.5, 0.9]).tolist()
    return {
        "dropout_device_rate": float(drawn.mean()),
        "dropout_rate_p10": low,
        "dropout_rate_median": median,
        "dropout_rate_p90": high,
        "dropout_rate_zero_share": float((drawn == 0).mean()),
        "dropout_rate_by_samples": float(np.average(drawn, weights=samples if len(rates) else [1])),
    }


def unit_rates(scores_U: np.ndarray, rate: float, *, cap: float = 0.9, temperature: float = 1.0) -> np.ndarray:
    """Return rates of units [U] whose mean is ``rate``: the lower the score, the higher the rate, at most ``cap``.

    ``d_i = U rate softmax(-score / temperature)_i``; what exceeds the cap is handed to the others in proportion to
    their softmax weights, until nothing does.

    Args:
        scores_U: Scores of all units of a kind.
        rate: Their mean rate, 0..1; above ``cap`` it is lowered to it.
        cap: Largest rate of a unit, below 1.
        temperature: Above 0; the smaller, the further apart the rates.

    Source: FedDHAD, unit rates. Reading: the paper's formula exceeds 1 for uneven scores; cap and redistribution.
    """
    scores = np.asarray(scores_U, dtype=np.float64)
    # From the lowest score, which changes no share: no exponent is above 0, so nothing overflows.
    weights = np.exp((scores.min(initial=np.inf) - scores) / temperature)
    budget = len(scores) * min(rate, cap)
    capped = np.zeros(len(scores), dtype=bool)
    rates = np.zeros(len(scores))
    while not capped.all():
        left = weights[~capped]
        if left.sum() < _SMALLEST:  # beside those that are capped: from the lowest of the others, then
            left = np.exp((scores[~capped].min() - scores[~capped]) / temperature)
        rates[~capped] = (budget - cap * capped.sum()) * left / left.sum()
        exceeding = ~capped & (rates > cap)
        if not exceeding.any():
            break
        capped |= exceeding
        rates[capped] = cap
    return np.clip(rates, 0.0, cap)


def drawn_units(
    groups: Sequence[UnitGroup], rates: Mapping[str, np.ndarray], *, generator: np.random.Generator
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[float, ...]]]:
    """Keep each unit with probability 1 - rate, independently.

    Args:
        groups: The groups to draw from, in order.
        rates: Group -> rates [size], below 1.
        generator: Random numbers; the same number for the same groups, whatever the rates.

    Returns:
        Group -> kept units, ascending, at least one; group -> their multipliers ``1 / (1 - rate)``.

    Source: FedDHAD, sub-models. Reading: where a layer would lose all its units, the one with the smallest rate (the
    first of equals) stays.
    """
    units, scales = {}, {}
    for group in groups:
        rate = rates[group.name]
        stays = generator.random(group.size) >= rate
        if not stays.any():
            stays[int(np.argmin(rate))] = True
        units[group.name] = tuple(int(unit) for unit in np.flatnonzero(stays))
        scales[group.name] = tuple(float(factor) for factor in 1.0 / (1.0 - rate[stays]))
    return units, scales


def scales_in(multiplier: Multiplier, model: nn.Module) -> MultiplierIn | None:
    """Return the place where the multiplier acts on a network; None: nowhere.

    Args:
        multiplier: As asked for.
        model: The full network.

    Raises:
        ConfigError: Not where it is asked to.
    """
    if multiplier == "none":
        return None
    between = why_not_in_weights(model) if multiplier != "activation" else ""
    if multiplier == "auto":
        return "activation" if between else "incoming"
    if between:
        raise ConfigError(
            f"method.multiplier={multiplier} puts 1 / (1 - rate) into the weights that make a unit, as can be done"
            f" where ReLU alone stands between it and them; but {between}; set method.multiplier=activation"
        )
    return multiplier


def why_not_in_weights(model: nn.Module) -> str:
    """Name, in words, the part of a network through which a factor of weights does not pass; empty: there is none."""
    for group in maskable_groups(model):
        reason = "a norm" if has_norm(model, group) else why_not_homogeneous(model, group)
        if reason or group.kind == "head":
            return f"units {group.name!r} of {type(model).__name__} go through {reason or 'attention'}"
    return ""
