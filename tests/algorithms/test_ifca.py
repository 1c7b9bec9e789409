"""IFCA: clients find those that are like them, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_sync, tiny_update
from torch import Tensor, nn

from fedsweep.algorithms.ifca import OneModelEach, best_fitting, ifca
from fedsweep.client.messages import Question
from fedsweep.components import LocalClient, logits_with
from fedsweep.components.codec import Communication
from fedsweep.components.compression.registry import CODECS
from fedsweep.engine.engine import Engine
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.method import FederatedMethod
from fedsweep.records import Payload
from fedsweep.testing import local_engine, play_round, run_rounds, tiny_experiment
from fedsweep.testing.subject import small_network
from fedsweep.testing.worlds import tiny_data
from fedsweep.trees import layout_of


def swapped(method: FederatedMethod, **options: Any) -> Any:
    """Eight clients; for the odd ones each label is another: what one half learns is wrong for the other."""
    images, labels = tiny_data(num_samples=320)
    number = int(labels.max()) + 1
    owner = np.arange(320) // 40
    labels = np.where(owner % 2, (labels + 1) % number, labels)
    settings: dict[str, Any] = {
        "cohort_size": 8,
        "num_clients": 8,
        "rounds": 12,
        "local_epochs": 2,
        "learning_rate": 0.3,
    }
    return tiny_experiment(
        method, images=images, labels=labels, sizes=(40,) * 8, build=small_network, **(settings | options)
    )


@pytest.mark.slow
def test_two_kinds_of_clients_are_told_apart_and_each_has_a_model_that_fits() -> None:
    experiment = swapped(ifca())
    params, state = experiment.layout.num_params, run_rounds(local_engine(experiment))
    record = state.records[-1]
    assert [record.extra[f"cluster{j}_clients"] for j in (0, 1)] == [4, 4]
    choices = [state.memories[k]["terms"]["ifca"]["cluster"] for k in range(8)]
    assert choices in ([0, 1] * 4, [1, 0] * 4)
    models = [state.vector[:params], *state.components["server_update"]["others"]]
    kinds = np.arange(320) // 40 % 2
    for client in (0, 1):
        own = torch.from_numpy(kinds == client)
        values = experiment.layout.params(models[choices[client]])
        logits = logits_with(experiment.template, values, torch.from_numpy(experiment.world.data.images)[own])
        right = logits.argmax(1) == torch.from_numpy(experiment.world.data.labels)[own]
        assert float(right.double().mean()) > 0.9
    # One model for both is right for one half at most.
    alone = run_rounds(local_engine(swapped(ifca(clusters=1)))).records[-1]
    assert alone.test_accuracy is not None and alone.test_accuracy < 0.6


def test_all_models_go_down_and_one_number_comes_back() -> None:
    engine = local_engine(swapped(ifca(clusters=3), cohort_size=2))
    params, state = engine.layout.num_params, engine.start()
    for _ in range(2):  # the same models again are sent again
        ledger = play_round(engine, state).ledger
        for client in {client for client, _, _ in ledger.values}:
            own = {(way, kind): n for (who, way, kind), n in ledger.values.items() if who == client}
            down = {("down", "params"): params, ("down", "cluster1"): params, ("down", "cluster2"): params}
            assert own == {**down, ("up", "params"): params, ("up", "ifca/cluster"): 1}
        state = run_rounds(engine, state, rounds=1)


def test_a_codec_would_count_moves_from_another_clusters_model() -> None:
    """Topk sent hardly more than how the clusters' models differ, so all became the first one's."""
    up = Communication(up=CODECS["topk"]())
    with pytest.raises(ConfigError, match="ifca start from one of several models, and a codec's moves are counted"):
        check_experiment(replace(swapped(ifca()), communication=up))
    check_experiment(replace(swapped(ifca(clusters=1)), communication=up))


def test_more_clusters_than_clients_are_refused_before_their_models_are_made() -> None:
    with pytest.raises(ConfigError, match=r"method\.clusters must not exceed scenario\.clients, but 1000000000 > 8"):
        local_engine(swapped(ifca(clusters=10**9))).start()


def test_a_cluster_whose_members_weigh_nothing_stays() -> None:
    """Their mean would be 0 / 0, which no check of the server's model sees."""
    model = nn.Linear(1, 2, bias=False)
    update = OneModelEach(clusters=2, shuffled=1.0)
    state = {"others": [torch.tensor([5.0, 6.0])], "members": [0, 0]}
    attendees = [
        tiny_update(k, torch.tensor([1.0, 2.0]), layout=layout_of(model), extras={"ifca/cluster": torch.tensor([k])})
        for k in (0, 1)
    ]
    weights = torch.tensor([1.0, 0.0], dtype=torch.float64)
    _, after = update.apply(state, attendees, weights, tiny_sync(model, torch.zeros(2)))
    assert after["others"][0].tolist() == [5.0, 6.0] and after["members"] == [1, 1]


