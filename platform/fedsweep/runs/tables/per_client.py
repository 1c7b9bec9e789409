"""Tables with rows for each client of each round.

``client_accuracy.parquet`` has how good the tested models are for each client, ``traffic.parquet`` who was sent and who
sent how much of what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedsweep.engine.cost import registration_sizes
from fedsweep.engine.per_client import client_accuracies, present_counts
from fedsweep.engine.state import RunState
from fedsweep.experiment.experiment import Experiment
from fedsweep.records import RoundRecord, Traffic
from fedsweep.runs.run_folder import CLIENT_ACCURACY, CLIENTS, TRAFFIC, RunFolder
from fedsweep.runs.tables.clients import clients_table
from fedsweep.submodel import Direction
from fedsweep.world.label_stats import label_counts
from fedsweep.world.topology import SERVER

if TYPE_CHECKING:
    import pyarrow as pa

REGISTRATION = "registration"
_PERSONAL = ("personal_accuracy", "personal_samples")


def write_client_tables(folder: RunFolder, experiment: Experiment, state: RunState) -> None:
    """Replace the tables that have rows for each client of each round; not as often as that of the rounds.

    All that is written follows from the state, so nothing is there twice after a resume.
    """
    world = experiment.world
    if world.is_drawn:
        profiles = [world.profiles[client] for client in participants(state.records)]
        folder.write_table(CLIENTS, clients_table(profiles))
    if (table := accuracy_table(experiment, state.records)) is not None:
        folder.write_table(CLIENT_ACCURACY, table)
    folder.write_table(TRAFFIC, traffic_table(experiment, state.setup_traffic, state.records))


def participants(records: Sequence[RoundRecord]) -> list[int]:
    """Return the clients that were chosen in some round, ascending."""
    return sorted({client for record in records for client in record.cohort})


def accuracy_table(experiment: Experiment, records: Sequence[RoundRecord]) -> pa.Table | None:
    """Return a row for each client in each round that tells how good its models are for it; None where no round does.

    ``accuracy``, or what else leads the task's figures, is the server's tested model's over ``samples`` of the test
    set: the client's own; or, where samples are not told apart by client, all of its classes, and it is the mean of
    their accuracies by their shares in its data. ``personal_accuracy`` is that of the model that the client itself
    would use, on the ``personal_samples`` of its own share of the test set. Both are null where there is no such test.
    """
    import pyarrow as pa

    rows = [r for r in records if (r.class_accuracies, r.client_scores, r.personal_accuracies) != (None, None, None)]
    if not rows:
        return None
    # Counts stand beside NaN in columns of floats: they are exact up to 2^53.
    cells = np.concatenate([_cells(experiment, row) for row in rows])
    figure, _ = experiment.world.data.learned.leading
    names = ("round", "client", figure, "samples", *_PERSONAL)
    kinds = [pa.float64() if name in (figure, _PERSONAL[0]) else pa.int64() for name in names]
    columns = [pa.array(cells[:, place], from_pandas=True).cast(kind) for place, kind in enumerate(kinds)]
    return pa.table(dict(zip(names, columns, strict=True)))


def _cells(experiment: Experiment, row: RoundRecord) -> np.ndarray:
    """Return a round's cells [N, columns], NaN for what is null."""
    world, classes = experiment.world, experiment.classes(row.round)
    num_classes = world.data.num_classes
    cells = np.full((len(world.profiles), 6), np.nan)
    cells[:, 0], cells[:, 1] = row.round, np.arange(len(cells))
    if row.client_scores is not None and (owners := experiment.test_owners(row.round)) is not None:
        cells[:, 2], cells[:, 3] = row.client_scores, np.bincount(owners[owners >= 0], minlength=len(cells))
    elif row.class_accuracies is not None:
        own_NC = present_counts(experiment.label_counts_NC, classes)
        tests_C = np.bincount(world.test_labels, minlength=num_classes)
        cells[:, 2] = client_accuracies(row.class_accuracies, own_NC)
        cells[:, 3] = np.where(own_NC > 0, tests_C, 0).sum(axis=1)
    if row.personal_accuracies is not None:
        shares_NC = label_counts(world.test_labels, experiment.test_shares, num_classes)
        cells[:, 4] = row.personal_accuracies
        cells[:, 5] = present_counts(shares_NC, classes).sum(axis=1)
    return cells


def traffic_table(experiment: Experiment, setup: Traffic | None, records: Sequence[RoundRecord]) -> pa.Table:
    """Return a row for each round, client, direction and kind: its bytes, and what the client did in the round.

    That are its local ``steps``, the sync points that it attended (``syncs``) and the multiply-accumulates of all its
    work (``macs``), the same in all of its rows. Who did something, but neither sent nor got anything, has a row of no
    bytes.

    Round 0 is what travels once: ``registration``, and what methods ask before round 1. Its bytes are
    ``registration_bytes`` of ``result.json``, those of other rounds ``bytes_up`` and ``bytes_down``. Where models meet
    at other hubs than the server, ``peer`` is the one at the other end: a client's id, -1 the server, -2, -3, ... edge
    servers, which stand under ``client`` where they talk with the server.
    """
    import pyarrow as pa

    everybody = participants(records) if experiment.world.is_drawn else range(len(experiment.world.profiles))
    parts = [(0, _registration(experiment, everybody)), *([(0, setup)] if setup is not None else [])]
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
            "syncs": np.concatenate([part.syncs.numpy() for _, part in parts]).astype(np.int64),
            "macs": np.concatenate([part.macs.numpy() for _, part in parts]),
            **_peers([part for _, part in parts]),
        }
    )


def _peers(parts: Sequence[Traffic]) -> dict[str, np.ndarray]:
    """Return the column of hubs at the other end; none where that is always the server."""
    if all(part.peers is None for part in parts):
        return {}
    rows = [np.full(len(part.clients), SERVER) if part.peers is None else part.peers.numpy() for part in parts]
    return {"peer": np.concatenate(rows).astype(np.int64)}


def _registration(experiment: Experiment, who: Sequence[int]) -> Traffic:
    """Return the traffic of clients when they register."""
    sizes = registration_sizes(experiment)
    ways: list[Direction] = [way for way in ("down", "up") if sizes[way]]
    clients = torch.tensor(who, dtype=torch.int32)
    entries = len(clients) * len(ways)
    return Traffic(
        clients=clients.repeat_interleave(len(ways)),
        up=torch.tensor([way == "up" for way in ways]).repeat(len(clients)),
        kinds=torch.zeros(entries, dtype=torch.int16),
        num_bytes=torch.tensor([sizes[way] for way in ways]).repeat(len(clients)),
        steps=torch.zeros(entries, dtype=torch.int32),
        syncs=torch.zeros(entries, dtype=torch.int32),
        macs=torch.zeros(entries, dtype=torch.int64),
        names=(REGISTRATION,),
    )
