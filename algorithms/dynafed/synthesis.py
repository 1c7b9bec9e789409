"""Learning a synthetic set from a trajectory of models, in a form that can stop anywhere and go on to the same bits.

Every iteration draws from a stream of its own, so what has to be kept is the set, its optimisers' moments and the
number of iterations done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedsweep import RunError, Stream
from fedsweep.components import Adam, Checked, Count, CountOrZero, NotNegative, Positive, State, SyncContext

from ..parts.ensembles import template
from .trajectory import (
    InnerLoop,
    Matched,
    Params,
    SyntheticSet,
    Target,
    cosine_distance,
    draw_batches,
    draw_segment,
    forward_of,
    group_within,
    match,
    squared_distance,
)

# The inner rate is free to fall while it is learned, but never to zero or below.
_LEAST_RATE = 1e-6
# Two snapshots nearer than this (squared) make the objective meaningless: the segment is drawn again.
_LEAST_DISTANCE = 1e-12
_MAX_DRAWS = 100
# Label logits of real images: so far above the others that the soft label is the hard one.
_CERTAIN = 30.0
# So often is the synthesis looked at on its way.
_MOMENTS = 10
# A picture shows at most so many images.
_MOST_SHOWN = 100


@dataclass(frozen=True, kw_only=True)
class Synthesis(Checked):
    """Settings of the synthesis.

    Attributes:
        horizon_rounds: How many rounds ahead of the start a target may lie.
        inner_steps: Gradient steps on the synthetic set that should lead from start to target.
        iterations: Updates of the synthetic set.
        image_learning_rate: Adam's rate for the images (0.05).
        label_learning_rate: Adam's rate for the label logits (0.01).
        inner_rate: First value of the learned inner rate (0.04); the loss is a mean over the classes too.
        inner_rate_learning_rate: Adam's rate for the inner rate (1e-5); 0: it is not learned.
        target: drawn: the mean of 2 to horizon_rounds snapshots drawn with replacement (the program); between: of the
            snapshot horizon_rounds ahead and two before it (the paper); farthest: the snapshot horizon_rounds ahead.
        last_start: Latest snapshot to start from.
        synthesis_batch: Synthetic images per inner step; null: all of them.
        augment: Whether synthetic images are changed at random wherever they are trained on (true).
        memory_limit_mb: What the unrolled inner steps may hold; above that, steps are computed twice, to the same bits.
        checkpoint_seconds: Least time between two checkpoints of an unfinished synthesis.
    """

    horizon_rounds: Count
    inner_steps: Count
    iterations: Count
    image_learning_rate: Positive
    label_learning_rate: Positive
    inner_rate: Positive
    inner_rate_learning_rate: NotNegative
    target: Target
    last_start: CountOrZero = 50
    synthesis_batch: Count | None = None
    augment: bool
    memory_limit_mb: Positive = 4096.0
    checkpoint_seconds: NotNegative = 60.0


def picture_name(iteration: int) -> str:
    """Return the name of the picture of the set after so many iterations."""
    return f"synthetic_{iteration:06d}"


def picture_grid(images: Tensor) -> Tensor:
    """Return the first images side by side, three standard deviations of the initial noise from black to white.

    Args:
        images: [S, channels, height, width].

    Returns:
        uint8, [rows, columns] for other than three channels (their mean), else [rows, columns, 3].
    """
    shown = (0.5 + images.detach()[:_MOST_SHOWN].cpu().double() / 6).clamp(0, 1)
    if shown.shape[1] != 3:
        shown = shown.mean(dim=1, keepdim=True)
    count, channels, height, width = shown.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    grid = torch.ones(channels, rows * (height + 1) + 1, columns * (width + 1) + 1, dtype=torch.float64)
    for place, image in enumerate(shown):
        top, left = place // columns * (height + 1) + 1, place % columns * (width + 1) + 1
        grid[:, top : top + height, left : left + width] = image
    pixels = (grid * 255).round().to(torch.uint8).movedim(0, 2)
    return (pixels[:, :, 0] if channels == 1 else pixels).contiguous()


def fresh_images(num_images: int, shape: tuple[int, ...], *, like: torch.dtype, stream: Stream) -> Tensor:
    """Return noise as images [S, *shape]: standard normal values, on the CPU."""
    return torch.randn(num_images, *shape, generator=stream.torch(), dtype=like)


class Synthesizer:
    """A synthesis under way.

    Args:
        settings: How the set is learned.
        sync: Where this is; with a stream of the synthesis's own.
        snapshots: The trajectory: the params of the global model [num_params] each, in order.
        num_images: S, at least 1.
        image_shape: Channels, height, width.
        num_classes: C.
        real: ``images`` [R, ...] as the model sees them, and their ``labels`` [R], for the figures alone: nothing is
            learned from them; None: none are shown.
    """

    def __init__(
        self,
        settings: Synthesis,
        sync: SyncContext,
        *,
        snapshots: list[Tensor],
        num_images: int,
        image_shape: tuple[int, ...],
        num_classes: int,
        real: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._settings, self._sync, self._real = settings, sync, real
        self._forward = forward_of(template(sync), sync.layout)
        self._snapshots = [vector.to(sync.device) for vector in snapshots]
        self._image_shape = image_shape
        dtype = sync.layout.dtype
        images = fresh_images(num_images, image_shape, like=dtype, stream=sync.stream.child("images"))
        self._variables = {
            "images": images.to(sync.device),
            "labels": torch.zeros(num_images, num_classes, dtype=dtype, device=sync.device),
            "rate": torch.tensor(settings.inner_rate, dtype=dtype, device=sync.device),
        }
        self._rates = {
            "images": settings.image_learning_rate,
            "labels": settings.label_learning_rate,
            "rate": settings.inner_rate_learning_rate,
        }
        self._done = 0
        self._recent: list[float] = []
        self._trace: list[dict[str, float]] = []
        self._pictures: dict[str, Tensor] = {picture_name(0): picture_grid(images)}
        self._group: int | None = None
        self._optimizers = self._fresh_optimizers()

    def _fresh_optimizers(self) -> dict[str, Adam]:
        return {name: Adam([self._variables[name]], lr=rate, foreach=False) for name, rate in self._rates.items()}

    @property
    def samples(self) -> int:
        """Images that all iterations' inner steps are taken on, repeats included."""
        steps = self._loop(self._sync.stream).batches
        whole = len(self._variables["images"])
        return self._settings.iterations * sum(whole if index is None else len(index) for index in steps)

    # -- the work ------------------------------------------------------------------------------------------------

    def run(self, resumed: State = None) -> State:
        """Run all iterations, and return the learned set as a state tree on the CPU.

        Args:
            resumed: What the checkpoint of an interrupted run of the same synthesis held; None: from the start.

        Returns:
            ``images``, ``labels``, ``rate``, ``trace`` (a dict of figures per moment) and ``pictures``.

        Raises:
            RunError: The objective or the learned set is not finite, or the snapshots do not differ.
        """
        if resumed is not None:
            self._load(resumed)
            self._sync.message(f"synthesis: going on after iteration {self._done} of {self._settings.iterations}")
        saved = began = time.monotonic()
        first = self._done
        while self._done < self._settings.iterations:
            objective = self._iterate()
            pace = (time.monotonic() - began) / (self._done - first)
            self._sync.working(self._line(objective, seconds_left=pace * (self._settings.iterations - self._done)))
            pause = time.monotonic() - saved
            if self._done < self._settings.iterations and pause >= self._settings.checkpoint_seconds:
                self._sync.checkpoint(self._tree())
                saved = time.monotonic()
        if not all(bool(value.isfinite().all()) for value in self._variables.values()):
            raise self._diverged("the last iteration's gradients are not finite", rate=self._variables["rate"])
        tree = self._tree()
        return {name: tree[name] for name in ("images", "labels", "rate", "trace", "pictures")}

    def _iterate(self) -> float:
        number = self._done + 1
        stream = self._sync.stream.child("iteration", number)
        start, target = self._segment(stream)
        loop = self._loop(stream)
        synthetic = self._synthetic_set()
        # Once: the steps of all iterations hold as much.
        if self._group is None:
            limit = self._settings.memory_limit_mb * 2**20
            self._group = group_within(loop, start, synthetic, limit_bytes=limit)
        matched = match(loop, start, target, synthetic, group=self._group)
        objective = float(matched.objective)
        if not math.isfinite(objective):
            raise self._diverged(f"its objective is {objective} in iteration {number}", rate=synthetic.rate)
        self._step(matched.gradients)
        self._done = number
        self._recent.append(objective)
        total = self._settings.iterations
        if number * _MOMENTS // total > (number - 1) * _MOMENTS // total:
            self._look(loop, matched, start=start, target=target, used=synthetic)
        return objective

    @staticmethod
    def _diverged(why: str, *, rate: Tensor) -> RunError:
        return RunError(
            f"the synthesis diverged: {why}; lower method.inner_rate (now learned to {float(rate):g}) or"
            " method.image_learning_rate"
        )

    def _segment(self, stream: Stream) -> tuple[Params, Params]:
        """Return the start and the target of a piece of the trajectory whose ends differ."""
        settings = self._settings
        for attempt in range(_MAX_DRAWS):
            first, picks = draw_segment(
                len(self._snapshots),
                horizon=settings.horizon_rounds,
                last_start=settings.last_start,
                target=settings.target,
                stream=stream.child("segment", attempt),
            )
            start = self._split(self._snapshots[first])
            target = self._split(torch.stack([self._snapshots[pick] for pick in picks]).mean(dim=0))
            if float(squared_distance(start, target)) >= _LEAST_DISTANCE:
                return start, target
        raise RunError(
            f"the synthesis needs global models that differ, but {_MAX_DRAWS} draws from the {len(self._snapshots)}"
            " snapshots found none; raise training.optimizer.lr"
        )

    def _split(self, vector: Tensor) -> Params:
        # Memory of their own: some sums depend on how it is aligned, and a view's alignment on the model.
        return tuple(value.clone() for value in self._sync.layout.params(vector).values())

    def _loop(self, stream: Stream) -> InnerLoop:
        return InnerLoop(
            forward=self._forward,
            batches=draw_batches(
                len(self._variables["images"]),
                batch=self._settings.synthesis_batch,
                steps=self._settings.inner_steps,
                stream=stream.child("batches"),
            ),
            augments=self._settings.augment,
            stream=stream,
        )

    def _synthetic_set(self) -> SyntheticSet:
        """Return the set as it is now; a copy, since the optimisers change theirs in place."""
        return SyntheticSet(**{name: value.clone() for name, value in self._variables.items()})

    def _step(self, gradients: SyntheticSet) -> None:
        for name, optimizer in self._optimizers.items():
            self._variables[name].grad = getattr(gradients, name)
            optimizer.step()
        if self._settings.inner_rate_learning_rate:
            self._variables["rate"].clamp_(min=min(_LEAST_RATE, self._settings.inner_rate))

    # -- what is seen of it ---------------------------------------------------------------------------------------

    def _look(self, loop: InnerLoop, matched: Matched, *, start: Params, target: Params, used: SyntheticSet) -> None:
        """Note how far it is: beside the learned images, noise with the same labels and rate, and real images.

        Distances are of the moves from the start, and of the parameter vectors themselves.
        """
        wanted = _moves(target, start)
        ends = {"": matched.end}
        ends |= {
            f"{name}_": other.run(start, synthetic) for name, (other, synthetic) in self._others(loop, used).items()
        }
        figures = {
            "iteration": float(self._done),
            "objective": math.fsum(self._recent) / len(self._recent),
            **{f"{name}cosine_distance": cosine_distance(_moves(end, start), wanted) for name, end in ends.items()},
            **{f"{name}parameter_cosine_distance": cosine_distance(end, target) for name, end in ends.items()},
            "inner_rate": float(self._variables["rate"]),
        }
        self._recent = []
        self._trace = [*self._trace, figures]
        self._pictures = {**self._pictures, picture_name(self._done): picture_grid(self._variables["images"])}
        others = [name for name in ("noise", "real") if f"{name}_cosine_distance" in figures]
        compared = ", ".join(f"{name} {figures[f'{name}_cosine_distance']:.3f}" for name in others)
        self._sync.message(
            f"synthesis: iteration {self._done} of {self._settings.iterations}, objective"
            f" {figures['objective']:.4f}, cosine distance {figures['cosine_distance']:.3f} ({compared}),"
            f" inner rate {figures['inner_rate']:.5f}"
        )

    def _others(self, loop: InnerLoop, used: SyntheticSet) -> dict[str, tuple[InnerLoop, SyntheticSet]]:
        """Return the sets to compare with, and the inner steps on them: as many, at the same rate."""
        noise = fresh_images(
            len(used.images), self._image_shape, like=used.images.dtype, stream=loop.stream.child("noise")
        )
        others = {"noise": (loop, used._replace(images=noise.to(used.images)))}
        if self._real is not None:
            images = self._real["images"].to(used.images)
            certain = _CERTAIN * torch.nn.functional.one_hot(self._real["labels"], used.labels.shape[1])
            real = SyntheticSet(images=images, labels=certain.to(used.labels), rate=used.rate)
            batches = draw_batches(
                len(images), batch=self._settings.synthesis_batch, steps=loop.steps, stream=loop.stream.child("real")
            )
            others["real"] = (replace(loop, batches=batches), real)
        return others

    def _line(self, objective: float, *, seconds_left: float) -> str:
        seconds = round(seconds_left)
        seen = f", cosine distance {self._trace[-1]['cosine_distance']:.3f}" if self._trace else ""
        return (
            f"synthesis: iteration {self._done} of {self._settings.iterations}, objective {objective:.4f}{seen}, inner"
            f" rate {float(self._variables['rate']):.5f}, {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
            " left"
        )

    # -- what is kept of it ---------------------------------------------------------------------------------------

    def _tree(self) -> State:
        moments: dict[str, Any] = {}
        for name, optimizer in self._optimizers.items():
            entry = optimizer.state[self._variables[name]]
            moments[name] = {key: entry[key].detach().cpu().clone() for key in ("step", "exp_avg", "exp_avg_sq")}
        return {
            **{name: value.detach().cpu().clone() for name, value in self._variables.items()},
            "moments": moments,
            "done": self._done,
            "recent": list(self._recent),
            "trace": list(self._trace),
            "pictures": dict(self._pictures),
        }

    def _load(self, tree: State) -> None:
        device = self._sync.device
        self._variables = {name: tree[name].clone().to(device) for name in self._variables}
        self._optimizers = self._fresh_optimizers()
        for name, optimizer in self._optimizers.items():
            moments = tree["moments"][name]
            # Adam counts its steps on the CPU, wherever the values are.
            optimizer.state[self._variables[name]] = {
                key: value.clone() if key == "step" else value.clone().to(device) for key, value in moments.items()
            }
        self._done, self._recent = tree["done"], list(tree["recent"])
        self._trace, self._pictures = list(tree["trace"]), dict(tree["pictures"])


def _moves(ends: Params, start: Params) -> Params:
    return tuple(end - begin for end, begin in zip(ends, start, strict=True))
