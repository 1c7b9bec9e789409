"""A finished run's model tested again: the run's own figures to the bit, other data, and what is refused."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

import fedsweep
from fedsweep.cli import main
from fedsweep.errors import InputError
from fedsweep.finished.evaluation import _own_classes, evaluate, open_subject
from fedsweep.runs.run_folder import RunFolder
from fedsweep.world.data.datasets import load_dataset

PROXY = {"server_data": {"proxy": {"per_class": 4, "labelled": True}}}
AVERAGED = {"optimizer_state": "average", "optimizer": {"name": "adam", "lr": 0.01}}
# Method, scenario, training.
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "fedavg": (
        {"name": "fedavg"},
        {"drift": {"kind": "cosine_rotation"}},
        AVERAGED,
    ),
    "scaffold": ({"name": "scaffold"}, {}, {}),
    "fedad": ({"name": "fedad", "base_rate": 0.3, "refresh": [2]}, {}, {}),
    "mean of models": ({"name": "feddyn", "tested": "all"}, {}, {}),
    "fedas": ({"name": "fedas"}, {}, {}),
    "augfl": ({"name": "augfl", "teacher_steps": 5, "server_batch": 16}, PROXY, {}),
    "fedktl": ({"name": "fedktl", "latent_width": 3, "decoder_steps": 5, "server_epochs": 3}, PROXY, {}),
    "fedensemble": ({"name": "fedensemble"}, {}, {}),
    "fedensemble of all": ({"name": "fedensemble", "members": "all"}, {}, AVERAGED),
}
PARTS = {"merge": [{"name": "fedensemble"}, {"name": "federated_dropout", "keep": 0.5}]}
OWN = ("fedas", "augfl", "fedktl")


def made(folder: Path, kind: str) -> Path:
    method, scenario, training = RUNS[kind] if kind in RUNS else (PARTS, {}, {})
    config = {
        "name": kind,
        "method": method,
        "scenario": {"clients": 8, "partition": {"kind": "dirichlet", "dirichlet_alpha": 0.2}, **scenario},
        "training": {"rounds": 3, "cohort_size": 4, "local_steps": 4, **training},
        "evaluation": {"per_client": True, "batch_size": 100},
        "runtime": {"backend": "local"},
        "tracking": {"uri": "none"},
    }
    return fedsweep.run(config, out=folder / kind).folder


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("runs"), "fedavg")


@pytest.mark.parametrize("kind", RUNS)
def test_its_own_test_set_gives_the_runs_figures_to_the_bit(kind: str, tmp_path: Path) -> None:
    folder = made(tmp_path, kind)
    found, row = evaluate(folder), RunFolder(folder).read_rounds()[-1]
    assert (found.test_accuracy, found.test_loss) == (row.test_accuracy, row.test_loss)
    assert str(found.class_accuracies) == str(row.class_accuracies)
    assert found.figures.items() <= row.extra.items()
    last = [cells for cells in pq.read_table(folder / "client_accuracy.parquet").to_pylist() if cells["round"] == 3]
    given = found.clients()
    assert [{name: cells[name] for name in given[0]} for cells in last] == given
    assert any("models of their own" in note for note in found.notes) == (kind in OWN)
    assert (found.personal_accuracies is not None) == (kind in OWN)
    assert len(found.notes) == (kind in OWN)


def test_an_ensemble_of_sub_models_is_not_kept_and_that_is_said(tmp_path: Path) -> None:
    folder = made(tmp_path, "fedensemble of sub-models")
    found, row = evaluate(folder), RunFolder(folder).read_rounds()[-1]
    assert found.test_loss != row.test_loss and "tested is the server's model" in found.notes[0]


@pytest.mark.parametrize("kind", ["mean of models", "fedas"])
def test_without_checkpoints_the_servers_model_is_tested_and_that_is_said(kind: str, tmp_path: Path) -> None:
    folder = made(tmp_path, kind)
    whole = evaluate(folder)
    shutil.rmtree(folder / "checkpoints")
    found = evaluate(folder)
    assert found.personal_accuracies is None
    assert "checkpoints/ has no state of round 3" in found.notes[0]
    assert (found.test_loss == whole.test_loss) == (kind == "fedas")


def test_the_confusion_matrix_has_true_rows_and_predicted_columns(fedavg: Path) -> None:
    subject, found = open_subject(fedavg, model=None, overrides=()), evaluate(fedavg)
    _, images, labels, _ = subject.samples(None)
    model = fedsweep.load_model(fedavg)
    predicted = model(subject.experiment.world.data.transform(_tensor(images), generator=None, train=False)).argmax(1)
    counted = np.zeros((10, 10), int)
    for true, said in zip(labels.tolist(), predicted.tolist(), strict=True):
        counted[true, said] += 1
    assert (found.confusion == counted).all()
    assert np.trace(counted) / len(labels) == found.test_accuracy


def _tensor(images: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(images)


def test_other_data_are_scaled_as_the_runs_own(fedavg: Path) -> None:
    digits = load_dataset("digits", root=None, download=False)
    kept = digits.test_labels != 3
    images, labels = digits.test_images[kept], digits.test_labels[kept]
    arrays = evaluate(fedavg, data=(images, labels))
    whole = evaluate(fedavg)
    assert arrays.num_samples == int(kept.sum())
    assert math.isnan(arrays.class_accuracies[3])
    known = [label for label in range(10) if label != 3]
    assert [arrays.class_accuracies[k] for k in known] == [whole.class_accuracies[k] for k in known]
    brighter = fedsweep.Dataset.images(
        name="brighter",
        train_images=images * 15,
        train_labels=labels,
        test_images=images * 15,
        test_labels=labels,
        num_classes=10,
        scale=240.0,
        mean=(0.0,),
        std=(1.0,),
    )
    found = evaluate(fedavg, data=brighter)
    assert found.data == "brighter"
    assert (found.confusion == arrays.confusion).all()


def test_classes_of_other_data_are_the_models_by_their_names(fedavg: Path) -> None:
    """A folder with some of the classes numbers them from 0, whatever the model calls so."""
    digits = load_dataset("digits", root=None, download=False)
    kept = np.isin(digits.test_labels, (3, 7))
    images, labels = digits.test_images[kept], (digits.test_labels[kept] == 3).astype(np.int64)

    def named(*names: str) -> fedsweep.Dataset:
        parts: Any = {"train_images": images, "train_labels": labels, "test_images": images, "test_labels": labels}
        numbers: Any = {"scale": 16.0, "mean": (0.0,), "std": (1.0,)}
        return fedsweep.Dataset.images(name="two", **parts, num_classes=2, class_names=names, **numbers)

    whole, two = evaluate(fedavg), evaluate(fedavg, data=named("7", "3"))
    assert [two.class_accuracies[label] for label in (3, 7)] == [whole.class_accuracies[label] for label in (3, 7)]
    assert math.isnan(two.class_accuracies[0]) and two.class_names == whole.class_names
    with pytest.raises(fedsweep.DataError, match="data 'two': the model knows no three, but 0, 1, 2"):
        evaluate(fedavg, data=named("7", "three"))
    assert evaluate(fedavg, data=named("seven", "three")).class_accuracies[7] != two.class_accuracies[7]


def test_classes_without_names_go_by_their_numbers() -> None:
    """Of numbers some may be left out, so that a class's place is not its number."""
    zeros: Any = {part: np.zeros((3, 1, 2, 2), np.uint8) for part in ("train_images", "test_images")}
    labels: Any = {part: np.array([0, 1, 0]) for part in ("train_labels", "test_labels")}
    pixels: Any = {"scale": 1.0, "mean": (0.0,), "std": (1.0,)}
    own = fedsweep.Dataset.images(name="own", **zeros, **labels, **pixels, num_classes=9)
    for names, places in (((), [0, 1, 0]), (("4", "7"), [4, 7, 4]), (("a", "b"), [0, 1, 0])):
        other = fedsweep.Dataset.images(name="other", **zeros, **labels, **pixels, num_classes=2, class_names=names)
        assert _own_classes(own, other)[0].tolist() == places


