"""Running an experiment: where it runs, what goes to its folder, who watches, and how it ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from fedsweep.catalog import resolve
from fedsweep.config.load import load_config
from fedsweep.config.schema import Config
from fedsweep.driver.backend import choose_backend, cluster_for
from fedsweep.driver.observers import Observer, RunInfo, run_tags
from fedsweep.driver.phases import TIMING, Phases
from fedsweep.driver.plan import Plan
from fedsweep.driver.session import Opened, RunSession, SessionSettings, Step
from fedsweep.engine.forecast import check_first_round
from fedsweep.errors import ConfigError, FedsweepError, OutputError, RunError, lacks_room
from fedsweep.experiment.build import build_experiment
from fedsweep.experiment.build_world import dataset_of
from fedsweep.experiment.checks import check_experiment, check_world
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.guard import guarded, reason_of
from fedsweep.runs.facts import run_facts
from fedsweep.runs.folder_lock import sole_writer, write_along
from fedsweep.runs.run_folder import CONFIG, RunFolder
from fedsweep.runs.source_log import begin_log, changes_on_the_way, forget_other_rounds, machines_on_the_way
from fedsweep.runs.sources import samples_name, sources_of

if TYPE_CHECKING:
    from fedsweep.driver.ray_session import RemoteSession
    from fedsweep.fleet.ray_start import ClusterStart
    from fedsweep.world.data.datasets import Dataset


Session: TypeAlias = "RunSession | RemoteSession"


def plan_run(
    config: Config, dataset: Dataset | None = None, *, config_hash: str | None = None, phases: Phases | None = None
) -> Plan:
    """Check everything that can be checked before something is written.

    Args:
        config: The configuration.
        dataset: The scenario's data set, where it is loaded already.
        config_hash: Names checkpoints instead of the configuration's own hash.
        phases: Told what is waited for.

    Raises:
        InputError: Something that the configuration names is not there or does not fit.
    """
    phases = phases or Phases()
    config = resolve(config)
    if config.training.stop.sim_time_s is not None and config.scenario.devices is None:
        raise ConfigError(
            "training.stop.sim_time_s needs scenario.devices, which give the virtual clock, but that is null; name a"
            " profile, e.g. scenario.devices={profile: edge-accel}, or leave the limit out"
        )
    if dataset is None:
        phases.enter("data", f"data ({config.scenario.dataset}), model and plan")
        dataset = dataset_of(config.scenario)
    phases.enter("plan")
    with guarded(when="before the run", raises=ConfigError), plain_torch():
        experiment = build_experiment(config, dataset, config_hash=config_hash)
        check_world(experiment)  # before components are asked: what a method needs is said first
        check_first_round(experiment)
        num_actors, why = choose_backend(config, experiment)
    samples = samples_name(config.scenario.dataset, config.scenario.image_size)
    sources = {**sources_of(config.tree()), samples: dataset.digest}
    return Plan(config=config, experiment=experiment, num_actors=num_actors, backend=why, sources=sources)


def session_settings(plan: Plan, folder: Path) -> SessionSettings:
    """Return the places where a run's session writes, and how often."""
    backend = {"backend": "ray" if plan.num_actors else "local", "client_actors": plan.num_actors or 1}
    code = {"sources": dict(plan.sources), "sources_changed": changes_on_the_way(folder)}
    code |= {"machines_changed": machines_on_the_way(folder)}
    return SessionSettings(
        folder=folder,
        checkpoint_every=plan.config.checkpoint.every,
        checkpoint_keep=plan.config.checkpoint.keep,
        facts={**run_facts(), **code, **backend},
        umask=present_umask(),
    )


@contextlib.contextmanager
def open_session(plan: Plan, folder: Path) -> Iterator[Session]:
    """Open the session of a run, on the backend that the plan names; ended afterwards."""
    settings = session_settings(plan, folder)
    if not plan.num_actors:
        with one_thread():
            yield RunSession(plan.experiment, lambda warn: LocalFleet(plan.experiment), settings)
        return
    from fedsweep.driver.ray_session import RemoteSession, ray_trouble
    from fedsweep.fleet.ray_watch import watched_call

    with ray_trouble(folder), contextlib.closing(watched_call(lambda: RemoteSession(plan, settings))) as session:
        yield session


