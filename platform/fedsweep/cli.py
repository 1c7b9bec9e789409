"""The command ``fedsweep``: what can be asked for, and how errors become one line and an exit code.

Importing this module loads typer and little else: each command imports what it needs, so that help comes at once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import importlib
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from fedsweep import __version__
from fedsweep.commands import (
    bench,
    catalog,
    compare,
    doctor,
    evaluate,
    partition,
    replay,
    report,
    reproduce,
    run,
    store,
    sweep,
    verify,
)
from fedsweep.commands.terminal.interrupts import INTERRUPTED, interrupts, is_interrupted
from fedsweep.commands.terminal.options import examples
from fedsweep.commands.terminal.output import lasting_output, note, printable
from fedsweep.errors import FedsweepError, InputError, RunError, first_line, lacks_memory, lacks_room
from fedsweep.papers import COMMANDS
from fedsweep.processes import check_addresses, check_memory, collect_seldom, keep_freed_memory, look_here_last

_DEBUG = "--debug"
# Characters of a message; with "error: " it stays below 500.
_LONGEST = 480
# The commands that train, draw and track.
_TRAINING = ("run", "sweep", "reproduce")


class _Commands(typer.core.TyperGroup):
    """The commands; of one that is interrupted, and does not say itself how it goes on, this is said."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (typer.Exit, FedsweepError):
            raise
        except (KeyboardInterrupt, Exception) as error:
            if not is_interrupted():
                raise
            # Cut off in the midst of an import, libraries fail with errors of their own.
            why = "" if isinstance(error, KeyboardInterrupt) else f" ({type(error).__name__}: {first_line(error)})"
            note(
                _shortened(
                    f"interrupted before fedsweep {ctx.invoked_subcommand} was done{why}; give the command again"
                )
            )
            raise typer.Exit(INTERRUPTED) from error


