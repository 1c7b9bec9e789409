"""Pictures of what a finished run's model and pictures show: gaps in loss, losses through a round, synthetic images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fedsweep.errors import ConfigError
from fedsweep.figures.style import Look, legend_below, line_handle, looks, name_axes, panels
from fedsweep.reproduce.figures.of_runs import first_runs
from fedsweep.runs.run_folder import PICTURES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedsweep.reproduce.figures.scene import Scene

_STAGES = 4


def _loss_gap(scene: Scene) -> Figure:
    """A point for each client: how far its labels are from the population's, and its loss from that at its optimum."""
    from fedsweep.reproduce.measured.loss_gap import gaps_of

    found = first_runs(scene, lambda run: gaps_of(run.folder), "clients")
    figure, every = panels(list(found), title=scene.spec.title)
    for axes, (_, gaps) in zip(every, found.values(), strict=True):
        axes.scatter(gaps.divergence, gaps.gap, s=10)
        pearson = gaps.figures()["gap_pearson"]
        if pearson is not None:
            axes.set_title(f"{axes.get_title()} (Pearson {pearson:.3f})".strip())
        name_axes(axes, x="JS divergence (nats)", y="Non-IID degree (nats)")
    return figure


def _client_losses(scene: Scene) -> Figure:
    """Clients' losses on their own samples: their own models in local training, then the global one in fine-tuning."""
    from fedsweep.reproduce.measured.synthetic_set import client_losses

    found = first_runs(scene, lambda run: client_losses(run.folder), "clients")
    figure, every = panels(list(found), title=scene.spec.title)
    for axes, (_, losses) in zip(every, found.values(), strict=True):
        own = looks([str(client) for client in losses.clients])
        for client in losses.clients:
            colour = own[str(client)].colour
            axes.plot(*losses.local[client].T, color=colour)
            axes.plot(*losses.tuned[client].T, color=colour, linestyle="--")
        last = max(float(points[-1, 0]) for points in losses.tuned.values())
        axes.plot(last, losses.mean, color="#000000", marker="*", markersize=9, linestyle="none")
        name_axes(axes, x="steps", y="loss on own samples (nats)")
    line, star = Look(colour="#000000", marker=""), Look(colour="#000000", marker="*")
    handles = [
        line_handle("own model, local training", line),
        line_handle("global model, fine-tuning", line, linestyle="--"),
        line_handle("global model, mean of all clients", star, linestyle="none"),
    ]
    legend_below(figure, handles)
    return figure


def _pictures(scene: Scene) -> Figure:
    """A run's own pictures, from the first to the last in up to four stages."""
    from matplotlib.image import imread

    stages = first_runs(scene, lambda run: sorted((run.folder / PICTURES).glob("*.png")) or None, "pictures")
    if len(stages) > 1:
        raise ConfigError(f"figure {scene.spec.name}: pictures shows one run; name a row and a column")
    ((_, files),) = stages.values()
    chosen = sorted({round(k * (len(files) - 1) / (_STAGES - 1)) for k in range(_STAGES)})
    figure, every = panels([files[k].stem.replace("_", " ") for k in chosen], title=scene.spec.title, height=3.2)
    for axes, k in zip(every, chosen, strict=True):
        axes.imshow(imread(files[k]), cmap="gray", interpolation="nearest")
        axes.set_axis_off()
    return figure


KINDS: Mapping[str, Callable[[Scene], Figure]] = {
    "loss_gap": _loss_gap,
    "client_losses": _client_losses,
    "pictures": _pictures,
}
