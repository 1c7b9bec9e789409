"""Budgets that are spent round by round: never passed, used up, the same after a resume, and with reasons."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import net
from torch import Tensor

from fedsweep.algorithms.dynamicfl.two_speed import dynamicfl
from fedsweep.algorithms.fedavg import fedavg
from fedsweep.algorithms.fedbuff import fedbuff
from fedsweep.algorithms.scaffold import scaffold
from fedsweep.catalog import built_in_card, resolve
from fedsweep.components.codec import AsItIs, Codec, Communication
from fedsweep.components.compression.registry import CODECS
from fedsweep.components.planning import UniformSelection
from fedsweep.components.spending import Even, Gain, Offer, Outlook, SpendingPlanner, Spent, levels_of
from fedsweep.config import load_config
from fedsweep.engine.ahead.spending import adjusted_choice
from fedsweep.engine.cost import CostModel
from fedsweep.engine.engine import Engine
from fedsweep.engine.forecast import forecast, planned_rounds
from fedsweep.engine.plan import Planner
from fedsweep.errors import ConfigError, InvariantError
from fedsweep.experiment.build import build_experiment
from fedsweep.experiment.experiment import Experiment, Option, StopLimits
from fedsweep.experiment.unforeseen import why_unknown
from fedsweep.fleet.fleet import Vectors
from fedsweep.method import FederatedMethod
from fedsweep.runs.checkpoints.checkpoint import CheckpointStore
from fedsweep.streams import Stream
from fedsweep.testing import local_engine, run_rounds, tiny_device, tiny_experiment, with_devices
from fedsweep.testing.fleets import SplitFleet
from fedsweep.world.devices import DeviceProfile

CODECS_DOWN = [{"name": "topk"}, {"name": "qsgd", "bits": 4}]


@dataclass(frozen=True, kw_only=True)
class AtRandom(SpendingPlanner):
    """Wants anything."""

    seed: int = 0

    def choose(self, outlook: Outlook) -> tuple[int, str]:
        generator = np.random.default_rng([self.seed, outlook.rounds_left])
        return int(generator.integers(len(outlook.offers))), "a whim"


def spending(
    method: FederatedMethod, planner: SpendingPlanner, *, total_bytes: int, cohorts: tuple[int, ...], **world: Any
) -> Experiment:
    """An experiment whose cohorts may be chosen; DynamicFL's interval, too."""
    stop = StopLimits(total_bytes=total_bytes)
    plain = tiny_experiment(method, build=net, stop=stop, **{"local_steps": 4, "cohort_size": max(cohorts), **world})
    intervals = (4, 1) if method.name == "dynamicfl" else (None,)
    options = tuple(
        Option(
            values={"training.cohort_size": size} | ({} if interval is None else {"method.high_interval": interval}),
            experiment=replace(
                plain,
                training=replace(plain.training, cohort_size=size),
                method=method if interval is None else dynamicfl(group_size=1, high_interval=interval, low_interval=4),
            ),
        )
        for size in cohorts
        for interval in intervals
    )
    parameters = {"server_learning_rate": 1.0, "rebuild": False, "group": "random", "sketch_values": 0}
    cards = ((built_in_card(method.name), parameters),)
    options = tuple(replace(o, experiment=replace(o.experiment, cards=cards)) for o in options)
    return replace(plain, spending=planner, options=options)


EXHAUSTIVE = pytest.mark.exhaustive
DOWN = [AsItIs(), *(CODECS[name]() for name in ("fp16", "topk", "sign"))]


def with_downs(experiment: Experiment, downs: Sequence[Codec]) -> Experiment:
    """The same with the server's codec as a further choice."""
    options = tuple(
        Option(
            values={**option.values, "communication.down": str(down)},
            experiment=replace(option.experiment, communication=Communication(down=down)),
        )
        for option in experiment.options
        for down in downs
    )
    return replace(experiment, communication=Communication(down=downs[0]), options=options)


def on_devices(experiment: Experiment, devices: Sequence[DeviceProfile]) -> Experiment:
    options = tuple(replace(o, experiment=with_devices(o.experiment, devices)) for o in experiment.options)
    return with_devices(replace(experiment, options=options), devices)


def limited(experiment: Experiment, stop: StopLimits) -> Experiment:
    options = tuple(
        replace(o, experiment=replace(o.experiment, training=replace(o.experiment.training, stop=stop)))
        for o in experiment.options
    )
    return replace(experiment, training=replace(experiment.training, stop=stop), options=options)


