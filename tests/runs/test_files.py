from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from fedsweep.errors import DataError
from fedsweep.runs.files import ObjectRef, ObjectStore, read_plain, sweep_temporaries, write_durably


def test_a_failed_write_leaves_the_older_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_durably(path, b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_durably(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_a_file_is_replaced_in_one_step_so_who_reads_it_sees_the_old_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_durably(path, b"old")
    with open(path, "rb") as reader:
        write_durably(path, b"new")
        assert reader.read() == b"old" and path.read_bytes() == b"new"


def test_what_an_interrupt_left_being_written_does_not_take_the_next_write_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore(tmp_path, suffix=".x")
    begun, go, lost = threading.Event(), threading.Event(), list[threading.Thread]()
    start, sync = threading.Thread.start, os.fsync

    def interrupted(thread: threading.Thread) -> None:
        is_first = not lost
        lost.append(thread)
        start(thread)
        if is_first:
            assert begun.wait(10)
            raise KeyboardInterrupt  # as a signal does that comes while the thread starts: nobody waits for it then

    def in_turn(handle: int) -> None:
        if threading.current_thread() is lost[0]:
            begun.set()
            assert go.wait(10)
        elif not go.is_set():
            go.set()
            lost[0].join(10)
        sync(handle)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    monkeypatch.setattr(os, "fsync", in_turn)
    with pytest.raises(KeyboardInterrupt):
        store.put(b"content")
    store.sweep()
    assert store.get(store.put(b"content")) == b"content"


def test_a_planted_link_at_the_temporary_name_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / ".file.tmp").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_durably(tmp_path / "file", b"new")
    assert victim.read_bytes() == b"precious"


def test_left_over_temporaries_are_swept_and_the_rest_stays(tmp_path: Path) -> None:
    for name in (".a.tmp", "b.tmp", ".c"):
        (tmp_path / name).touch()
    sweep_temporaries(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".c", "b.tmp"]


def test_files_of_an_unexpected_size_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert read_plain(path, size=3, max_size=3) == b"abc"
    with pytest.raises(DataError, match="3 bytes instead of 4"):
        read_plain(path, size=4)
    with pytest.raises(DataError, match="more than 2"):
        read_plain(path, max_size=2)


def test_an_object_is_written_once_and_rewritten_when_it_was_damaged(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path / "objects", suffix=".bin")
    ref = store.put(b"content")
    written = store.path(ref).stat().st_ino
    assert store.put(b"content") == ref and store.path(ref).stat().st_ino == written
    store.path(ref).write_bytes(b"CONTENT")
    later = ObjectStore(tmp_path / "objects", suffix=".bin")
    with pytest.raises(DataError, match="checksum differs"):
        later.get(ref)
    assert later.put(b"content") == ref and later.get(ref) == b"content"


def test_only_objects_that_nobody_keeps_are_collected(tmp_path: Path) -> None:
    store = ObjectStore(tmp_path, suffix=".bin")
    kept, dropped = store.put(b"kept"), store.put(b"dropped")
    (tmp_path / "notes.bin").touch()
    store.collect([kept])
    assert store.holds(kept) and not store.holds(dropped) and (tmp_path / "notes.bin").exists()


@pytest.mark.parametrize("name", ["../" + "a" * 61, "a" * 63, "a" * 64 + "\n", "", "A" * 64])
def test_a_reference_can_only_name_a_file_in_the_folder(name: str) -> None:
    with pytest.raises(DataError, match="64 hexadecimal digits"):
        ObjectRef(name, 1)
