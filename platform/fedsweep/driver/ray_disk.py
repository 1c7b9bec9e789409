"""The disk of the driver's node as a file system of pyarrow, for trials on nodes that have a disk of their own.

An actor on the driver's node reads and writes below the sweep's folder, and nowhere else. Where all nodes share the
folder, a mark that the driver left there shows it, and nobody asks the actor.
"""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from pyarrow import fs
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from fedsweep.runs.files import atomic_write

MARK = ".driver"
# So long a trial waits for the driver's node to have written or read a file, in seconds.
_ANSWER_S = 600.0
# As `fleet` has it for all that we name.
_NAMESPACE = "fedsweep"
_Info = tuple[str, int, int | None, int | None]


@dataclass(frozen=True, kw_only=True)
class DriverDisk:
    """The way to the sweep's folder from any node.

    Attributes:
        folder: The sweep's folder on the driver's node, absolute.
        mark: The content of the mark in it.
        actor: The name of the actor that reads and writes there.
    """

    folder: str
    mark: str
    actor: str

    def is_here(self) -> bool:
        """Check whether this node sees the folder at the same path."""
        with contextlib.suppress(OSError):
            return (Path(self.folder) / MARK).read_text() == self.mark
        return False

    def files(self) -> fs.FileSystem:
        """Return the driver's disk; its paths are those of the driver's node."""
        return fs.PyFileSystem(_Files(self.actor))


@contextlib.contextmanager
def served_disk(folder: Path) -> Iterator[DriverDisk]:
    """Let other nodes read and write a folder of this one, which exists, while the block goes on."""
    disk = DriverDisk(folder=str(folder), mark=secrets.token_hex(16), actor=f"fedsweep-disk-{uuid.uuid4().hex}")
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    umask = os.umask(0)
    os.umask(umask)
    atomic_write(folder / MARK, disk.mark.encode())
    made: Any = ray.remote(_Disk)
    options = {"name": disk.actor, "num_cpus": 0, "max_concurrency": 4, "scheduling_strategy": here}
    actor = made.options(**options).remote(str(folder), umask)
    try:
        ray.get(actor.info.remote([str(folder)]), timeout=_ANSWER_S)
        yield disk
    finally:
        with contextlib.suppress(Exception):
            ray.kill(actor)
        (folder / MARK).unlink(missing_ok=True)


class _Disk:
    """Reads and writes below a folder; runs as an actor on the node that has it."""

    def __init__(self, root: str, umask: int) -> None:
        os.umask(umask)
        self._root, self._files = root, fs.LocalFileSystem()

    def info(self, paths: Sequence[str]) -> list[_Info]:
        return _plain(self._files.get_file_info([self._inside(path) for path in paths]))

    def below(self, base: str, recursive: bool, missing_ok: bool) -> list[_Info]:
        selector = fs.FileSelector(self._inside(base), allow_not_found=missing_ok, recursive=recursive)
        return _plain(self._files.get_file_info(selector))

    def read(self, path: str) -> bytes:
        return Path(self._inside(path)).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        target = Path(self._inside(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(target, data)

    def act(self, name: str, *paths: str, **options: bool) -> None:
        """Do one of the other things, by the name that pyarrow has for it."""
        getattr(self._files, name)(*map(self._inside, paths), **options)

    def _inside(self, path: str) -> str:
        if not Path(path).is_relative_to(self._root) or ".." in Path(path).parts:
            raise PermissionError(f"{path} is not below {self._root}")
        return path


class _Files(fs.FileSystemHandler):  # type: ignore[misc]
    """Asks the actor; equal handlers reach the same disk."""

    def __init__(self, actor: str) -> None:
        self._name = actor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Files) and self._name == other._name

    def __hash__(self) -> int:
        return hash(self._name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Files, (self._name,)

    def _ask(self, name: str, *arguments: Any, **options: bool) -> Any:
        actor = ray.get_actor(self._name, namespace=_NAMESPACE)
        try:
            return ray.get(getattr(actor, name).remote(*arguments, **options), timeout=_ANSWER_S)
        except ray.exceptions.RayTaskError as error:
            raise error.as_instanceof_cause() from None

    def get_type_name(self) -> str:
        return "driver-disk"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: Sequence[str]) -> list[fs.FileInfo]:
        return _infos(self._ask("info", list(paths)))

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        return _infos(self._ask("below", selector.base_dir, selector.recursive, selector.allow_not_found))

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return pa.BufferReader(self._ask("read", path))

    open_input_file = open_input_stream

    def open_output_stream(self, path: str, metadata: object) -> pa.NativeFile:
        return pa.PythonFile(_Upload(lambda data: self._ask("write", path, data)), mode="w")

    def open_append_stream(self, path: str, metadata: object) -> pa.NativeFile:
        raise NotImplementedError("files on the driver's disk are written as a whole")

    def create_dir(self, path: str, recursive: bool) -> None:
        self._ask("act", "create_dir", path, recursive=recursive)

    def delete_dir(self, path: str) -> None:
        self._ask("act", "delete_dir", path)

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        self._ask("act", "delete_dir_contents", path, missing_dir_ok=missing_dir_ok)

    def delete_root_dir_contents(self) -> None:
        raise PermissionError("the root of the driver's disk is not to be emptied")

    def delete_file(self, path: str) -> None:
        self._ask("act", "delete_file", path)

    def move(self, src: str, dest: str) -> None:
        self._ask("act", "move", src, dest)

    def copy_file(self, src: str, dest: str) -> None:
        self._ask("act", "copy_file", src, dest)


class _Upload(io.BytesIO):
    """A file that is sent as a whole when it is closed."""

    def __init__(self, send: Callable[[bytes], object]) -> None:
        super().__init__()
        self._send = send

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()  # first: one that is not closed yet is closed again when it goes, and would be sent again
            self._send(data)


def _plain(infos: Sequence[fs.FileInfo]) -> list[_Info]:
    return [(info.path, int(info.type), info.size, info.mtime_ns) for info in infos]


def _infos(plain: Sequence[_Info]) -> list[fs.FileInfo]:
    return [fs.FileInfo(path, fs.FileType(kind), size=size, mtime_ns=mtime) for path, kind, size, mtime in plain]