def length(codec: Codec, params: int, shapes: Any) -> int:
    """Bytes of a message, as one buffer."""
    if not codec.encodes:
        return 4 * params
    message = codec.fitted(shapes).encode(torch.zeros(params), Stream(("any",)))
    return sum(-(-len(t) // 8) if t.dtype == torch.bool else t.numel() * t.element_size() for t in message.values())


METHODS = [fedavg(), dynamicfl(group_size=1, high_interval=4, low_interval=4), scaffold(), fedbuff()]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_missed_message_costs_what_its_own_rounds_codec_made_it(method: FederatedMethod, seed: int) -> None:
    """By hand: a list of all messages of the server, and where in it each client is; of published content likewise."""
    plain = spending(method, AtRandom(seed=seed), total_bytes=10**9, cohorts=(3,), num_clients=7, rounds=10**7)
    experiment = on_devices(with_downs(plain, DOWN), [tiny_device(1e18, bits_per_s=8e3)])
    engine, params = local_engine(experiment), experiment.layout.num_params
    state, taken, seen = engine.start(), set(), set()
    models, at = list[int](), dict[int, int]()
    contents, given, has = list[int](), None, dict[int, int | Tensor]()
    for _ in range(14):
        assert engine.spending is not None
        chosen = engine.spending.next(state)
        assert not isinstance(chosen, str)
        down = experiment.options[chosen.decision.choice].experiment.communication.down
        own, sent, most = length(down, params, experiment.layout.shapes), 0, 0
        control = state.components.get("refinement0", {}).get("control") if method.name == "scaffold" else None
        if control is not None and down.encodes and (given is None or not torch.equal(control, given)):
            contents += [own] * (1 if given is not None or not control.any() else 2)
            given = control
        for point in chosen.plan.points:
            for client in (job.client for job in point.start if not job.resume):
                missed = models[at.get(client, 0) :]
                one = own if not missed else missed[0] if len(missed) == 1 else min(sum(missed), 4 * params)
                sent, most, at[client] = sent + one, max(most, one), len(models)
                seen.add(len(missed))
                if control is None:
                    continue
                before = has.get(client)
                if not down.encodes:
                    is_same = isinstance(before, Tensor) and torch.equal(before, control)
                    sent, has[client] = sent + 4 * params * (not is_same), control
                    continue
                late = contents[before if isinstance(before, int) else min(1, len(contents) - 1) :]
                sent += 0 if not late else late[0] if len(late) == 1 else min(sum(late), 4 * params)
                has[client] = len(contents)
            models += [own] * bool(point.attend)
        after, _ = engine.advance(state)
        assert after.records[-1].bytes_down == sent
        if control is None:
            assert chosen.decision.cost == sent + after.records[-1].bytes_up
        if method.name == "fedavg":  # at 1,000 bytes a second, a whole model back
            assert state.clock is not None and after.clock == pytest.approx(state.clock + (most + 4 * params) / 1000)
        assert after.decisions[-1] == chosen.decision
        taken.add(type(down))
        state = after
    assert len(taken) >= 3 and 0 in seen and max(seen) > 2


@pytest.mark.parametrize("method", METHODS[:3], ids=lambda m: m.name)
def test_a_choice_of_one_codec_downwards_is_that_codec(method: FederatedMethod) -> None:
    plain = spending(method, AtRandom(), total_bytes=10**9, cohorts=(2, 3), num_clients=7, rounds=6)
    one, never = with_downs(plain, DOWN[2:3]), with_downs(plain, DOWN[2:])
    never = replace(never, options=tuple(o for o in never.options if o.experiment.communication.down == DOWN[2]))
    first, second = (run_rounds(local_engine(experiment)) for experiment in (one, never))
    assert torch.equal(first.vector, second.vector) and first.total_bytes == second.total_bytes


def test_workers_put_the_servers_messages_through_the_codec_that_was_chosen() -> None:
    method = dynamicfl(group_size=1, high_interval=2, low_interval=4)
    plain = spending(method, AtRandom(seed=3), total_bytes=10**9, cohorts=(3,), rounds=10**7)
    experiment = with_downs(plain, DOWN)
    alone, split = local_engine(experiment), Engine(experiment, SplitFleet(experiment))
    first, second = (run_rounds(engine, rounds=4) for engine in (alone, split))
    assert torch.equal(first.vector, second.vector) and first.total_bytes == second.total_bytes
    assert len({decision.choice for decision in first.decisions}) > 2 and first.made == second.made


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [20, pytest.param(100, marks=pytest.mark.exhaustive)])
def test_random_worlds_end_within_a_hundredth_below_their_budget(worlds: int) -> None:
    """Whatever the planner wants, a message being less than a hundredth of the budget."""
    generator = np.random.default_rng(0)
    for world in range(worlds):
        clients = int(generator.integers(4, 12))
        cohorts = tuple(range(1, 1 + int(generator.integers(2, min(clients, 6) + 1))))
        method = (fedavg(), dynamicfl(group_size=1, high_interval=4, low_interval=4))[world % 2]
        experiment = spending(
            method, AtRandom(seed=world), total_bytes=1, cohorts=cohorts, num_clients=clients, seed=world
        )
        costs = CostModel(experiment)
        pair = 2 * costs.message_values * 4
        budget = int(pair * generator.uniform(105, 160))
        coded = world % 20 < 2  # messages are shorter, so there are more of them
        rounds = int(np.ceil((1.2 + 0.8 * coded) * budget / pair / max(cohorts))) + int(generator.integers(0, 40))
        training = replace(experiment.training, rounds=rounds, stop=StopLimits(total_bytes=budget))
        options = tuple(
            replace(o, experiment=replace(o.experiment, training=replace(o.experiment.training, rounds=rounds)))
            for o in experiment.options
        )
        experiment = replace(experiment, training=training, options=options)
        if coded:
            experiment = with_downs(experiment, DOWN[1:3])
        sent = sum(plan.num_bytes for plan in planned_rounds(experiment, Planner(experiment, costs)))
        once = forecast(replace(experiment, options=()), most_planned=1).registration_bytes
        assert 0.99 * budget <= sent + once <= budget, (world, sent / budget)
        if coded:  # one in ten, half of them DynamicFL's
            assert run_rounds(local_engine(experiment)).total_bytes == sent + once


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planner", "method"),
    [
        (Gain(window=2), scaffold()),
        (Even(), dynamicfl(group_size=1, high_interval=4, low_interval=4)),
        pytest.param(Gain(window=2), dynamicfl(group_size=1, high_interval=4, low_interval=4), marks=EXHAUSTIVE),
        pytest.param(Even(), scaffold(), marks=EXHAUSTIVE),
    ],
)
def test_what_is_trained_ends_there_too(planner: SpendingPlanner, method: FederatedMethod) -> None:
    """With what travels beside models, which is counted as methods' cards say."""
    budget = 900 * 2 * 120
    experiment = spending(method, planner, total_bytes=budget, cohorts=(1, 2, 3), rounds=200)
    state = run_rounds(local_engine(experiment))
    assert 0.99 * budget <= state.total_bytes <= budget
    assert [decision.round for decision in state.decisions] == list(range(1, state.round + 1))
    sent = [record.bytes_up + record.bytes_down for record in state.records]
    assert [decision.cost for decision in state.decisions] == sent
    sizes = [experiment.options[decision.choice].values["training.cohort_size"] for decision in state.decisions]
    assert [len(record.cohort) for record in state.records] == sizes and all(d.reason for d in state.decisions)


