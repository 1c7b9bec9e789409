"""Tables of kind ``divergence_gap``: how well a client's label divergence tells its gap in loss.

Each cell is an experiment that is run to its end. Its last global model w is then tested on every client's own training
samples, and over the clients the gap is correlated with the divergence of their labels from the population's.

    divergence JS_k    Jensen-Shannon, in nats, as FedDH has it
    loss F_k(w)        mean cross-entropy on the client's samples, without augmentation
    gap                |F_k(w) - F(w)| with F = sum_k n_k F_k / sum_k n_k, the global loss

Measures are ``pearson`` (divergence and gap), ``spearman`` (their ranks) and ``pearson_signed`` (divergence and
F_k(w) - F(w)). Everything by client goes into ``divergence_gap.csv``, a picture of each cell into ``figures``.

Source: Liu et al. 2025 (FedDHAD), Figure 7. Reading: the paper correlates the divergence with a degree that comes from
the gap between a device's loss and the global one; at which model, and whether with its sign, is not known to us. We
take the last global model of the cell's method and the absolute value, since a divergence has no sign: a device whose
labels are all of an easy class lies as far off as one whose labels are all of a hard one.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedsweep.api import load_model
from fedsweep.building import build_experiment
from fedsweep.components.evaluation import Evaluation, GlobalModel
from fedsweep.errors import ConfigError, FedsweepError, InputError, unknown_name
from fedsweep.reports.runs import RunView
from fedsweep.reproduce.cells import Cell
from fedsweep.reproduce.measuring import FINISHED, Grid, GridCell, setting_of, standing_of, summed_up, view_of
from fedsweep.reproduce.table_file import TableFile
from fedsweep.running import plan_run, run_plan
from fedsweep.runtime.evaluator import Evaluator
from fedsweep.runtime.experiment import Experiment
from fedsweep.runtime.run_folder import atomic_write
from fedsweep.tracking.factory import make_observers
from fedsweep.world.label_stats import js_divergence, population

CSV = "divergence_gap.csv"
FIGURES = "figures"
MEASURES = ("pearson", "spearman", "pearson_signed")


@dataclass(frozen=True, kw_only=True)
class ClientGaps:
    """The clients of one cell.

    Attributes:
        num_samples: n_k [N].
        divergence: JS_k [N], 0..ln 2.
        loss: F_k(w) [N], at least 0.
    """

    num_samples: np.ndarray
    divergence: np.ndarray
    loss: np.ndarray

    @property
    def signed_gap(self) -> np.ndarray:
        """F_k(w) - F(w) [N]; its mean weighted by samples is 0."""
        gap: np.ndarray = self.loss - np.average(self.loss, weights=self.num_samples)
        return gap

    @property
    def gap(self) -> np.ndarray:
        """|F_k(w) - F(w)| [N]."""
        gap: np.ndarray = np.abs(self.signed_gap)
        return gap

    def figures(self) -> dict[str, float | None]:
        """The correlations by measure; None where all divergences or all gaps are equal."""
        return {
            "pearson": correlation(self.divergence, self.gap),
            "spearman": correlation(ranks(self.divergence), ranks(self.gap)),
            "pearson_signed": correlation(self.divergence, self.signed_gap),
        }


def correlation(x: np.ndarray, y: np.ndarray) -> float | None:
    """Pearson's coefficient, -1..1; None where one of the two does not vary."""
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt((x * x).sum() * (y * y).sum()))
    return float((x * y).sum() / size) if size > 0 else None


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 0; equal values share the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean: np.ndarray = (ends - counts + ends - 1) / 2
    return mean[places]


def client_gaps(experiment: Experiment, model: nn.Module) -> ClientGaps:
    """Tests a model on every client's samples.

    Args:
        experiment: Whose clients.
        model: A network with its values.
    """
    world = experiment.world
    counts_NC = np.stack([profile.label_counts for profile in world.profiles])
    evaluation: Evaluation = GlobalModel()
    losses = []
    for indices in world.indices:
        evaluator = Evaluator(
            world.data.images[indices],
            world.data.labels[indices],
            transform=world.data.transform,
            batch_size=experiment.evaluation_batch,
            device="cpu",
            dtype=torch.get_default_dtype(),
        )
        losses.append(evaluator.test(evaluation, {}, model, ())[1])
    return ClientGaps(
        num_samples=counts_NC.sum(axis=1),
        divergence=js_divergence(counts_NC, population(counts_NC)),
        loss=np.array(losses),
    )