def present_umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)  # what another thread makes at this moment is too private, not too open
    os.umask(mask)
    return mask


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Have torch compute as in a process of its own, whatever the program around has set; that is there again after."""
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        cudnn, cuda, onednn = torch.backends.cudnn, torch.backends.cuda, torch.backends.mkldnn
        # The newer names, from torch 2.9 on. Where one follows a more general setting, it reads as that one does.
        newer = [(onednn, ("conv", "matmul", "rnn")), (cudnn, ("conv", "rnn")), (cuda, ("matmul",))]
        operations = [getattr(backend, name, None) for backend, names in newer for name in names]
        precisions = [(each, own) for each in operations if (own := getattr(each, "fp32_precision", None))]
        for operation, own in precisions:
            stack.callback(setattr, operation, "fp32_precision", own)
        # The older ones are undone before them, since they set them, too.
        for switch in ("deterministic", "benchmark", "allow_tf32"):  # which a worker on a GPU sets
            with contextlib.suppress(RuntimeError):  # torch does not tell it where it was set by newer names
                stack.callback(setattr, cudnn, switch, getattr(cudnn, switch))
        precision = "highest"
        with contextlib.suppress(RuntimeError):  # likewise
            precision = torch.get_float32_matmul_precision()
        stack.callback(torch.set_float32_matmul_precision, precision)
        torch.set_float32_matmul_precision("highest")
        for operation, _ in precisions:
            setattr(operation, "fp32_precision", "ieee")  # noqa: B010 - of a type that torch does not tell
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread and torch's own settings, as on an actor, and leave the global generator as it was."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), plain_torch():
            yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The surroundings in which a run is played.

    Attributes:
        phases: Told what is waited for; its split is in the result of a run that finished.
        dashboard: Start Ray's dashboard on 127.0.0.1, where a cluster is started here.
        begun: A Ray cluster that is starting already, for a run that may need one.
        allow_changed_code: Let a run go on that other sources began; its result says so.
    """

    phases: Phases = field(default_factory=lambda: Phases(first="plan"))
    dashboard: bool = False
    begun: ClusterStart | None = None
    allow_changed_code: bool = False


def run_plan(
    plan: Plan,
    folder: Path,
    *,
    observers: Sequence[Observer] = (),
    resume: bool = False,
    overwrite: bool = False,
    launch: Launch | None = None,
) -> dict[str, Any]:
    """Run to the end and return what ``result.json`` holds.

    Args:
        plan: The run.
        folder: Its folder.
        observers: Who watches; they can change nothing.
        resume: The folder holds an unfinished run: go on with it.
        overwrite: Clear an earlier run's files from the folder.
        launch: What has begun before.

    Raises:
        InputError: The folder, the cluster or a store can't be used; nothing was written.
        RunError: The run failed on its way; the folder says so.
        KeyboardInterrupt: It was interrupted; a checkpoint was written.
    """
    check_experiment(plan.experiment)
    launch = launch or Launch()
    phases = launch.phases
    with sole_writer(folder):
        if resume:
            _check_rounds(plan, folder)
            forget_other_rounds(folder, plan.sources, config_hash=plan.experiment.config_hash)
            begin_log(folder, plan.sources, resume=True, allow_changed=launch.allow_changed_code)
        if plan.num_actors:
            phases.enter("ray", "Ray")
        with cluster_for(plan, folder, dashboard=launch.dashboard, begun=launch.begun):
            phases.enter("mlflow")
            for observer in observers:
                observer.check()
            phases.enter("folder")
            if not resume:
                RunFolder.create(folder, overwrite=overwrite).write_config(plan.to_yaml())
                begin_log(folder, plan.sources, resume=False, allow_changed=False)
            phases.enter("clients", f"{plan.num_actors} client actors" if plan.num_actors else None)
            with open_session(plan, folder) as session:
                with _told_of_its_end(session, folder, observers, phases):
                    step = _begin(plan, session, folder, observers=observers, resume=resume, phases=phases)
                    while step.stopped_by is None:
                        _tell(observers, step)
                        step = session.step()
                        phases.round_done()
                    _tell(observers, step)
                    phases.enter("results", "results")
                    result = session.finish("finished", None)
                _tell_of_the_end(observers, "finished", result, phases)
                phases.enter("end")
        return _timed(result, folder, phases)


def _check_rounds(plan: Plan, folder: Path) -> None:
    """Refuse to go on where another process gave the run more rounds before this one could write its folder."""
    path = folder / CONFIG
    if path.is_file() and (there := load_config(path).training.rounds) != (rounds := plan.config.training.rounds):
        raise OutputError(f"{folder} was given {there} rounds meanwhile, in place of {rounds}; go on with it once more")