def test_who_is_idle_is_of_no_cluster() -> None:
    """Clients 1 and 2 still have the model that the round began with; of it the first cluster's mean has nothing."""
    model, update = nn.Linear(1, 2, bias=False), OneModelEach(clusters=2, shuffled=1.0)
    state = {"others": [torch.tensor([5.0, 6.0])], "members": [0, 0]}
    chosen = {"ifca/cluster": torch.tensor([0])}
    rows = [
        tiny_update(k, torch.tensor(row), layout=layout_of(model), extras=extras)
        for k, row, extras in ((0, [1.0, 2.0], chosen), (1, [9.0, 9.0], {}), (2, [9.0, 9.0], {}))
    ]
    weights = torch.full((3,), 1 / 3, dtype=torch.float64)
    vector, after = update.apply(state, rows, weights, tiny_sync(model, torch.zeros(2)))
    assert vector.tolist() == [1.0, 2.0] and after["members"] == [1, 0] and after["others"][0].tolist() == [5.0, 6.0]


def test_a_cluster_without_members_stays_and_first_models_have_the_same_values_elsewhere() -> None:
    engine = local_engine(swapped(ifca(clusters=5), cohort_size=2))
    state = engine.start()
    params, first = engine.layout.num_params, state.components["server_update"]["others"]
    assert all(torch.equal(other.sort().values, state.vector[:params].sort().values) for other in first)
    assert len({tuple(other.tolist()) for other in (state.vector[:params], *first)}) == 5
    after = run_rounds(engine, state, rounds=1)
    members, others = (after.components["server_update"][key] for key in ("members", "others"))
    assert sum(members) == 2
    for number, before, now in zip(members[1:], first, others, strict=True):
        assert torch.equal(before, now) == (number == 0)
    assert torch.equal(after.vector[:params], state.vector[:params]) == (members[0] == 0)
    few = local_engine(swapped(ifca(shuffled=0.1))).start()
    moved = few.components["server_update"]["others"][0] != few.vector[:params]
    assert 0 < int(moved.sum()) <= 0.12 * params


def test_the_least_loss_decides_and_of_equal_ones_the_first() -> None:
    inputs, targets = torch.eye(2), torch.tensor([0, 1])
    client = LocalClient(
        client=0,
        round=1,
        inputs=inputs,
        targets=targets,
        num_classes=2,
        anchor={},
        params={},
        model=torch.nn.Identity(),
        forward_with=lambda params, inputs: inputs @ params["w"],
        stream=None,  # type: ignore[arg-type]
    )
    wrong, right = {"w": torch.tensor([[0.0, 1.0], [1.0, 0.0]])}, {"w": torch.eye(2)}
    assert best_fitting(client, [wrong, right, right]) == 1
    assert best_fitting(client, [right, wrong]) == 0


class Asked(LocalFleet):
    """Keeps what clients are asked."""

    question: Question

    def measure(self, question: Question, vector: Tensor, memories: Mapping[int, Any]) -> Mapping[int, Payload]:
        self.question = question
        return super().measure(question, vector, memories)


@pytest.mark.parametrize("codec", [None, "topk", "fp16"])
def test_clients_test_the_models_that_they_would_decode(codec: str | None) -> None:
    down = {} if codec is None else {"communication": Communication(down=CODECS[codec]())}
    experiment = replace(swapped(ifca(), cohort_size=4), evaluate_per_client=True, **down)
    fleet = Asked(experiment)
    engine = Engine(experiment, fleet)
    after = run_rounds(engine, rounds=2)
    tested = torch.cat([value.flatten() for value in fleet.question.broadcast.values()])
    (given,) = after.components["server_update"]["others"]
    assert torch.equal(tested, given) == (codec is None)
    if codec is not None:
        # What the next round's first message says.
        assert torch.equal(tested, play_round(engine, after).codecs.sent_contents["cluster1"]["sent"])
