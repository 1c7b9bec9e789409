"""What DynaFed shows of its synthesis: progress, and how real images and noise compare; none of it changes the run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tiny import tiny_server, tiny_sync
from tiny_synthesis import TinyNetwork
from torch import Tensor, nn

from fedsweep.algorithms.dynafed.distillation import TrajectoryDistillation, dynafed
from fedsweep.errors import ConfigError
from fedsweep.records import ServerContext, State
from fedsweep.runs.checkpoints.state_codec import from_bytes, to_bytes
from fedsweep.streams import Stream
from fedsweep.testing import tiny_data
from fedsweep.trees import layout_of, model_vector

SMALL: Mapping[str, Any] = {
    "snapshots": 4,
    "horizon_rounds": 2,
    "inner_steps": 3,
    "iterations": 12,
    "images_per_class": 2,
    "inner_rate": 1.0,
    "augment": False,
}


def component(**more: Any) -> TrajectoryDistillation:
    refinement = dynafed(**{**SMALL, **more}).refinements[0]
    assert isinstance(refinement, TrajectoryDistillation)
    return refinement


def real_data() -> tuple[Tensor, Tensor]:
    images, labels = (torch.from_numpy(part) for part in tiny_data())
    return images.reshape(-1, 1, 1, 6), labels


def world(**held: Any) -> ServerContext:
    model = TinyNetwork()
    return tiny_server(model, torch.zeros(28), stream=Stream(("test", 0)), **held)


def trajectory() -> list[Tensor]:
    """Models on their way to fit the real data, by plain gradient steps."""
    images, labels = real_data()
    model = TinyNetwork()
    with torch.no_grad():
        for value in model.parameters():
            value.zero_()
    found = [model_vector(model, layout_of(model))]
    sgd = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(3):
        for _ in range(3):
            sgd.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            sgd.step()
        found.append(model_vector(model, layout_of(model)))
    return found


def learned(distillation: TrajectoryDistillation, context: ServerContext, **more: Any) -> State:
    state = distillation.init(context)
    for round, vector in enumerate(trajectory()[1:], start=1):
        sync = tiny_sync(
            TinyNetwork(), vector, round=round, layout=context.layout, stream=Stream(("test", round)), **more
        )
        _, state = distillation.refine(state, vector, [], sync)
    return state


def test_real_images_point_closer_to_the_target_than_noise() -> None:
    state = learned(component(real_reference="proxy"), world(proxy_data=real_data()))
    for figures in state["synthetic"]["trace"]:
        assert figures["real_cosine_distance"] < 0.5 < figures["noise_cosine_distance"]


def test_the_comparison_is_reported_and_told() -> None:
    told: list[str] = []
    distillation = component(real_reference="validation")
    state = learned(distillation, world(validation_data=real_data()), message=told.append)
    last = state["synthetic"]["trace"][-1]
    assert distillation.report(state).metrics["synthesis_real_cosine_distance"] == last["real_cosine_distance"]
    shown = f"(noise {last['noise_cosine_distance']:.3f}, real {last['real_cosine_distance']:.3f})"
    assert shown in told[-1]


def test_nothing_is_learned_from_the_real_images() -> None:
    plain = learned(component(), world(proxy_data=real_data()))
    compared = learned(component(real_reference="proxy"), world(proxy_data=real_data()))
    for name in ("images", "labels", "rate"):
        assert torch.equal(plain["synthetic"][name], compared["synthetic"][name])
    assert "real" not in plain
    assert all("real_cosine_distance" not in figures for figures in plain["synthetic"]["trace"])


def test_as_many_real_images_per_class_are_taken_as_are_learned() -> None:
    images, labels = real_data()
    state = component(real_reference="proxy").init(world(proxy_data=(images, labels)))
    assert state["real"]["labels"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    first = torch.nonzero(labels == 2)[:2, 0]
    assert torch.equal(state["real"]["images"][4:6], images[first])
    back = from_bytes(to_bytes(state, root="a"))
    assert torch.equal(back["real"]["images"], state["real"]["images"])


@pytest.mark.parametrize(
    ("reference", "held"),
    [("proxy", {}), ("validation", {}), ("proxy", {"proxy_data": (torch.zeros(8, 1, 1, 6), None)})],
)
def test_a_server_without_labelled_data_is_an_error_that_names_the_key(reference: str, held: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"scenario\.server_data\.{reference}"):
        component(real_reference=reference).init(world(**held))


def test_an_unknown_reference_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.real_reference must be one of none, proxy, validation"):
        component(real_reference="test")


def test_each_iteration_says_how_far_it_is_and_how_long_it_takes() -> None:
    lines: list[str] = []
    told = learned(component(), world(), working=lines.append)
    form = r"synthesis: iteration (\d+) of 12, objective \d\.\d{4}(, cosine distance \d\.\d{3})?, inner rate \d\.\d{5},"
    matches = [re.match(form + r" \d+:\d\d:\d\d left$", line) for line in lines]
    assert [match and int(match[1]) for match in matches] == list(range(1, 13))
    assert lines[-1].endswith("0:00:00 left")
    silent = learned(component(), world())
    assert torch.equal(told["synthetic"]["images"], silent["synthetic"]["images"])


@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("limit", [1e-9, 0.02])
def test_a_memory_limit_changes_no_bit_of_a_synthesis(limit: float, batch: int | None) -> None:
    settings = {"augment": True, "inner_steps": 7, "synthesis_batch": batch}
    whole = learned(component(**settings), world())
    parts = learned(component(**settings, memory_limit_mb=limit), world())
    assert to_bytes(parts["synthetic"], root="a") == to_bytes(whole["synthetic"], root="a")


def test_fewer_real_images_than_synthetic_ones_are_enough() -> None:
    """One image of class 3 is there: 7 real images in batches of 3, while the synthetic ones are 8."""
    images, labels = real_data()
    keep = torch.cat([torch.nonzero(labels < 3)[:, 0], torch.nonzero(labels == 3)[:1, 0]])
    distillation = component(real_reference="proxy", synthesis_batch=3)
    held = world(proxy_data=(images[keep], labels[keep]))
    assert len(distillation.init(held)["real"]["images"]) == 7
    state = learned(distillation, held)
    assert "real" not in state
    assert 0 <= state["synthetic"]["trace"][-1]["real_cosine_distance"] < 1
