"""What stepping clients together, compiling the step and joining batches would gain, on one core.

    python tests/benchmarks/bench_lanes.py [lanes] [compile] [batch]

lanes    whole rounds of 10 clients in lanes against one by one: LeNet-5 and DynamicFL's CNN on 32x32 colour images, the
         MLP on 8x8 grey ones, 10 and 16 lanes
compile  a local step under torch.compile against the same step as it is, and how long compiling takes
batch    one step of 100 samples against ten steps of 10: what a step of ten clients with the same model would come to

Timings alternate between the two sides; the median ratio of their speeds is printed, above 1 where it gains.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from fedsweep.algorithms.fedavg import fedavg
from fedsweep.client.messages import LaneSettings
from fedsweep.engine.engine import Engine
from fedsweep.experiment.experiment import Experiment
from fedsweep.streams import stream
from fedsweep.testing import build_model, local_engine, tiny_experiment

REPEATS = 7
COLOUR, GREY = (3, 32, 32), (1, 8, 8)


def network(name: str, shape: tuple[int, int, int]) -> nn.Module:
    """One of the built-in networks for ten classes."""
    return build_model(name, input_shape=shape, num_classes=10, stream=stream(0, "model"))


def work(name: str, shape: tuple[int, int, int], clients: int, steps: int) -> Experiment:
    """FedAvg on noise; all clients are in the cohort."""
    generator = stream(0, "benchmark").numpy()
    images = generator.normal(size=(50 * clients, *shape)).astype("float32")
    return tiny_experiment(
        fedavg(),
        num_clients=clients,
        cohort_size=clients,
        rounds=1000,
        learning_rate=0.01,
        batch_size=10,
        local_steps=steps,
        build=lambda: network(name, shape),
        sizes=[50] * clients,
        images=images,
        labels=generator.integers(0, 10, size=len(images)),
    )


def round_of(experiment: Experiment) -> Callable[[], float]:
    """Plays the next round; its seconds without the evaluation."""
    engine: Engine = local_engine(experiment)
    state, _ = engine.advance(engine.start())

    def one() -> float:
        nonlocal state
        state, _ = engine.advance(state)
        return state.records[-1].wall_time_s

    return one


def bench_lanes() -> None:
    """Lanes against the loop; 1.2 is what would be built for."""
    settings = (("mlp", GREY, 10, 50), ("mlp", GREY, 16, 50), ("lenet5", COLOUR, 10, 10), ("cnn", COLOUR, 10, 10))
    for name, shape, clients, steps in settings:
        plain_work = work(name, shape, clients, steps)
        plain_work = dataclasses.replace(plain_work, evaluate_every=10_000)
        lanes = dataclasses.replace(plain_work, lanes=LaneSettings(width=clients))
        report(f"{name}, {clients} lanes / one by one", round_of(plain_work), round_of(lanes))


def step_of(name: str, shape: tuple[int, int, int], batch: int, *, compiled: bool) -> Callable[[], object]:
    """A plain step on flat parameters, as the loop takes it."""
    model, generator = network(name, shape), torch.Generator().manual_seed(0)
    size = sum(p.numel() for p in model.parameters())
    values, gradient = torch.cat([p.detach().reshape(-1) for p in model.parameters()]), torch.zeros(size)
    offset = 0
    for p in model.parameters():
        place, shape_ = slice(offset, offset + p.numel()), p.shape
        p.data, p.grad = values[place].view(shape_), gradient[place].view(shape_)
        offset += p.numel()
    inputs = torch.randn(batch, *shape, generator=generator)
    labels = torch.randint(0, 10, (batch,), generator=generator)

    def loss() -> torch.Tensor:
        return F.cross_entropy(model(inputs), labels)

    asked = torch.compile(loss, dynamic=False) if compiled else loss

    def step() -> None:
        gradient.zero_()
        asked().backward()
        with torch.no_grad():
            values.sub_(gradient, alpha=0.01)

    return step


def timed(step: Callable[[], object], times: int) -> Callable[[], float]:
    """Seconds of a number of steps."""

    def one() -> float:
        began = time.perf_counter()
        for _ in range(times):
            step()
        return time.perf_counter() - began

    return one


def bench_compile() -> None:
    """The compiled step against the plain one; it is offered where it gains 1.2."""
    for name, shape in (("lenet5", COLOUR), ("cnn", COLOUR), ("mlp", GREY)):
        eager, compiled = (step_of(name, shape, 10, compiled=c) for c in (False, True))
        began = time.perf_counter()
        compiled()
        print(f"{name}: the first compiled step took {time.perf_counter() - began:.1f} s")
        report(f"{name}, compiled step / plain step", timed(eager, 40), timed(compiled, 40))


def bench_batch() -> None:
    """Samples a second in a batch of 100 against batches of 10."""
    small, large = (step_of("lenet5", COLOUR, batch, compiled=False) for batch in (10, 100))
    report("lenet5, a step of 100 / ten steps of 10", timed(small, 80), timed(large, 8))


def report(title: str, reference: Callable[[], float], ours: Callable[[], float]) -> None:
    """Alternate the two sides and print the ratio of their speeds."""
    reference(), ours()
    ratios = [reference() / ours() for _ in range(REPEATS)]
    print(f"{title}: {statistics.median(ratios):.2f} (min {min(ratios):.2f}, max {max(ratios):.2f})", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    known = {"lanes": bench_lanes, "compile": bench_compile, "batch": bench_batch}
    for name in sys.argv[1:] or known:
        known[name]()
