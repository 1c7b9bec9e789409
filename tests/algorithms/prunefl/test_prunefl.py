"""PruneFL: the greedy choice against brute force, both stages, what travels for them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedsweep.algorithms.dynamicfl.two_speed import dynamicsgd
from fedsweep.algorithms.parts.element_masks import weight_layers
from fedsweep.algorithms.prunefl.choice import Choice, greedy
from fedsweep.algorithms.prunefl.first_stage import mask_by_training
from fedsweep.algorithms.prunefl.method import prunefl
from fedsweep.engine.forecast import forecast
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.method import merge
from fedsweep.models.networks.chains import LeNet5, Mlp
from fedsweep.streams import stream
from fedsweep.testing import linear_model, local_engine, play_round, run_rounds, tiny_data, tiny_experiment


def build() -> nn.Module:
    return Mlp(input_shape=(1, 1, 6), num_classes=4, hidden_width=10)


def best_by_force(gains: Tensor, times: Tensor, *, gain: float, time: float) -> tuple[float, set[int]]:
    found = [
        ((gain + sum(gains[list(c)].tolist())) / (time + sum(times[list(c)].tolist())), set(c))
        for size in range(len(gains) + 1)
        for c in combinations(range(len(gains)), size)
    ]
    return max(found, key=lambda pair: (pair[0], -len(pair[1])))


@pytest.mark.parametrize("seed", range(8))
def test_the_greedy_choice_is_the_best_of_all_sets_of_ten_weights(seed: int) -> None:
    generator = stream(seed, "greedy").torch()
    gains = torch.rand(10, generator=generator, dtype=torch.float64) ** 3
    times = 0.1 + torch.rand(10, generator=generator, dtype=torch.float64)
    for gain, time in ((0.0, 0.5), (0.4, 2.0), (3.0, 1.0)):
        chosen = greedy(gains, times, gain=gain, time=time, room=10)
        value, best = best_by_force(gains, times, gain=gain, time=time)
        assert set(chosen.nonzero().flatten().tolist()) == best
        assert (gain + float(gains[chosen].sum())) / (time + float(times[chosen].sum())) == pytest.approx(value)


def test_with_equal_times_the_largest_gains_are_chosen_as_far_as_there_is_room() -> None:
    gains = torch.tensor([1.0, 5.0, 3.0, 4.0])
    assert greedy(gains, torch.ones(4), gain=0.0, time=1e9, room=2).tolist() == [False, True, False, True]
    assert not greedy(gains, torch.ones(4), gain=1e9, time=1.0, room=4).any()
    # 8 gain a second: 5 / 0.5 is above, 3 / 1 is not.
    chosen = greedy(gains, torch.tensor([1.0, 0.5, 1.0, 1.0]), gain=8.0, time=1.0, room=4)
    assert chosen.tolist() == [False, True, False, False]


def test_the_dead_and_the_smallest_alive_are_chosen_again_in_each_layer() -> None:
    """Layer a: 1 and 2 of four alive weights are the smallest half; layer b has one alive of three and keeps it."""
    choice = Choice(sparsity=0.25, times="equal", fixed_time=1e9)
    layers = {"a": (0, 5), "b": (6, 9)}
    mask = torch.tensor([1, 1, 1, 1, 0, 1, 1, 0, 0], dtype=torch.bool)
    sizes = torch.tensor([9.0, 1.0, 2.0, 8.0, 0.0, 0.0, 5.0, 0.0, 0.0])
    gains = torch.tensor([0.0, 0.3, 0.1, 0.0, 0.9, 0.0, 0.0, 0.8, 0.2])
    made = choice.again(mask, gains, sizes, layers=layers, times={"a": 1.0, "b": 1.0}, share=0.5)
    # Six of eight weights may live: 0, 3 and 6 stay, then 4 (0.9), 7 (0.8) and 1 (0.3); bias 5 is not decided about.
    assert made.int().tolist() == [1, 1, 0, 1, 1, 1, 1, 1, 0]


def test_times_follow_the_layers_operations_half() -> None:
    """LeNet-5: a weight of the first convolution is used 784 times in a sample, one of a linear layer once."""
    network = LeNet5(input_shape=(3, 32, 32), num_classes=10)
    layers = weight_layers(network)
    times = Choice(sparsity=0.8, times="layers", fixed_time=1.0).weight_times(network, layers)
    number = sum(b - a for a, b in layers.values())
    assert sum(times[n] * (b - a) for n, (a, b) in layers.items()) / number == pytest.approx(1.0)
    first, *_, last = times.values()
    assert (first - 0.5) / (last - 0.5) == pytest.approx(784)
    with pytest.raises(ConfigError, match=r"method\.times=layers needs the shape of the inputs, which Sequential"):
        check_experiment(tiny_experiment(prunefl(times="layers")))


def tiny_lenet():  # type: ignore[no-untyped-def]
    images = np.zeros((4, 3, 32, 32), dtype=np.float32)
    return tiny_experiment(
        prunefl(),
        build=lambda: LeNet5(input_shape=(3, 32, 32), num_classes=10),
        images=images,
        labels=np.arange(4),
        num_clients=2,
        cohort_size=1,
        sizes=(2, 2),
    )


def samples() -> tuple[Tensor, Tensor]:
    images, labels = tiny_data()
    return torch.from_numpy(images), torch.from_numpy(labels)


@pytest.mark.slow
@pytest.mark.usefixtures("short_first_stage")
def test_the_first_stage_prunes_on_the_way_and_leaves_the_model_alone() -> None:
    model = build()
    before = [p.detach().clone() for p in model.parameters()]
    choice = Choice(sparsity=0.6, times="equal", fixed_time=1e9)
    mask, seen = mask_by_training(model, samples(), num_classes=4, choice=choice, rate=0.1, source=stream(0, "x"))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert int(mask.sum()) == 80 + 24 and bool(mask[60:70].all())
    assert 5 * 50 * 8 <= seen <= 1000 * 20  # five choices at least, each after a tenth of 500 steps
    other, _ = mask_by_training(model, samples(), num_classes=4, choice=choice, rate=0.1, source=stream(0, "x"))
    assert torch.equal(mask, other)
    # Weights are pruned below the limit where more of them are not worth their time.
    frugal = replace(choice, fixed_time=0.01)
    small, _ = mask_by_training(model, samples(), num_classes=4, choice=frugal, rate=0.1, source=stream(0, "x"))
    assert int(small.sum()) < int(mask.sum())


@pytest.mark.usefixtures("short_first_stage")
def test_a_first_stage_that_diverges_is_an_error() -> None:
    choice = Choice(sparsity=0.6, times="equal", fixed_time=1.0)
    with pytest.raises(ConfigError, match=r"lower method\.first_learning_rate=1e\+30"):
        mask_by_training(build(), samples(), num_classes=4, choice=choice, rate=1e30, source=stream(0, "x"))


@pytest.mark.usefixtures("short_first_stage")
def test_one_client_makes_the_first_mask_and_sends_it_packed() -> None:
    """Client 2 has the most samples; it gets the model and sends 200 bits."""
    sizes = (12, 12, 24, 12, 12, 24)
    made = tiny_experiment(prunefl(sparsity=0.6, fixed_time=1e9), build=build, sizes=sizes)
    engine = local_engine(made)
    state = engine.start()
    assert state.setup_bytes == 4 * 224 + 25
    # Three passes of 200 MACs for each sample of the batches of 20, which begin anew where its 24 end.
    seen = [len(range(24)[step * 20 % 24 :][:20]) for step in range(1000)]
    assert state.setup_flops in [6 * 200 * sum(seen[: 50 * times]) for times in range(5, 21)]
    most = forecast(made).flops
    first, _ = engine.advance(state)
    assert state.setup_flops < first.records[0].flops < most
    planned = engine.experiment.initial_states["submodels"]["mask"]
    assert int(state.components["submodels"]["mask"].sum()) == int(planned.sum()) == 80 + 24
    assert not torch.equal(state.components["submodels"]["mask"], planned)


def test_a_first_stage_is_forecast_with_all_of_its_ten_thousand_steps() -> None:
    work = [forecast(tiny_experiment(prunefl(first_stage=kind), build=build)).flops for kind in ("client", "none")]
    assert work[0] - work[1] == 6 * 200 * 200_000


@pytest.mark.usefixtures("short_first_stage")
def test_the_server_makes_the_first_mask_of_labelled_data() -> None:
    images, labels = tiny_data(num_samples=40, seed=0)
    method = prunefl(sparsity=0.6, first_stage="server", fixed_time=1e9)
    engine = local_engine(tiny_experiment(method, build=build, validation=(images, labels)))
    state = engine.start()
    assert state.setup_bytes == 0
    # Three passes of 200 MACs for each sample: all batches of 20 are whole, and a choice comes after 500 of them.
    assert state.setup_server_flops in [6 * 200 * 20 * 50 * times for times in range(5, 21)]
    plain = local_engine(
        tiny_experiment(replace(method, submodels=replace(method.submodels, first_stage="none")), build=build)
    )
    (first, _), (none, _) = engine.advance(state), plain.advance(plain.start())
    assert first.records[0].flops - none.records[0].flops == state.setup_server_flops
    assert first.records[0].extra["server_flops"] == state.setup_server_flops and not first.setup_server_flops
    assert not torch.equal(state.components["submodels"]["mask"], engine.experiment.initial_states["submodels"]["mask"])
    with pytest.raises(
        ConfigError, match=r"first_stage=server trains on labelled data .*server_data\.validation=0\.05"
    ):
        check_experiment(tiny_experiment(method, build=build))


def test_squares_are_of_summed_gradients_times_samples_and_are_kept_until_a_choice() -> None:
    """One step a round from zero weights: the gradient is the change over the learning rate."""
    method = prunefl(sparsity=0.5, first_stage="none", fixed_time=1e9, every=3)
    world = {"build": linear_model, "num_clients": 2, "cohort_size": 2, "local_steps": 1, "batch_size": 48}
    engine = local_engine(tiny_experiment(method, rounds=6, **world))  # type: ignore[arg-type]
    state = engine.start()
    expected = torch.zeros(2, 28)
    for number in (1, 2, 3):
        anchor, mask = state.vector * state.components["submodels"]["mask"], state.components["submodels"]["mask"]
        round = play_round(engine, state)
        for k, update in enumerate(round.updates):
            assert update.vector is not None
            gradient = (anchor - update.vector) / 0.1
            expected[k] += torch.where(mask, gradient.square() * 48, 0.0)
            assert ("prunefl/squares" in update.extras) == (number == 3)
        state, _ = engine.advance(state)
    for k, update in enumerate(round.updates):
        squares = update.extras["prunefl/squares"]
        assert torch.allclose(squares[mask], expected[k][mask], rtol=1e-3, atol=1e-4)
        assert bool((squares[~mask] > 0).any())
    assert state.memories[0]["terms"]["prunefl"] == {}


def test_a_round_chooses_once_however_often_clients_synchronise_in_it() -> None:
    options = {
        "build": build,
        "num_clients": 3,
        "cohort_size": 3,
        "sizes": (16,) * 3,
        "batch_size": 4,
        "local_steps": 6,
    }
    method = prunefl(first_stage="none", sparsity=0.5, every=2, share=0.3)
    engine = local_engine(tiny_experiment(merge(method, dynamicsgd()), rounds=2, **options))
    first = run_rounds(engine, rounds=1)
    played = play_round(engine, first)
    squares = [n for (_, _, kind), n in played.ledger.values.items() if kind == "prunefl/squares"]
    assert played.sync_points == 5 and squares == [engine.layout.num_params] * 3
    after = run_rounds(engine, first, rounds=1).components["submodels"]
    assert after["version"] == 1 and after["known"] == dict.fromkeys(range(3), 0)


def test_what_comes_back_starts_from_zero() -> None:
    engine = local_engine(
        tiny_experiment(prunefl(sparsity=0.5, first_stage="none", fixed_time=1e9, every=1), build=build, rounds=4)
    )
    state = engine.start()
    before = state.components["submodels"]["mask"]
    state = run_rounds(engine, state, rounds=1)
    after = state.components["submodels"]["mask"]
    back = after & ~before
    assert bool(back.any()) and not state.vector[back].any() and not state.vector[~after].any()
    assert state.components["submodels"]["version"] == 1
