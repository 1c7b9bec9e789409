"""A run that goes on for more rounds than it was begun with, to the bits of one that was begun with as many."""

from __future__ import annotations

from pathlib import Path

from fedsweep.catalog import resolve
from fedsweep.config.load import load_config, with_sections
from fedsweep.config.schema import Config
from fedsweep.driver.plan import Plan
from fedsweep.driver.run import plan_run, resumable
from fedsweep.errors import ConfigError
from fedsweep.experiment.build_world import dataset_of
from fedsweep.experiment.experiment import Experiment
from fedsweep.parameters.ranges import Count, check_value
from fedsweep.runs.checkpoints.checkpoint import newest_round
from fedsweep.runs.checkpoints.earlier import read_earlier, write_earlier
from fedsweep.runs.checkpoints.state_codec import to_bytes
from fedsweep.runs.folder_lock import sole_writer
from fedsweep.runs.run_folder import CONFIG, RunFolder
from fedsweep.runs.source_log import changed_since, refusal


def grow(folder: Path, *, rounds: int, allow_changed_code: bool = False) -> Config:
    """Let a run have more rounds: its ``config.yaml`` says so afterwards, and resuming it plays them.

    A kill at any byte leaves either the run as it was or one that resumes to the new number; asking again for the same
    number changes nothing.

    Args:
        folder: A run's folder.
        rounds: Rounds that it shall have in all, at least as many as planned now.
        allow_changed_code: Also where other sources played the rounds done.

    Returns:
        Its new configuration.

    Raises:
        ConfigError: The rounds would be fewer, or those that were played would have been others in the longer run, or
            other sources played them.
        OutputError: The folder holds no run, or another process writes it.
    """
    config, _ = resumable(folder)
    planned = config.training.rounds
    check_value("--rounds", rounds, Count)
    if rounds < planned:
        raise ConfigError(f"--rounds is the run's rounds in all, at least its present {planned}, but got {rounds}")
    if rounds == planned:
        return config
    run = RunFolder(folder)
    result = run.result_if_any()
    if result.get("status") == "finished" and result.get("stopped_by") != "rounds":
        raise ConfigError(
            f"{folder} was ended by {result.get('stopped_by')}, not by its {planned} rounds, so more rounds change"
            " nothing; begin a new run without that"
        )
    longer = with_sections(resolve(config), {"training.rounds": rounds})
    # A kill may have come between a checkpoint, from which the run goes on, and its table.
    done = max(len(run.read_rounds()) if run.has_rounds() else 0, newest_round(folder) or 0)
    plan = _plan_with_same_past(config, longer, done=done)
    if not allow_changed_code and (changed := changed_since(folder, plan.sources)):
        raise ConfigError(refusal(folder, changed))
    with sole_writer(folder):
        # In this order: a checkpoint is known by its configuration, and the shorter one's must be taken from now on.
        # And a longer run that says that it has finished would never be gone on with.
        write_earlier(folder, [*read_earlier(folder), resolve(config).hash()])
        if result:
            run.write_result({**result, "status": "killed", "reason": f"to go on to {rounds} rounds"})
        run.write_config(plan.to_yaml())
    return load_config(folder / CONFIG)


def _plan_with_same_past(config: Config, longer: Config, *, done: int) -> Plan:
    """Return the longer run; refused where it would not have played the rounds done as they were played."""
    dataset = dataset_of(config.scenario)
    plan = plan_run(longer, dataset)
    if done and (reasons := [*_differences(plan_run(config, dataset).experiment, plan.experiment, done=done)]):
        raise ConfigError(
            f"the {done} rounds done are not those of a run of {longer.training.rounds} rounds: {'; '.join(reasons)};"
            f" begin a new run with training.rounds={longer.training.rounds}, or from this one's model with"
            " model.init_from"
        )
    return plan


def _differences(before: Experiment, after: Experiment, *, done: int) -> list[str]:
    planned = before.training.rounds
    reasons = []
    if any(before.training.schedule(r) != after.training.schedule(r) for r in range(1, done + 1)):
        reasons.append("training.schedule goes by the number of rounds")
    for name in ("drift", "availability"):
        if getattr(before.world, name) != getattr(after.world, name):
            reasons.append(f"scenario.{name} goes by the number of rounds")
    if before.spending is not None:
        reasons.append("the planner goes by the number of rounds")
    seams = dict(before.method.server_components)
    for seam, state in before.initial_states.items():
        # By their bytes: they hold tensors, whose == is no yes or no.
        if to_bytes(state, root=seam) != to_bytes(after.initial_states[seam], root=seam):
            reasons.append(f"the method's {seam} goes by the number of rounds")
    watching = [seam for seam, component in seams.items() if component.has_own("observe")]
    if done == planned and done % before.evaluate_every and watching:
        reasons.append(
            f"the last of them was evaluated, which a longer run (evaluation.every={before.evaluate_every}) would not"
            f" have done, and the method's {watching[0]} goes by what it sees"
        )
    return reasons
