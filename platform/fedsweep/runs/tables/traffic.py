"""``traffic.parquet``: who was sent and who sent how much of what, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedsweep.engine.cost import registration_sizes
from fedsweep.engine.state import RunState
from fedsweep.experiment.experiment import Experiment
from fedsweep.records import RoundRecord, Traffic
from fedsweep.runs.run_folder import CLIENT_ACCURACY, TRAFFIC, RunFolder
from fedsweep.runs.tables.client_accuracy import accuracy_table
from fedsweep.submodel import Direction

if TYPE_CHECKING:
    import pyarrow as pa

REGISTRATION = "registration"


def write_client_tables(folder: RunFolder, experiment: Experiment, state: RunState) -> None:
    """Replaces the tables that have rows for each client of each round; not as often as that of the rounds.

    Args:
        folder: The run's.
        experiment: Whose clients they are.
        state: The run; all that is written follows from it, so nothing is there twice after a resume.
    """
    if (table := accuracy_table(experiment, state.records)) is not None:
        folder.write_table(CLIENT_ACCURACY, table)
    folder.write_table(TRAFFIC, traffic_table(experiment, state.setup_traffic, state.records))


def traffic_table(experiment: Experiment, setup: Traffic | None, records: Sequence[RoundRecord]) -> pa.Table:
    """A row for each round, client, direction and kind: its bytes, and the client's local steps of the round.

    Round 0 is what travels once: ``registration``, and what methods ask before round 1. Its bytes are
    ``registration_bytes`` of ``result.json``, those of other rounds ``bytes_up`` and ``bytes_down``.

    Args:
        experiment: Whose clients they are.
        setup: The exchange before round 1; None: not known.
        records: The rounds; those of an older version have no rows.
    """
    import pyarrow as pa

    parts = [(0, _registration(experiment)), *([(0, setup)] if setup is not None else [])]
    parts += [(record.round, record.traffic) for record in records if record.traffic is not None]
    names = sorted({name for _, part in parts for name in part.names})
    places = {name: place for place, name in enumerate(names)}
    kinds = [np.array([places[name] for name in part.names], np.int32)[part.kinds.numpy()] for _, part in parts]
    ups = np.concatenate([part.up.numpy() for _, part in parts]).astype(np.int32)
    return pa.table(
        {
            "round": np.concatenate([np.full(len(part.clients), round, np.int64) for round, part in parts]),
            "client": np.concatenate([part.clients.numpy() for _, part in parts]).astype(np.int64),
            "direction": pa.DictionaryArray.from_arrays(ups, pa.array(["down", "up"])).cast(pa.string()),
            "kind": pa.DictionaryArray.from_arrays(np.concatenate(kinds), pa.array(names)).cast(pa.string()),
            "bytes": np.concatenate([part.num_bytes.numpy() for _, part in parts]),
            "steps": np.concatenate([part.steps.numpy() for _, part in parts]).astype(np.int64),
        }
    )


def _registration(experiment: Experiment) -> Traffic:
    """What each client sends and gets when it registers."""
    sizes = registration_sizes(experiment)
    ways: list[Direction] = [way for way in ("down", "up") if sizes[way]]
    clients = torch.tensor([profile.client for profile in experiment.world.profiles], dtype=torch.int32)
    entries = len(clients) * len(ways)
    return Traffic(
        clients=clients.repeat_interleave(len(ways)),
        up=torch.tensor([way == "up" for way in ways]).repeat(len(clients)),
        kinds=torch.zeros(entries, dtype=torch.int16),
        num_bytes=torch.tensor([sizes[way] for way in ways]).repeat(len(clients)),
        steps=torch.zeros(entries, dtype=torch.int32),
        names=(REGISTRATION,),
    )
