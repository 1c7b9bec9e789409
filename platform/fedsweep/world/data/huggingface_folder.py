"""Finds the files of a local folder that Hugging Face's ``datasets`` is to read, and the split that each belongs to.

The library finds splits by words anywhere in a path, so that of pictures a class called ``test`` became the test set.
Here the folders side by side decide, and the library gets the files by their names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from fedsweep.bounded import MOST_LEVELS
from fedsweep.errors import DataError

PICTURES = "imagefolder"
Splits = dict[str, list[str]]

# The library's words for splits, and the signs that part them from others in a name.
_WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SPLIT_OF = {word: split for split, words in _WORDS.items() for word in words}
_SIGN = "[-._ 0-9]"
_SHARD = re.compile(r"data/([^/]+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
# Readers of tables by their files' ends, the first that is there is taken.
_READERS = {".parquet": "parquet", ".csv": "csv", ".jsonl": "json", ".json": "json"}
# Descriptions of data sets, which are no data.
_DESCRIPTIONS = frozenset(
    {"README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dummy_data.zip", "dataset_dict.json"}
)
# Where beside a configuration one of these lies, a run or a sweep of this program wrote the folder.
_CONFIG = "config.yaml"
_OF_RUNS = frozenset({"rounds.parquet", "result.json", "clients.parquet", "checkpoints", "sweep.json"})


def files_of(folder: Path) -> list[str]:
    """Return the files below a folder, as paths from it, sorted.

    Links are followed, but for those to a folder that they lie in. Hidden files and folders, folders that begin with
    ``__`` and those of this program's runs are passed over.

    Raises:
        DataError: A link leads nowhere, or folders lie too deep in one another.
    """
    return sorted(_walk(folder, "", ()))


def _walk(folder: Path, start: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    status = folder.stat()
    place = (status.st_dev, status.st_ino)
    if place in above:
        return
    if len(above) > MOST_LEVELS:
        raise DataError(f"{str(folder)[:200]}...: more than {MOST_LEVELS} folders in one another; take out the links")
    try:
        with os.scandir(folder) as listing:
            entries = [entry for entry in listing if not entry.name.startswith(".")]
    except PermissionError as error:
        raise DataError(
            f"{folder} can't be listed ({error.strerror}); give the right to read it, or take it out"
        ) from None
    names = {entry.name for entry in entries}
    if above and _CONFIG in names and names & _OF_RUNS:
        return
    for entry in entries:
        if entry.is_dir():
            if not entry.name.startswith("__"):
                yield from _walk(Path(entry.path), f"{start}{entry.name}/", (*above, place))
        elif entry.is_file():
            if entry.name not in _DESCRIPTIONS:
                yield start + entry.name
        elif entry.is_symlink():
            raise DataError(f"{entry.path} is a link to what is not there; mend it, or take it away")


def layout(name: str, paths: Sequence[str], *, as_table: bool) -> tuple[str, Splits]:
    """Return the library's reader of a folder's files, and the files of each split, in the order to be read.

    The reader is named, so that a folder's content can't choose one.

    Args:
        name: The data set's, for messages.
        paths: See :func:`files_of`.
        as_table: Whether csv and json files are read; beside pictures they say something else.

    Raises:
        DataError: There are no such files, or it is not plain which split they belong to.
    """
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    kinds = {path: kind for path in paths if (kind := _table_kind(path)) is not None}
    pictures = [path for path in paths if PurePosixPath(path).suffix.lower() in ImageFolder.EXTENSIONS]
    tables = label_tables() if pictures else frozenset()
    labels = [path for path in paths if PurePosixPath(path).name in tables]
    if any(kind == "parquet" and path not in labels for path, kind in kinds.items()) or (as_table and kinds):
        return _tables(name, kinds)
    if not pictures:
        return PICTURES, {}
    splits = _picture_splits(name, sorted(pictures + labels), frozenset(labels))
    classes = {split: {PurePosixPath(path).parent.name for path in own} for split, own in splits.items()}
    first = next(iter(splits))
    # The library names the classes once for all splits, as soon as it has seen two.
    if not labels and len(classes[first]) == 1 < max(map(len, classes.values())):
        raise DataError(
            f"{name}: the split {first} has pictures of one class alone, {classes[first].pop()}; give it pictures of"
            " another, too"
        )
    return PICTURES, splits


def label_tables() -> frozenset[str]:
    """Return what tables with labels are called that lie beside their pictures."""
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    return frozenset(ImageFolder.METADATA_FILENAMES)


def _table_kind(path: str) -> str | None:
    suffixes = reversed(PurePosixPath(path).suffixes)
    return next((_READERS[end.lower()] for end in suffixes if end.lower() in _READERS), None)


def _tables(name: str, kinds: Mapping[str, str]) -> tuple[str, Splits]:
    """Return the reader of tables, and their splits by the words in their folders' or their own names."""
    splits = _table_splits(list(kinds))
    firsts: dict[str, str] = {}
    for paths in splits.values():
        for path in paths:
            firsts.setdefault(kinds[path], path)
    if len(firsts) > 1:
        raise DataError(
            f"{name}: tables must be files of one kind, but are {', '.join(sorted(firsts))}"
            f" ({', '.join(firsts[kind] for kind in sorted(firsts))}); take out those that are no data"
        )
    return next(iter(firsts)), splits


