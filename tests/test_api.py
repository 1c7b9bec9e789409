"""What programs get: results, models, and clear errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedsweep
from fedsweep.config.load import load_config
from fedsweep.errors import ConfigError, DataError, InputError, OutputError
from fedsweep.records import RoundRecord
from fedsweep.runs.run_folder import RunFolder

CONFIG = {
    "name": "api",
    "training": {"rounds": 2, "cohort_size": 2},
    "scenario": {"clients": 4},
    "runtime": {"backend": "local"},
    "tracking": {"uri": "none"},
}
SWEEP = {**CONFIG, "sweep": {"space": {"seed": {"grid": [0]}}}}


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> fedsweep.Result:
    return fedsweep.run(CONFIG, out=tmp_path_factory.mktemp("api") / "run")


def test_a_result_gives_rounds_model_and_configuration(result: fedsweep.Result) -> None:
    assert result.rounds.column("round").to_pylist() == [1, 2]
    assert result.config.training.rounds == 2
    assert result.summary["status"] == "finished"
    with torch.no_grad():
        assert result.model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_a_model_is_loaded_without_its_data_or_device(result: fedsweep.Result, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.yaml", "result.json", "model.safetensors"):
        (copy / name).write_bytes((result.folder / name).read_bytes())
    text = (copy / "config.yaml").read_text()
    assert "dataset: digits" in text and "gpus_per_client: 0.0" in text
    text = text.replace("dataset: digits", "dataset: cifar10").replace("gpus_per_client: 0.0", "gpus_per_client: 0.5")
    (copy / "config.yaml").write_text(text)
    loaded = dict(fedsweep.load_model(copy).named_parameters())
    for name, value in result.model.named_parameters():
        assert torch.equal(loaded[name], value)
    (copy / "result.json").write_text(
        (copy / "result.json").read_text().replace('"num_classes": 10', '"num_classes": 7')
    )
    with pytest.raises(DataError, match="its tensors are not those of model 'mlp'"):
        fedsweep.load_model(copy)


def test_a_model_of_a_large_vocabulary_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each word is a class of the next one: XLM-R's tokenizer knows 250,002."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "net_of_words.py").write_text(
        "from torch import nn\n\n\n"
        "def net(*, input_shape, num_classes):\n"
        "    return nn.Sequential(nn.Embedding(num_classes, 1), nn.Flatten(), nn.Linear(2, num_classes, bias=False))\n"
    )
    folder = RunFolder.create(tmp_path / "run", overwrite=False)
    folder.write_config(load_config({**CONFIG, "model": {"name": "net_of_words:net"}}).to_yaml())
    folder.write_result({"status": "finished", "input_shape": [2], "input_types": "<i8", "num_classes": 250_002})
    folder.write_model({"module.0.weight": torch.zeros(250_002, 1), "module.2.weight": torch.ones(250_002, 2)})
    assert fedsweep.load_model(folder.path)(torch.tensor([[0, 250_001]])).shape == (1, 250_002)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="no such folder"):
        fedsweep.load_model(tmp_path / "nowhere")


def test_a_time_limit_without_a_clock_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs scenario\.devices"):
        fedsweep.run(CONFIG, overrides=["training.stop.sim_time_s=5"], out=tmp_path / "run")
    assert os.listdir(tmp_path) == []


class Interrupts(fedsweep.Observer):
    """Interrupts a run in its second round."""

    def round_done(self, record: RoundRecord) -> None:
        if record.round == 2:
            raise KeyboardInterrupt


def test_an_interrupted_run_is_gone_on_with_grows_and_is_replaced(result: fedsweep.Result, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fedsweep.run(CONFIG, out=folder, overrides=["training.rounds=3"], observers=[Interrupts()])
    assert fedsweep.load(folder).summary["status"] == "killed"
    whole = fedsweep.run(CONFIG, out=tmp_path / "whole", overrides=["training.rounds=3"])
    resumed = fedsweep.resume(folder)
    assert resumed.summary["status"] == "finished" and resumed.folder == folder
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]
    written = (folder / "result.json").read_bytes()
    assert fedsweep.resume(folder).summary == resumed.summary and (folder / "result.json").read_bytes() == written
    assert [*fedsweep.resume(folder, rounds=4).rounds.column("round").to_pylist()] == [1, 2, 3, 4]
    with pytest.raises(OutputError, match="holds a run already"):
        fedsweep.run(CONFIG, out=folder)
    again = fedsweep.run(CONFIG, out=folder, overwrite=True)
    assert again.summary["model_sha256"] == result.summary["model_sha256"] and len(again.rounds) == 2
    with pytest.raises(OutputError, match="there is no such folder"):
        fedsweep.resume(tmp_path / "nowhere")


def test_a_tilde_is_the_users_folder(result: fedsweep.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert fedsweep.run(CONFIG, out="~/runs/a").folder == tmp_path / "runs" / "a"
    assert os.listdir(tmp_path) == ["runs"]
    text = fedsweep.compare("~/runs")
    assert text == fedsweep.compare(Path("~/runs")) == fedsweep.compare(tmp_path / "runs")
    assert fedsweep.evaluate("~/runs/a").test_accuracy == result.summary["test_accuracy"]


def test_a_comparison_is_a_text_in_a_notebook_too(result: fedsweep.Result, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert fedsweep.compare(result.folder).startswith("run ")


def test_a_run_made_before_is_loaded(result: fedsweep.Result, tmp_path: Path) -> None:
    loaded = fedsweep.load(result.folder)
    assert loaded.summary["model_sha256"] == result.summary["model_sha256"]
    assert loaded.rounds.equals(result.rounds)
    with pytest.raises(OutputError, match="there is no such folder"):
        fedsweep.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run: fedsweep.run(None), "a configuration is a mapping of keys, a YAML file or .*, but got a NoneType"),
        (lambda run: fedsweep.run([1]), "a configuration is a mapping of keys, a YAML file or .*, but got a list"),
        (lambda run: fedsweep.run(CONFIG, out=5), "a folder is named by a path or an address, but got 5"),
        (lambda run: fedsweep.load(None), "a folder is named by a path or an address, but got None"),
        (
            lambda run: fedsweep.run(CONFIG, overrides=[("training.rounds", 1)]),
            r"--set takes KEY=VALUE .*, but got \('training.rounds', 1\)",
        ),
        (lambda run: fedsweep.load(run.parent).only(1), "--only takes KEY=VALUE or KEY=VALUE,VALUE, but got 1"),
        (lambda run: fedsweep.evaluate(run, data=3), "data are a data set's name, .* or images .*; got a int"),
        (
            lambda run: fedsweep.evaluate(run, data=([0], [1])),
            "data set 'given arrays': images must be a non-empty numpy array",
        ),
        (lambda run: fedsweep.resume(run, rounds="4"), "--rounds must be an integer >= 1, but got '4'"),
        (lambda run: fedsweep.load(), "no folder is named; give a run's, or one with runs below it"),
        (lambda run: fedsweep.compare(), "no folder is named"),
        (lambda run: fedsweep.compare(run, style=fedsweep.TableStyle(top=-1)), "--top must be an integer >= 1"),
        (lambda run: fedsweep.evaluate(run, overrides="scenario.clients=5"), r"write \['scenario.clients=5'\]"),
        (
            lambda run: fedsweep.sweep(SWEEP, out=run.parent / "swept", reuse="nowhere"),
            "nowhere: there is no such folder",
        ),
        (lambda run: fedsweep.report(out="page.html"), "a report is of runs: give folders, addresses or experiments'"),
    ],
)
def test_arguments_of_another_kind_are_refused_in_one_line(
    call: Callable[[Path], Any], message: str, result: fedsweep.Result
) -> None:
    with pytest.raises(InputError, match=message) as error:
        call(result.folder)
    assert "\n" not in str(error.value)
