"""What clients remember is in memory once, however long ago the last checkpoint was."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

from torch import Tensor

from fedsweep.algorithms.scaffold import scaffold
from fedsweep.driver.session import RunSession, SessionSettings
from fedsweep.fleet.fleet import LocalFleet
from fedsweep.testing import tiny_experiment


def controls(session: RunSession) -> dict[int, Tensor]:
    assert session._state is not None
    return {client: own["terms"]["scaffold"]["1.weight"] for client, own in session._state.memories.items()}


def test_a_memory_that_a_checkpoint_has_goes_once_its_client_has_another(tmp_path: Path) -> None:
    work = tiny_experiment(scaffold(), rounds=4, cohort_size=3)
    settings = SessionSettings(folder=tmp_path, checkpoint_every=2, checkpoint_keep=1, facts={})
    session = RunSession(work, lambda warn: LocalFleet(work), settings)
    session.open(resume=False)
    session.step(), session.step()
    saved = {client: weakref.ref(control) for client, control in controls(session).items()}
    record = session.step().record
    gc.collect()
    gone = {client for client, control in saved.items() if control() is None}
    assert record is not None and gone and gone == saved.keys() & {*record.cohort}