@pytest.mark.parametrize(("planner", "is_exact"), [(Even(), True), (Gain(window=2), False), (AtRandom(), False)])
def test_what_goes_by_losses_has_no_exact_forecast(planner: SpendingPlanner, is_exact: bool) -> None:
    experiment = spending(fedavg(), planner, total_bytes=900 * 2 * 120, cohorts=(1, 2, 3), rounds=200)
    assert forecast(experiment).exact == is_exact and (why_unknown(experiment) is None) == is_exact
    sent = run_rounds(local_engine(experiment)).total_bytes
    assert not is_exact or forecast(experiment).total_bytes == sent


@pytest.mark.parametrize(
    ("method", "downs", "is_exact"),
    [("fedmix", [None], True), ("scaffold", CODECS_DOWN[:1], True), ("scaffold", CODECS_DOWN, False)],
)
def test_the_forecast_knows_who_took_part_before_and_what_codecs_sent(
    method: str, downs: list[Any], is_exact: bool
) -> None:
    tree = {
        "scenario": {"dataset": "digits", "clients": 8, "budgets": {"total_bytes": 90000}},
        "model": {"name": "mlp", "hidden_width": 8},
        "training": {"rounds": 12, "cohort_size": 4, "local_steps": 1, "batch_size": 8},
        "planner": {"name": "even", "choices": {"communication.down": downs, "training.cohort_size": [2, 3, 4]}},
    }
    experiment = build_experiment(load_config(tree, [f"method.name={method}"]))
    expected, state = forecast(experiment), run_rounds(local_engine(experiment))
    assert expected.exact == is_exact and len(state.records) > 4
    assert (expected.total_bytes, expected.rounds) == (state.total_bytes, len(state.records)) or not is_exact


