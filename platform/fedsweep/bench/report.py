"""The benchmark's figures, as rows of a table and as JSON."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fedsweep.bench.setup import Figure

COLUMNS = ("set-up", "what", "against", "ratio", "least to greatest", "ours", "theirs", "asked", "")


def row(name: str, figure: Figure, *, is_judged: bool) -> tuple[str, ...]:
    """Return one figure's row under :data:`COLUMNS`, beside its set-up's name."""
    ratios = figure.ratios
    theirs = statistics.median(figure.reference_s) if figure.reference_s else None
    demands = [f">= {figure.asked:g}"] if figure.asked is not None else []
    demands += [f"<= {figure.limit_s:g} s"] if figure.limit_s is not None else []
    return (
        name,
        f"{figure.what}{f' ({figure.data})' if figure.data else ''}",
        figure.against,
        "" if figure.ratio is None else f"{figure.ratio:.2f}",
        f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "",
        f"{figure.seconds:.3g} s",
        "" if theirs is None else f"{theirs:.3g} s",
        ", ".join(demands),
        verdict(figure, is_judged=is_judged),
    )


def verdict(figure: Figure, *, is_judged: bool) -> str:
    """``"reached"``, ``"missed"``, ``"not judged"`` on a busy machine, or nothing where nothing is asked."""
    if figure.is_good is None:
        return ""
    if not is_judged:
        return "not judged"
    return "reached" if figure.is_good else "missed"


def tree(
    figures: Sequence[tuple[str, Figure]], *, machine: Mapping[str, Any], loads: Mapping[str, float], is_judged: bool
) -> dict[str, Any]:
    """Return the contents of ``--json``; ``loads`` are the CPUs that others used before each set-up."""
    return {
        "format": 1,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": dict(machine),
        "load_of_others_cpus": dict(loads),
        "is_judged": is_judged,
        "figures": [
            {
                "set_up": name,
                **asdict(figure),
                "facts": dict(figure.facts),
                "ratios": figure.ratios,
                "ratio": figure.ratio,
                "verdict": verdict(figure, is_judged=is_judged) or None,
            }
            for name, figure in figures
        ],
    }