def test_a_folder_of_test_samples_alone_is_tested_whole(
    fedavg: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets comes with the extra hf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    columns = {"image": [Image.new("L", (8, 8), 9 * k) for k in range(10)], "label": [k % 4 for k in range(10)]}
    rows = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())
    datasets.DatasetDict(test=rows).save_to_disk(str(tmp_path / "mine"))
    assert evaluate(fedavg, data=f"hf:{tmp_path / 'mine'}").num_samples == 10


def test_clients_of_another_world_have_accuracies_of_their_own(fedavg: Path) -> None:
    found = evaluate(fedavg, overrides=["scenario={clients: 5, partition: {kind: iid}}"])
    assert len(found.clients()) == 5
    assert found.figures["client_accuracy"] == pytest.approx(found.client_accuracies.mean())
    assert found.test_accuracy == evaluate(fedavg).test_accuracy


WRONG: dict[str, tuple[list[str], str]] = {
    "nowhere": (["nowhere"], "there is no such folder"),
    "data": (["run", "--data", "digit"], "did you mean 'digits'"),
    "classes": (["run", "--data", "femnist", "--set", "scenario.download=false"], "femnist"),
    "key": (["run", "--set", "training.rounds=3"], "says how the model came about"),
    "misspelt": (["run", "--set", "scenario.client=3"], "did you mean 'scenario.clients'"),
    "model": (["run", "--model", "weights.pt"], "weights.pt"),
    "config": (["tiny.yaml"], "give a file by --model"),
    "picture": (["run", "--plot", "x.bmp"], "must end in one of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_line(
    case: str, fedavg: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(fedavg)
    words, said = WRONG[case]
    assert main(["evaluate", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line and "this is a bug" not in line


def test_data_that_do_not_fit_are_refused(fedavg: Path) -> None:
    noise = np.zeros((4, 1, 8, 8), np.uint8)
    with pytest.raises(InputError, match=r"must lie in 0\.\.9"):
        evaluate(fedavg, data=(noise, np.array([0, 1, 2, 10])))
    with pytest.raises(InputError, match=r"the model takes \[1, 8, 8\]"):
        evaluate(fedavg, data=(np.zeros((4, 3, 8, 8), np.uint8), np.arange(4)))
    with pytest.raises(InputError, match="uint8 or float32"):
        evaluate(fedavg, data=(noise.astype(np.float64), np.arange(4)))


def test_data_without_pictures_are_refused_by_a_model_of_pictures(fedavg: Path) -> None:
    with pytest.raises(InputError, match=r"^data 'diabetes' has no pictures, but the model takes \[1, 8, 8\]$"):
        evaluate(fedavg, data="diabetes")


WIDE = """
import numpy as np
from fedsweep import Dataset


def wide(*, root, download, width=6):
    labels = np.arange(40) % 2
    pictures = np.ones((40, 1, 4, width), np.uint8) * (100 * labels).astype(np.uint8)[:, None, None, None]
    parts = {"train_images": pictures, "train_labels": labels, "test_images": pictures, "test_labels": labels}
    return Dataset.images(name="wide", **parts, num_classes=2, scale=255.0, mean=(0.4,), std=(0.4,))


def wider(*, root, download):
    return wide(root=root, download=download, width=7)
"""


def test_data_of_pictures_that_are_not_square_are_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_wide.py").write_text(WIDE)
    monkeypatch.syspath_prepend(tmp_path)
    scenario = {"dataset": "own_wide:wide", "clients": 4, "partition": {"kind": "iid"}}
    training = {"rounds": 1, "cohort_size": 2}
    config = {"scenario": scenario, "model": {"name": "mlp"}, "training": training, "tracking": {"uri": "none"}}
    run = fedsweep.run({**config, "runtime": {"backend": "local"}}, out=tmp_path / "run")
    assert evaluate(run.folder, data="own_wide:wide").test_accuracy == evaluate(run.folder).test_accuracy
    with pytest.raises(
        InputError, match=r"are \[1, 4, 7\], but the model takes \[1, 4, 6\]; choose data of that shape"
    ):
        evaluate(run.folder, data="own_wide:wider")


def test_only_a_finished_run_has_a_model_but_a_file_may_take_its_place(fedavg: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(fedavg, copy)
    result = json.loads((copy / "result.json").read_text())
    (copy / "result.json").write_text(json.dumps({**result, "status": "killed"}))
    with pytest.raises(InputError, match="this one is killed"):
        evaluate(copy)
    found = evaluate(copy, model=fedavg / "model.safetensors")
    assert found.test_accuracy == result["test_accuracy"]
    (tmp_path / "tiny.yaml").write_text("scenario: {clients: 5, partition: {kind: iid}}")
    assert len(evaluate(tmp_path / "tiny.yaml", model=fedavg).clients()) == 5
    (copy / "result.json").write_text(json.dumps({**result, "model_sha256": "0" * 64}))
    with pytest.raises(InputError, match=r"its SHA-256 is"):
        evaluate(copy)


def test_the_command_prints_tables_json_and_a_picture(
    fedavg: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(fedavg), "--plot", str(tmp_path / "confusion.pdf")]) == 0
    said = capsys.readouterr().out
    assert "rows true, columns predicted" in said and "clients, on their classes" in said
    assert (tmp_path / "confusion.pdf").read_bytes().startswith(b"%PDF")
    assert b"/Type3" not in (tmp_path / "confusion.pdf").read_bytes()
    assert main(["evaluate", str(fedavg), "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["test_accuracy"] == RunFolder(fedavg).read_result()["test_accuracy"]
    assert len(tree["clients"]) == 8 and np.shape(tree["confusion"]) == (10, 10)


@pytest.mark.parametrize(("name", "model"), [("diabetes", {"name": "mlp"}), ("shapes", {"name": "fcn", "width": 4})])
def test_other_tasks_give_the_figures_of_their_last_test_to_the_bit(
    name: str, model: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "name": name,
        "scenario": {"dataset": name, "clients": 6},
        "model": model,
        "training": {"rounds": 2, "cohort_size": 3, "local_steps": 3},
        "runtime": {"backend": "local"},
        "tracking": {"uri": "none"},
    }
    run = fedsweep.run(config, out=tmp_path / name)
    found = evaluate(run.folder)
    assert found.metrics == run.summary["test_figures"] and found.test_loss == run.to_pandas()["test_loss"].iloc[-1]
    assert found.notes == () and found.num_samples == len(load_dataset(name, root=None, download=False).test)
    assert main(["evaluate", str(run.folder)]) == 0
    printed = capsys.readouterr().out
    assert all(f"{figure} {value:.4f}" in printed for figure, value in found.metrics.items())
    with pytest.raises(InputError, match="but the model was trained with"):
        evaluate(run.folder, data="multi_digits")
    with pytest.raises(InputError, match="samples are not classified here"):
        run.plot_confusion()
    assert main(["evaluate", str(run.folder), "--plot", str(tmp_path / "x.png")]) == 2


@pytest.mark.parametrize("name", ["multi_digits", "shapes"])
def test_data_whose_samples_have_no_single_class_are_refused_by_a_model_of_classes(fedavg: Path, name: str) -> None:
    with pytest.raises(InputError, match=rf"data '{name}': its targets are \w+ \[.*\] for each sample, but the model"):
        evaluate(fedavg, data=name)
