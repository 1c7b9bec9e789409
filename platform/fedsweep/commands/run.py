"""``fedsweep run``: one experiment, from its configuration or from where it broke off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsweep.commands.interrupts import INTERRUPTED, is_interrupted
from fedsweep.commands.options import Dashboard, DryRun, Overrides, Overwrite, Quiet, examples
from fedsweep.errors import ConfigError

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.driver.run import Plan

EXAMPLES = examples(
    "fedsweep run quickstart/dynamicfl",
    "fedsweep run my.yaml --set training.rounds=50 --set 'method={name: fedprox, mu: 0.1}' --out runs/prox",
    "fedsweep run my.yaml --dry-run > resolved.yaml",
    "fedsweep run --resume runs/prox",
    "fedsweep run --resume runs/prox --rounds 100",
    "fedsweep run my.yaml --seeds 0-4 --out runs/five",
)


def run(
    config: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="A YAML file, or a preset's name ([b]fedsweep list presets[/b])."),
    ] = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The run's folder. [dim]runs/<name>-<timestamp>[/dim]")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Go on with the run in this folder.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", metavar="N", min=1, help="With --resume: N rounds in all.")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="SEEDS", help="One run for each, e.g. 0-4 or 0,3,7: the shortest sweep."),
    ] = None,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    dashboard: Dashboard = False,
    quiet: Quiet = False,
) -> None:
    """Run one experiment: live progress, and last one line with its folder.

    Ctrl-C writes a checkpoint first; [b]--resume[/b] goes on from there to the same result as an unbroken run.
    """
    if resume is None:
        if rounds is not None:
            raise ConfigError("--rounds goes with --resume DIR; a new run takes --set training.rounds=N")
        settings = {"dry_run": dry_run, "overwrite": overwrite, "dashboard": dashboard, "quiet": quiet}
        if seeds is not None:
            from fedsweep.commands.seeds import sweep_seeds

            sweep_seeds(_named(config), overrides or [], seeds, out=out, **settings)
            return
        _run_new(_named(config), overrides or [], out=out, **settings)
        return
    given: dict[str, object] = {"CONFIG": config, "--set": overrides, "--seeds": seeds, "--out": out}
    given |= {"--overwrite": overwrite, "--dry-run": dry_run}
    if both := [name for name, value in given.items() if value]:
        raise ConfigError(f"--resume and {both[0]} exclude each other: {resume / 'config.yaml'} says it all")
    _resume(resume, rounds=rounds, dashboard=dashboard, quiet=quiet)


def _named(config: str | None) -> str:
    if config is None:
        raise ConfigError("CONFIG is missing: give a YAML file or a preset's name, or --resume DIR")
    return config


def _run_new(
    config: str,
    overrides: Sequence[str],
    *,
    out: Path | None,
    dry_run: bool,
    overwrite: bool,
    dashboard: bool,
    quiet: bool,
) -> None:
    from fedsweep.commands.forecast import print_forecast
    from fedsweep.config.load import load_config
    from fedsweep.driver.run import check_resources, default_folder
    from fedsweep.runs.run_folder import RunFolder

    loaded = load_config(config, overrides)
    folder = (out or default_folder(loaded)).expanduser().absolute()
    RunFolder(folder).check_free(overwrite=overwrite)
    if not dry_run:
        _play(loaded, folder, overwrite=overwrite, dashboard=dashboard, quiet=quiet)
        return
    plan, watching = _prepare(loaded, folder)
    check_resources(plan)
    for observer in watching:
        observer.check()
    print_forecast(plan)


def _resume(folder: Path, *, rounds: int | None, dashboard: bool, quiet: bool) -> None:
    from fedsweep.driver.growth import grow
    from fedsweep.driver.run import resumable

    folder = folder.expanduser().absolute()
    if rounds is not None:
        grow(folder, rounds=rounds)
    config, is_finished = resumable(folder)
    if is_finished:
        from fedsweep.catalog import resolve
        from fedsweep.tracking.catch_up import catch_up

        done, _ = catch_up(folder, resolve(config))
        print(f"{folder} has finished already; there is nothing to go on with (--rounds N gives it more); {done}")
        return
    _play(config, folder, resume=True, dashboard=dashboard, quiet=quiet)


def _prepare(config: Config, folder: Path) -> tuple[Plan, list[Any]]:
    from fedsweep.driver.run import plan_run
    from fedsweep.tracking.factory import make_observers

    plan = plan_run(config)
    return plan, list(make_observers(plan.config, folder))


def _play(
    config: Config, folder: Path, *, resume: bool = False, overwrite: bool = False, dashboard: bool, quiet: bool
) -> None:
    from fedsweep.commands.output import command, is_plain, note
    from fedsweep.driver.run import run_plan
    from fedsweep.tracking.progress import make_progress

    try:
        with make_progress(quiet=quiet, plain=is_plain(), is_interrupted=is_interrupted) as progress:
            plan, watching = _prepare(config, folder)
            if dashboard and (not plan.num_actors or config.runtime.address is not None):
                raise ConfigError("--dashboard is for a Ray cluster that the run starts, but this run starts none")
            result = run_plan(
                plan,
                folder,
                observers=[*watching, progress],
                resume=resume,
                overwrite=overwrite,
                dashboard=dashboard,
            )
    except KeyboardInterrupt:
        note(_after_interrupt(folder, command("run", "--resume", folder)))
        raise typer.Exit(INTERRUPTED) from None
    for text in result.get("remarks", ()):
        note(f"note: {text}")
    print(summary(result, folder, opened_by=_comparison(plan.config, folder)), flush=True)


def _after_interrupt(folder: Path, way_on: str) -> str:
    saved = any((folder / "checkpoints").glob("*")) if (folder / "checkpoints").is_dir() else False
    if saved:
        return f"interrupted; a checkpoint is written, and this goes on from it: {way_on}"
    if (folder / "config.yaml").is_file():
        return f"interrupted before the first round was done; this starts again: {way_on}"
    return "interrupted before the run began; nothing was written"


def summary(result: Mapping[str, Any], folder: Path, *, opened_by: str) -> str:
    """One line on a finished run.

    Args:
        result: What ``result.json`` holds.
        folder: The run's folder.
        opened_by: The command that opens the comparison.
    """
    accuracy, best = result["test_accuracy"], result["best_test_accuracy"]
    measured = "not evaluated" if accuracy is None else f"accuracy {accuracy:.4f} (best {best:.4f})"
    ratio = result["comm_ratio"]
    parts = [
        f"{result['rounds']} rounds" + ("" if result["stopped_by"] == "rounds" else f" ({result['stopped_by']})"),
        measured,
        f"{result['total_bytes'] / 1e6:.1f} MB sent" + ("" if ratio is None else f" (ratio {ratio:.4f})"),
        f"{result['wall_time_s']:.1f} s",
    ]
    return f"{result['status']}: {', '.join(parts)}; in {folder}; compare: {opened_by}"


def _comparison(config: Config, folder: Path) -> str:
    """The command that opens this run beside others."""
    from fedsweep.commands.output import command
    from fedsweep.tracking.mlflow_store import resolve_uri, sqlite_path

    uri = resolve_uri(config.tracking.uri, out=folder)
    if uri is not None and sqlite_path(uri) is not None:
        return command("ui", "--uri", uri)
    return command("compare", folder.parent)
