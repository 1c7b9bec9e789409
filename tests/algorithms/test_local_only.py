"""Local training: what a client learns is what FedAvg with that client alone learns, and nothing travels."""

from __future__ import annotations

import pytest
import torch

from fedsweep.algorithms.fedas import fedas
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedprox import fedprox
from fedsweep.algorithms.local_only import local_only
from fedsweep.method import FederatedMethod, merge
from fedsweep.streams import Stream
from fedsweep.testing import build_model, local_engine, play_round, run_rounds, tiny_experiment

torch.set_num_threads(1)


def network() -> torch.nn.Module:
    return build_model("mlp", input_shape=(1, 1, 6), num_classes=4, stream=Stream(("m",)), hidden_width=5)


def test_a_client_goes_on_with_its_own_model_bit_for_bit_as_fedavg_of_one_client() -> None:
    """In three rounds; with one client FedAvg's mean is that client's model."""
    world = {"build": network, "num_clients": 1, "cohort_size": 1, "rounds": 3}
    alone = local_engine(tiny_experiment(local_only(), **world))
    mine, fed = run_rounds(alone), run_rounds(local_engine(tiny_experiment(fedavg(), **world)))
    own = mine.memories[0]["terms"]["local_only"]["values"]
    for name, value in alone.layout.views(fed.vector).items():
        assert torch.equal(own[name], value), name
    assert not torch.equal(fed.vector, mine.vector)


@pytest.mark.parametrize("method", [local_only(), fedas(align_epochs=0, weights="samples")], ids=lambda m: m.name)
def test_a_pull_to_the_anchor_is_to_what_the_client_began_with_where_it_is_sent_nothing(
    method: FederatedMethod,
) -> None:
    """With one step a round nobody is away from its start when pulled there; the server's values are others."""
    world = {"build": network, "num_clients": 2, "cohort_size": 2, "local_steps": 1, "rounds": 3}
    plain, pulled = (
        run_rounds(local_engine(tiny_experiment(m, **world))) for m in (method, merge(fedprox(mu=5.0), method))
    )
    assert torch.equal(plain.vector, pulled.vector)
    for client in range(2):
        own, other = (state.memories[client]["terms"][method.name]["values"] for state in (plain, pulled))
        assert all(torch.equal(own[name], other[name]) for name in own)


def test_nothing_travels_and_the_servers_model_stays_the_initial_one() -> None:
    engine = local_engine(tiny_experiment(local_only(), build=network, num_clients=4, cohort_size=2, rounds=3))
    assert play_round(engine).ledger.total_bytes == 0
    done = run_rounds(engine)
    assert torch.equal(done.vector, engine.experiment.initial_vector)
    assert sum(record.bytes_up + record.bytes_down for record in done.records) == 0
    trained = {k for k, memory in done.memories.items() if "values" in memory["terms"]["local_only"]}
    assert trained == {client for record in done.records for client in record.cohort}
    assert all(0 <= accuracy <= 1 for accuracy in done.records[-1].personal_accuracies or ())
    assert len(done.records[-1].personal_accuracies or ()) == 4
