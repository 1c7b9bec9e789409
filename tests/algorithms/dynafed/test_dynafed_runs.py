from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_sync
from tiny_synthesis import TinyNetwork, distillation, small

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.algorithms.fedstg import fedstg
from fedsweep.client.optimizer import OptimizerSettings
from fedsweep.components.aggregation import Uniform
from fedsweep.engine.engine import Engine
from fedsweep.engine.state import RunState
from fedsweep.experiment.experiment import Experiment, server_context
from fedsweep.method import FederatedMethod, merge
from fedsweep.records import State
from fedsweep.runs.checkpoints.checkpoint import CheckpointStore
from fedsweep.runs.checkpoints.state_codec import to_bytes
from fedsweep.streams import Stream
from fedsweep.testing import local_engine, run_rounds, tiny_experiment


def experiment(method: FederatedMethod, *, rounds: int = 6, **more: Any) -> Experiment:
    return tiny_experiment(method, rounds=rounds, **{"build": TinyNetwork, **more})


def after(method: FederatedMethod, *, rounds: int = 6, **more: Any) -> RunState:
    return run_rounds(local_engine(experiment(method, rounds=rounds, **more)))


# -- its place in a run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "plain"),
    [("size", fedavg()), ("uniform", FederatedMethod(name="fedavg", source="", weighting=Uniform()))],
)
def test_run_is_fedavg_bit_for_bit_up_to_the_synthesis(weights: str, plain: FederatedMethod) -> None:
    sizes = [8, 24, 16, 16, 8, 24]
    for rounds in (1, 2, 3):
        ours = after(small(weights=weights), rounds=rounds, sizes=sizes)
        assert torch.equal(ours.vector, after(plain, rounds=rounds, sizes=sizes).vector)
    fourth = after(small(weights=weights), rounds=4, sizes=sizes)
    assert not torch.equal(fourth.vector, after(plain, rounds=4, sizes=sizes).vector)


def test_weights_differ_where_sizes_do() -> None:
    sizes = [8, 24, 16, 16, 8, 24]
    uniform, by_size = (after(small(weights=weights), rounds=1, sizes=sizes) for weights in ("uniform", "size"))
    assert not torch.equal(uniform.vector, by_size.vector)


@pytest.mark.parametrize("nothing", [{"finetune_epochs": 0}, {"finetune_learning_rate": 0.0}])
def test_without_fine_tuning_the_run_stays_fedavg_for_ever(nothing: dict[str, Any]) -> None:
    ours, plain = after(small(weights="size", **nothing), rounds=7), after(fedavg(), rounds=7)
    assert torch.equal(ours.vector, plain.vector)
    assert ours.components["refinement0"]["synthetic"] is not None
    assert ours.total_bytes == plain.total_bytes


def test_trajectory_holds_the_first_models_and_is_dropped_after_the_synthesis() -> None:
    engine = local_engine(experiment(small()))
    state = engine.start()
    expected = [state.vector.clone()]
    for round in range(1, 6):
        state = run_rounds(engine, state, rounds=1)
        expected.append(state.vector.clone())
        kept = state.components["refinement0"]
        if round < 3:
            assert kept["synthetic"] is None
            assert len(kept["snapshots"]) == round + 1
            assert all(torch.equal(a, b) for a, b in zip(kept["snapshots"], expected, strict=True))
        else:
            assert kept["snapshots"] == []
            assert kept["learned_in"] == 3
    assert ("synthesis_objective" in state.records[1].extra, "synthesis_objective" in state.records[2].extra) == (
        False,
        True,
    )
    assert "finetune_loss" not in state.records[2].extra
    assert state.records[3].extra["finetune_loss"] > 0


@pytest.mark.parametrize(
    ("method", "rounds", "words"),
    [
        (small(), 2, ["there was no synthesis, since the run came to 3 of 4 models"]),
        (small(), 3, ["the synthesis came in round 3, and no later round was fine-tuned"]),
        (small(), 4, []),
        (small(finetune_epochs=0), 4, []),
        (
            merge(small(weights="size"), fedstg(first_rounds=1, reduced_interval=3, patience=99, decide_on="test")),
            7,
            ["the synthesis came in round 6, and no later round was fine-tuned"],
        ),
    ],
)
def test_what_did_not_happen_is_said_at_the_end(method: FederatedMethod, rounds: int, words: list[str]) -> None:
    played = experiment(method, rounds=rounds)
    state = run_rounds(local_engine(played))
    refinement, context = distillation(method), server_context(played, "refinement0")
    assert list(refinement.notes(context, state.components["refinement0"])) == words


