"""Where the components of all registered methods come from, and what the FedAvg defaults do."""

from __future__ import annotations

import inspect
from abc import ABC
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from tiny import tiny_sync, tiny_update
from torch import Tensor

from fedsweep.algorithms.registry import METHODS
from fedsweep.catalog import build_method
from fedsweep.components.aggregation import BySamples, Uniform, mean_of_updates
from fedsweep.components.base import ComponentReport
from fedsweep.components.planning import FixedInterval, OncePerRound, UniformSelection, WholeModel, cut_round, due_steps
from fedsweep.errors import ConfigError
from fedsweep.records import ClientUpdate, ClientWork, LocalJob, RoundContext, SyncContext, SyncPoint
from fedsweep.streams import stream
from fedsweep.submodel import FULL_MODEL
from fedsweep.trees import layout_of


def components(name: str) -> Iterator[object]:
    method = build_method({"name": name})
    yield from (component for _, component in method.server_components)
    yield from (method.objective, method.solver, *method.terms)


ALL = {f"{name}: {type(c).__name__}": c for name in METHODS for c in components(name)}


@pytest.mark.parametrize("component", ALL.values(), ids=ALL.keys())
def test_a_concrete_component_extends_abstract_bases_alone(component: object) -> None:
    for base in type(component).__mro__[1:]:
        assert base in (object, ABC) or not base.__dict__.get("__dataclass_params__") or inspect.isabstract(base)


MODEL = torch.nn.Linear(2, 1, bias=False)
LAYOUT = layout_of(MODEL)


def update(client: int, *, samples: int, vector: Tensor | None = None) -> ClientUpdate:
    return tiny_update(client, vector, layout=LAYOUT, num_samples=samples)


def sync() -> SyncContext:
    return tiny_sync(
        MODEL, torch.tensor([9.0, 9.0]), layout=LAYOUT, anchors={0: torch.tensor([9.0, 9.0])}, cohort=(0, 1, 2)
    )


def test_weights_by_samples_and_uniform_by_hand() -> None:
    updates = [update(0, samples=1), update(4, samples=2), update(7, samples=5)]
    by_samples, state = BySamples().weigh("state", updates, sync())
    assert by_samples.tolist() == [0.125, 0.25, 0.625] and by_samples.dtype == torch.float64 and state == "state"
    uniform, _ = Uniform().weigh({}, updates, sync())
    assert uniform.tolist() == pytest.approx([1 / 3] * 3, abs=1e-16) and uniform.dtype == torch.float64


def test_the_mean_of_updates_by_hand() -> None:
    vectors = [torch.tensor([1.0, 2.0]), torch.tensor([5.0, -2.0])]
    updates = [update(k, samples=1, vector=v) for k, v in enumerate(vectors)]
    mean = mean_of_updates(updates, torch.tensor([0.25, 0.75]), sync())
    assert mean.tolist() == [4.0, -1.0]
    assert [v.tolist() for v in vectors] == [[1.0, 2.0], [5.0, -2.0]]
    with pytest.raises(ValueError, match="needs the attendees' models"):
        mean_of_updates([update(0, samples=1)], torch.tensor([1.0]), sync())


def test_an_update_shows_its_models_tensors_as_views() -> None:
    vector = torch.tensor([1.0, 2.0])
    assert update(0, samples=1, vector=vector).params["weight"].data_ptr() == vector.data_ptr()
    assert sync().params["weight"].tolist() == [[9.0, 9.0]]


def context(**fields: object) -> RoundContext:
    defaults: dict[str, object] = {
        "round": 1,
        "available": (0, 2, 3, 5, 8, 9),
        "cohort_size": 3,
        "profiles": (),
        "stream": stream(0, "selection", 1),
    }
    return RoundContext(**(defaults | fields))  # type: ignore[arg-type]


