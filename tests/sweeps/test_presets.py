"""The shipped sweeps: each can be run as it stands."""

from __future__ import annotations

from functools import partial

import pytest

from fedsweep.cli import main
from fedsweep.config.load import load_config
from fedsweep.config.presets import list_presets
from fedsweep.engine.forecast import forecast
from fedsweep.sweeps import prepare
from fedsweep.sweeps.space import list_trials

NAMES = [preset.name for preset in list_presets() if preset.name.startswith("sweeps/")]
# What each paper's method is asked in the sweep that bears its name.
QUESTIONS = {
    "sweeps/dynamicfl_intervals": {
        "scenario.budgets.budget_fraction",
        "scenario.partition.dirichlet_alpha",
        "method.high_interval",
    },
    "sweeps/dynafed": {
        "scenario.partition.dirichlet_alpha",
        "method.snapshots",
        "method.horizon_rounds",
        "method.images_per_class",
    },
    "sweeps/feddhad": {
        "scenario.partition.dirichlet_alpha",
        "scenario.devices.profile",
        "scenario.devices.bandwidth_factor",
        "method",
    },
    "sweeps/fedstg": {"scenario.drift.rotation_speed", "scenario.availability.adaptive", "method.reduced_interval"},
}

# Codecs of a LeNet's messages want pictures that it can take; the page of what came out says where CIFAR-10 must lie.
ELSEWHERE = {"sweeps/communication": "cifar10"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_shipped_sweep_passes_all_checks_of_a_real_one(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two planned rounds of each trial show no less than twenty.
    monkeypatch.setattr(prepare, "forecast", partial(forecast, most_planned=2))
    # What is not in the package is stood in for by what is.
    here = [] if name not in ELSEWHERE else ["--set", "scenario.dataset=digits", "--set", "model.name=mlp"]
    assert main(["sweep", name, "--dry-run", *here]) == 0, capsys.readouterr().err
    config = load_config(name)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.split()[0] == str(config.sweep.samples if config.sweep.search else len(list_trials(config)))


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_papers_sweep_varies_what_the_paper_asks_over_three_seeds(name: str) -> None:
    space = load_config(name).sweep.space
    assert set(space) == {*QUESTIONS[name], "seed"}
    assert len(space["seed"].values) >= 3
    assert all(len(entry.values) >= 2 for entry in space.values())


@pytest.mark.parametrize("name", NAMES)
def test_each_shipped_sweep_needs_no_download(name: str) -> None:
    assert load_config(name).scenario.dataset == ELSEWHERE.get(name, "digits")
