"""``model.init_from``: a run begins with another run's model; what can't be that model is refused in one line."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedsweep.api import load_model, run
from fedsweep.catalog import resolve
from fedsweep.config.load import load_config
from fedsweep.driver.run import plan_run
from fedsweep.errors import InputError
from fedsweep.trees import layout_of, model_vector

TINY: dict[str, Any] = {
    "scenario": {"clients": 4},
    "training": {"rounds": 1, "cohort_size": 2, "local_steps": 2},
    "runtime": {"backend": "local"},
    "tracking": {"uri": "none"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run(TINY, out=folder)
    return folder


def begun_with(source: Path, **model: Any) -> torch.Tensor:
    given = {**TINY, "seed": 5, "model": {"name": "mlp", "init_from": str(source), **model}}
    return plan_run(load_config(given)).experiment.initial_vector


def test_a_run_begins_with_another_ones_model_or_a_file(trained: Path, tmp_path: Path) -> None:
    model = load_model(trained)
    final = model_vector(model, layout_of(model))
    drawn = plan_run(load_config({**TINY, "seed": 5})).experiment.initial_vector
    assert not torch.equal(drawn, final)
    assert torch.equal(begun_with(trained), final)
    halves = {name: tensor.double() for name, tensor in load_file(trained / "model.safetensors").items()}
    save_file(halves, tmp_path / "wide.safetensors")
    assert torch.equal(begun_with(tmp_path / "wide.safetensors"), final)


def test_the_file_is_pinned_where_it_lies_is_not_part_of_the_hash(trained: Path, tmp_path: Path) -> None:
    result = run({**TINY, "model": {"name": "mlp", "init_from": str(trained)}}, out=tmp_path / "next")
    kept = result.config.model
    assert kept.init_from == str(trained / "model.safetensors") and len(kept.init_sha256 or "") == 64
    assert load_config(tmp_path / "next" / "config.yaml") == result.config
    other = tmp_path / "copy.safetensors"
    other.write_bytes((trained / "model.safetensors").read_bytes())
    moved = resolve(load_config({**TINY, "model": {"name": "mlp", "init_from": str(other)}}))
    assert moved.hash() == result.config.hash() != resolve(load_config(TINY)).hash()
    other.write_bytes(other.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(
        InputError, match=r"has the SHA-256 .* but the configuration was made with .* remove model\.init_sha256$"
    ):
        plan_run(moved)
    # A run's model does not need the file that it began with.
    (tmp_path / "next" / "config.yaml").write_text(result.config.to_yaml().replace(str(trained), "/nowhere"))
    load_model(tmp_path / "next")


def test_a_file_may_say_nothing_of_itself(trained: Path, tmp_path: Path) -> None:
    data = (trained / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.dumps({**json.loads(data[8:start]), "__metadata__": None}).encode()
    (tmp_path / "plain.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data[start:])
    assert torch.equal(begun_with(tmp_path / "plain.safetensors"), begun_with(trained))


def test_without_a_file_nothing_of_it_is_in_the_configuration() -> None:
    assert not {"init_from", "init_sha256"} & resolve(load_config({})).tree()["model"].keys()


def damaged(kind: str, folder: Path, trained: Path) -> Path:
    path = folder / ("values.pt" if kind == "pickled" else "values.safetensors")
    tensors = load_file(trained / "model.safetensors")
    first = sorted(tensors)[0]
    if kind == "pickled":
        path.write_bytes(pickle.dumps({"a": 1}))
    elif kind == "no safetensors":
        path.write_bytes(pickle.dumps({"a": 1}))
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "huge":
        with open(path, "wb") as file:
            file.truncate(2**26)
    elif kind == "a folder without model":
        return folder
    elif kind == "another type":
        header = b'{"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}'
        path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    elif kind != "absent":
        changes = {
            "missing": lambda: tensors.pop(first),
            "shape": lambda: tensors.update({first: torch.zeros(3, 3, 3)}),
            "integers": lambda: tensors.update({first: tensors[first].to(torch.int64)}),
            "extra": lambda: tensors.update({"zzz": torch.zeros(1)}),
            "not finite": lambda: tensors.update({first: torch.full_like(tensors[first], float("nan"))}),
        }
        changes[kind]()
        save_file(tensors, path)
    return path


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("pickled", "is no file .safetensors; other formats can hold code"),
        ("no safetensors", "is no safetensors file"),
        ("another type", "holds values of the type 'F4', which can't be read"),
        ("a pipe", "cannot be read"),
        ("huge", "cannot be read as values of model mlp"),
        ("a folder without model", "only a finished run leaves one"),
        ("absent", "is neither a folder nor a file"),
        ("missing", "is missing"),
        ("shape", r"is \[3, 3, 3\], but must be"),
        ("integers", "but must hold floats"),
        ("extra", "'zzz' is not the model's"),
        ("not finite", "values that are not finite"),
    ],
)
def test_what_is_not_the_model_is_refused(kind: str, said: str, trained: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said) as caught:
        begun_with(damaged(kind, tmp_path, trained))
    assert "\n" not in str(caught.value) and str(caught.value).startswith("model.init_from: ")