def test_a_budget_of_virtual_seconds_is_never_passed() -> None:
    plain = spending(fedavg(), Gain(), total_bytes=1, cohorts=(1, 2, 3), rounds=100)
    timed = limited(plain, StopLimits(sim_time_s=0.5))
    state = run_rounds(local_engine(on_devices(timed, [tiny_device(1e6), tiny_device(3e6)])))
    assert state.clock is not None and 0.9 * 0.5 <= state.clock <= 0.5


@pytest.mark.slow
def test_a_resumed_run_spends_as_the_unbroken_one(tmp_path: Path) -> None:
    """With codecs that are chosen round by round, whose error feedback clients and server keep."""
    plain = spending(fedavg(), AtRandom(seed=3), total_bytes=20_000, cohorts=(2, 3), rounds=60)
    codecs = [CODECS[name](error_feedback=True) for name in ("topk", "sign")]
    options = tuple(
        Option(
            values={**option.values, "communication": f"{up}, {down}"},
            experiment=replace(option.experiment, communication=Communication(up=up, down=down)),
        )
        for option in plain.options
        for up in codecs
        for down in codecs
    )
    experiment = replace(plain, options=options)
    whole, engine = run_rounds(local_engine(experiment)), local_engine(experiment)
    store = CheckpointStore(tmp_path, keep=1, config_hash="x")
    store.save(run_rounds(engine, rounds=5), fetch=engine.fleet.fetch)
    again = local_engine(experiment)
    state = CheckpointStore(tmp_path, keep=1, config_hash="x").newest(keep_handle=again.fleet.keep).state
    assert state is not None and len(state.decisions) == 5 and len(state.made) > 1 and state.left is not None
    after = run_rounds(again, state)
    assert torch.equal(after.vector, whole.vector) and after.decisions == whole.decisions
    assert after.total_bytes == whole.total_bytes and after.made == whole.made
    assert len({decision.choice for decision in whole.decisions}) > 2 and whole.total_bytes <= 20_000


def outlook(
    losses: Sequence[float | None], *, costs: tuple[float, ...] = (1.0, 2.0, 4.0), taken: list[int] | None = None
) -> Outlook:
    offers = tuple(Offer(values={"method.interval": number}, cost=cost) for number, cost in enumerate(costs))
    past = tuple(Spent(offer=k, cost=costs[k], loss=x) for k, x in zip(taken or [0] * len(losses), losses, strict=True))
    return Outlook(offers=offers, left=1000.0, rounds_left=500, past=past)


def test_gain_goes_a_level_up_where_the_last_rounds_gained_little() -> None:
    gain = Gain(window=2, least=0.5)
    falls = [8.0, 8.0, 6.0, 6.0, 4.5, 4.5]  # 2 for 2, then 1.5 for 2: three quarters of the best
    assert gain.choose(outlook([]))[0] == gain.choose(outlook(falls))[0] == 0
    stalls = [*falls, 4.4, 4.4]
    number, reason = gain.choose(outlook(stalls))
    assert number == 1 and "gain" not in reason and "a level below" in reason
    # The level above is judged by its own windows alone, and is the last but one.
    taken = [0] * 8 + [1] * 6
    assert gain.choose(outlook([*stalls, 9.0, 9.0, 5.0, 5.0, 2.0, 2.0], taken=taken))[0] == 1
    assert gain.choose(outlook([*stalls, 9.0, 9.0, 5.0, 5.0, 5.0, 5.0], taken=taken))[0] == 2


@pytest.mark.parametrize("place", range(7))
def test_rounds_in_which_nobody_trained_take_no_level_up(place: int) -> None:
    falls = [8.0, 8.0, 6.0, 6.0, 4.5, 4.5]
    night = [*falls[:place], *[None] * 4, *falls[place:]]
    assert Gain(window=2, least=0.5).choose(outlook(night)) == Gain(window=2, least=0.5).choose(outlook(falls))


