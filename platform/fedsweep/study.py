"""Runs, sweeps and tables for programs: figures as data frames, models, tests, pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor, nn

from fedsweep.config.load import load_config
from fedsweep.config.schema import Config
from fedsweep.driver.run import plain_torch
from fedsweep.errors import ConfigError, OutputError
from fedsweep.finished.evaluated import Evaluated
from fedsweep.finished.evaluation import Data, evaluate, open_subject
from fedsweep.finished.saved_model import existing, load_model
from fedsweep.reports.compare import compared_runs
from fedsweep.reports.setting_table import setting_rows, world_frame
from fedsweep.reproduce.outputs import Table, has_outputs
from fedsweep.results.config_table import as_numbers, config_table
from fedsweep.results.keys import listed
from fedsweep.results.selection import figure_name
from fedsweep.results.settings import ReportRun, Setting, group_settings, remarks
from fedsweep.results.view import metrics_of
from fedsweep.results.worlds import LayoutKeys, study_of
from fedsweep.runs.find import find_runs
from fedsweep.runs.remote_folder import brought
from fedsweep.runs.run_folder import CLIENT_ACCURACY, TRAFFIC, RunFolder

__all__ = ["Result", "Results", "Table", "load"]

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from matplotlib.axes import Axes

By = Literal["run", "setting", "round"]
_TABLES = ("rounds", "clients", "client_accuracy", "traffic")
# What a page shows of a run; the rest is in the frames.
_SHOWN = ("test_accuracy", "best_test_accuracy", "total_bytes", "comm_ratio", "sim_time_s", "wall_time_s")


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished run.

    Attributes:
        folder: Where its files are.
        config: The resolved configuration.
        summary: What ``result.json`` holds.
    """

    folder: Path
    config: Config
    summary: Mapping[str, Any]

    @property
    def rounds(self) -> pa.Table:
        """One row per round."""
        return RunFolder(self.folder).rounds_table()

    @property
    def clients(self) -> pa.Table:
        """One row per client: samples, label counts, divergence, budget, device."""
        return RunFolder(self.folder).read_clients()

    @property
    def client_accuracy(self) -> pa.Table | None:
        """One row per tested round and client; None where the run has none."""
        return RunFolder(self.folder).client_table(CLIENT_ACCURACY)

    @property
    def traffic(self) -> pa.Table | None:
        """One row per round, client, direction and kind; None where the run has none."""
        return RunFolder(self.folder).client_table(TRAFFIC)

    @property
    def model(self) -> nn.Module:
        """The final global model, in evaluation mode."""
        return load_model(self.folder)

    def to_pandas(self, table: str = "rounds") -> pd.DataFrame:
        """Return one of the run's tables as a frame; that of the rounds is indexed by round.

        Args:
            table: ``rounds``, ``clients``, ``client_accuracy`` or ``traffic``.

        Raises:
            InputError: There is no such table, or the run has none.
        """
        if table not in _TABLES:
            raise ConfigError(f"a run's tables are {', '.join(_TABLES)}, but not {table!r}")
        stored = getattr(self, table)
        if stored is None:
            raise OutputError(f"{self.folder}: the run has no table {table}.parquet")
        # Without threads, as tables are read: pyarrow's pool and torch's do not end well in one process.
        frame: pd.DataFrame = stored.to_pandas(use_threads=False)
        return frame.set_index("round") if table == "rounds" else frame

    def test_data(self, data: Data | None = None) -> tuple[Tensor, Tensor]:
        """Test samples as the model takes them, normalised, [T, C, H, W], and their labels [T].

        Args:
            data: See :meth:`evaluate`.
        """
        with plain_torch():
            return open_subject(self.folder, model=None, overrides=()).inputs(data)

    def evaluate(
        self,
        data: Data | None = None,
        *,
        by: Literal["class", "client"] | None = None,
        overrides: Sequence[str] = (),
    ) -> Evaluated | pd.DataFrame:
        """Test the model again, see :func:`fedsweep.evaluate`.

        Args:
            data: A data set's name, a ``Dataset``, or images and labels; None: the run's own test set.
            by: A data frame with a line per class or per client, in place of all that was found.
            overrides: ``KEY=VALUE`` below ``scenario``, ``evaluation`` and ``runtime``.
        """
        evaluated = evaluate(self.folder, data=data, overrides=overrides)
        if by is None:
            return evaluated
        import pandas as pd

        if by not in ("class", "client"):
            raise ConfigError(f"a test is shown by 'class' or 'client', but not by {by!r}")
        rows = evaluated.classes() if by == "class" else evaluated.clients()
        if not rows:
            raise ConfigError(f"this test has nothing by {by}: samples are not classified, or not told apart by client")
        return pd.DataFrame(rows).set_index(by)

    def plot(self, y: str = "test_accuracy", **options: Any) -> Axes:
        """Return a column over the rounds; options are those of :meth:`Results.plot`."""
        return Results([self.folder]).plot(y, **options)

    def plot_confusion(self, data: Data | None = None, *, ax: Axes | None = None) -> Axes:
        """Draw the confusion matrix: rows are the true classes, columns the predicted ones.

        Args:
            data: See :meth:`evaluate`.
            ax: Where to draw; None: a new picture.
        """
        from fedsweep.figures.confusion import draw_confusion
        from fedsweep.figures.style import paper_style, tidy

        evaluated = evaluate(self.folder, data=data)
        if not evaluated.confusion.size:
            raise ConfigError(
                "a confusion matrix has which classes are taken for which; samples are not classified here"
            )
        with paper_style():
            axes = ax or _new_axes(square=True)
            draw_confusion(axes, evaluated.confusion, class_names=evaluated.class_names)
            tidy(axes)
        return axes

    def _repr_html_(self) -> str:
        return Results([self.folder])._repr_html_()


