"""What composes: both parts are at work, in either order, and at one part's limit it is the other alone. What does not
is refused with both names and the reason."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from fedsweep.algorithms.registry import METHODS
from fedsweep.catalog import build_method
from fedsweep.commands.listing.method_description import refused_merges
from fedsweep.engine.state import RunState
from fedsweep.errors import ConfigError
from fedsweep.method import FederatedMethod, merge
from fedsweep.testing import local_engine, run_rounds, subject_of

torch.set_num_threads(1)

TERMS = ("fedprox", "moon", "fedgen", "fedmix")
SERVERS = ("fedavgm", "fedadagrad", "fedadam", "fedyogi")
ON_SERVER = ("fedensemble", "abavg", "feddf", "fedbe", "feddh")
CUT = ("federated_dropout", "feddrop", "afd", "heterofl", "fjord")
PAIRS = [
    *((term, server) for term in (*TERMS, "scaffold") for server in SERVERS),
    *((other, "fednova") for other in (*TERMS, *SERVERS)),
    *((other, "dynamicfl") for other in (*TERMS, *SERVERS, "scaffold", "feddyn", "fednova", *ON_SERVER)),
    *(("feddh", "fedad"), ("moon", "fjord")),  # what shipped tables and presets merge
    *((cut, other) for cut in CUT for other in ("fedprox", "fedadam")),
    *((cut, "scaffold") for cut in CUT if cut != "fjord"),
    *((cut, "feddh") for cut in CUT if cut not in ("heterofl", "fjord")),  # HeteroFL's clients count alike
]
# Every method that is named above, most of them once; the other pairs are exhaustive.
SHOWN = {
    *zip((*TERMS, "scaffold"), (*SERVERS, SERVERS[0]), strict=True),
    *(("fedgen", "fednova"), ("fedyogi", "fednova")),
    *((other, "dynamicfl") for other in ("fedmix", "fedadam", "feddyn", "fednova", *ON_SERVER)),
    *(("feddh", "fedad"), ("moon", "fjord")),
    *zip(CUT, ("fedprox", "scaffold", "fedadam", "fedprox", "fedadam"), strict=True),
    ("afd", "feddh"),
}


@cache
def run(names: tuple[str, ...], at_limit: bool = False) -> RunState:
    """The merged methods in the world of the conformance checks; the first one at its limit, where it is FedAvg."""
    built = [subject_of(name).method for name in names]
    if at_limit:
        subject = subject_of(names[0])
        built[0] = subject.built({**subject.card.small, **limit_of(names[0])})
    options: dict[str, Any] = {"cohort_size": 6, "rounds": 2, "local_epochs": 1, "batch_size": 4}
    return run_rounds(local_engine(subject_of("fedavg").world(merge(*built), **options)))


def limit_of(name: str) -> dict[str, Any]:
    """Parameters with which a method is FedAvg bit for bit, always; empty where there are none."""
    exact = (limit for limit in subject_of(name).card.limits if not limit.tolerance and not limit.equal_sizes)
    return dict(next((limit.given for limit in exact if limit.of == "fedavg"), {}))


def outcome(state: RunState) -> tuple[bytes, list[float | None]]:
    return state.vector.numpy().tobytes(), [record.test_loss for record in state.records]


@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, marks=() if pair in SHOWN else pytest.mark.exhaustive, id="+".join(pair)) for pair in PAIRS],
)
def test_what_composes_is_both(pair: tuple[str, str]) -> None:
    both = outcome(run(pair))
    assert both not in (outcome(run(pair[:1])), outcome(run(pair[1:])))
    assert torch.allclose(run(pair).vector, run(pair[::-1]).vector, rtol=0, atol=1e-6)
    for first, second in (pair, pair[::-1]):
        if limit_of(first) and not run((first,), at_limit=True).components.keys() - run((second,)).components.keys():
            assert outcome(run((first, second), at_limit=True)) == outcome(run((second,)))


REFUSED = {
    (
        "scaffold",
        "local_only",
    ): "the term scaffold takes the move .* but the term local_only may have clients begin with",
    ("feddyn", "local_only"): "the term feddyn takes the move .* but the term local_only may have clients begin with",
    ("feddst", "scaffold"): "the term scaffold takes the move .* but the term feddst puts other values in place of",
    ("fednova", "feddst"): "NormalizedMoves takes the move .* but the term feddst puts other values in place of what",
    ("feddh", "feddst"): "its NonIIDDegree learns by how the mean of .* which MeanOfSentMasks moves otherwise",
    ("feddh", "fedadam"): "its NonIIDDegree learns by how the mean of .* which AdaptiveServer moves otherwise",
    ("feddh", "fjord"): "NonIIDDegree takes clients' moves for those of all their steps, but OrderedDropout draws in",
    ("scaffold", "fjord"): "the term scaffold takes clients' moves for those of all their steps, but OrderedDropout",
    ("augfl", "feddst"): "the terms augfl and feddst both put other values in place of what a step led to",
    ("augfl", "feddyn"): "the term feddyn takes the move .* but the term augfl puts other values in place of what a",
    ("scaffold", "fednova"): r"both have their own weighting \(Uniform and NormalizedMoves\)",
    ("feddyn", "fedadam"): r"both have their own server update \(AddMeanMove and AdaptiveServer\)",
    ("fedadam", "fedyogi"): "both have their own server update",
    ("heterofl", "feddh"): r"both have their own weighting \(Uniform and NonIIDDegree\)",
    ("feddh", "krum"): "its Krum makes one model of whole ones .* go with NonIIDDegree, which learns from their mean",
    ("feddh", "fedmedian"): "its Median makes one model .* go with NonIIDDegree, which learns from their mean",
    ("abavg", "feddh"): r"both have their own weighting \(ByAccuracy and NonIIDDegree\)",
    ("dynamicfl", "dynamicsgd"): "both have their own pacing",
    ("fedad", "fjord"): "both have their own submodels",
    ("fedgen", "fjord"): r"its LatentGenerator needs clients that train the whole model, but OrderedDropout gives them",
    ("fedbe", "afd"): "its BayesianEnsemble needs clients that train the whole model, but ScoredUnits gives them",
    ("feddf", "local_only"): "its Distilled asks the clients' models on the server, but Travels keeps a part of them",
    ("abavg", "local_only"): "its ByAccuracy asks the clients' models on the server, but Travels keeps a part of them",
    ("feddf", "fedas"): "its Distilled asks the clients' models on the server, but Travels keeps a part of them with",
    ("fedktl", "abavg"): "its ByAccuracy asks the clients' models on the server, but Travels keeps a part of them with",
    (
        "ifca",
        "fednova",
    ): "its clients start from one of several models .*, but NormalizedMoves knows the server's alone",
    ("ifca", "fedprox"): "its clients start from one of several models .*, but the term proximal knows the server's",
    ("ifca", "prunefl"): "its clients start from one of several models .*, but ChosenMask knows the server's alone",
    ("ifca", "feddf"): "its clients start from one of several models .*, but Distilled knows the server's alone",
    ("ifca", "dynafed"): "start from one of several models .*, but TrajectoryDistillation knows the server's alone",
    ("dpsgd", "fedadam"): "meet at other hubs than the server .* go with AdaptiveServer, which the server alone does",
    ("aedfl", "feddf"): "meet at other hubs than the server .* go with Distilled, which the server alone does",
    ("hierfavg", "fedjs"): "meet at other hubs than the server .* go with a weighting by what is known of clients",
    ("hierfavg", "feddyn"): "meet at other hubs .* go with the term feddyn, which notes moves that the server adds up",
    ("fedstg", "fedad"): "its clients keep what they trained over several rounds, which does not go with sub-models",
}


@pytest.mark.parametrize("pair", REFUSED, ids="+".join)
def test_what_does_not_compose_is_refused_with_both_names_and_the_reason(pair: tuple[str, str]) -> None:
    for names in (pair, pair[::-1]):
        with pytest.raises(ConfigError, match=REFUSED[pair] if names == pair else None) as refused:
            build_method({"merge": [{"name": name} for name in names]})
        assert all(name in str(refused.value) for name in names)


def test_moves_are_read_only_where_nothing_but_steps_makes_them() -> None:
    """Clients of FedAS begin elsewhere, wherever its head is; AugFL's step is none, so it has no scale."""
    aligned = {"name": "fedas", "weights": "samples"}
    for reader in ("fednova", "feddh"):
        with pytest.raises(
            ConfigError, match=r"takes the move from the model .* the term fedas may have clients begin"
        ):
            build_method({"merge": [aligned, {"name": reader}]})
    build_method({"merge": [aligned, {"name": "feddh", "learning_rate_v": 0.0, "learning_rate_b": 0.0}]})
    with pytest.raises(ConfigError, match=r"augfl puts other values in place .* AdaptiveDropout has steps of another"):
        build_method({"merge": [{"name": "augfl"}, {"name": "fedad", "multiplier": "incoming"}]})
    build_method({"merge": [{"name": "augfl"}, {"name": "fedad", "multiplier": "activation"}]})
    build_method({"merge": [{"name": "fednova"}, {"name": "fjord"}]})


