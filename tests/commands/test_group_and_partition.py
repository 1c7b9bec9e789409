from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., tuple[int, str, str]]


def test_compare_lists_runs_and_draws(finished: Path, fedsweep: Command) -> None:
    code, out, err = fedsweep("compare", finished.parent, "--plot", "picture.png")
    assert (code, err) == (0, "")
    header, row, last = out.splitlines()
    assert header.split()[:4] == ["run", "method", "acc", "best"] and row.split()[:2] == ["tiny", "FedAvg"]
    assert last == f"picture: {Path('picture.png').absolute()}"
    assert Path("picture.png").read_bytes().startswith(b"\x89PNG")


def test_partition_counts_every_sample_once(config: Path, fedsweep: Command) -> None:
    code, out, err = fedsweep("partition", config, "--plot", "split.png")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["client", "samples", *(f"c{label}" for label in range(10)), "KL", "JS"]
    rows = [[int(cell) for cell in line.split()[1:12]] for line in lines[1:5]]
    assert all(sum(row[1:]) == row[0] for row in rows)
    assert [int(cell) for cell in lines[5].split()[1:]] == [sum(column) for column in zip(*rows, strict=True)]
    assert lines[6].startswith("digits, iid, seed 0: 4 clients, 359 to 360 samples (mean 359.2), 10 to 10 classes")
    assert Path("split.png").is_file()


def test_a_picture_that_is_none_is_refused_before_the_table(config: Path, fedsweep: Command) -> None:
    code, out, err = fedsweep("partition", config, "--plot", "split.bmp")
    assert (code, out) == (2, "") and "split.bmp: a picture's name must end in" in err


def test_partition_of_many_clients_shows_the_first_and_the_last(config: Path, fedsweep: Command) -> None:
    _, out, _ = fedsweep("partition", config, "--set", "scenario.clients=100")
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:52]] == [
        *map(str, range(25)),
        "...",
        *map(str, range(75, 100)),
    ]
    assert "(50 more)" in lines[26]


def test_partition_of_ones_own_from_the_working_directory(config: Path, fedsweep: Command) -> None:
    code = """
        from dataclasses import dataclass
        import numpy as np
        from fedsweep.world.partitions.registry import Partition

        @dataclass(frozen=True, kw_only=True)
        class Blocks(Partition):
            def split(self, labels, num_clients, stream, *, num_classes, writers=None):
                return np.array_split(np.arange(len(labels)), num_clients)
    """
    Path("blocks_of_my_own.py").write_text(textwrap.dedent(code))
    code_, out, _ = fedsweep("partition", config, "--set", "scenario.partition={kind: 'blocks_of_my_own:Blocks'}")
    assert code_ == 0 and "digits, blocks_of_my_own:Blocks, seed 0: 4 clients" in out


def test_select_prints_one_line_of_json(fedsweep: Command) -> None:
    Path("counts.csv").write_text("8,0\n0,8\n4,4\n7,1\n")
    words = ["select", "--counts", "counts.csv", "--method", "exhaustive", "--size", "2", "--json"]
    code, out, err = fedsweep(*words)
    assert (code, err) == (0, "") and len(out.splitlines()) == 1
    found = json.loads(out)
    # The population is (19, 13); of the pairs, rows 2 and 3 hold (11, 5), rows 0 and 1 (8, 8), rows 1 and 3 (7, 9),
    # rows 0 and 2 (12, 4), rows 1 and 2 (4, 12), rows 0 and 3 (15, 1): the shares nearest 0.594 are 0.5 and 0.6875.
    assert found["clients"] == [0, 1] and set(found) == {"clients", "kl_divergence", "seconds"}
    assert found["kl_divergence"] == pytest.approx(0.5 * math.log(16 / 19) + 0.5 * math.log(16 / 13), rel=1e-9)


def test_select_for_people_obeys_eligible_and_seed(fedsweep: Command) -> None:
    Path("counts.csv").write_text("\n".join(["1,2"] * 8))
    words = ["select", "--counts", "counts.csv", "--method", "random", "--max-size", "2", "--eligible", "1, 3,5"]
    code, out, _ = fedsweep(*words, "--seed", "4")
    assert code == 0
    clients = [int(client) for client in out.splitlines()[0].removeprefix("clients: ").split(",")]
    assert len(clients) == 2 and set(clients) <= {1, 3, 5}
    assert fedsweep(*words, "--seed", "4")[1].splitlines()[:3] == out.splitlines()[:3]


def test_what_is_no_class_is_called_by_its_name(tmp_path: Path, fedsweep: Command) -> None:
    (tmp_path / "d.yaml").write_text("scenario: {dataset: diabetes, clients: 4}\n")
    code, out, err = fedsweep("partition", tmp_path / "d.yaml")
    assert (code, err) == (0, "") and "cN: quantile N of 10, from 0" in out and "strata (mean" in out
