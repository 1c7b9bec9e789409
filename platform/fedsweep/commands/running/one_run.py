"""Playing one run for the command line: what is shown while it goes on, and what is said at its end."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedsweep.commands.terminal.interrupts import INTERRUPTED, is_interrupted
from fedsweep.commands.terminal.output import command, is_plain, note
from fedsweep.errors import ConfigError, DataError
from fedsweep.runs.places import is_address, place_name
from fedsweep.tracking.terminal.run_progress import megabytes_text

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.driver.phases import Phases
    from fedsweep.driver.plan import Plan
    from fedsweep.fleet.ray_start import ClusterStart

_WRONG = 2
_NOT_BEGUN = "interrupted before the run began; nothing was written"


@dataclass(frozen=True, kw_only=True)
class PlayOptions:
    """The options of the same names; ``resume``: the folder holds the run."""

    resume: bool = False
    overwrite: bool = False
    allow_changed_code: bool = False
    dashboard: bool
    quiet: bool


def play(config: Config, folder: Path, options: PlayOptions) -> None:
    """Play a run, or go on with the one in its folder, and say how it ended."""
    earlier = None if options.resume else _written_ns(folder)
    try:
        from fedsweep.driver.phases import Phases, process_began
        from fedsweep.fleet.ray_start import early_cluster, early_needs
        from fedsweep.tracking.mlflow_store import resolve_uri
        from fedsweep.tracking.terminal.run_progress import make_progress

        if not options.resume and folder.exists():  # or Ray would be up before it is refused
            from fedsweep.runs.run_folder import RunFolder

            RunFolder(folder).check_free(overwrite=options.overwrite)
        resolve_uri(config.tracking.uri, out=folder)
        # What takes long is imported when the user sees that something goes on.
        with (
            make_progress(quiet=options.quiet, plain=is_plain(), is_interrupted=is_interrupted) as progress,
            early_cluster(None if options.dashboard else early_needs(config), folder) as begun,
        ):
            phases = Phases(began=process_began(), first="command", say=progress.waiting)
            phases.enter("libraries", "libraries")
            from fedsweep.driver.run import Launch, run_plan
            from fedsweep.tracking.loggers.registry import make_observers

            plan = _planned(config, options, phases, begun)
            changed = options.allow_changed_code
            result = run_plan(
                plan,
                folder,
                observers=[*make_observers(plan.config, folder), progress],
                resume=options.resume,
                overwrite=options.overwrite,
                launch=Launch(phases=phases, dashboard=options.dashboard, begun=begun, allow_changed_code=changed),
            )
    except KeyboardInterrupt:
        way_on = command("run", "--resume", place_name(folder))
        note(_NOT_BEGUN if earlier is not None and earlier == _written_ns(folder) else _after_interrupt(folder, way_on))
        raise typer.Exit(INTERRUPTED) from None
    for text in result.get("remarks", ()):
        note(f"note: {text}")
    print(summary(result, folder, opened_by=_comparison(config, folder)), flush=True)


def _planned(config: Config, options: PlayOptions, phases: Phases, begun: ClusterStart | None) -> Plan:
    from fedsweep.catalog import resolve
    from fedsweep.driver.run import plan_run

    with told_before_ray_ends(begun):
        config = resolve(config)  # names and parameters need no Ray to be wrong
        if begun is not None:
            phases.enter("ray", "Ray")
            begun.wait()
            phases.enter("plan")
        plan = plan_run(config, phases=phases)
    if options.dashboard and (not plan.num_actors or config.runtime.address is not None):
        raise ConfigError(
            f"--dashboard is for a Ray cluster that the run starts, but it runs {plan.backend}; leave"
            " runtime.address out and set runtime.backend=ray"
        )
    return plan


@contextmanager
def told_before_ray_ends(begun: ClusterStart | None) -> Iterator[None]:
    """Plan within it: what is wrong is said at once, and not after a cluster that nobody needs has come up and gone.

    Raises:
        typer.Exit: Something was wrong, and has been said; where no cluster is starting, the error passes as it is.
    """
    try:
        yield
    except (ConfigError, DataError) as error:
        if begun is None:
            raise
        logging.getLogger("fedsweep").error("%s", error, exc_info=error)
        raise typer.Exit(_WRONG) from error


def _after_interrupt(folder: Path, way_on: str) -> str:
    saved = any((folder / "checkpoints").glob("*")) if (folder / "checkpoints").is_dir() else False
    if saved:
        return f"interrupted; a checkpoint is written, and this goes on from it: {way_on}"
    if (folder / "config.yaml").is_file():
        return f"interrupted before the first round was done; this starts again: {way_on}"
    return _NOT_BEGUN


def _written_ns(folder: Path) -> int | None:
    """Return the time at which a run was begun in the folder; None: there is none."""
    config = folder / "config.yaml"
    return config.stat().st_mtime_ns if config.is_file() else None


def summary(result: Mapping[str, Any], folder: Path, *, opened_by: str) -> str:
    """Return one line on a finished run, from its ``result.json``, with the command that opens the comparison."""
    accuracy, best = result["test_accuracy"], result["best_test_accuracy"]
    figures = result.get("test_figures") or {}
    listed = ", ".join(f"{name} {value:.4g}" for name, value in figures.items()) or "no accuracy"
    measured = listed if accuracy is None else f"accuracy {accuracy:.4f} (best {best:.4f})"
    ratio = result["comm_ratio"]
    parts = [
        f"{result['rounds']} rounds" + ("" if result["stopped_by"] == "rounds" else f" ({result['stopped_by']})"),
        measured,
        f"{megabytes_text(result['total_bytes'])} MB sent" + ("" if ratio is None else f" (ratio {ratio:.4f})"),
        f"{result['wall_time_s']:.1f} s",
    ]
    return f"{result['status']}: {', '.join(parts)}; in {place_name(folder)}; compare: {opened_by}"


def _comparison(config: Config, folder: Path) -> str:
    """Return the command that opens this run beside others."""
    from fedsweep.tracking.mlflow_store import resolve_uri, sqlite_path

    uri = resolve_uri(config.tracking.uri, out=folder)
    if uri is not None and sqlite_path(uri) is not None:
        return command("ui", "--uri", uri)
    place = place_name(folder)
    return command("compare", place if is_address(place) else folder.parent)
