"""``fedsweep partition``: how the data falls to clients."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedsweep.commands.terminal.options import Config, Overrides, Plot, examples

if TYPE_CHECKING:
    import numpy as np

    from fedsweep.config import schema
    from fedsweep.experiment.experiment import World


EXAMPLES = examples(
    "fedsweep partition quickstart/fedavg --plot split.png",
    "fedsweep partition my.yaml --set 'scenario.partition={kind: dirichlet, dirichlet_alpha: 0.1}'",
)

_MOST_CLIENTS, _EDGE_CLIENTS = 60, 25
_MOST_CLASSES = 20


def partition(config: Config, overrides: Overrides = None, plot: Plot = None) -> None:
    """Show how the data falls to clients: samples per class, and how far each client is from the population.

    KL and JS are the divergences of a client's labels from everybody's, in nats. Drift filters what clients hold, by
    round: a second picture beside the plot, FILE-by-round, then shows the classes' shares by client and round.
    """
    import numpy as np

    from fedsweep.config.load import load_config
    from fedsweep.experiment.build_world import build_world, dataset_of
    from fedsweep.figures.style import checked_path

    loaded = load_config(config, overrides or [])
    if plot is not None:
        checked_path(plot)  # before the table
    data = dataset_of(loaded.scenario)
    world = build_world(loaded, data)
    counts_NC = np.stack([profile.label_counts for profile in world.profiles])
    has_own = data.train.strata is not None and not world.data.learned.has_classes
    stratum = "stratum" if has_own else type(world.data.learned).stratum
    _print_counts(counts_NC, loaded, stratum=stratum)
    if plot is not None:
        from fedsweep.figures.partition import plot_partition

        plot_partition(counts_NC, plot, stratum=stratum)
        print(f"picture: {plot.absolute()}")
        if world.drift is not None:
            _plot_by_round(counts_NC, loaded, world, plot.with_stem(f"{plot.stem}-by-round"))


def _plot_by_round(counts_NC: np.ndarray, config: schema.Config, world: World, path: Path) -> None:
    from fedsweep.figures.scenario import class_shares, plot_classes
    from fedsweep.world.drift import RoundClasses

    assert world.drift is not None  # the caller's condition
    num_clients, num_classes = counts_NC.shape
    sets = [
        RoundClasses(
            drift=world.drift, seed=config.seed, num_clients=num_clients, num_classes=num_classes, round=number
        )
        for number in range(1, config.training.rounds + 1)
    ]
    plot_classes(class_shares(counts_NC, sets), path)
    print(f"picture: {path.absolute()}")


def _print_counts(counts_NC: np.ndarray, config: schema.Config, *, stratum: str) -> None:
    from fedsweep.commands.terminal.output import make_console, make_table
    from fedsweep.world.label_stats import js_divergence, kl_divergence, population

    num_clients, num_classes = counts_NC.shape
    shares_C = population(counts_NC)
    kl_N, js_N = kl_divergence(counts_NC, shares_C), js_divergence(counts_NC, shares_C)
    in_full = num_classes <= _MOST_CLASSES
    headings = [f"c{label}" for label in range(num_classes)] if in_full else ["classes", "most frequent"]
    table = make_table("client", "samples", *headings, "KL", "JS", left=0)
    for client in _shown_clients(num_clients):
        if client is None:
            table.add_row("...", f"({num_clients - 2 * _EDGE_CLIENTS} more)")
            continue
        row_C = counts_NC[client]
        cells = [str(count) if count else "." for count in row_C.tolist()] if in_full else _most_frequent(row_C)
        table.add_row(str(client), str(row_C.sum()), *cells, f"{kl_N[client]:.3f}", f"{js_N[client]:.3f}")
    totals_C = counts_NC.sum(axis=0)
    table.add_row("all", str(totals_C.sum()), *(map(str, totals_C) if in_full else (str((totals_C > 0).sum()),)))
    make_console().print(table)
    kinds = "classes" if stratum == "class" else "strata"
    if stratum != "class" and num_classes > 1:
        print(f"cN: {stratum} N of {num_classes}, from 0")
    sizes_N, classes_N = counts_NC.sum(axis=1), (counts_NC > 0).sum(axis=1)
    scenario = config.scenario
    how = ", ".join(f"{key}={value}" for key, value in scenario.partition.parameters.items())
    print(
        f"{scenario.dataset}, {scenario.partition.kind}{f' ({how})' if how else ''}, seed {config.seed}:"
        f" {num_clients} clients, {sizes_N.min()} to {sizes_N.max()} samples (mean {sizes_N.mean():.1f}),"
        f" {classes_N.min()} to {classes_N.max()} {kinds} (mean {classes_N.mean():.1f});"
        f" mean KL {kl_N.mean():.3f}, mean JS {js_N.mean():.3f}"
    )


def _shown_clients(num_clients: int) -> list[int | None]:
    """Return all clients, or the first and the last with None for those between."""
    if num_clients <= _MOST_CLIENTS:
        return list(range(num_clients))
    return [*range(_EDGE_CLIENTS), None, *range(num_clients - _EDGE_CLIENTS, num_clients)]


def _most_frequent(row_C: np.ndarray) -> list[str]:
    """Return the number of a client's classes, and its five largest, with their counts."""
    order = (-row_C).argsort(kind="stable")[:5]
    return [str((row_C > 0).sum()), " ".join(f"c{label}:{row_C[label]}" for label in order.tolist() if row_C[label])]