app = typer.Typer(
    name="fedsweep",
    cls=_Commands,
    help="Federated-learning experiments: one method against one world, on a Ray cluster, tracked in MLflow.",
    epilog=examples(
        "fedsweep run quickstart/dynamicfl",
        "fedsweep run quickstart/dynamicfl --set training.rounds=5 --dry-run",
        "fedsweep compare runs --plot accuracy.png",
        "fedsweep COMMAND --help",
    ),
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_EXPERIMENTS, _NAMES, _MACHINE = "Experiments", "What can be named", "This machine"
app.command("run", rich_help_panel=_EXPERIMENTS, epilog=run.EXAMPLES)(run.run)
app.command("sweep", rich_help_panel=_EXPERIMENTS, epilog=sweep.EXAMPLES)(sweep.sweep)
app.command("reproduce", rich_help_panel=_EXPERIMENTS, epilog=reproduce.EXAMPLES)(reproduce.reproduce)
app.command("compare", rich_help_panel=_EXPERIMENTS, epilog=compare.EXAMPLES)(compare.compare)
app.command("report", rich_help_panel=_EXPERIMENTS, epilog=report.EXAMPLES)(report.report)
app.command("evaluate", rich_help_panel=_EXPERIMENTS, epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.command("verify", rich_help_panel=_EXPERIMENTS, epilog=verify.EXAMPLES)(verify.verify)
app.command("replay", rich_help_panel=_EXPERIMENTS, epilog=replay.EXAMPLES)(replay.replay)
app.command("sync", rich_help_panel=_EXPERIMENTS, epilog=store.SYNC_EXAMPLES)(store.sync)
app.command("partition", rich_help_panel=_EXPERIMENTS, epilog=partition.EXAMPLES)(partition.partition)
for _name, _path in COMMANDS.items():
    _module = importlib.import_module(_path.partition(":")[0])
    app.command(_name, rich_help_panel=_EXPERIMENTS, epilog=_module.EXAMPLES)(getattr(_module, _path.partition(":")[2]))
app.command("list", rich_help_panel=_NAMES, epilog=catalog.LIST_EXAMPLES)(catalog.list_names)
app.command("show", rich_help_panel=_NAMES, epilog=catalog.SHOW_EXAMPLES)(catalog.show)
app.command("ui", rich_help_panel=_MACHINE, epilog=store.UI_EXAMPLES)(store.ui)
app.command("doctor", rich_help_panel=_MACHINE, epilog=doctor.EXAMPLES)(doctor.doctor)
app.command("bench", rich_help_panel=_MACHINE, epilog=bench.EXAMPLES)(bench.bench)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"fedsweep {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", metavar="", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    debug: Annotated[
        bool, typer.Option(_DEBUG, metavar="", help="Show the traceback of an error; stands anywhere on the line.")
    ] = False,
) -> None:
    del version, debug
    check_addresses()
    if context.invoked_subcommand in _TRAINING:
        check_memory()


@functools.cache
def _command() -> Any:
    """Return the command line; Typer's own options for completion are switches, too, and are shown as such."""
    command = typer.main.get_command(app)
    for option in command.params:
        if option.name in ("install_completion", "show_completion"):
            option.metavar = ""
    return command


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: The words after ``fedsweep``; by default the process's own.

    Returns:
        0 done; 1 the run failed; 2 the input was wrong; 130 interrupted.
    """
    if argv is None:
        collect_seldom()
        keep_freed_memory()
        return _leave(main(sys.argv[1:]))
    words = list(argv)
    debug = _DEBUG in words
    words = [word for word in words if word != _DEBUG] or ["--help"]
    try:
        with lasting_output(), _surroundings(debug=debug), interrupts():
            code = _command().main(args=words, prog_name="fedsweep", standalone_mode=False)
            return code if isinstance(code, int) else 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        return _tell(error, debug=debug)


def _tell(error: Exception, *, debug: bool) -> int:
    """Print what an exception means; returns the exit code."""
    if debug:
        traceback.print_exception(error)
    message, code = explain(error)
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code


def _leave(code: int) -> int:
    """Return the exit code; where Ray is still at work in a thread that nobody waits for, end the process at once.

    What was imported ends with the process. Python would look through all of it for unreachable cycles first, which
    after torch and MLflow takes a second.
    """
    gc.freeze()
    watch = sys.modules.get("fedsweep.fleet.ray_watch")
    if watch is not None and watch.has_abandoned_calls():
        sys.stdout.flush()
        os._exit(code)
    return code


def explain(error: Exception) -> tuple[str, int]:
    """Return one line on whatever a command raised, and the exit code."""
    text = re.sub(r"\s*\n\s*", " ", str(error).strip())
    if lacks_room(error):  # whatever was to be written: no input was wrong
        text += "" if "make room" in text else "; make room there, then give the command again"
        return _shortened(text), 1
    text = _shortened(text)
    if isinstance(error, InputError):
        return text, 2
    if isinstance(error, RunError):
        return text, 1
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # wherever it is met, somebody gave the name
        return _shortened(f"{error.filename}: too long for a file's name; choose a shorter one"), 2
    if isinstance(error, PermissionError) and error.filename is not None:  # likewise
        return _shortened(f"{error.filename}: permission denied; see to that, or name another place"), 2
    # typer's own errors: their class moved between its releases, their methods did not.
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        return _shortened(_usage(error)), 2
    first = _shortened(first_line(error))
    if lacks_memory(error):
        return f"{first}; a smaller model, batch or data set takes less, or fewer actors", 1
    return f"{type(error).__name__}: {first}; this is a bug: {_DEBUG} shows the traceback", 1


def _shortened(text: str) -> str:
    """Shorten a long message in its middle: the fault stands first, the way out last, a long value between."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 150]} ... {text[-100:]}"
    return printable(text)


def _usage(error: Exception) -> str:
    message: str = error.format_message()  # type: ignore[attr-defined]
    if near := getattr(error, "possibilities", None):
        message = f"no such option: {getattr(error, 'option_name', '')}; did you mean {near[0]}?"
    text = re.sub(r"\s*\n\s*", " ", message.strip()).rstrip(".")
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "fedsweep"
    return f"{text} ({path} --help lists what there is)"


@contextlib.contextmanager
def _surroundings(*, debug: bool) -> Iterator[None]:
    """Surround a command with the user's own modules, and no chatter from libraries on standard error."""
    look_here_last()  # for package.module:callable
    handler = _ToStandardError(debug=debug)
    logger = logging.getLogger("fedsweep")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with warnings.catch_warnings():
        if not debug and not sys.warnoptions:
            warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)


class _ToStandardError(logging.Handler):
    """Prints what the package logs as lines; to the standard error of the moment, which a live display takes over."""

    def __init__(self, *, debug: bool) -> None:
        super().__init__()
        self._debug = debug

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(error := record.exc_info[1], Exception):
            _tell(error, debug=self._debug)
            return
        urgent = "warning: " if record.levelno >= logging.WARNING else ""
        print(f"{urgent}{record.getMessage()}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
