"""ABAVG: a client's weight is its model's accuracy on the server's validation data.

Source: Xiao, Du, Duan, Guo (2021): A novel server-side aggregation strategy for federated learning in non-IID
situations. ISPDC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedsweep import Card, ConfigError, FederatedMethod, with_card
from fedsweep.components import ClientUpdate, ComponentReport, ServerContext, State, SyncContext, Weighting, by_samples

from .parts.ensembles import ensemble_logits


@dataclass(frozen=True, kw_only=True)
class ByAccuracy(Weighting):
    """``A_k / sum_j A_j`` with A_k the accuracy of client k's model; by samples where all are 0.

    Attributes:
        times_size: ``A_k n_k`` in place of ``A_k``.

    Source: DynaFed's program, which takes the last batch's accuracy alone; here it is that of all validation samples.
    Reading: the paper's own formula is not known to us, so its size factor is an option.
    """

    needs_updates: ClassVar[bool] = True
    times_size: bool = False

    @property
    def asks_models(self) -> bool:
        return True

    def init(self, context: ServerContext) -> State:
        """Return the state before any accuracy is measured.

        Raises:
            ConfigError: There is no validation data.
        """
        if context.validation_data is None or not len(context.validation_data[1]):
            raise ConfigError(
                "method abavg needs labelled validation data on the server, but the scenario has no sample of it; set"
                " scenario.server_data.validation=0.05, say, or a greater share"
            )
        return {"accuracies": None}

    def weigh(self, state: State, updates: Sequence[ClientUpdate], sync: SyncContext) -> tuple[Tensor, State]:
        assert sync.validation_data is not None
        inputs, targets = sync.validation_data
        hits = ensemble_logits(updates, sync, inputs).argmax(dim=2) == targets
        accuracies = hits.double().mean(dim=1)
        values = accuracies * torch.tensor([float(u.num_samples) for u in updates]) if self.times_size else accuracies
        total = values.sum()
        return (values / total if total > 0 else by_samples(updates)), {"accuracies": accuracies}

    def report(self, state: State) -> ComponentReport:
        if state["accuracies"] is None:
            return ComponentReport()
        low, high = float(state["accuracies"].min()), float(state["accuracies"].max())
        return ComponentReport(metrics={"abavg_accuracy_min": low, "abavg_accuracy_max": high})


@with_card(
    Card(
        title="ABAvg",
        source="Xiao et al., ISPDC 2021",
        needs=("validation", "classes"),
        live=("abavg_accuracy_max",),
    )
)
def abavg(*, times_size: bool = False) -> FederatedMethod:
    """FedAvg with weights by the accuracy of the clients' models on the server's validation data.

    Args:
        times_size: Weights by accuracy times samples.
    """
    return FederatedMethod(
        name="abavg",
        weighting=ByAccuracy(times_size=times_size),
    )