def _table_splits(paths: Sequence[str]) -> Splits:
    """Return the splits as the library finds them: by the names of shards, else of folders, else of files."""
    shards: Splits = {}
    for path in paths:
        if match := _SHARD.fullmatch(path):
            shards.setdefault(match[1], []).append(path)
    if shards:
        order = [*(split for split in _WORDS if split in shards), *sorted(shards.keys() - _WORDS.keys())]
        return {split: shards[split] for split in order}
    parts = {path: PurePosixPath(path).parts for path in paths}
    folders = {path: names[:-1] for path, names in parts.items()}
    own = {path: names[-1:] for path, names in parts.items()}
    return _by_words(folders) or _by_words(own) or {"train": list(paths)}


def _by_words(names: Mapping[str, Sequence[str]]) -> Splits:
    """Return the paths of each split, by the words in their names: those of its first word first."""
    splits: Splits = {}
    for split, words in _WORDS.items():
        chosen: dict[str, None] = {}
        for pattern in (pattern for word in words for pattern in _patterns(word)):
            chosen |= dict.fromkeys(path for path, parts in names.items() if any(map(pattern.fullmatch, parts)))
        if chosen:
            splits[split] = list(chosen)
    return splits


def _patterns(word: str) -> list[re.Pattern[str]]:
    ends = [(before, behind) for before in ("", f".*{_SIGN}") for behind in ("", f"{_SIGN}.*")]
    return [re.compile(before + word + behind, re.IGNORECASE) for before, behind in ends]


def _picture_splits(name: str, paths: Sequence[str], labels: frozenset[str]) -> Splits:
    """Return the splits of pictures and of the tables with their labels, by the first folders that lie side by side.

    Folders that are all called like splits are splits. So are those among others, where they are for training and for
    testing and hold classes, or where no other folder does. No other folder is one.
    """
    start = _stem(paths)
    tops = {path: top for path in paths if (top := _top(path, start)) is not None}
    # Those that hold folders of classes, or a table with labels.
    full = {top for path, top in tops.items() if path in labels or "/" in path.removeprefix(f"{start}{top}/")}
    exact = {top: _SPLIT_OF[top.lower()] for top in tops.values() if top.lower() in _SPLIT_OF}
    others = sorted({*tops.values()} - exact.keys())
    alone = not others or (full and full <= exact.keys())
    if exact and (alone or _is_whole({split for top, split in exact.items() if top in full})):
        # The library would give each split all pictures that the table names.
        if above := [path for path in labels if path not in tops]:
            raise DataError(
                f"{name}: {min(above)} lies above the splits {', '.join(exact)}; give each of these folders a table of"
                " its own pictures"
            )
        if bare := [top for top in exact if top not in full]:
            raise DataError(
                f"{name}: its pictures have no labels: {start}{bare[0]} is a split, but its pictures lie in no folder"
                f" for each class, {start}{bare[0]}/CLASS/*.png; if it is a class, call it otherwise"
            )
        return _spread(_by_words({top: [top] for top in exact}), tops)
    if exact:
        raise DataError(
            f"{name}: {start}{next(iter(exact))} is called like a split, but {', '.join(others[:3])} beside it"
            f" {'is' if len(others) == 1 else 'are'} not: if it is a class, call it otherwise; if it is a split, let"
            " train and test lie side by side, with a folder for each class, train/CLASS/*.png"
        )
    loose = _by_words({top: [top] for top in tops.values() if top in full})
    num_in_one = len({top for those in loose.values() for top in those})
    if _is_whole(set(loose)) and num_in_one == sum(map(len, loose.values())):
        return _spread(loose, tops)
    return {"train": list(paths)}


def _spread(splits: Mapping[str, Sequence[str]], tops: Mapping[str, str]) -> Splits:
    """Return the paths of each split, given as first folders."""
    paths: dict[str, list[str]] = {}
    for path, top in tops.items():
        paths.setdefault(top, []).append(path)
    return {split: [path for top in chosen for path in paths[top]] for split, chosen in splits.items()}


def _stem(paths: Sequence[str]) -> str:
    """Return the folder in which others lie side by side: those that hold nothing but one folder are passed through."""
    start = ""
    while len(tops := {_top(path, start) for path in paths}) == 1:
        top = next(iter(tops))
        if top is None or top.lower() in _SPLIT_OF:
            break
        start += f"{top}/"
    return start


def _top(path: str, start: str) -> str | None:
    """Return the folder below ``start`` that a path goes through, if it goes through one."""
    top, inside, _ = path.removeprefix(start).partition("/")
    return top if inside else None


def _is_whole(splits: set[str]) -> bool:
    return "train" in splits and len(splits) > 1
