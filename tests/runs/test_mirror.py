"""A folder's copy: the same files, in an order by which no checkpoint there ever names what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyarrow.fs import FileInfo, FileType, LocalFileSystem

from fedsweep.errors import DataError
from fedsweep.runs.mirror import Mirror


class Watched:
    """The local file system, with the names that were written and deleted in their order."""

    type_name = "object store"

    def __init__(self) -> None:
        self._inner, self.acts = LocalFileSystem(), []

    def open_output_stream(self, path: str) -> Any:
        self.acts.append(f"+{Path(path).name}")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        return self._inner.open_output_stream(path)

    def delete_file(self, path: str) -> None:
        self.acts.append(f"-{Path(path).name}")
        self._inner.delete_file(path)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        path = folder / {"first": "checkpoints/round-000001.json", "second": "checkpoints/round-000002.json"}.get(
            name, f"checkpoints/objects/{name}.safetensors" if name.startswith("o") else name
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def texts(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_objects_go_before_the_checkpoints_that_name_them_and_are_removed_after_them(tmp_path: Path) -> None:
    folder, there, files = tmp_path / "here", tmp_path / "there", Watched()
    mirror = Mirror(folder, files, str(there))
    write(folder, first="1", o1="a", config="c")
    assert mirror.push() == 3 and files.acts == ["+o1.safetensors", "+config", "+round-000001.json"]
    files.acts.clear()
    write(folder, second="2", o2="b")
    (folder / "checkpoints/round-000001.json").unlink()
    (folder / "checkpoints/objects/o1.safetensors").unlink()
    assert mirror.push() == 2
    assert files.acts == ["+o2.safetensors", "+round-000002.json", "-round-000001.json", "-o1.safetensors"]
    assert texts(there) == texts(folder)
    files.acts.clear()
    assert mirror.push() == 0 and files.acts == []


def test_what_locks_or_is_half_written_stays_here_and_foreign_files_stay_there(tmp_path: Path) -> None:
    folder, there = tmp_path / "here", tmp_path / "there"
    write(folder, config="c", **{".lock": "", ".result.json.7.tmp": "ha", ".tune/x": ""})
    write(there, notes="mine")
    Mirror(folder, LocalFileSystem(), str(there)).push()
    assert texts(there) == {"config": "c", "notes": "mine"}


def test_pulling_makes_the_folder_what_the_copy_is(tmp_path: Path) -> None:
    folder, there = tmp_path / "here", tmp_path / "there"
    write(there, first="1", o1="a", result="new")
    write(folder, second="2", o2="b", result="old")
    mirror = Mirror(folder, LocalFileSystem(), str(there))
    mirror.pull()
    assert texts(folder) == texts(there)
    assert mirror.push() == 0


def test_a_copy_that_broke_off_is_cleared_of_what_the_folder_dropped_since(tmp_path: Path) -> None:
    folder, there = tmp_path / "here", tmp_path / "there"
    write(there, first="1", o1="a")
    write(folder, second="2", o2="b")
    mirror = Mirror(folder, LocalFileSystem(), str(there))
    mirror.trust()
    mirror.push()
    assert texts(there) == texts(folder)


def test_checkpoints_there_are_old_only_where_their_run_is_in_the_folder(tmp_path: Path) -> None:
    folder, there = tmp_path / "here", tmp_path / "there"
    write(there / "foreign", first="1", o1="a", **{"config.yaml": "c"})
    write(there / "again", first="1", o1="a", **{"config.yaml": "c"})
    write(folder, **{"config.yaml": "sweep"})
    # A user's own, in a folder that is called so.
    write(there, **{"checkpoints/mine.bin": "m", "checkpoints/objects/notes.txt": "n"})
    write(there / "checkpoints" / "run", first="1", **{"config.yaml": "c"})
    mirror = Mirror(folder, LocalFileSystem(), str(there))
    before = texts(there)
    mirror.trust()
    mirror.push()
    assert texts(there) == {**before, "config.yaml": "sweep"}
    write(folder / "again", **{"config.yaml": "c"})
    mirror.push()
    assert len(texts(there / "foreign")) == 3 and texts(there / "again") == {"config.yaml": "c"}


def test_a_sweeps_plan_goes_before_and_a_result_behind_what_it_is_of(tmp_path: Path) -> None:
    files = Watched()
    write(tmp_path / "here", **dict.fromkeys(("config.yaml", "sweep.json"), "x"))
    write(tmp_path / "here" / "0001", first="1", **dict.fromkeys(("result.json", "rounds.parquet"), "x"))
    Mirror(tmp_path / "here", files, str(tmp_path / "there")).push()
    assert files.acts == ["+sweep.json", "+rounds.parquet", "+config.yaml", "+result.json", "+round-000001.json"]


def test_what_is_cleared_before_the_first_copy_is_gone_there_too(tmp_path: Path) -> None:
    folder, there = tmp_path / "here", tmp_path / "there"
    write(folder, first="1", o1="a", **{"result.json": "finished", "config.yaml": "old"})
    Mirror(folder, LocalFileSystem(), str(there)).push()
    write(there, notes="mine")
    mirror = Mirror(folder, LocalFileSystem(), str(there))
    mirror.trust()
    (folder / "result.json").unlink()
    write(folder, **{"config.yaml": "new"})
    mirror.push()
    assert texts(there) == {**texts(folder), "notes": "mine"} and "result.json" not in texts(there)


def test_a_file_that_is_replaced_while_the_folder_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, there = tmp_path / "here", tmp_path / "there"
    write(folder, first="1", o1="a")
    read, lost = Path.read_bytes, []

    def losing(path: Path) -> bytes:
        if path.name == "o1.safetensors" and not lost:
            lost.append(path.unlink())
            write(folder, o2="b")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", losing)
    Mirror(folder, LocalFileSystem(), str(there)).push()
    assert lost and texts(there) == texts(folder)


def test_a_name_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    class Hostile:
        def get_file_info(self, selector: Any) -> list[FileInfo]:
            return [FileInfo("base/../../evil", FileType.File, size=1)]

    with pytest.raises(DataError, match="leads out of the folder"):
        Mirror(tmp_path, Hostile(), "base").pull()  # type: ignore[arg-type]
