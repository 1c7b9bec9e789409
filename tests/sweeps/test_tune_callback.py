"""Why a trial broke down, from what Ray Tune writes of it."""

from __future__ import annotations

import pytest

from fedsweep.sweeps.tune_callback import cause_in

HEAD = "Failure # {} (occurred at 2026-01-02_03-04-05)\n"
OF_A_PROCESS = HEAD + "The actor died unexpectedly before finishing this task.\n\tclass_name: SweepTrial\n\tpid: 12\n"
OF_A_CONNECTION = HEAD + (
    "The actor baebc54ec04e is unavailable: The actor is temporarily unavailable: RpcError: Socket closed."
    " The task may or may not have been executed on the actor.\n"
)
OF_A_NODE = HEAD + (
    "The actor died unexpectedly before finishing this task.\n\tpid: 12\n"
    "The actor died because its node has died. Node Id: 7dab\n"
)
OF_THE_TRIAL = HEAD + (
    "ray::SweepTrial.train() (pid=12, ip=127.0.0.1)\n"
    '  File "trial.py", line 12, in step\n    raise RunError("no")\n'
    "fedsweep.errors.RunError: the server has had enough\n"
)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (OF_A_PROCESS, "the trial's process died"),
        (OF_A_CONNECTION, "the trial's process died"),
        (OF_A_NODE, "the trial's node died"),
        (OF_THE_TRIAL, "RunError: the server has had enough"),
        ("", "unknown; Ray's logs may say more"),
    ],
)
def test_the_cause_is_one_line(text: str, cause: str) -> None:
    assert cause_in(text.format(1)) == cause


def test_the_last_of_several_failures_counts() -> None:
    assert cause_in(OF_A_NODE.format(1) + OF_THE_TRIAL.format(2)) == "RunError: the server has had enough"
    assert cause_in(OF_THE_TRIAL.format(1) + OF_A_PROCESS.format(2)) == "the trial's process died"
