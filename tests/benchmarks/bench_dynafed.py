"""One iteration of DynaFed's synthesis against the same work written plainly, in the same run.

    python tests/benchmarks/bench_dynafed.py [--images 150] [--steps 20] [--repeats 3] [--threads 1] [--limit-mb 16384]

The plain side is the inner steps with a graph, one after the other, and one backward pass through all of them: no
flat vectors, no grouping of steps, no optimiser, no bookkeeping. Ours is a whole iteration of the synthesizer: draws,
start and target, unrolled steps, three optimisers. ConvNet of width 128, 3x32x32, ten classes; no augmentation, so that
both sides do the same arithmetic. At most 1.2 is asked for. Timings are CPU seconds, so that other work on the
machine counts less; they alternate, and the median ratio is printed.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

from fedsweep.algorithms.dynafed.distillation import dynafed
from fedsweep.algorithms.dynafed.synthesis import Synthesizer
from fedsweep.models.networks.chains import ConvNet3
from fedsweep.records import SyncContext
from fedsweep.streams import Stream
from fedsweep.trees import layout_of, model_vector


def plain_iteration(model: nn.Module, start: list[Tensor], target: list[Tensor], *, images: int, steps: int) -> Tensor:
    """Twenty forward and backward passes and the backward pass through them."""
    x = torch.randn(images, 3, 32, 32).requires_grad_()
    y = torch.zeros(images, 10).requires_grad_()
    rate = torch.tensor(0.04).requires_grad_()
    names = [name for name, _ in model.named_parameters()]
    params = [value.clone().requires_grad_() for value in start]
    for _ in range(steps):
        logits = torch.func.functional_call(model, dict(zip(names, params, strict=True)), (x,))
        loss = -(y.softmax(1) * logits.log_softmax(1)).mean()
        slopes = torch.autograd.grad(loss, params, create_graph=True)
        params = [value - rate * slope for value, slope in zip(params, slopes, strict=True)]
    distance = sum((a - b).square().sum() for a, b in zip(params, target, strict=True))
    scale = sum((a - b).square().sum() for a, b in zip(start, target, strict=True))
    slopes = torch.autograd.grad(distance / scale, [x, y, rate])
    return slopes[0]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="One iteration of DynaFed's synthesis against the plain work.")
    parser.add_argument("--images", type=int, default=150)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit-mb", type=float, default=16384.0)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = ConvNet3(input_shape=(3, 32, 32), num_classes=10).eval()
    layout = layout_of(model)
    walk = [model_vector(model, layout)]
    for _ in range(7):
        walk.append(walk[-1] + 0.003 * torch.randn(layout.num_params))
    method = dynafed(
        snapshots=8, horizon_rounds=3, inner_steps=given.steps, augment=False, memory_limit_mb=given.limit_mb
    )
    synthesizer = Synthesizer(
        method.refinements[0].synthesis,  # type: ignore[attr-defined]
        SyncContext(
            round=8,
            index=0,
            ends_round=True,
            vector=walk[-1],
            layout=layout,
            anchors={},
            learning_rate=0.1,
            cohort=(),
            model=model,
            stream=Stream(("bench",)),
        ),
        snapshots=walk,
        num_images=given.images,
        image_shape=(3, 32, 32),
        num_classes=10,
    )
    start, target = (list(layout.params(walk[k]).values()) for k in (0, 3))
    synthesizer._iterate()  # warm; measures the memory of a step
    print(
        f"{given.images} images, {given.steps} steps, {given.threads} threads, {synthesizer._group} steps' graphs held"
    )
    ratios = []
    for _ in range(given.repeats):
        began = time.process_time()
        plain_iteration(model, start, target, images=given.images, steps=given.steps)
        plain = time.process_time() - began
        began = time.process_time()
        synthesizer._iterate()
        ours = time.process_time() - began
        ratios.append(ours / plain)
        print(f"plain {plain:.3f} CPU s, one iteration {ours:.3f} s, ratio {ours / plain:.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f} (at most 1.2 is asked for)")


if __name__ == "__main__":
    main()
