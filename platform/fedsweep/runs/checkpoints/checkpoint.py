"""Checkpoints of a run: from any of them it goes on to the same bits as if it had never stopped.

A checkpoint is a manifest, ``round-000020.json``, and the objects it refers to: state trees in ``objects/`` named by
their SHA-256. The manifest comes last and is put in place in one step, so a kill at any byte leaves the older
checkpoints as they were. What did not change since (clients' memories, old rows) is not written again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fedsweep.client.messages import Handle
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError, DataError, OutputError, RunError, lacks_room
from fedsweep.records import RoundRecord, State
from fedsweep.runs.checkpoints.record_codec import pack, unpack
from fedsweep.runs.checkpoints.state_codec import from_bytes, refuse_constant, to_bytes
from fedsweep.runs.files import ObjectRef, ObjectStore, read_plain, sweep_temporaries, sync_folder, write_durably

_FORMAT = "fedsweep checkpoint"
_VERSION = 1
_MANIFEST = re.compile(r"round-(\d{6,12})\.json")
# A manifest has some hundred bytes per client that remembers something; this is for more than a million of them.
_MAX_MANIFEST_BYTES = 256 * 2**20
# Rows are kept in blocks, so that a long run does not write all of its past again with each checkpoint; so many full
# blocks become one, so that a manifest names few however long the run is.
_ROWS_PER_OBJECT, _BLOCKS_PER_BLOCK = 100, 10

# So many clients' memories are in memory twice while they are written.
_AT_ONCE = 64

_Rows = tuple[RoundRecord, ...]
_Ends = tuple[RoundRecord, RoundRecord]


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The newest valid checkpoint of a folder.

    Attributes:
        state: The run as the newest valid checkpoint has it; None where there is no valid one.
        path: That checkpoint's manifest.
        skipped: A sentence per newer checkpoint that is not valid, newest first.
    """

    state: RunState | None
    path: Path | None
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Manifest:
    """The parts of a checkpoint."""

    round: int
    config_hash: str
    state: ObjectRef
    rows: tuple[ObjectRef, ...] = ()
    memories: dict[int, ObjectRef] = field(default_factory=dict)

    def refs(self) -> set[ObjectRef]:
        """Return all objects."""
        return {self.state, *self.rows, *self.memories.values()}


