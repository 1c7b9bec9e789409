"""What methods say that they compute on the server is what torch counts, and it is in the round's FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tiny import net
from torch.utils.flop_counter import FlopCounterMode

from fedsweep.algorithms.abavg import ByAccuracy, abavg
from fedsweep.algorithms.dynafed.distillation import TrajectoryDistillation, dynafed
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedbe import BayesianEnsemble, fedbe
from fedsweep.algorithms.feddf import Distilled, feddf
from fedsweep.algorithms.feddhad.feddh import NonIIDDegree, feddh
from fedsweep.algorithms.fedgen import LatentGenerator, fedgen
from fedsweep.algorithms.heterofl import heterofl
from fedsweep.engine.state import RunState
from fedsweep.method import FederatedMethod, merge
from fedsweep.models.functional import head_names
from fedsweep.records import SyncContext
from fedsweep.testing import local_engine, run_rounds, tiny_data, tiny_experiment

# 6 -> 8 -> 8 -> 4: MACs of the layers, and FLOPs of one sample's forward pass.
FIRST, SECOND, HEAD = 48, 64, 32
FORWARD = 2 * (FIRST + SECOND + HEAD)
NO_SLOPE = 2 * FIRST  # what a step's backward pass saves, since nobody asks for the inputs' gradient


def play(method: FederatedMethod, *, rounds: int = 1, labelled: bool = False) -> RunState:
    """With 10 proxies, or 8 of two for each class, and 7 validation samples on the server."""
    images, labels = tiny_data(num_samples=17)
    proxy = (images[:8], labels[:8]) if labelled else (images[:10], None)
    world: dict[str, Any] = {"proxy": proxy, "validation": (images[10:], labels[10:])}
    return run_rounds(local_engine(tiny_experiment(method, build=net, rounds=rounds, **world)))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RunState, list[int]]]:
    """``counted(method, component, hook)``: the run, and what torch counts in that hook in each round."""

    def run(method: FederatedMethod, component: type, hook: str, **options: Any) -> tuple[RunState, list[int]]:
        own, found = getattr(component, hook), []

        def watched(self: Any, *given: Any) -> Any:
            sync: SyncContext = given[-1]
            for update in given[-2]:  # so that what is counted once for the run is not counted here
                sync.forward_flops(update.submodel)
            head_names(sync.model)
            with FlopCounterMode(display=False) as counter:
                answer = own(self, *given)
            found.append(counter.get_total_flops())
            return answer

        monkeypatch.setattr(component, hook, watched)
        return play(method, **options), found

    return run


def spent(state: RunState) -> list[float]:
    return [record.extra.get("server_flops", 0.0) for record in state.records]


def test_teachers_are_asked_once(counted: Callable[..., tuple[RunState, list[int]]]) -> None:
    state, found = counted(abavg(), ByAccuracy, "weigh")
    assert spent(state) == found == [3 * 7 * FORWARD]


def test_smaller_teachers_cost_less(counted: Callable[..., tuple[RunState, list[int]]]) -> None:
    method = merge(abavg(), replace(heterofl(widths=(0.5,)), weighting=fedavg().weighting))
    state, found = counted(method, ByAccuracy, "weigh")
    assert spent(state) == found == [3 * 7 * 2 * (6 * 4 + 4 * 4 + 4 * 4)]


def test_a_distillations_steps_count_as_a_clients(counted: Callable[..., tuple[RunState, list[int]]]) -> None:
    """3 teachers see 10 samples, 5 steps take 4 of them each, and 7 validate after every second step and the last."""
    state, found = counted(feddf(steps=5, batch_size=4, check_every=2), Distilled, "refine")
    assert spent(state) == [FORWARD * (3 * 10 + 3 * 5 * 4 + 3 * 7)]
    assert spent(state)[0] - found[0] == 5 * 4 * NO_SLOPE


def test_gradients_on_the_servers_samples_count(counted: Callable[..., tuple[RunState, list[int]]]) -> None:
    """Of 8 samples, at the mean; or at each client's model, class by class."""
    for method, models in ((feddh(gradient="proxy"), 1), (feddh(estimate="gradients", learning_rate_v=0.0), 3)):
        state, found = counted(method, NonIIDDegree, "weigh", labelled=True)
        assert spent(state) == [models * 3 * 8 * FORWARD]
        assert spent(state)[0] - found[0] == models * 8 * NO_SLOPE


def test_drawn_models_are_teachers_too(counted: Callable[..., tuple[RunState, list[int]]]) -> None:
    """3 clients, their mean and 2 draws see 10 samples; 3 passes of 2 batches of 5; statistics are read once.

    Beside it stand mean and variance of the 3 models of 164 params, which nobody charges.
    """
    method = fedbe(samples=2, epochs=3, batch_size=5, average_every=1)
    state, found = counted(method, BayesianEnsemble, "refine")
    assert spent(state) == [FORWARD * (6 * 10 + 3 * 6 * 5 + 10)]
    assert spent(state)[0] - found[0] == 6 * 5 * NO_SLOPE - 2 * 2 * 3 * 164


@pytest.mark.parametrize(("teacher", "heads"), [("clients", 3), ("global", 1)])
def test_a_generator_learns_from_heads_alone(
    counted: Callable[..., tuple[RunState, list[int]]], teacher: str, heads: int
) -> None:
    """A step of 6 samples: 7 -> 5 -> 8 with 3 passes, each head with 2; one sample shows what a head costs."""
    method = fedgen(teacher=teacher, noise_width=3, hidden_width=5, generator_steps=4, generator_batch=6)  # type: ignore
    state, found = counted(method, LatentGenerator, "refine", rounds=2)
    assert spent(state) == [4 * 6 * 2 * (3 * (7 * 5 + 5 * 8) + 2 * heads * HEAD)] * 2
    assert [told - true for told, true in zip(spent(state), found, strict=True)] == [4 * 6 * 2 * 7 * 5 - FORWARD] * 2


def test_a_synthesis_costs_nine_passes_a_step_and_fine_tuning_three(
    counted: Callable[..., tuple[RunState, list[int]]],
) -> None:
    """8 images: 6 iterations of 3 steps on batches of 4, then 2 passes; torch spares the first step's start."""
    options: dict[str, Any] = {"iterations": 6, "inner_steps": 3, "images_per_class": 2, "synthesis_batch": 4}
    method = dynafed(snapshots=3, horizon_rounds=2, finetune_epochs=2, augment=False, **options)
    state, found = counted(method, TrajectoryDistillation, "refine", rounds=3)
    assert spent(state) == [0, 6 * 3 * 4 * 9 * FORWARD, 2 * 8 * 3 * FORWARD]
    assert spent(state)[2] - found[2] == 2 * 8 * NO_SLOPE


def test_the_rounds_flops_have_the_servers() -> None:
    plain, weighed = (play(method).records[0] for method in (fedavg(), abavg()))
    assert weighed.flops == plain.flops + 3 * 7 * FORWARD
    assert "server_flops" not in plain.extra
