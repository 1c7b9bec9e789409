"""The commands as functions, for programs that ``import fedsweep``."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedsweep.config.load import load_config
from fedsweep.config.schema import Config
from fedsweep.driver.observers import Observer
from fedsweep.driver.run import Launch, plan_run, resumable, run_plan
from fedsweep.errors import ConfigError
from fedsweep.experiment.experiment import Experiment
from fedsweep.finished.growth import grow
from fedsweep.finished.saved_model import load_model
from fedsweep.reports.compare import Form, compared_runs, print_comparison
from fedsweep.reports.setting_table import TableStyle
from fedsweep.results.console import plain_console
from fedsweep.runs.default_folder import default_folder
from fedsweep.runs.remote_folder import read_from, worked_on
from fedsweep.study import Result, Results, load
from fedsweep.tracking.loggers.registry import make_observers

if TYPE_CHECKING:
    from ray.tune import ResultGrid

    from fedsweep.sweeps.sweep_folder import SweepFolder

__all__ = [
    "Result",
    "Results",
    "TableStyle",
    "compare",
    "load",
    "load_model",
    "prepare",
    "report",
    "resume",
    "run",
    "sweep",
]
# Of a table in a text; nothing is cut.
_WIDEST = 100_000


def prepare(config: Mapping[str, Any] | str | Path | Config, *, overrides: Sequence[str] = ()) -> Experiment:
    """Build what a run would follow from, and run nothing: the world, the initial model, the method, the training.

    Args:
        config: As for :func:`run`.
        overrides: As for :func:`run`.

    Returns:
        ``world.data.images`` [S, C, H, W], ``.labels`` [S] and ``.transform``, ``world.indices`` with each client's
        samples among them, ``world.test_images`` and ``.test_labels``; ``new_model()``, ``method``, ``training``.

    Raises:
        InputError: Something in the configuration is wrong or not there.
    """
    return plan_run(config if isinstance(config, Config) else load_config(config, overrides)).experiment


def run(
    config: Mapping[str, Any] | str | Path | Config,
    *,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    overwrite: bool = False,
    observers: Sequence[Observer] = (),
) -> Result:
    """Run one experiment.

    Args:
        config: A configuration, a mapping of its keys, a YAML file, or a preset's name.
        overrides: ``KEY=VALUE`` with dotted keys, as for ``fedsweep run --set``.
        out: The run folder, or the address of one (``s3://...``), which is worked on in a folder here; by default
            ``runs/<name>-<timestamp>``.
        overwrite: Replace the run that is there.
        observers: Further observers beside those that the configuration asks for; what one of these raises, the run
            ends with.

    Raises:
        InputError: Something in the configuration is wrong or not there; nothing was written.
        RunError: The run failed on its way.
        KeyboardInterrupt: It was interrupted; a checkpoint was written, from which :func:`resume` goes on.
    """
    _check_observers(observers)
    loaded = config if isinstance(config, Config) else load_config(config, overrides)
    launch = Launch()
    plan = plan_run(loaded, phases=launch.phases)
    with worked_on(default_folder(plan.config) if out is None else out, going_on=overwrite) as place:
        folder: Path = place.absolute()
        watching = [*make_observers(plan.config, folder), *observers]
        summary = run_plan(plan, folder, observers=watching, overwrite=overwrite, launch=launch)
    return Result(folder=folder, config=plan.config, summary=summary)


def resume(
    folder: str | Path,
    *,
    rounds: int | None = None,
    allow_changed_code: bool = False,
    observers: Sequence[Observer] = (),
) -> Result:
    """Go on with a run from its last checkpoint, to the bits of an unbroken run; one that has finished stays as it is.

    Args:
        folder: The run's folder, or its address.
        rounds: Rounds in all; more than were planned also give a run that has finished more of them.
        allow_changed_code: Go on although modules of one's own, or fedsweep's, are others than at its beginning.
        observers: As for :func:`run`.

    Raises:
        InputError: The folder holds no run, or its data or code is not there or not the same; nothing was written.
        RunError: The run failed on its way.
        KeyboardInterrupt: As of :func:`run`.
    """
    _check_observers(observers)
    with worked_on(folder, going_on=True) as place:
        here: Path = place.absolute()
        if rounds is not None:
            grow(here, rounds=rounds, allow_changed_code=allow_changed_code)
        config, is_finished = resumable(here)
        if not is_finished:
            launch = Launch(allow_changed_code=allow_changed_code)
            plan = plan_run(config, phases=launch.phases)
            watching = [*make_observers(plan.config, here), *observers]
            run_plan(plan, here, observers=watching, resume=True, launch=launch)
        (result,) = Results([here])
    return result


def _check_observers(observers: Sequence[Observer]) -> None:
    several = observers if isinstance(observers, Iterable) else [observers]
    if odd := [one for one in several if not isinstance(one, Observer) or several is not observers]:
        raise ConfigError(f"observers must be a list of objects of the kind fedsweep.Observer, but one is {odd[0]!r}")


def sweep(
    config: Mapping[str, Any] | str | Path | Config,
    *,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    resume: bool = False,
    extend: bool = False,
    reuse: Sequence[str | Path] = (),
) -> ResultGrid:
    """Run the ``sweep:`` section of a configuration on Ray Tune.

    Args:
        config: A configuration, a mapping of its keys, a YAML file, or a preset's name.
        overrides: ``KEY=VALUE`` with dotted keys, as for ``fedsweep sweep --set``.
        out: The sweep's folder, or the address of one (``s3://...``), which is worked on in a folder here; by default
            ``runs/<name>-<timestamp>``.
        resume: Go on with the sweep in ``out``; trials that have finished only report their last round.
        extend: Add the configuration's trials to the sweep in ``out``; those that have a run there keep it.
        reuse: Folders, or their addresses, whose finished runs are taken over where their configuration is a trial's.

    Returns:
        Ray Tune's results, one per trial, with ``metrics`` as of its last round; trials that failed have an ``error``.
        Its ``results`` are the trials' runs as :func:`load` gives them.

    Raises:
        InputError: Something is wrong or not there; nothing was written.
        KeyboardInterrupt: It was interrupted; running trials wrote checkpoints.
    """
    from fedsweep.sweeps.sweep_folder import SweepFolder

    loaded = config if isinstance(config, Config) else load_config(config, overrides)
    with worked_on(default_folder(loaded) if out is None else out, going_on=resume or extend) as place:
        grid = _swept(loaded, SweepFolder(place), resume=resume, extend=extend, reuse=reuse)
    return _with_results(grid, place)


def _swept(
    config: Config, folder: SweepFolder, *, resume: bool, extend: bool, reuse: Sequence[str | Path]
) -> ResultGrid:
    from fedsweep.sweeps.prepare import prepare
    from fedsweep.sweeps.reuse import finished_in, not_taken, take_over
    from fedsweep.sweeps.tuner import run_sweep
    from fedsweep.tracking.terminal.sweep_progress import SweepProgress

    resume = resume and folder.has_plan and not extend
    if resume:
        folder.check_same(config.given)
    elif not extend:
        folder.check_free(overwrite=False)
    prepared = prepare(config, folder, resume=resume, extend=extend)
    if extend:
        prepared.write_extension()
    begun = resume or extend
    with read_from([reuse] if isinstance(reuse, str | Path) else reuse) as places:
        reused, refused = finished_in(map(Path, places), prepared)
        if refused:
            logging.getLogger("fedsweep").warning("%s", not_taken(refused))
        if reused:
            take_over(prepared, reused, begun=begun, overwrite=False)
            begun = True
    return run_sweep(prepared, SweepProgress(), resume=begun)[0]


def _with_results(grid: ResultGrid, folder: Path) -> ResultGrid:
    from ray.tune import ResultGrid

    class SweepGrid(ResultGrid):
        """Ray Tune's results, and what the trials' folders hold."""

        def __init__(self) -> None:
            self.__dict__.update(vars(grid))  # Ray makes it from something that it does not promise

        @property
        def results(self) -> Results:
            """The trials' runs."""
            return Results([folder])

        def _repr_html_(self) -> str:
            return self.results._repr_html_()

    return SweepGrid()


def compare(
    *folders: str | Path,
    by: Literal["run", "setting"] = "run",
    form: Form = "text",
    only: Sequence[str] = (),
    style: TableStyle | None = None,
) -> str:
    """Lay runs side by side, as ``fedsweep compare`` prints them; :meth:`Results.to_pandas` has the figures.

    Args:
        folders: Run folders, or folders with runs below them; or their addresses.
        by: A line per run, or per setting with means over its seeds.
        form: How settings are written: ``text``, ``md``, ``latex`` or ``csv``.
        only: Conditions ``KEY=VALUE`` that runs satisfy.
        style: Rows, columns, figures, order and labels, as the command's options.

    Raises:
        InputError: A folder does not exist or holds no run, a file is damaged, there is no such key or figure, or runs
            are to be written in a form that is for settings.
    """
    page = io.StringIO()
    console = plain_console(width=_WIDEST, file=page)
    with read_from(folders) as places:
        print_comparison(compared_runs(places, only=only), console, by=by, form=form, style=style)
    return "\n".join(line.rstrip() for line in page.getvalue().rstrip().splitlines())


def report(
    *sources: str | Path,
    out: str | Path,
    uri: str | None = None,
    script: str = "inside",
    overwrite: bool = False,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
) -> Path:
    """Write an HTML file that shows runs side by side, as ``fedsweep report`` does.

    Args:
        sources: Run folders, folders with runs below them, the addresses of such, or names of MLflow experiments.
        out: The page; an earlier report is replaced.
        uri: The store with the experiments; None: the one in this folder.
        script: ``inside`` the page, or once ``beside`` all pages of a folder.
        overwrite: Replace ``out`` even where it is no report.
        rows: Short names of the keys that make rows; None: all that differs beside the columns.
        columns: Likewise of those that make columns and panels; None: what makes worlds.

    Raises:
        InputError: There is no source, one is neither a folder with runs nor an experiment, there is no such key, or
            the page can't be written.
    """
    from fedsweep.reports.page import write_report
    from fedsweep.results.worlds import LayoutKeys
    from fedsweep.tracking.mlflow_store import local_store, resolve_uri

    if not sources:
        raise ConfigError(
            "a report is of runs: give folders, addresses or experiments' names, e.g. report('runs', out=...)"
        )
    store, keys = resolve_uri(uri, out=local_store()), LayoutKeys(rows=rows, columns=columns)
    with read_from(sources) as places:
        return write_report(places, out, uri=store, overwrite=overwrite, script=script, keys=keys).path
