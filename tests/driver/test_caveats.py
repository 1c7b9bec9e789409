"""What a reader must know of a run whose figures mean little, and who is blamed for a model that computes NaN."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsweep.cli import main
from fedsweep.components import Evaluation
from fedsweep.config.load import load_config
from fedsweep.driver.caveats import caveats
from fedsweep.driver.run import plan_run, run_plan
from fedsweep.errors import ClientJobError, InvariantError
from fedsweep.runs.run_folder import RunFolder

TINY: dict[str, Any] = {
    "scenario": {"clients": 4, "partition": {"kind": "iid"}},
    "training": {"rounds": 1, "cohort_size": 2, "local_steps": 1},
    "tracking": {"uri": "none"},
}


class Blind(Evaluation):
    """Answers with nothing that is a number."""

    def predict(self, state: Any, model: Any, updates: Any, inputs: torch.Tensor) -> torch.Tensor:
        return torch.full((len(inputs), 10), math.nan)


HUGE = {**TINY, "method": {"name": "fedadam", "server_learning_rate": 1e30}}


@pytest.mark.parametrize(
    "given", [HUGE, {**TINY, "training": {**TINY["training"], "optimizer": {"name": "sgd", "lr": 1e38}}}]
)
def test_a_model_that_computes_nan_is_not_scored(
    given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {**given, "evaluation": {"per_client": True}}
    result = run_plan(plan_run(load_config(given)), tmp_path / "run")
    stored = RunFolder(tmp_path / "run")
    assert stored.read_result()["test_accuracy"] is None and stored.read_result()["best_test_accuracy"] is None
    (record,) = stored.read_rounds()
    assert record.test_accuracy is not None and math.isnan(record.test_accuracy)
    assert record.class_accuracies is not None and all(map(math.isnan, record.class_accuracies))
    assert "the model of round 1 computes NaN, so it has no accuracy there; " in result["remarks"][0]
    assert main(["compare", str(tmp_path / "run")]) == 0
    assert "10.28" not in capsys.readouterr().out


def test_the_servers_update_is_blamed_and_not_the_next_rounds_first_client(tmp_path: Path) -> None:
    two = {**HUGE, "training": {**TINY["training"], "rounds": 2}}
    with pytest.raises(InvariantError, match=r"that AdaptiveServer\.apply .* made in round 1 computes NaN") as raised:
        run_plan(plan_run(load_config(two)), tmp_path / "run")
    assert isinstance(raised.value.__cause__, ClientJobError)
    assert RunFolder(tmp_path / "run").read_result()["status"] == "failed"


def test_a_clients_own_nan_is_its_own(tmp_path: Path) -> None:
    own = {**TINY["training"], "local_steps": 3, "optimizer": {"name": "sgd", "lr": 1e38}}
    with pytest.raises(ClientJobError, match="client 0 failed in round 1, local step 2") as raised:
        run_plan(plan_run(load_config({**TINY, "training": own})), tmp_path / "run")
    # Ray copies errors along their causes, without end where one is its own: a trial then failed by recursion.
    assert raised.value.__cause__ is not raised.value


def test_a_run_in_which_everybody_dropped_out_says_so(tmp_path: Path) -> None:
    devices = {"profile": "edge-accel", "drop_probability": 1.0}
    given = {**TINY, "scenario": {**TINY["scenario"], "devices": devices}}
    remarks = run_plan(plan_run(load_config(given)), tmp_path / "run")["remarks"]
    assert any(text.startswith("nobody's training counted in any of the 1 rounds") for text in remarks)


def test_a_run_whose_first_round_would_pass_its_limit_says_so(tmp_path: Path) -> None:
    training = {**TINY["training"], "stop": {"total_bytes": 1000}}
    result = run_plan(plan_run(load_config({**TINY, "training": training})), tmp_path / "run")
    assert (result["rounds"], result["status"]) == (0, "finished")
    assert "no round was played: the first would pass the limit" in result["remarks"][0]


def test_a_run_in_which_nobody_was_there_says_so(tmp_path: Path) -> None:
    nobody = {"kind": "capability", "base": 0, "floor": 0, "ceiling": 0}
    given = {**TINY, "scenario": {**TINY["scenario"], "availability": nobody}}
    remarks = run_plan(plan_run(load_config(given)), tmp_path / "run")["remarks"]
    assert any(text.startswith("nobody trained in any of the 1 rounds") for text in remarks)


def test_a_seed_that_ended_at_chance_says_so_and_one_that_learned_does_not(tmp_path: Path) -> None:
    learned = {**TINY, "training": {**TINY["training"], "rounds": 3, "local_steps": 20}}
    plan = plan_run(load_config(learned))
    assert run_plan(plan, tmp_path / "learned")["remarks"] == []
    (*before, last) = RunFolder(tmp_path / "learned").read_rounds()
    model = torch.tensor([0.5, -0.75])
    (sentence,) = caveats(plan.experiment, [*before, replace(last, test_accuracy=37 / 360)], model)
    assert (
        sentence.startswith("the run ended at chance: an accuracy of 0.1028") and "largest class has 0.1028" in sentence
    )
    assert not caveats(plan.experiment, [*before, replace(last, test_accuracy=38 / 360)], model)
    broken = [*before, replace(last, test_loss=math.nan, test_accuracy=math.nan)]
    (sentence,) = caveats(plan.experiment, broken, model)
    assert sentence.endswith("learning rate, or, as its values are 0.75 at most, look into the network")
    method = replace(plan.experiment.method, evaluation=Blind())
    (sentence,) = caveats(replace(plan.experiment, method=method), broken, model)
    assert sentence.endswith(", which answers tests") and "the network and Blind.predict (test_caveats.py" in sentence
    (sentence,) = caveats(plan.experiment, broken, model * math.nan)
    assert sentence.endswith("learning rate")