def test_levels_are_settings_beside_the_cohort() -> None:
    offers = [
        Offer(values={"training.cohort_size": size, "method.interval": interval}, cost=size / interval)
        for interval in (1, 2)
        for size in (2, 1)
    ]
    assert levels_of(offers) == [[3, 2], [1, 0]]
    assert levels_of(offers[:2]) == [[1], [0]]


def test_even_takes_an_even_share() -> None:
    view = replace(outlook([]), left=1000.0, rounds_left=400)
    assert Even().choose(view)[0] == 1  # 2.5 a round
    assert Even().choose(replace(view, left=100.0))[0] == 0


def test_rounds_that_could_not_spend_the_rest_are_not_taken() -> None:
    view = replace(outlook([]), left=39.0, rounds_left=10)
    assert adjusted_choice(0, "wanted", view)[0] == 2  # nine more at 4 are 36
    assert adjusted_choice(0, "wanted", replace(view, left=30.0)) == (0, "wanted")


def from_yaml(**planner: Any) -> Experiment:
    return build_experiment(
        load_config(
            {
                "scenario": {"dataset": "digits", "clients": 8, "budgets": {"total_bytes": "2 MB"}},
                "method": {"name": "dynamicfl", "group_size": 1, "high_interval": 4, "low_interval": 4},
                "training": {"rounds": 40, "cohort_size": 4, "local_steps": 4, "batch_size": 4},
                "planner": {"choices": {"training.cohort_size": [1, 2], "method.high_interval": [4, 1]}, **planner},
            }
        )
    )


def test_a_configuration_names_budget_planner_and_choices() -> None:
    experiment = from_yaml()
    assert experiment.training.stop.total_bytes == 2_000_000 and experiment.spending == Gain()
    assert [option.experiment.training.cohort_size for option in experiment.options] == [1, 1, 2, 2]
    assert forecast(experiment).total_bytes <= 2_000_000
    config = load_config({"scenario": {"budgets": {"total_bytes": 2e6}}, "planner": {"choices": {"method.x": [1, 2]}}})
    tree = resolve(config).tree()
    assert tree["planner"] == {"name": "gain", "choices": {"method.x": [1, 2]}, "window": 3, "least": 0.5}
    assert "planner" not in load_config({}).tree()
    # What the components of a round may read.
    engine = local_engine(experiment)
    start = engine.start()
    sent = start.total_bytes
    spending = engine.planner.with_cohort(start).spending
    assert spending is not None and (spending.left_bytes, spending.left_s) == (2_000_000 - sent, None)


def test_what_is_made_before_a_cohort_is_chosen_has_room_for_the_largest() -> None:
    experiment = from_yaml(choices={"training.cohort_size": [2, 8]})
    assert experiment.training.cohort_size == 4 and experiment.most_in_cohort == 8
    assert Vectors.of(experiment).capacity == 8
    plain = replace(experiment, options=(), spending=None)
    assert plain.most_in_cohort == 4 and from_yaml().most_in_cohort == 2
    assert forecast(experiment, most_planned=1).memory_mb > forecast(plain, most_planned=1).memory_mb


WRONG = [
    ({"choices": {"training.rounds": [1, 2]}}, "can't change from round to round"),
    ({"choices": {}}, "a planner needs choices"),
    ({"choices": {"training.cohort_size": [2, 2]}}, "values that differ"),
    ({"choices": {"training.cohort_size": list(range(1, 9)), "training.local_steps": list(range(1, 10))}}, "72 comb"),
    (
        {"choices": {"method.group": ["random", "exact"], "method.name": ["fedavg", "scaffold"]}},
        "planner.choices|group",
    ),
    ({"choices": {"communication.up": [{"name": "fp16"}, {"name": "topk", "error_feedback": True}]}}, "error feedback"),
    (
        {"choices": {"communication.down": [None, {"name": "topk", "error_feedback": True}]}},
        "communication.down need it",
    ),
    ({"name": "gane", "choices": {"training.cohort_size": [1]}}, "gain"),
]


