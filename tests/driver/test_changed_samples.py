"""A run goes on with the samples it was begun with; ``verify``, ``evaluate`` and sweeps say where they are others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsweep.cli import main
from fedsweep.config.load import load_config
from fedsweep.driver.observers import Observer
from fedsweep.driver.run import Launch, plan_run, run_plan
from fedsweep.errors import ConfigError
from fedsweep.finished.evaluation import evaluate
from fedsweep.finished.growth import grow
from fedsweep.records import RoundRecord
from fedsweep.runs.source_log import changes_on_the_way
from fedsweep.sweeps.prepare import prepare
from fedsweep.sweeps.reuse import finished_in, not_taken
from fedsweep.sweeps.sweep_folder import SweepFolder
from fedsweep.world.data import record
from fedsweep.world.data.record import Dataset, Samples

SOURCE = """
import numpy as np
from fedsweep import Dataset

def load(*, root, download):
    images = np.load(root + "/images.npy")
    labels = np.arange(len(images)) % 2
    return Dataset.images(
        name="mine", train_images=images, train_labels=labels, test_images=images[:20], test_labels=labels[:20],
        num_classes=2, scale=255.0, mean=(0.5,), std=(0.5,),
    )
"""
CHANGED = r"changed since: the samples of changing_data:load"


class Interrupt(Observer):
    def round_done(self, record: RoundRecord) -> None:
        raise KeyboardInterrupt


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "changing_data.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    images = np.random.default_rng(0).integers(0, 100, (40, 1, 4, 4), dtype=np.uint8)
    images[1::2] += 100
    np.save(tmp_path / "images.npy", images)
    return {
        "scenario": {
            "dataset": "changing_data:load",
            "root": str(tmp_path),
            "clients": 4,
            "partition": {"kind": "iid"},
        },
        "training": {"rounds": 2, "cohort_size": 2, "local_steps": 1},
        "checkpoint": {"every": 1},
        "tracking": {"uri": "none"},
        "runtime": {"backend": "local"},
    }


def change(folder: Path) -> None:
    images = np.load(folder / "images.npy")
    images[-1, 0, 0, 0] += 1  # of a training sample
    images[0] = 255 - images[0]  # of a test sample
    np.save(folder / "images.npy", images)


def test_a_run_goes_on_with_other_samples_only_where_that_is_allowed(tree: dict[str, Any], tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan_run(load_config(tree)), run, observers=[Interrupt()])
    change(tmp_path)
    with pytest.raises(ConfigError, match=rf"run was made by other code or files \({CHANGED}\)"):
        run_plan(plan_run(load_config(tree)), run, resume=True)
    run_plan(plan_run(load_config(tree)), run, resume=True, launch=Launch(allow_changed_code=True))
    assert changes_on_the_way(run) == [
        "from round 2 on, other code played it (changed since: the samples of changing_data:load)"
    ]


def test_a_finished_run_of_other_samples_is_not_made_longer_repeated_or_taken_over(
    tree: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run_plan(plan_run(load_config(tree)), run)
    assert evaluate(run).notes == () and main(["verify", str(run), "-q"]) == 0
    change(tmp_path)
    with pytest.raises(ConfigError, match=CHANGED):
        grow(run, rounds=3)
    notes = evaluate(run).notes
    assert notes[0] == "the samples of scenario.dataset are others now than the run had"
    assert all("arithmetic" not in note for note in notes)
    capsys.readouterr()
    assert main(["verify", str(run), "-q"]) == 1
    assert "other code, samples or libraries: changed since: the samples of" in capsys.readouterr().out
    swept = load_config({**tree, "sweep": {"space": {"seed": {"grid": [0]}}}})
    taken, refused = finished_in([run], prepare(swept, SweepFolder(tmp_path / "sweep"), resume=False))
    assert not taken and "the samples of changing_data:load" in not_taken(refused)


def pictures(**more: Any) -> Dataset:
    images = np.arange(30 * 16, dtype=np.float32).reshape(30, 1, 4, 4)
    labels = np.arange(30) % 3
    parts: dict[str, Any] = {"train_images": images, "train_labels": labels}
    parts |= {"test_images": images[:6], "test_labels": labels[:6], "writers": labels, "class_names": ["a", "b", "c"]}
    return Dataset.images(name="x", num_classes=3, scale=1.0, mean=(0.0,), std=(1.0,), **{**parts, **more})


def test_a_digest_tells_data_apart_by_all_that_is_trained_on() -> None:
    whole = pictures()
    turned = whole.train.targets[::-1].copy()
    others = [
        pictures(train_labels=turned),
        pictures(writers=turned),
        pictures(writers=None),
        pictures(class_names=["b", "a", "c"]),
        pictures(train_images=whole.train.inputs[:29], train_labels=whole.train.targets[:29], writers=None),
        pictures(train_images=-whole.train.inputs),
        pictures(test_images=-whole.test.inputs),
        replace(whole, train=Samples(inputs=whole.train.inputs, targets=whole.train.targets.astype(np.int32)),
                test=Samples(inputs=whole.test.inputs, targets=whole.test.targets.astype(np.int32))),
        replace(whole, train=replace(whole.train, strata=turned)),
    ]  # fmt: skip
    assert len({data.digest for data in [whole, *others]}) == 1 + len(others)
    assert replace(whole, name="another").digest == pictures().digest == whole.digest


def test_of_large_arrays_evenly_spaced_rows_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_DIGESTED_BYTES", 30 * 16 * 4 // 2)
    images = pictures().train.inputs.copy()
    images[2] += 1
    assert pictures(train_images=images).digest != pictures().digest
    images[2] -= 1
    images[3] += 1
    assert pictures(train_images=images).digest == pictures().digest


def test_runs_of_several_data_sets_are_of_the_same_code(tree: dict[str, Any]) -> None:
    one = plan_run(load_config(tree)).sources
    other = plan_run(load_config({**tree, "scenario": {**tree["scenario"], "dataset": "digits", "root": None}})).sources
    shared = {name for name in one if name in other}
    assert not any("samples" in name for name in shared)
    assert all(one[name] == other[name] for name in shared if name.startswith("fedsweep"))
