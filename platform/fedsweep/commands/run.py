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
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    dashboard: Dashboard = False,
    quiet: Quiet = False,
) -> None:
    """Run one experiment: live progress, and last one line with its folder.

    Ctrl-C writes a checkpoint first; [b]--resume[/b] goes on from there to the same result as an unbroken run.
    """
    if resume is None:
        settings = {"dry_run": dry_run, "overwrite": overwrite, "dashboard": dashboard, "quiet": quiet}
        _run_new(config, overrides or [], out=out, **settings)
        return
    given = {"CONFIG": config, "--set": overrides, "--out": out, "--overwrite": overwrite, "--dry-run": dry_run}
    if both := [name for name, value in given.items() if value]:
        raise ConfigError(f"--resume and {both[0]} exclude each other: {resume / 'config.yaml'} says it all")
    _resume(resume, dashboard=dashboard, quiet=quiet)


def _run_new(
    config: str | None,
    overrides: Sequence[str],
    *,
    out: Path | None,
    dry_run: bool,
    overwrite: bool,
    dashboard: bool,
    quiet: bool,
) -> None:
    if config is None:
        raise ConfigError("CONFIG is missing: give a YAML file or a preset's name, or --resume DIR")
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
    _print_forecast(plan)


def _resume(folder: Path, *, dashboard: bool, quiet: bool) -> None:
    from fedsweep.driver.run import resumable

    folder = folder.expanduser().absolute()
    config, is_finished = resumable(folder)
    if is_finished:
        from fedsweep.catalog import resolve
        from fedsweep.tracking.catch_up import catch_up

        done, _ = catch_up(folder, resolve(config))
        print(f"{folder} has finished already; there is nothing to go on with; {done}")
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


def _print_forecast(plan: Plan) -> None:
    """The resolved configuration, and the forecast as comments: together still a configuration file."""
    from fedsweep.engine.forecast import forecast
    from fedsweep.engine.lane_trial import executor_in_words

    cost = forecast(plan.experiment, num_actors=max(1, plan.num_actors))
    about = "" if cost.exact else "about "
    where = f"{plan.num_actors} Ray client actors" if plan.num_actors else "this process"
    clock = "none, without scenario.devices" if cost.sim_time_s is None else f"{about}{cost.sim_time_s:,.1f} s"
    lines = [
        f"rounds: {cost.rounds}, at most",
        f"runs in: {where}",
        f"executor: {executor_in_words(plan.experiment)}",
        f"model parameters: {cost.num_params:,}",
        f"local steps, all clients: {about}{cost.local_steps:,}",
        f"bytes sent, both ways: {about}{cost.total_bytes:,} (communication ratio {cost.comm_ratio:.4f})",
        f"training FLOPs: {about}{cost.flops:.3g}",
        f"simulated time: {clock}",
        f"memory per actor, beside the program: {cost.memory_mb:,.1f} MB",
    ]
    print(plan.config.to_yaml() + "\n".join(["# forecast", *(f"#   {line}" for line in lines)]))
