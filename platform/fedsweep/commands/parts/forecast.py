"""What ``fedsweep run --dry-run`` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedsweep.driver.run import Plan


def print_forecast(plan: Plan) -> None:
    """The resolved configuration, and the forecast as comments: together still a configuration file."""
    from fedsweep.engine.foresight import executor_in_words, forecast

    cost = forecast(plan.experiment, num_actors=max(1, plan.num_actors))
    about = "" if cost.exact else "about "
    clock = "none, without scenario.devices" if cost.sim_time_s is None else f"{about}{cost.sim_time_s:,.1f} s"
    lines = [
        f"rounds: {cost.rounds}, at most",
        f"runs: {plan.backend}",
        f"executor: {executor_in_words(plan.experiment)}",
        f"model parameters: {cost.num_params:,}",
        f"local steps, all clients: {about}{cost.local_steps:,}",
        f"bytes sent, both ways: {about}{cost.total_bytes:,} (communication ratio {cost.comm_ratio:.4f})",
        f"bytes before round 1: {cost.registration_bytes:,}",
        f"training FLOPs: {about}{cost.flops:.3g}",
        f"simulated time: {clock}",
        f"memory per actor, beside the program: {cost.memory_mb:,.1f} MB",
    ]
    said = [f"# note: {text}" for text in cost.remarks]
    print(plan.config.to_yaml() + "\n".join(["# forecast", *(f"#   {line}" for line in lines), *said]))
