import hashlib
import socket
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedsweep.errors import DataError
from fedsweep.world.data.files import OfficialFile, fetch_missing, read_checked

CONTENT = b"official bytes"
MD5 = hashlib.md5(CONTENT).hexdigest()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[str]:
    """The address of a server on this machine that has the official file, and half of it."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    (folder / "whole").write_bytes(CONTENT)
    (folder / "half").write_bytes(CONTENT[:5])
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_read_checked_returns_the_verified_bytes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    assert read_checked(tmp_path / "file", MD5) == CONTENT


def test_read_checked_names_file_found_and_expected_checksum(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"other")
    with pytest.raises(DataError) as raised:
        read_checked(tmp_path / "file", MD5)
    for part in (str(tmp_path / "file"), MD5, hashlib.md5(b"other").hexdigest()):
        assert part in str(raised.value)


def test_read_checked_of_an_unreadable_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_checked(tmp_path, MD5)


def test_without_download_all_missing_files_are_listed(tmp_path: Path) -> None:
    files = [OfficialFile(path=f"sub/{name}", md5=MD5, urls=(f"http://host.invalid/{name}",)) for name in "ab"]
    with pytest.raises(DataError) as raised:
        fetch_missing("own", files, root=tmp_path, download=False)
    assert f"{tmp_path}/sub/a  from http://host.invalid/a (md5 {MD5})" in str(raised.value)
    assert "http://host.invalid/b" in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_file_is_fetched_from_the_first_mirror_that_has_it(tmp_path: Path, mirror: str) -> None:
    file = OfficialFile(path="sub/copy", md5=MD5, urls=(f"{mirror}/nothing", f"{mirror}/half", f"{mirror}/whole"))
    root = tmp_path / "root"
    fetch_missing("own", [file], root=root, download=True)
    assert [path.name for path in (root / "sub").iterdir()] == ["copy"]
    assert (root / "sub/copy").read_bytes() == CONTENT
    assert socket.getdefaulttimeout() is None


def test_a_wrong_file_from_the_network_is_refused_and_not_kept(tmp_path: Path, mirror: str) -> None:
    root = tmp_path / "root"
    with pytest.raises(DataError, match="could not be downloaded") as raised:
        fetch_missing("own", [OfficialFile(path="copy", md5=MD5, urls=(f"{mirror}/half",))], root=root, download=True)
    assert str(root / "copy") in str(raised.value)
    assert not list(root.iterdir())


def test_a_failing_network_is_a_data_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsweep.world.data.torchvision_compat import import_torchvision

    def unreachable(*args: object, **more: object) -> None:
        raise TimeoutError("timed out")

    monkeypatch.setattr(import_torchvision().datasets.utils, "download_url", unreachable)
    file = OfficialFile(path="copy", md5=MD5, urls=("http://host.invalid/copy",))
    with pytest.raises(DataError, match=r"host\.invalid/copy: TimeoutError: timed out"):
        fetch_missing("own", [file], root=tmp_path, download=True)
