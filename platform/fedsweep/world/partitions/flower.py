"""The partitioners of the package flwr-datasets, for who wants a split that Flower's users know."""

from __future__ import annotations

import contextlib
import inspect
import io
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fedsweep.errors import ConfigError, DataError, ResourceError, unknown_name
from fedsweep.streams import Stream
from fedsweep.world.partitions.base import Partition, check_enough, without_empty
from fedsweep.world.partitions.draws import Indices


@dataclass(frozen=True, kw_only=True)
class FlowerDatasets(Partition):
    """A partitioner of the package flwr-datasets: pip install 'fedsweep[flwr]'.

    It gets the samples in a drawn order. ``num_partitions`` and ``seed`` are given to it where it takes them;
    ``partition_by`` is ``label``, and for the natural-id partitioners ``writer``, where it is not among the parameters.
    It may leave samples out.

    Attributes:
        partitioner: Its class, e.g. PathologicalPartitioner.
        parameters: What else its constructor takes.
    """

    source: ClassVar[str] = "Flower Labs, flwr-datasets"
    partitioner: str
    parameters: dict[str, Any] = field(default_factory=dict)

    def split(
        self, labels: Indices, num_clients: int, stream: Stream, *, num_classes: int, writers: Indices | None = None
    ) -> list[Indices]:
        check_enough(len(labels), num_clients, min_samples=1)
        try:
            from datasets import Dataset
            from flwr_datasets import partitioner as library
        except ImportError as error:
            raise ResourceError(
                f"partition 'flwr' needs the package flwr-datasets ({error}): pip install 'fedsweep[flwr]'"
            ) from None
        if self.partitioner not in library.__all__:
            raise ConfigError(
                f"scenario.partition.partitioner: {unknown_name('class', self.partitioner, library.__all__)}"
            )
        built = getattr(library, self.partitioner)
        by = "writer" if "NaturalId" in self.partitioner else "label"
        arguments = {"num_partitions": num_clients, "seed": stream.seed(32), "partition_by": by}
        arguments = {key: value for key, value in arguments.items() if key in inspect.signature(built).parameters}
        # In an order that is drawn, as Flower's FederatedDataset does: some partitioners cut what lies side by side.
        order = stream.child("order").numpy().permutation(len(labels))
        columns = {"index": order, "label": labels[order]}
        if writers is not None:
            columns["writer"] = writers[order]
        try:
            made = built(**{**arguments, **self.parameters})
            made.dataset = Dataset.from_dict(columns)
            # Some draw when they are first asked, so they are asked in order; and they write a progress bar.
            with contextlib.redirect_stderr(io.StringIO()):
                parts = [np.sort(np.asarray(made.load_partition(k)["index"], np.int64)) for k in range(num_clients)]
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise DataError(
                f"flwr-datasets' {self.partitioner} can't split {len(labels)} samples among {num_clients} clients"
                f" ({type(error).__name__}: {reason}); see scenario.partition.parameters"
            ) from error
        return without_empty(parts, "lower scenario.clients")
