"""``fedsweep run``: one experiment, from its configuration or from where it broke off."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsweep.commands.terminal.options import (
    AllowChangedCode,
    Dashboard,
    DryRun,
    Out,
    Overrides,
    Overwrite,
    Quiet,
    examples,
    parse_seeds,
)
from fedsweep.errors import ConfigError

if TYPE_CHECKING:
    from fedsweep.config.schema import Config
    from fedsweep.driver.plan import Plan

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
    out: Out = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="DIR", help="Go on with the run in this folder, or at this address."),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", metavar="N", min=1, help="With --resume: N rounds in all.")
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="SEEDS", help="One run for each, e.g. 0-4 or 0,3,7: the shortest sweep."),
    ] = None,
    allow_changed_code: AllowChangedCode = False,
    dry_run: DryRun = False,
    overwrite: Overwrite = False,
    dashboard: Dashboard = False,
    quiet: Quiet = False,
) -> None:
    """Run one experiment: live progress, and last one line with its folder.

    Ctrl-C writes a checkpoint first; [b]--resume[/b] goes on from there to the same result as an unbroken run.
    """
    from fedsweep.runs.remote_folder import worked_on

    if resume is not None:
        excluded: dict[str, object] = {"CONFIG": config, "--set": overrides, "--seeds": seeds, "--out": out}
        excluded |= {"--overwrite": overwrite, "--dry-run": dry_run}
        if both := [name for name, value in excluded.items() if value]:
            raise ConfigError(f"--resume and {both[0]} exclude each other: the run's config.yaml says it all")
        flags = {"allow_changed_code": allow_changed_code, "dashboard": dashboard, "quiet": quiet}
        with worked_on(resume, going_on=True) as folder:
            _resume(folder, rounds=rounds, **flags)
        return
    if allow_changed_code:
        raise ConfigError("--allow-changed-code goes with --resume DIR")
    if rounds is not None:
        raise ConfigError("--rounds goes with --resume DIR; a new run takes --set training.rounds=N")
    if config is None:
        raise ConfigError("CONFIG is missing: give a YAML file or a preset's name, or --resume DIR")
    if seeds is not None:
        settings = {"dry_run": dry_run, "overwrite": overwrite, "dashboard": dashboard, "quiet": quiet}
        _sweep_seeds(config, overrides or [], seeds, out=out, **settings)
        return
    from fedsweep.commands.running.one_run import PlayOptions, play
    from fedsweep.config.load import load_config
    from fedsweep.runs.default_folder import default_folder

    loaded = load_config(config, overrides or [])
    with worked_on(out or default_folder(loaded), going_on=overwrite, dry=dry_run) as folder:
        folder = folder.absolute()
        if dry_run:
            _try_dry(loaded, folder, overwrite=overwrite)
        else:
            play(loaded, folder, PlayOptions(overwrite=overwrite, dashboard=dashboard, quiet=quiet))


def _sweep_seeds(config: str, overrides: Sequence[str], seeds: str, *, out: str | None, **settings: Any) -> None:
    """Run a configuration once for each seed, as a sweep over the seed alone, by the figures of its own."""
    from fedsweep.commands.sweep import Asked, begin
    from fedsweep.config.load import load_config
    from fedsweep.runs.default_folder import default_folder
    from fedsweep.runs.remote_folder import worked_on
    from fedsweep.sweeps.sweep_folder import SweepFolder

    tree = dict(load_config(config, overrides).given)
    aims = {key: value for key, value in (tree.get("sweep") or {}).items() if key in ("metric", "mode", "constraints")}
    tree["sweep"] = {**aims, "space": {"seed": {"grid": parse_seeds(seeds)}}}
    loaded = load_config(tree)
    with worked_on(out or default_folder(loaded), going_on=settings["overwrite"], dry=settings["dry_run"]) as folder:
        begin(loaded, SweepFolder(folder), Asked(**settings))


def _try_dry(config: Config, folder: Path, *, overwrite: bool) -> None:
    from fedsweep.driver.backend import check_resources
    from fedsweep.driver.run import one_thread, plan_run
    from fedsweep.runs.run_folder import RunFolder
    from fedsweep.tracking.loggers.registry import make_observers

    RunFolder(folder).check_free(overwrite=overwrite)
    plan = plan_run(config)
    watching = make_observers(plan.config, folder)
    check_resources(plan)
    for observer in watching:
        observer.check()
    with one_thread():
        _print_forecast(plan)


def _print_forecast(plan: Plan) -> None:
    """Print the resolved configuration, and the forecast as comments: together still a configuration file."""
    from fedsweep.engine.forecast import executor_in_words, forecast

    cost = forecast(plan.experiment, num_actors=max(1, plan.num_actors))
    about = "" if cost.exact else "about "
    clock = "none, without scenario.devices" if cost.sim_time_s is None else f"{about}{cost.sim_time_s:,.1f} s"
    lines = [
        f"rounds: {_rounds_in_words(cost.rounds, plan, is_exact=cost.exact)}",
        f"runs: {plan.backend}",
        f"executor: {executor_in_words(plan.experiment)}",
        f"model parameters: {cost.num_params:,}",
        f"local steps, all clients: {about}{cost.local_steps:,}",
        f"bytes sent, both ways: {about}{cost.total_bytes:,} (communication ratio {cost.comm_ratio:.4f})",
        f"of them before round 1: {cost.registration_bytes:,}",
        f"training FLOPs: {about}{cost.flops:.3g}",
        f"simulated time: {clock}",
        f"memory per actor, beside the program: {cost.memory_mb:,.1f} MB",
    ]
    remarks = [f"# note: {text}" for text in cost.remarks]
    print(plan.to_yaml() + "\n".join(["# forecast", *(f"#   {line}" for line in lines), *remarks]))


def _rounds_in_words(rounds: int, plan: Plan, *, is_exact: bool) -> str:
    most = plan.experiment.training.rounds
    return f"{rounds}, at most" if is_exact or rounds == most else f"about {rounds} of {most}, until a limit"


def _resume(folder: Path, *, rounds: int | None, allow_changed_code: bool, **settings: bool) -> None:
    from fedsweep.commands.running.one_run import PlayOptions, play
    from fedsweep.driver.run import resumable
    from fedsweep.finished.growth import grow
    from fedsweep.runs.places import place_name

    folder = folder.absolute()
    if rounds is not None:
        grow(folder, rounds=rounds, allow_changed_code=allow_changed_code)
    config, is_finished = resumable(folder)
    if is_finished:
        from fedsweep.catalog import resolve
        from fedsweep.figures.of_run import draw_missing
        from fedsweep.tracking.mlflow_sync import complete

        draw_missing(folder)
        done = complete(folder, resolve(config))
        more = "there is nothing to go on with (--rounds N gives it more)"
        print(f"{place_name(folder)} has finished already; {more}; {done}")
        return
    play(config, folder, PlayOptions(resume=True, allow_changed_code=allow_changed_code, **settings))
