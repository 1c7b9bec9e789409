from __future__ import annotations

from pathlib import Path

import pytest

from fedsweep.config import load_config, yaml12
from fedsweep.config.includes import read_whole
from fedsweep.errors import ConfigError

SHARED = """
setting:
  training: {rounds: 7, optimizer: {name: sgd, lr: 0.1, momentum: 0.9}}
  method: {name: fedprox, mu: 0.1}
longer:
  extends: "#setting"
  training: {rounds: 70}
some: [a, b]
more:
  - from: "#some"
  - c
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "_shared.yaml").write_text(SHARED)
    return tmp_path


def whole(folder: Path, text: str) -> object:
    path = folder / "own.yaml"
    path.write_text(text)
    return read_whole(path)


def test_a_mapping_is_laid_over_the_one_that_it_extends(folder: Path) -> None:
    found = whole(folder, "extends: _shared.yaml#longer\ntraining: {batch_size: 4}\nmethod: {name: fedavg}\n")
    assert found == {
        "training": {"rounds": 70, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}, "batch_size": 4},
        "method": {"name": "fedavg"},  # what names something replaces what was there
    }


def test_keys_of_the_users_own_hold_what_places_share(folder: Path) -> None:
    text = "x-rate: &rate 0.3\nx-slow: {training: {optimizer: {name: sgd, lr: *rate}}}\nextends: '#x-slow'\nseed: 2\n"
    assert whole(folder, text) == {"training": {"optimizer": {"name": "sgd", "lr": 0.3}}, "seed": 2}


def test_a_list_takes_in_the_entries_of_another(folder: Path) -> None:
    assert whole(folder, "l: [x, {from: _shared.yaml#more}, {from: a, other: b}]") == {
        "l": ["x", "a", "b", "c", {"from": "a", "other": "b"}]
    }


def test_what_is_referred_to_stays_as_it_is(folder: Path) -> None:
    text = "one: {extends: _shared.yaml#setting, training: {rounds: 1}}\ntwo: {extends: _shared.yaml#setting}\n"
    found = whole(folder, text)
    assert isinstance(found, dict) and found["two"]["training"]["rounds"] == 7


def test_a_configuration_may_extend_another(folder: Path) -> None:
    (folder / "base.yaml").write_text("training: {rounds: 7, cohort_size: 2}\n")
    (folder / "own.yaml").write_text("extends: base.yaml\ntraining: {rounds: 9}\n")
    config = load_config(folder / "own.yaml", ["training.batch_size=3"])
    assert (config.training.rounds, config.training.cohort_size, config.training.batch_size) == (9, 2, 3)


def test_a_space_that_is_extended_may_draw_what_was_a_grid(folder: Path) -> None:
    text = "x-s: {sweep: {space: {seed: {grid: [0]}, method.mu: {grid: [1]}}}}\nextends: '#x-s'\n"
    found = whole(folder, text + "sweep: {space: {method.mu: {uniform: [0, 1]}}}\n")
    assert found == {"sweep": {"space": {"seed": {"grid": [0]}, "method.mu": {"uniform": [0, 1]}}}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("extends: nowhere.yaml", "own.yaml: extends: nowhere.yaml: no file"),
        (f"extends: {'x' * 5000}", "own.yaml: extends: xxx"),
        ("extends: _shared.yaml#seting", "unknown section 'seting'; did you mean 'setting'"),
        ("extends: _shared.yaml#some", "must be a mapping, but is a list"),
        ("l: [{from: _shared.yaml#setting}]", "must be a list, but is a dict"),
        ("extends: 3", "takes FILE#SECTION, e.g. _shared.yaml#setting, but got 3"),
        ("extends: own.yaml", "the references go in a circle"),
        ("a: {extends: '#b'}\nb: {extends: '#a'}", "the references go in a circle"),
    ],
)
def test_a_wrong_reference_is_one_line_that_names_the_file(text: str, said: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        whole(folder, text)
    assert said in str(caught.value) and "own.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_references_that_multiply_or_go_deep_end_before_memory_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yaml12, "MOST_NODES", 2000)  # of 100,000, which take a second each
    doubled = "".join(f"l{n}: [{{from: '#l{n - 1}'}}, {{from: '#l{n - 1}'}}]\n" for n in range(1, 40))
    deep = "".join(f"l{n}: {{k: {{extends: '#l{n - 1}'}}}}\n" for n in range(1, 60))
    for text in (f"l0: [x]\n{doubled}", f"l0: {{k: x}}\n{deep}"):
        with pytest.raises(ConfigError, match=r"own\.yaml: more than 2000 values .* too large"):
            whole(folder, text)
