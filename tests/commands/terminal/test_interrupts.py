from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from fedsweep.cli import main
from fedsweep.commands.terminal.interrupts import interrupts, is_interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_is_a_keyboard_interrupt_and_handlers_are_put_back(number: int) -> None:
    before = signal.getsignal(number)
    with interrupts():
        assert not is_interrupted()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        assert is_interrupted()
    assert signal.getsignal(number) is before
    assert not is_interrupted()


def test_a_second_signal_ends_the_process_at_once() -> None:
    code = """
        import os, signal, time
        from fedsweep.commands.terminal.interrupts import interrupts
        with interrupts():
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                print("first", flush=True)
                os.kill(os.getpid(), signal.SIGINT)
                print("survived", flush=True)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "first\n")


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_what_announces_an_end_ends_nothing_at_once(number: int) -> None:
    with interrupts():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # a closed terminal says so twice


def test_a_signal_that_the_parent_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts():
            os.kill(os.getpid(), signal.SIGINT)
            assert not is_interrupted()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ImportError("cannot load module more than once")])
def test_a_command_that_a_signal_ends_says_so_and_ends_with_130(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cut_off(*arguments: object, **keywords: object) -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except KeyboardInterrupt:
            raise error from None

    monkeypatch.setattr("fedsweep.finished.evaluation.evaluate", cut_off)
    assert main(["evaluate", "runs/first"]) == 130
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("interrupted before fedsweep evaluate was done")
    assert said.err.endswith("; give the command again\n") and said.err.count("\n") == 1
    assert str(error) in said.err