@pytest.mark.parametrize(("planner", "message"), WRONG)
def test_what_cant_be_chosen_is_refused(planner: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_yaml(**planner)


@pytest.mark.parametrize("name", ["fedavgm", "fedadam", "scaffold", "feddyn", "feddh", "ifca", "prunefl", "feddst"])
def test_methods_whose_state_is_of_tensors_can_be_planned(name: str) -> None:
    tree = {
        "scenario": {"dataset": "digits", "clients": 8, "budgets": {"total_bytes": "3 MB"}},
        "model": {"name": "mlp"},
        "method": {"name": name},
        "training": {"rounds": 4, "local_steps": 2, "batch_size": 16},
        "planner": {"name": "even", "choices": {"training.cohort_size": [2, 3]}},
    }
    assert len(build_experiment(load_config(tree)).options) == 2


def test_a_choice_that_is_in_the_first_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Tensor] = []

    def init(self: UniformSelection, context: Any) -> dict[str, Any]:
        made.append(torch.full((2,), float(len(made))))
        return {"size": made[-1]}

    monkeypatch.setattr(UniformSelection, "init", init)
    with pytest.raises(ConfigError, match=r"planner\.choices: .* is in the state that the run begins with"):
        from_yaml()
    assert len(made) == 2


@pytest.mark.parametrize("key", ["training.local_steps", "training.local_epochs"])
def test_the_length_of_a_training_that_goes_on_over_rounds_is_no_choice(key: str) -> None:
    """Of AEDFL's clients at work some would have ended before the last moment."""
    tree = {
        "scenario": {
            "dataset": "digits",
            "clients": 6,
            "topology": {"kind": "ring"},
            "devices": {"profile": "phone-wifi"},
            "budgets": {"total_bytes": "3 MB"},
        },
        "method": {"name": "aedfl"},
        "planner": {"name": "even", "choices": {key: [1, 4]}},
    }
    with pytest.raises(ConfigError, match=r"planner\.choices: .* how long clients of method aedfl train"):
        build_experiment(load_config(tree))


def test_a_planner_without_a_budget_is_refused() -> None:
    config = load_config({"scenario": {"dataset": "digits"}, "planner": {"choices": {"training.cohort_size": [1, 2]}}})
    with pytest.raises(ConfigError, match="planner needs a budget"):
        build_experiment(config)


@pytest.mark.parametrize("size", ["2 XB", "0", "lots"])
def test_sizes_that_are_none_are_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="total_bytes"):
        build_experiment(load_config({"scenario": {"dataset": "digits", "budgets": {"total_bytes": size}}}))


@pytest.mark.parametrize(("spare", "limit"), [(0.99, "sim_time_s"), (10, "total_bytes")])
def test_of_two_limits_the_one_that_ends_the_run_is_named(spare: float, limit: str) -> None:
    plain = spending(fedavg(), Even(), total_bytes=20_000, cohorts=(1, 2), rounds=40)
    plain = on_devices(plain, [tiny_device(1e6)])
    [*_, last] = run_rounds(local_engine(plain)).records
    assert last.sim_time_s is not None
    engine = local_engine(limited(plain, StopLimits(total_bytes=20_000, sim_time_s=spare * last.sim_time_s)))
    state = run_rounds(engine)
    assert engine.advance(state)[1] == limit and state.records[-1].test_accuracy is not None


def test_a_planner_that_names_no_offer_is_told() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Astray(SpendingPlanner):
        def choose(self, outlook: Outlook) -> tuple[int, str]:
            return 99, "far"

    with pytest.raises(InvariantError, match="number of an offer"):
        run_rounds(local_engine(spending(fedavg(), Astray(), total_bytes=10_000, cohorts=(1, 2))))


def test_the_plan_stands_in_the_folder_and_its_reasons_in_the_remarks(tmp_path: Path) -> None:
    from fedsweep.api import run

    done = run(
        {
            "scenario": {"dataset": "digits", "clients": 8, "budgets": {"total_bytes": "1 MB"}},
            "training": {"rounds": 12, "local_steps": 2, "batch_size": 4},
            "planner": {"name": "even", "choices": {"training.cohort_size": [1, 2, 3]}},
            "runtime": {"backend": "local"},
        },
        out=tmp_path / "run",
    )
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert len(plan) == result["rounds"] and done is not None
    assert {"round", "choice", "cost", "left", "reason", "set"} == plan[0].keys()
    assert any(remark.startswith("budget: rounds 1 to") for remark in result["remarks"])
    assert result["total_bytes"] <= 1_000_000 and result["stopped_by"] == "total_bytes"
