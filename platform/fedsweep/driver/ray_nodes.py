"""Ask the nodes of a cluster that others began, before anything starts, whether a run or sweep can be played there."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fedsweep.errors import ResourceError, first_line
from fedsweep.fleet.ray_watch import watched_call
from fedsweep.runs.facts import run_facts
from fedsweep.runs.sources import Sources, changes, shared_sources

# So long a node may take for its first process and an answer, in seconds.
_ANSWER_S = 120.0
# What must be of the driver's version; of Python the first two numbers, and no "+cpu".
_COUNTED = ("python", "fedsweep", "torch", "numpy", "ray")
_MOST_NAMED = 4


def check_nodes(tree: Mapping[str, Any], *, folder: Path | None = None) -> None:
    """Ask all nodes that have CPUs or GPUs, and the driver's own, for fedsweep and for what it computes with.

    Args:
        tree: The configuration's; the modules that it names are asked for, too.
        folder: Where the nodes write, those that see it; None: only the driver's does.

    Raises:
        ResourceError: A node lacks something, or has another version or other sources; names all such nodes.
    """
    versions, sources = run_facts()["versions"], shared_sources(tree)
    with _marked(folder) as mark:
        answers = _ask(_question(), dict(tree), mark)
    refuse_nodes({node: _lacks(answer, versions, sources) for node, answer in answers.items()})


def rehearse_on_nodes(rehearse: Callable[..., Sequence[str]], *arguments: Any) -> None:
    """Have the same nodes prepare something, without training.

    Args:
        rehearse: Returns what is missing, a sentence each.
        arguments: Its own.

    Raises:
        ResourceError: Something is missing on a node; names all such nodes.
    """
    answers = _ask(rehearse, *arguments)
    refuse_nodes({node: [_failed(a)] if isinstance(a, Exception) else a for node, a in answers.items()})


def refuse_nodes(lacking: Mapping[str, Sequence[str]]) -> None:
    """Raise a ResourceError where a node, by its name, lacks something."""
    short = {node: lacks for node, lacks in lacking.items() if lacks}
    if not short:
        return
    lines = [f"{node}: {', '.join(lacks)}" for node, lacks in short.items()]
    more = f"; and {len(lines) - _MOST_NAMED} more" if len(lines) > _MOST_NAMED else ""
    raise ResourceError(
        f"{len(short)} of the cluster's {len(lacking)} nodes can't take part: {'; '.join(lines[:_MOST_NAMED])}{more};"
        " put that right there, or take the node out of the cluster"
    )


def _ask(question: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Put a question to each node; the answer, or the error, by the node's name."""

    def ask() -> dict[str, Any]:
        remote = ray.remote(question)
        here = ray.get_runtime_context().get_node_id()
        waiting = {}
        for node in ray.nodes():
            able = node["Resources"].get("CPU") or node["Resources"].get("GPU") or node["NodeID"] == here
            if node["Alive"] and able:
                place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:6]})"
                waiting[name] = remote.options(num_cpus=0, max_retries=0, scheduling_strategy=place).remote(*arguments)
        until = time.monotonic() + _ANSWER_S
        return {name: _answer(reference, until) for name, reference in waiting.items()}

    return watched_call(ask)


def _answer(reference: Any, until: float) -> Any:
    try:
        return ray.get(reference, timeout=max(0.1, until - time.monotonic()))
    except Exception as error:  # whatever a node of other sources raises
        return error


def _failed(error: Exception) -> str:
    if isinstance(error, ray.exceptions.GetTimeoutError):
        return f"no answer within {_ANSWER_S:.0f} s"
    if isinstance(error, ray.exceptions.WorkerCrashedError):
        return f"no process of fedsweep begins there: it needs fedsweep {run_facts()['versions']['fedsweep']}"
    cause = getattr(error, "cause", None)
    return first_line(cause if isinstance(cause, Exception) else error)


def _question() -> Callable[..., dict[str, Any]]:
    """Return the question: a function that travels by value, since the node may have another fedsweep, or none."""

    def about(tree: dict[str, Any], mark: str | None) -> dict[str, Any]:
        import os
        import platform
        from importlib import metadata

        answer: dict[str, Any] = {"versions": {"python": platform.python_version()}}
        for name in ("fedsweep", "torch", "numpy", "ray"):
            try:
                answer["versions"][name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                answer["versions"][name] = None
        try:
            import fedsweep
            from fedsweep.runs.sources import shared_sources

            answer["versions"]["fedsweep"] = fedsweep.__version__
            answer["sources"] = shared_sources(tree)
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {error}"
        if mark is not None and os.path.exists(mark):
            try:
                with open(f"{mark}-{platform.node()}-{os.getpid()}", "wb") as file:
                    file.write(b"fedsweep")
                os.unlink(file.name)
            except OSError as error:
                answer["folder"] = f"it can't write in {os.path.dirname(mark)} ({error.strerror})"
        return answer

    return about


def _lacks(answer: Any, versions: Mapping[str, str | None], sources: Sources) -> list[str]:
    """Say what a node lacks, by its answer or the error that came in its place."""
    if isinstance(answer, Exception):
        return [_failed(answer)]
    lacks = [
        f"{name} is {answer['versions'].get(name) or 'not installed'}, but {versions[name]} here"
        for name in _COUNTED
        if _same(name, answer["versions"].get(name)) != _same(name, versions[name])
    ]
    if not lacks and "sources" in answer and (differing := changes(dict(sources), answer["sources"])):
        lacks.append(f"other sources than here ({differing.removeprefix('changed since: ')})")
    if "error" in answer:
        lacks.append(f"fedsweep does not begin ({answer['error']})")
    return [*lacks, *([answer["folder"]] if "folder" in answer else [])]


def _same(name: str, version: str | None) -> str | None:
    """Return the part of a version that must be the same."""
    if version is None:
        return None
    return ".".join(version.split(".")[:2]) if name == "python" else version.partition("+")[0]


@contextlib.contextmanager
def _marked(folder: Path | None) -> Iterator[str | None]:
    """Leave a file in a folder for a while, by which nodes know that they see it."""
    if folder is None:
        yield None
        return
    handle, mark = tempfile.mkstemp(prefix=".fedsweep-", dir=folder)
    os.close(handle)
    try:
        yield mark
    finally:
        os.unlink(mark)