class Results(Sequence[Result]):
    """Runs side by side, as ``fedsweep compare`` finds them: finished and unfinished ones.

    Args:
        folders: Run folders, or folders with runs below them.
        only: Conditions that the runs satisfy, see :meth:`only`.

    Raises:
        InputError: A folder does not exist or holds no run, a run's file is damaged, or no run satisfies the
            conditions.
    """

    def __init__(self, folders: Sequence[str | Path], *, only: Sequence[str] = ()) -> None:
        self._folders = [existing(folder) for folder in folders]
        self._conditions = tuple(only)
        self._runs = compared_runs(self._folders, only=only)

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"<{len(self)} runs in {', '.join(map(str, self._folders))}>"

    @overload
    def __getitem__(self, place: int) -> Result: ...

    @overload
    def __getitem__(self, place: slice) -> list[Result]: ...

    def __getitem__(self, place: int | slice) -> Result | list[Result]:
        if isinstance(place, slice):
            return [_result(run) for run in self._runs[place]]
        return _result(self._runs[place])

    @cached_property
    def settings(self) -> list[Setting]:
        """Runs that differ in their seed alone, with means over these."""
        return group_settings(self._runs)

    def only(self, *conditions: str) -> Results:
        """Leave out all other runs.

        Args:
            conditions: ``KEY=VALUE`` or ``KEY=VALUE,VALUE``, as ``fedsweep compare --only`` takes them.

        Raises:
            InputError: There is no such key, or no run satisfies the conditions.
        """
        return Results(self._folders, only=[*self._conditions, *conditions])

    @property
    def remarks(self) -> list[str]:
        """Notes of runs at their end, and settings with equal models."""
        return remarks(self._runs, self.settings)

    def to_pandas(
        self,
        by: By = "run",
        *,
        rows: Sequence[str] | str | None = None,
        columns: Sequence[str] | str | None = None,
        values: Sequence[str] | str = "test_accuracy",
    ) -> pd.DataFrame:
        """Return all of it as one frame.

        Args:
            by: A line per run, with the configuration's keys in which runs differ; per setting, with mean, deviation
                and interval over seeds, and its world; or per round, with the run's name, setting and seed.
            rows: Short names of keys, e.g. ``method``; a line for each of their values in place of ``by``.
            columns: Likewise; a group of columns for each of their values, with mean, deviation and number of seeds.
            values: Figures in the cells; only with ``rows`` or ``columns``.

        Raises:
            InputError: There is no such key or figure, or two settings would stand in one cell.
        """
        import pandas as pd

        if rows is not None or columns is not None:
            study = study_of(self._runs, rows=rows, columns=columns)
            figures = [figure_name(name, self._runs, what="values") for name in listed(values)]
            return world_frame(study, figures, order=range(len(study.layout.rows)))
        if by == "setting":
            return pd.DataFrame(setting_rows(study_of(self._runs), range(len(self.settings))))
        names = {place: setting.label for setting in self.settings for place in setting.runs}
        if by == "round":
            return pd.DataFrame(_by_round(self._runs, [names[place] for place in range(len(self._runs))]))
        if by != "run":
            raise ConfigError(f"runs are laid out by 'run', 'setting' or 'round', but not by {by!r}")
        table = config_table([run.flat for run in self._runs])
        varied = {key: as_numbers([row[at] for row in table.cells]) for at, key in enumerate(table.differing)}
        shown = (*_SHOWN, *metrics_of(run.view for run in self._runs))
        return pd.DataFrame(
            [
                {
                    "run": run.label,
                    "setting": names[place],
                    "method": run.method,
                    "seed": run.view.seed,
                    "status": run.status,
                    "rounds": run.num_rounds,
                    **{name: run.view.figure(name) for name in shown},
                    **{key: values[place] for key, values in varied.items()},
                    "folder": str(run.folder),
                }
                for place, run in enumerate(self._runs)
            ]
        )

    def plot(
        self,
        y: str = "test_accuracy",
        *,
        x: str = "round",
        ax: Axes | None = None,
        path: str | Path | None = None,
    ) -> Axes:
        """Draw curves with the names, colours and markers of every other picture; a mean over seeds with its band.

        Args:
            y: A column of ``rounds.parquet``, e.g. ``test_loss``, ``train_loss``, ``client_accuracy_worst10``.
            x: ``round``, ``total_bytes``, ``sim_time_s`` or ``wall_time_s``.
            ax: Where to draw; None: a new picture, as wide as a paper's column.
            path: A file to write the picture to, with the fonts that conferences take.

        Raises:
            InputError: There is no such axis, or the file can't be written.
        """
        from fedsweep.figures.curves import ACROSS, draw_settings
        from fedsweep.figures.style import band_handles, checked_path, legend_below, paper_style, save_figure, tidy
        from fedsweep.results.curves import curve_of

        if x not in ACROSS:
            raise ConfigError(f"x must be one of {', '.join(ACROSS)}, but is {x!r}")
        columns = {name for run in self._runs for name in run.view.columns}
        if columns and y not in columns:
            raise ConfigError(f"no run has a column {y!r}; there are {', '.join(sorted(columns))}")
        target = None if path is None else checked_path(path)
        runs = [replace(run, curve=curve_of(run.view, [y])) for run in self._runs]
        with paper_style():
            axes = ax or _new_axes()
            handles = draw_settings(axes, runs, y, x=x, log_x=x == "total_bytes")
            handles += band_handles([axes])
            tidy(axes)
            figure = axes.get_figure(root=True)
            assert figure is not None  # axes have one
            if ax is None:
                legend_below(figure, handles)
            elif len(handles) > 1:
                axes.legend(handles=handles, frameon=False)
            if target is not None:
                save_figure(figure, target)
        return axes

    def plot_worlds(
        self,
        path: str | Path,
        *,
        x: str = "bytes",
        y: str | Sequence[str] | None = None,
        rows: Sequence[str] | str | None = None,
        columns: Sequence[str] | str | None = None,
    ) -> None:
        """Write the picture of ``fedsweep compare --plot``: a panel for each world, a colour for each row.

        Args:
            path: The picture, as for :meth:`plot`.
            x: ``rounds``, ``bytes``, ``sim``, ``wall``, ``flops``, or the short name of a key with numbers.
            y: A figure, or several, each in panels of its own; None: the accuracy, or what else leads.
            rows: As for :meth:`to_pandas`.
            columns: Likewise.

        Raises:
            InputError: There is no such axis, figure or key, or the file can't be written.
        """
        from fedsweep.figures.study import plot_runs

        plot_runs(self._runs, path, x=x, y=y, keys=LayoutKeys(rows=rows, columns=columns))

    def _repr_html_(self) -> str:
        frame = self.to_pandas("setting" if len(self._runs) > len(self.settings) else "run")
        shown = frame.drop(columns="folder", errors="ignore").dropna(axis="columns", how="all")
        return str(shown.to_html(index=False, float_format=lambda value: f"{value:.4g}"))