def test_selection_is_uniform_without_replacement_among_those_who_are_there() -> None:
    counts = dict.fromkeys((0, 2, 3, 5, 8, 9), 0)
    for round in range(1, 1201):
        cohort, _ = UniformSelection().choose({}, context(round=round, stream=stream(0, "selection", round)))
        assert len(set(cohort)) == 3 and list(cohort) == sorted(cohort)
        for client in cohort:
            assert type(client) is int
            counts[client] += 1
    assert all(abs(n - 600) < 4 * np.sqrt(1200 * 0.25) for n in counts.values())


def test_selection_takes_everybody_where_too_few_are_there() -> None:
    assert UniformSelection().choose({}, context(cohort_size=9))[0] == (0, 2, 3, 5, 8, 9)


def test_whole_model_gives_everybody_the_full_model() -> None:
    assert WholeModel().assign({}, context(cohort=(2, 5)))[0] == {2: FULL_MODEL, 5: FULL_MODEL}


def work(steps: int) -> ClientWork:
    return ClientWork(steps=steps, batch_size=4, whole_batches=True, num_samples=4)


def test_once_per_round_is_one_job_each_and_one_sync_point() -> None:
    points, _ = OncePerRound().plan({}, context(cohort=(2, 5), work={2: work(3), 5: work(7)}))
    assert points == (SyncPoint(start=(LocalJob(client=2, steps=3), LocalJob(client=5, steps=7)), attend=(2, 5)),)


def test_a_round_is_cut_where_clients_are_due() -> None:
    """Client 1 is due after steps 2 and 5, client 4 after 3 and 5, client 6 after 5."""
    points = cut_round({1: (2, 5), 4: (3, 5), 6: (5,)}, idle=(8,))
    assert points == (
        SyncPoint(start=tuple(LocalJob(client=k, steps=n) for k, n in ((1, 2), (4, 3), (6, 5))), attend=(1,)),
        SyncPoint(start=(LocalJob(client=1, steps=3),), attend=(4,)),
        SyncPoint(start=(LocalJob(client=4, steps=2),), attend=(1, 4, 6), idle=(8,)),
    )
    assert cut_round({}) == ()


@pytest.mark.parametrize("interval", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("steps", [1, 2, 5, 6])
@pytest.mark.parametrize("rule", ["authors", "paper"])
def test_every_client_takes_all_its_steps_and_ends_at_the_last_point(interval: int, steps: int, rule: str) -> None:
    pacing = FixedInterval(interval=interval, sync_rule=rule)
    points, _ = pacing.plan({}, context(cohort=(0, 2), work={0: work(steps), 2: work(steps)}))
    for client in (0, 2):
        jobs = [job.steps for point in points for job in point.start if job.client == client]
        assert sum(jobs) == steps and min(jobs) >= 1
    assert points[-1].attend == (0, 2)
    assert len(points) == len(due_steps(interval, steps, sync_rule=rule))


def test_clients_with_fewer_steps_wait_for_the_rounds_end() -> None:
    """Steps 3 and 5 at interval 2: client 0's last step is averaged with client 2's, not on its own before."""
    pacing = FixedInterval(interval=2, sync_rule="paper")
    points, _ = pacing.plan({}, context(cohort=(0, 2), work={0: work(3), 2: work(5)}))
    assert [point.attend for point in points] == [(0, 2), (2,), (0, 2)]
    assert [[(job.client, job.steps) for job in point.start] for point in points] == [
        [(0, 2), (2, 2)],
        [(0, 1), (2, 2)],
        [(2, 1)],
    ]


def test_pacing_refuses_wrong_rules_and_intervals() -> None:
    with pytest.raises(ConfigError, match="sync_rule must be one of authors, paper, but got 'printed'"):
        FixedInterval(interval=2, sync_rule="printed")
    with pytest.raises(ConfigError, match="interval must be an integer >= 1, but got -1"):
        FixedInterval(interval=-1)


def test_optional_hooks_do_nothing() -> None:
    component, state = BySamples(), {"a": 1}
    assert component.registration() == ()
    assert component.publish(state) == {} and component.probes(state, 1) == ()
    assert component.learn(state, [], sync()) is state
    assert component.report(state) == ComponentReport()
