"""Robust rules: by hand, with server optimisers, among clients, and what they do not go with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny import tiny_sync, tiny_update
from torch import Tensor, nn

from fedsweep.algorithms.dpsgd import dpsgd
from fedsweep.algorithms.fedbuff import fedbuff
from fedsweep.algorithms.fedopt import fedadam, fedavgm
from fedsweep.algorithms.heterofl import heterofl
from fedsweep.algorithms.robust import Krum, Median, NormBound, TrimmedMean, fedmedian, krum, norm_bound, trimmed_mean
from fedsweep.components import Aggregation
from fedsweep.errors import ConfigError
from fedsweep.method import FederatedMethod, merge
from fedsweep.testing import local_engine, run_rounds, tiny_experiment
from fedsweep.trees import FlatLayout
from fedsweep.world.topology import complete

LAYOUT = FlatLayout(names=("w", "mean"), shapes=((2,), (1,)), num_params=2, num_buffers=1)


def of(rule: Aggregation, *models: Sequence[float]) -> list[float]:
    """What a rule makes of models with two params and a buffer, with shares 1, 2, 3, ..."""
    updates = [tiny_update(k, torch.tensor(model), layout=LAYOUT) for k, model in enumerate(models)]
    weights = torch.arange(1, len(models) + 1, dtype=torch.float64)
    sync = tiny_sync(nn.Identity(), torch.zeros(3), layout=LAYOUT)
    made: Tensor = rule.combine(updates, weights / weights.sum(), sync)
    return [round(value, 5) for value in made.tolist()]


def test_each_rule_by_hand() -> None:
    models = [(1.0, 5.0, 0.0), (2.0, 6.0, 3.0), (90.0, -70.0, 9.0), (3.0, 4.0, 6.0)]
    assert of(Median(), *models) == [2.5, 4.5, 4.5]
    assert of(Median(), *models[:3]) == [2.0, 5.0, 3.0]
    assert of(TrimmedMean(share=0.25), *models) == [2.5, 4.5, 4.5]
    assert of(TrimmedMean(share=0.0), *models[:2]) == [1.5, 5.5, 1.5]
    # With one wrong of four each is judged by its nearest: squared distances 2, 2 and 5 among the three that agree.
    assert of(Krum(wrong=1, chosen=1), *models) == [1.0, 5.0, 0.0]
    assert of(Krum(wrong=1, chosen=2), *models) == [1.5, 5.5, 1.5]
    # (3, 4) has the norm 5: cut to 1 it is (0.6, 0.8); the buffer is not cut.
    assert of(NormBound(bound=1.0), (3.0, 4.0, 6.0), (0.3, 0.4, 3.0)) == [0.4, 0.53333, 4.0]


def end(method: FederatedMethod, **options: Any) -> Tensor:
    work = tiny_experiment(method, cohort_size=6, sizes=(16,) * 6, **options)
    return run_rounds(local_engine(work)).vector


def test_a_rule_goes_with_any_server_optimiser() -> None:
    for optimiser in (fedadam(), fedavgm()):
        both = merge(fedmedian(), optimiser)
        assert (type(both.aggregation), both.server_update) == (Median, optimiser.server_update)
        assert not both.folds
        assert not torch.equal(end(both), end(optimiser)) and not torch.equal(end(both), end(fedmedian()))
    half = merge(krum(), fedavgm(momentum=0.0, server_learning_rate=0.5))
    first = local_engine(tiny_experiment(half)).start().vector
    assert torch.allclose(end(half, rounds=1), (first + end(krum(), rounds=1)) / 2, atol=1e-6)


def test_clients_that_talk_with_each_other_take_the_rule_too() -> None:
    gossip = end(merge(dpsgd(), fedmedian()), topology=complete(num_clients=6))
    assert (gossip - end(fedmedian())).abs().max() < 1e-6


def test_what_is_no_mean_of_whole_models_is_refused() -> None:
    for other, text in ((heterofl(), "parts of the model"), (fedbuff(), "steps and no shares")):
        with pytest.raises(ConfigError, match=rf"trimmed_mean\+{other.name}: its TrimmedMean .*{text}"):
            merge(trimmed_mean(), other)
    with pytest.raises(ConfigError, match="fedmedian and norm_bound can't be merged"):
        merge(fedmedian(), norm_bound())
    with pytest.raises(ConfigError, match="share"):
        trimmed_mean(share=0.5)