def load(*folders: str | Path) -> Result | Results | Table:
    """Load what was made before: a :class:`Result` of a run, a :class:`Table` of a reproduced one, or :class:`Results`.

    Args:
        folders: A run's folder, a sweep's or any other with runs below it, a reproduced table's, or the address of one
            (``s3://...``), of which a copy stays here until this process ends; several are runs side by side.

    Raises:
        InputError: A folder does not exist, holds no run, or a single run's has no result yet; or a file in it is not
            what a run writes.
    """
    paths = [existing(brought(folder)) for folder in folders]
    if len(paths) == 1 and has_outputs(paths[0]):
        return Table.read(paths[0])
    if len(paths) == 1 and find_runs(paths[0]) == paths:
        return Result(
            folder=paths[0], config=load_config(paths[0] / "config.yaml"), summary=RunFolder(paths[0]).read_result()
        )
    return Results(paths)


def _by_round(runs: Sequence[ReportRun], settings: Sequence[str]) -> dict[str, list[Any]]:
    """Return the rounds of all runs by column, one run's below the other's; None where a run has no such column."""
    cells: dict[str, list[Any]] = {name: [] for name in ("run", "setting", "seed")}
    cells |= {name: [] for run in runs if run.num_rounds for name in run.view.columns if name not in cells}
    for run, setting in zip(runs, settings, strict=True):
        alike = {"run": run.label, "setting": setting, "seed": run.view.seed}
        for name, column in cells.items():
            own = () if name in alike else run.view.column(name)
            column += own or [alike.get(name)] * run.num_rounds
    return cells


def _result(run: ReportRun) -> Result:
    return Result(folder=run.folder, config=load_config(run.folder / "config.yaml"), summary=run.view.result)


def _new_axes(*, square: bool = False) -> Axes:
    """Return axes in a picture that notebooks show."""
    from matplotlib import pyplot

    from fedsweep.figures.style import PANEL_HEIGHT, PANEL_WIDTH

    height = 0.85 * PANEL_WIDTH if square else PANEL_HEIGHT
    return pyplot.subplots(figsize=(PANEL_WIDTH, height), layout="constrained")[1]
