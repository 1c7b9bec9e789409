"""FedAvg and FedSGD.

Source: McMahan, Moore, Ramage, Hampson, Aguera y Arcas (2017): Communication-efficient learning of deep networks
from decentralized data. AISTATS. Algorithm 1.
"""

from __future__ import annotations

from fedsweep import Card, FederatedMethod, MethodSettings, with_card

_SOURCE = "McMahan et al. (2017), Communication-efficient learning of deep networks from decentralized data"


@with_card(Card(golden=(4.945325, 6.263556716, 6.704010888)))
def fedavg() -> FederatedMethod:
    """Federated averaging: local passes over the data, then the mean weighted by samples."""
    return FederatedMethod(name="fedavg", source=_SOURCE)


@with_card(Card(golden=(2.75, 4.0625)))
def fedsgd() -> FederatedMethod:
    """One local step a round, whatever the training section says; the average of one-step models.

    Reading: the clients send models, not gradients. For plain SGD the two are the same; with momentum or Adam each
    client has its own state.
    """
    return FederatedMethod(name="fedsgd", source=_SOURCE, settings=MethodSettings(local_steps=1))