class CheckpointStore:
    """The checkpoints of one run. One process writes at a time.

    Args:
        folder: The run folder; the checkpoints lie in its folder ``checkpoints``, made by the first save.
        keep: How many are kept, at least 1.
        config_hash: Names the configuration; checkpoints of another one are refused.
        earlier: Names of configurations whose checkpoints are this one's, too.
    """

    def __init__(self, folder: Path, *, keep: int, config_hash: str, earlier: Collection[str] = ()) -> None:
        if keep < 1:
            raise ConfigError(f"checkpoint.keep must be at least 1, but got {keep}")
        self._folder, self._keep, self._config_hash = folder / "checkpoints", keep, config_hash
        self._accepted = frozenset({config_hash, *earlier})
        self._objects = ObjectStore(self._folder / "objects", suffix=".safetensors")
        # What was last written or read, so that unchanged memories and rows are neither fetched nor encoded again.
        self._memories: dict[int, tuple[Handle, ObjectRef]] = {}
        self._rows: dict[tuple[int, int], tuple[_Ends, ObjectRef]] = {}

    # -- saving --------------------------------------------------------------------------------------------------

    def save(self, state: RunState, *, fetch: Callable[[Handle], State]) -> Path:
        """Write a checkpoint, then drop those that are too many: all but the newest ``keep``, and later rounds'.

        Later rounds than the state's can only be left from before the run went back, past a damaged checkpoint say.

        Args:
            state: The run.
            fetch: ``fetch(handle)`` gives the memory behind a handle; called for memories that are new.

        Returns:
            The manifest's path.

        Raises:
            InvariantError: A component or a client keeps something that is no state tree.
            OutputError: The folder ``checkpoints`` is a link.
            RunError: The disk is full, say; the older checkpoints are as they were.
        """
        self._check_folder()
        with self._writing(state.round):
            self._folder.mkdir(parents=True, exist_ok=True)
            sweep_temporaries(self._folder)
            self._objects.sweep()
        # Encoded outside of `_writing`: what can't be kept is the fault of the component's author, not of the disk.
        memories = self._keep_memories(state, fetch)
        whole = to_bytes(pack(RunState, replace(state, memories={}, records=())), root="state")
        with self._writing(state.round):
            manifest = _Manifest(
                round=state.round,
                config_hash=self._config_hash,
                state=self._objects.put(whole),
                rows=self._keep_rows(state.records),
                memories=memories,
            )
            # What the manifest names is on the disk before the manifest is: whenever the power fails, a checkpoint that
            # is there is whole.
            self._objects.sync()
            path = self._folder / f"round-{state.round:06d}.json"
            write_durably(path, _manifest_bytes(manifest))
            sync_folder(self._folder)
            self._drop_old(path)
        return path

    @contextmanager
    def _writing(self, round: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            way_out = "make room there" if lacks_room(error) else "see to that"
            raise RunError(
                f"can't write the checkpoint of round {round} to {self._folder}: {error.strerror or error}; the"
                f" checkpoints before it are as they were: {way_out}, then go on with `fedsweep run --resume"
                f" {self._folder.parent}`"
            ) from error

    def let_go(self, memories: Mapping[int, Handle]) -> None:
        """Hold no memories but these: a client's old one would be there beside its new one until the next save."""
        self._memories = {k: saved for k, saved in self._memories.items() if saved[0] is memories.get(k, saved)}

    def _keep_memories(self, state: RunState, fetch: Callable[[Handle], State]) -> dict[int, ObjectRef]:
        self.let_go(state.memories)
        changed = [client for client, handle in state.memories.items() if not self._has(client, handle)]
        for start in range(0, len(changed), _AT_ONCE):
            block = changed[start : start + _AT_ONCE]
            # Fetched in blocks: all clients' memories at once may be more than the driver has room for.
            data = [to_bytes(fetch(state.memories[k]), root=f"memory of client {k}") for k in block]
            with self._writing(state.round):
                refs = self._objects.put_all(data)
            self._memories |= {k: (state.memories[k], ref) for k, ref in zip(block, refs, strict=True)}
        return {client: self._memories[client][1] for client in state.memories}

    def _has(self, client: int, handle: Handle) -> bool:
        saved = self._memories.get(client)
        # The same handle, not an equal one: to compare contents they would have to be fetched.
        return saved is not None and saved[0] is handle and self._objects.holds(saved[1])

    def _keep_rows(self, records: _Rows) -> tuple[ObjectRef, ...]:
        blocks: dict[tuple[int, int], tuple[_Ends, ObjectRef]] = {}
        for place in _blocks(len(records)):
            start, stop = place
            stored = self._rows.get(place)
            # A run that goes back plays all rounds from there anew, so a block with the same ends is the same.
            if stored is None or not _same_ends(stored[0], records, place) or not self._objects.holds(stored[1]):
                ref = self._objects.put(to_bytes(pack(_Rows, records[start:stop]), root="records"))
                stored = ((records[start], records[stop - 1]), ref)
            blocks[place] = stored
        self._rows = blocks
        return tuple(ref for _, ref in blocks.values())

    def _drop_old(self, newest: Path) -> None:
        """Drop manifests first: an object may go only when no manifest that stays on the disk refers to it."""
        paths = self._manifests()
        stays = paths[paths.index(newest) :][: self._keep]
        for path in set(paths) - set(stays):
            path.unlink()
        # Before objects go: a manifest that a power failure brought back would name what is gone.
        sync_folder(self._folder)
        refs: set[ObjectRef] = set()
        for path in stays:
            try:
                refs |= _read_manifest(path).refs()
            except (DataError, ConfigError):
                continue  # damaged or foreign, so of no use for going on with this run
        self._objects.collect(refs)

    # -- loading -------------------------------------------------------------------------------------------------

    def newest(self, *, keep_handle: Callable[[State], Handle]) -> Loaded:
        """Read the newest checkpoint that holds what it promises; damaged ones are passed over, and said to be.

        Args:
            keep_handle: Gives a handle for a memory; called once everything was read and checked.

        Raises:
            ConfigError: A checkpoint is whole, but of another configuration or of another version of the format.
            OutputError: The folder ``checkpoints`` is a link.
        """
        skipped: list[str] = []
        for path in self._manifests():
            try:
                manifest = _read_manifest(path)
                # Not passed over as a damaged one is: an older one would be of that configuration just as well.
                if manifest.config_hash not in self._accepted:
                    raise ConfigError(
                        f"{path} belongs to another configuration (hash {manifest.config_hash[:12]}, this run's is"
                        f" {self._config_hash[:12]}); go on with the config.yaml that it was written with, give it more"
                        " rounds by --resume DIR --rounds N, or choose another --out"
                    )
                state, trees = self._read(manifest)
            except DataError as error:
                skipped.append(f"{self._folder.name}/{path.stem}: {error}")
                continue
            # Only now: nothing of a checkpoint that is passed over goes to the workers' store.
            handles = {client: keep_handle(tree) for client, tree in trees.items()}
            if manifest.config_hash != self._config_hash:
                # What was begun of the next round would be of the shorter run: its rate or its classes may be others.
                state = replace(state, partial={})
            self._remember(manifest, state.records, handles)
            return Loaded(state=replace(state, memories=handles), path=path, skipped=tuple(skipped))
        return Loaded(state=None, path=None, skipped=tuple(skipped))

    def _manifests(self) -> list[Path]:
        """List the manifests, newest first."""
        self._check_folder()
        if not self._folder.is_dir():
            return []
        numbered = [(int(name[1]), path) for path in self._folder.iterdir() if (name := _MANIFEST.fullmatch(path.name))]
        return [path for _, path in sorted(numbered, reverse=True)]

    def _check_folder(self) -> None:
        if self._folder.is_symlink():
            raise OutputError(f"{self._folder} must be a folder, but is a link; move it away")

    def _read(self, manifest: _Manifest) -> tuple[RunState, dict[int, State]]:
        state: RunState = unpack(RunState, from_bytes(self._objects.get(manifest.state)), path="state")
        blocks = [unpack(_Rows, from_bytes(self._objects.get(ref)), path="records") for ref in manifest.rows]
        records: _Rows = tuple(row for block in blocks for row in block)
        if state.round != manifest.round or len(records) != state.round or state.memories or state.records:
            raise DataError(
                f"its parts don't fit: manifest of round {manifest.round}, state of round {state.round} with"
                f" {len(records)} rows"
            )
        _check_vectors(state)
        trees = {client: from_bytes(self._objects.get(ref)) for client, ref in manifest.memories.items()}
        return replace(state, records=records), trees

    def _remember(self, manifest: _Manifest, records: _Rows, handles: dict[int, Handle]) -> None:
        self._memories = {client: (handle, manifest.memories[client]) for client, handle in handles.items()}
        places = _blocks(len(records))
        # A manifest says itself which blocks it has: where they are others, they are written anew.
        if len(places) == len(manifest.rows):
            self._rows = {
                (start, stop): ((records[start], records[stop - 1]), ref)
                for (start, stop), ref in zip(places, manifest.rows, strict=True)
            }


def _blocks(count: int) -> list[tuple[int, int]]:
    """Return where the blocks of so many rows begin and end: large ones first, of the rest as many as there are."""
    places: list[tuple[int, int]] = []
    start = 0
    while start < count:
        size = _ROWS_PER_OBJECT
        while size * _BLOCKS_PER_BLOCK <= count - start:
            size *= _BLOCKS_PER_BLOCK
        places.append((start, min(start + size, count)))
        start += size
    return places


def _same_ends(ends: _Ends, records: _Rows, place: tuple[int, int]) -> bool:
    return ends[0] is records[place[0]] and ends[1] is records[place[1] - 1]


def _check_vectors(state: RunState) -> None:
    vectors: list[Tensor] = [state.vector, *state.anchors.values(), *(own.vector for own in state.models.values())]
    if not state.vector.is_floating_point() or {(v.dtype, tuple(v.shape)) for v in vectors} != {
        (state.vector.dtype, (state.vector.numel(),))
    }:
        raise DataError("the model and the anchors must be vectors of one floating type and one length")


def _manifest_bytes(manifest: _Manifest) -> bytes:
    body = {
        "format": _FORMAT,
        "version": _VERSION,
        **vars(manifest),
        "memories": {str(client): ref for client, ref in manifest.memories.items()},
    }
    return json.dumps({"body": body, "sha256": _digest(body)}, indent=1, default=vars).encode("ascii")


def _digest(body: object) -> str:
    """Compute the digest of the content, whatever the spaces around it."""
    return hashlib.sha256(
        json.dumps(body, sort_keys=True, separators=(",", ":"), default=vars).encode("ascii")
    ).hexdigest()


def _read_manifest(path: Path) -> _Manifest:
    """Read a manifest whose own checksum holds and whose fields are what they should be.

    Raises:
        DataError: It is damaged.
        ConfigError: It is whole, but of another version.
    """
    data = read_plain(path, max_size=_MAX_MANIFEST_BYTES)
    try:
        envelope = json.loads(data, parse_constant=refuse_constant)
        body = envelope["body"]
        intact = envelope["sha256"] == _digest(body)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError("it is no manifest of a checkpoint") from error
    if not intact:
        raise DataError(f"checksum differs ({path.name})")
    if not isinstance(body, dict) or body.get("format") != _FORMAT:
        raise DataError("it is no manifest of a checkpoint")
    if body.get("version") != _VERSION:
        raise ConfigError(
            f"{path} has version {str(body.get('version'))[:20]} of the checkpoint format, but this program reads"
            f" version {_VERSION}; go on with the version of fedsweep that wrote it, or choose another --out"
        )
    return _manifest_of(body, path)


def _manifest_of(body: dict[str, Any], path: Path) -> _Manifest:
    keys = {"format", "version", "round", "config_hash", "state", "rows", "memories"}
    if set(body) != keys or not isinstance(body["config_hash"], str) or type(body["round"]) is not int:
        raise DataError(f"a manifest has the fields {sorted(keys)}, but this one has {sorted(body)[:10]}")
    if path.name != f"round-{body['round']:06d}.json":
        raise DataError(f"it says that it is of round {body['round']}")
    if not isinstance(body["rows"], list) or not isinstance(body["memories"], dict):
        raise DataError("the rows of a manifest are a list and its memories a mapping")
    clients = body["memories"]
    if not all(re.fullmatch(r"0|[1-9]\d{0,11}", client) for client in clients):
        raise DataError("the memories of a manifest are named by the clients' ids")
    return _Manifest(
        round=body["round"],
        config_hash=body["config_hash"],
        state=_ref_of(body["state"]),
        rows=tuple(_ref_of(entry) for entry in body["rows"]),
        memories={int(client): _ref_of(clients[client]) for client in clients},
    )


def _ref_of(entry: Any) -> ObjectRef:
    if not isinstance(entry, dict) or set(entry) != {"sha256", "size"}:
        raise DataError("an object of a manifest has a sha256 and a size")
    return ObjectRef(entry["sha256"], entry["size"])


def newest_round(folder: Path) -> int | None:
    """Return the round of a run folder's newest checkpoint, by its name: 0 of work within the first; None: none."""
    path = folder / "checkpoints"
    names = (_MANIFEST.fullmatch(entry.name) for entry in path.iterdir()) if path.is_dir() else ()
    return max((int(name[1]) for name in names if name), default=None)


def newest_config_hash(folder: Path) -> str | None:
    """Return how the newest readable checkpoint of a run folder names its configuration; None: there is none."""
    path = folder / "checkpoints"
    for manifest in sorted(path.glob("round-*.json"), reverse=True) if path.is_dir() else ():
        with suppress(DataError, ConfigError):
            return _read_manifest(manifest).config_hash
    return None