def _begin(
    plan: Plan, session: Session, folder: Path, *, observers: Sequence[Observer], resume: bool, phases: Phases
) -> Step:
    """Open the session, and return what is to be told before the first round."""
    opened = session.open(resume=resume)
    info = run_info(plan, folder, opened, resume=resume)
    phases.enter("mlflow")
    for observer in observers:
        observer.started(info)
    session.listen(observers)
    phases.rounds()
    return Step(record=None, stopped_by=None, messages=opened.messages)


@contextlib.contextmanager
def _told_of_its_end(session: Session, folder: Path, observers: Sequence[Observer], phases: Phases) -> Iterator[None]:
    """Play the rounds within it: whatever ends the run before its end, folder and observers learn of it."""
    try:
        yield
    except KeyboardInterrupt:
        try:
            session.save()
            result = session.finish("killed", "interrupted")
        except Exception as error:
            _fail(session, folder, observers, error)
            raise
        _tell_of_the_end(observers, "killed", result, phases)
        raise
    except BaseException as error:
        _fail(session, folder, observers, error)
        if isinstance(error, OutputError) and lacks_room(error):
            raise RunError(str(error)) from error  # no input was wrong
        raise


def _timed(result: dict[str, Any], folder: Path, phases: Phases) -> dict[str, Any]:
    """Return the result together with how long everything took, which is known last; the run is whole without it."""
    result = {**result, TIMING: phases.split()}
    with contextlib.suppress(FedsweepError):
        os.close(write_along(folder))  # or it is no longer the folder that this run was written to
        RunFolder(folder).write_result(result)
    return result


def _tell(observers: Sequence[Observer], step: Step) -> None:
    for observer in observers:
        for message in step.messages:
            observer.message(message)
        if step.record is not None:
            observer.round_done(step.record)
        if step.checkpointed and step.record is not None:
            observer.checkpointed(step.record.round)


def _tell_of_the_end(observers: Sequence[Observer], status: str, result: Mapping[str, Any], phases: Phases) -> None:
    """Tell each, also where one before it raises; the run is over as its folder says."""
    with contextlib.ExitStack() as stack:
        for observer in reversed(observers):
            stack.callback(observer.finished, status, result)
            stack.callback(phases.enter, observer.phase, _waiting(observer))


def _waiting(observer: Observer) -> str | None:
    return None if observer.phase == Observer.phase else f"ending: {observer.phase}"


def _fail(session: Session, folder: Path, observers: Sequence[Observer], error: BaseException) -> None:
    """Write the end of a run that failed; its cause matters more than that something can't be written either."""
    reason = reason_of(error)
    result: dict[str, Any] = {"status": "failed", "reason": reason}
    try:
        result = session.finish("failed", reason)
    except Exception:
        # Where a server actor is gone the folder is still there, and must say how the run ended.
        with contextlib.suppress(FedsweepError):
            os.close(write_along(folder))  # or it is no longer the folder that this run began in
            run = RunFolder(folder)
            result |= {"rounds": len(run.read_rounds()) if run.has_rounds() else 0, **run_facts()}
            run.write_result(result)
    for observer in observers:
        with contextlib.suppress(Exception):  # the cause matters more than what an observer of one's own raises
            observer.finished("failed", result)


def run_info(plan: Plan, folder: Path, opened: Opened, *, resume: bool) -> RunInfo:
    """Return the observers' facts of a run whose session has been opened; ``resume``: it was to go on."""
    return RunInfo(
        name=plan.config.name,
        folder=folder,
        config=plan.config.flat(),
        tags=run_tags(plan.config, method=plan.experiment.method.name, git_commit=run_facts()["git_commit"]),
        planned_rounds=plan.experiment.training.rounds,
        resumed_from=(opened.records[-1].round if opened.records else 0) if resume else None,
        records=opened.records,
        targets=plan.experiment.targets,
        backend=plan.backend,
    )


def resumable(folder: Path) -> tuple[Config, bool]:
    """Return the configuration of a run that is to go on, and whether it has finished already.

    Raises:
        OutputError: The folder holds no run.
    """
    run = RunFolder(folder)
    run.check_is_run()
    if not (folder / "config.yaml").exists():
        raise OutputError(f"{folder} holds no run: there is no config.yaml in it")
    run.read_config()
    return load_config(folder / "config.yaml"), run.has_finished()
