"""``fedsweep verify``: a run's configuration once more, elsewhere, and whether the same comes out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsweep.commands.terminal.interrupts import is_interrupted
from fedsweep.commands.terminal.options import Quiet, examples

if TYPE_CHECKING:
    import pyarrow as pa

    from fedsweep.runs.run_folder import RunFolder

EXAMPLES = examples("fedsweep verify runs/my-experiment-20250102-030405")

# Of result.json, what follows from the configuration.
_FACTS = (
    "stopped_by",
    "rounds",
    "test_accuracy",
    "best_test_accuracy",
    "total_bytes",
    "comm_ratio",
    "registration_bytes",
    "model_sha256",
)
# Times of the machine and the hour; everything else follows from the configuration.
_VARYING = frozenset({"timestamp_ms", "wall_time_s", "eval_time_s", "server_time_s"})


def verify(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder of a finished run, or its address.")],
    quiet: Quiet = False,
) -> None:
    """Run a folder's configuration again elsewhere and compare the results bit by bit.

    Compared are the final model, every column of the rounds but times of the machine, the clients, what each of them
    sent and received, and accuracies by client. Exit code 1 where something differs.
    """
    from fedsweep.commands.terminal.output import printable
    from fedsweep.errors import OutputError
    from fedsweep.processes import scratch_folder
    from fedsweep.runs.remote_folder import read_from
    from fedsweep.runs.run_folder import RunFolder
    from fedsweep.runs.sources import misfit
    from fedsweep.sweeps.reuse import cut_by

    with read_from([folder]) as (place,), scratch_folder() as scratch:
        original, again = RunFolder(Path(place).expanduser().absolute()), RunFolder(scratch / "run")
        original.check_is_run()
        original.read_config()
        original.check_finished("can be verified")
        result = original.read_result()
        if by := cut_by(original.path):
            raise OutputError(
                f"{folder}: a sweep's {by} ended it after {result.get('rounds', 'some')} rounds, before its own"
                " end; a run that went on to it can be verified"
            )
        differences(original, original, results=(result, result))  # damage is told before hours of rounds
        repeated = _play_again(original, again, quiet=quiet)
        differing = differences(original, again, results=(result, repeated))
    for line in differing:
        print(printable(line))
    changed = misfit(result, repeated["sources"], repeated["versions"])
    if differing:
        why = f", and it was made by other code, samples or libraries: {changed}" if changed else ""
        sentences = result.get("machines_changed")
        why += "".join(f"; {sentence}" for sentence in sentences) if isinstance(sentences, list) else ""
        if (cpu := result.get("cpu", repeated["cpu"])) != repeated["cpu"]:
            why += f"; it was played on another CPU ({str(cpu)[:80]}; here {repeated['cpu']}), where last digits differ"
        print(printable(f"differs: {folder} does not repeat bit by bit{why}"))
        raise typer.Exit(1)
    also = f", also with code, samples or libraries that are others now ({changed})" if changed else ""
    print(f"identical: {result['rounds']} rounds, model {result['model_sha256']}{also}")


def _play_again(original: RunFolder, again: RunFolder, *, quiet: bool) -> dict[str, Any]:
    from fedsweep.commands.terminal.output import is_plain
    from fedsweep.config.load import load_config
    from fedsweep.driver.phases import Phases
    from fedsweep.driver.run import Launch, plan_run, run_plan
    from fedsweep.tracking.terminal.run_progress import make_progress

    with make_progress(quiet=quiet, plain=is_plain(), is_interrupted=is_interrupted) as progress:
        phases = Phases(say=progress.waiting)
        again_so = load_config(original.path / "config.yaml", ["tracking.uri=none", "tracking.also=[]"])
        plan = plan_run(again_so, phases=phases)
        return run_plan(plan, again.path, observers=[progress], launch=Launch(phases=phases))


def differences(
    original: RunFolder, again: RunFolder, *, results: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> list[str]:
    """List the differences between two runs of one configuration and their ``result.json``, a line each."""
    from fedsweep.runs.run_folder import CLIENT_ACCURACY, TRAFFIC

    there, here = results
    # The model by the files themselves: what result.json says of its own file proves nothing.
    facts = [(key, there.get(key), here.get(key)) for key in _FACTS]
    sizes = original.model_bytes(), again.model_bytes()
    facts.append(("model.safetensors, bytes", *sizes))
    if sizes[0] == sizes[1]:
        hashes = [run.model_sha256(num_bytes=sizes[1]) for run in (original, again)]
        facts.append(("model.safetensors, SHA-256", hashes[0], hashes[1]))
    lines = [f"{key}: {one} there, {other} here" for key, one, other in facts if one != other]
    lines += _table_differences(original.rounds_table(), again.rounds_table(), row_names="round")
    lines += _table_differences(original.read_clients(), again.read_clients(), row_names="client")
    for name in (CLIENT_ACCURACY, TRAFFIC):
        tables = original.client_table(name), again.client_table(name)
        if tables[0] is None or tables[1] is None:
            lines += [f"{name}: only {'here' if tables[0] is None else 'there'}"] if tables != (None, None) else []
        else:
            lines += [f"{name}, {line}" for line in _table_differences(*tables, row_names="round")]
    return lines


def _table_differences(there: pa.Table, here: pa.Table, *, row_names: str) -> list[str]:
    lines = []
    if there.num_rows != here.num_rows:
        lines.append(f"rows, by {row_names}: {there.num_rows} there, {here.num_rows} here")
    for name in dict.fromkeys([*there.column_names, *here.column_names]):
        if name in _VARYING:
            continue
        if name not in there.column_names or name not in here.column_names:
            lines.append(f"{name}: only {'there' if name in there.column_names else 'here'}")
            continue
        one, other = there.column(name), here.column(name)
        if one.type != other.type:
            lines.append(f"{name}: {one.type} there, {other.type} here, in all rows")
            continue
        if one.equals(other):
            continue
        rows = there.column(row_names).to_pylist() if row_names in there.column_names else range(1, there.num_rows + 1)
        pairs = zip(rows, one.to_pylist(), other.to_pylist(), strict=False)
        differing = [pair for pair in pairs if not _same(*pair[1:])]
        if differing:
            row, a, b = differing[0]
            lines.append(f"{name}: {a} there, {b} here, first in row {row}, {len(differing)} rows in all")
    return lines


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)
