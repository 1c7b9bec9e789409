"""A run's checkpoints put in the place of another's."""

from __future__ import annotations

from pathlib import Path

from fedsweep.runs.files import ObjectStore, sweep_temporaries, sync_folder, write_durably

_OBJECTS, _SUFFIX, _MANIFESTS = "objects", ".safetensors", "round-*.json"


def replace_checkpoints(target: Path, source: Path) -> None:
    """Put another run's checkpoints in the place of a run's own; wherever that breaks off, there are whole ones.

    Args:
        target: The run's folder ``checkpoints``.
        source: The other's.

    Raises:
        OSError: The disk is full, say.
    """
    objects, names = ObjectStore(target / _OBJECTS, suffix=_SUFFIX), {path.name for path in source.glob(_MANIFESTS)}
    target.mkdir(parents=True, exist_ok=True)
    sweep_temporaries(target)
    objects.sweep()
    # What a manifest names is on the disk before it, and the own ones go last; their objects, with the next checkpoint.
    for path in (source / _OBJECTS).glob(f"*{_SUFFIX}"):
        objects.put(path.read_bytes())
    objects.sync()
    for name in names:
        write_durably(target / name, (source / name).read_bytes())
    sync_folder(target)
    for path in target.glob(_MANIFESTS):
        if path.name not in names:
            path.unlink()
    sync_folder(target)
