"""Names say what a thing is, and docstrings begin with a verb.

No variable is called found, given, known, said, told, asked, held or kept, and no docstring opens with What, Whether,
How, Who or Nothing. Places that are not converted yet are listed below; the list only shrinks.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_WORDS = frozenset({"found", "given", "known", "said", "told", "asked", "held", "kept"})
# Names that others rely on: fields under which checkpoints and results are stored, and a plug-in's keyword.
_FIXED = {
    "platform/fedsweep/engine/state.py": "held",
    "platform/fedsweep/bench/setup.py": "asked",
    "platform/fedsweep/reproduce/measured/table_kind.py": "said",
    "platform/fedsweep/papers/dynamicfl/choosing.py": "said",
}
_OPENINGS = ("What ", "Whether ", "How ", "Who ", "Nothing ")

# Modules of platform/fedsweep, and of algorithms, that still have such names.
NOT_YET: tuple[str, ...] = (
    "algorithms/afd.py",
    "algorithms/augfl.py",
    "algorithms/dynafed/distillation.py",
    "algorithms/dynafed/synthesis.py",
    "algorithms/dynafed/trajectory.py",
    "algorithms/dynamicfl/dynacomm.py",
    "algorithms/dynamicfl/exact.py",
    "algorithms/dynamicfl/exact_levels.py",
    "algorithms/dynamicfl/names.py",
    "algorithms/dynamicfl/scores.py",
    "algorithms/dynamicfl/search.py",
    "algorithms/dynamicfl/similarity.py",
    "algorithms/fedas.py",
    "algorithms/fedbe.py",
    "algorithms/feddf.py",
    "algorithms/feddhad/curvature.py",
    "algorithms/feddhad/degrees.py",
    "algorithms/feddhad/dropout_rates.py",
    "algorithms/feddhad/fedad.py",
    "algorithms/feddhad/feddh.py",
    "algorithms/feddhad/unit_scores.py",
    "algorithms/feddrop.py",
    "algorithms/feddst.py",
    "algorithms/feddyn.py",
    "algorithms/fedensemble.py",
    "algorithms/federated_dropout.py",
    "algorithms/fedgen.py",
    "algorithms/fedktl.py",
    "algorithms/fednova.py",
    "algorithms/fedstg.py",
    "algorithms/heterofl.py",
    "algorithms/moon.py",
    "algorithms/parts/__init__.py",
    "algorithms/parts/arrivals.py",
    "algorithms/parts/decoders.py",
    "algorithms/parts/distilling.py",
    "algorithms/parts/element_masks.py",
    "algorithms/parts/ensembles.py",
    "algorithms/parts/features.py",
    "algorithms/parts/own_models.py",
    "algorithms/parts/server_updates.py",
    "algorithms/parts/unit_draws.py",
    "algorithms/parts/widths.py",
    "algorithms/prunefl/method.py",
    "algorithms/scaffold.py",
    "platform/fedsweep/card.py",
    "platform/fedsweep/catalog.py",
    "platform/fedsweep/config/base.py",
    "platform/fedsweep/config/execution.py",
    "platform/fedsweep/config/explain.py",
    "platform/fedsweep/config/includes.py",
    "platform/fedsweep/config/load.py",
    "platform/fedsweep/config/overrides.py",
    "platform/fedsweep/config/presets.py",
    "platform/fedsweep/config/scenario.py",
    "platform/fedsweep/config/signatures.py",
    "platform/fedsweep/config/sweep.py",
    "platform/fedsweep/config/tables.py",
    "platform/fedsweep/config/training.py",
    "platform/fedsweep/config/yaml12.py",
    "platform/fedsweep/experiment/build.py",
    "platform/fedsweep/experiment/experiment.py",
    "platform/fedsweep/experiment/implied.py",
    "platform/fedsweep/models/attention.py",
    "platform/fedsweep/models/cost.py",
    "platform/fedsweep/models/initial.py",
    "platform/fedsweep/models/network.py",
    "platform/fedsweep/models/registry.py",
    "platform/fedsweep/models/slicing.py",
    "platform/fedsweep/models/unit_submodel.py",
    "platform/fedsweep/plugins.py",
    "platform/fedsweep/world/availability.py",
    "platform/fedsweep/world/budgets.py",
    "platform/fedsweep/world/data/files.py",
    "platform/fedsweep/world/data/huggingface.py",
    "platform/fedsweep/world/data/leaf.py",
    "platform/fedsweep/world/data/record.py",
    "platform/fedsweep/world/data/torchvision_compat.py",
    "platform/fedsweep/world/data/torchvision_sets.py",
    "platform/fedsweep/world/devices.py",
    "platform/fedsweep/world/drift.py",
    "platform/fedsweep/world/feature_skew.py",
    "platform/fedsweep/world/label_stats.py",
    "platform/fedsweep/world/partitions/__init__.py",
    "platform/fedsweep/world/partitions/base.py",
    "platform/fedsweep/world/partitions/draws.py",
    "platform/fedsweep/world/partitions/flower.py",
    "platform/fedsweep/world/partitions/kinds.py",
    "platform/fedsweep/world/partitions/registry.py",
    "platform/fedsweep/world/replay.py",
    "platform/fedsweep/world/spec_checks.py",
    "platform/fedsweep/world/stragglers.py",
    "platform/fedsweep/world/transforms.py",
    "platform/fedsweep/errors.py",
    "platform/fedsweep/guard.py",
    "platform/fedsweep/method.py",
    "platform/fedsweep/processes.py",
    "platform/fedsweep/records.py",
    "platform/fedsweep/submodel.py",
    "platform/fedsweep/trees.py",
)


def main() -> int:
    """Print each such name and docstring; returns the exit code."""
    modules = sorted(path for folder in ("platform/fedsweep", "algorithms") for path in (_ROOT / folder).rglob("*.py"))
    lines = [line for path in modules if not _is_exempt(path) for line in _lines(path)]
    print("\n".join(lines) or "all names say what a thing is, all docstrings begin with a verb or a noun")
    return 1 if lines else 0


def _is_exempt(path: Path) -> bool:
    place = path.relative_to(_ROOT).as_posix()
    return any(place == each or place.startswith(f"{each}/") for each in NOT_YET)


def _lines(path: Path) -> Iterator[str]:
    place = path.relative_to(_ROOT).as_posix()
    words = _WORDS - {_FIXED.get(place)}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in words:
            yield f"{place}:{node.lineno}: a variable called {node.id}; name what it holds"
        if isinstance(node, ast.arg) and node.arg in words:
            yield f"{place}:{node.lineno}: a parameter called {node.arg}; name what it holds"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node) or ""
            if text.startswith(_OPENINGS):
                yield f"{place}:{getattr(node, 'lineno', 1)}: a docstring that opens with {text.split()[0]}"


if __name__ == "__main__":
    sys.exit(main())