def test_the_round_of_the_synthesis_is_not_fine_tuned_and_the_next_one_is() -> None:
    """Round 4's aggregate is FedAvg's of a round from the same model; what is sent on is that, fine-tuned."""
    by_size = small(weights="size")
    third = after(by_size, rounds=3)
    engine = local_engine(experiment(by_size))
    fourth = run_rounds(engine, third, rounds=1)
    plain = run_rounds(local_engine(experiment(fedavg())), replace(third, components=plain_states()), rounds=1)
    sync = tiny_sync(
        TinyNetwork(), third.vector, round=4, layout=engine.layout, stream=Stream((0, "refinement0", 4, -1, 0))
    )
    refined, _ = distillation(by_size).refine(third.components["refinement0"], plain.vector, [], sync)
    assert torch.equal(fourth.vector, refined)
    assert not torch.equal(fourth.vector, plain.vector)


def plain_states() -> Mapping[str, State]:
    return local_engine(experiment(fedavg())).start().components


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    first, again, other = after(small()), after(small()), after(small(), seed=1)
    assert torch.equal(first.vector, again.vector)
    assert to_bytes(first.components["refinement0"], root="a") == to_bytes(again.components["refinement0"], root="a")
    assert not torch.equal(first.vector, other.vector)


# -- going on in the middle --------------------------------------------------------------------------------------------


class Killed(KeyboardInterrupt):
    """The process ends, and no component of a user's fails."""


@pytest.mark.parametrize("kills", [1, 7])
@pytest.mark.parametrize("optimizer", [None, OptimizerSettings(name="adam", keep="persist")])
def test_synthesis_goes_on_from_a_checkpoint_to_the_same_bits(
    tmp_path: Path, kills: int, optimizer: OptimizerSettings | None
) -> None:
    run = experiment(small(), optimizer=optimizer, learning_rate=0.05)
    whole = run_rounds(local_engine(run))
    store = CheckpointStore(tmp_path, keep=2, config_hash="")
    saves = 0

    def save(state: RunState) -> None:
        nonlocal saves
        store.save(state, fetch=fleet.fetch)
        saves += 1
        if saves == kills:
            raise Killed

    fleet = local_engine(run).fleet
    with pytest.raises(Killed):
        run_rounds(Engine(run, fleet, on_partial=save))
    told: list[str] = []
    fleet = local_engine(run).fleet
    engine = Engine(run, fleet, on_repair=told.append)
    engine.start()
    loaded = CheckpointStore(tmp_path, keep=2, config_hash="").newest(keep_handle=fleet.keep)
    assert loaded.state is not None
    assert loaded.state.round == 2
    (partial,) = loaded.state.partial.values()
    assert partial["done"] == kills
    resumed = run_rounds(engine, loaded.state)
    assert f"synthesis: going on after iteration {kills} of 12" in told
    assert torch.equal(resumed.vector, whole.vector)
    kept = [to_bytes(state.components["refinement0"], root="a") for state in (resumed, whole)]
    assert kept[0] == kept[1]


# -- with other methods ------------------------------------------------------------------------------------------------


def test_merged_with_fedprox_it_is_fedprox_up_to_the_synthesis() -> None:
    merged = merge(small(weights="size"), fedprox(mu=0.3))
    assert torch.equal(after(merged, rounds=3).vector, after(fedprox(mu=0.3), rounds=3).vector)
    assert not torch.equal(after(merged, rounds=3).vector, after(fedavg(), rounds=3).vector)
    assert not torch.equal(after(merged, rounds=4).vector, after(fedprox(mu=0.3), rounds=4).vector)
    assert merge(small(), fedprox(mu=0.3)).weighting == Uniform()


def test_merged_with_two_intervals_it_fine_tunes_once_a_round() -> None:
    two_speed = dynamicfl(high_interval=1, low_interval=3, group="random")
    merged = merge(small(weights="size"), two_speed)
    assert torch.equal(after(merged, rounds=3).vector, after(two_speed, rounds=3).vector)
    fourth = after(merged, rounds=4)
    assert not torch.equal(fourth.vector, after(two_speed, rounds=4).vector)
    assert [record.sync_points for record in fourth.records] == [
        record.sync_points for record in after(two_speed, rounds=4).records
    ]
    assert fourth.records[0].sync_points > 1
    assert len(fourth.components["refinement0"]["synthetic"]["images"]) == 8
