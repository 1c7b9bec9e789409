from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsweep.algorithms.dynamicfl.select_group import read_counts, select_group
from fedsweep.errors import ConfigError, DataError

WORKED = np.array([[6, 0, 0], [0, 4, 2], [1, 1, 8], [3, 3, 0], [0, 0, 5]])


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "counts.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("method", ["dynacomm", "exact", "exhaustive"])
def test_worked_example_gives_the_printed_groups(method: str) -> None:
    capped = select_group(WORKED, method=method, max_size=4)
    assert capped.clients == (0, 1, 2)
    assert capped.kl_divergence == pytest.approx(0.0008563, abs=5e-8)
    assert capped.seconds >= 0
    assert select_group(WORKED, method=method, max_size=4, eligible=[0, 1, 3, 4]).clients == (3, 4)
    assert select_group(WORKED, method=method, size=2, orders=100).clients == (3, 4)
    assert select_group(WORKED, method=method).clients == (0, 1, 2, 3, 4)
    assert select_group(WORKED, method=method, max_size=99).kl_divergence == 0


def test_exact_tells_its_lower_bound_and_others_none() -> None:
    exact = select_group(WORKED, method="exact", max_size=4)
    assert exact.lower_bound == pytest.approx(exact.kl_divergence, abs=1e-12)
    assert select_group(WORKED, max_size=4).lower_bound is None


def test_random_group_has_the_size_asked_for_and_follows_the_seed() -> None:
    counts = np.ones((30, 2), dtype=np.int64)
    drawn = [select_group(counts, method="random", size=4, eligible=range(20), seed=seed).clients for seed in range(5)]
    assert all(len(group) == 4 and max(group) < 20 for group in drawn)
    assert len(set(drawn)) > 1
    assert select_group(counts, method="random", size=4, eligible=range(20), seed=3).clients == drawn[3]
    assert len(select_group(counts, method="random", max_size=7).clients) == 7
    with pytest.raises(ConfigError, match=r"between 1 and .* 2, but got 3"):
        select_group(counts, method="random", size=3, eligible=[0, 1])


def test_nobody_admitted_gives_no_clients_and_no_divergence() -> None:
    for method in ("dynacomm", "exact", "exhaustive", "random"):
        nobody = select_group(WORKED, method=method, eligible=[])
        assert (nobody.clients, nobody.kl_divergence, nobody.lower_bound) == ((), None, None)
        assert select_group(WORKED, method=method, max_size=0).clients == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "dynacom"}, "did you mean 'dynacomm'"),
        ({"size": 2, "max_size": 3}, "size=2, max_size=3; leave one out"),
        ({"orders": 0}, "orders must be an integer >= 1 and <= 100000, but got 0"),
        ({"max_size": -1}, "must not be negative, but got -1"),
        ({"size": 6}, "between 1 and .* 5, but got 6"),
        ({"size": 2, "eligible": [1]}, "between 1 and .* 1, but got 2"),
        ({"eligible": [0, 5, -1]}, "0 to 4, but has 5, -1"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_group(WORKED, **options)


def test_counts_are_read_with_spaces_signs_and_line_ends_of_any_kind(tmp_path: Path) -> None:
    path = tmp_path / "counts.csv"
    path.write_bytes(b"\xef\xbb\xbf1, 2,0\r\n 0,0,3\r\n-0,5,5\r\n\r\n")
    assert read_counts(path).tolist() == [[1, 2, 0], [0, 0, 3], [0, 5, 5]]
    assert read_counts(path).dtype == np.int64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", "line 1: column 0 .* 'a'; the file has no header"),
        ("1,2\n3,x\n", "line 2: column 1 .* whole number of samples, but is 'x'$"),
        ("1,2\n3\n", "line 2: .* this one has 1 and line 1 has 2"),
        ("1,2\n3,-4\n", "line 2: column 1 .* at least 0, but is -4"),
        ("1,2\n3,4.5\n", "line 2: column 1 .* '4.5'"),
        ("1,2\n3,1e3\n", "'1e3'"),
        ("1,2\n3,\n", "line 2: column 1 .* ''"),
        ("1;2\n", "'1;2'"),
        ("1,2\n\n3,4\n", "line 2: the row is empty"),
        ("1,2\n,\n", "line 2: the row is empty"),
        ("1,2\n0,0\n", "line 2: the client has no samples"),
        ("1,2\n9007199254740992,4\n", "must sum to less than 9007199254740992"),
        ("1," + "9" * 5000 + "\n", "column 1 .* '9999"),
        ("1,\u0663\n", "column 1"),
    ],
)
def test_damaged_tables_are_refused_with_file_and_line(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(DataError, match=message) as caught:
        read_counts(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.csv cannot be read: No such file"):
        read_counts(tmp_path / "none.csv")
    (tmp_path / "zipped.csv").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(DataError, match=r"zipped\.csv is no UTF-8 text"):
        read_counts(tmp_path / "zipped.csv")
