"""Tiny worlds and what every component and every method promises, for our tests and for contributors'.

These names stay when modules move.
"""

from fedsweep.testing.conformance import CHECKS, method_conforms
from fedsweep.testing.subject import Subject, golden_problem, subject_of
from fedsweep.testing.worlds import (
    AsIs,
    GivenParts,
    ModelFactory,
    build_model,
    component_conforms,
    linear_model,
    local_engine,
    play_round,
    run_rounds,
    tiny_data,
    tiny_device,
    tiny_experiment,
    tiny_pictures,
    tiny_record,
    with_devices,
    with_parts,
)

__all__ = [
    "CHECKS",
    "AsIs",
    "GivenParts",
    "ModelFactory",
    "Subject",
    "build_model",
    "component_conforms",
    "golden_problem",
    "linear_model",
    "local_engine",
    "method_conforms",
    "play_round",
    "run_rounds",
    "subject_of",
    "tiny_data",
    "tiny_device",
    "tiny_experiment",
    "tiny_pictures",
    "tiny_record",
    "with_devices",
    "with_parts",
]
