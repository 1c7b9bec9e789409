"""The file system behind an address."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import quote

from fedsweep.errors import ConfigError, ResourceError
from fedsweep.runs.background import BackgroundCall
from fedsweep.runs.mirror import Mirror
from fedsweep.runs.places import WAYS_IN, check_address

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

# What stays as it is written; blanks and letters with accents, say, go into an address as %20 does.
_OF_ADDRESSES = "%:/?#[]@!$&'()*+,;=~"
# How long a file system may be silent, which tries again by itself, before it is given up.
_SILENT_S, AT_MOST_S = 60.0, 120.0
_MOST_WORDS = 300
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Remote:
    """A folder on another file system.

    Attributes:
        address: As the user gave it.
        files: The file system.
        base: The folder's path there.
    """

    address: str
    files: FileSystem
    base: str

    @classmethod
    def at(cls, address: str) -> Remote:
        """Find the file system of an address; nothing is asked of it yet.

        Raises:
            ConfigError: The address is wrong, or has a password in it.
            ResourceError: S3 was asked where a bucket is, and did not answer.
        """
        from pyarrow.fs import FileSystem

        check_address(address)
        try:
            files, base = answer_of(lambda: FileSystem.from_uri(quote(address, safe=_OF_ADDRESSES)))
        except OSError as error:
            raise ResourceError(f"{address}: cannot be reached: {short_reason(error)}; {WAYS_IN}") from error
        except (ValueError, NotImplementedError) as error:
            raise ConfigError(f"{address}: no folder can have this address: {short_reason(error)}") from error
        base = base.rstrip("/")
        # Work is brought into a folder of the last name, and . and .. would be others' folders.
        if not {"", ".", ".."}.isdisjoint(base.removeprefix("/").split("/")):
            raise ConfigError(f"{address}: no folder can have this address: write it without //, . and ..")
        return cls(address=address, files=files, base=base)

    @property
    def here(self) -> Path:
        """The folder in which it is worked on: below ``runs``, named by the address."""
        name = re.sub(r"[^\w.=,-]", "_", self.base.rpartition("/")[2])
        return Path("runs") / f"{name}-{hashlib.sha256(self.address.encode()).hexdigest()[:8]}"

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes; None: there is no such file.

        Raises:
            ResourceError: It cannot be reached, or not be read.
        """
        from pyarrow.fs import FileType

        path = f"{self.base}/{name}"

        def read() -> bytes | None:
            if self.files.get_file_info(path).type != FileType.File:
                return None
            with self.files.open_input_stream(path) as stream:
                data: bytes = stream.read()
                return data

        with self.told("read"):
            return answer_of(read)

    def mirror(self, folder: Path) -> Mirror:
        """Return the pair of a folder and this."""
        return Mirror(folder, self.files, self.base)

    @contextlib.contextmanager
    def told(self, act: str) -> Iterator[None]:
        """Have what the file system raises name the address, and what was not possible there: to be read, say."""
        try:
            yield
        except (OSError, ResourceError) as error:
            way_in = f"; {WAYS_IN}" if self.files.type_name == "s3" else ""
            raise ResourceError(f"{self.address}: cannot be {act}: {short_reason(error)}{way_in}") from error

    def write(self, name: str, data: bytes) -> None:
        """Write a file.

        Raises:
            ResourceError: It cannot.
        """

        def write() -> None:
            self.files.create_dir(self.base, recursive=True)
            self.mirror(Path()).send(name, data)

        with self.told("written"):
            answer_of(write)

    def bring(self, folder: Path) -> None:
        """Make a folder what this is.

        Raises:
            ResourceError: It cannot be read.
        """
        with self.told("read"):
            folder.mkdir(parents=True, exist_ok=True)
            self.mirror(folder).pull()


def answer_of(call: Callable[[], _T], slow_s: float = 0.0) -> _T:
    """Wait for a call to a file system until that has been silent for too long, ``slow_s`` seconds more at most."""
    return BackgroundCall(call).wait(silent_s=_SILENT_S + slow_s, at_most_s=AT_MOST_S + slow_s)


def short_reason(error: Exception) -> str:
    """Return what an error of a file system says, on one line."""
    return " ".join(str(error).split())[:_MOST_WORDS].rstrip(".")
