"""Which executors a method knows, tried in a world of milliseconds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from fedsweep.errors import FedsweepError

if TYPE_CHECKING:
    from fedsweep.method import FederatedMethod


def executors(builder: Callable[..., FederatedMethod]) -> str:
    """In words, for the method as it is without parameters of one's own.

    Args:
        builder: The method's.
    """
    try:
        whole, uneven = _refused(builder, local_steps=2), _refused(builder, local_steps=None)
    except (FedsweepError, TypeError) as error:
        return f"loop (lanes can't be tried without more: {error})"
    if whole:
        return f"loop ({'; '.join(whole)})"
    return "loop, lanes" + (", the latter where all batches are whole" if uneven else "")


def _refused(builder: Callable[..., FederatedMethod], *, local_steps: int | None) -> tuple[str, ...]:
    from fedsweep.engine.foresight import lanes_refused
    from fedsweep.models.networks.mlp import Mlp
    from fedsweep.testing import tiny_data, tiny_experiment

    images, labels = tiny_data()
    experiment = tiny_experiment(
        builder(),
        sizes=(6,) * 6,  # not a multiple of the batch size
        local_steps=local_steps,
        build=functools.partial(Mlp, input_shape=(1, 1, 6), num_classes=4, hidden_width=8),
        proxy=(images, None),
        validation=(images, labels),
    )
    return lanes_refused(experiment)