def run_kind(table: TableFile, *, scale: str, cells: Sequence[Cell], out: Path, quiet: bool) -> Grid:
    """Runs all cells and correlates; see :mod:`fedsweep.reproduce.kinds`. Finished cells are not run again.

    Raises:
        ConfigError: A measure is none of :data:`MEASURES`, the section ``divergence_gap`` is not empty, or two cells'
            names are too much alike for folders of their own.
        InputError: A cell's configuration is wrong, or its data set is not there.
    """
    for measure in table.measures:
        if measure.of not in MEASURES:
            raise ConfigError(f"{table.name}: {unknown_name('measure', measure.of, MEASURES)}")
    if table.divergence_gap:
        raise ConfigError(f"{table.name}: the kind divergence_gap has no options, but got {dict(table.divergence_gap)}")
    _check_slugs(table, cells)
    found: dict[Cell, ClientGaps] = {}
    problems: dict[Cell, str] = {}
    for cell in cells:
        folder = out / _slug(cell)
        try:
            found[cell] = _measured(cell, folder, table_folder=out, quiet=quiet)
        except InputError:
            raise
        except FedsweepError as error:
            problems[cell] = f"seed {cell.seed}: {error}"
    _write_csv(found, out / CSV)
    _draw(found, out / FIGURES)
    return _grid(table, scale, cells, found=found, problems=problems)


def _measured(cell: Cell, folder: Path, *, table_folder: Path, quiet: bool) -> ClientGaps:
    view = view_of(folder)
    if not isinstance(view, RunView) or view.status != FINISHED:
        if not quiet:
            print(f"{cell.label}, seed {cell.seed}: {cell.config.training.rounds} rounds", file=sys.stderr, flush=True)
        plan = plan_run(cell.config)
        # The store lies above --out, as for every other table.
        observers = make_observers(plan.config, table_folder)
        run_plan(plan, folder, observers=observers, overwrite=folder.exists())
        return client_gaps(plan.experiment, load_model(folder))
    return client_gaps(build_experiment(cell.config), load_model(folder))


def _grid(
    table: TableFile,
    scale: str,
    cells: Sequence[Cell],
    *,
    found: dict[Cell, ClientGaps],
    problems: dict[Cell, str],
) -> Grid:
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.row, cell.column), []).append(cell)
    made = []
    for (row, column), group in groups.items():
        figures = [found[cell].figures() for cell in group if cell in found]
        made.append(
            GridCell(
                row=row,
                column=column,
                measured={m.name: summed_up([f[m.of] for f in figures], m, of=len(group)) for m in table.measures},
                standing=standing_of(table, group[0]),
                problems=tuple(problems[cell] for cell in group if cell in problems),
            )
        )
    return Grid(
        table=table,
        scale=scale,
        rows=tuple(dict.fromkeys(cell.row for cell in cells)),
        columns=tuple(dict.fromkeys(cell.column for cell in cells)),
        cells=tuple(made),
        setting=setting_of(cells),
    )


def _write_csv(found: dict[Cell, ClientGaps], path: Path) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "column", "seed", "client", "num_samples", "js_divergence", "loss", "signed_gap"])
    for cell, gaps in found.items():
        by_client = np.stack([gaps.divergence, gaps.loss, gaps.signed_gap], axis=1).tolist()
        for client, (samples, figures) in enumerate(zip(gaps.num_samples.tolist(), by_client, strict=True)):
            writer.writerow([cell.row, cell.column, cell.seed, client, samples, *figures])
    atomic_write(path, text.getvalue().encode())


def _draw(found: dict[Cell, ClientGaps], folder: Path) -> None:
    """A point per client, a picture per cell."""
    if not found:
        return
    from matplotlib.figure import Figure

    from fedsweep.reproduce.figures_style import paper_style, save_both

    for cell, gaps in found.items():
        pearson = gaps.figures()["pearson"]
        said = "" if pearson is None else f", Pearson {pearson:.3f}"
        with paper_style():
            figure = Figure(figsize=(4.5, 3.4), layout="constrained")
            axes = figure.subplots()
            axes.scatter(gaps.divergence, gaps.gap, s=12)
            axes.set(xlabel="JS divergence (nats)", ylabel="Loss gap (nats)")
            axes.set_title(f"{cell.label}, seed {cell.seed}{said}")
            save_both(figure, folder / _slug(cell))


def _check_slugs(table: TableFile, cells: Sequence[Cell]) -> None:
    """Two cells in one folder would show one run."""
    by_slug: dict[str, Cell] = {}
    for cell in cells:
        other = by_slug.setdefault(_slug(cell).lower(), cell)
        if other is not cell:
            raise ConfigError(
                f"{table.name}: the cells {other.label!r} and {cell.label!r} would share the folder {_slug(cell)!r};"
                " name rows and columns so that their letters and digits differ"
            )


def _slug(cell: Cell) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{cell.row}-{cell.column}-seed{cell.seed}").strip("-")
