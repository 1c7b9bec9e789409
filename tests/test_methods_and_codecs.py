"""Every method goes with every codec, either way, or is refused with the reason before anything is trained.

Where it goes, a forecast that says it is exact is so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
import torch
from each_method import KINDS

from fedsweep.algorithms.registry import METHODS
from fedsweep.components.codec import Communication
from fedsweep.components.compression.registry import CODECS
from fedsweep.engine.forecast import forecast
from fedsweep.errors import ConfigError
from fedsweep.experiment.checks import check_experiment
from fedsweep.records import RoundRecord
from fedsweep.testing import local_engine, run_rounds, subject_of

torch.set_num_threads(1)

# One that anything may go with, and the one that decodes sums.
USUAL = ("topk", "count_sketch")


def sent(records: Sequence[RoundRecord], *, up: bool) -> set[str]:
    """The kinds of what went one way."""
    kinds = set()
    for traffic in (record.traffic for record in records):
        assert traffic is not None
        kinds |= {traffic.names[kind] for kind in traffic.kinds[traffic.up == up].tolist()}
    return kinds


def check(method: str, way: str, codec: str, *, error_feedback: bool = False) -> None:
    world = subject_of(method).world(rounds=2)
    made = CODECS[codec](error_feedback=True) if error_feedback else CODECS[codec]()
    experiment = replace(world, communication=Communication(**{way: made}))
    try:
        check_experiment(experiment)
    except ConfigError as error:
        assert not error_feedback
        assert "\n" not in str(error) and str(error).startswith(("communication", f"method {method}"))
        assert any(out in str(error) for out in ("set communication.", "choose another", "leave one of them out"))
        return
    state = run_rounds(local_engine(experiment))
    assert state.round == 2 and bool(torch.isfinite(state.vector).all())
    expected = forecast(experiment)
    clients_flops = sum(record.flops - int(record.extra.get("server_flops", 0)) for record in state.records)
    spent = (state.total_bytes, state.clock, clients_flops)
    assert not expected.exact or (expected.total_bytes, expected.sim_time_s, expected.flops) == spent
    if codec == "none":
        return
    # Models go through it, or, where clients keep theirs, not at all.
    assert "params" not in sent(state.records, up=way == "up")


@pytest.mark.parametrize("method", KINDS)
def test_a_method_trains_with_a_codec_or_is_refused_in_one_line(method: str) -> None:
    for way, codec in (("up", "none"), *product(("up", "down"), USUAL)):
        check(method, way, codec)


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_what_adds_up_moves_trains_with_what_keeps_the_rest(method: str) -> None:
    check(method, "up", "topk", error_feedback=True)


@pytest.mark.parametrize("codec", ["int8", "randomk"])
def test_of_a_model_that_clients_keep_nothing_is_encoded(codec: str) -> None:
    check("local_only", "up", codec)


@pytest.mark.exhaustive
@pytest.mark.parametrize("method", METHODS)
def test_every_method_does_with_every_codec(method: str) -> None:
    for way, codec in product(("up", "down"), CODECS):
        check(method, way, codec)