def test_degrees_are_learned_where_the_servers_model_moves_as_much_as_the_mean() -> None:
    build_method({"merge": [{"name": "feddh"}, {"name": "fedavgm"}]})
    with pytest.raises(ConfigError, match=r"learns by how the mean .* moves the server's, which ServerMomentum moves"):
        build_method({"merge": [{"name": "feddh"}, {"name": "fedavgm", "server_learning_rate": 3.0}]})


@pytest.mark.parametrize("asking", [{"name": "feddh", "estimate": "gradients"}, {"name": "fedbe", "samples": 0}])
def test_models_that_stay_with_clients_are_not_asked_on_the_server(asking: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="asks the clients' models on the server, but Travels keeps a part of them"):
        build_method({"merge": [{"name": "local_only"}, asking]})
    build_method({"merge": [{"name": "federated_dropout"}, asking]})  # what a part of the model says is all there is


@pytest.mark.parametrize("cut", ["federated_dropout", "feddrop", "afd"])
def test_a_mean_of_whole_models_needs_shares_and_the_server(cut: str) -> None:
    complete = {"name": cut, "aggregate": "complete"}
    with pytest.raises(
        ConfigError, match="weights of its NormalizedMoves are steps and no shares, but its CompleteNet"
    ):
        build_method({"merge": [{"name": "fednova"}, complete]})
    with pytest.raises(ConfigError, match="NonIIDDegree learns from the mean of the models, but its CompleteNet makes"):
        build_method({"merge": [{"name": "feddh"}, complete]})
    without = {"name": "feddh", "learning_rate_v": 0.0, "learning_rate_b": 0.0}
    build_method({"merge": [without, complete]})  # weights that do not learn are weights like others
    with pytest.raises(ConfigError, match="go with CompleteNet, which the server alone does"):
        build_method({"merge": [{"name": "hierfavg"}, complete]})
    build_method({"merge": [{"name": "hierfavg"}, {"name": cut}, {"name": "fedadam"}]})  # at the server the edges meet
    for name in ("moon", "fjord"):  # whose refinements check, test, or are for batch norm
        build_method({"merge": [{"name": "dpsgd"}, {"name": name}]})


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
@pytest.mark.parametrize("unaggregated", ["continue", "discard"])
def test_moves_that_are_added_up_must_reach_the_server_once(name: str, unaggregated: str) -> None:
    """Thrown away they were missing in its sum; gone on with over a round they were in the client's twice."""
    schedule = {"name": "fedstg", "weights": "size", "unaggregated": unaggregated}
    with pytest.raises(ConfigError, match=f"its (server throws models away|clients keep what they) .*the term {name}"):
        build_method({"merge": [schedule, {"name": name}]})


def test_every_refusal_between_registered_methods_names_both_and_a_reason() -> None:
    for name in METHODS:
        method: FederatedMethod = build_method({"name": name})
        for reason, others in refused_merges(method).items():
            assert len(reason.split()) > 4
            for other in others:
                with pytest.raises(ConfigError, match=other) as refused:
                    merge(method, build_method({"name": other}))
                assert name in str(refused.value)
