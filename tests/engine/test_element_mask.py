"""A model with few params alive: what travels is what is alive, in the ledger, the plan and on the clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from fedsweep.components.local import LocalStep, LocalTerm, Memory
from fedsweep.engine.forecast import forecast
from fedsweep.submodel import ElementMask
from fedsweep.testing import (
    linear_model,
    local_engine,
    play_round,
    run_rounds,
    tiny_device,
    tiny_experiment,
    with_devices,
    with_parts,
)
from fedsweep.trees import ParamTree, layout_of

LAYOUT = layout_of(linear_model())
ALIVE = torch.arange(28) % 5 == 0  # six of 28 params


@dataclass(frozen=True, kw_only=True)
class StayZero(LocalTerm):
    """Sets what is not alive to zero after each step."""

    needs_anchor = False
    name: str = "zero"

    def after_step(self, step: LocalStep, gradients: ParamTree) -> tuple[Memory, ParamTree | None]:
        masks = LAYOUT.params(ALIVE)
        return step.memory, {name: value * masks[name] for name, value in step.params.items()}


@pytest.mark.parametrize(("fresh", "maskable", "mask_bytes"), [(True, None, 4), (True, 24, 3), (False, None, 0)])
def test_only_what_is_alive_is_charged(fresh: bool, maskable: int | None, mask_bytes: int) -> None:
    """Six values down and up for each of three clients; 28 bits are four bytes, 24 are three."""
    mask = ElementMask(mask=ALIVE, fresh=fresh, num_maskable=maskable)
    engine = local_engine(tiny_experiment(with_parts(mask), rounds=1))
    state = engine.start()
    plan, round = engine.planner.plan(state), play_round(engine, state)
    assert (round.ledger.total("down"), round.ledger.total("up")) == (18, 18)
    assert (round.ledger.bytes("down"), round.ledger.bytes("up")) == (3 * (4 * 6 + mask_bytes), 3 * 4 * 6)
    assert plan.num_bytes == round.ledger.total_bytes
    known = forecast(engine.experiment)
    assert known.total_bytes - known.registration_bytes == plan.num_bytes


def test_the_clock_waits_for_what_is_alive_alone() -> None:
    """At one bit a second: 6 x 32 bits and 28 bits of mask in four bytes down, 6 x 32 up."""
    experiment = tiny_experiment(with_parts(ElementMask(mask=ALIVE)), rounds=1)
    state = run_rounds(local_engine(with_devices(experiment, [tiny_device(1e30, bits_per_s=1.0)])))
    assert state.clock == pytest.approx(192 + 32 + 192)


def test_clients_train_what_is_alive_and_the_rest_keeps_the_servers_value() -> None:
    mine = replace(with_parts(ElementMask(mask=ALIVE)), terms=(StayZero(),))
    engine = local_engine(tiny_experiment(mine))
    state = engine.start()
    round = play_round(engine, state)
    assert torch.equal(round.vector[~ALIVE], state.vector[~ALIVE])
    assert not bool((round.vector[ALIVE] == state.vector[ALIVE]).any())
    for update in round.updates:
        assert update.vector is not None and not update.vector[~ALIVE].any() and bool(update.vector[ALIVE].all())


def test_masks_of_equal_content_have_one_key() -> None:
    assert ElementMask(mask=ALIVE).key() == ElementMask(mask=ALIVE.clone(), fresh=False).key()
    assert ElementMask(mask=ALIVE).key() != ElementMask(mask=~ALIVE).key()
